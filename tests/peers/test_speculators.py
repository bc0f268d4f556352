"""The real Speculators: its class loads an exported drafter and computes the same logits at all depths, and its reader
takes stored states. `make peers` runs this file in an environment that has speculators.
"""

import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import recording
import torch
from methods.eagle3.small import VOCABULARY, make_drafter, make_target

from practicum.backends.local.drafter import unroll
from practicum.backends.local.target_states import TargetStates
from practicum.methods.eagle3 import eagle3

speculators: Any = pytest.importorskip(
    "speculators", reason="run by `make peers`, where speculators is installed"
)

pytestmark = pytest.mark.slow

DEPTHS = 4
ROWS = 128
"""A multiple of the blocks of its attention."""
RESULTS: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def record() -> Iterator[None]:
    yield from recording.record("speculators", version("speculators"), RESULTS)


@pytest.mark.parametrize("vocabulary", [40, VOCABULARY], ids=["part", "all"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_its_class_computes_the_logits_of_an_exported_drafter(
    tmp_path: Path, architecture: str, vocabulary: int
) -> None:
    target = make_target(architecture)
    drafter, _ = make_drafter(target, vocabulary)
    target.model.save_pretrained(tmp_path / "target")
    target.model.name_or_path = str(tmp_path / "target")
    folder = tmp_path / "drafter"
    folder.mkdir()
    eagle3.write(drafter, folder, "speculators", target.model, DEPTHS)
    with warnings.catch_warnings(action="ignore"):
        theirs: Any = speculators.SpeculatorModel.from_pretrained(str(folder))
    assert type(theirs).__name__ == "Eagle3DraftModel"
    assert tuple(theirs.target_layer_ids) == drafter.layers

    stream, length = torch.Generator().manual_seed(0), ROWS + 1
    features = torch.randn(1, length, 3 * 32, generator=stream)
    ids = torch.randint(VOCABULARY, (1, length), generator=stream)
    logits: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output))
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        # It takes the state of a token in the row of the next one.
        theirs(features[:, :-1], ids[:, 1:], torch.zeros(1, ROWS).long(), ttt_steps=DEPTHS)
        states = list(unroll(drafter, target.model, features, ids, DEPTHS))
    errors = []
    for depth, (state, answer) in enumerate(zip(states, logits, strict=True)):
        known = ROWS - depth  # later rows lack a token of the text
        ours = drafter.head.logits(drafter.finish(state[:, :known]))
        assert ours.std() > 0.3, "the logits differ from token to token"
        torch.testing.assert_close(answer[:, :known], ours, rtol=1e-4, atol=1e-4)
        errors.append(float((answer[:, :known] - ours).abs().max()))
    RESULTS[f"{architecture}, {vocabulary} of {VOCABULARY} tokens"] = {"largest error": max(errors)}


def test_its_reader_takes_stored_states(tmp_path: Path) -> None:
    from hs_connectors.transfer import FileTransfer
    from speculators.data_generation.offline import check_hidden_states

    text = [5, 9, 3, 7]
    states = TargetStates(make_target(), (1, 2, 4), tmp_path).read(text)
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / "hs_0.safetensors")
    tensors = FileTransfer(tmp_path).get_cached(0)
    assert tensors is not None and tensors["hidden_states"].equal(states)
    check_hidden_states(tensors, text)
