"""Speculative decoding: the text is the target's, and the rounds record the drafts."""

from collections import Counter
from dataclasses import replace
from itertools import product
from math import sqrt
from random import Random

import pytest
import torch
from backends.tiny import rollout

from practicum.backends.local.drafter import unroll
from practicum.backends.local.drafting import DraftingSampler, _DraftLoop, _Drafts
from practicum.backends.local.language_model import Decoding, LanguageModel
from practicum.backends.local.native import load_library
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.sampler import LocalSampler
from practicum.methods.eagle3.eagle3 import Eagle3
from practicum.models.config import DrafterConfig
from practicum.rollouts.drafts import measure_drafts, read_depths, score_drafts
from practicum.types import DraftRound, Rollout, Sample, SampleRequest, SamplingParams, ScoreRequest

from .small import make_drafter, make_target

PARAMS = SamplingParams(24, stop_ids=frozenset({2}))


def requests(count: int) -> list[SampleRequest]:
    """Return prompts of unequal lengths, each with a stream."""
    return [SampleRequest(tuple(range(3, 5 + n % 7)), n) for n in range(count)]


def open_sampler(
    target: LanguageModel, drafter: Eagle3, config: DrafterConfig, batch_size: int = 64
) -> DraftingSampler:
    return DraftingSampler(target, batch_size=batch_size, drafter=drafter, config=config)


@torch.enable_grad()
def imitate(drafter: Eagle3, target: LanguageModel, config: DrafterConfig, steps: int = 60) -> None:
    """Train the drafter on the target's own samples, so that it is accepted often."""
    samples = LocalSampler(target).sample(requests(48), PARAMS)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.01)
    texts = [
        torch.tensor([*request.prompt_tokens, *sample.tokens.tolist()])
        for request, sample in zip(requests(48), samples, strict=True)
        if len(sample.tokens) > 8
    ]
    ids = torch.stack([text[:12] for text in texts])
    with torch.no_grad():
        output = target.model(ids, output_hidden_states=True)
        goal = output.logits[..., drafter.vocabulary.ids].log_softmax(-1)
    features = torch.cat([output.hidden_states[layer] for layer in drafter.layers], -1)
    for _ in range(steps):
        loss = torch.zeros(())
        for depth, state in enumerate(unroll(drafter, target.model, features, ids, config.depth)):
            logprobs = drafter.head.logprobs(drafter.finish(state))[:, : -1 - depth]
            loss = loss - (goal[:, 1 + depth :].exp() * logprobs).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def wrap(request: SampleRequest, sample: Sample) -> Rollout:
    item = rollout(1, len(sample.tokens), 0)
    fields = {
        "prompt_tokens": request.prompt_tokens,
        "tokens": sample.tokens,
        "rounds": sample.rounds,
    }
    return type(item)(**{**{name: getattr(item, name) for name in item.__slots__}, **fields})


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("architecture", "decoding"),
    [("llama", Decoding.NATIVE), ("qwen3", Decoding.NATIVE), ("llama", Decoding.TORCH)],
)
@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"banned_ids": {7, 8}}]
)
def test_with_shared_noise_the_bytes_are_the_targets_own(
    architecture: str, decoding: Decoding, width: int, changes: dict[str, object]
) -> None:
    target = make_target(architecture, decoding=decoding)
    drafter, config = make_drafter(target, verify="shared", width=width, depth=4)
    imitate(drafter, target, config, 40)
    params = SamplingParams(24, **{"stop_ids": frozenset({2}), **changes})  # type: ignore[arg-type]
    plain = LocalSampler(target, batch_size=12).sample(requests(12), params)
    drafted = open_sampler(target, drafter, config, 12).sample(requests(12), params)
    # The compiled step computes the same bits for a token of a tree as for the only token of a text.
    is_exact = decoding is Decoding.NATIVE and load_library() is not None
    tolerance = 0.0 if is_exact else 1e-4
    for one, two in zip(plain, drafted, strict=True):
        assert one.tokens.tolist() == two.tokens.tolist()
        assert one.stop_reason == two.stop_reason
        for name in ("sampling_logprobs", "policy_logprobs"):
            pair = getattr(one, name), getattr(two, name)
            torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance)
    assert any(part.accepted for sample in drafted for part in sample.rounds)


def enumerate_law(
    target: LanguageModel, prompt: tuple[int, ...], length: int
) -> dict[tuple[int, ...], float]:
    """Return the probability of every completion of a small target."""
    rows = target.vocab_size
    law = {}
    for tokens in product(range(rows), repeat=length):
        hidden = compute_hidden_states(target, [ScoreRequest(prompt, tokens)])
        logprobs = target.head().logprobs(hidden)
        law[tokens] = float(logprobs[range(length), tokens].sum().exp())
    return law


