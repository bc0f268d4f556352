"""A pool asks every member about every rollout, and returns their answers together with their weights."""

from typing import Any

import pytest
import torch
from recorder import Recorder, prompt, rollout

from practicum.methods.alm.chunks import WithChunks
from practicum.objective import Full, Sampled, TopK
from practicum.ports import Capabilities, Teacher, TeacherRequest
from practicum.teachers.pool import Config, PoolTeacher
from practicum.types import PooledSignal, SamplingParams

ITEMS = [rollout(prompt("p")), rollout(prompt("q"))]


def pool(teachers: dict[str, Teacher], **fields: Any) -> PoolTeacher:
    config = Config.model_validate({"teachers": dict.fromkeys(teachers, "self"), **fields})
    return PoolTeacher(teachers, config)


def pools(teacher: PoolTeacher) -> list[PooledSignal | None]:
    return [answer.pool for answer in teacher.score(ITEMS, Sampled())]


def test_every_member_is_asked_once_about_everything() -> None:
    teachers = {"a": Recorder(-1.0), "b": Recorder(-2.0)}
    for answer in pool(dict(teachers)).score(ITEMS, Sampled()):
        assert answer.pool is not None and not answer.is_empty
        assert [
            (member.name, member.logprobs[0].item())
            for member in answer.pool.members
            if member.logprobs is not None
        ] == [
            ("a", -1.0),
            ("b", -2.0),
        ]
    assert [[len(batch) for batch in teacher.asked] for teacher in teachers.values()] == [[2], [2]]


@pytest.mark.parametrize("kind", ["geometric", "arithmetic", "sum"])
def test_without_weights_the_members_count_alike_and_one_in_sum(kind: str) -> None:
    (first, _) = pools(pool({"a": Recorder(), "b": Recorder(), "c": Recorder()}, kind=kind))
    assert first is not None and first.kind == kind
    assert first.weights == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_weights_are_used_as_written_but_those_of_an_average_sum_to_one() -> None:
    written = {"b": 0.5, "a": 1.5}
    teachers = {"a": Recorder(), "b": Recorder()}
    for kind, expected in (
        ("geometric", (1.5, 0.5)),
        ("sum", (1.5, 0.5)),
        ("arithmetic", (0.75, 0.25)),
    ):
        (first, _) = pools(pool(dict(teachers), kind=kind, weights=written))
        assert first is not None and first.weights == expected


def test_who_is_silent_hands_its_weight_to_the_others() -> None:
    teachers = {"a": Recorder(), "b": Recorder(silent_about=frozenset("p")), "c": Recorder()}
    first, second = pools(pool(dict(teachers), kind="sum", weights={"a": 1, "b": 2, "c": 3}))
    assert first is not None and second is not None
    assert [member.name for member in first.members] == ["a", "c"]
    assert first.weights == pytest.approx((1.5, 4.5))
    assert second.weights == (1, 2, 3)


def test_where_all_are_silent_so_is_the_pool() -> None:
    silent = Recorder(silent_about=frozenset("p"))
    one, other = pool({"a": silent, "b": silent}).score(ITEMS, Sampled())
    assert one.is_empty and not other.is_empty


@pytest.mark.parametrize("kind", ["geometric", "arithmetic", "sum"])
def test_only_the_members_of_a_sum_are_asked_for_more_than_distributions(kind: str) -> None:
    member = Recorder()
    pool({"a": member}, kind=kind).score(ITEMS, WithChunks())
    assert isinstance(member.signals[0], WithChunks) is (kind == "sum")


def test_whole_distributions_are_asked_for_wherever_sampled_tokens_do_not_suffice() -> None:
    member = Recorder()
    teacher = pool({"a": member})
    for signal in (Sampled(), Full(), TopK(k=3, support="teacher")):
        teacher.score(ITEMS, signal)
    assert [signal.name for signal in member.signals] == ["sampled", "full", "full"]
    gated = Recorder()
    pool({"a": gated}, gate=2.0).score(ITEMS, Sampled())
    assert [signal.name for signal in gated.signals] == ["full"]


def test_the_gate_is_handed_on() -> None:
    assert [
        answer.gate for answer in pools(pool({"a": Recorder()}, gate=0.5)) if answer is not None
    ] == [0.5, 0.5]


def test_a_pool_can_be_asked_everything_where_all_members_give_everything() -> None:
    whole = Config.model_validate(
        {"teachers": {"a": "self", "b": {"type": "model", "model": "x/y"}}}
    )
    assert whole.capabilities() == Capabilities(
        frozenset({"sampled", "topk", "full"}), writes=False
    )
    half = Config.model_validate(
        {"teachers": {"a": "self", "b": {"type": "scripted", "tape": "t"}}}
    )
    assert half.capabilities().signals == {"sampled"}


def test_several_do_not_write_one_answer() -> None:
    teacher = pool({"a": Recorder(), "b": Recorder()})
    assert teacher.sample([TeacherRequest(prompt("p"), 0)], SamplingParams(1)) is None
    assert teacher.bind_prompt(prompt("p")) is None


def test_states_are_kept_apart_by_name_and_steps_passed_on() -> None:
    members = {"a": Recorder(state={"w": torch.ones(1)}), "b": Recorder()}
    teacher = pool(dict(members))
    assert teacher.save_state().keys() == {"a/w"}
    teacher.load_state({"b/w": torch.zeros(1)})
    assert [list(member.state) for member in members.values()] == [[], ["w"]]
    teacher.after_step(1, ())
    assert [member.steps for member in members.values()] == [[1], [1]]


TWO = {"a": "self", "b": "self"}
WRAPPED = {
    "type": "privileged",
    "system": "x",
    "teacher": {"type": "route", "teachers": {"c": {"type": "pool", "teachers": TWO}}},
}
TAPE = {"type": "scripted", "tape": "t"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"teachers": TWO, "weights": {"a": 1}},
            "b has none; write one for every member or none at all",
        ),
        (
            {"teachers": TWO, "weights": {"a": 1, "b": 1, "bb": 1}},
            "no member is named 'bb'; did you mean 'b'",
        ),
        ({"teachers": TWO, "weights": {"a": 1, "b": 0}}, "b must be a positive number, got 0"),
        ({"teachers": TWO, "weights": {"a": 1, "b": float("inf")}}, "b must be a positive number"),
        ({"teachers": {"a": {"type": "pool", "teachers": TWO}}}, "a pool within a pool"),
        ({"teachers": {"a": WRAPPED}}, "a pool within a pool"),
        (
            {"teachers": TWO, "kind": "sum", "gate": 1.0},
            "no teacher can replace another; set kind: geometric",
        ),
        (
            {"teachers": {"a": "self", "b": TAPE}, "gate": 1.0},
            "the entropy of a member is known only if",
        ),
    ],
)
def test_settings_that_make_no_pool_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.model_validate(fields)
