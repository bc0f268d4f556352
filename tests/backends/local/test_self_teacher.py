"""A self-teacher follows its rule exactly and only holds weights that are trained."""

import pytest
import torch

from backends.tiny import data_for, random_tokens, rollouts, tiny
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer
from practicum.objective import Full, Objective, Sampled
from practicum.ports import AdamParams, WeightUpdateRule
from practicum.types import Datum, SampleRequest, SamplingParams, ScoreRequest

REQUEST = ScoreRequest(random_tokens(6, 1), (5, 6, 7))
RULES = [
    WeightUpdateRule("live"),
    WeightUpdateRule("frozen"),
    WeightUpdateRule("ema", rate=0.3),
    WeightUpdateRule("periodic", period=2),
]
RULE_NAMES = [rule.weights for rule in RULES]


def step(trainer: LocalTrainer) -> None:
    trainer.forward_backward(data_for(tiny(seed=1)), Objective(), 0)
    trainer.optim_step(AdamParams(learning_rate=0.02))


def history(trainer: LocalTrainer, teachers, count: int):
    """Return the student's weights before the first step and after each."""
    seen = [copies(trainer)]
    for number in range(1, count + 1):
        step(trainer)
        for teacher in teachers:
            teacher.after_step(number, ())
        seen.append(copies(trainer))
    return seen


def copies(trainer: LocalTrainer):
    return {
        name: value.detach().clone()
        for name, value in trainer.language_model.trainable_parameters().items()
    }


