"""Measure the share of sampled tokens that rounding changes: SmolLM2-135M with two numbers of slots, token by token.

    python -m benchmarks flips [--prompts 256] [--new-tokens 64]

Every completion draws from its own random stream, so other completions in the batch can only change a token if rounding moves the
cumulative distribution past its random number. Completions are compared up to their first difference, which counts as one.
"""

import torch

from benchmarks.measuring import build_parser, build_reading, open_session
from practicum.backends.local.loading import load
from practicum.backends.local.sampler import LocalSampler
from practicum.models.config import ModelConfig
from practicum.types import Message, SampleRequest, SamplingParams

MODEL, SLOTS = "smollm2-135m-instruct", (16, 23)


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("--prompts", type=int, help="completions (default 256, with --quick 8)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each, at most")
    options = parser.parse_args()
    count = options.prompts or (8 if options.quick else 256)
    session = open_session("flips", options)
    torch.set_num_threads(1)
    loaded = load(ModelConfig(model=MODEL, device="cpu"))
    questions = [f"Write a few sentences about the number {number}." for number in range(count)]
    requests = [
        SampleRequest(loaded.renderer.render([Message("user", question)]), seed)
        for seed, question in enumerate(questions)
    ]
    params = SamplingParams(options.new_tokens, stop_ids=loaded.renderer.stop_ids)
    first_answers, second_answers = (
        [
            sample.tokens.tolist()
            for sample in LocalSampler(loaded.language_model, batch_size=slots).sample(
                requests, params
            )
        ]
        for slots in SLOTS
    )
    compared = flips = 0
    for first, second in zip(first_answers, second_answers, strict=True):
        agreed = next(
            (at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
            None,
        )
        flips += agreed is not None
        compared += min(len(first), len(second)) if agreed is None else agreed + 1
    print(f"{flips} of {compared} tokens differ between {SLOTS[0]} and {SLOTS[1]} slots")
    session.report(
        {"rollout.flips": build_reading(flips / compared)},
        model=MODEL,
        slots=SLOTS,
        tokens=compared,
        flips=flips,
        at_most_95=(flips + 3) / compared,
    )


if __name__ == "__main__":
    main()
