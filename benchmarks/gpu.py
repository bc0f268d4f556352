"""The loss and the rollouts on a CUDA device, by its own clock; says so and ends where there is none.

    python -m benchmarks gpu [--quick]

Everything is checked before it is timed. Events measure between synchronisations, after rounds that warm up.
"""

from collections.abc import Callable

import torch

from benchmarks import ceilings, rollout
from benchmarks.loss_kernels import (
    Inputs,
    Kernel,
    Size,
    build_ours,
    build_trl,
    compute_reference,
    make_inputs,
    run_products,
)
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

CHUNK, TOLERANCE = 4096, 2e-2
SIZE, QUICK_SIZE = Size(8192, 151936, 1024, 4096), Size(1024, 32768, 256, 512)
CASE = rollout.Case("600m", "fixed", 64, 64, 128)
QUICK_CASE = rollout.Case("17m", "fixed", 8, 8, 32)
NOTHING = "no CUDA device is at hand, so there is nothing to measure; python -m benchmarks loss and rollout measure the CPU"


def main() -> None:
    """Report one line for the loss and one for the rollouts."""
    options = build_parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print(NOTHING)
        return
    session = open_session("gpu", options, ceilings.measure_briefly())
    print(f"on {torch.cuda.get_device_name()}")
    _measure_loss(session, QUICK_SIZE if session.quick else SIZE)
    rollout.measure(session, QUICK_CASE if session.quick else CASE, "cuda", build_cuda_timer)


def build_cuda_timer(work: Callable[[], object]) -> Callable[[], float]:
    """The work as something that returns the device's seconds."""

    def run_timed() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

    return run_timed


def _load_kernels() -> dict[str, Kernel]:
    """The contenders; TRL's kernel where it is installed here."""
    kernels: dict[str, Kernel] = {
        "reverse_kl": build_ours("reverse_kl", CHUNK),
        "products": lambda inputs: run_products(inputs, CHUNK),
    }
    try:
        kernels["trl"] = build_trl()
    except ImportError:
        print("trl is not installed here, so it is left out: pip install 'practicum[peers]'")
    return kernels


def _measure_loss(session: Session, size: Size) -> None:
    kernels = _load_kernels()
    errors = {
        name: _measure_error(run, size) for name, run in kernels.items() if name != "products"
    }
    if max(errors.values()) > TOLERANCE:
        raise SystemExit(f"the gradients differ from those in float64: {errors}")
    batches = [make_inputs(size, seed, "cuda", torch.bfloat16) for seed in range(2)]
    turn = iter(range(10**9))
    times = interleave(
        {
            name: build_cuda_timer(lambda run=run: run(batches[next(turn) % 2]))
            for name, run in kernels.items()
        },
        session.rounds,
        session.warm_up,
    )
    peaks = {name: _measure_peak(run, batches[0]) for name, run in kernels.items()}
    rows = [
        [
            name,
            1000 * spread(times[name])["median"],
            compute_ratios(times[name], times["products"])["median"],
            peaks[name],
        ]
        for name in times
    ]
    print(format_table(["contender", "ms", "/ products", "peak MiB"], rows))
    session.report(
        {
            "gpu.loss.products": compute_ratios(times["reverse_kl"], times["products"]),
            "gpu.loss.memory": build_reading(peaks["reverse_kl"]),
        },
        device=torch.cuda.get_device_name(),
        tokens=size.tokens,
        vocabulary=size.vocabulary,
        widths=[size.student, size.teacher],
        seconds={name: spread(values) for name, values in times.items()},
        peak_mib=peaks,
        errors=errors,
    )


def _measure_error(run: Kernel, size: Size) -> float:
    """The error of the hidden states' gradient on a slice, relative to its greatest number."""
    few = make_inputs(
        Size(64, size.vocabulary, size.student, size.teacher), 7, "cuda", torch.bfloat16
    )
    _, gradient = run(few)
    expected = compute_reference("reverse_kl", few)[1]
    return float(((gradient.double() - expected).abs().max() / expected.abs().max()).item())


def _measure_peak(run: Kernel, inputs: Inputs) -> float:
    """MiB by which the device's memory grows at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(inputs)
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


if __name__ == "__main__":
    main()
