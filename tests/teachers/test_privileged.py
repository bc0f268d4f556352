"""The context of a privileged teacher: the student's prompt, and more."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import Recorder, prompt, rollout

from practicum.errors import DataError
from practicum.losses.signal_reader import read_tokens
from practicum.objective import Full, Sampled, Signal, TopK
from practicum.ports import Capabilities, TeacherRequest
from practicum.recipe import parse_recipe
from practicum.teachers import pool
from practicum.teachers.privileged import Config, PrivilegedTeacher, add_context
from practicum.types import Message, Prompt, Rollout, SamplingParams, TeacherSignal

PROMPT = Prompt(
    "p1",
    (Message("user", "8 times 7?"),),
    answer="56",
    privileged={"hint": "7 eights", "empty": ""},
)


def config(**fields: object) -> Config:
    return Config.model_validate({"teacher": {"type": "self"}, **fields})


def seen(prompt: Prompt, **fields: object) -> list[tuple[str, str]]:
    return [
        (message.role, message.content)
        for message in add_context(prompt, config(**fields)).messages
    ]


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
    changed = add_context(PROMPT, config(reference="{answer}"))
    assert (changed.id, changed.answer, changed.privileged) == (
        PROMPT.id,
        PROMPT.answer,
        PROMPT.privileged,
    )


def test_a_missing_field_is_named_with_what_there_is() -> None:
    with pytest.raises(
        DataError,
        match=r"prompt 'p1' has no field 'solution'.*privileged.*\{solution\}.*answer, hint",
    ):
        add_context(PROMPT, config(reference="{solution}"))


def test_an_empty_field_is_there() -> None:
    assert seen(PROMPT, reference="[{empty}]") == [("user", "[]\n\n8 times 7?")]


ATTACKS = [
    "{0.__class__}",
    "{answer.__class__}",
    "{answer!r}",
    "{answer:>1000000}",
    "{}",
    "{__import__('os')}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_reference_names_fields_and_runs_nothing(attack: str) -> None:
    with pytest.raises(DataError, match="has no field"):
        add_context(PROMPT, config(reference=attack))


@pytest.mark.parametrize(
    "value", ["{answer}", "{late}", "{0.__class__}", "$(rm -rf x)", "{{ 7 * 7 }}", "`id`", "%s %n"]
)
def test_the_content_of_a_field_is_never_read_as_a_template(value: str) -> None:
    prompt = Prompt(
        "p", (Message("user", "q"),), answer="56", privileged={"hint": value, "late": "x"}
    )
    assert seen(prompt, reference="{hint} then {answer}") == [("user", f"{value} then 56\n\nq")]
    assert seen(prompt, reference="{answer} then {hint}") == [("user", f"56 then {value}\n\nq")]


def test_a_teacher_with_nothing_more_to_see_is_refused() -> None:
    with pytest.raises(ValueError, match="needs something to see"):
        config()


def test_the_mistakes_of_the_teacher_inside_are_named_by_their_place() -> None:
    data = {
        "student": {"model": "m"},
        "teacher": {
            "type": "privileged",
            "system": "s",
            "teacher": {"type": "self", "weights": "emma"},
        },
        "task": "reverse",
        "train": {"steps": 1},
    }
    with pytest.raises(ValueError, match=r"teacher.*weights"):
        parse_recipe(data, "x")


def test_a_question_takes_the_place_of_the_last_turn() -> None:
    long = Prompt(
        "p",
        (Message("user", "earlier"), Message("assistant", "yes"), Message("user", "a long text")),
        privileged={"s": "x"},
    )
    assert seen(long, question="Short: {s}") == [
        ("user", "earlier"),
        ("assistant", "yes"),
        ("user", "Short: x"),
    ]
    assert seen(long, question="Short: {s}", reference="Hint {s}.")[-1] == (
        "user",
        "Hint x.\n\nShort: x",
    )


def test_a_question_may_go_on_after_the_prompts_own() -> None:
    assert seen(PROMPT, question="{question}\n\nIt is {answer}.") == [
        ("user", "8 times 7?\n\nIt is 56.")
    ]
    own = replace(PROMPT, privileged={"question": "shorter?"})
    assert seen(own, question="{question} {answer}") == [("user", "shorter? 56")]
    noted = replace(rollout(PROMPT), notes={"hint": ""})
    assert told([noted], question="{question} {hint}") == ["8 times 7?"]


class ReadsQuestions(Recorder):
    """Answers with a log-probability that depends on the question."""

    def rate(self, question: str) -> float:
        return -0.1 - sum(map(ord, question)) % 7 / 3

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        super().score(rollouts, signal)
        return [
            TeacherSignal(logprobs=torch.full((2,), self.rate(item.prompt.messages[-1].content)))
            for item in rollouts
        ]


def told(items: list[Rollout], **fields: object) -> list[str | None]:
    """Return the question that the inner teacher was asked for each rollout; None where it was not asked."""
    inner = Recorder()
    answers = PrivilegedTeacher(inner, config(**fields)).score(items, Sampled())
    (asked,) = inner.asked
    assert [item.tokens.data_ptr() for item in asked] == [
        item.tokens.data_ptr()
        for item, answer in zip(items, answers, strict=True)
        if not answer.is_empty
    ], "the tokens are the student's, in their order"
    shown = iter(item.prompt.messages[-1].content for item in asked)
    return [None if answer.is_empty else next(shown) for answer in answers]


GROUP = [
    rollout(prompt("p"), sample=0, reward=0.0, text="bad"),
    rollout(prompt("q"), sample=0, reward=1.0, text="alone"),
    rollout(prompt("p"), sample=2, reward=1.0, text="late"),
    rollout(prompt("p"), sample=1, reward=1.0, text="first"),
    rollout(prompt("q"), sample=1, reward=0.5, text="half"),
]


def test_a_sibling_is_the_first_other_correct_completion_of_the_prompt() -> None:
    assert told(GROUP, question="{sibling}") == ["first", None, "first", "late", "alone"]
    assert told(GROUP, question="{sibling}", missing="silent") == [
        "first",
        None,
        "first",
        "late",
        "alone",
    ]


@pytest.mark.parametrize(("field", "reward"), [("sibling", 1.0), ("failed_sibling", 0.0)])
@given(batch=st.lists(st.tuples(st.sampled_from("pq"), st.booleans()), min_size=1, max_size=8))
def test_siblings_are_others_of_the_same_prompt_with_the_outcome(
    field: str, reward: float, batch: list[tuple[str, bool]]
) -> None:
    items = [
        rollout(prompt(name), sample=number, reward=float(right))
        for number, (name, right) in enumerate(batch)
    ]
    for item, text in zip(items, told(items, question=f"{{{field}}}"), strict=True):
        siblings = [
            other
            for other in items
            if other.prompt.id == item.prompt.id and other.reward == reward and other is not item
        ]
        assert text == (siblings[0].text if siblings else None)


@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7),
    limit=st.integers(1, 4),
)
def test_the_score_is_the_mean_probability_after_the_first_siblings(
    rewards: list[float], limit: int
) -> None:
    items = [
        rollout(prompt("p"), sample=number, reward=reward) for number, reward in enumerate(rewards)
    ]
    inner = ReadsQuestions()
    settings = config(question="{failed_sibling}", siblings=limit)
    answers = PrivilegedTeacher(inner, settings).score(items, Sampled())
    for item, answer in zip(items, answers, strict=True):
        siblings = [sibling for sibling in items if sibling.reward == 0.0 and sibling is not item]
        wrong = [sibling.text for sibling in siblings[:limit]]
        assert answer.is_empty == (not wrong)
        if wrong:
            probability = sum(math.exp(inner.rate(text)) for text in wrong) / len(wrong)
            logprobs = read_tokens(answer, slice(None)).logprobs
            assert logprobs is not None
            torch.testing.assert_close(logprobs.exp(), torch.full((2,), probability))
    assert len(inner.asked) == 1


def test_several_siblings_ask_for_distributions_where_sampled_tokens_do_not_suffice() -> None:
    inner = Recorder()
    teacher = PrivilegedTeacher(inner, config(question="{sibling}", siblings=2))
    teacher.score(GROUP, TopK(k=3))
    assert inner.signals == [Full()]
    limited = Recorder()
    limited.capabilities = Capabilities(signals=frozenset({"sampled", "topk"}))
    teacher = PrivilegedTeacher(limited, config(question="{sibling}", siblings=2))
    assert teacher.capabilities.signals == {"sampled"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"system": "s"}, "siblings: the context shows no sibling"),
        ({"question": ["{sibling}", "{hint}"]}, "siblings: .* has several texts"),
        (
            {"question": "{sibling}", "teacher": {"type": "pool", "teachers": {"a": "self"}}},
            "siblings: the inner teacher already combines several answers",
        ),
    ],
)
def test_siblings_that_cannot_be_averaged_are_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(siblings=2, **fields)
    config(siblings=1, **fields)


def test_a_pool_refuses_a_member_that_averages_over_siblings() -> None:
    member = {"type": "privileged", "teacher": "self", "question": "{sibling}", "siblings": 2}
    with pytest.raises(ValueError, match=r"a pool within a pool is not combined.*siblings"):
        pool.Config.model_validate({"teachers": {"a": member}})


def test_of_several_questions_the_first_is_asked_whose_fields_are_there() -> None:
    """Check SDPO's four cases (2601.20802): a right sibling, else the feedback, else nothing to learn from."""
    settings = config(question=["{question} {sibling}", "{question} {said}"])
    for right, said, others in product([False, True], repeat=3):
        items = [
            replace(
                rollout(prompt("p"), reward=float(right), text="own"),
                notes={"said": "warmer"} if said else {},
            ),
            rollout(prompt("p"), sample=1, reward=float(others), text="other"),
        ]
        inner = Recorder()
        PrivilegedTeacher(inner, settings, ["said"]).score(items, Sampled())
        (asked,) = inner.asked
        shown = {item.sample: item.prompt.messages[-1].content for item in asked}
        expected = {0: "p? other" if others else "p? warmer"} if others or said else {}
        assert shown == expected | ({1: "p? own"} if right else {})


