"""Measure a teacher's stored answers: seconds of the second scoring against the first, bytes per token, and the gradient's error.

    python -m benchmarks cache [--rollouts 32] [--tokens 128]

Scoring here ends with the log-probabilities of all tokens over the full vocabulary, which a trainer reads in chunks. *Bare* is the
model without a cache, *first* writes into a new folder, *second* finds everything there, and *head* reads hidden states that are in
memory. The error is the error of the reverse KL's gradient in the student's logits, for a teacher with 1.5 nats of entropy and a
student 0.25 nats from it. bfloat16 is included for comparison.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import ceilings, models
from benchmarks.measuring import (
    build_parser,
    build_reading,
    build_timer,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    spread,
)
from practicum import functional as F
from practicum.functional.chunked import chunks
from practicum.objective import Full, Sampled, Signal
from practicum.ports import SamplingClient
from practicum.teachers.cached import CachingClient, ModelScores, restore_states, scale_states
from practicum.teaching.scores import ScoreStore
from practicum.types import ScoreRequest, TeacherSignal

SLOTS, CHUNK, ROOM = 8, 256, 1 << 32
ENTROPY, DISTANCE, ERROR_TOKENS = 1.5, 0.25, 256


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("--rollouts", type=int, help="answers (default 32, with --quick 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each")
    options = parser.parse_args()
    count = options.rollouts or (8 if options.quick else 32)
    session = open_session("cache", options, ceilings.measure_briefly())
    name = "tiny-teacher" if options.quick else "57m"
    shape = models.SHAPES[name]
    client = models.build_sampler(models.build_language_model(shape), SLOTS)
    requests = _make_requests(count, options.tokens, shape.vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        caching = _make_client(client, Path(folder) / "kept")
        _check(client, caching, requests)
        times = interleave(
            _make_contenders(client, caching, requests, Path(folder)),
            session.rounds,
            session.warm_up,
        )
        sizes = {
            "full": _compute_bytes(caching),
            "sampled": _measure_sampled_bytes(client, requests, Path(folder) / "sampled"),
        }
    second, bare = (
        compute_ratios(times["second"], times["first"]),
        compute_ratios(times["head"], times["bare"]),
    )
    over = compute_ratios(
        [a / b for a, b in zip(times["second"], times["first"], strict=True)],
        [a / b for a, b in zip(times["head"], times["bare"], strict=True)],
    )
    errors = _measure_errors(client, requests)
    tokens = count * options.tokens
    rows = [
        [who, spread(values)["median"], spread(values)["median"] / tokens * 1e6]
        for who, values in times.items()
    ]
    print(format_table(["what", "s", "us a token"], rows))
    print(format_table(["format", "error of the gradient"], list(errors.items())))
    session.report(
        {
            "cache.second": over,
            "cache.bytes": build_reading(sizes["full"] - 2 * shape.width),
            "cache.error": build_reading(errors["kept"]),
        },
        model=name,
        rollouts=count,
        tokens=options.tokens,
        seconds={who: spread(values) for who, values in times.items()},
        second_of_first=second,
        head_of_bare=bare,
        first_of_bare=compute_ratios(times["first"], times["bare"]),
        bytes_a_token=sizes,
        width=shape.width,
        gradient_error=errors,
    )


def _make_requests(count: int, tokens: int, vocabulary: int) -> list[ScoreRequest]:
    generator = torch.Generator().manual_seed(0)
    return [
        ScoreRequest(
            prompt, tuple(torch.randint(2, vocabulary, (tokens,), generator=generator).tolist())
        )
        for prompt in models.draw_prompts(count, vocabulary, 3, 32, 32)
    ]


def _make_client(client: SamplingClient, folder: Path) -> CachingClient:
    return CachingClient(client, lambda: ModelScores("benchmark", ScoreStore(folder, ROOM)))


def _make_contenders(
    client: SamplingClient, caching: CachingClient, requests: Sequence[ScoreRequest], folder: Path
) -> dict[str, Callable[[], float]]:
    fresh = client.score(requests, Full())

    def score_first() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            _read(_make_client(client, Path(place)).score(requests, Full()))

    return {
        "bare": build_timer(lambda: _read(client.score(requests, Full()))),
        "first": build_timer(score_first),
        "second": build_timer(lambda: _read(caching.score(requests, Full()))),
        "head": build_timer(lambda: _read(fresh)),
    }


def _read(signals: Sequence[TeacherSignal]) -> None:
    """The log-probabilities of all tokens, a chunk at a time."""
    head = signals[0].head
    assert head is not None
    hidden = torch.cat([signal.states for signal in signals if signal.states is not None])
    for part in chunks(len(hidden), CHUNK):
        head.logprobs(hidden[part])


def _check(
    client: SamplingClient, caching: CachingClient, requests: Sequence[ScoreRequest]
) -> None:
    """Check that both scorings are bit-identical, and equal to the bare model within float16 rounding."""
    bare, first, second = (who.score(requests, Full()) for who in (client, caching, caching))
    for fresh, missed, hit in zip(bare, first, second, strict=True):
        assert fresh.states is not None and missed.states is not None and hit.states is not None
        assert missed.states.equal(hit.states), "a hit says something else than its miss"
        assert missed.states.equal(restore_states(*scale_states(fresh.states))), (
            "a miss is more than rounded"
        )
    assert caching.counts.hits == len(requests), "the second scoring asked the model"


def _compute_bytes(caching: CachingClient) -> float:
    assert caching.scores is not None
    return caching.scores.size / caching.scores.tokens


def _measure_sampled_bytes(
    client: SamplingClient, requests: Sequence[ScoreRequest], folder: Path
) -> float:
    sampled: Signal = Sampled()
    keeping = _make_client(client, folder)
    keeping.score(requests, sampled)
    return _compute_bytes(keeping)


def _measure_errors(client: SamplingClient, requests: Sequence[ScoreRequest]) -> dict[str, float]:
    """The relative error of the gradient by format of the hidden states."""
    answers = client.score(requests[:SLOTS], Full())
    hidden = torch.cat([answer.states for answer in answers if answer.states is not None])[
        :ERROR_TOKENS
    ]
    head = answers[0].head
    assert head is not None
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(hidden), head.vocab_size, generator=generator)
    sharpness = _solve(lambda factor: ENTROPY - _compute_entropy(head.logits(hidden) * factor))
    logits = head.logits(hidden) * sharpness
    size = _solve(lambda factor: _compute_distance(logits + factor * noise, logits) - DISTANCE)
    student = logits + size * noise

    def compute_gradient(states: Tensor) -> Tensor:
        leaf = student.clone().requires_grad_()
        teacher = torch.log_softmax(head.logits(states) * sharpness, dim=-1)
        F.reverse_kl(torch.log_softmax(leaf, dim=-1), teacher).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    exact = compute_gradient(hidden)
    formats = {
        "kept": restore_states(*scale_states(hidden)),
        "float16": hidden.half().float(),
        "bfloat16": hidden.bfloat16().float(),
    }
    return {
        name: float(f"{((compute_gradient(states) - exact).norm() / exact.norm()).item():.3g}")
        for name, states in formats.items()
    }


def _compute_entropy(logits: Tensor) -> float:
    logprobs = torch.log_softmax(logits, dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1).mean().item()


def _compute_distance(student: Tensor, teacher: Tensor) -> float:
    return (
        F.reverse_kl(torch.log_softmax(student, dim=-1), torch.log_softmax(teacher, dim=-1))
        .mean()
        .item()
    )


def _solve(rising: Callable[[float], float]) -> float:
    """The factor between 0.001 and 1000 at which a rising function is 0."""
    low, high = 1e-3, 1e3
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return high


if __name__ == "__main__":
    main()
