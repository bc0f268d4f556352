"""Twenty-five runs on toys and on the packaged 135M model, with the verdict that follows from each recipe.

The verdicts were written down before the runs were made. The design of each run determines its outcome: a learning rate
that destroys, a teacher that is worse than its student, a rate that changes nothing, an ordinary recipe, few held-out
prompts. Of the first twenty-five, 22 had their verdict. A teacher at temperature 8 destroyed its student, which is a
collapse and was written down as worse; two runs of the 135M model had too few prompts for their small changes. Other runs
replaced them. The short form is the table of summaries in `tests/report/test_outcome_verdict.py`.
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from practicum.recipe import load_recipe
from practicum.run_dir.shapes import VerdictWord
from practicum.runs import run


class Known(NamedTuple):
    """A recipe with a known outcome: its file, and the overrides."""

    file: dict[str, Any]
    overrides: tuple[str, ...] = ()


def on_toys(method: str, *overrides: str, setting: str = "pair") -> Known:
    return Known({"extends": method, "setting": setting}, overrides)


def on_smollm2(system: str, *overrides: str) -> Known:
    """Return a run of the 135M model that learns from itself with a system turn in view."""
    model = "smollm2-135m-instruct"
    sections = {
        "extends": "papers/gkd",
        "student": {"model": model, "system": ""},
        "teacher": {"type": "model", "model": model, "system": system},
        "task": {"type": "jsonl", "path": "rows.jsonl", "verifier": "number"},
        "rollout": {"source": "student", "max_new_tokens": 16},
        "objective": {"signal": "full", "divergence": "reverse_kl"},
        "evaluation": {"prompts": 24, "max_new_tokens": 16},
        "train": {"steps": 6, "prompts_per_step": 16},
    }
    return Known(sections, overrides)


REVERSE_KL = "divergence=reverse_kl"
ABLE = "student.model.pretrain.steps=300"
IGNORANT = "teacher.model.pretrain.steps=20"
NO_CHANGE = "optimizer.learning_rate=1e-8"
EQUATION = "Answer with an equation such as 7 * 9 = 63."

RUNS: dict[VerdictWord, dict[str, Known]] = {
    "COLLAPSED": {
        "a toy at a rate of 0.3": on_toys(
            "papers/gkd", "optimizer.learning_rate=0.3", "rollout.source=student", REVERSE_KL
        ),
        "a toy at a rate of 1": on_toys(
            "papers/gkd", "optimizer.learning_rate=1", "rollout.source=student", REVERSE_KL
        ),
        "forward KL at a rate of 0.3": on_toys(
            "papers/gkd",
            "optimizer.learning_rate=0.3",
            "rollout.source=student",
            "divergence=forward_kl",
        ),
        "the 135M model at the rate of a toy": on_smollm2(
            EQUATION, "optimizer.learning_rate=0.002"
        ),
        "adapters of the 135M model at a rate of 0.05": on_smollm2(
            EQUATION, "student.lora={}", "optimizer.learning_rate=0.05"
        ),
    },
    "WORSE": {
        "a teacher that knows less": on_toys(
            "papers/gkd", ABLE, IGNORANT, "rollout.source=student", REVERSE_KL
        ),
        "imitation of a teacher that knows less": on_toys(
            "papers/gkd", ABLE, IGNORANT, "rollout.source=teacher", "divergence=forward_kl"
        ),
        "a teacher at temperature 2": on_toys(
            "papers/gkd",
            ABLE,
            REVERSE_KL,
            "rollout.source=student",
            "target=teacher(temperature=2)",
        ),
        "the 135M model at six times the rate of the table": on_smollm2(
            EQUATION, "optimizer.learning_rate=3e-4", "train.steps=8"
        ),
        "answers of another language": on_smollm2(
            "Reply only with the word banana, whatever is asked.",
            "optimizer.learning_rate=5e-5",
            "train.steps=12",
        ),
    },
    "NO DETECTABLE CHANGE": {
        "a toy at a rate that changes nothing": on_toys("papers/gkd", NO_CHANGE),
        "a reward at a rate that changes nothing": on_toys(
            "papers/grpo", NO_CHANGE, "train.steps=10", setting="rl"
        ),
        "imitation at a rate that changes nothing": on_toys("papers/sft", NO_CHANGE),
        "one small step": on_toys("papers/gkd", "train.steps=1", "optimizer.learning_rate=1e-5"),
        "the 135M model at a rate that changes nothing": on_smollm2(
            EQUATION, NO_CHANGE, "train.steps=2"
        ),
    },
    "BETTER": {
        "the toy recipe": Known({"extends": "smoke/toy", "setting": "pair"}, ("train.steps=120",)),
        "forward KL on the student's answers": on_toys(
            "papers/gkd", "rollout.source=student", "divergence=forward_kl", "train.steps=120"
        ),
        "imitation of right answers": on_toys("papers/sft", "train.steps=120"),
        "the toy with another seed": on_toys("papers/gkd", "seed=3", "train.steps=120"),
        "products with the 135M model": Known({"extends": "products", "setting": "smollm2"}),
    },
    "TOO FEW PROMPTS": {
        "no held-out prompts": on_toys("papers/gkd", "evaluation.prompts=0", "train.steps=4"),
        "four held-out prompts": on_toys("papers/gkd", "evaluation.prompts=4", "train.steps=4"),
        "nine held-out prompts": on_toys("papers/sft", "evaluation.prompts=9", "train.steps=4"),
        "a reward on eight prompts": on_toys(
            "papers/grpo", "evaluation.prompts=8", "train.steps=4", setting="rl"
        ),
        "the 135M model on two prompts": on_smollm2(
            EQUATION, "evaluation.prompts=2", "train.steps=1"
        ),
    },
}


def write_rows(path: Path) -> None:
    """Write multiplications; the model knows about half of them."""
    draw = random.Random(0)
    pairs = [(first, second) for first in range(2, 13) for second in range(2, 13)]
    rows = [
        {"prompt": f"What is {first} times {second}?", "answer": str(first * second)}
        for first, second in draw.sample(pairs, len(pairs))
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdict", "name"), [(verdict, name) for verdict in RUNS for name in RUNS[verdict]]
)
def test_the_verdict_of_a_known_run(verdict: VerdictWord, name: str, tmp_path: Path) -> None:
    known = RUNS[verdict][name]
    write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "known.yaml").write_text(yaml.safe_dump(known.file))
    overrides = ["monitors=off", "train.threads=1", *known.overrides]
    result = run(
        load_recipe(tmp_path / "known.yaml", overrides), out=tmp_path / "runs", progress=False
    )
    found = result.summary["verdict"]
    assert found["verdict"] == verdict, found["reasons"]


@pytest.mark.parametrize("verdict", list(RUNS))
def test_the_recipes_of_known_runs_are_read(verdict: VerdictWord, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    assert len(RUNS[verdict]) == 5
    for number, known in enumerate(RUNS[verdict].values()):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(known.file))
        load_recipe(path, known.overrides)
