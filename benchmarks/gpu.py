"""The loss and the rollouts on a CUDA device, by its own clock; says so and ends where there is none.

    python -m benchmarks gpu [--quick]

Everything is checked before it is timed. Events measure between synchronisations, after rounds that warm up.
"""

from collections.abc import Callable

import torch

from benchmarks import ceilings, rollout
from benchmarks.loss_kernels import Inputs, Kernel, Size, inputs, ours, products, reference, trl
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

CHUNK, TOLERANCE = 4096, 2e-2
SIZE, QUICK_SIZE = Size(8192, 151936, 1024, 4096), Size(1024, 32768, 256, 512)
CASE = rollout.Case("600m", "fixed", 64, 64, 128)
QUICK_CASE = rollout.Case("17m", "fixed", 8, 8, 32)
NOTHING = "no CUDA device is at hand, so there is nothing to measure; python -m benchmarks loss and rollout measure the CPU"


def main() -> None:
    """Report one line for the loss and one for the rollouts."""
    options = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print(NOTHING)
        return
    now = session("gpu", options, ceilings.short())
    print(f"on {torch.cuda.get_device_name()}")
    _loss(now, QUICK_SIZE if now.quick else SIZE)
    rollout.measure(now, QUICK_CASE if now.quick else CASE, "cuda", cuda_seconds)


def cuda_seconds(work: Callable[[], object]) -> Callable[[], float]:
    """The work as something that returns the device's seconds."""

    def timed() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

    return timed


def _kernels() -> dict[str, Kernel]:
    """The contenders; TRL's kernel where it is installed here."""
    found: dict[str, Kernel] = {
        "reverse_kl": ours("reverse_kl", CHUNK),
        "products": lambda given: products(given, CHUNK),
    }
    try:
        found["trl"] = trl()
    except ImportError:
        print("trl is not installed here, so it is left out: pip install 'practicum[peers]'")
    return found


def _loss(now: Session, size: Size) -> None:
    kernels = _kernels()
    errors = {name: _error(run, size) for name, run in kernels.items() if name != "products"}
    if max(errors.values()) > TOLERANCE:
        raise SystemExit(f"the gradients differ from those in float64: {errors}")
    given = [inputs(size, seed, "cuda", torch.bfloat16) for seed in range(2)]
    turn = iter(range(10**9))
    times = interleaved(
        {
            name: cuda_seconds(lambda run=run: run(given[next(turn) % 2]))
            for name, run in kernels.items()
        },
        now.rounds,
        now.warm_up,
    )
    peaks = {name: _peak(run, given[0]) for name, run in kernels.items()}
    rows = [
        [
            name,
            1000 * spread(times[name])["median"],
            ratios(times[name], times["products"])["median"],
            peaks[name],
        ]
        for name in times
    ]
    print(table(["contender", "ms", "/ products", "peak MiB"], rows))
    now.report(
        {
            "gpu.loss.products": ratios(times["reverse_kl"], times["products"]),
            "gpu.loss.memory": single(peaks["reverse_kl"]),
        },
        device=torch.cuda.get_device_name(),
        tokens=size.tokens,
        vocabulary=size.vocabulary,
        widths=[size.student, size.teacher],
        seconds={name: spread(values) for name, values in times.items()},
        peak_mib=peaks,
        errors=errors,
    )


def _error(run: Kernel, size: Size) -> float:
    """The error of the hidden states' gradient on a slice, relative to its greatest number."""
    few = inputs(Size(64, size.vocabulary, size.student, size.teacher), 7, "cuda", torch.bfloat16)
    _, gradient = run(few)
    wanted = reference("reverse_kl", few)[1]
    return float(((gradient.double() - wanted).abs().max() / wanted.abs().max()).item())


def _peak(run: Kernel, given: Inputs) -> float:
    """MiB by which the device's memory grows at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(given)
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


if __name__ == "__main__":
    main()
