"""Gradients against a naive twin that holds every [T, V] matrix, and conditions that must not change them."""

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy import in_check

from backends.places import SECOND, Current, count_transfers
from backends.tiny import (
    ARCHITECTURES,
    VOCABULARY,
    all_logits,
    data_for,
    hidden_signal,
    rollout,
    rollouts,
    tiny,
)
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.errors import CheckpointError
from practicum.losses import (
    build_token_batch,
    compute_coefficients,
    compute_term_values,
)
from practicum.losses.closed_form import Autograd, Fused
from practicum.losses.measures import COLUMNS
from practicum.losses.passes import build_score_requests
from practicum.objective import Full, Objective, Sampled, TeacherDistribution, TopK
from practicum.ports import AdamParams
from practicum.types import (
    Datum,
    ForwardResult,
    PooledSignal,
    ScoreRequest,
    TeacherSignal,
    TokenRecord,
)

ROUNDED = 0.1
"""The greatest difference of two gradients from operands in bfloat16, as a share of the whole gradient."""
OBJECTIVES = [
    {},
    {"divergence": "jsd(0.3)", "signal": "topk(5, union)", "aggregate": "seq_mean_token_mean"},
    {"signal": "topk(5, student, sampled)", "correction": "ratio_truncate(1.5)"},
    {"signal": "sampled"},
    {
        "estimator": "score_function(0.9, group_mean)",
        "correction": "prefix_ratio",
        "aggregate": "seq_mean_token_sum",
    },
    {"weights": "soft_or(0.4)", "target": "log_linear(0.8, 0.2)"},
    {
        "losses": [
            {"divergence": "forward_kl", "filter": "correct"},
            {
                "estimator": "score_function(1, kl)",
                "coefficient": 0.3,
                "weights": "entropy_top(0.5)",
            },
        ]
    },
    {"losses": [{"signal": "text", "divergence": "ce"}, {"weights": "ce_scale"}]},
]


def trainable(model: LanguageModel) -> LanguageModel:
    model.model.requires_grad_(True)
    return model


def gradients(
    model: LanguageModel, data, objective, limits=None, seed: int = 0, *, dropout: bool = False
):
    """Return the gradient by name and the result, of a fresh trainer."""
    trainer = LocalTrainer(model, limits, dropout=dropout)
    result = trainer.forward_backward(data, objective, seed)
    found = {
        name: parameter.grad.clone()
        for name, parameter in model.trainable_parameters().items()
        if parameter.grad is not None
    }
    model.model.zero_grad(set_to_none=True)
    return found, result


def naive_gradients(student: LanguageModel, teacher: LanguageModel, data, objective):
    """Compute one forward per sequence, the whole [T, V] of both models, and one backward of the whole loss."""
    student.model.eval()
    student.model.zero_grad(set_to_none=True)
    used = [datum for datum in data if datum.rollout.loss_mask.any()]
    ours = torch.log_softmax(
        torch.cat([all_logits(student, datum.rollout) for datum in used]), dim=-1
    )
    with torch.no_grad():
        theirs = torch.log_softmax(
            torch.cat([all_logits(teacher, datum.rollout) for datum in used]), dim=-1
        )
    tokens = build_token_batch(data, objective)
    values = compute_term_values(ours, TeacherDistribution(full=theirs), tokens, objective)
    pairs = zip(objective.losses, values, strict=True)
    torch.stack(
        [
            (compute_coefficients(term, value.detach(), tokens) * value.loss_value).sum()
            for term, value in pairs
        ]
    ).sum().backward()
    found = {
        name: value.grad.clone()
        for name, value in student.trainable_parameters().items()
        if value.grad is not None
    }
    student.model.zero_grad(set_to_none=True)
    return found


def assert_same(found, expected, relative=1e-6):
    """Assert that every parameter differs by at most `relative` times the norm of the whole gradient."""
    assert found.keys() == expected.keys()
    norm = torch.nn.utils.get_total_norm(expected.values()).item() if expected else 0.0
    assert norm > 0
    relative = relative if Current.place.is_exact else ROUNDED
    for name, value in expected.items():
        assert (found[name] - value).norm().item() <= relative * norm, name


def test_states_that_wait_on_the_host_are_fetched_once_an_update():
    student, teacher = trainable(tiny(seed=0)), tiny(seed=1)
    items = [rollout(5, 6, seed, group=str(seed)) for seed in range(8)]
    requests = build_score_requests(items)
    found = []
    for device_bytes in (2**30, 0):
        sampler = LocalSampler(teacher, device_bytes=device_bytes)
        data = list(map(Datum, items, sampler.score(requests, Full())))
        with count_transfers() as counts:
            gradient, _ = gradients(student, data, Objective(), TrainerLimits(16))
        found.append((gradient, counts["from the CPU"]))
    (expected, few), (waiting, many) = found
    for name, value in expected.items():
        assert torch.equal(waiting[name], value), name
    assert many - few == (len(items) if Current.place is SECOND else 0)