def test_a_note_of_the_rollout_stands_under_its_own_name() -> None:
    asked = prompt("p", privileged={"feedback": "the prompt's"})
    noted = [replace(rollout(asked), notes={"feedback": "warmer {answer}"})]
    assert told(noted, question="It said {feedback}.") == ["It said warmer {answer}."]
    assert told([rollout(prompt("p"))], question="{feedback}", missing="silent") == [None]
    with pytest.raises(DataError, match="no field 'feedback'"):
        told([rollout(prompt("p"))], question="{feedback}")


def test_a_completion_is_shown_with_what_became_of_it() -> None:
    shown = told(GROUP[:2], reference="You wrote {attempt}, which is {outcome}.")
    assert shown == [
        "You wrote bad, which is incorrect.\n\np?",
        "You wrote alone, which is correct.\n\nq?",
    ]


def test_an_outcome_nobody_knows_is_missing() -> None:
    unknown = [rollout(prompt("p")), rollout(prompt("p"), sample=1, reward=1.0)]
    with pytest.raises(
        DataError,
        match=r"prompt 'p' has no outcome, which teacher.question asks for: its task gave no re",
    ):
        told(unknown, question="{outcome}")
    assert told(unknown, question="{outcome}", missing="silent") == [None, "correct"]


def test_a_missing_field_is_an_error_or_silence_as_the_recipe_says() -> None:
    items = [rollout(prompt("p", privileged={"hint": "h"})), rollout(prompt("q"))]
    assert told(items, reference="{hint}", missing="silent") == ["h\n\np?", None]
    with pytest.raises(
        DataError,
        match=r"prompt 'q' has no field 'hint', which teacher.reference asks.*missing: silent",
    ):
        told(items, reference="{hint}")


