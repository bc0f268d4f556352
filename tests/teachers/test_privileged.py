"""What a privileged teacher sees: the student's prompt, and more."""

import pytest

from practicum.errors import DataError
from practicum.recipe import parse_recipe
from practicum.teachers.privileged import Config, with_context
from practicum.types import Message, Prompt

PROMPT = Prompt("p1", (Message("user", "8 times 7?"),), answer="56", privileged={"hint": "7 eights", "empty": ""})


def config(**fields: object) -> Config:
    return Config.model_validate({"teacher": {"type": "self"}, **fields})


def seen(prompt: Prompt, **fields: object) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in with_context(prompt, config(**fields)).messages]


def test_a_system_turn_comes_first() -> None:
    assert seen(PROMPT, system="Be brief.") == [("system", "Be brief."), ("user", "8 times 7?")]


def test_it_takes_the_place_of_the_prompts_own_system_turn() -> None:
    prompt = Prompt("p", (Message("system", "own"), Message("user", "q")))
    assert seen(prompt, system="other") == [("system", "other"), ("user", "q")]
    shown = seen(prompt, demonstrations=[{"prompt": "a", "answer": "b"}])
    assert shown == [("system", "own"), ("user", "a"), ("assistant", "b"), ("user", "q")]


def test_demonstrations_are_earlier_turns_in_their_order() -> None:
    examples = [{"prompt": "1?", "answer": "1"}, {"prompt": "2?", "answer": "2"}]
    assert seen(PROMPT, system="s", demonstrations=examples) == [
        ("system", "s"),
        ("user", "1?"),
        ("assistant", "1"),
        ("user", "2?"),
        ("assistant", "2"),
        ("user", "8 times 7?"),
    ]


def test_a_reference_stands_before_the_last_question_with_its_fields_filled_in() -> None:
    shown = seen(PROMPT, reference="It is {answer}, for {hint}.")
    assert shown == [("user", "It is 56, for 7 eights.\n\n8 times 7?")]


def test_the_prompt_keeps_its_name_answer_and_fields() -> None:
    changed = with_context(PROMPT, config(reference="{answer}"))
    assert (changed.id, changed.answer, changed.privileged) == (PROMPT.id, PROMPT.answer, PROMPT.privileged)


def test_a_missing_field_is_named_with_what_there_is() -> None:
    with pytest.raises(DataError, match=r"prompt 'p1' has no field 'solution'.*privileged.*\{solution\}.*answer, hint"):
        with_context(PROMPT, config(reference="{solution}"))


def test_an_empty_field_is_there() -> None:
    assert seen(PROMPT, reference="[{empty}]") == [("user", "[]\n\n8 times 7?")]


ATTACKS = ["{0.__class__}", "{answer.__class__}", "{answer!r}", "{answer:>1000000}", "{}", "{__import__('os')}"]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_reference_names_fields_and_runs_nothing(attack: str) -> None:
    with pytest.raises(DataError, match="has no field"):
        with_context(PROMPT, config(reference=attack))


@pytest.mark.parametrize(
    "value", ["{answer}", "{late}", "{0.__class__}", "$(rm -rf x)", "{{ 7 * 7 }}", "`id`", "%s %n"]
)
def test_the_content_of_a_field_is_never_read_as_a_template(value: str) -> None:
    prompt = Prompt("p", (Message("user", "q"),), answer="56", privileged={"hint": value, "late": "x"})
    assert seen(prompt, reference="{hint} then {answer}") == [("user", f"{value} then 56\n\nq")]
    assert seen(prompt, reference="{answer} then {hint}") == [("user", f"56 then {value}\n\nq")]


def test_a_teacher_with_nothing_more_to_see_is_refused() -> None:
    with pytest.raises(ValueError, match="needs something to see"):
        config()


def test_the_mistakes_of_the_teacher_inside_are_named_by_their_place() -> None:
    data = {
        "student": {"model": "m"},
        "teacher": {"type": "privileged", "system": "s", "teacher": {"type": "self", "weights": "emma"}},
        "task": "reverse",
        "train": {"steps": 1},
    }
    with pytest.raises(ValueError, match=r"teacher.*weights"):
        parse_recipe(data, "x")
