"""A student at our own service: the same run as a local student, and its behaviour when the service ends."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from service import LEFT_OPEN, Served, assert_same_but_rounding, serving
from toy import TASK, curve, rows, toy_recipe, toy_run

from practicum.errors import CapabilityError, CheckpointError, RecipeError, TeacherError
from practicum.run_dir import RunDir, find_checkpoint

pytestmark = [pytest.mark.long, LEFT_OPEN]
LORA = {"student.lora": {"rank": 4, "alpha": 32}, "rollout.n": 2}
SUPPORTED = {
    "sampled": {"signal": "sampled"},
    "teacher's": {"signal": "topk(4, support=teacher)", "divergence": "forward_kl"},
    "student's": {"signal": "topk(4)", "divergence": "jsd(0.3)"},
    "both tails": {"signal": "topk(3, tail=sampled)", "weights": "trust"},
    "with rewards": {
        "signal": "sampled",
        "estimator": "score_function(gamma=0.9, baseline=group_mean)",
        "correction": "ratio_clip",
        "reward": "add_advantage",
    },
    "two terms": {
        "losses": [
            {"signal": "topk(4)"},
            {"signal": "text", "divergence": "ce", "coefficient": 0.3},
        ]
    },
}


@pytest.fixture(scope="module")
def served(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(models, tmp_path_factory.mktemp("served")) as served:
        yield served


def at(served: Served, **more: Any) -> dict[str, Any]:
    """Return the changes to a toy recipe that move its student to a service."""
    backend = {"type": "tinker", "url": served.url, "retry_seconds": 0.5, **more}
    return {**LORA, "student.model": "student", "backend": backend}


class Events:
    """A console that keeps its messages; `after` is called with each step's number."""

    def __init__(self, after: Callable[[int], None] = lambda step: None) -> None:
        self.said: list[str] = []
        self._after = after

    def event(self, text: str) -> None:
        self.said.append(text)

    def step(self, step: int, *_: Any) -> None:
        self._after(step)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_run_at_a_service_is_the_run_here(
    models: Path, served: Served, tmp_path: Path, name: str
) -> None:
    """Adapters, draws and the optimizer are the same, seed for seed; only the rounding of other batches differs."""
    changes = {"objective": SUPPORTED[name], "train.steps": 3}
    here = toy_run(models, tmp_path / "here", {**LORA, **changes}).folder
    there = toy_run(models, tmp_path / "there", {**at(served), **changes}).folder
    assert [row["tokens"] for row in rows(there / "rollouts.jsonl")] == [
        row["tokens"] for row in rows(here / "rollouts.jsonl")
    ]
    measures = [
        "grad_norm",
        "reward",
        *(key for key in rows(here / "metrics.jsonl")[0] if key.startswith("loss")),
    ]
    for measure in measures:
        assert curve(there, measure) == pytest.approx(curve(here, measure), rel=1e-4, abs=1e-6), (
            measure
        )
    for mine, other in zip(
        rows(there / "rollouts.jsonl"), rows(here / "rollouts.jsonl"), strict=True
    ):
        assert mine["weight"] == pytest.approx(other["weight"], rel=1e-3, abs=1e-5)
    assert min(row["wire_bytes"] for row in rows(there / "timings.jsonl")) > 500


def test_an_environments_tokens_are_learned_at_a_service_as_here(
    models: Path, served: Served, tmp_path: Path
) -> None:
    world = {"signal": "text", "divergence": "ce", "source": "environment", "coefficient": 0.3}
    changes = {
        "task": {"type": "user", "tries": 3, "right": "aa", "wrong": "dcb", "task": TASK},
        "rollout": {"n": 1, "max_new_tokens": 24},
        "train.steps": 2,
        "train.prompts_per_step": 4,
        "objective": {"losses": [{"signal": "sampled"}, world]},
    }
    here = toy_run(models, tmp_path / "here", {**LORA, **changes}).folder
    there = toy_run(models, tmp_path / "there", {**at(served), **changes}).folder
    for measure in ("loss", "observed_loss", "observed_tokens", "grad_norm"):
        assert curve(there, measure) == pytest.approx(curve(here, measure), rel=1e-4)
    assert min(curve(here, "observed_tokens")) > 0


