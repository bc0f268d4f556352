"""The controls of a recipe: the same run with only the reward, or with an advantage from no teacher.

Every source of learning except the verifier counts as a teacher: the model under `teacher:`, a
model that judges inside a scorer, the author of the answers that a source takes from the dataset,
and an environment if a term learns from its text. The reference is no teacher: it keeps the student
near its initial weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from practicum.core.calls import bind
from practicum.errors import RecipeError
from practicum.functional.estimators import CORRECTIONS
from practicum.monitors import read_number
from practicum.objective import VERIFIER, Term
from practicum.objective.signals.score import Config as Score
from practicum.objective.signals.unlikely import Config as Unlikely
from practicum.objective.spec import OTHER_ANSWERS
from practicum.recipe.mistakes import validate_fields
from practicum.recipe.schema import Recipe, resolve_recipe
from practicum.rollouts.sources import student

SWITCH = "teacher=off"
"""The override that asks for the control; YAML reads its value as False."""

FREE = "teacher=free"
"""The override that replaces the teacher with a teacher-free signal: `teacher=free(0.1, -1)`."""

SECTIONS = ("teacher", "scorers", "notes", "rollout", "objective", "schedules", "monitors")
"""The sections of a recipe that differ in its control."""

SUFFIX = "-teacher-off"
"""The suffix of a control's name, and therefore of its run folder's name."""

FREE_SUFFIX = "-teacher-free"
"""The suffix of a control with a teacher-free signal."""

LONGEST_NAME = 80

TAKEN_OVER = ("coefficient", "correction", "weights", "samples", "scorer", "filter", "source")
"""Fields of a term about its answers, tokens and reward, which do not depend on the teacher."""


def build_control(recipe: Recipe, unlikely: Unlikely | None = None) -> Recipe | None:
    """Return the recipe with only the reward, or with the reward and a teacher-free signal.

    The control drops the terms that ask the teacher or imitate its answers; a reward that is added
    to the teacher's advantage becomes a separate term. The student samples all `n` answers, and the
    reward also trains on answers that a filter had left to the teacher. With `unlikely`, that
    signal is added as the last term. Returns None if the recipe has no teacher, or if it has no
    reward and `unlikely` is None.
    Raises RecipeError if a schedule has no place in the control.
    """
    # No verifier can tell how users like an answer, so without a judge no reward is left.
    if recipe.rollout.source.serves_users:
        return None
    # The reference counts as an earlier student.
    writers = [name for name in recipe.rollout.source.other_writers if name != "reference"]
    terms = recipe.objective.losses
    judges = list_teaching_scorers(recipe)
    is_judged = any(term.scorer in judges for term in terms)
    if not writers and not is_judged and not any(map(_is_taught, terms)):
        return None
    reward_terms = {
        index: reward_term
        for index, term in enumerate(terms)
        if (reward_term := _remove_teacher(term, writers)) is not None
    }
    # Dropped terms leave their answers without a loss, so the reward trains on these answers.
    teacher_filters = {term.filter for index, term in enumerate(terms) if index not in reward_terms}
    reward_terms = {
        index: _ask_verifier(_extend_filter(term, teacher_filters), judges)
        for index, term in reward_terms.items()
    }
    free_terms = [] if unlikely is None else [Term(signal=unlikely)]
    if not free_terms and not any(term.learns_from_reward for term in reward_terms.values()):
        return None
    # Changed as resolved data and validated again, so the control obeys the rules of any recipe.
    control = resolve_recipe(recipe)
    control |= describe_control(control, is_free=bool(free_terms))
    control["teacher"] = {"type": "none"}
    # Without a teacher, no model reads the notes.
    control["notes"] = {}
    for name in judges:
        del control["scorers"][name]
    control["objective"]["losses"] = [
        term.model_dump(mode="json") for term in [*reward_terms.values(), *free_terms]
    ]
    # A removed judge cannot name the part that a source should regenerate.
    source = recipe.rollout.source
    is_guided = source.guide in judges or source.note_made is not None
    drops_source = bool(writers) or is_guided
    if drops_source:
        control["rollout"]["source"] = student.Config().model_dump()
    paths = _ControlPaths(terms, reward_terms, drops_source)
    control["schedules"] = paths.translate_keys(control["schedules"])
    for settings in control["monitors"].values():
        changes = paths.translate_keys(settings["set"])
        settings["set"] = {path: changes[path] for path in changes if _has_number(control, path)}
    return validate_fields(Recipe, control, recipe.name)


def list_teaching_scorers(recipe: Recipe) -> list[str]:
    """Return the names of the scorers that use a teacher as judge or prefer its answers."""
    return [
        name
        for name, config in recipe.scorers.items()
        if config.members() or config.imitates_teacher
    ]


def describe_control(recipe_data: Mapping[str, Any], *, is_free: bool = False) -> dict[str, Any]:
    """Return the fields that describe a control; unlike its recipe, it reproduces no paper."""
    name = recipe_data["name"]
    kind = (
        "unlikely tokens pushed down, no teacher" if is_free else "only the reward, the teacher off"
    )
    suffix = FREE_SUFFIX if is_free else SUFFIX
    about = f"control: {kind}, of: {recipe_data.get('about') or name}"
    name = f"{name[: LONGEST_NAME - len(suffix)]}{suffix}"
    return {"name": name, "about": about, "paper": None, "claim": None, "differs": None}


def explain_no_control(source: str, unlikely: Unlikely | None = None) -> RecipeError:
    """Return the error for a recipe without a control."""
    if unlikely is not None:
        return RecipeError(
            f"{source}: {FREE} puts a signal in the teacher's place, and this recipe learns from "
            "no teacher; take one that does, such as papers/gkd"
        )
    return RecipeError(
        f"{source}: {SWITCH} keeps only the reward, and this recipe has no teacher, or no term that "
        "learns from a reward; use a recipe with both, such as papers/kdrl, "
        "or set reward: add_advantage(1.0)"
    )


@dataclass(frozen=True, slots=True)
class TeacherSwitch:
    """The replacement of the teacher in a control: None for only the reward, or a signal."""

    unlikely: Unlikely | None = None


def remove_switch(overrides: Sequence[str]) -> tuple[list[str], TeacherSwitch | None]:
    """Return the overrides without `teacher=off` or `teacher=free(...)`, and the last such switch.

    Raises RecipeError for arguments that a teacher-free signal cannot have.
    """
    remaining, switch = [], None
    for text in overrides:
        packed = text.replace(" ", "")
        if packed == SWITCH:
            switch = TeacherSwitch()
        elif packed == FREE or packed.startswith(f"{FREE}("):
            switch = TeacherSwitch(_read_unlikely(text.partition("=")[2]))
        else:
            remaining.append(text)
    return remaining, switch


def _read_unlikely(text: str) -> Unlikely:
    try:
        return Unlikely(**bind("control", text, ["threshold", "advantage"]))
    except ValueError:
        raise RecipeError(
            f"teacher={text.strip()}: use teacher=free(0.1, -1): a probability between 0 and 1, and an advantage"
        ) from None


def _is_taught(term: Term) -> bool:
    """Return True if a term asks a teacher, or is not about the student's own tokens."""
    return term.needs_teacher or any(term.view)