@pytest.mark.parametrize("choice", OBJECTIVES, ids=str)
@pytest.mark.parametrize("architecture", in_check(ARCHITECTURES, "llama"))
def test_gradients_equal_a_naive_twin_in_every_parameter(architecture, choice):
    student, teacher = trainable(tiny(architecture, 0)), tiny(architecture, 1)
    objective, data = Objective.model_validate(choice), data_for(teacher)
    found, _ = gradients(
        student, data, objective, TrainerLimits(micro_batch_tokens=20, chunk_tokens=3)
    )
    assert_same(found, naive_gradients(student, teacher, data, objective), 2e-6)


@pytest.mark.parametrize("choice", OBJECTIVES, ids=str)
def test_gradients_and_records_do_not_depend_on_how_the_batch_is_cut(choice):
    """Compare with float64: the order of a product's sums depends on its shape, on some processors and on GPUs.

    So two cuts may differ by as much as each differs from the gradient in float64.
    """
    student, objective = trainable(tiny()), Objective.model_validate(choice)
    data = data_for(tiny(seed=1))
    expected, result = gradients(student, data, objective, TrainerLimits(10**6, 10**6))
    exact = naive_gradients(doubled(tiny()), doubled(tiny(seed=1)), data, objective)
    rounding = measure_difference(expected, exact)
    assert rounding <= (2e-6 if Current.place.is_exact else ROUNDED)
    rtol = 1e-5 if Current.place.is_exact else 1e-2
    for micro, chunk in [(1, 10**6), (10**6, 1), (30, 7), (1, 1), (15, 2)]:
        found, other = gradients(student, data, objective, TrainerLimits(micro, chunk))
        assert_same(found, expected, 2 * rounding)
        assert other.metrics == pytest.approx(result.metrics, rel=rtol, abs=rtol / 10)
        torch.testing.assert_close(
            asdict(other.outputs),
            asdict(result.outputs),
            equal_nan=True,
            rtol=rtol,
            atol=rtol,
        )


def doubled(model: LanguageModel) -> LanguageModel:
    """Return the model in float64, trainable."""
    model.model.double()
    return trainable(model)


def measure_difference(found, expected) -> float:
    """Return the largest difference of a parameter's gradient, relative to the norm of the whole gradient."""
    norm = torch.nn.utils.get_total_norm(expected.values()).item()
    return max((found[name] - value).norm().item() for name, value in expected.items()) / norm


def outputs_by_rollout(result: ForwardResult, data: Sequence[Datum]) -> list[TokenRecord]:
    return result.outputs.split([datum.rollout for datum in data])