def test_rollouts_ahead_at_a_service_are_those_ahead_here(
    models: Path, served: Served, tmp_path: Path
) -> None:
    changes = {
        "objective": {"signal": "topk(4, support=teacher)"},
        "rollout.max_staleness": 1,
        "train.steps": 4,
    }
    here = toy_run(models, tmp_path / "here", {**LORA, **changes}).folder
    teacher = {"type": "tinker", "url": served.url, "model": "teacher"}
    there = toy_run(
        models, tmp_path / "there", {**at(served), **changes, "teacher": teacher}
    ).folder
    assert [row["policy_version"] for row in rows(there / "rollouts.jsonl")][-1] == 2
    for measure in ("loss", "grad_norm", "staleness"):
        assert curve(there, measure) == pytest.approx(curve(here, measure), rel=1e-4, abs=1e-6), (
            measure
        )


def test_a_lag_that_outlives_the_services_snapshots_is_refused(
    models: Path, served: Served, tmp_path: Path
) -> None:
    with pytest.raises(
        RecipeError, match=r"rollout\.max_staleness: a service keeps few .* set 2 or less"
    ):
        toy_run(
            models,
            tmp_path,
            {**at(served), "objective": {"signal": "topk(4)"}, "rollout.max_staleness": 3},
        )


@pytest.mark.parametrize("signal", ["topk(4)", "sampled"])
def test_student_and_teacher_at_the_same_service(
    models: Path, served: Served, tmp_path: Path, signal: str
) -> None:
    changes = {"objective": {"signal": signal}, "train.steps": 2}
    here = toy_run(models, tmp_path / "here", {**LORA, **changes}).folder
    teacher = {"type": "tinker", "url": served.url, "model": "teacher"}
    there = toy_run(
        models, tmp_path / "there", {**at(served), **changes, "teacher": teacher}
    ).folder
    for measure in ("loss", "grad_norm"):
        assert curve(there, measure) == pytest.approx(curve(here, measure), rel=1e-4, abs=1e-6)
    twice = 2 if signal == "topk(4)" else 1  # the student's own scores name the candidates
    assert sum(curve(there, "cost/scored_tokens")) == twice * sum(
        curve(there, "cost/sampled_tokens")
    )


def test_the_student_as_it_began_is_the_base_model(
    models: Path, served: Served, tmp_path: Path
) -> None:
    teacher = {"type": "privileged", "teacher": "self", "reference": "{answer}"}
    changes = {"teacher": teacher, "objective": {"signal": "topk(4)"}, "train.steps": 2}
    here = toy_run(models, tmp_path / "here", {**LORA, **changes}).folder
    there = toy_run(models, tmp_path / "there", {**at(served), **changes}).folder
    assert curve(there, "loss") == pytest.approx(curve(here, "loss"), rel=1e-4)


