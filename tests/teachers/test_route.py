"""Each rollout reaches its own teacher, every teacher is asked once, and the answers are returned in order."""

from typing import Any

import pytest
import torch
from recorder import Recorder, prompt, rollout

from practicum.errors import DataError, TeacherError
from practicum.objective import Sampled
from practicum.ports import Capabilities, Teacher, TeacherRequest
from practicum.teachers.none import NoTeacher
from practicum.teachers.route import Config, RouteTeacher
from practicum.teaching.members import intersect_capabilities
from practicum.types import SamplingParams, TeacherSignal

PARAMS = SamplingParams(1)


def route(teachers: dict[str, Teacher], **fields: Any) -> RouteTeacher:
    config = Config.model_validate({"teachers": dict.fromkeys(teachers, "self"), **fields})
    return RouteTeacher(teachers, config)


def two() -> dict[str, Teacher]:
    return {"math": Recorder(-1.0), "code": Recorder(-2.0)}


def test_rollouts_are_sorted_by_domain_and_answered_in_their_own_order() -> None:
    teachers = two()
    domains = ["code", "math", "code", "math", "math"]
    items = [rollout(prompt(str(number), domain=domain)) for number, domain in enumerate(domains)]
    answers = route(teachers).score(items, Sampled())
    assert [answer.name for answer in answers] == domains
    assert [answer.logprobs[0].item() for answer in answers if answer.logprobs is not None] == [
        -2,
        -1,
        -2,
        -1,
        -1,
    ]
    asked = {
        name: teacher.asked for name, teacher in teachers.items() if isinstance(teacher, Recorder)
    }
    assert [[item.prompt.id for item in batch] for batch in asked["math"]] == [["1", "3", "4"]]
    assert [[item.prompt.id for item in batch] for batch in asked["code"]] == [["0", "2"]]


@pytest.mark.parametrize(
    ("by", "fields"),
    [
        ("teacher", {"teacher": "code"}),
        ("domain", {"domain": "code"}),
        ("level", {"privileged": {"level": "code"}}),
    ],
)
def test_a_prompt_names_its_teacher_by_a_label_or_a_field(by: str, fields: dict[str, Any]) -> None:
    (answer,) = route(two(), key=by).score([rollout(prompt("p", **fields))], Sampled())
    assert answer.name == "code"


def test_by_outcome_the_verifier_decides() -> None:
    teachers = {"correct": NoTeacher(), "incorrect": Recorder(), "unknown": Recorder(-3.0)}
    rewards = [1.0, 0.0, None, 0.5]
    answers = route(teachers, key="outcome").score(
        [rollout(prompt("p"), reward=reward) for reward in rewards], Sampled()
    )
    assert [answer.name for answer in answers] == ["correct", "incorrect", "unknown", "incorrect"]
    assert [answer.is_empty for answer in answers] == [True, False, False, False]


def test_a_default_takes_what_leads_nowhere_else() -> None:
    items = [
        rollout(prompt("a", domain="law")),
        rollout(prompt("b")),
        rollout(prompt("c", domain="math")),
    ]
    answers = route(two(), default="code").score(items, Sampled())
    assert [answer.name for answer in answers] == ["code", "code", "math"]


def test_without_a_default_the_prompt_and_its_key_are_named() -> None:
    with pytest.raises(
        DataError,
        match=r"prompt 'p' has the domain 'law', which selects no teacher.*math, code.*defa",
    ):
        route(two()).score([rollout(prompt("p", domain="law"))], Sampled())
    with pytest.raises(DataError, match=r"prompt 'p' has no level; the route knows math, code"):
        route(two(), key="level").score([rollout(prompt("p"))], Sampled())
    with pytest.raises(DataError, match=r"prompt 'p' has the outcome 'unknown'"):
        route({"correct": Recorder()}, key="outcome").score([rollout(prompt("p"))], Sampled())


