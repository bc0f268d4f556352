"""Describe a recipe by its choice on each axis of the method space."""

from collections.abc import Mapping

from pydantic import BaseModel

from practicum.core.calls import parse_call
from practicum.objective import Term
from practicum.recipe import Recipe

DEFAULT = Term()

NAMED_APART = frozenset({"coefficient", "signal", "divergence", "estimator", "against"})
"""Axes of a term with a special format instead of `key value`."""


def describe_axes(recipe: Recipe) -> dict[str, str]:
    """Return the recipe's choices by axis, without defaults.

    The axes are `source`, `teacher`, `reference`, `staleness`, `loss` (all terms), `aggregate`
    unless it is the token mean, and `schedule`.
    """
    chosen = {
        "source": _format_choice(recipe.rollout.source),
        "teacher": format_teacher(recipe.teacher),
    }
    if recipe.reference is not None:
        chosen["reference"] = format_teacher(recipe.reference)
    if recipe.rollout.max_staleness:
        chosen["staleness"] = f"{recipe.rollout.max_staleness} updates"
    chosen["loss"] = " + ".join(map(_format_term, recipe.objective.losses))
    if recipe.objective.aggregate != "token_mean":
        chosen["aggregate"] = recipe.objective.aggregate
    if recipe.schedules:
        chosen["schedule"] = ", ".join(
            f"{path.rpartition('.')[2]} {_format_choice(schedule)}"
            for path, schedule in recipe.schedules.items()
        )
    return chosen


def describe_method(recipe: Recipe) -> str:
    """Return the axes as one line."""
    return " · ".join(
        value for value in describe_axes(recipe).values() if value not in ("student", "none")
    )


def format_teacher(config: BaseModel) -> str:
    """Return a teacher's settings as a call, such as `privileged(self(ema): reference)`."""
    settings = {name: value for name, value in config if name != "type"}
    defaults = {name: field.default for name, field in type(config).model_fields.items()}
    teacher_type = str(config.model_dump(include={"type"})["type"])
    arguments = _format_settings(settings, defaults)
    return f"{teacher_type}({arguments})" if arguments else teacher_type


def _format_settings(settings: Mapping[str, object], defaults: Mapping[str, object]) -> str:
    match settings:
        case {"teacher": BaseModel() as teacher, **extras}:
            names = [name for name, value in extras.items() if value != defaults[name]]
            return format_teacher(teacher) + (f": {', '.join(names)}" if names else "")
        case {"teachers": Mapping() as teachers, "by": by}:
            return f"{', '.join(map(str, teachers))} by {by}"
        case {"teachers": Mapping() as teachers, "kind": kind}:
            return f"{kind} of {len(teachers)}"
        case {"weights": str(weights)}:
            return weights
    return ""


def _format_term(term: Term) -> str:
    words = [_format_choice(term.signal)]
    words += [_format_choice(term.divergence)] if term.needs_signal else []
    words += [_format_choice(term.gradient)] if term.gradient != term.signal.usual else []
    words += [f"against {term.against}"] if term.against != DEFAULT.against else []
    defaults = dict(DEFAULT)
    words += [
        f"{name} {_format_choice(choice)}"
        for name, choice in term
        if name not in NAMED_APART and choice != defaults[name]
    ]
    factor = "" if term.coefficient == 1.0 else f"{term.coefficient:g} x "
    return factor + ", ".join(words)


def _format_choice(choice: object) -> str:
    """Return a choice as a call with positional arguments, without defaults."""
    if not isinstance(choice, BaseModel):
        return str(choice)
    dumped = choice.model_dump()
    if isinstance(dumped, dict):
        name, keywords = dumped.pop("type"), dumped
    else:
        name, _, keywords = parse_call(dumped)
    defaults = {key: field.default for key, field in type(choice).model_fields.items()}
    arguments = [
        str(argument)
        for key, argument in keywords.items()
        if key not in defaults or defaults[key] != argument
    ]
    return f"{name}({', '.join(arguments)})" if arguments else name
