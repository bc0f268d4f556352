"""A model that is replaced on disk during a run is refused by every process that loads it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toy import RecordingConsole, toy_recipe, toy_run

from backends.folders import change_weights
from backends.rank_forks import run_ranks
from backends.ray_session import cluster
from practicum.backends._sharded.rank_verbs import ModelSettings, ProcessSettings, list_versions
from practicum.backends._sharded.recording import load_recorded
from practicum.backends.local import MemoryConfig
from practicum.backends.local import backend as local
from practicum.errors import ModelError
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.models.digests import digest_model, record_model
from practicum.objective import Full, Sampled
from practicum.runs.assembly import assemble_run
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

assert cluster

PARAMS = SamplingParams(4, 1.0, stop_ids=frozenset({0}))
TEXTS = [ScoreRequest((3, 4, 5), (6, 7))]
REPLACED = "model.safetensors has SHA-256 .* so the model differs from the model that the run recorded; restore"


@pytest.fixture
def copies(models: Path, tmp_path: Path) -> Path:
    """Return model folders that a test may change."""
    return shutil.copytree(models, tmp_path / "models")


def damage(folder: Path) -> None:
    """Replace the weights by others of the same shape."""
    change_weights(folder, lambda weights: weights["model.embed_tokens.weight"].mul_(1.5))


def test_a_run_records_the_files_before_it_loads_them(
    copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a teacher replaced while it is loaded is not recorded as an earlier file."""
    load = local.load

    def load_late(*arguments: object, **options: object) -> object:
        loaded = load(*arguments, **options)  # type: ignore[arg-type]
        damage(copies / "teacher")
        return loaded

    monkeypatch.setattr(local, "load", load_late)
    with pytest.raises(ModelError, match=REPLACED):
        toy_run(copies, tmp_path)


def test_the_digests_of_a_run_are_those_of_its_files(copies: Path, tmp_path: Path) -> None:
    built = assemble_run(toy_recipe(copies), tmp_path, keeps_records=True)
    teacher, identity = digest_model(str(copies / "teacher")), built.identify()
    assert {name: identity[f"teacher/{name}"] for name in teacher} == teacher
    # Read before the load: later changes to the files do not matter.
    damage(copies / "teacher")
    assert built.identify() == identity


@pytest.mark.parametrize("residency", ["disk", "shared"])
def test_what_is_read_from_the_disk_again_is_compared(
    copies: Path, tmp_path: Path, residency: str
) -> None:
    changes = {"teacher": {"type": "model", "model": str(copies / "teacher")}}
    changes["teacher"]["residency"] = residency
    built = assemble_run(toy_recipe(copies, changes), tmp_path, keeps_records=True)
    (client,) = [info.client for info in built.scorers]
    client.score(TEXTS, Full())
    damage(copies / "teacher")
    if residency == "shared":
        # Without adapters nothing is read again.
        client.score(TEXTS, Full())
        return
    with pytest.raises(ModelError, match=REPLACED):
        client.score(TEXTS, Full())


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_process_that_is_started_again_refuses_other_files(copies: Path, role: str) -> None:
    """Ray restarts a sampler or a teacher as a new object, and repeats the request."""
    pytest.importorskip("ray")
    from practicum.backends.ray.processes import ModelProcess

    folder = copies / role
    config = (StudentConfig if role == "student" else ScorerConfig)(model=str(folder))
    settings = ProcessSettings(list_versions(), torch.get_num_threads(), MemoryConfig(), "")

    def start() -> ModelProcess:
        return ModelProcess(settings, ModelSettings(config, None, role))

    before = record_model(str(folder))
    record = start().describe(before)["record"]
    assert record == before
    asks: list[Callable[[ModelProcess], object]] = [
        lambda process: process.sample([SampleRequest((3, 4), 7)], PARAMS, None, record),
        lambda process: process.score(TEXTS, Sampled(), None, record),
        lambda process: process.pack_head(None, record),
    ]
    for ask in asks:
        ask(start())
    damage(folder)
    with pytest.raises(ModelError, match=REPLACED):
        start().describe(record)
    for ask in asks:
        with pytest.raises(ModelError, match=REPLACED):
            ask(start())


def test_ranks_that_divide_the_files_refuse_a_replaced_one(copies: Path, tmp_path: Path) -> None:
    folder = copies / "teacher"
    record = record_model(str(folder))

    def load(rank: int) -> str:
        try:
            _, confirmed = load_recorded(lambda: None, record)
        except ModelError as error:
            return str(error)
        assert confirmed == record
        return ""

    assert run_ranks(tmp_path / "same", 2, load) == ["", ""]
    damage(folder)
    answers = run_ranks(tmp_path / "other", 1, load)
    assert "model.safetensors has SHA-256" in answers[0]


class ReplacingConsole(RecordingConsole):
    """Replaces a model once it was loaded."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def event(self, text: str) -> None:
        super().event(text)
        if "before training" in text:
            damage(self._folder)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_teacher_that_ray_starts_again_over_other_files_ends_the_run(
    copies: Path, tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRACTICUM_FAULT", "teacher.score:3")
    changes = {"backend": {"type": "ray"}, "evaluation.prompts": 8, "train.prompts_per_step": 12}
    with pytest.raises(ModelError, match=REPLACED):
        toy_run(copies, tmp_path, changes, console=ReplacingConsole(copies / "teacher"))
