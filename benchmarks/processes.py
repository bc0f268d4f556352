"""Compare two processes that decode in parallel with one: processor seconds per token.

    python -m benchmarks processes [--quick]

Each process has its own core, so the cost of a second process is the share of caches and memory bandwidth that it takes from the
first. Wall seconds would show the same on idle cores and nothing on busy ones. If other work uses the second core, a single process
also has to share: the load is printed next to the figure.
"""

import torch

from benchmarks import models
from benchmarks.measuring import build_parser, compute_ratios, interleave, open_session
from benchmarks.peers import Worker, serve
from benchmarks.scaling import prepare_decoding


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("--serve", action="store_true", help="internal: decode on demand")
    options = parser.parse_args()
    if options.serve:
        _serve(options.quick)
        return
    session = open_session("processes", options)
    arguments = ["--serve", *(["--quick"] if session.quick else [])]
    with (
        Worker("benchmarks.processes", arguments) as first,
        Worker("benchmarks.processes", arguments) as second,
    ):

        def decode_twice() -> float:
            for worker in (first, second):
                worker.send(do="decode")
            return sum(worker.receive() for worker in (first, second)) / 2

        times = interleave(
            {"one": lambda: first.ask(do="decode"), "two": decode_twice},
            session.rounds,
            session.warm_up,
        )
    ratio = compute_ratios(times["two"], times["one"])
    print(f"a token in two processes at once / in one: {ratio['median']:.3g}")
    session.report({"processes.decoding": ratio}, seconds_a_token=times)


def _serve(quick: bool) -> None:
    torch.set_num_threads(1)
    decode = prepare_decoding(models.SHAPES["tiny" if quick else "17m"])(16 if quick else 32)
    serve(lambda question: decode())


if __name__ == "__main__":
    main()
