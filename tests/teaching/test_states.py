"""Hidden states that a server writes are its full distribution, and a faulty file is reported in one line."""

import fcntl
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stub_server import FolderModel, Stub
from torch import Tensor
from toy import curve, make_model, toy_run

from practicum.backends.local.ending import load_ending
from practicum.backends.local.loading import load
from practicum.backends.local.scratch import build_scratch_model
from practicum.cli.probe import find_methods, to_json
from practicum.errors import CapabilityError, ModelError, RecipeError, TeacherError
from practicum.models.config import ModelConfig, ScratchConfig
from practicum.remote.http import JsonClient
from practicum.remote.http import Server as HttpServer
from practicum.teaching.probe import probe
from practicum.teaching.states import StatesFolder

ENDS = {
    "tied": {},
    "padded rows": {"padded_vocabulary": 32},
    "capped logits": {"architecture": "gemma3"},
    "qwen3": {"architecture": "qwen3"},
}
TEXT = [3, 4, 5, 6, 9]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2)
    return folder


@pytest.fixture
def server(models: Path, tmp_path: Path) -> Iterator[Stub]:
    states = tmp_path / "states"
    states.mkdir()
    with Stub(FolderModel(models / "teacher"), states=states) as stub:
        yield stub


def teacher(server: Stub, models: Path, **changes: Any) -> dict[str, Any]:
    states = {"folder": str(server.states), "model": str(models / "teacher"), **changes}
    return {"type": "openai_api", "url": server.url, "retry_seconds": 1.0, "states": states}


@pytest.mark.parametrize("name", ENDS)
def test_an_ending_finishes_what_the_last_layer_gave_out(tmp_path: Path, name: str) -> None:
    settings = {"hidden_size": 32, "layers": 2, "heads": 4, **ENDS[name]}
    build_scratch_model(tmp_path / "model", ScratchConfig(**settings), "abcdefgh", [])
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    if name == "capped logits":
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        config["final_logit_softcapping"] = 0.5
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    # A norm of ones would hide its absence.
    norm = next(key for key in weights if key.endswith("model.norm.weight"))
    weights[norm] = weights[norm] + torch.linspace(0, 1, 32)
    save_file(weights, path, metadata={"format": "pt"})
    model = FolderModel(tmp_path / "model")
    ending = load_ending(ModelConfig(model=str(tmp_path / "model")))
    scores = ending.head.logprobs(ending.finish(model.stream(TEXT)))
    # Row t predicts token t + 1.
    torch.testing.assert_close(scores[:-1], model(TEXT)[1:], rtol=1e-5, atol=1e-6)
    assert ending.width == 32


def test_a_run_learns_what_it_learns_from_the_model_itself(
    models: Path, server: Stub, tmp_path: Path
) -> None:
    assert server.states is not None
    server.writes_after = 0.02
    changes = {"train.steps": 2, "evaluation.teacher": False}
    here = toy_run(models, tmp_path / "here", changes).folder
    served = {**changes, "teacher": teacher(server, models)}
    there = toy_run(models, tmp_path / "there", served).folder
    for name in ("loss", "grad_norm"):
        assert curve(there, name) == pytest.approx(curve(here, name), rel=1e-5, abs=1e-7)


def write(folder: Path, tensors: dict[str, Tensor] | None, lock: bool = True) -> dict[str, Any]:
    file = folder / "x.safetensors"
    if lock:
        Path(f"{file}.lock").touch()
    if tensors is not None:
        save_file(tensors, file)
    return {"kv_transfer_params": {"hidden_states_path": f"/far/away/{file.name}"}}


def good(**changes: Tensor) -> dict[str, Tensor]:
    return {"hidden_states": torch.ones(5, 2, 4), "token_ids": torch.tensor(TEXT), **changes}


