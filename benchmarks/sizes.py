"""Measure the sizes that are chosen automatically: tokens per scoring pass, tokens per chunk of the loss, and rows of the layout.

    python -m benchmarks sizes

Each size is compared with the default in the same round, by the seconds of the same work; 1 means equally fast. *layout* is a
product of eight rows with a head of 49,152 x 256, as torch multiplies it and in the layout of oneDNN, chosen for 8 and for 32 rows.
"""

from collections.abc import Callable

import torch

from benchmarks import ceilings
from benchmarks.loss_kernels import Size, build_ours, make_inputs
from benchmarks.measuring import (
    Session,
    build_parser,
    build_timer,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    spread,
)
from benchmarks.models import SHAPES, build_language_model
from practicum.backends.local.device_limits import ON_CPU
from practicum.backends.local.packing import iterate_hidden_states
from practicum.types import ScoreRequest

PASSES, CHUNKS, LAYOUTS = (256, 512, 1024, 2048, 4096), (32, 64, 128, 256, 512), (8, 32)
ROWS, WIDTH, VOCABULARY = 8, 256, 49152
"""A decoding step of the 17m model."""


def main() -> None:
    """Report one line for each choice."""
    options = build_parser(__doc__).parse_args()
    session = open_session("sizes", options, ceilings.measure_briefly())
    _report(session, "pass", ON_CPU.scored_tokens, _prepare_passes(options.quick))
    _report(session, "chunk", ON_CPU.chunk_tokens, _prepare_chunks(options.quick))
    _report(session, "layout", "torch", _prepare_layouts())


def _report(
    session: Session, choice: str, used: int | str, works: dict[int | str, Callable[[], object]]
) -> None:
    times = interleave(
        {str(size): build_timer(work) for size, work in works.items()},
        session.rounds,
        session.warm_up,
    )
    of_used = {size: compute_ratios(values, times[str(used)]) for size, values in times.items()}
    print(
        format_table(
            [choice, f"seconds / those at {used}"],
            [[size, ratio["median"]] for size, ratio in of_used.items()],
        )
    )
    spreads = {size: spread(values) for size, values in times.items()}
    session.report({}, choice=choice, used=used, seconds=spreads, of_used=of_used)


def _prepare_passes(quick: bool) -> dict[int | str, Callable[[], object]]:
    """Prepare the 57m teacher's scoring of 64-token completions, by the tokens per pass."""
    teacher = build_language_model(SHAPES["57m"])
    count = 8 if quick else 64
    draws = torch.randint(3, 1000, (count, 96), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [ScoreRequest(tuple(row[:32]), tuple(row[32:])) for row in draws]

    def score_in_passes(tokens: int) -> Callable[[], object]:
        @torch.no_grad()
        def run_passes() -> object:
            return list(iterate_hidden_states(teacher, requests, tokens))

        return run_passes

    return {tokens: score_in_passes(tokens) for tokens in PASSES}


def _prepare_chunks(quick: bool) -> dict[int | str, Callable[[], object]]:
    """Prepare the loss over 1,024 tokens, by the tokens per chunk."""
    inputs = make_inputs(Size(128 if quick else 1024, 8192 if quick else VOCABULARY))

    def train_in_chunks(tokens: int) -> Callable[[], object]:
        kernel = build_ours("reverse_kl", tokens)
        return lambda: kernel(inputs)

    return {tokens: train_in_chunks(tokens) for tokens in CHUNKS}


def _prepare_layouts() -> dict[int | str, Callable[[], object]]:
    """Prepare sixteen products with different weights, so that no weight is cached."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, WIDTH, generator=generator)
    weights = [torch.randn(VOCABULARY, WIDTH, generator=generator) for _ in range(4)]

    def multiply_in_layout(hint: int) -> Callable[[], object]:
        reordered = [torch.ops.mkldnn._reorder_linear_weight(weight, hint) for weight in weights]
        return lambda: [
            torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
            for weight in 4 * reordered
        ]

    plain = {"torch": lambda: [torch.nn.functional.linear(rows, weight) for weight in 4 * weights]}
    return {**plain, **{hint: multiply_in_layout(hint) for hint in LAYOUTS}}


if __name__ == "__main__":
    main()
