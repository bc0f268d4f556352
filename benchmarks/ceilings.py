"""Measure the limits of one core: matrix products, memory reads, the skinny head product and exponentials.

    python -m benchmarks ceilings [--quick]

Every other benchmark first runs the short form and stores it with its result.
"""

import time
from collections.abc import Callable

import torch

from benchmarks.measuring import build_parser, format_table, open_session, round_digits, spread

SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (256, 512, 49152))
HEAD, BATCHES = (49152, 576), (2, 4, 8, 16, 32)


def main() -> None:
    """Report one line."""
    options = build_parser(__doc__).parse_args()
    session = open_session("ceilings", options)
    rounds = session.rounds
    products = {
        "x".join(map(str, shape)): _measure_products(shape, rounds)
        for shape in SHAPES[:: 2 if options.quick else 1]
    }
    read = _read(rounds, 64 if options.quick else 256)
    heads = {
        str(batch): _time_head(batch, rounds) for batch in BATCHES[:: 2 if options.quick else 1]
    }
    exponentials = _measure_exponentials(rounds)
    rows = [[f"product {name}", figure["median"], "GFLOP/s"] for name, figure in products.items()]
    rows += [
        ["read", read["median"], "GB/s"],
        ["exponential", exponentials["median"], "G numbers/s"],
    ]
    rows += [
        [f"head product, {batch} rows", figure["median"] * 1000, "ms"]
        for batch, figure in heads.items()
    ]
    print(format_table(["what", "median", "unit"], rows))
    session.report(gflops=products, read_gb=read, head_seconds=heads, exponentials_g=exponentials)


def measure_briefly() -> dict[str, float]:
    """Measure in about a second what floors are computed from: products, reading, exponentials."""
    return {
        "gflops": _measure_products(SHAPES[0], 5)["greatest"],
        "read_gb": _read(5, 256)["greatest"],
        "exponentials_g": _measure_exponentials(5)["greatest"],
    }


def compute_floor(flops: float, nbytes: float, ceilings: dict[str, float]) -> float:
    """Return the minimum seconds of a computation with these FLOPs and bytes."""
    return max(flops / (ceilings["gflops"] * 1e9), nbytes / (ceilings["read_gb"] * 1e9))


def _measure_products(shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    rows, inner, columns = shape
    first, second, out = (
        torch.randn(rows, inner),
        torch.randn(inner, columns),
        torch.empty(rows, columns),
    )
    return _measure_rates(
        lambda: torch.mm(first, second, out=out), 2e-9 * rows * inner * columns, rounds
    )


def _read(rounds: int, mib: int) -> dict[str, float]:
    numbers = torch.ones(mib * 2**18)
    return _measure_rates(lambda: numbers.sum(), numbers.nbytes / 1e9, rounds)


def _time_head(batch: int, rounds: int) -> dict[str, float]:
    weight, hidden = torch.randn(HEAD), torch.randn(batch, HEAD[1])
    return spread(_time_rounds(lambda: torch.nn.functional.linear(hidden, weight), rounds))


def _measure_exponentials(rounds: int) -> dict[str, float]:
    numbers, out = torch.randn(2**22), torch.empty(2**22)
    return _measure_rates(lambda: torch.exp(numbers, out=out), 2**22 / 1e9, rounds)


def _measure_rates(work: Callable[[], object], amount: float, rounds: int) -> dict[str, float]:
    return spread([round_digits(amount / seconds) for seconds in _time_rounds(work, rounds)])


def _time_rounds(work: Callable[[], object], rounds: int) -> list[float]:
    """Processor seconds of each round after one that is dropped."""
    times = []
    for _ in range(rounds + 1):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return times[1:]


if __name__ == "__main__":
    main()
