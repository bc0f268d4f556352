"""A server is compared with the folder that it should serve, and each fault has its name and price."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stub_server import FolderModel, Stub
from torch import Tensor
from typer.testing import CliRunner

from practicum.cli.app import app
from practicum.cli.probe import compare_with_folder
from practicum.errors import TeacherError
from practicum.teaching.checks import validate_scores
from practicum.teaching.comparison import ModelComparison
from practicum.teaching.dialects import ServerScores
from practicum.types import ScoreRequest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of twenty-odd tokens with clear preferences, of two layers so that low precision loses information."""
    from toy import make_model

    return make_model(
        tmp_path_factory.mktemp("compared") / "m", alphabet="abcdefghijklmnopqrst", seed=3, layers=2
    )


@pytest.fixture(scope="module")
def sharp(folder: Path) -> FolderModel:
    """Return the model, with weights so large that its preferences differ from token to token."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file(
        {k: v * 4 if v.ndim > 1 else v for k, v in load_file(path).items()}, path, {"format": "pt"}
    )
    return FolderModel(folder)


def judge(
    folder: Path, model: Callable[[Sequence[int]], Tensor], **fields: object
) -> ModelComparison:
    """Return the verdict on a server of a model."""
    with Stub(model, **fields) as stub:
        return compare_with_folder(stub.url, str(folder))[1]


def test_the_folder_itself_is_the_same(folder: Path, sharp: FolderModel) -> None:
    with Stub(sharp) as stub:
        result = CliRunner().invoke(app, ["probe", stub.url, "--against", str(folder)])
    assert result.exit_code == 0, result.output
    assert "against: the same model: " in result.stdout
    assert judge(folder, sharp).difference < 1e-4


def test_one_token_again_and_again_has_one_score_at_every_place() -> None:
    """With rotary positions a correct model gives this, and no model does for a text of two tokens."""
    scores = ServerScores(logprobs=[-0.5] * 8, ids=None, top=[])
    validate_scores(scores, ScoreRequest((3,) * 4, (3,) * 8), 0, None)
    for prompt in ((), (4,)):
        with pytest.raises(TeacherError, match=r"all 8 log-probabilities are -0\.5"):
            validate_scores(scores, ScoreRequest(prompt, (*(3,) * 7, 4)), 0, None)
    no_opinion = replace(scores, logprobs=[-math.log(11)] * 8)
    with pytest.raises(TeacherError, match="minus the ln of 11"):
        validate_scores(no_opinion, ScoreRequest((3,) * 4, (3,) * 8), 0, 11)


FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "a separate temperature": (
        "another temperature",
        lambda rows: (rows / 0.7).log_softmax(-1),
        "at temperature 0.70;",
    ),
    "a temperature of two": (
        "another temperature",
        lambda rows: (rows / 2).log_softmax(-1),
        "at temperature 2.00;",
    ),
    "rows of the position before": (
        "off by one position",
        lambda rows: rows.roll(1, 0),
        "the prediction of the token before it",
    ),
    "rows of the position after": (
        "off by one position",
        lambda rows: rows.roll(-1, 0),
        "the prediction of the token after it",
    ),
    "ids of the head in another order": (
        "a permuted vocabulary",
        lambda rows: rows[
            :, torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(0))
        ],
        "at other token ids",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_priced(folder: Path, sharp: FolderModel, fault: str) -> None:
    verdict, bend, reason = FAULTS[fault]
    found = judge(folder, sharp, bend=bend)
    assert found.verdict == verdict, found
    assert reason in found.detail
    assert found.difference > 0.1


def test_values_that_stand_one_place_off_are_named(folder: Path, sharp: FolderModel) -> None:
    """The list of the tokens' own scores is shifted, while the candidates are correct, as in AReaL's server."""

    class Shifted(Stub):
        def answer(self, path: str, body: object) -> tuple[int, object]:
            status, answer = super().answer(path, body)
            if path == "/generate" and "input_token_logprobs" in answer["meta_info"]:
                own = answer["meta_info"]["input_token_logprobs"]
                numbers = [row[0] for row in own]
                for row, number in zip(own[1:], [*numbers[2:], -1.0], strict=True):
                    row[0] = number
            return status, answer

    with Shifted(sharp, dialect="sglang") as stub:
        found = compare_with_folder(stub.url, str(folder))[1]
    assert found.verdict == "off by one position"
    assert "each score belongs to the next token" in found.detail


def test_a_model_under_another_tokenizer_is_told_by_its_texts(
    folder: Path, sharp: FolderModel
) -> None:
    """Write a build in which every id means another token, in the embedding and in the head."""
    count = sharp.loaded.renderer.vocab_size
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))

    class Told(Stub):
        def answer(self, path: str, body: object) -> tuple[int, object]:
            status, answer = super().answer(path, body)
            if path == "/v1/completions" and "choices" in answer:
                for row in answer["choices"][0].get("prompt_logprobs", [])[1:]:
                    for token, entry in row.items():
                        entry["decoded_token"] = sharp.loaded.renderer.tokenizer.decode(
                            [order[int(token)].item()]
                        )
            return status, answer

    def permuted(ids: Sequence[int]) -> Tensor:
        return sharp(order[list(ids)].tolist())[:, order]

    with Told(permuted) as stub:
        found = compare_with_folder(stub.url, str(folder))[1]
    assert found.verdict == "a permuted vocabulary"
    assert "texts differ, id " in found.detail
    assert found.difference > 0.1


def round_weights(folder: Path, out: Path, levels: int) -> FolderModel:
    """Round each row of the model's matrices to this many levels of either sign."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    for name, weight in tensors.items():
        if weight.ndim > 1 and "embed" not in name and "head" not in name:
            scale = weight.abs().amax(1, keepdim=True) / levels
            tensors[name] = (weight / scale).round() * scale
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return FolderModel(out)


def test_fewer_bits_are_named_and_cost_more_the_fewer_they_are(
    folder: Path, sharp: FolderModel, tmp_path: Path
) -> None:
    eight, four = (
        judge(folder, round_weights(folder, tmp_path / str(levels), levels)) for levels in (127, 7)
    )
    assert four.verdict == "fewer bits"
    assert four.divergence is not None and eight.divergence is not None
    assert four.divergence > 10 * eight.divergence > 0
    assert eight.verdict in ("the same model", "fewer bits")


def test_other_weights_end_with_exit_code_5(
    folder: Path, sharp: FolderModel, tmp_path: Path
) -> None:
    from toy import make_model

    other = make_model(tmp_path / "other", alphabet="abcdefghijklmnopqrst", seed=4, layers=2)
    with Stub(FolderModel(other)) as stub:
        result = CliRunner().invoke(app, ["probe", stub.url, "--against", str(folder), "--json"])
    assert result.exit_code == 5
    found = json.loads(result.stdout)["against"]
    assert found["verdict"] == "other weights"
    assert found["difference"] > 0.2
    assert f"the server is not {folder}: other weights" in result.stderr


def test_a_server_that_only_writes_cannot_be_compared(folder: Path) -> None:
    with Stub(dialect="llamacpp") as stub:
        result = CliRunner().invoke(app, ["probe", stub.url, "--against", str(folder)])
    assert result.exit_code == 2
    assert "nothing can be compared" in result.stderr
