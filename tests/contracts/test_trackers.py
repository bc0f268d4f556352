"""The calls that every tracker receives, recorded by a test tracker, and the data of real trackers if they are installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toy import environment, forked, rows, toy_recipe, toy_run

from practicum.core.plugins import list_plugins, load_plugin
from practicum.errors import RecipeError
from practicum.report.outcome_verdict import format_reasons
from practicum.runs.console import PlainConsole
from practicum.runs.tracked import RunTracker, flatten_settings
from practicum.trackers import Tracker, TrackerContext, import_client

RECORDING = "tests.contracts.recording"
KEY = "0123456789abcdef0123456789abcdef01234567"


def recorded(path: Path, **more: object) -> dict[str, object]:
    return {"tracking": {"type": RECORDING, "path": str(path), **more}}


def test_a_tracker_is_told_every_step_and_the_end(models, tmp_path):
    found = toy_run(models, tmp_path, {**recorded(tmp_path / "calls"), "evaluation.prompts": 8})
    calls = rows(tmp_path / "calls")
    assert [call["call"] for call in calls] == [
        "begin",
        "log",
        "log",
        "log",
        "log",
        "finish",
        "close",
    ]
    assert calls[0]["first"] == 1
    assert [call["step"] for call in calls[1:5]] == [1, 2, 3, 4]
    metrics = rows(found.folder / "metrics.jsonl")
    assert [call["metrics"]["reverse_kl"] for call in calls[1:5]] == [
        row["reverse_kl"] for row in metrics
    ]
    assert calls[5]["final/after/accuracy"] == found.summary["after"]["accuracy"]["mean"]
    assert calls[5]["final/tokens"] == found.summary["tokens"]
    assert calls[5]["verdict"] == format_reasons(found.summary["verdict"])


@pytest.mark.long
def test_tracking_changes_no_byte_of_the_run(models, tmp_path, finished):
    found = toy_run(models, tmp_path, {**recorded(tmp_path / "calls"), "evaluation.prompts": 8})
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json"):
        assert (found.folder / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.long
def test_a_resumed_run_goes_on_as_the_same_tracked_run(models, tmp_path):
    changes = recorded(tmp_path / "calls")
    assert (
        forked(lambda: toy_run(models, tmp_path, changes), {"PRACTICUM_FAULT": "update:4"}) == 137
    )
    toy_run(models, tmp_path, changes, resume=True)
    calls = rows(tmp_path / "calls")
    begins = [call for call in calls if call["call"] == "begin"]
    assert [begin["first"] for begin in begins] == [1, 3]
    assert begins[0]["id"] == begins[1]["id"]
    steps: dict[int, float] = {}
    for call in calls:
        if call["call"] == "log":
            again = call["metrics"]["reverse_kl"]
            assert steps.setdefault(call["step"], again) == again, (
                "a repeated step sends the same values"
            )
    assert sorted(steps) == [1, 2, 3, 4]


def test_steps_that_a_tracker_holds_are_not_sent_again(models, tmp_path):
    toy_run(models, tmp_path, recorded(tmp_path / "calls", holds=3))
    assert [call["step"] for call in rows(tmp_path / "calls") if call["call"] == "log"] == [4]


def test_a_tracker_that_fails_does_not_stop_the_run(models, tmp_path, capsys):
    console = PlainConsole(sys.stdout)
    found = toy_run(models, tmp_path, recorded(tmp_path / "calls", fails_at=2), console=console)
    assert len(rows(found.folder / "metrics.jsonl")) == 4
    said = capsys.readouterr().out
    assert (
        said.count("warning: recording: the service is gone; the run continues without tracking")
        == 1
    )
    assert [call["call"] for call in rows(tmp_path / "calls")] == ["begin", "log"]


@pytest.mark.long
def test_another_tracker_may_take_over_after_a_resume(models, tmp_path):
    assert forked(lambda: toy_run(models, tmp_path), {"PRACTICUM_FAULT": "update:4"}) == 137
    toy_run(models, tmp_path, recorded(tmp_path / "calls"), resume=True)
    calls = rows(tmp_path / "calls")
    assert calls[0]["first"] == 3
    assert [call["step"] for call in calls if call["call"] == "log"] == [1, 2, 3, 4], (
        "it is told what was before it"
    )


def test_secrets_and_machine_paths_are_not_sent():
    settings = {
        "api_key": KEY,
        "teacher": {"auth": KEY, "access_token": KEY, "model": "m", "headers": [{"password": KEY}]},
        "prompt_tokens": 2048,
        "base_dir": "/home/someone",
        "reference": None,
    }
    assert dict(flatten_settings(settings)) == {"teacher.model": "m", "prompt_tokens": 2048}


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    tracker = import_client("tests.contracts.recording").Recording(
        import_client("tests.contracts.recording").Config(path=str(tmp_path / "calls")),
        TrackerContext("toy", "id", tmp_path, {}),
    )
    with RunTracker(tracker, tmp_path / "metrics.jsonl") as tracked:
        tracked.log(1, {"a": float("nan"), "b": 1.0, "c": float("inf")})
    assert rows(tmp_path / "calls")[1]["metrics"] == {"b": 1.0}


def test_a_run_without_tracking_writes_nothing_of_it(finished):
    assert not (finished / "tracking.json").exists()


def test_a_missing_package_is_one_line_with_its_command(models, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        RecipeError,
        match=r"^tracking.type: 'wandb' is not installed \(.*\); run pip install wandb, or",
    ):
        toy_run(models, tmp_path, {"tracking": "wandb"})
    assert not (tmp_path / "toy" / "metrics.jsonl").exists()


def test_an_unknown_tracker_names_the_nearest(models):
    with pytest.raises(
        RecipeError, match=r"tracking: no tracker named 'wandbb'; did you mean 'wandb'"
    ):
        toy_recipe(models, {"tracking": "wandbb"})


def test_a_password_does_not_belong_into_a_recipe(models):
    with pytest.raises(
        RecipeError, match="holds a password; set MLFLOW_TRACKING_PASSWORD"
    ) as caught:
        toy_recipe(models, {"tracking": {"type": "mlflow", "uri": "https://me:hunter2@host"}})
    assert "hunter2" not in str(caught.value)


@pytest.mark.long
def test_reading_a_recipe_imports_no_client():
    code = (
        "import sys; from practicum.core.plugins import list_plugins, load_plugin; found = list_plugins('trackers'); "
        "[load_plugin('trackers', name).Config() for name in found]; sys.exit(any(name in sys.modules for name in found))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SENDER = """
