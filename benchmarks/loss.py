"""The loss over the whole vocabulary with its gradient, against its matrix products, whole matrices, TRL and Liger.

    python -m benchmarks loss [--tokens 512 2048] [--vocabulary 49152] [--divergence reverse_kl jsd] [--peer trl liger]

All work on the same hidden states (256 wide, the teacher's 512), with a student head that learns. Every contender has a
process of its own, and they take turns; memory is the growth of the peak resident set.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Sequence

from benchmarks import ceilings, peers
from benchmarks.loss_kernels import OURS, WIDTHS, Size
from benchmarks.measuring import (
    Session,
    interleaved,
    parser,
    ratios,
    session,
    single,
    spread,
    table,
)

CASES = ((512, 49152), (2048, 49152), (8192, 49152), (512, 151936))
QUICK = ((256, 8192),)
MOST_NAIVE = 2048 * 49152
"""Whole matrices of more numbers than this are not tried."""
TOLERANCE = 1e-5


def _checked(name: str) -> tuple[str, ...]:
    """What must be as in float64; the gradient of total variation jumps where both probabilities are equal, its value does not."""
    return ("value",) if name == "tvd" else ("value", "hidden", "head")


def main() -> None:
    """Report one line for each size."""
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens")
    made.add_argument("--vocabulary", type=int, nargs="+", help="sizes of the vocabulary")
    made.add_argument(
        "--divergence",
        nargs="+",
        choices=OURS,
        help="default: all at 2,048 tokens, else reverse_kl",
    )
    made.add_argument(
        "--widths",
        type=int,
        nargs=2,
        default=WIDTHS,
        help="of student and teacher (default 256 512)",
    )
    peers.add_options(made, ("trl", "liger"))
    options = made.parse_args()
    now = session("loss", options, ceilings.short())
    found = peers.installed(options.peer, options.peer_python)
    seen: dict[tuple[int, int], float] = {}
    for case in _cases(options.tokens, options.vocabulary, options.quick):
        whole = options.quick or case == (2048, 49152)
        names = options.divergence or (OURS if whole else OURS[:1])
        _case(
            now,
            Size(*case, *options.widths),
            [*names, *_others(case), *found],
            options.peer_python,
            seen,
        )


def _cases(
    tokens: Sequence[int] | None, vocabularies: Sequence[int] | None, quick: bool
) -> list[tuple[int, int]]:
    if not tokens and not vocabularies:
        return list(QUICK if quick else CASES)
    default = QUICK[0] if quick else CASES[1]
    return [
        (count, size) for size in vocabularies or default[1:] for count in tokens or default[:1]
    ]


def _others(case: tuple[int, int]) -> list[str]:
    return ["products", "naive"] if case[0] * case[1] <= MOST_NAIVE else ["products"]


def _case(
    now: Session,
    size: Size,
    names: Sequence[str],
    peer_python: str,
    seen: dict[tuple[int, int], float],
) -> None:
    """Weigh, check and time every contender at one size; `seen` is the memory of those before."""
    tokens, vocabulary = case = (size.tokens, size.vocabulary)

    def worker(name: str) -> peers.Worker:
        python = peer_python if name in peers.PACKAGES else sys.executable
        return peers.Worker("benchmarks.loss_kernels", (name, *dataclasses.astuple(size)), python)

    memory = {}
    for name in names:
        with worker(
            name
        ) as fresh:  # what another call has let go of would hide what this one takes
            memory[name] = fresh.ask(do="memory")
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(worker(name)) for name in names}
        errors = {
            name: worker.ask(do="errors") for name, worker in workers.items() if name != "products"
        }
        times = interleaved(
            {name: lambda worker=worker: worker.ask(do="time") for name, worker in workers.items()},
            now.rounds,
            now.warm_up,
        )
    wrong = [
        name
        for name, error in errors.items()
        if max(error[part] for part in _checked(name)) > TOLERANCE
    ]
    if wrong:
        raise SystemExit(
            f"the gradients of {', '.join(wrong)} differ from those in float64: {errors}"
        )
    seen[case] = memory.get("reverse_kl", 0.0)
    matrix = tokens * vocabulary * 4 / 2**20
    floor = times["products"]
    rows = [
        [
            name,
            spread(times[name])["median"],
            ratios(times[name], floor)["median"],
            memory[name],
            memory[name] / matrix,
        ]
        for name in names
    ]
    print(f"T = {tokens}, V = {vocabulary}, student {size.student} wide, teacher {size.teacher}")
    print(table(["contender", "seconds", "/ products", "peak MiB", "in [T, V]"], rows))
    now.report(
        _readings(case, times, seen) if (size.student, size.teacher) == WIDTHS else {},
        tokens=tokens,
        vocabulary=vocabulary,
        widths=[size.student, size.teacher],
        seconds={name: spread(values) for name, values in times.items()},
        of_products={name: ratios(values, floor) for name, values in times.items()},
        peak_mib={name: round(value, 1) for name, value in memory.items()},
        peak_in_matrices={name: round(value / matrix, 3) for name, value in memory.items()},
        errors=errors,
        peers=peers.versions([name for name in names if name in peers.PACKAGES], peer_python),
    )


def _readings(
    case: tuple[int, int], times: dict[str, list[float]], seen: dict[tuple[int, int], float]
) -> dict[str, dict[str, float]]:
    """What the goals ask of this size."""
    readings: dict[str, dict[str, float]] = {}
    mine = times.get("reverse_kl")
    if mine is None:
        return readings
    if case in ((2048, 49152), (512, 151936)):
        readings[f"loss.products.{case[1]}"] = ratios(mine, times["products"])
    if case == (2048, 49152):
        for name in ("trl", "naive", "liger"):
            if name in times:
                readings[f"loss.{name}"] = ratios(mine, times[name])
        for name in ("forward_kl", "tvd", "jsd"):
            if name in times:
                readings[f"loss.{name}"] = ratios(times[name], mine)
        if "sampled" in times:
            readings["loss.sampled"] = ratios(mine, times["sampled"])
    if case == (8192, 49152):
        readings["loss.memory"] = single(seen[case])
        if (2048, 49152) in seen:
            grown = (seen[case] - seen[2048, 49152]) * 2**20 / (8192 - 2048)
            readings["loss.memory_growth"] = single(grown)
    return readings


if __name__ == "__main__":
    main()
