"""Drafters of a run in the laboratory: the prompts of a draw, and the readings as a chain and as a tree."""

from pathlib import Path

from laboratory.functions import Config as Functions
from laboratory.functions import build
from laboratory.measures.speculation import Config, measure_drafter
from practicum.ports import TaskContext
from practicum.run_dir import read_json
from practicum.runs import run


def test_each_seed_draws_other_prompts_and_keeps_the_held_out_ones_apart() -> None:
    tasks = [build(Functions(), TaskContext(seed, Path())) for seed in (0, 1)]
    for task in tasks:
        ids = [prompt.id for prompt in (*task.heldout, *task.train)]
        assert len(ids) == len(set(ids)) == 24 + 240
        assert all(prompt.answer is None for prompt in task.heldout)
    assert tasks[0].heldout == build(Functions(), TaskContext(0, Path())).heldout
    assert tasks[0].heldout != tasks[1].heldout


def test_the_readings_of_a_drafter_are_measured_once(tmp_path: Path) -> None:
    short = ["train.steps=2", "student.model.pretrain.steps=60", "evaluation.prompts=8"]
    folder = run("papers/eagle-3", short, out=tmp_path).folder
    config = Config(chain=2, width=2, depth=2)
    readings = measure_drafter(folder, config)
    assert 1 <= readings["tokens_per_call"] <= 3 and 1 <= readings["tree/tokens_per_call"] <= 3
    assert readings["speed_1"] > 0 and readings["tree/speed_8"] > 0
    path = folder / "speculation-2-2-2.json"
    before = path.stat().st_mtime_ns
    assert measure_drafter(folder, config) == read_json(path) == readings
    assert path.stat().st_mtime_ns == before
