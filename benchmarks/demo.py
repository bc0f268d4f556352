"""Run the quick start over several seeds: seconds of the whole process, gain, and the share of each phase of a step.

python -m benchmarks demo [--seeds 0 1 2]
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measuring import Session, build_parser, spread
from practicum import functional as F
from practicum.models.config import ModelConfig, ScorerConfig
from practicum.objective import Full
from practicum.ports import SamplingClient
from practicum.recipe import load_recipe
from practicum.runs import open_student
from practicum.runs.opening import build_task, load_model
from practicum.statistics import bootstrap
from practicum.text import Renderer
from practicum.types import Message, SampleRequest, SamplingParams, ScoreRequest

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.yaml"
UNRELATED = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 13 plus 4?",
    "Name three colours.",
    "Who wrote Hamlet?",
    "What do bees make?",
    "Give me a synonym for happy.",
    "How many days are in a week?",
    "What is the opposite of cold?",
    "Tell me about cats in one sentence.",
    "Which planet is closest to the sun?",
    "What is photosynthesis?",
)
AS_MAKE_STARTS_IT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Waiting threads sleep, and memory that one pass frees is reused by the next."""

PHASES = ("sample", "score", "update")


def main() -> None:
    """Run every seed in a separate process and report once."""
    parser = build_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", help="default 0 1 2, with --quick 0")
    options = parser.parse_args()
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    session = Session("demo", options.quick, options.record, command="python -m benchmarks demo")
    with tempfile.TemporaryDirectory() as folder:
        runs = [_run(Path(folder), seed) for seed in seeds]
        honesty = _measure_honesty([Path(folder) / f"seed-{seed}" for seed in seeds])
    # All seeds have the same questions, so the bootstrap resamples questions, each with its mean over seeds.
    gains = torch.tensor([run["gains"] for run in runs], dtype=torch.float64).mean(dim=0)
    pooled = bootstrap(gains, seed=0)
    session.report(
        seeds=seeds,
        wall_seconds=spread([run["seconds"] for run in runs]),
        processor_seconds=spread([run["processor"] for run in runs]),
        accuracy_before=[run["before"] for run in runs],
        accuracy_after=[run["after"] for run in runs],
        accuracy_teacher=[run["teacher"] for run in runs],
        gain={
            "mean": round(pooled.mean, 4),
            "low": round(pooled.low, 4),
            "high": round(pooled.high, 4),
        },
        reverse_kl_before=[run["kl"][0] for run in runs],
        reverse_kl_after=[run["kl"][1] for run in runs],
        step_share={phase: spread([run["share"][phase] for run in runs]) for phase in PHASES},
        **honesty,
    )


def _run(folder: Path, seed: int) -> dict:
    command = [
        sys.executable,
        "-m",
        "practicum",
        "run",
        str(RECIPE),
        "--out",
        str(folder),
        f"seed={seed}",
        f"name=seed-{seed}",
    ]
    settings = {**os.environ, **AS_MAKE_STARTS_IT}
    start, used = time.monotonic(), _read_processor_seconds()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=settings)
    seconds, processor = time.monotonic() - start, _read_processor_seconds() - used
    run_folder = folder / f"seed-{seed}"
    summary = json.loads((run_folder / "summary.json").read_text())
    print(
        f"seed {seed}: {seconds:.0f} s, {processor:.0f} s of the processor, "
        f"{summary['before']['accuracy']} -> {summary['after']['accuracy']}",
        file=sys.stderr,
    )
    return {
        "seconds": seconds,
        "processor": processor,
        "before": round(summary["before"]["accuracy"]["mean"], 4),
        "after": round(summary["after"]["accuracy"]["mean"], 4),
        "teacher": round(summary["teacher"]["accuracy"]["mean"], 4),
        "kl": [round(summary[when]["reverse_kl"], 4) for when in ("before", "after")],
        "gains": [
            sample["reward_after"] - sample["reward_before"] for sample in summary["samples"]
        ],
        "share": _read_shares(run_folder / "timings.jsonl"),
    }


def _read_processor_seconds() -> float:
    """Return the processor seconds of all processes that this one started and that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def _measure_honesty(run_folders: list[Path]) -> dict:
    """Return the untrained student's accuracy with a longer limit, and how the trained ones answer unrelated questions."""
    recipe = load_recipe(RECIPE)
    base = load_model(
        ScorerConfig.model_validate(
            recipe.student.model_dump(include=set(ModelConfig.model_fields))
        )
    )
    client, renderer = base.client, base.renderer
    heldout = build_task(recipe).heldout_prompts()
    long = _sample_answers(
        client, renderer, [prompt.messages[-1].content for prompt in heldout], 64
    )
    right = [
        prompt.answer in re.findall(r"[0-9]+", text)
        for prompt, (text, _) in zip(heldout, long, strict=True)
    ]
    before = _sample_answers(client, renderer, UNRELATED, 24)
    unrelated = []
    for run_folder in run_folders:
        backend, learner = open_student(run_folder)
        student = backend.build_sampler(learner)
        after = _sample_answers(student, learner.renderer, UNRELATED, 24)
        same = sum(old[0] == new[0] for old, new in zip(before, after, strict=True))
        unrelated.append(
            {
                "same": same,
                "of": len(UNRELATED),
                "reverse_kl": round(_measure_drift(student, client, after), 4),
            }
        )
    return {"anywhere_in_64": round(sum(right) / len(right), 4), "unrelated": unrelated}


def _sample_answers(
    client: SamplingClient, renderer: Renderer, questions: Sequence[str], new_tokens: int
) -> list[tuple[str, ScoreRequest]]:
    """Return greedy answers with the requests that score them."""
    requests = [
        SampleRequest(renderer.render([Message("user", question)]), 0) for question in questions
    ]
    params = SamplingParams(new_tokens, 0.0, stop_ids=renderer.stop_ids)
    samples = client.sample(requests, params)
    return [
        (
            renderer.decode(sample.tokens.tolist()),
            ScoreRequest(request.prompt_tokens, tuple(sample.tokens.tolist())),
        )
        for request, sample in zip(requests, samples, strict=True)
    ]


def _measure_drift(
    student: SamplingClient, base: SamplingClient, answers: Sequence[tuple[str, ScoreRequest]]
) -> float:
    """Mean reverse KL a token from the trained student to the untrained one."""
    requests = [request for _, request in answers]
    pairs = zip(*(side.score(requests, Full()) for side in (student, base)), strict=True)
    values = [
        F.reverse_kl(*(signal.head.logprobs(signal.states) for signal in pair)) for pair in pairs
    ]
    return torch.cat(values).mean().item()


def _read_shares(path: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    sums = {phase: sum(row[f"seconds_{phase}"] for row in rows) for phase in PHASES}
    return {phase: value / sum(sums.values()) for phase, value in sums.items()}


if __name__ == "__main__":
    main()
