"""Measure conversations: processor time with the cached keys and values of earlier turns, against reading the history again.

    python -m benchmarks turns [--turns 6] [--conversations 8]

Random weights and no stop tokens: in each turn every conversation draws 24 tokens and is answered with 12 to 40. Both sides draw
the same tokens from the same streams, and alternate in one process. The line contains the greatest difference of their
log-probabilities.
"""

from collections.abc import Sequence

from benchmarks import ceilings, models
from benchmarks.measuring import (
    build_parser,
    build_timer,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    spread,
)
from practicum.ports import SamplingClient
from practicum.types import Sample, SampleRequest, SamplingParams

NEW_TOKENS, SHORTEST_REPLY, LONGEST_REPLY = 24, 12, 40


def main() -> None:
    """Report one line for each model."""
    parser = build_parser(__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=8)
    options = parser.parse_args()
    session = open_session("turns", options, ceilings.measure_briefly())
    for name in ("tiny",) if options.quick else ("17m", "135m"):
        shape = models.SHAPES[name]
        plain = models.build_sampler(models.build_language_model(shape), options.conversations)
        prompts = models.draw_prompts(options.conversations, shape.vocabulary)
        sides = {
            "kept": lambda plain=plain, prompts=prompts: _converse(
                plain.remember_texts(), prompts, options.turns
            ),
            "read again": lambda plain=plain, prompts=prompts: _converse(
                plain, prompts, options.turns
            ),
        }
        error = _compare(sides["kept"](), sides["read again"]())
        times = interleave(
            {side: build_timer(work) for side, work in sides.items()},
            session.rounds,
            session.warm_up,
        )
        ratio = compute_ratios(times["kept"], times["read again"])
        print(f"{name}, {options.conversations} conversations of {options.turns} turns")
        print(
            format_table(
                ["history", "s"], [[who, spread(values)["median"]] for who, values in times.items()]
            )
        )
        session.report(
            {f"turns.{name}": ratio},
            device="cpu",
            model=name,
            turns=options.turns,
            conversations=options.conversations,
            seconds={who: spread(values) for who, values in times.items()},
            logprob_error=error,
        )


def _converse(
    client: SamplingClient, prompts: Sequence[tuple[int, ...]], turns: int
) -> list[Sample]:
    """Return the samples of all turns."""
    texts, samples = list(prompts), []
    for turn in range(turns):
        requests = [SampleRequest(text, 100 * turn + row) for row, text in enumerate(texts)]
        new_samples = client.sample(requests, SamplingParams(NEW_TOKENS))
        samples += new_samples
        texts = [
            (*text, *sample.tokens.tolist(), *_write_reply(turn, row))
            for row, (text, sample) in enumerate(zip(texts, new_samples, strict=True))
        ]
    return samples


def _write_reply(turn: int, row: int) -> tuple[int, ...]:
    """Return what an environment says: any tokens, of lengths that differ."""
    length = SHORTEST_REPLY + (7 * turn + 11 * row) % (LONGEST_REPLY - SHORTEST_REPLY + 1)
    return tuple(3 + (13 * place + row) % 60 for place in range(length))


def _compare(samples: Sequence[Sample], expected: Sequence[Sample]) -> float:
    """Return the greatest difference of log-probabilities; SystemExit if a token differs."""
    worst = 0.0
    for sample, twin in zip(samples, expected, strict=True):
        if sample.tokens.tolist() != twin.tokens.tolist():
            raise SystemExit("the two sides drew different tokens")
        worst = max(worst, (sample.policy_logprobs - twin.policy_logprobs).abs().max().item())
    return worst


if __name__ == "__main__":
    main()
