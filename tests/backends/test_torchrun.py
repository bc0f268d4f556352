"""A run of processes started by torchrun equals the run of one process, and of trainers over Ray."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import curve, environment, exit_status, rows, said, toy_data, toy_run, write_recipe

from practicum.backends.local.trainer import LocalTrainer
from practicum.backends.torchrun import Config, join
from practicum.backends.torchrun.rank_process import RankProcess
from practicum.errors import RecipeError
from practicum.objective import Objective
from practicum.recipe import parse_recipe
from practicum.runs.opening import open_student
from practicum.runs.pipeline import run as run_pipeline
from practicum.runs.stages import parse_pipeline
from practicum.types import Datum, ForwardResult

from .ray_session import cluster
from .test_ray import SIZES, assert_close_runs, assert_same_bytes, on_ray
from .torchrun_forks import finish, start

assert cluster
pytestmark = pytest.mark.long
BACKEND = {"type": "torchrun", "trainers": 2}


@pytest.fixture(scope="module")
def recipe(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(
        models, tmp_path_factory.mktemp("recipe") / "toy.yaml", SIZES | {"backend": BACKEND}
    )


@pytest.fixture(scope="module")
def single(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_run(models, tmp_path_factory.mktemp("single"), SIZES).folder


@pytest.fixture(scope="module")
def double(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("double"), recipe)


def train(folder: Path, recipe: Path, *words: str, **settings: Any) -> Path:
    """Train in two processes, where the second prints nothing, and return the run folder."""
    (code, text), other = finish(start(folder, recipe, *words, **settings))
    assert code == 0, text
    assert other == (0, "")
    return folder / "toy"


def fail(folder: Path, recipe: Path, *words: str, **settings: Any) -> tuple[str, list[int]]:
    """Return the single error line of a run that fails, and the exit codes."""
    (code, text), (other, silence) = finish(start(folder, recipe, *words, **settings))
    assert silence == ""
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert text.endswith(f"{line}\n")
    return line.removeprefix("error: "), [code, other]


def test_two_processes_give_the_run_of_one_and_one_goes_on(
    models: Path, tmp_path: Path, single: Path, double: Path
) -> None:
    assert_close_runs(single, double)
    names = sorted(path.name for path in (double / "checkpoints/step-4").glob("student*"))
    assert names == ["student-00001-of-00002.safetensors", "student-00002-of-00002.safetensors"]
    _, student = open_student(double)
    assert student.weights is not None


def test_a_dead_rank_ends_all_in_one_line_and_the_run_goes_on(
    tmp_path: Path, recipe: Path, double: Path
) -> None:
    line, codes = fail(tmp_path, recipe, env={"PRACTICUM_FAULT": "rank-1.differentiated:3"})
    assert re.fullmatch(
        r"after step 2: trainer 1 was lost in forward_backward; this step is discarded; resume "
        r"from the newest checkpoint with --resume \(newest checkpoint: of step 2\)",
        line,
    )
    assert codes == [8, 137]
    assert_same_bytes(double, train(tmp_path, recipe, "--resume"))


def test_the_wrong_start_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(
            RecipeError,
            match=r"^backend 'torchrun' runs in processes that torchrun starts, and torchrun did not "
            r"start this one; run torchrun --nproc-per-node 2 -m practicum run \.\.\., or set backend: "
            r"{type: ray, trainers: 2}$",
        ),
        join(Config(trainers=2)),
    ):
        pass
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        pytest.raises(
            RecipeError,
            match=r"^backend.trainers is 2 and torchrun started 3 processes; set "
            r"backend.trainers=3, or torchrun --nproc-per-node 2 -m practicum run \.\.\.$",
        ),
        join(Config(trainers=2)),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"train.stepz": 4}, r"\S+toy.yaml: train.stepz: no such key; .*"),
        (
            {"backend": BACKEND | {"trainers": 3}},
            r"backend.trainers is 3 and torchrun started 2 .*",
        ),
    ],
)
def test_what_all_processes_find_one_of_them_says(
    models: Path, tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    recipe = write_recipe(models, tmp_path / "toy.yaml", {"backend": BACKEND} | changes)
    said = finish(start(tmp_path, recipe))
    assert [code for code, _ in said] == [2, 2]
    assert re.fullmatch(f"error: {line}\n", "".join(text for _, text in said))


def test_stages_of_a_pipeline_share_the_processes_that_were_started(
    models: Path, tmp_path: Path
) -> None:
    data = toy_data(models, SIZES)
    stages = [{"name": "first"}, {"name": "second", "backend": BACKEND}]
    with pytest.raises(
        RecipeError, match=r"^toy: stages.second.backend: .* set one backend next to `stages`"
    ):
        run_pipeline(parse_pipeline(data | {"stages": stages}, "toy"), out=tmp_path)


def test_a_recipe_says_what_cannot_be(models: Path) -> None:
    with pytest.raises(RecipeError, match="3 trainers cannot be divided among 2 nodes"):
        parse_recipe(toy_data(models, {"backend": BACKEND | {"trainers": 3, "nodes": 2}}), "toy")
    with pytest.raises(RecipeError, match=r"backend 'torchrun' answer .*; set source: mix"):
        parse_recipe(
            toy_data(models, {"backend": BACKEND, "rollout.source": "token_mix(0.2)"}), "toy"
        )


def test_an_evaluation_needs_no_other_process(tmp_path: Path, double: Path) -> None:
    code, text = said(tmp_path, "eval", str(double), "evaluation.prompts=2")
    assert code == 0 and re.search(r"^prompts +2$", text, re.MULTILINE), text


@pytest.mark.slow
def test_torchrun_itself_trains_the_same_and_says_one_line_of_ours(
    tmp_path: Path, recipe: Path, double: Path
) -> None:
    def launch(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        words = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        command = ("-m", *words, "-m", "practicum", "run", str(recipe), "--out", str(tmp_path))
        resume = ("--resume",) if (tmp_path / "toy").is_dir() else ()
        return subprocess.run(
            [sys.executable, *command, *resume],
            env=environment(env),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    lost = launch({"PRACTICUM_FAULT": "rank-1.differentiated:3"})
    assert lost.returncode == 1
    (line,) = [line for line in lost.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: after step 2: trainer 1 was lost in forward_backward; nothing")
    again = launch({})
    assert again.returncode == 0, again.stderr
    assert "error" not in again.stderr
    assert_same_bytes(double, tmp_path / "toy")


@pytest.mark.slow
@pytest.mark.parametrize("point", ["rank-1.gathered:3", "rank-1.pass:4", "rank-1.saved:2"])
def test_whenever_a_rank_dies_the_run_is_resumed_to_the_same_bytes(
    tmp_path: Path, recipe: Path, double: Path, point: str
) -> None:
    line, codes = fail(tmp_path, recipe, env={"PRACTICUM_FAULT": point})
    verb = "save" if "saved" in point else "forward_backward"
    assert f"trainer 1 was lost in {verb}; this step is discarded" in line
    assert codes == [8, 137]
    assert_same_bytes(double, train(tmp_path, recipe, "--resume"))


@pytest.mark.slow
def test_without_the_first_process_another_one_says_so(
    tmp_path: Path, recipe: Path, double: Path
) -> None:
    started = start(tmp_path, recipe, env={"PRACTICUM_FAULT": "rank-0.gathered:3"})
    (code, _), (other, text) = finish(started)
    assert (code, other) == (137, 8)
    assert text == (
        "error: trainer 0, which leads the run, was lost; resume from the newest checkpoint with "
        "--resume\n"
    )
    assert_same_bytes(double, train(tmp_path, recipe, "--resume"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("disk 7 is full"), "disk 7 is full"),
        (TypeError("a bug"), "trainer 1 was lost in optim_step (TypeError: a bug); this step"),
    ],
)
def test_the_error_of_one_rank_is_that_of_the_run(
    tmp_path: Path, recipe: Path, error: Exception, line: str
) -> None:
    def spoil() -> None:
        def optim_step(self: RankProcess, params: object) -> None:
            raise error

        RankProcess.optim_step = optim_step  # type: ignore[method-assign, assignment]

    started = start(tmp_path, recipe, before={1: spoil})
    (code, text), (other, silence) = finish(started)
    assert code != 0 and other != 0
    assert line in text
    assert isinstance(error, OSError) == (silence == ""), "a bug has its traceback"


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_and_the_other_ends(
    tmp_path: Path, recipe: Path, stopped: int
) -> None:
    started = start(tmp_path, recipe, "backend.silence=2", before={stopped: stop_at_second_step})
    living = 1 - stopped
    pid = started.pids[stopped]
    os.waitpid(pid, os.WUNTRACED)
    since = time.monotonic()
    code = exit_status(os.waitpid(started.pids[living], 0)[1])
    seconds = time.monotonic() - since
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    text = (tmp_path / f"said-{living}").read_text()
    assert code == 8, text
    assert seconds < 2 + 20
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    waits = "optim_step" if stopped else "a request"
    before = "after step 1: " if stopped else ""
    assert re.match(
        rf"error: {before}trainer {stopped} \(process {pid} on \S+\)(, last seen at \w+,)? has "
        rf"given no sign of life for 2 s \(backend.silence\) while the run waited for {waits}; check",
        line,
    )
    written = json.loads((tmp_path / "toy" / "error.json").read_text())
    assert written == {"exit_code": 8, "error": line.removeprefix("error: ")}


def stop_at_second_step() -> None:
    """Let the rank stop itself once it is in its second step."""
    step, steps = RankProcess.optim_step, iter(range(2))

    def optim_step(self: RankProcess, *arguments: Any) -> Any:
        if next(steps) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return step(self, *arguments)

    RankProcess.optim_step = optim_step  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_rank_that_is_only_slow_is_not_accused_and_one_without_an_end_is(
    tmp_path: Path, recipe: Path
) -> None:
    """A rank that computes for longer than `silence` sends heartbeats, and `patience` bounds it."""

    def spoil() -> None:
        step, seconds = RankProcess.optim_step, iter([5, 600])

        def optim_step(self: RankProcess, *arguments: Any) -> Any:
            end, numbers = time.monotonic() + next(seconds), torch.rand(2**18)
            while time.monotonic() < end:
                numbers.sort()
            return step(self, *arguments)

        RankProcess.optim_step = optim_step  # type: ignore[method-assign]

    settings = ("backend.silence=3", "backend.patience=10")
    started = start(tmp_path, recipe, *settings, before={1: spoil})
    (code, text), (other, silence) = finish(started)
    assert [code, other, silence] == [8, 8, ""]
    assert (
        "error: after step 1: no answer to optim_step in 10 s (backend.patience) from trainer 1; "
        "check its machine, then resume with --resume"
    ) in text


@pytest.mark.slow
def test_torchrun_itself_ends_with_a_stopped_rank(tmp_path: Path, recipe: Path) -> None:
    words = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = ("-m", *words, "-m", "practicum", "run", str(recipe), "--out", str(tmp_path))
    changes = ("train.steps=100000", "evaluation.prompts=0")
    with subprocess.Popen(
        [sys.executable, *command, *changes],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        metrics = tmp_path / "toy" / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not (metrics.is_file() and metrics.read_text().count("\n") > 1):
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.5)
        lock = json.loads((tmp_path / "toy" / "run.lock").read_text())
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
        (other,) = [pid for pid in map(int, children.split()) if pid != lock["pid"]]
        os.kill(other, signal.SIGSTOP)
        began = time.monotonic()
        assert launcher.stderr is not None
        seen = {line: time.monotonic() - began for line in iter(launcher.stderr.readline, "")}
        assert launcher.wait(120) == 1
    ((line, seconds),) = [(line, at) for line, at in seen.items() if line.startswith("error: ")]
    assert re.match(rf"error: after step \d+: trainer 1 \(process {other} on \S+\)", line)
    assert "has given no sign of life for 20 s (backend.silence)" in line
    assert seconds < 30
    assert not Path(f"/proc/{other}").exists()


@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_halves_the_passes_of_all(
    tmp_path: Path, recipe: Path, single: Path
) -> None:
    def spoil() -> None:
        compute = LocalTrainer._differentiate_all
        failures: list[int] = []

        def differentiate(self: LocalTrainer, *arguments: Any) -> Any:
            if not failures:
                failures.append(1)
                raise torch.OutOfMemoryError("no memory left for a test")
            return compute(self, *arguments)

        LocalTrainer._differentiate_all = differentiate  # type: ignore[method-assign]

    folder = train(tmp_path, recipe, before={1: spoil})
    assert curve(folder, "halvings") == [1, 0, 0, 0]
    assert curve(folder, "loss") == pytest.approx(curve(single, "loss"), rel=1e-6, abs=1e-6)


@pytest.mark.slow
def test_a_loss_that_is_no_number_on_one_rank_is_an_update_that_all_skip(
    models: Path, tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = LocalTrainer.forward_backward
    updates: list[int] = []

    def forward_backward(
        self: LocalTrainer, data: Sequence[Datum], objective: Objective, seed: int
    ) -> ForwardResult:
        updates.append(1)
        return compute(self, spoil_states(data) if len(updates) == 2 else data, objective, seed)

    def spoil() -> None:
        LocalTrainer.forward_backward = forward_backward  # type: ignore[method-assign]

    folder = train(tmp_path / "two", recipe, before={1: spoil})
    monkeypatch.setattr(LocalTrainer, "forward_backward", forward_backward)
    one = toy_run(models, tmp_path / "one", SIZES).folder
    assert [row["tokens"] for row in rows(folder / "rollouts.jsonl")] == [
        row["tokens"] for row in rows(one / "rollouts.jsonl")
    ]
    skipped, whole = (
        [row for row in rows(run / "metrics.jsonl") if row.get("nonfinite")]
        for run in (folder, one)
    )
    assert [row["step"] for row in skipped] == [row["step"] for row in whole] == [2]
    assert 0 < skipped[0]["nonfinite"] < whole[0]["nonfinite"] == 12


def spoil_states(data: Sequence[Datum]) -> list[Datum]:
    """Return the same data with a teacher that returns NaN hidden states."""
    return [replace(item, signal=replace(item.signal, hidden=spoil(item))) for item in data]


def spoil(item: Datum) -> torch.Tensor:
    assert isinstance(item.signal.hidden, torch.Tensor)
    return item.signal.hidden * float("nan")


@pytest.mark.slow
def test_a_pipeline_gives_the_stages_of_one_process_and_goes_on(
    models: Path, tmp_path: Path
) -> None:
    stages = [{"name": "first"}, {"name": "second", "teacher": {"model": {"stage": "first"}}}]
    data = toy_data(models, SIZES | {"train.steps": 2, "train.checkpoint_every": 1})
    one = run_pipeline(parse_pipeline(data | {"stages": stages}, "toy"), out=tmp_path / "one")
    path = tmp_path / "toy.yaml"
    path.write_text(json.dumps(data | {"stages": stages, "backend": BACKEND}))
    line, codes = fail(tmp_path / "two", path, env={"PRACTICUM_FAULT": "rank-1.differentiated:4"})
    assert "after step 1: trainer 1 was lost in forward_backward" in line
    assert codes == [8, 137]
    folder = train(tmp_path / "two", path, "--resume")
    for name in ("01-first", "02-second"):
        assert_close_runs(one.folder / "stages" / name, folder / "stages" / name)


@pytest.mark.slow
def test_a_stop_signal_to_all_is_the_first_ones_to_answer(
    tmp_path: Path, recipe: Path, double: Path
) -> None:
    def spoil() -> None:
        step = RankProcess.optim_step
        steps: list[int] = []

        def optim_step(self: RankProcess, *arguments: Any) -> Any:
            steps.append(1)
            if len(steps) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, *arguments)

        RankProcess.optim_step = optim_step  # type: ignore[method-assign]

    started = start(tmp_path, recipe, before={0: spoil, 1: spoil})
    (code, text), (other, silence) = finish(started)
    assert (code, other, silence) == (143, 143, "")
    assert "stopped by SIGTERM after step 3" in text
    assert_same_bytes(double, train(tmp_path, recipe, "--resume"))


@pytest.mark.slow
def test_one_process_goes_on_from_two_and_two_from_one(
    models: Path, tmp_path: Path, recipe: Path, single: Path
) -> None:
    allowed = ("--resume", "--allow-changed", "train.steps", "--allow-changed", "backend")
    train(tmp_path / "two", recipe, "train.steps=2")
    there = {"resume": True, "allow_changed": ["train.steps", "backend"]}
    assert_close_runs(single, toy_run(models, tmp_path / "two", SIZES, **there).folder)
    toy_run(models, tmp_path / "one", SIZES | {"train.steps": 2})
    assert_close_runs(single, train(tmp_path / "one", recipe, *allowed))


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_trainers_over_ray_give_the_same_run_and_go_on(
    models: Path, tmp_path: Path, recipe: Path, double: Path
) -> None:
    toy_run(models, tmp_path, on_ray() | {"train.steps": 2})
    allowed = ("--resume", "--allow-changed", "train.steps", "--allow-changed", "backend")
    assert_close_runs(double, train(tmp_path, recipe, *allowed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.max_staleness": 1, "train.save_in_background": True},
        {"teacher": {"type": "self", "weights": "ema"}},
        {"student.lora": {"rank": 4}},
        {
            "reference": {"type": "self"},
            "objective": {
                "losses": [{"signal": "topk(4)"}, {"signal": "sampled", "against": "reference"}]
            },
        },
        {"teacher.residency": "disk"},
        {"objective": {"signal": "dual_space", "divergence": "forward_kl"}},
    ],
    ids=[
        *("rollouts ahead", "a following teacher", "adapters", "a reference", "a teacher on disk"),
        "maps beside the student",
    ],
)
def test_other_recipes_give_the_run_of_one_process(
    models: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    one = toy_run(models, tmp_path / "one", SIZES | changes).folder
    recipe = write_recipe(models, tmp_path / "toy.yaml", SIZES | changes | {"backend": BACKEND})
    assert_close_runs(one, train(tmp_path / "two", recipe))