def test_a_run_that_is_cut_goes_on_from_the_checkpoint_at_the_service(
    models: Path, served: Served, tmp_path: Path
) -> None:
    changes = {**at(served), "objective": {"signal": "topk(4)"}, "evaluation.prompts": 4}
    whole = toy_run(models, tmp_path / "whole", changes).folder

    def cut(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(BaseException, match="stopped at once"):
        toy_run(models, tmp_path / "cut", changes, console=Events(cut))  # type: ignore[arg-type]
    events = Events()
    resumed = toy_run(models, tmp_path / "cut", changes, resume=True, console=events).folder  # type: ignore[arg-type]
    assert "resumed after step 2" in events.said
    assert_same_but_rounding(whole, resumed)
    checkpoint, _ = find_checkpoint(RunDir.open(resumed))
    assert checkpoint is not None
    (address,) = checkpoint.read_tensors("student")
    assert address.startswith("tinker://") and address.endswith("/weights/step-4")
    assert f"saved {address}" in events.said and not checkpoint.read_tensors("optimizer")


@pytest.mark.slow
def test_a_service_that_ends_in_the_middle_and_is_started_again(
    models: Path, tmp_path: Path
) -> None:
    with serving(models, tmp_path / "served") as own:
        changes = {**at(own), "objective": {"signal": "sampled"}, "train.checkpoint_every": 1}
        whole = toy_run(models, tmp_path / "whole", changes).folder

        def end(step: int) -> None:
            if step == 3:
                own.stop()

        with pytest.raises(
            TeacherError,
            match=r"no connection for .*\(the state after step 2 is saved; resume with",
        ):
            toy_run(models, tmp_path / "cut", changes, console=Events(end))  # type: ignore[arg-type]
        own.start()
        resumed = toy_run(models, tmp_path / "cut", changes, resume=True).folder
        assert_same_but_rounding(whole, resumed)

        def again(step: int) -> None:
            if step == 1:
                own.stop()
                own.start()

        patient = {**changes, "backend": {**changes["backend"], "retry_seconds": 20.0}}
        with pytest.raises(
            TeacherError, match=r"step 2: .*was restarted or dropped the student; resume from"
        ):
            toy_run(models, tmp_path / "again", patient, console=Events(again))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": {"signal": "full"}},
            "needs the student's whole distribution, which backend 'tinker' does not see; use",
        ),
        ({"objective": {"signal": "mc(4)"}}, "signal 'mc' needs the student's whole distribution"),
        ({"objective": {"signal": "entropy"}}, "signal 'entropy' is of the student's whole"),
        (
            {"objective": {"signal": "topk(4, support=union)"}},
            r"has no support 'union'; use topk\(4, support=student\) or",
        ),
        (
            {"objective": {"signal": "sampled", "weights": "entropy_top"}},
            "weights 'entropy_top' are made of entropies",
        ),
        (
            {"student.lora": None},
            r"student.lora: backend 'tinker' trains adapters; set student.lora: \{rank: 16\}",
        ),
        (
            {"student.lora": {"rank": 4, "alpha": 8}},
            "student.lora.alpha: adapters at a service have alpha 32",
        ),
        (
            {"student.trainable_layers": 1},
            "student.trainable_layers: adapters at a service are around all layers",
        ),
        (
            {"student.device": "cpu"},
            "dtype, device and trust_remote_code are the service's; leave them out",
        ),
        (
            {"rollout.source": "token_mix"},
            "rollout.source: it decodes token by token with the teacher.*set source: mix",
        ),
        ({"backend.url": "http://example.org"}, "plain http to example.org shows prompts and keys"),
        (
            {"backend.url": "http://169.254.169.254"},
            "a link-local or metadata address, which is never asked",
        ),
        ({"backend.url": "http://me:secret@localhost"}, "the address holds a user or a password"),
        ({"backend.rank": 4}, "rank"),
    ],
)
def test_what_cannot_be_done_is_refused_when_the_recipe_is_read(
    models: Path, changes: dict[str, Any], message: str
) -> None:
    backend = {"type": "tinker", "url": "http://127.0.0.1:1"}
    whole = {
        **LORA,
        "student.model": "student",
        "backend": backend,
        "objective": {"signal": "sampled"},
        **changes,
    }
    with pytest.raises(RecipeError, match=message) as caught:
        toy_recipe(models, whole)
    assert "secret" not in str(caught.value)


def test_an_averaged_self_teacher_is_refused(models: Path, served: Served, tmp_path: Path) -> None:
    teacher = {
        "type": "privileged",
        "teacher": {"type": "self", "weights": "ema"},
        "reference": "{answer}",
    }
    changes = {**at(served), "teacher": teacher, "objective": {"signal": "sampled"}}
    with pytest.raises(CapabilityError, match="averages or copies the student's weights"):
        toy_run(models, tmp_path, changes)


