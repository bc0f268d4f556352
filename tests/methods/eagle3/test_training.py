"""A drafter's gradient against a twin that generates step by step; frozen weights; refusals."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from practicum.backends.local.device_limits import TrainerLimits
from practicum.backends.local.drafter import DrafterTrainer
from practicum.backends.local.language_model import LanguageModel
from practicum.errors import CheckpointError, ModelError, RecipeError
from practicum.methods.eagle3.eagle3 import Eagle3
from practicum.models.config import DrafterConfig
from practicum.objective import Objective
from practicum.ports import AdamParams
from practicum.ports.drafters import DraftVocabulary, choose_layers
from practicum.types import Datum, DraftRound

from .small import VOCABULARY, make_data, make_drafter, make_target

LIMITS = TrainerLimits(chunk_tokens=4)

DIVERGENCES = {
    "forward_kl": lambda s, t: (t.exp() * (t - s)).sum(),
    "reverse_kl": lambda s, t: (s.exp() * (s - t)).sum(),
    "tvd": lambda s, t: (s.exp() - t.exp()).abs().sum() / 2,
    "jsd(0.3)": lambda s, t: jsd(s, t, 0.3),
}


def jsd(s: Tensor, t: Tensor, beta: float) -> Tensor:
    mixed = (beta * t.exp() + (1 - beta) * s.exp()).log()
    return beta * (t.exp() * (t - mixed)).sum() + (1 - beta) * (s.exp() * (s - mixed)).sum()


def norm(states: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return weight * states * (states.pow(2).mean() + eps).rsqrt()


def turn(head: Tensor, place: int, theta: float = 10000.0) -> Tensor:
    """Rotate one head by its place, pair by pair."""
    half = len(head) // 2
    angles = place * theta ** (-torch.arange(half) * 2 / len(head))
    first, second = head[:half], head[half:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ]
    )


class Generator:
    """Run the drafter one row at a time: a list of keys and values, no batch, no mask, no padding."""

    def __init__(self, drafter: Eagle3, embedding: Tensor) -> None:
        self.w = dict(drafter.named_parameters())
        self.embedding = embedding
        self.heads, self.groups = (
            drafter.shape.num_attention_heads,
            drafter.shape.num_key_value_heads,
        )
        self.eps = drafter.shape.rms_norm_eps

    def step(
        self, state: Tensor, token: int, place: int, seen: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the next state; appends this row's keys and values to `seen`."""
        w, layer = self.w, "midlayer."
        both = torch.cat(
            [
                norm(self.embedding[token], w[layer + "input_layernorm.weight"], self.eps),
                norm(state, w[layer + "hidden_norm.weight"], self.eps),
            ]
        )
        q, k, v = (
            (w[f"{layer}self_attn.{name}_proj.weight"] @ both).unflatten(0, (count, -1))
            for name, count in (("q", self.heads), ("k", self.groups), ("v", self.groups))
        )
        seen.append((torch.stack([turn(head, place) for head in k]), v))
        mixed = []
        for number, head in enumerate(q):
            group = number * self.groups // self.heads
            rotated = turn(head, place)
            scores = torch.stack([rotated @ keys[group] for keys, _ in seen]) / len(head) ** 0.5
            values = torch.stack([values[group] for _, values in seen])
            mixed.append(torch.softmax(scores, 0) @ values)
        state = state + w[layer + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = norm(state, w[layer + "post_attention_layernorm.weight"], self.eps)
        gate, up = w[layer + "mlp.gate_proj.weight"] @ x, w[layer + "mlp.up_proj.weight"] @ x
        down = w[layer + "mlp.down_proj.weight"]
        return state + down @ (gate * torch.sigmoid(gate) * up)

    def read(self, state: Tensor) -> Tensor:
        """Return the log-probabilities of the draft vocabulary."""
        finished = norm(state, self.w["norm.weight"], self.eps)
        return torch.log_softmax(self.w["lm_head.weight"] @ finished, 0)


def twin_loss(
    target: LanguageModel,
    drafter: Eagle3,
    config: DrafterConfig,
    data: list[Datum],
    divergence: str,
) -> Tensor:
    """Return sum over depths of decay^depth times the mean over supervised tokens, row by row."""
    ids = drafter.vocabulary.ids
    embedding = target.model.get_input_embeddings().weight.detach()
    generator = Generator(drafter, embedding)
    terms, count = [], 0
    for datum in data:
        text = [*datum.rollout.prompt_tokens, *datum.rollout.tokens.tolist()]
        first = len(datum.rollout.prompt_tokens)
        with torch.no_grad():
            output = target.model(torch.tensor([text]), output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer][0] for layer in config.layers or ()], -1)
        count += int(datum.rollout.loss_mask.sum())
        for row in range(len(text) - 1):
            # The text up to here is verified: its rows are of depth 0.
            seen: list[tuple[Tensor, Tensor]] = []
            for place in range(row + 1):
                fused = generator.w["fc.weight"] @ features[place]
                state = generator.step(fused, text[place + 1], place, seen)
            for depth in range(config.depth):
                spot = row + 2 + depth
                if spot >= len(text):
                    break
                if depth:
                    state = generator.step(state, text[row + 1 + depth], row + depth, seen)
                if spot < first or not datum.rollout.loss_mask[spot - first]:
                    continue
                logits = output.logits[0, spot - 1]
                if int(logits.argmax()) not in ids.tolist():
                    continue
                teacher = torch.log_softmax(logits[ids], 0)
                student = generator.read(state)
                terms.append(config.decay**depth * DIVERGENCES[divergence](student, teacher))
    return torch.stack(terms).sum() / count