def _follows_writers(term: Term, writers: Sequence[str]) -> bool:
    """Return True if a term trains only on the writers' answers, or prefers them to other answers."""
    prefers = term.signal.label or term.signal.pairs
    is_likelihood = prefers and not term.learns_from_reward
    return term.source in writers or (bool(writers) and is_likelihood and term.source == "all")


def _remove_teacher(term: Term, writers: Sequence[str]) -> Term | None:
    """Return the term without the teacher: unchanged if it asks no teacher, only its reward, or
    None."""
    if _follows_writers(term, writers) or any(term.view):
        return None
    if not term.needs_teacher:
        return term
    if not term.has_reward:
        return None
    by_teacher = {"weights": term.weighs_by_teacher, "samples": term.samples_by_teacher}
    fields = {
        key: value for key, value in term if key in TAKEN_OVER and not by_teacher.get(key, False)
    }
    factor = term.reward_rule.read_factor(term.reward.arguments)
    arguments = {**term.correction.arguments, **CORRECTIONS[term.correction.name].without_teacher}
    fields["signal"] = Score(advantage=term.reward_advantage)
    fields["correction"] = term.correction.model_copy(update={"arguments": arguments})
    fields["coefficient"] = term.coefficient * factor
    return Term(**fields)


def _extend_filter(term: Term, teacher_filters: set[str]) -> Term:
    """Extend a reward's term to all answers if a removed term trained on the filtered-out answers."""
    if term.signal.outcome is not None and OTHER_ANSWERS.get(term.filter) in teacher_filters:
        return term.model_copy(update={"filter": "all"})
    return term


def _ask_verifier(term: Term, judges: Sequence[str]) -> Term:
    """Replace a judge's grade with the verifier's reward in a term."""
    return term.model_copy(update={"scorer": VERIFIER}) if term.scorer in judges else term


@dataclass(frozen=True, slots=True)
class _ControlPaths:
    """The paths of a recipe's numbers in its control."""

    _terms: Sequence[Term]
    _reward_terms: Mapping[int, Term]
    _drops_source: bool

    def translate_keys(self, by_path: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mapping with the control's paths as keys, without removed paths."""
        translated: dict[str, Any] = {}
        for path, entry in by_path.items():
            new_path = self._translate(path)
            # The coefficients of term and reward become one number, their product.
            if new_path in translated:
                raise RecipeError(
                    f"{path}: with the teacher off it multiplies another number that changes too; "
                    "give one of them a fixed one"
                )
            if new_path is not None:
                translated[new_path] = entry
        return translated

    def _translate(self, path: str) -> str | None:
        match path.split("."):
            case ["rollout", "source", *_] if self._drops_source:
                return None
            case ["objective", "losses", index, *keys]:
                return self._translate_in_term(int(index), keys, path)
        return path

    def _translate_in_term(self, index: int, keys: Sequence[str], path: str) -> str | None:
        if index not in self._reward_terms:
            return None
        term, reward_term = self._terms[index], self._reward_terms[index]
        prefix = f"objective.losses.{list(self._reward_terms).index(index)}"
        # An unchanged term keeps all of its numbers; only its index in the list may differ.
        if term.signal == reward_term.signal:
            return ".".join([prefix, *keys])
        rule = term.reward_rule
        factors = {
            ("coefficient",): rule.read_factor(term.reward.arguments),
            ("reward", rule.factor): term.coefficient,
        }
        if tuple(keys) in factors:
            if factors[tuple(keys)] != 1.0:
                raise RecipeError(
                    f"{path}: with the teacher off it is multiplied by "
                    f"{factors[tuple(keys)]:g}; write 1 there"
                )
            return f"{prefix}.coefficient"
        field = keys[0]
        is_unchanged = field in TAKEN_OVER and dict(reward_term)[field] == dict(term)[field]
        return ".".join([prefix, *keys]) if is_unchanged else None


def _has_number(control: Mapping[str, Any], path: str) -> bool:
    try:
        read_number(control, path)
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    return True
