"""The generated parts of docs/field.md, and the page of each method in docs/methods: its axes, its claim, the source
of its formula, and the results measured here.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.papers import fingerprint, read_lines
from practicum.recipe import (
    FAMILIES,
    Recipe,
    build_control,
    find_recipe,
    list_recipe_names,
    load_recipe,
    read_recipe,
)
from practicum.recipe.methods import describe_axes
from practicum.statistics import contains_zero, holm, t_interval, t_test

PAPERS = [name for name in list_recipe_names() if name.startswith("papers/")]
TEAMS = [name for name in list_recipe_names() if name.startswith("teams/")]
PIPELINES = [
    name for name in list_recipe_names() if name.startswith(("pipelines/", "served/", "teams/"))
]

PARTS = json.loads(
    (Path(__file__).resolve().parents[1] / "results" / "parts.json").read_text(encoding="utf-8")
)
"""The parts of each recipe, and what noticed their absence (tests/papers/parts.py)."""

ORDER = list(FAMILIES)
"""The families in the order of the page."""

FORMULA = {
    "paper": "the paper",
    "code": "its code",
    "second_hand": "second hand",
    "ours": "ours",
}
"""The source of a recipe's loss, in the wording of the page."""

NUMBER = r"(?<![\w.@'-])\d[\d,]*(?:\.\d+)?(?![\w.]|-\w)"
"""A number by itself, so no part of a name such as Qwen2.5-7B."""

RESULT = re.compile(
    r"(?:(?:[A-Z]{2}\S*|\w+@\d+|[A-Z]\S* v\d) (?:(?:rises (?:from|by)|up by|at) )?|\w+ up by )?"
    rf"(?P<numbers>(?<! of ){NUMBER}"
    rf"(?:(?:,| to| and| against| instead of| where \w+ reaches) {NUMBER})*)"
    r"(?P<unit> (?:points|per ?cent|%|times|BLEU|of \d+ \w+ \w+|pass@1)"
    r"(?: better| faster| more| (?:fewer|less) [a-z-]+(?: tokens| operations)?)?)?"
    r"(?P<place> (?:on|over) (?:[A-Z]\S+(?: \d{4}| v\d)?|\w+ (?:\w+ )?benchmarks))?"
)
"""Numbers with their unit and benchmark. A number after "of" is a setting, as in "k of 2"."""

AXES = {
    "source": "states from",
    "teacher": "signal from",
    "divergence": "what divergence",
    "weights of tokens": "how much",
}
"""The first axis of each question, with the question."""


@cache
def _recipe(name: str) -> Recipe:
    """Return a recipe of the package; it is read once for all lines of the page."""
    return load_recipe(name)


def rows() -> list[list[str]]:
    """Return one row per paper recipe, by family: what it does, its paper, and the measured gain."""
    found = []
    family = ""
    for name in sorted(PAPERS, key=lambda name: ORDER.index(_recipe(name).family)):
        recipe, line = _recipe(name), _line(name)
        if recipe.family != family:
            family = recipe.family
            found.append([f"**{family}**", "", "", "", "", "", ""])
        gain = _gain(line).partition(" (")[0] if line else ""
        about = recipe.about + (" (reduced)" if recipe.reduced else "")
        origin = [source(recipe.paper or ""), _hyphenate(recipe.formula), count_parts(name)]
        found.append([_link(name), about, *origin, gain, quote_result(recipe.claim)])
    return found


def pipelines() -> list[list[str]]:
    """Return one row per pipeline of a publication: its paper, its stages, and the result that the paper gives."""
    found = []
    for name in PIPELINES:
        data = read_recipe(find_recipe(name))
        if "paper" in data:
            stages = str(len(data.get("stages", [name])))
            origin = [source(data["paper"]), stages, _hyphenate(data["formula"])]
            about = f"`{name}`" + (" (reduced)" if "reduced" in data else "")
            found.append([about, *origin, count_parts(name), quote_result(data["claim"])])
    return found


def quote_result(claim: str) -> str:
    """Return the first result in a claim, outside parentheses: its numbers, their unit, and the benchmark."""
    text = re.sub(r" \([^)]*\)", "", " ".join(claim.split()))
    for match in RESULT.finditer(text):
        has_range = " to " in match["numbers"] and match["place"]
        if match["unit"] or "." in match["numbers"] or has_range:
            return match[0].rstrip(",;")
    return "none"


def _hyphenate(formula: str) -> str:
    return formula.replace("_", "-")