def test_an_empty_last_text_leaves_completions_without_the_field_to_the_bare_teacher() -> None:
    items = [replace(rollout(prompt("p")), notes={"hint": "h"}), rollout(prompt("q"))]
    bare = [("user", "q?")]
    for key, with_hint in (("reference", "h\n\np?"), ("question", "h")):
        inner = Recorder()
        settings = config(**{key: ["{hint}", ""]}, missing="silent")
        PrivilegedTeacher(inner, settings, ["hint"]).score(items, Sampled())
        (asked,) = inner.asked
        assert asked[0].prompt.messages[-1].content == with_hint
        assert [(turn.role, turn.content) for turn in asked[1].prompt.messages] == bare
        assert asked[1] == items[1]


def test_a_missing_sibling_forgives_no_other_missing_field() -> None:
    with pytest.raises(DataError, match="has no field 'hint'"):
        told(GROUP[:1], question="{sibling} {hint}")


def test_what_the_student_wrote_is_never_read_as_a_template() -> None:
    items = [rollout(prompt("p", answer="secret"), text="{answer} {sibling}", reward=0.0)]
    assert told(items, question="{attempt}") == ["{answer} {sibling}"]


def test_the_names_of_a_completions_fields_are_its_own() -> None:
    (shown,) = told(
        [rollout(prompt("p", privileged={"attempt": "other"}), text="mine")], question="{attempt}"
    )
    assert shown == "mine"


