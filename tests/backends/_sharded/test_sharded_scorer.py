"""A sharded teacher gives the signals of a whole one, for any assignment of texts to ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends.rank_forks import run_ranks
from backends.tiny import ARCHITECTURES, random_tokens, tiny
from practicum.backends._sharded import sharded_scorer
from practicum.backends._sharded.building import put_in_shards
from practicum.backends._sharded.sharded_scorer import ShardedScorer
from practicum.backends.local.device_limits import ON_CPU
from practicum.backends.local.sampler import LocalSampler
from practicum.objective import Full, Sampled
from practicum.types import ScoreRequest

LENGTHS = ((3, 9), (5, 2), (4, 30), (1, 7), (6, 11))


def list_requests(count: int) -> list[ScoreRequest]:
    return [
        ScoreRequest(random_tokens(first, n), random_tokens(length, n + 50))
        for n, (first, length) in enumerate(LENGTHS[:count])
    ]


@pytest.mark.parametrize(("count", "nodes"), [(2, 1), (4, 2)])
def test_ranks_with_unequal_texts_score_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, nodes: int
) -> None:
    # Several passes on the first rank, one on the second, and no pass on further ranks.
    limits = replace(ON_CPU, scored_tokens=20)
    monkeypatch.setattr(sharded_scorer, "find_limits", lambda device: limits)
    monkeypatch.setattr("practicum.backends.local.sampler.find_limits", lambda device: limits)

    def share(rank: int) -> list[ScoreRequest]:
        return {0: list_requests(4), 1: list_requests(1)}.get(rank, [])

    def work(rank: int) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for architecture in ARCHITECTURES:
            model = tiny(architecture, 4)
            model.model.requires_grad_(False)
            scorer = ShardedScorer(put_in_shards(model, nodes), 7)
            full = scorer.score(share(rank), Full())
            head = scorer.gather_head()
            found += [head.logprobs(signal.states) for signal in full if signal.states is not None]
            sampled = scorer.score(share(rank), Sampled())
            found += [signal.logprobs for signal in sampled if signal.logprobs is not None]
        return found

    answers = run_ranks(tmp_path, count, work)
    for rank, answer in enumerate(answers):
        expected: list[torch.Tensor] = []
        for architecture in ARCHITECTURES:
            sampler = LocalSampler(tiny(architecture, 4))
            requests = share(rank)
            for signal in sampler.score(requests, Full()):
                assert signal.head is not None and signal.states is not None
                expected.append(signal.head.logprobs(signal.states).detach())
            signals = sampler.score(requests, Sampled())
            expected += [signal.logprobs for signal in signals if signal.logprobs is not None]
        assert len(answer) == len(expected)
        for one, other in zip(answer, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