def test_answers_of_its_own_are_routed_too() -> None:
    requests = [
        TeacherRequest(prompt(str(seed), domain=domain), seed)
        for seed, domain in enumerate(["code", "math"])
    ]
    teachers = two()
    written = route(teachers).sample(requests, PARAMS)
    assert written is not None
    assert [sample.tokens.item() for sample in written] == [0, 1]
    assert [sample.policy_logprobs.item() for sample in written] == [-2.0, -1.0]
    route(teachers).bind_prompt(prompt("v", domain="math"))
    assert isinstance(teachers["math"], Recorder)
    assert [seen.id for seen in teachers["math"].prompts] == ["1", "v"]


def test_nobody_writes_where_a_member_cannot_or_before_there_is_an_outcome() -> None:
    requests = [TeacherRequest(prompt(domain, domain=domain), 0) for domain in ("math", "code")]
    assert route({"math": Recorder(), "code": NoTeacher()}).sample(requests, PARAMS) is None
    by_outcome = route({"correct": Recorder()}, key="outcome")
    assert by_outcome.sample(requests, PARAMS) is None
    assert by_outcome.bind_prompt(requests[0].prompt) is None
    assert not by_outcome.capabilities.writes


def test_states_are_kept_apart_by_name_and_steps_passed_on() -> None:
    teachers = {
        "math": Recorder(state={"w": torch.ones(1)}),
        "math-2": Recorder(state={"w": torch.zeros(2)}),
    }
    teacher = route(dict(teachers))
    state = teacher.save_state()
    assert {name: len(tensor) for name, tensor in state.items()} == {"math/w": 1, "math-2/w": 2}
    for member in teachers.values():
        member.state = {}
    teacher.load_state(state)
    assert [len(member.state["w"]) for member in teachers.values()] == [1, 2]
    teacher.after_step(3, ())
    assert [member.steps for member in teachers.values()] == [[3], [3]]


def test_routes_within_routes_keep_the_whole_way_in_the_name() -> None:
    inner = route({"correct": Recorder()}, key="outcome", default="correct")
    (answer,) = route({"math": inner}).score([rollout(prompt("p", domain="math"))], Sampled())
    assert answer.name == "math/correct"


def test_a_member_that_leaves_out_a_rollout_is_named() -> None:
    class Short(Recorder):
        def score(self, rollouts: Any, signal: Any) -> list[TeacherSignal]:
            return []

    with pytest.raises(TeacherError, match="the teacher 'math' answered 0 of 1 rollouts"):
        route({"math": Short()}).score([rollout(prompt("p", domain="math"))], Sampled())


def test_what_all_can_answer_is_what_each_can_and_silence_narrows_nothing() -> None:
    tape = Capabilities(frozenset({"sampled"}), writes=False)
    remote = Capabilities(
        frozenset({"sampled", "topk"}), supports=frozenset({"teacher"}), largest_k=20
    )
    local = Capabilities(frozenset({"sampled", "topk", "full"}))
    nothing = NoTeacher().capabilities
    assert intersect_capabilities([local, tape]) == Capabilities(
        frozenset({"sampled"}), writes=False
    )
    assert intersect_capabilities([local, remote]) == remote
    assert intersect_capabilities([local, nothing]) == Capabilities(local.signals, writes=False)
    assert not intersect_capabilities([nothing]).signals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"teachers": {}}, "no teacher is named"),
        (
            {"teachers": {"a b": "self"}},
            r"'a b' cannot name a teacher; write letters, digits, '_' and '-'",
        ),
        ({"teachers": {"a/b": "self"}}, "cannot name a teacher"),
        (
            {"teachers": {"math": "self"}, "default": "maths"},
            "no member is named 'maths'; did you mean 'math'",
        ),
        (
            {"teachers": {"corect": "self"}, "key": "outcome"},
            "no outcome selects 'corect'; did you mean 'correct'",
        ),
    ],
)
def test_settings_that_lead_nowhere_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.model_validate(fields)


def test_by_outcome_the_default_may_have_any_name() -> None:
    assert Config.model_validate(
        {"key": "outcome", "teachers": {"correct": "none", "rest": "self"}, "default": "rest"}
    )
