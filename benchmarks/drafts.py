"""Compare sampling through `rollout.draft` with sampling without a drafter: speed, and the costs of the passes.

    python -m benchmarks drafts RUN [--tokens 128]

RUN trained a drafter; its held-out prompts are answered one at a time, and eight at a time. Both ways must write the same tokens.
The speed is in completion tokens per processor second, as a multiple of sampling without a drafter. A *round* is a chain of
drafts and the target's call that verifies it; the cost of reading the prompts is not in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import ceilings
from benchmarks.measuring import (
    build_parser,
    build_timer,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    round_digits,
    spread,
)
from practicum.backends.local.drafting import DraftingSampler
from practicum.backends.local.sampler import LocalSampler
from practicum.ports.metering import MeteredSampler
from practicum.runs import open_run, restore_components
from practicum.types import Sample, SampleRequest, SamplingParams

PROMPTS = {1: 4, 8: 8}
"""The number of prompts that are answered, by the number of texts at a time."""


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("run", type=Path, help="the folder of a run that trained a drafter")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--depth", type=int, default=3, help="drafts of a round")
    options = parser.parse_args()
    session = open_session("drafts", options, ceilings.measure_briefly())
    drafted, requests, params = _open(options.run, options.tokens, options.depth)
    readings: dict[str, dict[str, float]] = {}
    rows: list[list[object]] = []
    for texts, count in PROMPTS.items():
        samplers = {
            "without": LocalSampler(drafted.language_model, batch_size=texts),
            "with": replace(drafted, batch_size=texts),
        }
        _check(
            {name: sampler.sample(requests[:texts], params) for name, sampler in samplers.items()}
        )
        seconds = interleave(
            {
                name: build_timer(_build_work(sampler, requests[:count], params))
                for name, sampler in samplers.items()
            },
            session.rounds,
            session.warm_up,
        )
        speed = compute_ratios(seconds["without"], seconds["with"])
        readings[f"drafts.speed_{texts}"] = speed
        rows.append(
            [texts, *(spread(values)["median"] for values in seconds.values()), speed["median"]]
        )
    print(format_table(["texts", "s without", "s with", "speed"], rows))
    costs = _measure_costs(drafted, requests[: PROMPTS[1]], params)
    print(format_table(["one text", "value"], list(costs.items())))
    session.report(readings, tokens=options.tokens, depth=options.depth, costs=costs)


def _measure_costs(
    drafted: DraftingSampler, requests: Sequence[SampleRequest], params: SamplingParams
) -> dict[str, float]:
    """Return the tokens per round, and the milliseconds of a prompt, a token without drafts and a round."""
    drafted = replace(drafted, batch_size=1)
    plain = LocalSampler(drafted.language_model, batch_size=1)
    samples = [drafted.sample([request], params)[0] for request in requests]
    # A text's first token is the prompt's.
    tokens = sum(len(sample.tokens) - 1 for sample in samples)
    rounds = sum(len(sample.rounds) for sample in samples)
    first = replace(params, max_new_tokens=1)
    prompt, without, with_drafts = (
        build_timer(_build_work(*case))()
        for case in (
            (plain, requests, first),
            (plain, requests, params),
            (drafted, requests, params),
        )
    )
    return {
        "tokens per round": round_digits(tokens / rounds, 3),
        "ms of a prompt": round_digits(1e3 * prompt / len(requests), 3),
        "ms of a token without drafts": round_digits(1e3 * (without - prompt) / tokens, 3),
        "ms of a round": round_digits(1e3 * (with_drafts - prompt) / rounds, 3),
    }


def _open(
    folder: Path, tokens: int, depth: int
) -> tuple[DraftingSampler, list[SampleRequest], SamplingParams]:
    """Return the run's sampler as `rollout.draft` has it, and requests for its held-out prompts."""
    built = restore_components(*open_run(folder))
    settings, metered = built.evaluation, built.parts.sampler
    assert settings is not None, "a run of a drafter has held-out prompts"
    sampler = metered.bare if isinstance(metered, MeteredSampler) else metered
    assert isinstance(sampler, DraftingSampler), "the run trained a drafter"
    config = sampler.config.model_copy(update={"depth": depth, "width": 1, "verify": "shared"})
    requests = [
        SampleRequest(tuple(built.parts.renderer.render(prompt.messages)), number)
        for number, prompt in enumerate(settings.prompts[: max(PROMPTS.values())])
    ]
    params = replace(settings.sampling, max_new_tokens=tokens)
    return replace(sampler, config=config, most_texts=1), requests, params


def _build_work(
    sampler: LocalSampler, requests: Sequence[SampleRequest], params: SamplingParams
) -> Callable[[], object]:
    size = sampler.batch_size
    parts = [requests[start : start + size] for start in range(0, len(requests), size)]
    return lambda: [sampler.sample(part, params) for part in parts]


def _check(samples: dict[str, list[Sample]]) -> None:
    """Refuse to compare samplers that write different tokens."""
    for plain, drafted in zip(*samples.values(), strict=True):
        assert plain.tokens.tolist() == drafted.tokens.tolist(), "the texts are the same"


if __name__ == "__main__":
    main()
