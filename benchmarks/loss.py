"""Measure the full-vocabulary loss with its gradient, against its matrix products, whole matrices, TRL and Liger.

    python -m benchmarks loss [--tokens 512 2048] [--vocabulary 49152] [--divergence reverse_kl jsd] [--peer trl liger]

All contenders work on the same hidden states (256 wide, the teacher's 512), with a trainable student head. Each contender has a
separate process, and they alternate. Memory is the growth of the peak resident set.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from statistics import median

from benchmarks import ceilings, peers
from benchmarks.loss_kernels import OURS, WIDTHS, Size
from benchmarks.measuring import (
    Session,
    build_parser,
    build_reading,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    spread,
)
from practicum.backends.local.native import load_library

CASES = ((512, 49152), (2048, 49152), (8192, 49152), (512, 151936))
QUICK = ((256, 8192),)
MOST_NAIVE = 2048 * 49152
"""Whole matrices of more numbers than this are not tried."""
TOLERANCE = 1e-5


def _list_checked(name: str) -> tuple[str, ...]:
    """Return the parts that must equal the float64 result: for total variation only the value.

    Its gradient jumps where both probabilities are equal.
    """
    return ("value",) if name == "tvd" else ("value", "hidden", "head")


def main() -> None:
    """Report one line for each size."""
    parser = build_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens")
    parser.add_argument("--vocabulary", type=int, nargs="+", help="sizes of the vocabulary")
    parser.add_argument(
        "--divergence",
        nargs="+",
        choices=OURS,
        help="default: all at 2,048 tokens, else reverse_kl",
    )
    parser.add_argument(
        "--widths",
        type=int,
        nargs=2,
        default=WIDTHS,
        help="of student and teacher (default 256 512)",
    )
    peers.add_options(parser, ("trl", "liger"))
    options = parser.parse_args()
    session = open_session("loss", options, ceilings.measure_briefly())
    installed = peers.find_installed(options.peer, options.peer_python)
    memory_by_case: dict[tuple[int, int], float] = {}
    contenders = [name for name in OURS if name != "compiled" or load_library()]
    for case in _choose_cases(options.tokens, options.vocabulary, options.quick):
        all_divergences = options.quick or case == (2048, 49152)
        names = options.divergence or (contenders if all_divergences else contenders[:1])
        _measure_case(
            session,
            Size(*case, *options.widths),
            [*names, *_choose_baselines(case), *installed],
            options.peer_python,
            memory_by_case,
        )


def _choose_cases(
    tokens: Sequence[int] | None, vocabularies: Sequence[int] | None, quick: bool
) -> list[tuple[int, int]]:
    if not tokens and not vocabularies:
        return list(QUICK if quick else CASES)
    default = QUICK[0] if quick else CASES[1]
    return [
        (count, size) for size in vocabularies or default[1:] for count in tokens or default[:1]
    ]


def _choose_baselines(case: tuple[int, int]) -> list[str]:
    return ["products", "naive"] if case[0] * case[1] <= MOST_NAIVE else ["products"]


def _measure_case(
    session: Session,
    size: Size,
    names: Sequence[str],
    peer_python: str,
    memory_by_case: dict[tuple[int, int], float],
) -> None:
    """Weigh, check and time every contender at one size; `memory_by_case` holds the memory of earlier sizes."""
    tokens, vocabulary = case = (size.tokens, size.vocabulary)

    def open_worker(name: str) -> peers.Worker:
        python = peer_python if name in peers.PACKAGES else sys.executable
        return peers.Worker("benchmarks.loss_kernels", (name, *dataclasses.astuple(size)), python)

    def measure_memory(name: str) -> float:
        # In a fresh process: what another call has let go of would hide what this one takes.
        with open_worker(name) as fresh:
            return fresh.ask(do="memory")

    # The allocator's gaps differ between processes by up to two tiles of [128, V].
    memory = {
        name: median(measure_memory(name) for _ in range(1 if session.quick else 3))
        for name in names
    }
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(open_worker(name)) for name in names}
        errors = {
            name: worker.ask(do="errors") for name, worker in workers.items() if name != "products"
        }
        times = interleave(
            {name: lambda worker=worker: worker.ask(do="time") for name, worker in workers.items()},
            session.rounds,
            session.warm_up,
        )
    wrong = [
        name
        for name, error in errors.items()
        if max(error[part] for part in _list_checked(name)) > TOLERANCE
    ]
    if wrong:
        raise SystemExit(
            f"the gradients of {', '.join(wrong)} differ from the float64 gradients: {errors}"
        )
    memory_by_case[case] = memory.get("reverse_kl", 0.0)
    matrix = tokens * vocabulary * 4 / 2**20
    floor = times["products"]
    rows = [
        [
            name,
            spread(times[name])["median"],
            compute_ratios(times[name], floor)["median"],
            memory[name],
            memory[name] / matrix,
        ]
        for name in names
    ]
    print(f"T = {tokens}, V = {vocabulary}, student {size.student} wide, teacher {size.teacher}")
    print(format_table(["contender", "seconds", "/ products", "peak MiB", "in [T, V]"], rows))
    session.report(
        _build_readings(case, times, memory_by_case)
        if (size.student, size.teacher) == WIDTHS
        else {},
        tokens=tokens,
        vocabulary=vocabulary,
        widths=[size.student, size.teacher],
        seconds={name: spread(values) for name, values in times.items()},
        of_products={name: compute_ratios(values, floor) for name, values in times.items()},
        peak_mib={name: round(value, 1) for name, value in memory.items()},
        peak_in_matrices={name: round(value / matrix, 3) for name, value in memory.items()},
        errors=errors,
        peers=peers.read_versions([name for name in names if name in peers.PACKAGES], peer_python),
    )


def _build_readings(
    case: tuple[int, int],
    times: dict[str, list[float]],
    memory_by_case: dict[tuple[int, int], float],
) -> dict[str, dict[str, float]]:
    """Return the readings of this size that the goals ask for."""
    readings: dict[str, dict[str, float]] = {}
    seconds = times.get("reverse_kl")
    if seconds is None:
        return readings
    if case in ((2048, 49152), (512, 151936)):
        readings[f"loss.products.{case[1]}"] = compute_ratios(seconds, times["products"])
    if case == (2048, 49152):
        for name in ("trl", "naive", "liger"):
            if name in times:
                readings[f"loss.{name}"] = compute_ratios(seconds, times[name])
        for name in ("forward_kl", "tvd", "jsd"):
            if name in times:
                readings[f"loss.{name}"] = compute_ratios(times[name], seconds)
        if "sampled" in times:
            readings["loss.sampled"] = compute_ratios(seconds, times["sampled"])
    if case == (8192, 49152):
        readings["loss.memory"] = build_reading(memory_by_case[case])
        if (2048, 49152) in memory_by_case:
            grown = (memory_by_case[case] - memory_by_case[2048, 49152]) * 2**20 / (8192 - 2048)
            readings["loss.memory_growth"] = build_reading(grown)
    return readings


if __name__ == "__main__":
    main()