@pytest.mark.parametrize(
    "settings",
    [{}, {"verify": "shared"}, {"width": 2, "verify": "shared"}],
    ids=["chain", "shared", "tree"],
)
@torch.no_grad()
def test_the_text_has_the_targets_law(settings: dict[str, object]) -> None:
    target = make_target(rows=4)
    # Two of four tokens can be drafted, so drafts are rejected and accepted.
    drafter, config = make_drafter(target, 3, depth=2, **settings)
    count, prompt = 6000, (3, 1)
    law = enumerate_law(target, prompt, 3)
    assert sum(law.values()) == pytest.approx(1, abs=1e-4)
    sampler = open_sampler(target, drafter, config, count)
    samples = sampler.sample([SampleRequest(prompt, n) for n in range(count)], SamplingParams(3))
    seen = Counter(tuple(sample.tokens.tolist()) for sample in samples)
    rounds = [part for sample in samples for part in sample.rounds]
    assert 0 < sum(part.accepted for part in rounds) < sum(len(part.drafts) for part in rounds)
    for text, chance in law.items():
        spread = sqrt(count * chance * (1 - chance))
        assert abs(seen[text] - count * chance) < 4.5 * spread + 1, text
    # Each token's log-probability is the target's.
    for sample in samples[:50]:
        total = float(sample.policy_logprobs.sum().exp())
        assert total == pytest.approx(law[tuple(sample.tokens.tolist())], rel=1e-3)


@torch.no_grad()
def test_the_share_of_accepted_drafts_is_one_less_the_total_variation() -> None:
    target = make_target()
    drafter, config = make_drafter(target, depth=1)
    prompt = (3, 9, 4)
    samples = open_sampler(target, drafter, config, 4000).sample(
        [SampleRequest(prompt, n) for n in range(4000)], SamplingParams(2)
    )
    rounds = [part for sample in samples for part in sample.rounds]
    simulated = sum(part.accepted for part in rounds) / len(rounds)
    expected = 0.0
    for token in range(64):
        ids = torch.tensor([[*prompt, token]])
        output = target.model(ids, output_hidden_states=True)
        first = float(output.logits[0, 2].softmax(-1)[token])
        features = torch.cat([output.hidden_states[layer] for layer in drafter.layers], -1)
        # The row of the last prompt token, with the first new token, drafts the second.
        (state,) = unroll(drafter, target.model, features, ids, 1)
        draft = drafter.head.logprobs(drafter.finish(state))[0, 2].exp()
        full = torch.zeros(64).index_copy(0, drafter.vocabulary.ids, draft)
        expected += first * float(torch.minimum(full, output.logits[0, 3].softmax(-1)).sum())
    assert 0.05 < expected < 0.95
    assert simulated == pytest.approx(expected, abs=0.03)


def test_neither_the_batch_nor_its_order_changes_a_text() -> None:
    target = make_target()
    drafter, config = make_drafter(target)
    whole = open_sampler(target, drafter, config).sample(requests(9), PARAMS)
    parts = open_sampler(target, drafter, config, 2).sample(requests(9)[::-1], PARAMS)[::-1]
    assert [s.tokens.tolist() for s in whole] == [s.tokens.tolist() for s in parts]
    assert [s.rounds for s in whole] == [s.rounds for s in parts]


@pytest.mark.parametrize("width", [1, 3])
@torch.no_grad()
def test_the_drafts_are_those_of_the_unrolled_drafter(width: int) -> None:
    """Greedy drafts, from the sampler's memory and from the training code over the whole text."""
    target = make_target()
    drafter, config = make_drafter(target, depth=4, width=width, verify="shared")
    imitate(drafter, target, config, 20)
    (request,) = requests(1)
    params = SamplingParams(24, temperature=0.0)
    (sample,) = open_sampler(target, drafter, config).sample([request], params)
    text = [*request.prompt_tokens, *sample.tokens.tolist()]
    assert sample.rounds
    for part in sample.rounds:
        verified = text[: len(request.prompt_tokens) + part.start]
        row = len(verified) - 2
        ids = torch.tensor([[*verified, *part.drafts]])
        output = target.model(ids, output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer] for layer in drafter.layers], -1)
        # Later features may not matter: the drafter does not have them.
        features[:, row + 1 :] = 0.0
        states = list(unroll(drafter, target.model, features, ids, 4))
        for depth, token in enumerate(part.drafts):
            logprobs = drafter.head.logprobs(drafter.finish(states[depth][0, row]))
            best = drafter.vocabulary.ids[logprobs.topk(width).indices].tolist()
            assert token in best if width > 1 else token == best[0]


