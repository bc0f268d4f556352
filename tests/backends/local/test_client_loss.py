"""Losses of given tokens over a local model, and log-probabilities of a prompt: compared with plain autograd and softmax."""

from dataclasses import replace

import pytest
import torch
from toy import make_model

from practicum import functional as F
from practicum.backends.local.client_loss import forward_backward_targets, forward_targets
from practicum.backends.local.hosted import add_shared_adapters
from practicum.backends.local.loading import load
from practicum.backends.local.prompt_scores import score_prompts
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.errors import NumericError
from practicum.models.config import Lora, ModelConfig
from practicum.ports.hosting import GivenTokens, PromptQuestion
from practicum.types import SampleRequest, SamplingParams


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("given") / "model", seed=3, layers=2)
    return load(ModelConfig(model=str(folder), device="cpu")).language_model


def plain_logprobs(model, tokens):
    """Return [N, V] by the model's own forward."""
    return torch.log_softmax(
        model.model(torch.tensor([tokens])).logits[0, :, : model.vocab_size].float(), dim=-1
    )


def cross_entropy(tokens, targets, weights):
    targets, weights = torch.tensor(targets), torch.tensor(weights)
    return GivenTokens(
        tuple(tokens), targets, lambda logprobs, part: F.cross_entropy(logprobs, weights[part])
    )


