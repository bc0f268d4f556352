"""A drafter's states read from files change no bit of what it learns; files of other targets are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from methods.eagle3.small import make_data, make_drafter, make_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from practicum.backends.local import target_states
from practicum.backends.local.device_limits import TrainerLimits
from practicum.backends.local.drafter import DrafterTrainer
from practicum.backends.local.language_model import Decoding, LanguageModel, find_body
from practicum.backends.local.target_states import TargetStates
from practicum.errors import ModelError
from practicum.objective import Full, Objective
from practicum.ports import AdamParams, WeightUpdateRule
from practicum.types import ScoreRequest

LAYERS, TEXT = (1, 2, 4), (5, 9, 3, 7)


def convert(target: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    return replace(target, model=target.model.to(dtype), decoding=Decoding.TORCH)


def learn(target: LanguageModel, cache: Path | None) -> tuple[dict[str, Tensor], int]:
    """Train for six steps on texts in other groups each time; return weights, and calls of the target."""
    drafter, config = make_drafter(target, cache=None if cache is None else str(cache))
    trainer = DrafterTrainer(target, drafter, config, TrainerLimits(micro_batch_tokens=16))
    teacher = trainer.build_self_teacher(WeightUpdateRule("frozen"))
    calls = list[int]()
    hook = find_body(target.model).register_forward_hook(lambda *_: calls.append(1))
    data, objective = make_data(target), Objective(signal="full", divergence="forward_kl")
    calls.clear()
    for step in range(6):
        texts = [*data[step % 3 :], *data[: step % 3]][: 2 + step % 2]
        requests = [
            ScoreRequest(item.rollout.prompt_tokens, tuple(item.rollout.tokens.tolist()))
            for item in texts
        ]
        signals = teacher.score(requests, Full())
        batch = [replace(item, signal=new) for item, new in zip(texts, signals, strict=True)]
        trainer.forward_backward(batch, objective, 0)
        trainer.optim_step(AdamParams(0.01))
    hook.remove()
    return {name: weight.detach() for name, weight in drafter.named_parameters()}, len(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_states_change_no_bit_and_save_all_calls_of_the_target(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    target = convert(make_target(), dtype)
    plain, calls = learn(target, None)
    stored, _ = learn(target, tmp_path / "states")
    again, last = learn(target, tmp_path / "states")
    assert len(list((tmp_path / "states").iterdir())) == 3
    assert calls == 3, "teacher and update share the states of each text in memory"
    assert last == 1, "one call compares the folder with the target"
    for name, weight in plain.items():
        assert weight.equal(stored[name]) and weight.equal(again[name]), name


def test_states_in_memory_save_calls_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    weights, calls = learn(target, None)
    monkeypatch.setattr(target_states, "MAX_BYTES", 0)
    forgetful, more = learn(target, None)
    assert more > calls
    for name, weight in weights.items():
        assert weight.equal(forgetful[name]), name


def test_a_file_has_the_layout_of_vllm_and_any_name(tmp_path: Path) -> None:
    target = make_target()
    written = TargetStates(target, LAYERS, tmp_path).read(TEXT)
    (file,) = tmp_path.iterdir()
    tensors = load_file(file)
    assert tensors["token_ids"].tolist() == list(TEXT) and tensors["token_ids"].dtype == torch.int64
    states = tensors["hidden_states"]
    assert states.shape == (4, 4, 32) and states.equal(written)
    with torch.no_grad():
        output = target.model(torch.tensor([TEXT]), output_hidden_states=True)
        expected = [output.hidden_states[layer][0] for layer in LAYERS]
        torch.testing.assert_close(states[:, :3], torch.stack(expected, dim=1))
        last = find_body(target.model).get_submodule("norm")(states[:, 3])
        torch.testing.assert_close(last, output.hidden_states[-1][0])
        torch.testing.assert_close(TargetStates(target, LAYERS, None).finish(states), last)
    # Another program's numbers differ by rounding, and the stored numbers count.
    file.rename(tmp_path / "hs_0.safetensors")
    save_file({**tensors, "hidden_states": states * 1.0001}, tmp_path / "hs_0.safetensors")
    assert TargetStates(target, LAYERS, tmp_path).read(TEXT).equal(states * 1.0001)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": (1, 3, 4)}, r"after layers \[1, 3, 4, 5\]: the states differ from its own by"),
        ({"layers": (1, 2)}, r"are torch.float32 \[4, 4, 32\] instead of .* \[4, 3, 32\]"),
        ({"seed": 1}, "differ from its own by"),
        ({"dtype": torch.bfloat16}, r"are torch.float32 .* instead of torch.bfloat16"),
        ({"token_ids": torch.tensor([1, 2])}, r"instead of torch.float32 \[2, 4, 32\]"),
        ({"hidden_states": torch.full((4, 4, 32), torch.nan)}, "are torch.float32 .* instead of"),
        ({"cut": 100}, "cannot be read"),
        ({"ids": torch.tensor(TEXT)}, "cannot be read"),
    ],
)
def test_states_of_another_target_are_refused(
    tmp_path: Path, change: dict[str, object], text: str
) -> None:
    TargetStates(make_target(), LAYERS, tmp_path).read(TEXT)
    (file,) = tmp_path.iterdir()
    settings = {"layers": LAYERS, "seed": 0, "dtype": torch.float32, "cut": None, **change}
    tensors = {name: value for name, value in change.items() if isinstance(value, Tensor)}
    if tensors:
        rest = {} if "ids" in change else load_file(file)
        save_file({**rest, **tensors}, file)
    file.write_bytes(file.read_bytes()[: settings["cut"]])
    target = convert(make_target(seed=settings["seed"]), settings["dtype"])
    with pytest.raises(ModelError, match=text) as caught:
        TargetStates(target, settings["layers"], tmp_path).read((1, 2))
    assert "\n" not in str(caught.value) and len(list(tmp_path.iterdir())) == 1
