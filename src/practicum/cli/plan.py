"""`practicum plan`: the plan of a recipe, for people and for programs."""

from collections.abc import Mapping, Sequence
from typing import Any

from practicum.cli._remarks import remark
from practicum.core.notes import show_notes
from practicum.costs import PHASES
from practicum.errors import RecipeError
from practicum.report.tables import shown_bytes
from practicum.runs.pipeline import Pipeline, load_pipeline_or_recipe
from practicum.studies.plan import plan, plan_data
from practicum.studies.plan.memory import parse_bytes
from practicum.text import make_printable


def make_plan(
    recipe: str,
    overrides: Sequence[str],
    memory: str | None,
    answer_tokens: int | None,
    calibrate: bool,
) -> dict[str, Any]:
    """The plan's data; RecipeError for a pipeline, whose stages are planned one by one."""
    limit = None if memory is None else parse_bytes(memory)
    found = load_pipeline_or_recipe(recipe, list(overrides))
    if isinstance(found, Pipeline):
        raise RecipeError(
            f"{recipe}: a pipeline; plan the recipe of one stage, for a stage's teachers may not be there yet"
        )
    with show_notes(remark):
        return plan_data(plan(found, limit=limit, answer_tokens=answer_tokens, calibrate=calibrate))


def lines(data: Mapping[str, Any]) -> list[str]:
    """The plan as a person reads it."""
    return [*_models(data), "", *_step(data), "", *_memory(data), "", *_methods(data), *_wire(data)]


def _models(data: Mapping[str, Any]) -> list[str]:
    shown = [f"plan of {make_printable(data['recipe'])}, answers of {data['answer_tokens']} tokens"]
    for name, model in data["models"].items():
        learns = f", {_number(model['learns'])} learn" if "learns" in model else ""
        shown.append(
            f"{make_printable(name)}: {_number(model['parameters'])} parameters ({model['layers']} layers of width "
            f"{model['width']}, {model['vocabulary']:,} tokens){learns}"
        )
    return shown


def _step(data: Mapping[str, Any]) -> list[str]:
    cost, seconds = data["step"]["cost"], data["step"]["seconds"]
    head = ["a step", "tokens", "prompt tokens", "FLOPs", "share", "seconds"]
    rows = [
        [
            phase,
            f"{cost[phase]['tokens']:,.0f}",
            f"{cost[phase]['prompt_tokens']:,.0f}" if "prompt_tokens" in cost[phase] else "",
            _number(cost[phase]["flops"]),
            f"{cost[phase]['flops'] / max(cost['flops'], 1.0):.0%}",
            "" if seconds is None else f"{seconds[phase]:.2f}",
        ]
        for phase in PHASES
    ]
    whole = data["run"]
    total = f"{whole['steps']} steps: {_number(whole['cost']['flops'])} FLOPs"
    total += (
        "; seconds are not known without --calibrate"
        if whole["seconds"] is None
        else f", about {whole['seconds']:.0f} s, evaluations not counted"
    )
    if whole["money"]:
        total += f"; {sum(whole['money'].values()):.4g} at the given prices"
    return [*_table(head, rows), total]


def _memory(data: Mapping[str, Any]) -> list[str]:
    memory = data["memory"]
    rows = []
    for phase, items in memory["phases"].items():
        largest = sorted(items.items(), key=lambda item: -item[1])[:4]
        rows.append(
            [
                phase,
                shown_bytes(sum(items.values())),
                ", ".join(f"{name} {shown_bytes(size)}" for name, size in largest),
            ]
        )
    fits = "it fits" if memory["fits"] else "it does not fit"
    shown = [
        *_table(["memory", "peak", "most of it"], rows),
        f"peak {shown_bytes(memory['peak'])} of {shown_bytes(memory['limit'])}: {fits}",
        f"{memory['micro_batch']:,} tokens go through the student together{', layers recomputed' if memory['recompute'] else ''}; "
        f"{memory['largest_micro_batch']:,} would fit",
    ]
    if not memory["fits"]:
        change = memory["change"]
        said = " ".join(f"'{text}'" if " " in text else text for text in change or ())
        shown.append(
            f"what makes it fit: {said}"
            if change
            else "no change known here makes it fit; take a smaller model"
        )
    return shown


def _methods(data: Mapping[str, Any]) -> list[str]:
    cheapest = next(row["flops"] for row in data["methods"])
    rows = [
        [
            row["method"],
            *(_number(row[name]) for name in ("generate", "score", "update", "flops")),
            f"{row['flops'] / cheapest:.1f}",
        ]
        for row in data["methods"]
    ]
    shown = _table(
        ["the same prompts as", "generate", "score", "update", "FLOPs a step", "of SFT"], rows
    )
    if data["break_even"] is not None:
        shown.append(
            f"one distilled answer costs as much as {data['break_even']:.1f} answers of GRPO"
        )
    return shown


def _wire(data: Mapping[str, Any]) -> list[str]:
    if not data["wire_bytes"]:
        return []
    forms = list(next(iter(data["wire_bytes"].values())))
    rows = [
        [make_printable(name), *(shown_bytes(sizes[form]) for form in forms)]
        for name, sizes in data["wire_bytes"].items()
    ]
    return ["", *_table(["bytes a step, were it remote", *forms], rows)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]


def _number(value: float | int) -> str:
    """`1.79 G`, with three digits."""
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"