def count_parts(name: str) -> str:
    """Count the parts that the formula's test, a reading of a run and the check of the recipe miss."""
    witnesses = list(PARTS[name]["parts"].values())
    counts = Counter(
        witness if witness in ("", "formula", "refused") else "reading" for witness in witnesses
    )
    return "/".join(str(counts[kind]) for kind in ("formula", "reading", "refused"))


def families() -> list[list[str]]:
    """Return one row per family: its signal, its recipes, and what the teacher adds where a control shows it."""
    found = []
    for family, words in FAMILIES.items():
        recipes = [recipe for name in PAPERS if (recipe := _recipe(name)).family == family]
        if recipes:
            effects = [recipe.teacher_effect for recipe in recipes]
            counts = [effects.count(effect) for effect in ("helps", "not_shown", "harms")]
            reduced = sum(recipe.reduced is not None for recipe in recipes)
            found.append([family, words, *map(str, (len(recipes), reduced, *counts))])
    return found


def axes() -> list[list[str]]:
    """Return one row per axis of a method: its choices with the number of recipes, and the names of few."""
    users: dict[str, dict[str, dict[str, None]]] = {}
    for name in PAPERS:
        recipe = _recipe(name)
        choices = {"source": [recipe.rollout.source.name], "teacher": [recipe.teacher.type]}
        terms = recipe.objective.losses
        choices["signal"] = [term.signal.name for term in terms]
        choices["divergence"] = [term.divergence.name for term in terms if term.needs_signal]
        choices["target"] = [term.target.name for term in terms if term.needs_signal]
        choices["weights of tokens"] = [_shorten_name(term.weights.name) for term in terms]
        choices["weights of answers"] = [term.samples.name for term in terms]
        choices["correction"] = [term.correction.name for term in terms]
        choices["reward"] = [_shorten_name(term.reward.name) for term in terms]
        for axis, values in choices.items():
            for value in values:
                users.setdefault(axis, {}).setdefault(value, {})[name] = None
    return [[AXES.get(axis, ""), axis, _list_choices(by_value)] for axis, by_value in users.items()]


def _shorten_name(name: str) -> str:
    """Return the name of a function without its module."""
    return name.rpartition(":")[2]


def _list_choices(users: Mapping[str, Collection[str]]) -> str:
    ordered = sorted(users.items(), key=lambda entry: -len(entry[1]))
    return ", ".join(
        f"`{value}` {len(names)}"
        if len(names) > 2
        else f"`{value}` ({', '.join(map(short, names))})"
        for value, names in ordered
        if value != "none"
    )


def _link(name: str) -> str:
    return f"[{short(name)}](methods/{short(name)}.md)"


def teams() -> list[list[str]]:
    """Return one row per pipeline of a reported model: what is missing, and the differences."""
    found = []
    for name in TEAMS:
        data = read_recipe(find_recipe(name))
        missing = " ".join(_plain(data[key]) for key in ("reduced", "differs") if key in data)
        found.append([f"`{name}`", missing])
    return found


def short(name: str) -> str:
    """Return the recipe's name as a heading."""
    return name.removeprefix("papers/")


def source(paper: str) -> str:
    """Return a link to the description of the method."""
    if "://" in paper:
        return f"[{paper.split('/')[2].removeprefix('www.')}]({paper})"
    return ", ".join(
        f"[{number}](https://arxiv.org/abs/{number})" for number in paper.split(", ") if number
    )


def measured(name: str) -> str:
    """Describe the stored result of the current recipe; empty if it was not measured since it changed."""
    line = _line(name)
    if line is None:
        return ""
    words = [
        f"accuracy {line['accuracy_before']:.2f} to {line['accuracy_after']:.2f}",
        f"gain {_gain(line)}",
    ]
    if "tokens_per_call_after" in line:
        calls = [f"{line[f'tokens_per_call_{when}']:.2f}" for when in ("before", "after")]
        words.insert(0, f"tokens per target call {' to '.join(calls)}")
    # A teacher that shows results of earlier steps gives no signal before the first step.
    divergences = [line["reverse_kl_before"], line["reverse_kl_after"]]
    shown = [f"{divergence:.2f}" for divergence in divergences if divergence is not None]
    if shown:
        words.append(f"reverse KL {' to '.join(shown)}")
    control = _control_line(name)
    words += [f"teacher off: gain {_gain(control)}; {adds(line, control)}"] if control else []
    return "; ".join(words)


