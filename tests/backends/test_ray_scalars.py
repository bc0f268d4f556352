"""A scorer that learns in a separate process gives the results of this process; here without Ray.

Whole runs are in test_ray, and the driver's memory is in test_ray_memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from practicum.backends._sharded.rank_verbs import ModelSettings, ProcessSettings
from practicum.backends.local import MemoryConfig
from practicum.backends.local.device_limits import build_limits
from practicum.backends.local.loading import load_student
from practicum.backends.local.scalar_head import LocalScalarModel
from practicum.models.config import StudentConfig
from practicum.models.tensors import copy_to_host, write_tensors
from practicum.ports import AdamParams
from practicum.types import ScoreRequest

ray = pytest.importorskip("ray")

from practicum.backends.ray import clients, references  # noqa: E402
from practicum.backends.ray.calls import AnswerLimits  # noqa: E402
from practicum.backends.ray.clients import RankGroup, RayScalar  # noqa: E402
from practicum.backends.ray.processes import ScalarProcess  # noqa: E402
from practicum.backends.ray.references import RayTensor, write_packed  # noqa: E402

TEXTS = [ScoreRequest((1, 2, 3), (4, 5)), ScoreRequest((3,), (1, 2, 4))]
SLOPES = torch.tensor([0.5, -1.0, 2.0, 0.25, -0.5])


class Reference:
    """Replaces an object of the object store."""

    def __init__(self, content: Any) -> None:
        self.content = content


class OneProcess(RankGroup):
    """A group of one process, which is this process."""

    def __init__(self, process: ScalarProcess) -> None:
        self.process = process
        self._patience = AnswerLimits(60.0, 0)

    def ask(self, verb: str, *arguments: Any) -> list[Any]:
        return [getattr(self.process, verb)(*arguments)]

    def ask_each(self, verb: str, arguments: Sequence[Sequence[Any]]) -> list[tuple[Any, Any]]:
        small, large = getattr(self.process, verb)(*arguments[0])
        return [(small, Reference(large))]


def test_a_scorer_in_another_process_learns_the_same_and_is_saved_where_it_is(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, limits = StudentConfig(model=str(models / "student")), MemoryConfig()
    process = ScalarProcess(
        ProcessSettings.read(limits), ModelSettings(config, None, "scorer-judge", 3)
    )
    assert process.load(None)["source"] == str(models / "student")
    there = RayScalar(OneProcess(process))
    model = load_student(config, 3).language_model
    here = LocalScalarModel(model, build_limits(model.device, limits))
    for _ in range(2):
        lengths = [len(text.tokens) for text in TEXTS]
        answers = [m.fit(TEXTS, SLOPES.split(lengths), AdamParams(0.01)) for m in (there, here)]
        assert answers[0] == answers[1]
        for mine, theirs in zip(here.predict(TEXTS), there.predict(TEXTS), strict=True):
            assert mine.equal(theirs) and mine.any()
            assert theirs.untyped_storage().nbytes() == theirs.nbytes, "no more is sent"
    assert there.predict([]) == []

    # This process never reads the saved state: another process writes the file.
    state = copy_to_host(there.save_state())
    assert all(isinstance(tensor, RayTensor) for tensor in state.values())
    assert sum(tensor.nbytes for tensor in state.values()) == sum(
        tensor.nbytes for tensor in here.save_state().values()
    )
    written: list[Path] = []

    def write_here(self: RayTensor, path: Path, named: Any) -> None:
        written.append(path)
        write_packed(path, named)

    monkeypatch.setattr(RayTensor, "write_file", write_here)
    monkeypatch.setattr(references, "fetch", lambda reference: reference.content)
    write_tensors(tmp_path / "there.safetensors", {"steps": torch.tensor([2]), **state})
    write_tensors(tmp_path / "here.safetensors", {"steps": torch.tensor([2]), **here.save_state()})
    assert written == [tmp_path / "there.safetensors"]
    files = [(tmp_path / f"{place}.safetensors").read_bytes() for place in ("here", "there")]
    assert files[0] == files[1]

    saved = load_file(tmp_path / "there.safetensors")
    del saved["steps"]
    here.fit(TEXTS, SLOPES.split([2, 3]), AdamParams(0.01))
    assert not here.predict(TEXTS)[0].equal(there.predict(TEXTS)[0])
    monkeypatch.setattr(clients.ray, "put", lambda tensors: tensors)
    there.fit(TEXTS, SLOPES.split([2, 3]), AdamParams(0.5))
    there.load_state(saved)
    there.fit(TEXTS, SLOPES.split([2, 3]), AdamParams(0.01))
    assert here.predict(TEXTS)[0].equal(there.predict(TEXTS)[0])
