"""What every teacher must do, asked of each file found in the folder of teachers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import toy_recipe, toy_run

from practicum.assembly import Assembled, assemble_run
from practicum.loop import train_step
from practicum.objective import Full, Sampled, Signal, TopK
from practicum.plugins import module_of, names
from practicum.ports import Teacher, TeacherRequest
from practicum.rollouts import Batch, sample_rollouts
from practicum.types import Rollout, TeacherSignal

# One recipe or more for each file; a teacher without an entry here fails the first test.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "model": [{}],
    "self": [{"weights": weights, "rate": 0.5, "period": 2} for weights in ("live", "frozen", "ema", "periodic")],
    "privileged": [
        {"teacher": {"type": "self", "weights": "ema", "rate": 0.5}, "reference": "{answer}"},
        {"teacher": {"type": "self", "weights": "frozen"}, "system": "ab"},
    ],
    "scripted": [{}],
}
CASES = [(name, settings) for name in names("teachers") for settings in SETTINGS.get(name, [])]
SIGNALS: list[Signal] = [Sampled(), TopK(k=3, support="student"), TopK(k=3, support="teacher"), Full()]


def test_every_teacher_on_disk_is_under_contract() -> None:
    assert sorted(SETTINGS) == names("teachers")


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *map(str, list(case[1].values())[:1])])[:40])
def assemble(request: pytest.FixtureRequest, models: Path, tape: Path, tmp_path: Path) -> Callable[[], Assembled]:
    """Builds the same student and teacher anew each time."""
    name, settings = request.param
    own = {"model": {"model": str(models / "teacher")}, "scripted": {"tape": str(tape)}}.get(name, {})
    changes: dict[str, Any] = {"teacher": {"type": name, **own, **settings}, "train.prompts_per_step": 4}
    if name == "scripted":
        changes["objective"] = {"signal": "sampled"}
    return lambda: assemble_run(toy_recipe(models, changes), tmp_path, None, lambda text: None)


@pytest.fixture(scope="module")
def tape(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rollouts of a run with the same first step as the contract's runs."""
    changes = {"train.prompts_per_step": 4, "objective": {"signal": "sampled"}}
    return toy_run(models, tmp_path_factory.mktemp("tape"), changes).folder / "rollouts.jsonl"


def first_rollouts(built: Assembled) -> list[Rollout]:
    from practicum.rollouts import prompts_of_step

    prompts = prompts_of_step(built.parts.prompts, 0, 1, 4)
    client = built.parts.student.sampling_client()
    return sample_rollouts(Batch(prompts, 1, 0, 1), client, built.parts.renderer, built.settings.sampling)


def can(teacher: Teacher, signal: Signal) -> bool:
    return signal.type in teacher.capabilities.signals and (
        not isinstance(signal, TopK) or signal.support in teacher.capabilities.supports
    )


def tensors(signal: TeacherSignal) -> dict[str, torch.Tensor]:
    fields = ("logprobs", "topk_ids", "topk_logprobs", "hidden")
    return {name: value for name in fields if (value := getattr(signal, name)) is not None}


def test_it_is_a_teacher_and_says_beforehand_what_it_can_give(assemble: Callable[[], Assembled]) -> None:
    built = assemble()
    teacher = built.parts.teacher
    assert isinstance(teacher, Teacher)
    assert teacher.capabilities.signals


def test_each_signal_it_can_give_is_aligned_with_the_rollouts(assemble: Callable[[], Assembled]) -> None:
    built = assemble()
    teacher, rollouts = built.parts.teacher, first_rollouts(built)

    for signal in SIGNALS:
        if not can(teacher, signal):
            continue
        answers = teacher.score(rollouts, signal)
        assert len(answers) == len(rollouts)
        for rollout, answer in zip(rollouts, answers, strict=True):
            given = tensors(answer)
            assert given, "an answer says something"
            assert all(len(value) == len(rollout.tokens) for value in given.values())
            assert all(torch.isfinite(value).all() for value in given.values())
            assert not any(value.requires_grad for value in given.values())
            if signal.type == "sampled":
                assert answer.logprobs is not None or answer.head is not None
            if signal.type == "full":
                assert answer.hidden is not None and answer.head is not None


def test_scoring_twice_gives_the_same_bits(assemble: Callable[[], Assembled]) -> None:
    built = assemble()
    teacher, rollouts = built.parts.teacher, first_rollouts(built)
    for signal in filter(lambda signal: can(teacher, signal), SIGNALS):
        once, again = teacher.score(rollouts, signal), teacher.score(rollouts, signal)
        for one, other in zip(once, again, strict=True):
            assert all(value.equal(tensors(other)[name]) for name, value in tensors(one).items())


def test_scoring_after_training_mode_gives_the_same_bits(assemble: Callable[[], Assembled]) -> None:
    built = assemble()
    teacher, rollouts = built.parts.teacher, first_rollouts(built)
    once = teacher.score(rollouts, Sampled())
    built.student.language_model.model.train()
    again = teacher.score(rollouts, Sampled())
    for one, other in zip(once, again, strict=True):
        assert all(value.equal(tensors(other)[name]) for name, value in tensors(one).items())


def test_the_order_of_rollouts_is_the_order_of_answers(assemble: Callable[[], Assembled]) -> None:
    built = assemble()
    teacher, rollouts = built.parts.teacher, first_rollouts(built)
    forwards = teacher.score(rollouts, Sampled())
    backwards = teacher.score(rollouts[::-1], Sampled())[::-1]
    for one, other in zip(forwards, backwards, strict=True):
        for name, value in tensors(one).items():
            torch.testing.assert_close(value, tensors(other)[name], rtol=1e-5, atol=1e-5)


def test_no_rollouts_need_no_answers(assemble: Callable[[], Assembled]) -> None:
    assert assemble().parts.teacher.score([], Sampled()) == []


def test_saved_and_loaded_it_scores_the_same(assemble: Callable[[], Assembled]) -> None:
    built = assemble()
    rollouts = first_rollouts(built)
    before = built.parts.teacher.score(rollouts, Sampled())
    train_step(1, built.parts, built.settings)
    teacher = built.parts.teacher
    state = {name: value.clone() for name, value in teacher.save_state().items()}
    weights = {stem: {k: v.clone() for k, v in named.items()} for stem, named in built.trainer.save_state().items()}
    expected = teacher.score(rollouts, Sampled())
    other = assemble()
    other.trainer.load_state(weights)
    other.parts.teacher.load_state(state)
    for one, two, start in zip(expected, other.parts.teacher.score(rollouts, Sampled()), before, strict=True):
        for name, value in tensors(one).items():
            assert value.equal(tensors(two)[name])
            assert value.shape == tensors(start)[name].shape


def test_its_own_answers_are_aligned_with_the_prompts_or_none(assemble: Callable[[], Assembled]) -> None:
    built = assemble()
    requests = [TeacherRequest(prompt, seed) for seed, prompt in enumerate(built.parts.prompts[:3])]
    answers = built.parts.teacher.sample(requests, built.settings.sampling)
    assert answers is None or len(answers) == 3
    for answer in answers or []:
        assert 1 <= len(answer.tokens) <= built.settings.sampling.max_new_tokens


def test_what_the_settings_promise_is_what_the_teacher_can_do(models: Path, tape: Path) -> None:
    for name in names("teachers"):
        extra = {"model": {"model": str(models / "teacher")}, "scripted": {"tape": str(tape)}}.get(name, {})
        config = module_of("teachers", name).Config.model_validate({"type": name, **extra, **SETTINGS[name][0]})
        assert config.capabilities().signals <= {"sampled", "topk", "full"}