def controls() -> list[list[str]]:
    """Return one row per recipe with a reward and a teacher: the control's signal, both gains, and their difference."""
    found = []
    for name in PAPERS:
        control = build_control(_recipe(name))
        if control is None:
            continue
        line, off = _line(name), _control_line(name)
        gains = [
            _range(line) if line else "",
            _range(off) if off else "",
            adds(line, off) if line and off else "",
        ]
        found.append([_link(name), f"`{describe_axes(control)['loss']}`", *gains])
    return found


def measure_effects() -> dict[str, list[float]]:
    """Return the differences of the gain with and without the teacher, over seeds, of each recipe with a control."""
    return {
        name: [one - other for one, other in zip(_gains(line), _gains(control), strict=True)]
        for name in PAPERS
        if (line := _line(name)) and (control := _control_line(name))
    }


def name_effect(differences: list[float]) -> str:
    """Return the value of a recipe's `teacher_effect`."""
    found = t_interval(differences)
    if found is None or contains_zero(found):
        return "not_shown"
    return "helps" if found.mean > 0 else "harms"


def count_controls() -> str:
    """Count the recipes in which the teacher adds to the gain, costs, or makes no resolved difference."""
    effects = measure_effects()
    names = [name_effect(differences) for differences in effects.values()]
    p_values = [p for differences in effects.values() if (p := t_test(differences)) is not None]
    corrected = sum(p < 0.05 for p in holm(p_values))
    return (
        f"Of {len(names)} recipes with a control, the teacher adds in {names.count('helps')}, costs in "
        f"{names.count('harms')}, and makes no resolved difference in {names.count('not_shown')}. "
        f"{corrected} differences have p < 0.05 after Holm's correction for their number. "
        "`practicum ls recipes` shows the result next to each of these recipes."
    )


def _gain(line: dict[str, Any]) -> str:
    return _range(line, f", {len(_gains(line))} seeds")


def _range(line: dict[str, Any], seeds: str = "") -> str:
    gains = _gains(line)
    assert seeds or len(gains) == 3, "the head of the table of controls says three seeds"
    return f"{sum(gains) / len(gains):+.2f} ({min(gains):+.2f} to {max(gains):+.2f}{seeds})"


def _gains(line: dict[str, Any]) -> list[float]:
    return [mean for _, mean, _ in line["gains"]]


def adds(line: dict[str, Any], control: dict[str, Any]) -> str:
    """Describe what the teacher adds to the gain, paired over seeds, or that the seeds do not resolve it."""
    pairs = zip(_gains(line), _gains(control), strict=True)
    found = t_interval([with_teacher - without for with_teacher, without in pairs])
    if found is None:
        return "one seed does not show what the teacher adds"
    if not contains_zero(found) and found.mean < 0:
        return f"the teacher costs {-found.mean:.2f} [{-found.high:.2f}, {-found.low:.2f}]"
    size = f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
    return f"not resolved: {size}" if contains_zero(found) else f"the teacher adds {size}"


def _line(name: str) -> dict[str, Any] | None:
    """Return the stored line of the current recipe; None if it was not measured since it changed."""
    line = read_lines().get((False, name))
    return line if line and line["of"] == fingerprint(_recipe(name)) else None


def _control_line(name: str) -> dict[str, Any] | None:
    """Return the line of the current recipe's control; None without a control or a measurement since the last change."""
    control = build_control(_recipe(name))
    by_fingerprint = {
        line["of"]: line for (is_control, _), line in read_lines().items() if is_control
    }
    return None if control is None else by_fingerprint.get(fingerprint(control))


def render_page(name: str) -> str:
    """Return a method's page: a description, the paper's claim, differences, and the measured results."""
    recipe = _recipe(name)
    about = f"{recipe.about[:1].upper()}{recipe.about[1:]} ({source(recipe.paper or '')})."
    rows = {
        "Run": f"`practicum run {name}`",
        "Configuration": _axes(name),
        "Claim": _plain(recipe.claim),
        "Formula": _plain(FORMULA[recipe.formula]),
        "Reduced": _plain(recipe.reduced) if recipe.reduced else "",
        "Differs": _plain(recipe.differs),
        "Measured": measured(name),
    }
    lines = [f"- **{label}**: {text}" for label, text in rows.items() if text]
    return "\n\n".join([f"# {short(name)}", about, "\n".join(lines)]) + "\n"


def _axes(name: str) -> str:
    return "; ".join(f"{axis} `{value}`" for axis, value in describe_axes(_recipe(name)).items())


def _plain(text: Any) -> str:
    sentence = " ".join(str(text).split()).rstrip(".")
    return f"{sentence[:1].upper()}{sentence[1:]}."