@torch.no_grad()
def test_drafts_are_sampled_from_the_unrolled_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    drafter, config = make_drafter(target, depth=4)
    verified: list[tuple[list[int], list[int], torch.Tensor]] = []
    original = _DraftLoop._verify

    def verify(loop: _DraftLoop, drafts: _Drafts) -> object:
        assert drafts.logprobs is not None
        for row, text in enumerate(loop.texts):
            tokens = [*text.prompt, *text.tokens]
            verified.append((tokens, drafts.tokens[row].tolist(), drafts.logprobs[row].clone()))
        return original(loop, drafts)

    monkeypatch.setattr(_DraftLoop, "_verify", verify)
    open_sampler(target, drafter, config).sample(requests(3), PARAMS)
    assert len(verified) > 20
    for tokens, drafts, logprobs in verified:
        row = len(tokens) - 2
        ids = torch.tensor([[*tokens, *drafts]])
        output = target.model(ids, output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer] for layer in drafter.layers], -1)
        features[:, row + 1 :] = 0.0
        for depth, state in enumerate(unroll(drafter, target.model, features, ids, 4)):
            expected = drafter.head.logprobs(drafter.finish(state[0, row]))
            actual = logprobs[depth, drafter.vocabulary.ids]
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_what_rounds_say_of_a_text() -> None:
    item = wrap(
        SampleRequest((1,), 0),
        Sample(
            torch.arange(8),
            torch.zeros(8),
            torch.zeros(8),
            "length",
            # Token 0 is from the prompt's call; 2 of 3 accepted; none; all 3, and one more draft is cut off.
            rounds=(
                DraftRound(1, (5, 5, 5), 2),
                DraftRound(4, (5, 5, 5), 0),
                DraftRound(5, (5, 5, 5), 3),
            ),
        ),
    )
    assert read_depths(item).tolist() == [-1, 0, 1, 2, 0, 0, 1, 2]
    metrics = measure_drafts([item])
    assert metrics["drafts/tokens_per_call"] == (3 + 1 + 3) / 3
    assert metrics["drafts/acceptance_0"] == 2 / 3
    assert metrics["drafts/acceptance_1"] == 1.0
    assert metrics["drafts/acceptance_2"] == 1 / 2
    assert metrics["drafts/acceptance"] == 5 / 7
    assert measure_drafts([rollout(2, 3, 1)]) == {}


def make_rounds(accepted: list[int], prompt: int) -> Rollout:
    """Return a text of a prompt, with rounds of three drafts; one more token is the prompt's call."""
    item, start, rounds = rollout(2, 1 + sum(accepted) + len(accepted), prompt), 1, []
    for count in accepted:
        rounds.append(DraftRound(start, (5, 5, 5), count))
        start += count + 1
    return replace(item, rounds=tuple(rounds), prompt=replace(item.prompt, id=str(prompt)))


@pytest.mark.parametrize("seed", range(5))
def test_scores_have_the_tokens_per_call_as_mean_and_their_differences_the_change(
    seed: int,
) -> None:
    draw = Random(seed)

    def sample(most: int) -> list[Rollout]:
        # Two texts per prompt with unequal numbers of calls; the texts of the last prompt have none.
        sizes = [*(draw.randint(1, 9) for _ in range(10)), 0, 0]
        return [
            make_rounds([draw.randint(0, most) for _ in range(size)], number // 2)
            for number, size in enumerate(sizes)
        ]

    before, after = sample(1), sample(3)
    old, new = score_drafts(before), score_drafts(after)
    assert len(old) == len(new) == 6
    for scores, rollouts in ((old, before), (new, after)):
        pooled = measure_drafts(rollouts)["drafts/tokens_per_call"]
        assert sum(scores) / len(scores) == pytest.approx(pooled, abs=1e-12)
        assert scores[-1] == pytest.approx(pooled, abs=1e-12)
    # The slow twin of the linear influence: the change by a hundredth of the prompt's texts.
    for number, score in enumerate(old):
        texts = [*before * 100, *before[2 * number : 2 * number + 2]]
        slope = (measure_drafts(texts)["drafts/tokens_per_call"] - old[-1]) * 100
        assert score - old[-1] == pytest.approx(6 * slope, rel=0.02, abs=1e-9)
    assert score_drafts([rollout(2, 3, 1)]) == []


def test_many_texts_and_conversations_are_sampled_without_drafts() -> None:
    target = make_target()
    drafter, config = make_drafter(target, verify="shared")
    sampler = replace(open_sampler(target, drafter, config), most_texts=2)

    def has_rounds(client: LocalSampler, count: int) -> bool:
        return any(sample.rounds for sample in client.sample(requests(count), PARAMS))

    assert has_rounds(sampler, 2) and not has_rounds(sampler, 3)
    assert not has_rounds(sampler.remember_texts(), 2)
    assert has_rounds(replace(sampler, most_texts=None), 3)
