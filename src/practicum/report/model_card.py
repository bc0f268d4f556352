"""The model card of an export: README.md with the hub's header, and facts from the run's files."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from practicum.costs.amounts import format_flops
from practicum.recipe import Recipe, resolve_recipe
from practicum.recipe.methods import describe_method
from practicum.report.outcome_verdict import format_reasons
from practicum.run_dir import Checkpoint
from practicum.statistics import Interval
from practicum.text import make_printable

PRIVATE_KEYS = ("base_dir", "url")
"""The keys of a recipe that say where something lies on its author's machines."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts of a model card: a run, its checkpoint, its results, and the kind of export."""

    recipe: Recipe
    checkpoint: Checkpoint
    summary: Mapping[str, Any] | None
    """The content of summary.json; None: the run has not finished."""
    is_adapter: bool
    has_template: bool
    """True if the exported tokenizer has a chat template."""


def build_card(facts: CardFacts) -> str:
    """Return the text of README.md: the header of the hub, results, recipe, and how to prompt."""
    recipe = facts.recipe
    sections = {
        "Results": _describe_results(facts),
        "Prompting": _describe_prompting(facts),
        "Recipe": [_indent(yaml.safe_dump(_hide_places(resolve_recipe(recipe)), sort_keys=False))],
        "Versions": [
            ", ".join(f"{name} {version}" for name, version in facts.checkpoint.versions.items())
        ],
    }
    kind = "A LoRA adapter" if facts.is_adapter else "A model"
    if facts.is_adapter and recipe.student.quantization is not None:
        kind += f" of a base in {recipe.student.quantization}"
    about = f": {make_printable(recipe.about)}" if recipe.about else ""
    lines = [
        f"---\n{_build_header(facts)}---",
        f"# {recipe.name}",
        f"{kind} trained with practicum{about}.",
        f"Method: {make_printable(describe_method(recipe))}.",
    ]
    for title, paragraphs in sections.items():
        lines += [f"## {title}", *paragraphs]
    return "\n\n".join(lines) + "\n"


def _build_header(facts: CardFacts) -> str:
    """Return the YAML of the hub: the base model if the hub has it, the library, and tags."""
    # Imported here: the hub's client is slow to import, and other pages do not need it.
    from huggingface_hub import ModelCardData

    base = facts.recipe.student.model
    is_hub_name = (
        isinstance(base, str) and base.count("/") == 1 and not Path(base).expanduser().exists()
    )
    uses_teacher = facts.recipe.teacher.type != "none"
    header = ModelCardData(
        base_model=base if is_hub_name and isinstance(base, str) else None,
        library_name="peft" if facts.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["practicum", *(["distillation"] if uses_teacher else [])],
    )
    return f"{header.to_yaml()}\n"


def _describe_results(facts: CardFacts) -> list[str]:
    """Return what the summary says of accuracy, gain and cost; nothing that was not measured."""
    summary, recipe = facts.summary, facts.recipe
    if summary is None:
        return [
            f"Exported from step {facts.checkpoint.step} of {recipe.train.steps} of a run that had "
            "not finished, so nothing has been measured."
        ]
    table = [f"Step {summary['steps']}, one seed ({summary['seed']})."]
    rows = [
        f"| {name} | {Interval(**summary[name]['accuracy'])} |"
        for name in ("before", "after", "teacher")
        if summary[name] and summary[name]["accuracy"]
    ]
    if rows:
        prompts = summary["after" if summary["after"] else "before"]["prompts"]
        heading = ["| | accuracy with its 95 % interval |", "| --- | --- |"]
        table.append(
            f"Task `{recipe.task.type}`, {prompts} held-out prompts:\n\n"
            + "\n".join([*heading, *rows])
        )
    else:
        table.append("Accuracy on held-out prompts was not measured.")
    table.append(f"Verdict against the base model: {format_reasons(summary['verdict'])}.")
    flops = summary["cost"]["flops"]
    trained = f"{summary['rollouts']} completions, {summary['tokens']} tokens trained on"
    table.append(f"Cost: {trained}" + (f", {format_flops(flops)}." if flops else "."))
    return table


def _describe_prompting(facts: CardFacts) -> list[str]:
    """Describe the exported chat template, and the settings of the recipe that it does not include."""
    student = facts.recipe.student
    if student.template is not None:
        lines = ["The recipe sets the tokenizer's chat template (`template`)."]
    elif facts.has_template:
        lines = ["The tokenizer's chat template is the base model's own, unchanged."]
    else:
        lines = ["The tokenizer has no chat template."]
    if student.system is not None:
        turn = "no system turn" if student.system == "" else "the system turn in the recipe below"
        lines.append(
            f"In training, prompts without a system turn got {turn}; the template does not do that."
        )
    if student.thinking is not None:
        lines.append(f"Trained with `enable_thinking={student.thinking}`; pass it to the template.")
    if student.stop:
        names = ", ".join(f"`{make_printable(name)}`" for name in student.stop)
        lines.append(
            f"In training, answers also ended at {names}, which the generation settings do not name."
        )
    return lines


def _hide_places(entry: Any) -> Any:
    """Return a recipe's set entries without addresses, and only the last part of absolute paths."""
    if isinstance(entry, Mapping):
        return {
            key: _hide_places(item)
            for key, item in entry.items()
            if key not in PRIVATE_KEYS and item not in (None, "", [], {})
        }
    if isinstance(entry, list):
        return [_hide_places(item) for item in entry]
    return Path(entry).name if isinstance(entry, str) and Path(entry).is_absolute() else entry


def _indent(text: str) -> str:
    # Indent instead of fencing: a text of the recipe may contain a fence, which would end the block.
    return textwrap.indent(text, "    ")
