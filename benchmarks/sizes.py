"""The sizes that are chosen for the user: tokens of a scoring pass, of a chunk of the loss, and rows that the layout is made for.

    python -m benchmarks sizes

Each size is compared with the one in use, in the same round: seconds of the same work, 1 being as fast. *layout* is a product of
eight rows with a head of 49,152 x 256, as torch multiplies it and in the layout of oneDNN, chosen for 8 and for 32 rows.
"""

from collections.abc import Callable

import torch

from benchmarks import ceilings
from benchmarks.loss_kernels import Size, inputs, ours
from benchmarks.measuring import (
    Session,
    interleaved,
    parser,
    ratios,
    seconds,
    session,
    spread,
    table,
)
from benchmarks.models import SHAPES, language_model
from practicum.backends.local import sampler
from practicum.objective import Full
from practicum.types import ScoreRequest

PASSES, CHUNKS, LAYOUTS = (256, 512, 1024, 2048, 4096), (32, 64, 128, 256, 512), (8, 32)
ROWS, WIDTH, VOCABULARY = 8, 256, 49152
"""A decoding step of the 17m model."""


def main() -> None:
    """Report one line for each choice."""
    options = parser(__doc__).parse_args()
    now = session("sizes", options, ceilings.short())
    _report(now, "pass", sampler.SCORED_TOKENS, _passes(options.quick))
    _report(now, "chunk", 128, _chunks(options.quick))
    _report(now, "layout", "torch", _layouts())


def _report(
    now: Session, choice: str, used: int | str, works: dict[int | str, Callable[[], object]]
) -> None:
    times = interleaved(
        {str(size): seconds(work) for size, work in works.items()}, now.rounds, now.warm_up
    )
    of_used = {size: ratios(values, times[str(used)]) for size, values in times.items()}
    print(
        table(
            [choice, f"seconds / those at {used}"],
            [[size, ratio["median"]] for size, ratio in of_used.items()],
        )
    )
    spreads = {size: spread(values) for size, values in times.items()}
    now.report({}, choice=choice, used=used, seconds=spreads, of_used=of_used)


def _passes(quick: bool) -> dict[int | str, Callable[[], object]]:
    """Completions of 64 tokens scored by the 57m teacher in passes of so many tokens."""
    client = sampler.LocalSampler(language_model(SHAPES["57m"]))
    count = 8 if quick else 64
    draws = torch.randint(3, 1000, (count, 96), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [ScoreRequest(tuple(row[:32]), tuple(row[32:])) for row in draws]

    def scored(tokens: int) -> Callable[[], object]:
        def work() -> object:
            used, sampler.SCORED_TOKENS = sampler.SCORED_TOKENS, tokens
            try:
                return client.score(requests, Full())
            finally:
                sampler.SCORED_TOKENS = used

        return work

    return {tokens: scored(tokens) for tokens in PASSES}


def _chunks(quick: bool) -> dict[int | str, Callable[[], object]]:
    """The loss over 1,024 tokens in chunks of so many."""
    given = inputs(Size(128 if quick else 1024, 8192 if quick else VOCABULARY))

    def learned(tokens: int) -> Callable[[], object]:
        kernel = ours("reverse_kl", tokens)
        return lambda: kernel(given)

    return {tokens: learned(tokens) for tokens in CHUNKS}


def _layouts() -> dict[int | str, Callable[[], object]]:
    """Sixteen products, each with a weight of its own, so that none is found in the caches."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, WIDTH, generator=generator)
    weights = [torch.randn(VOCABULARY, WIDTH, generator=generator) for _ in range(4)]

    def laid_out(hint: int) -> Callable[[], object]:
        found = [torch.ops.mkldnn._reorder_linear_weight(weight, hint) for weight in weights]
        return lambda: [
            torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
            for weight in 4 * found
        ]

    plain = {"torch": lambda: [torch.nn.functional.linear(rows, weight) for weight in 4 * weights]}
    return {**plain, **{hint: laid_out(hint) for hint in LAYOUTS}}


if __name__ == "__main__":
    main()