WRONG: dict[str, tuple[Any, str]] = {
    "no file": (None, "was named but does not exist: the server failed to write it"),
    "other tokens": (good(token_ids=torch.arange(5)), "has other tokens than were sent"),
    "another width": (good(hidden_states=torch.ones(5, 2, 3)), "width is 4; name the model"),
    "too few": (good(hidden_states=torch.ones(4, 2, 4)), "for 5 tokens"),
    "one layer short": (good(hidden_states=torch.ones(5, 4)), "holds no hidden_states"),
    "NaN": (good(hidden_states=torch.full((5, 2, 4), torch.nan)), "NaN or infinite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_cannot_be_right_is_refused(tmp_path: Path, name: str) -> None:
    tensors, message = WRONG[name]
    answer = write(tmp_path, tensors)
    with pytest.raises(TeacherError, match=message) as caught:
        StatesFolder(tmp_path, 4).take(answer, TEXT)
    assert "\n" not in str(caught.value)


def test_a_good_file_is_read_once(tmp_path: Path) -> None:
    states = torch.randn(5, 2, 4)
    answer = write(tmp_path, good(hidden_states=states.bfloat16()))
    taken = StatesFolder(tmp_path, 4).take(answer, TEXT)
    assert taken.equal(states[:, 1].bfloat16().float()) and not list(tmp_path.iterdir())


def test_a_lock_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match="so it is not known when the states are complete"):
        StatesFolder(tmp_path, 4).take(write(tmp_path, good(), lock=False), TEXT)
    answer = write(tmp_path, good())
    with Path(tmp_path / "x.safetensors.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TeacherError, match=r"was not written in 0\.05 s"):
            StatesFolder(tmp_path, 4, seconds=0.05).take(answer, TEXT)
        threading.Timer(0.05, lambda: fcntl.flock(held, fcntl.LOCK_UN)).start()
        assert StatesFolder(tmp_path, 4).take(answer, TEXT).shape == (5, 4)


@pytest.mark.parametrize("path", [None, 7, "", "/etc/passwd", "..", "a\nb.safetensors"])
def test_a_server_cannot_choose_a_file(tmp_path: Path, path: Any) -> None:
    answer = {"kv_transfer_params": {"hidden_states_path": path}}
    with pytest.raises(TeacherError, match="names no hidden states"):
        StatesFolder(tmp_path, 4).take(answer, TEXT)


def test_states_of_another_layer_or_model_are_refused_at_the_start(
    models: Path, server: Stub, tmp_path: Path
) -> None:
    server.change_states = lambda tensors: {
        **tensors, "hidden_states": tensors["hidden_states"][:, :1].contiguous()
    }  # fmt: skip
    changes = {"train.steps": 1, "teacher": teacher(server, models)}
    with pytest.raises(TeacherError, match="give other log-probabilities than the server"):
        toy_run(models, tmp_path / "a", changes)
    server.change_states = lambda tensors: {}
    with pytest.raises(TeacherError, match="does not exist: the server failed to write it"):
        toy_run(models, tmp_path / "b", changes)
    server.states = None
    with pytest.raises(RecipeError, match="states"):
        toy_run(models, tmp_path / "c", {**changes, "teacher": {**changes["teacher"], "states": 1}})
    with pytest.raises(CapabilityError, match="its answers name no hidden states"):
        toy_run(
            models, tmp_path / "d",
            {**changes, "teacher": {**changes["teacher"],
             "states": {"folder": "x", "model": str(models / "teacher")}}},
        )  # fmt: skip


def test_the_probe_says_what_a_server_that_writes_states_can_give(server: Stub) -> None:
    vocabulary = server.model.loaded.language_model.vocab_size
    result = probe(JsonClient(HttpServer(server.url)), "auto", None, 20, vocabulary)
    lines = "\n".join(result.render_lines())
    assert "full (teacher.states reads the hidden states that it writes)" in lines
    others = "\n".join(replace(result, writes_states=False).render_lines())
    assert "extract_hidden_states" in others and "2 bytes x width per token" in others
    assert to_json(result)["full"] is True
    assert len(find_methods(result).with_teacher) > len(
        find_methods(replace(result, writes_states=False)).with_teacher
    )


def test_an_adapter_has_no_end_of_its_own(models: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(models / "teacher"), "peft_type": "LORA"})
    )
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ModelError, match="an adapter has no last norm and no head"):
        load_ending(ModelConfig(model=str(tmp_path)))


def test_an_ending_reads_nothing_but_its_weights(models: Path) -> None:
    ending = load_ending(ModelConfig(model=str(models / "teacher")))
    whole = load(ModelConfig(model=str(models / "teacher"))).language_model
    assert ending.head.weight.equal(whole.head().weight)
    assert ending.norm is not None and not any(p.is_meta for p in ending.norm.parameters())