def moved(model):
    """Move the adapters away from their start, where half of them have no gradient."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.trainable_parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


DATA = [
    ([1, 2, 3, 4], [[2], [3], [4], [1]], [[0.5], [1.0], [0.0], [2.0]]),
    ([2, 5], [[5], [1]], [[1.0], [-1.0]]),
]
WIDE = [([1, 2, 3], [[2, 4], [3, 1], [5, 2]], [[0.5, 0.25], [0.9, 0.1], [0.0, 1.0]])]


@pytest.mark.parametrize("data", [DATA, WIDE], ids=["one target", "several targets"])
def test_the_gradient_is_that_of_plain_autograd(base, data):
    model = moved(add_shared_adapters(base, Lora(rank=2), seed=0))
    found = forward_backward_targets(
        LocalTrainer(model), [cross_entropy(*datum) for datum in data], 0
    )
    gradients = {name: parameter.grad for name, parameter in model.trainable_parameters().items()}
    loss = torch.tensor(0.0)
    for (tokens, targets, weights), logprobs, own in zip(
        data, found.logprobs, found.losses, strict=True
    ):
        chosen = plain_logprobs(model, tokens).gather(-1, torch.tensor(targets))
        assert torch.allclose(logprobs, chosen.detach(), atol=1e-5)
        assert own == pytest.approx(-(chosen * torch.tensor(weights)).sum().item(), abs=1e-5)
        loss = loss - (chosen * torch.tensor(weights)).sum()
    expected = torch.autograd.grad(loss, list(model.trainable_parameters().values()))
    for gradient, other in zip(gradients.values(), expected, strict=True):
        assert torch.allclose(gradient, other, atol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_other_architectures_and_texts_beyond_a_window_have_the_same_gradient(
    architecture, tmp_path
):
    folder = make_model(tmp_path / "model", seed=3, layers=2, architecture=architecture)
    model = moved(
        add_shared_adapters(
            load(ModelConfig(model=str(folder), device="cpu")).language_model, Lora(rank=2), seed=0
        )
    )
    tokens = [1 + n % 5 for n in range(40)]
    targets = torch.tensor([[1 + n % 7] for n in range(40)])
    data = [
        GivenTokens(
            tuple(tokens),
            targets,
            lambda logprobs, part: F.cross_entropy(logprobs, torch.ones(len(logprobs), 1)),
        )
    ]
    found = forward_backward_targets(LocalTrainer(model, TrainerLimits(chunk_tokens=7)), data, 0)
    gradients = [parameter.grad for parameter in model.trainable_parameters().values()]
    chosen = plain_logprobs(model, tokens).gather(-1, targets)
    assert torch.allclose(found.logprobs[0], chosen.detach(), atol=1e-5)
    expected = torch.autograd.grad(-chosen.sum(), list(model.trainable_parameters().values()))
    assert all(
        torch.allclose(one, two, atol=1e-4) for one, two in zip(gradients, expected, strict=True)
    )
    scores = score_prompts(model, None, [PromptQuestion(tuple(tokens))])[0]
    own = plain_logprobs(model, tokens)[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert torch.allclose(scores.logprobs, own.detach(), atol=1e-5)


def test_a_base_in_bfloat16_trains_adapters_in_float32(base, tmp_path):
    folder = make_model(tmp_path / "model", seed=3, layers=2)
    half = load(ModelConfig(model=str(folder), device="cpu", dtype="bfloat16")).language_model
    results = []
    for model in (
        moved(add_shared_adapters(half, Lora(rank=2), seed=0)),
        moved(add_shared_adapters(base, Lora(rank=2), seed=0)),
    ):
        losses = forward_backward_targets(
            LocalTrainer(model), [cross_entropy(*datum) for datum in DATA], 0
        ).losses
        gradient = torch.cat(
            [parameter.grad.flatten() for parameter in model.trainable_parameters().values()]
        )
        assert gradient.dtype == torch.float32
        results.append((losses, gradient))
    (rough, one), (exact, two) = results
    assert rough == pytest.approx(exact, rel=0.05)
    assert torch.nn.functional.cosine_similarity(one, two, dim=0) > 0.99


def test_a_batch_sent_in_parts_has_the_gradient_of_the_whole_however_it_is_cut(base):
    def gradients(limits, *batches):
        model = moved(add_shared_adapters(base, Lora(rank=2), seed=0))
        for batch in batches:
            forward_backward_targets(
                LocalTrainer(model, limits), [cross_entropy(*datum) for datum in batch], 0
            )
        return [parameter.grad for parameter in model.trainable_parameters().values()]

    whole = gradients(None, DATA)
    for other in (
        gradients(None, DATA[:1], DATA[1:]),
        gradients(TrainerLimits(micro_batch_tokens=1, chunk_tokens=1), DATA),
    ):
        assert all(
            torch.allclose(one, two, atol=1e-6) for one, two in zip(whole, other, strict=True)
        )


def test_a_forward_pass_alone_has_the_same_numbers_and_leaves_no_gradient(base):
    model = moved(add_shared_adapters(base, Lora(rank=2), seed=0))
    data = [cross_entropy(*datum) for datum in DATA]
    alone = forward_targets(LocalTrainer(model), data)
    assert all(parameter.grad is None for parameter in model.trainable_parameters().values())
    both = forward_backward_targets(LocalTrainer(model), data, 0)
    assert alone.losses == pytest.approx(both.losses)


def test_a_loss_that_is_no_number_leaves_the_gradient_as_it_was(base):
    model = add_shared_adapters(base, Lora(rank=2), seed=0)
    trainer = LocalTrainer(model)
    forward_backward_targets(trainer, [cross_entropy(*DATA[0])], 0)
    before = [parameter.grad.clone() for parameter in model.trainable_parameters().values()]
    broken = cross_entropy([1, 2], [[2], [3]], [[1.0], [float("nan")]])
    with pytest.raises(NumericError, match="datum 1: its loss is nan, not a number"):
        forward_backward_targets(trainer, [cross_entropy(*DATA[0]), broken], 0)
    after = [parameter.grad for parameter in model.trainable_parameters().values()]
    assert all(one.equal(two) for one, two in zip(before, after, strict=True))


def test_adapters_share_the_weights_of_their_base_and_leave_it_alone(base):
    one, two = (
        add_shared_adapters(base, Lora(rank=2), seed=0),
        moved(add_shared_adapters(base, Lora(rank=4), seed=1, parts=("attention",))),
    )
    storage = {weight.data_ptr() for weight in base.model.parameters()}
    for model in (one, two):
        frozen = {p.data_ptr() for p in model.model.parameters() if not p.requires_grad}
        assert frozen == storage
    assert all("attn" in name for name in two.trainable_parameters())
    tokens = [1, 2, 3, 4]
    assert torch.allclose(plain_logprobs(base, tokens), plain_logprobs(one, tokens), atol=1e-6)
    assert not torch.allclose(plain_logprobs(base, tokens), plain_logprobs(two, tokens), atol=1e-4)
    assert not base.trainable_parameters()


TOKENS = (1, 4, 2, 3, 5, 2)


def test_a_prompt_is_scored_as_softmax_says(base):
    targets = torch.tensor([[1, -1], [2, 3], [-1, -1], [5, 4], [2, 1]])
    answer = score_prompts(base, None, [PromptQuestion(TOKENS, topk=3, targets=targets)])[0]
    expected = plain_logprobs(base, TOKENS)[:-1]
    assert torch.allclose(
        answer.logprobs, expected.gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0], atol=1e-5
    )
    assert answer.topk_ids.equal(expected.topk(3).indices)
    assert torch.allclose(answer.topk_logprobs, expected.topk(3).values, atol=1e-5)
    wanted = expected.gather(-1, targets.clamp_min(0)).masked_fill(targets < 0, 0.0)
    assert torch.allclose(answer.target_logprobs, wanted, atol=1e-5)
    last = score_prompts(base, None, [PromptQuestion(TOKENS, first=4, targets=targets[3:])])[0]
    assert torch.allclose(last.logprobs, answer.logprobs[3:], atol=1e-5)
    assert torch.allclose(last.target_logprobs, answer.target_logprobs[3:], atol=1e-5)


def test_answers_do_not_depend_on_what_shares_the_batch(base):
    questions = [PromptQuestion(TOKENS[:n], draws=3, seed=n, topk=2) for n in (1, 2, 6, 4)]
    together = score_prompts(base, None, questions)
    for question, answer in zip(questions, together, strict=True):
        alone = score_prompts(base, None, [question], chunk_tokens=1)[0]
        assert alone.drawn.equal(answer.drawn) and alone.topk_ids.equal(answer.topk_ids)
        assert torch.allclose(alone.logprobs, answer.logprobs, atol=1e-5)


@pytest.mark.long
def test_draws_at_each_position_follow_the_tempered_distribution(base):
    answer = score_prompts(
        base, None, [PromptQuestion(TOKENS[:2], draws=4000, temperature=0.5, seed=7)]
    )[0]
    expected = torch.softmax(plain_logprobs(base, TOKENS[:2])[0] / 0.5, dim=-1)
    share = torch.bincount(answer.drawn[0], minlength=base.vocab_size) / 4000
    assert torch.allclose(share, expected, atol=0.03)
    natural = plain_logprobs(base, TOKENS[:2])[0]
    assert torch.allclose(answer.drawn_logprobs[0], natural[answer.drawn[0]], atol=1e-5)
    greedy = score_prompts(base, None, [PromptQuestion(TOKENS[:2], draws=2, temperature=0.0)])[0]
    assert greedy.drawn.tolist() == [[int(natural.argmax())] * 2]


def test_the_first_token_after_a_scored_prompt_is_the_one_that_sampling_draws(base):
    params = SamplingParams(max_new_tokens=1, temperature=0.7)
    scored = score_prompts(base, None, [PromptQuestion(TOKENS, following=(3, 4), params=params)])[0]
    sampled = LocalSampler(base).sample(
        [SampleRequest(TOKENS, 3), SampleRequest(TOKENS, 4)], params
    )
    for one, two in zip(scored.following, sampled, strict=True):
        assert one.tokens.equal(two.tokens) and one.stop_reason == two.stop_reason
        assert torch.allclose(one.sampling_logprobs, two.sampling_logprobs, atol=1e-5)


def test_the_first_token_after_a_scored_prompt_may_be_a_stop_text(base):
    params = SamplingParams(max_new_tokens=1)
    for stops, reason in (
        (("nowhere",), "length"),
        (tuple("abcdefghijklmnopqrstuvwxyz0123456789 ?"), "stop"),
    ):
        question = PromptQuestion(TOKENS, following=(3,), params=replace(params, stop_texts=stops))
        (found,) = score_prompts(base, None, [question])[0].following
        (sampled,) = LocalSampler(base).sample(
            [SampleRequest(TOKENS, 3)], replace(params, stop_texts=stops)
        )
        assert found.stop_reason == sampled.stop_reason == reason


def test_a_loss_that_no_target_moves_leaves_what_was_accumulated(base):
    model = moved(add_shared_adapters(base, Lora(rank=2), seed=0))
    trainer, nothing = (
        LocalTrainer(model),
        [cross_entropy([1, 2, 3], [[2], [3], [4]], [[0.0], [0.0], [0.0]])],
    )
    assert not forward_backward_targets(trainer, nothing, 0).supervises
    assert all(parameter.grad is None for parameter in model.trainable_parameters().values())
    assert forward_backward_targets(trainer, [cross_entropy(*DATA[0])], 0).supervises
    before = {
        name: parameter.grad.clone() for name, parameter in model.trainable_parameters().items()
    }
    forward_backward_targets(trainer, nothing, 0)
    assert all(
        parameter.grad.equal(before[name])
        for name, parameter in model.trainable_parameters().items()
    )
