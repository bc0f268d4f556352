"""`practicum plan`: make the cost plan of a recipe and print it as text."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from practicum.cli._output import show_waiting
from practicum.costs import PHASES, format_bytes, format_count, format_flops
from practicum.errors import RecipeError
from practicum.runs.plan import describe_plan, plan
from practicum.runs.plan.cluster import (
    SITE_GBIT,
    describe_clusters,
    describe_sites,
    parse_cluster,
    parse_gpu,
)
from practicum.runs.plan.memory import parse_bytes
from practicum.runs.stages import Pipeline, load_pipeline_or_recipe
from practicum.text import make_printable

SINGLE_ANSWERS = (
    "rollout.n=1 with more prompts learned more per token in the study of docs/scaling-law.md"
)


def build_plan(
    recipe: str,
    overrides: Sequence[str],
    memory: str | None,
    answer_tokens: int | None,
    calibrate: bool,
    cluster: Sequence[str] = (),
    gpu: str | None = None,
) -> dict[str, Any]:
    """Return the plan as JSON data, for a `gpu` and also for clusters such as `64xh100`.

    Raises RecipeError for a pipeline.
    """
    limit = None if memory is None else parse_bytes(memory)
    card = None if gpu is None else parse_gpu(gpu)
    parsed = [parse_cluster(text) for text in cluster]
    loaded = load_pipeline_or_recipe(recipe, list(overrides))
    if isinstance(loaded, Pipeline):
        raise RecipeError(
            f"{recipe}: a pipeline; plan the recipe of one stage, "
            "for a stage's teachers may not be there yet"
        )
    with show_waiting():
        # For a cluster, advice on shrinking the recipe for this machine is not needed.
        cost_plan = plan(
            loaded,
            limit=limit,
            answer_tokens=answer_tokens,
            calibrate=calibrate,
            for_cluster=bool(parsed),
            gpu=card,
        )
        described = describe_plan(cost_plan)
        if parsed:
            described["clusters"] = describe_clusters(cost_plan.run, parsed)
            described["sites"] = describe_sites(cost_plan.run)
        return described


def format_plan(plan_json: Mapping[str, Any]) -> list[str]:
    """Return the plan as lines of text."""
    return [
        *_format_models(plan_json),
        "",
        *_format_step(plan_json),
        "",
        *_format_memory(plan_json["memory"], suggests="clusters" not in plan_json),
        "",
        *_format_methods(plan_json["methods"], plan_json["break_even"]),
        *([SINGLE_ANSWERS] if plan_json["repeats_prompts"] else []),
        *_format_wire(plan_json["wire_bytes"]),
        *chain.from_iterable(map(_format_cluster, plan_json.get("clusters", ()))),
        *_format_sites(plan_json.get("sites", {})),
    ]


def _format_models(plan_json: Mapping[str, Any]) -> list[str]:
    recipe, answer_tokens = make_printable(plan_json["recipe"]), plan_json["answer_tokens"]
    lines = [f"plan of {recipe}, answers of {answer_tokens} tokens"]
    for name, model in plan_json["models"].items():
        learns = f", {format_count(model['learns'])} learn" if "learns" in model else ""
        lines.append(
            f"{make_printable(name)}: {format_count(model['parameters'])} parameters "
            f"({model['layers']} layers of width {model['width']}, {model['vocabulary']:,} tokens)"
            f"{learns}"
        )
    return lines


def _format_step(plan_json: Mapping[str, Any]) -> list[str]:
    cost, seconds = plan_json["step"]["cost"], plan_json["step"]["seconds"]
    head = ["a step", "tokens", "prompt tokens", "operations", "share", "seconds"]
    rows = [
        [
            phase,
            f"{cost[phase]['tokens']:,.0f}",
            f"{cost[phase]['prompt_tokens']:,.0f}" if "prompt_tokens" in cost[phase] else "",
            format_flops(cost[phase]["flops"]),
            f"{cost[phase]['flops'] / max(cost['flops'], 1.0):.0%}",
            "" if seconds is None else f"{seconds[phase]:.2f}",
        ]
        for phase in PHASES
    ]
    run = plan_json["run"]
    total = f"{run['steps']} steps: {format_flops(run['cost']['flops'])}"
    total += (
        "; seconds are not known without --calibrate"
        if run["seconds"] is None
        else f", about {run['seconds']:.0f} s, evaluations not counted"
    )
    if run["money"]:
        total += f"; {sum(run['money'].values()):.4g} {make_printable(run['currency'])}"
    return [*_format_table(head, rows), total]


def _format_memory(memory: Mapping[str, Any], *, suggests: bool) -> list[str]:
    rows = []
    for phase, items in memory["phases"].items():
        largest = sorted(items.items(), key=lambda item: -item[1])[:4]
        rows.append(
            [
                phase,
                format_bytes(sum(items.values())),
                ", ".join(f"{name} {format_bytes(size)}" for name, size in largest),
            ]
        )
    fits = "it fits" if memory["fits"] else "it does not fit"
    place = f"on one {make_printable(memory['gpu'])}" if memory["gpu"] else "here"
    recompute = ", layers recomputed" if memory["recompute"] else ""
    lines = [
        *_format_table(["memory", "peak", "most of it"], rows),
        f"peak {format_bytes(memory['peak'])} of {format_bytes(memory['limit'])} {place}: {fits}",
        f"{memory['micro_batch']:,} tokens go through the student together{recompute}; "
        f"{memory['largest_micro_batch']:,} would fit",
    ]
    if suggests and not memory["fits"]:
        overrides = " ".join(
            f"'{text}'" if " " in text else text for text in memory["change"] or ()
        )
        lines.append(
            f"changes that make it fit: {overrides}"
            if overrides
            else "no known change makes it fit; use a smaller model"
        )
    return lines


def _format_methods(methods: Sequence[Mapping[str, Any]], break_even: float | None) -> list[str]:
    sft_flops = methods[0]["flops"]
    rows = [
        [
            row["method"],
            *(format_flops(row[name]) for name in ("generate", "score", "update", "flops")),
            f"{row['flops'] / sft_flops:.1f}",
        ]
        for row in methods
    ]
    head = ["the same prompts as", "generate", "score", "update", "a step", "of SFT"]
    lines = _format_table(head, rows)
    if break_even is not None:
        lines.append(f"one distilled answer costs as much as {break_even:.1f} answers of GRPO")
    return lines


def _format_wire(wire_bytes: Mapping[str, Mapping[str, int]]) -> list[str]:
    if not wire_bytes:
        return []
    signals = list(next(iter(wire_bytes.values())))
    rows = [
        [make_printable(name), *(format_bytes(sizes[signal]) for signal in signals)]
        for name, sizes in wire_bytes.items()
    ]
    return ["", *_format_table(["bytes per step if the teacher were remote", *signals], rows)]


def _format_cluster(cluster: Mapping[str, Any]) -> list[str]:
    """Return the lines of one cluster: the smallest fast split and the fastest, or why no split fits."""
    title = f"{cluster['gpus']} {cluster['gpu']} in nodes of {cluster['per_node']}"
    if cluster["refused"]:
        return ["", f"{title}: it does not fit: {cluster['refused']}"]
    forecasts = [("", forecast) for forecast in cluster["splits"]]
    if cluster["scaled"]:
        scaled = cluster["scaled"]
        forecasts.append((f"prompts x {scaled['factor']:.4g}", scaled))
    first = cluster["splits"][0]
    head = [title, *first["seconds"], "per step", "tokens/s", *first["memory"]]
    rows = [
        [
            " ".join(filter(None, (_format_split(forecast), note))),
            *(f"{seconds:.3g} s" for seconds in forecast["seconds"].values()),
            f"{forecast['step_seconds']:.3g} s",
            f"{forecast['tokens_per_second']:,.0f}",
            *(format_bytes(size) for size in forecast["memory"].values()),
        ]
        for note, forecast in forecasts
    ]
    links = first["links"].items()
    crossing = ", ".join(f"{name} {format_bytes(size)}" for name, size in links if size)
    idle = [f"{pool}s" for pool, share in first["busy"].items() if share < 0.5]
    advice = "raise train.prompts_per_step or rollout.max_staleness"
    return [
        "",
        *_format_table(head, rows),
        f"the first split takes {cluster['used']} of {cluster['gpus']} GPUs and at most 3 % more time than the "
        f"fastest; busy: {', '.join(f'{pool}s {share:.0%}' for pool, share in first['busy'].items())}",
        *(
            [f"warning: {' and '.join(idle)} are idle for more than half of the step; {advice}"]
            if idle
            else []
        ),
        f"bytes per step with the first split: {crossing}",
        *(f"{make_printable(name)} learns on a separate GPU" for name in cluster["learners"]),
        f"to run it: backend='{{type: ray, {_format_split(first)}}}'",
    ]


def _format_split(forecast: Mapping[str, Any]) -> str:
    """Return a split as settings of the backend."""
    split = forecast["split"]
    nodes = split["trainers"] // forecast["shards"]
    shards = split["teacher_shards"]
    numbers = {**split, "teacher_shards": shards if shards > 1 else 0}
    numbers["nodes"] = nodes if nodes > 1 else 0
    return ", ".join(f"{name}: {number}" for name, number in numbers.items() if number)


def _format_sites(sites: Mapping[str, Mapping[str, float]]) -> list[str]:
    if not sites:
        return []
    head = [f"a step between two sites at {SITE_GBIT:g} Gbit/s", "bytes", "seconds"]
    rows = [
        [name, format_bytes(link["bytes"]), f"{link['seconds']:.3g}"]
        for name, link in sites.items()
    ]
    return ["", *_format_table(head, rows)]


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
