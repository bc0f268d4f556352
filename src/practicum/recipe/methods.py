"""A recipe in the field's words: where it stands on each axis, in short."""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from practicum.core.calls import parse_call
from practicum.objective import Objective, Term
from practicum.recipe import Recipe

DEFAULT = Term()

NAMED_APART = frozenset({"coefficient", "signal", "divergence", "estimator", "against"})
"""Axes of a term that are shown otherwise than as `key value`."""


def describe_axes(recipe: Recipe) -> dict[str, str]:
    """What a recipe chose, by axis, without what it left at its default.

    `source` and `teacher` in words, the `staleness` of rollouts that are drawn ahead, one `loss` for each term, the `aggregate`
    where it is not the token mean, and what is scheduled.
    """
    chosen = {"source": _call(recipe.rollout.source), "teacher": format_teacher(recipe.teacher)}
    if recipe.reference is not None:
        chosen["reference"] = format_teacher(recipe.reference)
    if recipe.rollout.max_staleness:
        chosen["staleness"] = f"{recipe.rollout.max_staleness} updates"
    chosen["loss"] = " + ".join(_terms(recipe.objective))
    if recipe.objective.aggregate != "token_mean":
        chosen["aggregate"] = recipe.objective.aggregate
    if recipe.schedules:
        chosen["schedule"] = ", ".join(
            f"{path.rpartition('.')[2]} {_call(how)}" for path, how in recipe.schedules.items()
        )
    return chosen


def describe_method(recipe: Recipe) -> str:
    """The axes as one line of a list."""
    return " · ".join(
        value for value in describe_axes(recipe).values() if value not in ("student", "none")
    )


def format_teacher(config: BaseModel) -> str:
    """A teacher's settings as a call: `privileged(self(ema): reference)`, `route(math, code)`, `pool(geometric, 3)`."""
    settings = {name: value for name, value in config if name != "type"}
    kind = str(config.model_dump(include={"type"})["type"])
    inside = _inside(settings)
    return f"{kind}({inside})" if inside else kind


def _inside(settings: Mapping[str, object]) -> str:
    match settings:
        case {"teacher": BaseModel() as teacher, **rest}:
            seen = [name for name, value in rest.items() if value not in (None, (), "error")]
            return f"{format_teacher(teacher)}: {', '.join(seen)}"
        case {"teachers": Mapping() as teachers, "by": by}:
            return f"{', '.join(map(str, teachers))} by {by}"
        case {"teachers": Mapping() as teachers, "kind": kind}:
            return f"{kind} of {len(teachers)}"
        case {"weights": str(weights)}:
            return weights
    return ""


def _terms(objective: Objective) -> Iterable[str]:
    usual = dict(DEFAULT)
    for term in objective.losses:
        words = [_call(term.signal), _call(term.divergence)] if term.asks else [_call(term.signal)]
        words += [_call(term.gradient)] if term.gradient != term.usual_gradient else []
        words += [f"against {term.against}"] if term.against != DEFAULT.against else []
        words += [
            f"{name} {_call(value)}"
            for name, value in term
            if name not in NAMED_APART and value != usual[name]
        ]
        share = "" if term.coefficient == 1.0 else f"{term.coefficient:g} x "
        yield share + ", ".join(words)


def _call(value: object) -> str:
    """A choice as text, its arguments by place, without those at their defaults."""
    if not isinstance(value, BaseModel):
        return str(value)
    name, _, keywords = parse_call(str(value.model_dump()))
    usual = {key: field.default for key, field in type(value).model_fields.items()}
    given = [
        str(argument)
        for key, argument in keywords.items()
        if key not in usual or usual[key] != argument
    ]
    return f"{name}({', '.join(given)})" if given else name