def test_before_there_is_a_completion_a_context_that_shows_one_does_not_exist() -> None:
    inner = Recorder()
    teacher = PrivilegedTeacher(inner, config(question="{attempt}"))
    requests = [TeacherRequest(prompt("p"), 0)]
    assert teacher.sample(requests, SamplingParams(1)) is None
    assert teacher.bind_prompt(prompt("p")) is None
    assert not teacher.capabilities.writes
    assert not inner.prompts
    with pytest.raises(
        DataError,
        match=r"teacher.question shows the attempt of a completion.*prompt 'p1' before one",
    ):
        add_context(PROMPT, config(question="{attempt}"))


def test_its_own_answers_see_the_context() -> None:
    inner = Recorder()
    teacher = PrivilegedTeacher(inner, config(reference="{answer}", missing="silent"))
    assert teacher.capabilities.writes
    assert teacher.sample([TeacherRequest(PROMPT, 0)], SamplingParams(1)) is not None
    teacher.bind_prompt(PROMPT)
    assert [seen.messages[-1].content for seen in inner.prompts] == ["56\n\n8 times 7?"] * 2
    assert (
        teacher.sample(
            [TeacherRequest(PROMPT, 0), TeacherRequest(prompt("q"), 1)], SamplingParams(1)
        )
        is None
    )
    assert teacher.bind_prompt(prompt("q")) is None


def test_a_reference_may_begin_the_answer() -> None:
    fields = {"reference": "It is {answer}.", "question": "7 times 8?", "system": "s"}
    assert seen(PROMPT, place="answer", **fields) == [
        ("system", "s"),
        ("user", "7 times 8?"),
        ("assistant", "It is 56.\n\n"),
    ]
    assert seen(PROMPT, place="answer", reference="{empty}") == [
        ("user", "8 times 7?"),
        ("assistant", "\n\n"),
    ]


def test_the_rest_is_passed_on() -> None:
    inner = Recorder(state={"w": torch.ones(1)})
    teacher = PrivilegedTeacher(inner, config(system="s"))
    assert teacher.save_state() == inner.state
    teacher.load_state({})
    teacher.after_step(4, ())
    assert (inner.state, inner.steps) == ({}, [4])