def test_gradients_do_not_depend_on_the_order_of_the_batch():
    student, objective = trainable(tiny()), Objective.model_validate(OBJECTIVES[-1])
    data = data_for(tiny(seed=1))
    expected, result = gradients(student, data, objective)
    found, backwards = gradients(student, data[::-1], objective)
    assert_same(found, expected)
    turned = outputs_by_rollout(backwards, data[::-1])[::-1]
    for one, two in zip(turned, outputs_by_rollout(result, data), strict=True):
        torch.testing.assert_close(one.logprobs, two.logprobs, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_gradients_of_two_calls_add_up():
    student, data = trainable(tiny()), data_for(tiny(seed=1))
    objective = Objective.model_validate({"aggregate": "seq_mean_token_sum"})
    parts = [gradients(student, part, objective)[0] for part in (data[:2], data[3:])]
    trainer = LocalTrainer(student)
    trainer.forward_backward(data[:2], objective, 0)
    trainer.forward_backward(data[3:], objective, 0)
    assert_same(
        {name: value.grad for name, value in student.trainable_parameters().items()},
        {n: parts[0][n] + parts[1][n] for n in parts[0]},
    )


def test_padding_rows_of_the_vocabulary_change_nothing_and_get_no_gradient():
    student, teacher = trainable(tiny()), tiny(seed=1)
    padded = trainable(tiny(rows=72))
    weights = student.model.state_dict()
    noise = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    noise = noise.to(student.device)
    weights = {
        name: torch.cat([v, noise]) if len(v) == VOCABULARY else v for name, v in weights.items()
    }
    padded.model.load_state_dict(weights)
    for choice in OBJECTIVES[:3]:
        objective = Objective.model_validate(choice)
        expected, plain = gradients(student, data_for(teacher), objective)
        found, result = gradients(padded, data_for(teacher), objective)
        assert result.metrics == pytest.approx(plain.metrics, rel=1e-5)
        rows = found["model.embed_tokens.weight"][VOCABULARY:]
        assert rows.shape == (8, 32)
        assert rows.abs().max() == 0
        assert_same(
            {name: v[:VOCABULARY] if len(v) == 72 else v for name, v in found.items()}, expected
        )


def test_teachers_with_different_heads_in_one_batch():
    student, objective = (
        trainable(tiny()),
        Objective.model_validate({"aggregate": "seq_mean_token_sum"}),
    )
    one, two = tiny(seed=1), tiny("qwen3", seed=2)
    items = rollouts()
    mixed = [
        Datum(item, hidden_signal(one if row % 2 else two, item)) for row, item in enumerate(items)
    ]
    found, result = gradients(student, mixed, objective)
    expected = naive_by_rows(
        student, [one if row % 2 else two for row in range(len(items))], mixed, objective
    )
    assert_same(found, expected, 2e-6)
    assert result.metrics["tokens"] == sum(int(item.loss_mask.sum()) for item in items)


def naive_by_rows(student, teachers, data, objective):
    """Compute the naive twin one row at a time; the aggregate must be a mean of sums over sequences."""
    used = [row for row, datum in enumerate(data) if datum.rollout.loss_mask.any()]
    total: dict[str, torch.Tensor] = {}
    for row in used:
        for name, value in naive_gradients(student, teachers[row], [data[row]], objective).items():
            total[name] = total.get(name, 0) + value / len(used)
    return total


def wire_signal(teacher: LanguageModel, item, k: int | None = None) -> TeacherSignal:
    full = hidden_signal(teacher, item)
    logprobs = full.head.logprobs(full.hidden).cpu()
    sampled = logprobs.gather(1, item.tokens[:, None])[:, 0]
    if k is None:
        return TeacherSignal(logprobs=sampled)
    best = logprobs.topk(k, dim=-1)
    return TeacherSignal(logprobs=sampled, topk_ids=best.indices, topk_logprobs=best.values)


def test_candidates_over_the_wire_give_the_gradient_of_a_local_teacher():
    student, teacher = trainable(tiny()), tiny(seed=1)
    objective = Objective.model_validate({"signal": "topk(5, teacher)"})
    expected, _ = gradients(student, data_for(teacher), objective)
    wire = [Datum(item, wire_signal(teacher, item, 5)) for item in rollouts()]
    found, result = gradients(student, wire, objective, TrainerLimits(25, 4))
    assert_same(found, expected)
    assert "teacher_entropy" not in result.metrics


def test_sampled_logprobs_over_the_wire_give_the_gradient_of_a_local_teacher():
    student, teacher = trainable(tiny()), tiny(seed=1)
    objective = Objective.model_validate({"signal": "sampled", "estimator": "score_function(0.5)"})
    wire = [Datum(item, wire_signal(teacher, item)) for item in rollouts()]
    assert_same(
        gradients(student, wire, objective)[0], gradients(student, data_for(teacher), objective)[0]
    )


def test_local_and_remote_signals_with_different_numbers_of_candidates_may_meet_in_one_batch():
    student, teacher = trainable(tiny()), tiny(seed=1)
    objective = Objective.model_validate({"signal": "sampled"})
    items = rollouts()
    signals = [
        wire_signal(teacher, items[0], 3),
        wire_signal(teacher, items[1], 5),
        wire_signal(teacher, items[2]),
    ]
    signals += [wire_signal(teacher, items[3]), hidden_signal(teacher, items[4])]
    mixed = [Datum(item, signal) for item, signal in zip(items, signals, strict=True)]
    found, result = gradients(student, mixed, objective)
    assert_same(found, gradients(student, data_for(teacher), objective)[0])
    only = data_for(teacher, [items[4]])
    assert result.metrics["teacher_entropy"] == pytest.approx(
        gradients(student, only, objective)[1].metrics["teacher_entropy"]
    )


def test_scores_of_a_sampler_serve_as_signals():
    student, teacher = trainable(tiny()), tiny(seed=1)
    requests = [
        ScoreRequest(item.prompt_tokens, tuple(item.tokens.tolist())) for item in rollouts()
    ]
    for signal in (Full(), TopK(), Sampled()):
        objective = Objective.model_validate({"signal": signal})
        scored = LocalSampler(teacher).score(requests, signal)
        data = [Datum(item, said) for item, said in zip(rollouts(), scored, strict=True)]
        assert_same(
            gradients(student, data, objective)[0],
            gradients(student, data_for(teacher), objective)[0],
            1e-5,
        )


def test_an_empty_mask_contributes_nothing():
    student, teacher = trainable(tiny()), tiny(seed=1)
    objective = Objective.model_validate({"aggregate": "seq_mean_token_mean"})
    data = data_for(teacher)
    without = [datum for datum in data if datum.rollout.loss_mask.any()]
    found, result = gradients(student, data, objective)
    expected, plain = gradients(student, without, objective)
    assert_same(found, expected, 1e-7)
    assert result.metrics == pytest.approx(plain.metrics)


@pytest.mark.parametrize("aggregate", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize(
    "choice", [{"divergence": "jsd(0.3)"}, {"signal": "topk(5)"}, {"signal": "sampled"}], ids=str
)
def test_an_answer_of_which_nothing_is_learned_does_not_count(choice, aggregate):
    """Check SDPO's mask (2601.20802, released code): without a context there is no part in the mean; the first pass agrees."""
    student, teacher = trainable(tiny()), tiny(seed=1)
    objective = Objective.model_validate({**choice, "aggregate": aggregate})
    data = data_for(teacher)
    silent = [replace(datum, signal=TeacherSignal()) for datum in data[:2]]
    assert any(datum.rollout.loss_mask.any() for datum in silent)
    found, _ = gradients(student, [*silent, *data[2:]], objective)
    expected, _ = gradients(student, data[2:], objective)
    assert_same(found, expected, 1e-6)


@pytest.mark.parametrize("with_reference", [False, True])
def test_an_answer_counts_if_any_term_learns_of_it(with_reference):
    """Check that a reward or the reference gives a loss where the teacher is silent."""
    teacher = tiny(seed=1)
    other = {"against": "reference"} if with_reference else {"signal": "score(group_mean)"}
    objective = Objective.model_validate({"losses": [{}, other]})
    data = data_for(teacher)
    silent = [
        replace(
            datum,
            signal=TeacherSignal(),
            reference=datum.signal if with_reference else TeacherSignal(),
        )
        for datum in data[:2]
    ]
    batch = build_token_batch([*silent, *data[2:]], objective)
    torch.testing.assert_close(batch.aggregate, build_token_batch(data, objective).aggregate)


@pytest.mark.parametrize("choice", [{}, {"estimator": "score_function(1)"}], ids=str)
def test_a_batch_with_nothing_to_learn_gives_no_gradient(choice):
    student = trainable(tiny())
    data = data_for(tiny(seed=1), [rollout(3, 4, 1, mask=[False] * 4), rollout(3, 0, 2)])
    found, result = gradients(student, data, Objective.model_validate(choice))
    assert found == {}
    assert result.metrics["tokens"] == 0
    assert [len(output.logprobs) for output in outputs_by_rollout(result, data)] == [4, 0]


@pytest.mark.float32
def test_outputs_stand_at_their_tokens_and_are_nan_at_the_others():
    student, teacher = trainable(tiny()), tiny(seed=1)
    data = data_for(teacher)
    _, result = gradients(student, data, Objective())
    for datum, output in zip(data, outputs_by_rollout(result, data), strict=True):
        mask = datum.rollout.loss_mask
        for name in COLUMNS:
            assert torch.equal(~torch.isnan(getattr(output, name)), mask), name
        if mask.any():
            logits = torch.log_softmax(all_logits(student, datum.rollout), dim=-1).detach()
            sampled = logits.gather(1, datum.rollout.tokens[mask][:, None])[:, 0]
            torch.testing.assert_close(output.logprobs[mask], sampled, rtol=1e-5, atol=1e-5)
            entropy = -(logits.exp() * logits).sum(dim=-1)
            torch.testing.assert_close(output.student_entropy[mask], entropy, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(output.reverse_kl, output.divergence, equal_nan=True)
            assert output.weight[mask].tolist() == pytest.approx(
                [1 / result.metrics["tokens"]] * int(mask.sum())
            )


def test_the_weights_of_terms_are_added_and_what_the_teacher_hides_is_nan():
    student = trainable(tiny())
    terms = Objective.model_validate(
        {"losses": [{"coefficient": 0.5}, {"divergence": "forward_kl", "coefficient": 2}]}
    )
    _, result = gradients(student, data_for(tiny(seed=1)), terms)
    weights = result.outputs.weight
    assert weights[~weights.isnan()].tolist() == pytest.approx(
        [2.5 / result.metrics["tokens"]] * 14
    )
    said = [
        replace(datum, signal=TeacherSignal(logprobs=-torch.ones(len(datum.rollout.tokens))))
        for datum in data_for(tiny())
    ]
    _, result = gradients(student, said, Objective.model_validate({"signal": "sampled"}))
    assert (
        result.outputs.teacher_entropy.isnan().all()
        and not result.outputs.student_entropy.isnan().all()
    )


def test_each_of_several_teachers_has_its_share_of_the_loss():
    student = trainable(tiny())
    data = data_for(tiny(seed=1))
    named = [
        replace(datum, signal=replace(datum.signal, name="ab"[place % 2]))
        for place, datum in enumerate(data)
    ]
    _, result = gradients(student, named, Objective())
    parts = {"a": 0.0, "b": 0.0}
    for datum, output in zip(named, outputs_by_rollout(result, named), strict=True):
        parts[datum.signal.name] += output.divergence.nansum().item()
    assert result.metrics["teacher_share/a"] == pytest.approx(
        parts["a"] / sum(parts.values()), rel=1e-5
    )
    assert result.metrics["teacher_share/a"] + result.metrics["teacher_share/b"] == pytest.approx(
        1.0
    )
    _, alone = gradients(student, data, Objective())
    assert not any(name.startswith("teacher_share") for name in alone.metrics)


@pytest.mark.parametrize(("signal", "fused"), [("full", 1.0), ("sampled", 1.0), ("topk(4)", 0.0)])
def test_an_update_says_which_logit_side_it_took(signal, fused):
    _, result = gradients(
        trainable(tiny()), data_for(tiny(seed=1)), Objective.model_validate({"signal": signal})
    )
    assert result.metrics["fused"] == fused


@pytest.mark.float32
def test_metrics_are_means_over_the_supervised_tokens():
    student, teacher = trainable(tiny()), tiny(seed=1)
    data = data_for(teacher)
    _, result = gradients(
        student, data, Objective.model_validate({"divergence": "jsd(0.3)"}), TrainerLimits(20, 3)
    )
    kept = [datum for datum in data if datum.rollout.loss_mask.any()]
    s = torch.log_softmax(
        torch.cat([all_logits(student, datum.rollout) for datum in kept]), dim=-1
    ).detach()
    t = torch.log_softmax(
        torch.cat([all_logits(teacher, datum.rollout) for datum in kept]), dim=-1
    ).detach()
    m = (0.3 * t.exp() + 0.7 * s.exp()).log()
    tokens = torch.cat([datum.rollout.tokens[datum.rollout.loss_mask] for datum in kept])
    policy = torch.cat([datum.rollout.policy_logprobs[datum.rollout.loss_mask] for datum in kept])
    expected = {
        "tokens": float(len(s)),
        "supervised": float(len(s)),
        "halvings": 0.0,
        "fused": 1.0,
        "loss": (0.3 * (t.exp() * (t - m)).sum(-1) + 0.7 * (s.exp() * (s - m)).sum(-1))
        .mean()
        .item(),
        "reverse_kl": (s.exp() * (s - t)).sum(-1).mean().item(),
        "student_entropy": -(s.exp() * s).sum(-1).mean().item(),
        "teacher_entropy": -(t.exp() * t).sum(-1).mean().item(),
        "sampler_mismatch": (s.gather(1, tokens[:, None])[:, 0] - policy).abs().mean().item(),
    }
    shared = [
        set(one.topk(16).indices.tolist()) & set(other.topk(16).indices.tolist())
        for one, other in zip(s, t, strict=True)
    ]
    expected["overlap"] = sum(map(len, shared)) / (16 * len(s))
    expected["overlap_mass"] = sum(
        row.exp()[list(both)].sum().item() for row, both in zip(s, shared, strict=True)
    ) / len(s)
    assert result.metrics == pytest.approx(expected, rel=1e-5)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return result


@pytest.mark.cpu_only
@pytest.mark.parametrize("choice", OBJECTIVES, ids=str)
def test_no_matrix_of_tokens_by_vocabulary_is_ever_whole(choice):
    """Check that chunks of 4 tokens never create a tensor larger than the weights and the body's own activations."""
    student, teacher = trainable(tiny()), tiny(seed=1)
    data = data_for(teacher, [rollout(2, 40, seed) for seed in range(4)])
    trainer = LocalTrainer(student, TrainerLimits(micro_batch_tokens=10**6, chunk_tokens=4))
    with LargestTensor() as mode:
        trainer.forward_backward(data, Objective.model_validate(choice), 0)
    tokens, padded, feed_forward = 4 * 40, 4 * 42, 48
    assert tokens * VOCABULARY > padded * feed_forward
    assert 0 < mode.largest <= padded * feed_forward


def weights_of(model: LanguageModel):
    return {name: value.detach().clone() for name, value in model.model.named_parameters()}


def unchanged(model: LanguageModel, before) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.model.named_parameters())


STEP = AdamParams(learning_rate=0.01)


@pytest.mark.parametrize(
    "choice", [{}, {"estimator": "score_function(1)"}, {"signal": "sampled"}], ids=str
)
def test_nan_in_the_teacher_drops_the_gradient_and_moves_nothing(choice):
    student, teacher = trainable(tiny()), tiny(seed=1)
    data = data_for(teacher)
    hidden = data[1].signal.hidden.clone()
    hidden[0, 0] = torch.nan
    data[1] = replace(data[1], signal=replace(data[1].signal, hidden=hidden))
    trainer, before = LocalTrainer(student, TrainerLimits(10**6, 2)), weights_of(student)
    result = trainer.forward_backward(data, Objective.model_validate(choice), 0)
    assert result.metrics["nonfinite"] >= 1
    assert all(parameter.grad is None for parameter in student.trainable_parameters().values())
    trainer.optim_step(STEP)
    assert unchanged(student, before)


def test_a_broken_rollout_does_not_take_away_what_an_earlier_call_learned():
    student, teacher = trainable(tiny()), tiny(seed=1)
    good = data_for(teacher)
    hidden = good[0].signal.hidden * torch.nan
    broken = [replace(good[0], signal=replace(good[0].signal, hidden=hidden))]
    expected, _ = gradients(student, good, Objective())
    trainer = LocalTrainer(student)
    trainer.forward_backward(good, Objective(), 0)
    assert trainer.forward_backward(broken, Objective(), 0).metrics["nonfinite"] == 1
    assert_same(
        {name: value.grad for name, value in student.trainable_parameters().items()}, expected, 0
    )


def test_nan_in_the_student_is_reported_and_moves_nothing():
    student = trainable(tiny())
    data = data_for(tiny(seed=1))
    with torch.no_grad():
        student.model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    before = weights_of(student)
    trainer = LocalTrainer(student)
    assert trainer.forward_backward(data, Objective(), 0).metrics["nonfinite"] == 4
    trainer.optim_step(STEP)
    for name, value in student.model.named_parameters():
        torch.testing.assert_close(value, before[name], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_is_skipped(value):
    student = trainable(tiny())
    trainer, before = LocalTrainer(student), weights_of(student)
    trainer.forward_backward(data_for(tiny(seed=1)), Objective(), 0)
    next(iter(student.trainable_parameters().values())).grad[0] = value
    assert trainer.optim_step(STEP)["skipped"] == 1
    assert unchanged(student, before)
    assert all(parameter.grad is None for parameter in student.trainable_parameters().values())
    trainer.forward_backward(data_for(tiny(seed=1)), Objective(), 0)
    assert trainer.optim_step(STEP)["skipped"] == 0
    assert not unchanged(student, before)


@pytest.mark.float32
def test_the_step_is_adamw_on_the_clipped_gradient():
    student, twin = trainable(tiny()), trainable(tiny())
    data = data_for(tiny(seed=1))
    optimizer = torch.optim.AdamW(twin.model.parameters(), foreach=False)
    trainer = LocalTrainer(student)
    for step, rate in enumerate((0.01, 0.005, 0.001), start=1):
        found = naive_gradients(twin, tiny(seed=1), data, Objective())
        for name, parameter in twin.trainable_parameters().items():
            parameter.grad = found[name]
        norm = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group.update(lr=rate, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)
        optimizer.step()
        trainer.forward_backward(data, Objective(), step)
        metrics = trainer.optim_step(AdamParams(rate, (0.8, 0.95), 1e-3, 0.1, 0.5))
        expected = {
            "grad_norm": norm.item(),
            "skipped": 0,
            "empty_updates": 0,
            "learning_rate": rate,
        }
        assert metrics == pytest.approx(expected, rel=1e-4)
    for name, value in student.model.named_parameters():
        torch.testing.assert_close(value, twin.model.get_parameter(name), rtol=1e-4, atol=1e-5)


def test_a_step_without_a_gradient_moves_nothing():
    student = trainable(tiny())
    trainer, before = LocalTrainer(student), weights_of(student)
    assert trainer.optim_step(STEP) == {
        "grad_norm": 0.0,
        "skipped": 0.0,
        "empty_updates": 1.0,
        "learning_rate": 0.01,
    }
    assert unchanged(student, before)


NOTHING_TO_LEARN = {
    "a filter that accepts no answer": {"filter": "correct"},
    "weights that leave every token out": {"weights": "threshold(1e6)"},
    "rewards that are all alike": {"signal": "score(group_mean)"},
    "ranking weights under a filter": {"filter": "correct", "weights": "entropy_top(0.5)"},
}


@pytest.mark.parametrize("term", NOTHING_TO_LEARN.values(), ids=NOTHING_TO_LEARN)
def test_an_update_from_nothing_moves_neither_weights_nor_moments(term):
    student = trainable(tiny())
    trainer, data = LocalTrainer(student), data_for(tiny(seed=1))
    decaying = replace(STEP, weight_decay=0.1)
    trainer.forward_backward(data, Objective(), 0)
    trainer.optim_step(decaying)  # so that there is momentum
    before, moments = (
        weights_of(student),
        {k: v.clone() for k, v in trainer.save_state()["optimizer"].items()},
    )
    wrong = [replace(datum, rollout=replace(datum.rollout, reward=0.0)) for datum in data]
    result = trainer.forward_backward(wrong, Objective(**term), 1)
    metrics = trainer.optim_step(decaying)
    assert result.supervised == [0] * len(data) and result.metrics["supervised"] == 0
    assert metrics["empty_updates"] == 1 and metrics["skipped"] == 0
    assert unchanged(student, before)
    assert all(
        value.equal(moments[name]) for name, value in trainer.save_state()["optimizer"].items()
    )


def test_a_gradient_that_was_accumulated_is_not_lost_to_an_update_from_nothing():
    student, data = trainable(tiny()), data_for(tiny(seed=1))
    trainer = LocalTrainer(student)
    trainer.forward_backward(data, Objective(), 0)
    before = {
        name: parameter.grad.clone() for name, parameter in student.trainable_parameters().items()
    }
    wrong = [replace(datum, rollout=replace(datum.rollout, reward=0.0)) for datum in data]
    trainer.forward_backward(wrong, Objective(filter="correct"), 1)
    assert all(
        parameter.grad.equal(before[name])
        for name, parameter in student.trainable_parameters().items()
    )
    assert trainer.optim_step(STEP)["empty_updates"] == 0


def test_supervised_counts_the_tokens_that_filters_and_weights_leave():
    data = data_for(tiny(seed=1))
    rewarded = [
        replace(datum, rollout=replace(datum.rollout, reward=float(row == 0)))
        for row, datum in enumerate(data)
    ]
    masks = [int(datum.rollout.loss_mask.sum()) for datum in data]
    right = LocalTrainer(trainable(tiny())).forward_backward(
        rewarded, Objective(filter="correct"), 0
    )
    assert right.supervised == [masks[0], *[0] * (len(data) - 1)] and masks[0]
    both = Objective(losses=({"filter": "correct"}, {"filter": "incorrect", "coefficient": 0.5}))
    assert LocalTrainer(trainable(tiny())).forward_backward(rewarded, both, 0).supervised == masks


def steps(trainer: LocalTrainer, numbers) -> None:
    data = data_for(tiny(seed=1))
    for number in numbers:
        trainer.forward_backward(data, Objective(), number)
        trainer.optim_step(STEP)


def copied(state):
    return {
        stem: {name: value.clone() for name, value in tensors.items()}
        for stem, tensors in state.items()
    }


@pytest.mark.parametrize("done", [0, 2])
def test_a_restored_trainer_goes_on_bit_for_bit(done):
    whole = trainable(tiny(dropout=0.3))
    trainer = LocalTrainer(whole, dropout=True)
    steps(trainer, range(done))
    saved = copied(trainer.save_state())
    steps(trainer, range(done, done + 3))
    again = trainable(tiny(seed=5, dropout=0.3))
    resumed = LocalTrainer(again, dropout=True)
    steps(resumed, range(1))
    resumed.load_state(saved)
    steps(resumed, range(done, done + 3))
    assert unchanged(again, weights_of(whole))


def test_the_state_of_another_model_is_refused():
    trainer = LocalTrainer(trainable(tiny()))
    saved = copied(trainer.save_state())
    with pytest.raises(
        CheckpointError,
        match=r"1 weights differ in name or shape \(first: model.embed_tokens.weight\)",
    ):
        LocalTrainer(trainable(tiny(rows=72))).load_state(saved)
    saved["student"].pop("model.norm.weight")
    with pytest.raises(
        CheckpointError,
        match=r"first: model.norm.weight\); resume with the model, lora and trainable_",
    ):
        trainer.load_state(saved)


def test_the_seed_decides_the_dropout():
    student, data = trainable(tiny(dropout=0.5)), data_for(tiny(seed=1))
    first, _ = gradients(student, data, Objective(), seed=1, dropout=True)
    state = torch.get_rng_state()
    assert_same(gradients(student, data, Objective(), seed=1, dropout=True)[0], first, 0)
    assert torch.equal(state, torch.get_rng_state())
    other, _ = gradients(student, data, Objective(), seed=2, dropout=True)
    assert any(not torch.equal(other[name], first[name]) for name in first)


def test_by_default_nothing_drops_out():
    data = data_for(tiny(seed=1))
    expected, _ = gradients(trainable(tiny()), data, Objective())
    assert_same(gradients(trainable(tiny(dropout=0.5)), data, Objective())[0], expected, 0)


def test_the_dropout_of_a_pass_does_not_depend_on_the_passes_before_it():
    """Equal for every process that gets the pass."""
    data, alone = data_for(tiny(seed=1)), TrainerLimits(micro_batch_tokens=1)
    there, back = (
        gradients(trainable(tiny(dropout=0.5)), order, Objective(), alone, dropout=True)[0]
        for order in (data, data[::-1])
    )
    assert_same(there, back, 1e-6)


def test_the_first_pass_of_sequence_objectives_is_without_dropout():
    """The coefficients of score_function(1) come from the policy itself; only the training pass uses dropout."""
    student, data = trainable(tiny(dropout=0.5)), data_for(tiny(seed=1))
    objective = Objective.model_validate({"estimator": "score_function(1)"})
    trainer = LocalTrainer(student, dropout=True)
    student.model.train()
    found = []
    for _ in range(2):
        view = trainer._open_view(data, objective, 0)
        passes = trainer._build_micro_batches(data, [view], 10**6)
        trainer._compute_batch_coefficients(passes, student.head(), [view])
        found.append(view.coefficients[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("signal", ["full", "topk(5, union)"])
def test_only_tokens_that_a_weight_keeps_go_through_the_heads_to_learn(monkeypatch, signal):
    """Check half of the tokens (TIP, 2604.14084); the numbers of all tokens are still recorded."""
    learned: list[int] = []
    for chunk in (Fused, Autograd):
        backward = chunk.backward

        def counting(self, coefficients, backward=backward):
            learned.append(len(coefficients[0]))
            assert torch.stack(list(coefficients)).ne(0).any(dim=0).all()
            return backward(self, coefficients)

        monkeypatch.setattr(chunk, "backward", counting)
    student, data = trainable(tiny()), data_for(tiny(seed=1))
    objective = Objective.model_validate({"signal": signal, "weights": "soft_or(0.5)"})
    limits = TrainerLimits(micro_batch_tokens=8, chunk_tokens=3)
    _, result = gradients(student, data, objective, limits)
    tokens = int(result.metrics["tokens"])
    assert sum(learned) == result.metrics["supervised"] == -(-tokens // 2)
    masks = torch.cat([datum.rollout.loss_mask for datum in data])
    assert result.outputs.student_entropy[masks].isfinite().all()


def test_training_lowers_the_divergence():
    student, teacher = trainable(tiny()), tiny(seed=1)
    trainer, data = LocalTrainer(student), data_for(teacher)
    losses = []
    for step in range(30):
        losses.append(trainer.forward_backward(data, Objective(), step).metrics["reverse_kl"])
        trainer.optim_step(STEP)
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.cpu_only
def test_bfloat16_runs_on_the_cpu_and_is_close():
    student, teacher = tiny(), tiny(seed=1)
    plain, expected = gradients(trainable(student), data_for(teacher), Objective())
    mixed = replace(trainable(student), autocast=True)
    found, result = gradients(mixed, data_for(teacher), Objective())
    assert result.metrics["reverse_kl"] == pytest.approx(expected.metrics["reverse_kl"], rel=0.1)
    one, two = (torch.cat([grads[name].flatten() for name in plain]) for grads in (plain, found))
    assert torch.cosine_similarity(one, two, dim=0) > 0.98


def test_only_what_is_trainable_gets_a_gradient_and_moves():
    student = tiny("qwen3")
    student.model.requires_grad_(False)
    student.model.model.layers[1].requires_grad_(True)
    trainer, before = LocalTrainer(student), weights_of(student)
    trainer.forward_backward(data_for(tiny(seed=1)), Objective(), 0)
    trainer.optim_step(STEP)
    moved = {
        name
        for name, value in student.model.named_parameters()
        if not torch.equal(value, before[name])
    }
    assert (
        moved
        == set(student.trainable_parameters())
        == {name for name in before if ".layers.1." in name}
    )
    assert set(trainer.save_state()["student"]) == moved


def test_every_objective_can_be_trained_here():
    assert LocalTrainer(trainable(tiny())).explain_unsupported(Objective()) is None


@pytest.mark.parametrize(
    "limits", [TrainerLimits(10**6), TrainerLimits(20, 3)], ids=["whole", "cut"]
)
def test_teachers_of_the_same_tokens_share_the_students_pass(limits):
    """Check that a sum of three terms costs one pass through the body, and its gradient is the weighted sum of the three."""
    student, items = trainable(tiny()), rollouts()
    teachers, weights = [tiny(seed=seed) for seed in (1, 2, 3)], (0.5, 0.3, 0.9)
    said = [
        tuple(
            replace(hidden_signal(teacher, item), name=f"t{number}")
            for number, teacher in enumerate(teachers)
        )
        for item in items
    ]
    data = [
        Datum(item, TeacherSignal(pool=PooledSignal("sum", weights, members)))
        for item, members in zip(items, said, strict=True)
    ]
    apart = [
        gradients(
            student,
            [Datum(item, one[number]) for item, one in zip(items, said, strict=True)],
            Objective(),
        )
        for number in range(3)
    ]
    reads = []
    hook = student.model.base_model.embed_tokens.register_forward_pre_hook(
        lambda *given: reads.append(1)
    )
    alone, _ = gradients(
        student,
        [Datum(item, one[0]) for item, one in zip(items, said, strict=True)],
        Objective(),
        limits,
    )
    once, reads[:] = len(reads), []
    found, result = gradients(student, data, Objective(), limits)
    hook.remove()
    assert len(reads) == once
    expected = {
        name: sum(weight * one[name] for weight, (one, _) in zip(weights, apart, strict=True))
        for name in alone
    }
    assert_same(found, expected, 2e-6)
    for number, (_, one) in enumerate(apart):
        assert result.metrics[f"reverse_kl/t{number}"] == pytest.approx(
            one.metrics[f"reverse_kl/t{number}"], rel=1e-5
        )