def gradients(drafter: Eagle3) -> dict[str, Tensor]:
    result = {name: weight.grad for name, weight in drafter.named_parameters()}
    drafter.zero_grad(set_to_none=True)
    assert all(gradient is not None for gradient in result.values())
    return {name: gradient for name, gradient in result.items() if gradient is not None}


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_unrolled_gradient_is_that_of_generation_step_by_step(
    architecture: str, depth: int, divergence: str
) -> None:
    target = make_target(architecture)
    drafter, config = make_drafter(target, depth=depth)
    data = make_data(target)
    objective = Objective.model_validate({"signal": "full", "divergence": divergence})
    result = DrafterTrainer(target, drafter, config, LIMITS).forward_backward(data, objective, 0)
    ours = gradients(drafter)
    twin_loss(target, drafter, config, data, divergence).backward()
    theirs = gradients(drafter)
    assert 0 < result.metrics["drafter/masked"] < 1, "some tokens have no loss"
    for name, gradient in theirs.items():
        scale = gradient.abs().max()
        assert scale > 0, name
        torch.testing.assert_close(
            ours[name], gradient, rtol=2e-3, atol=2e-4 * float(scale), msg=name
        )


def test_the_micro_batches_do_not_change_the_gradient() -> None:
    target = make_target()
    drafter, config = make_drafter(target)
    data, objective = make_data(target), Objective(signal="full", divergence="forward_kl")
    results = []
    for limits in (LIMITS, TrainerLimits(micro_batch_tokens=1, chunk_tokens=128)):
        trainer = DrafterTrainer(target, drafter, config, limits)
        result = trainer.forward_backward(data, objective, 0)
        results.append((result.metrics["loss"], gradients(drafter)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-3, atol=1e-6)


def test_only_the_drafter_learns() -> None:
    target = make_target()
    drafter, config = make_drafter(target)
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    start = {name: weight.detach().clone() for name, weight in drafter.named_parameters()}
    trainer = DrafterTrainer(target, drafter, config, LIMITS)
    objective, losses = Objective(signal="full", divergence="forward_kl"), []
    for _ in range(20):
        losses.append(trainer.forward_backward(make_data(target), objective, 0).metrics["loss"])
        trainer.optim_step(AdamParams(0.01))
    assert losses[-1] < 0.5 * losses[0]
    assert all(weight.equal(before[name]) for name, weight in target.model.state_dict().items())
    assert all(weight.grad is None for weight in target.model.parameters())
    assert all(not weight.equal(start[name]) for name, weight in drafter.named_parameters())


def test_with_drafted_states_a_token_counts_at_the_depth_at_which_it_was_drafted() -> None:
    target = make_target()
    drafter, config = make_drafter(target, states="drafted", depth=3)
    (_, datum, _) = make_data(target)
    item = replace(datum.rollout, loss_mask=torch.ones(7, dtype=torch.bool))
    item = replace(item, rounds=(DraftRound(1, (9, 9, 9), 2), DraftRound(4, (9, 9, 9), 0)))
    trainer = DrafterTrainer(target, drafter, config, LIMITS)
    unrolled = trainer._unroll([item])
    assert torch.stack(unrolled.learns).long().tolist() == [
        [0, 1, 0, 0, 1, 0, 0],
        [0, 0, 1, 0, 0, 1, 0],
        [0, 0, 0, 1, 0, 0, 1],
    ]


def test_a_vocabulary_and_its_offsets() -> None:
    stream = torch.Generator().manual_seed(0)
    for size in (7, 64, 300):
        ids = torch.randperm(size, generator=stream)[: size // 2 + 1].sort().values
        vocabulary = DraftVocabulary(ids, size)
        t2d, d2t = vocabulary.t2d, vocabulary.d2t
        assert t2d.nonzero()[:, 0].equal(d2t + torch.arange(len(d2t)))
        assert DraftVocabulary.from_buffers(t2d, d2t, "folder").ids.equal(ids)
        with pytest.raises(ModelError, match="d2t does not hold offsets"):
            DraftVocabulary.from_buffers(t2d, ids, "folder")


def test_the_most_frequent_tokens_are_drafted() -> None:
    texts = [(5, 5, 5, 7, 7, 9), (3, 9, 1)]
    assert DraftVocabulary.choose(texts, 12, 4, {2}).ids.tolist() == [2, 5, 7, 9]
    assert DraftVocabulary.choose(texts, 12, 50, {2}).ids.tolist() == list(range(12))
    with pytest.raises(RecipeError, match=r"vocabulary: 2 tokens are too few: they hold 33%"):
        DraftVocabulary.choose(texts, 12, 2, {2})


@pytest.mark.parametrize("layers", [(0, 1, 2), (1, 2, 5), (2, 2, 3), (3, 2, 1)])
def test_layers_that_the_target_lacks_are_refused(layers: tuple[int, int, int]) -> None:
    with pytest.raises(RecipeError, match="not three rising numbers from 1 to 4"):
        choose_layers(layers, 5)


def test_a_teacher_that_is_another_model_is_refused() -> None:
    target, stranger = make_target(), make_target(seed=1)
    drafter, config = make_drafter(target)
    trainer = DrafterTrainer(target, drafter, config, LIMITS)
    with pytest.raises(ModelError, match="not those of the drafter's target"):
        trainer.forward_backward(make_data(stranger), Objective(signal="full"), 0)


@pytest.mark.parametrize(
    "objective",
    [
        {"signal": "sampled"},
        {"signal": "full", "divergence": "reverse_kl", "correction": "ratio"},
        {"signal": "topk(5)", "divergence": "forward_kl"},
    ],
)
def test_objectives_without_the_whole_distribution_are_refused(objective: dict[str, str]) -> None:
    target = make_target()
    trainer = DrafterTrainer(target, *make_drafter(target), LIMITS)
    problem = trainer.explain_unsupported(Objective.model_validate(objective))
    assert problem is not None and "whole distribution" in problem


def test_a_state_of_another_vocabulary_is_refused() -> None:
    target = make_target()
    first = DrafterTrainer(target, *make_drafter(target), LIMITS)
    second = DrafterTrainer(target, *make_drafter(target, 39), LIMITS)
    with pytest.raises(CheckpointError, match="another vocabulary"):
        second.load_state(first.save_state())
    assert first.drafter.vocabulary.size == VOCABULARY