import json, os, sys
from pathlib import Path
from practicum.core.plugins import load_plugin
from practicum.trackers import TrackerContext

name, home, first, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
module = load_plugin("trackers", name)
context = TrackerContext("toy", "0123456789abcdef", home, {"train.steps": 4, "task.type": "reverse"})
tracker = module.build(module.Config(), context)
there = tracker.begin(first)
for step in range(1, last + 1):
    if step > there:
        tracker.log(step, {"reverse_kl": 1 / step, "cost/flops": 1e12 * step, "tokens": 10.0})
if last < 4:
    import time
    time.sleep(2)
    os._exit(9)
tracker.finish({"final/after/accuracy": 0.5}, "BETTER: accuracy 0.1 to 0.5")
tracker.close()
"""


def sent(out: Path, name: str) -> Path:
    """Do a run of four steps, killed after the third and resumed from the second, with a canary as its key."""
    home = out / "runs" / "toy"
    home.mkdir(parents=True)
    env = environment(
        {"TRACKIO_DIR": str(out / "trackio"), "WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}
    )
    env["HOME"] = str(out)
    for first, last, status in ((1, 3, 9), (3, 4, 0)):
        words = [sys.executable, "-c", SENDER, name, str(home), str(first), str(last)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert done.stdout == "", "the client writes into our output"
    for path in out.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    return home


CURVE = {step: 1 / step for step in range(1, 5)}
VERDICT = "BETTER: accuracy 0.1 to 0.5"


@pytest.mark.slow
def test_tensorboard_holds_the_curve(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(sent(tmp_path, "tensorboard") / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reverse_kl")] == [1, 2, 3, 4]
    assert {event.step: event.value for event in events.Scalars("reverse_kl")} == pytest.approx(
        CURVE
    )
    assert [event.step for event in events.Scalars("final/after/accuracy")] == [4]
    (text,) = events.Tensors("final/verdict/text_summary")
    assert text.tensor_proto.string_val == [VERDICT.encode()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_holds_the_curve(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    home = sent(tmp_path, "mlflow")
    store = mlflow.MlflowClient(tracking_uri=f"sqlite:///{home.parent / 'mlflow.db'}")
    (run,) = store.search_runs([store.get_experiment_by_name("practicum").experiment_id])
    history = store.get_metric_history(run.info.run_id, "reverse_kl")
    assert [point.step for point in history] == [1, 2, 3, 4], "the third step is sent once"
    assert {point.step: point.value for point in history} == pytest.approx(CURVE)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.steps": "4", "task.type": "reverse"}
    assert run.data.metrics["final/after/accuracy"] == 0.5
    assert run.data.tags["practicum.verdict"] == VERDICT


@pytest.mark.slow
def test_trackio_holds_the_curve(tmp_path):
    pytest.importorskip("trackio")
    sent(tmp_path, "trackio")
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; (run,) = S.get_run_records('practicum'); "
        "print(json.dumps(S.get_logs('practicum', run['name'], run_id=run['id'])))"
    )
    env = environment({"TRACKIO_DIR": str(tmp_path / "trackio")})
    read = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    rows_sent = json.loads(read.stdout.splitlines()[-1])
    assert [row["final/verdict"] for row in rows_sent if "final/verdict" in row] == [VERDICT]
    logs = [row for row in rows_sent if "reverse_kl" in row]
    assert {row["step"]: row["reverse_kl"] for row in logs} == pytest.approx(CURVE)


@pytest.mark.slow
def test_wandb_holds_the_curve(tmp_path):
    pytest.importorskip("wandb")
    home = sent(tmp_path, "wandb")
    files = sorted((home / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.name for file in files} == {"run-0123456789abcdef.wandb"}, (
        "a resumed run has the id of the first"
    )
    assert {step for file in files for step in wandb_steps(file)} == {1, 2, 3, 4}


def wandb_steps(path: Path) -> set[int]:
    """Return the steps of the history rows in an offline file, a LevelDB log that contains protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, steps = path.read_bytes(), 7, b"", set()  # after the file's own header
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(whole)
            items = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            steps |= {int(items["_step"])} if "reverse_kl" in items else set()
            whole = b""
    return steps


def test_every_tracker_says_what_it_is():
    for name in list_plugins("trackers"):
        module = load_plugin("trackers", name)
        assert module.Config().type == name
        assert issubclass(type(module.Config()), module.Config)
        trackers = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        assert any(issubclass(value, Tracker) for value in trackers if value is not module.Config)