def expected_weights(rule: WeightUpdateRule, seen):
    if rule.weights == "live":
        return seen[-1]
    if rule.weights == "frozen":
        return seen[0]
    if rule.weights == "periodic":
        return seen[(len(seen) - 1) // rule.period * rule.period]
    mean = seen[0]
    for student in seen[1:]:
        mean = {
            name: (1 - rule.rate) * mean[name] + rule.rate * value
            for name, value in student.items()
        }
    return mean


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_scores_are_those_of_the_weights_the_rule_names(rule, count):
    model = tiny()
    trainer = LocalTrainer(model)
    teacher = trainer.build_self_teacher(rule)
    seen = history(trainer, [teacher], count)
    other = tiny()
    other.model.load_state_dict(expected_weights(rule, seen), strict=False)
    found, expected = (
        scorer.score([REQUEST], Sampled())[0].logprobs for scorer in (teacher, LocalSampler(other))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(copies(trainer)["model.norm.weight"], seen[-1]["model.norm.weight"])


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_a_shared_prefix_is_read_with_the_weights_the_rule_names(rule):
    model, root = tiny(), random_tokens(30, 7)
    trainer = LocalTrainer(model)
    teacher = trainer.build_self_teacher(rule)
    requests = [ScoreRequest((*root, seed + 3), random_tokens(4, seed)) for seed in range(3)]
    before = teacher.score(requests, Sampled())
    seen = history(trainer, [teacher], 3)
    other = tiny()
    other.model.load_state_dict(expected_weights(rule, seen), strict=False)
    found, expected = (
        torch.cat([signal.logprobs for signal in scorer.score(requests, Sampled())])
        for scorer in (teacher, LocalSampler(other))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    first = torch.cat([signal.logprobs for signal in before])
    assert torch.equal(found, first) == (rule.weights == "frozen")


def test_what_live_weights_said_does_not_move_between_the_updates_of_a_step():
    """Check that the head of an answer, read after the first update, is the old one; the new one would not fit the states."""
    trainer = LocalTrainer(tiny())
    teacher = trainer.build_self_teacher(WeightUpdateRule("live", updates=2))
    (signal,) = teacher.score([REQUEST], Full())
    before = signal.head.logprobs(signal.states)
    step(trainer)
    assert signal.head.logprobs(signal.states).equal(before)
    teacher.after_step(1, ())
    live = trainer.build_self_teacher(WeightUpdateRule("live")).score([REQUEST], Sampled())[0]
    assert teacher.score([REQUEST], Sampled())[0].logprobs.equal(live.logprobs)


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_scoring_and_sampling_leave_the_student_alone(rule):
    trainer = LocalTrainer(tiny())
    teacher = trainer.build_self_teacher(rule)
    step(trainer)
    before = copies(trainer)
    teacher.score([REQUEST], Full())
    teacher.sample([SampleRequest((5, 6), 1)], SamplingParams(4))
    assert all(torch.equal(value, before[name]) for name, value in copies(trainer).items())


def test_a_signal_outlives_the_swap_of_weights():
    """Check that hidden states and head belong to the held weights even when they are read after the student was restored."""
    trainer = LocalTrainer(tiny())
    teacher = trainer.build_self_teacher(WeightUpdateRule("frozen"))
    before = teacher.score([REQUEST], Sampled())[0].logprobs
    step(trainer)
    signal = teacher.score([REQUEST], Full())[0]
    logprobs = signal.head.logprobs(signal.hidden).cpu()
    found = logprobs.gather(1, torch.tensor(REQUEST.tokens)[:, None])[:, 0]
    torch.testing.assert_close(found, before)


def test_the_sampler_of_a_frozen_teacher_is_the_student_of_the_start():
    trainer = LocalTrainer(tiny())
    teacher = trainer.build_self_teacher(WeightUpdateRule("frozen"))
    requests = [SampleRequest(random_tokens(5, seed), seed) for seed in range(4)]
    step(trainer)
    found = teacher.sample(requests, SamplingParams(8))
    expected = LocalSampler(tiny()).sample(requests, SamplingParams(8))
    assert [sample.tokens.tolist() for sample in found] == [
        sample.tokens.tolist() for sample in expected
    ]


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_only_what_learns_is_held(rule):
    model = tiny("qwen3")
    model.model.requires_grad_(False)
    model.model.model.layers[1].mlp.requires_grad_(True)
    trainer = LocalTrainer(model)
    teacher = trainer.build_self_teacher(rule)
    assert set(teacher.overlay) == (
        set() if rule.weights == "live" else set(model.trainable_parameters())
    )
    assert all(".layers.1.mlp." in name for name in teacher.overlay)
    assert set(teacher.save_state()) == (
        set(teacher.overlay) if rule.weights in ("ema", "periodic") else set()
    )


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_a_restored_self_teacher_goes_on_bit_for_bit(rule):
    trainer = LocalTrainer(tiny())
    teacher = trainer.build_self_teacher(rule)
    history(trainer, [teacher], 3)
    student = {
        stem: {n: v.clone() for n, v in tensors.items()}
        for stem, tensors in trainer.save_state().items()
    }
    saved = {name: value.clone() for name, value in teacher.save_state().items()}
    again = LocalTrainer(tiny())
    restored = again.build_self_teacher(rule)
    again.load_state(student)
    restored.load_state(saved)
    for number in (4, 5):
        for one, two in ((trainer, teacher), (again, restored)):
            step(one)
            two.after_step(number, ())
    assert torch.equal(
        *(scorer.score([REQUEST], Sampled())[0].logprobs for scorer in (teacher, restored))
    )


def test_a_live_self_teacher_gives_no_loss_and_no_gradient():
    trainer = LocalTrainer(tiny())
    requests = [
        ScoreRequest(item.prompt_tokens, tuple(item.tokens.tolist())) for item in rollouts()
    ]
    signals = trainer.build_self_teacher(WeightUpdateRule("live")).score(requests, Full())
    data = [Datum(item, signal) for item, signal in zip(rollouts(), signals, strict=True)]
    for choice in (
        {},
        {"divergence": "jsd(0.3)"},
        {"signal": "topk(4)"},
        {"estimator": "score_function(1)"},
    ):
        result = trainer.forward_backward(data, Objective.model_validate(choice), 0)
        assert abs(result.metrics["loss"]) < 1e-6
        assert trainer.optim_step(AdamParams(0.0))["grad_norm"] < 1e-5


def test_a_self_teacher_can_answer_everything():
    assert LocalTrainer(tiny()).build_self_teacher(
        WeightUpdateRule("ema")
    ).capabilities.signals == {
        "sampled",
        "topk",
        "full",
    }
