"""A short request gets turns between long ones: turns and passes are counted, nothing is timed."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from backends.tiny import random_tokens, tiny

from practicum.backends.local.device_limits import ON_CPU
from practicum.backends.local.hosted import LocalReader
from practicum.backends.local.prefill import PromptQueue
from practicum.ports.hosting import PromptQuestion
from practicum.server import worker as worker_module
from practicum.server.executor import SampleItem, Sampler
from practicum.server.futures import ResponseBody
from practicum.server.requests import SampleBody
from practicum.server.worker import ModelJob, Worker
from practicum.types import SampleRequest, SamplingParams

ANSWER = ResponseBody(b"", "")


class CountedTurns:
    """A job that runs steps of a model, and counts its turns."""

    def __init__(self, steps) -> None:
        self._steps = steps
        self.turns = 0

    def run(self, items: Sequence[object]):
        """Yield as the steps do."""
        for _ in self._steps:
            self.turns += 1
            yield
        return [ANSWER] * len(items)


def draw(samples: int, tokens: int):
    requests = [SampleRequest(random_tokens(8, number), number) for number in range(samples)]
    params = SamplingParams(max_new_tokens=tokens)
    return LocalReader(tiny()).draw(requests, params, None)


def test_two_tokens_wait_for_a_few_turns_beside_a_thousand_long_samples(monkeypatch):
    monkeypatch.setattr(worker_module, "TURN_SECONDS", 0.0)
    worker = Worker(lambda error: pytest.fail(str(error)))
    long, short = CountedTurns(draw(1024, 200)), CountedTurns(draw(1, 2))
    seen: list[int] = []

    def run_short(items):
        before = long.turns
        yield from short.run(items)
        seen.append(long.turns - before)
        return [ANSWER]

    try:
        worker.submit(ModelJob("long", long.run, "weights", lane=1))
        worker.submit(ModelJob("short", run_short, "weights", lane=0)).result(60)
    finally:
        worker.close(60)
    assert seen[0] <= short.turns + 1 <= 6


def build_item(tokens: int) -> SampleItem:
    body = SampleBody.model_validate(
        {
            "prompt": {"chunks": [{"tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": tokens},
            "base_model": "model",
        }
    )
    return SampleItem(body, (1, 2), Sampler("session", "model"), 0)


def test_what_is_wanted_at_once_has_another_lane_than_samples_of_256_tokens():
    """A thousand requests of one such sample occupy their lane for minutes."""
    assert build_item(2).lane < build_item(256).lane < build_item(4096).lane


def test_a_prefill_ends_a_turn(monkeypatch):
    prefills: list[int] = []
    prefill = PromptQueue._run_prefill
    monkeypatch.setattr(
        PromptQueue,
        "_run_prefill",
        lambda queue: (prefills.append(1), prefill(queue))[1],
    )
    narrow = replace(ON_CPU, prefill_tokens=8)
    monkeypatch.setattr("practicum.backends.local.prefill.find_limits", lambda device: narrow)
    before = 0
    for _ in draw(32, 3):
        assert len(prefills) <= before + 1
        before = len(prefills)
    assert before == 32


def test_a_pass_over_scored_texts_ends_a_turn(monkeypatch):
    narrow = replace(ON_CPU, scored_tokens=32)
    monkeypatch.setattr("practicum.backends.local.prompt_scores.find_limits", lambda device: narrow)
    questions = [PromptQuestion(random_tokens(20, number)) for number in range(12)]
    assert sum(1 for _ in LocalReader(tiny()).score(questions, None)) == 12