def test_nobody_there_at_the_start_is_one_line(models: Path, tmp_path: Path) -> None:
    backend = {"type": "tinker", "url": "http://127.0.0.1:1", "retry_seconds": 0.0}
    changes = {
        **LORA,
        "student.model": "student",
        "backend": backend,
        "objective": {"signal": "sampled"},
    }
    with pytest.raises(
        TeacherError, match=r"http://127.0.0.1:1: a session: no connection .*; start the service"
    ):
        toy_run(models, tmp_path, changes)


def test_a_model_that_is_not_served_is_named(models: Path, served: Served, tmp_path: Path) -> None:
    changes = {**at(served), "student.model": "nobody", "objective": {"signal": "sampled"}}
    with pytest.raises(
        TeacherError, match="no model 'nobody' is served here; there are student, teacher"
    ):
        toy_run(models, tmp_path, changes)


def test_without_the_package_it_says_what_to_install(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = {"type": "tinker", "url": "http://127.0.0.1:1"}
    changes = {
        **LORA,
        "student.model": "student",
        "backend": backend,
        "objective": {"signal": "sampled"},
    }
    recipe = toy_recipe(models, changes)
    importlib.import_module("practicum.backends.tinker")
    monkeypatch.setitem(sys.modules, "tinker", None)
    from practicum.runs import run

    with pytest.raises(RecipeError, match=r"pip install -e '\.\[tinker\]'"):
        run(recipe, out=tmp_path)


def test_a_key_is_needed_for_other_machines_and_shown_to_nobody(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**LORA, "student.model": "student", "objective": {"signal": "sampled"}}
    far = {"type": "tinker", "url": "https://example.org"}
    with pytest.raises(
        RecipeError, match=r"backend.api_key_env: name the environment variable that holds the key"
    ):
        toy_run(models, tmp_path / "a", {**changes, "backend": far})
    with pytest.raises(
        RecipeError, match=r"the environment variable NO_SUCH holds no key that begins with tml-"
    ):
        toy_run(models, tmp_path / "b", {**changes, "backend": {**far, "api_key_env": "NO_SUCH"}})
    with serving(models, tmp_path / "served", token="tml-0123456789-right-token") as own:
        monkeypatch.setenv("SERVICE_KEY", "tml-0123456789-wrong-token")
        backend = {"type": "tinker", "url": own.url, "api_key_env": "SERVICE_KEY"}
        with pytest.raises(TeacherError, match="was answered with 401; name the variable"):
            toy_run(models, tmp_path / "c", {**changes, "backend": backend})
        monkeypatch.setenv("SERVICE_KEY", "tml-0123456789-right-token")
        folder = toy_run(
            models, tmp_path / "d", {**changes, "backend": backend, "train.steps": 1}
        ).folder
    for path in folder.rglob("*"):
        assert path.is_dir() or b"right-token" not in path.read_bytes(), path


def test_a_local_checkpoint_is_not_resumed_at_a_service(
    models: Path, served: Served, tmp_path: Path
) -> None:
    from practicum.runs.assembly import assemble_run

    built = assemble_run(
        toy_recipe(models, {**at(served), "objective": {"signal": "sampled"}}), tmp_path
    )
    with pytest.raises(
        CheckpointError, match="holds the student's weights and not the address of a service"
    ):
        built.trainer.load_state({"student": {"a.weight": torch.zeros(2)}, "optimizer": {}})
    gone = "tinker://00000000-0000-0000-0000-000000000000:train:0/weights/step-1"
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint .*; start the service with the folder"
    ):
        built.trainer.load_state({"student": {gone: torch.tensor(1)}, "optimizer": {}})
    with pytest.raises(
        RecipeError, match="this needs the student's weights, which are in another process"
    ):
        _ = built.weights
    built.close()
