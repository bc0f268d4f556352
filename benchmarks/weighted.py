"""Measure the update on the tokens that a weight keeps: processor seconds, learned tokens, peak memory.

    python -m benchmarks weighted [--quick]

A student with 17 million weights learns from a teacher with 57 million by reverse KL over a vocabulary of 49,152: on all tokens, or
on a share by `soft_or` (TIP, 2604.14084), which needs a first pass without gradient over all tokens. Each weight runs in a separate
process, because the peak is measured per process. The 1,024 tokens go through the heads in chunks of 128.
"""

import argparse
import json
import statistics
import time

from benchmarks import models
from benchmarks.measuring import (
    build_parser,
    format_table,
    open_session,
    read_memory,
    run_in_process,
)
from benchmarks.scaling import make_rollout
from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.objective import Full, Objective
from practicum.training.loop import assemble
from practicum.types import ScoreRequest

WEIGHTS = ("all", "soft_or(0.5)", "soft_or(0.1)")


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("--weights", help="internal: measure this weight in this process")
    options = parser.parse_args()
    if options.weights:
        print(json.dumps(_measure_update(options)))
        return
    session = open_session("weighted", options)
    quick = ["--quick"] * options.quick
    updates = {
        weights: run_in_process(
            "benchmarks.weighted", "--weights", weights, "--rounds", session.rounds, *quick
        )
        for weights in WEIGHTS
    }
    rows = [[name, *update.values()] for name, update in updates.items()]
    print(format_table(["weights", "processor s", "learned tokens", "peak MiB"], rows))
    session.report({}, updates=updates)


def _measure_update(options: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of an update, its learned tokens, and the peak of this process."""
    names = ("tiny", "tiny-teacher") if options.quick else ("17m", "57m")
    student, teacher = (models.SHAPES[name] for name in names)
    model = models.build_language_model(student)
    model.model.requires_grad_(True)
    trainer = LocalTrainer(model, TrainerLimits())
    scorer = models.build_sampler(models.build_language_model(teacher, 1), 8)
    items = [make_rollout(student, number) for number in range(4 if options.quick else 16)]
    requests = [ScoreRequest(item.prompt_tokens, tuple(item.tokens.tolist())) for item in items]
    batch = assemble(items, scorer.score(requests, Full()))
    objective = Objective.model_validate({"weights": options.weights})
    times, supervised = [], 0.0
    for number in range(1 + options.rounds):
        start = time.process_time()
        supervised = trainer.forward_backward(batch, objective, number).metrics["supervised"]
        times.append(time.process_time() - start)
        model.model.zero_grad(set_to_none=True)
    return {
        "seconds": round(statistics.median(times[1:]), 3),
        "learned": supervised,
        "peak_mib": round(read_memory("VmHWM")),
    }


if __name__ == "__main__":
    main()
