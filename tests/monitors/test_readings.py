"""Each reading against a number worked out by hand; unknown readings are absent."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.monitors import History, compute_readings
from practicum.monitors.facts import RecipeFacts
from practicum.monitors.readings import mark_repeated_tokens
from practicum.recipe import load_recipe, resolve_recipe
from practicum.statistics import repeated_tokens
from practicum.types import Message, Prompt, Rollout, StepResult, TokenRecord

NAN = math.nan


def rollout(tokens: list[int], prompt: str = "p", **changes: object) -> Rollout:
    """Return a completion by its tokens; it stopped, and the sampler gave every token -1."""
    count = len(tokens)
    values: dict = {
        "prompt": Prompt(prompt, (Message("user", "?"),)),
        "prompt_tokens": (1,),
        "tokens": torch.tensor(tokens, dtype=torch.long),
        "loss_mask": torch.ones(count, dtype=torch.bool),
        "sampling_logprobs": -torch.ones(count),
        "policy_logprobs": -torch.ones(count),
        "policy_version": 0,
        "stop_reason": "stop",
        "text": " ".join(map(str, tokens)),
    }
    return Rollout(**values | changes)


def output(count: int, **columns: list[float]) -> TokenRecord:
    """Return the scores of the tokens: the student gives each -1, and nothing else is known unless it is given."""
    known = {name: torch.full((count,), NAN) for name in TokenRecord.__dataclass_fields__}
    known["logprobs"] = -torch.ones(count)
    return TokenRecord(**known | {name: torch.tensor(column) for name, column in columns.items()})


def readings(
    rollouts: list[Rollout],
    outputs: list[TokenRecord],
    facts: RecipeFacts | None = None,
    step: int = 1,
):
    return compute_readings(
        StepResult(step, rollouts, TokenRecord.join(outputs), {}), History(), facts or RecipeFacts()
    )


@given(st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=4))
def test_repeated_tokens_of_many_answers_are_those_of_each(answers):
    rows = torch.tensor(
        [row for row, answer in enumerate(answers) for _ in answer], dtype=torch.long
    )
    tokens = torch.tensor([token for answer in answers for token in answer], dtype=torch.long)
    assert mark_repeated_tokens(tokens, rows).tolist() == [
        said for answer in answers for said in repeated_tokens(answer)
    ]


def test_gaps_are_the_teachers_less_the_students():
    found = readings(
        [rollout([5, 6, 7, 8])], [output(4, teacher_logprobs=[-1.5, -0.5, -3.0, -12.0])]
    )
    assert found["p50_gap"] == pytest.approx(2.0)
    assert found["p99_gap"] == pytest.approx(11.0)
    assert found["negative_gaps"] == pytest.approx(0.75)
    assert found["far_gaps"] == pytest.approx(0.25)


def test_the_stop_gap_is_taken_at_stops_of_the_student_alone():
    stopped = [rollout([5, 9], f"p{number}") for number in range(4)]
    cut = rollout([5, 6], "p4", stop_reason="length")
    given_answer = rollout([5, 9], "p5", source="dataset")
    outputs = [
        output(2, teacher_logprobs=[-1.0, -1.0 - gap])
        for gap in (1.0, 2.0, 3.0, 40.0, 100.0, 100.0)
    ]
    found = readings([*stopped, cut, given_answer], outputs)
    assert (found["stop_gap"], found["stop_gap_p90"]) == pytest.approx((-3.0, -1.0)) or found[
        "stop_gap"
    ] == pytest.approx(-2.0)
    assert "stop_gap" not in readings(stopped[:3], outputs[:3]), "three stops say too little"


def test_a_loop_is_half_of_an_answer_that_says_the_same_again():
    loop = rollout([1, 2] * 8, "p")
    plain = rollout(list(range(16)), "q")
    found = readings([loop, plain], [output(16), output(16)])
    assert found["repetition"] == 0.5
    assert found["repeated_tokens"] == pytest.approx(14 / 32)
    assert readings([rollout([1] * 6)], [output(6)])["repetition"] == 0.0, (
        "a short answer is no loop"
    )


def test_repeated_tokens_are_compared_with_the_others():
    outputs = [output(34, teacher_logprobs=[-0.9] * 34), output(20, teacher_logprobs=[-2.0] * 20)]
    found = readings([rollout([1, 2] * 17, "p"), rollout(list(range(20)), "q")], outputs)
    assert found["repeated_gap"] == pytest.approx(0.1 - (2 * 0.1 + 20 * -1.0) / 22)


def test_numbers_by_position_need_enough_tokens():
    rollouts = [rollout(list(range(20)), f"p{number}") for number in range(4)]
    column = [1.0] * 4 + [2.0] * 12 + [3.0] * 4
    found = readings(
        rollouts, [output(20, reverse_kl=column, student_entropy=column) for _ in rollouts]
    )
    assert (found["reverse_kl_at_0"], found["reverse_kl_at_4"], found["reverse_kl_at_16"]) == (
        1.0,
        2.0,
        3.0,
    )
    assert found["student_entropy_at_16"] == 3.0 and "teacher_entropy_at_0" not in found
    assert "reverse_kl_at_16" not in readings(
        rollouts[:3], [output(20, reverse_kl=column) for _ in range(3)]
    )


def test_the_probability_error_is_taken_under_equal_weights_alone():
    fresh, stale = rollout([5, 6], "p"), rollout([5, 6], "q", policy_version=-3)
    outputs = [output(2), output(2, logprobs=[-2.0, -2.0])]
    found = readings([fresh, stale], outputs)
    assert found["probability_error"] == pytest.approx(1.0)
    assert found["importance_mean"] == pytest.approx((1.0 + math.exp(-1.0)) / 2)
    assert found["staleness_p95"] == 3.0
    later = readings([fresh, rollout([5, 6], "q")], outputs, RecipeFacts(updates_per_step=2))
    assert later["probability_error"] == pytest.approx(1.0), (
        "the second update's completions are behind by design"
    )
    assert readings([fresh, rollout([5, 6], "q")], outputs)["probability_error"] == pytest.approx(
        (1 + math.e) / 2
    )


def test_answers_to_one_prompt_are_compared():
    rollouts = [
        rollout([1, 2], "p", reward=reward, sample=number)
        for number, reward in enumerate((1.0, 0.0))
    ]
    rollouts += [rollout([3, token], "q", reward=0.0, sample=token) for token in (4, 5)]
    found = readings(rollouts, [output(2) for _ in rollouts])
    assert found["unique_answers"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["distinct_2"] == pytest.approx((0.5 + 1.0) / 2)
    assert (found["pass_at_n"], found["pass_gap"], found["settled_prompts"]) == (0.5, 0.25, 0.5)
    assert "unique_answers" not in readings([rollout([1])], [output(1)])


def test_a_silent_teacher_and_one_that_is_the_student_teach_nothing():
    same = output(2, teacher_logprobs=[-1.0, -1.0], reverse_kl=[0.0, 0.0])
    other = output(2, teacher_logprobs=[-2.0, -1.0], reverse_kl=[0.5, 0.1])
    found = readings(
        [rollout([1, 2], "p"), rollout([1, 2], "q"), rollout([1, 2], "r")], [same, other, output(2)]
    )
    assert found["signal_share"] == pytest.approx(1 / 3) and found["unanswered"] == pytest.approx(
        1 / 3
    )
    assert "signal_share" not in readings(
        [rollout([1, 2])], [output(2)], RecipeFacts(needs_teacher=False)
    )


def test_a_teacher_that_says_the_same_of_every_token_is_counted():
    lost = output(8, teacher_logprobs=[-math.log(11)] * 8)
    sure = output(8, teacher_logprobs=[-1e-3] * 8)
    brief = output(7, teacher_logprobs=[-2.0] * 7)
    answers = [rollout([1] * 8, "p"), rollout([1] * 8, "q"), rollout([1] * 7, "r")]
    assert readings(answers, [lost, sure, brief])["constant_teacher"] == 0.5
    assert "constant_teacher" not in readings([answers[2]], [brief])
    for name in ("smoke/other_tokenizer", "smoke/tools"):
        facts = RecipeFacts.of(resolve_recipe(load_recipe(name)))
        assert facts.repeats_scores
        assert "constant_teacher" not in readings(answers[:1], [lost], facts)


@pytest.mark.parametrize(
    ("name", "may_drop"),
    [
        ("papers/tip", True),
        ("papers/gold", False),
        ("papers/iw-opd", False),
        ("papers/rlcsd", False),
    ],
)
def test_only_weights_that_may_drop_tokens_are_watched(name, may_drop):
    facts = RecipeFacts.of(resolve_recipe(load_recipe(name)))
    assert facts.has_token_weights is may_drop


def test_a_teacher_that_only_the_other_context_asks_leaves_no_answer_unanswered():
    recipe = resolve_recipe(load_recipe("papers/pi-distill"))
    assert RecipeFacts.of(recipe).needs_teacher
    terms = [term for number, term in enumerate(recipe["objective"]["losses"]) if number != 1]
    without = {**recipe, "objective": {**recipe["objective"], "losses": terms}}
    assert not RecipeFacts.of(without).needs_teacher


def test_tokens_without_weight_are_counted_where_weights_select():
    weighed = output(4, weight=[0.0, 0.0, 0.0, 0.5])
    assert (
        readings([rollout([1, 2, 3, 4])], [weighed], RecipeFacts(has_token_weights=True))[
            "weightless"
        ]
        == 0.75
    )
    assert "weightless" not in readings([rollout([1, 2, 3, 4])], [weighed])


def test_traps_are_long_agreements_under_what_is_usual():
    facts, history = RecipeFacts(max_new_tokens=64), History()
    for _ in range(50):
        history.add({"agreement": 0.1, "rollouts": 16.0})
    agreed = output(40, reverse_kl=[1.0] * 24 + [0.01] * 16)
    broken = output(40, reverse_kl=[1.0] * 24 + [0.01] * 8 + [1.0] * 8)
    answers = [
        rollout(list(range(40)), name, reward=reward)
        for name, reward in (("p", 0.0), ("q", 0.0), ("r", 1.0))
    ]
    found = compute_readings(
        StepResult(51, answers, TokenRecord.join([agreed, broken, agreed]), {}), history, facts
    )
    assert found["trap_rate"] == pytest.approx(1 / 3), "a right answer is no trap"
    assert found["agreement"] == pytest.approx(0.01)
    assert "trap_rate" not in compute_readings(
        StepResult(1, answers, TokenRecord.join([agreed] * 3), {}), History(), facts
    )


def test_a_step_without_tokens_has_no_readings():
    assert readings([rollout([])], [output(0)]) == {}
