"""A teacher's numbers in recorded traces: equal to its model on the same tokens, without other changes."""

import json
from pathlib import Path

import pytest
import torch
from toy import make_model, toy_recipe
from traced import talk, write

from practicum.backends.local.loading import load
from practicum.errors import DataError, RecipeError
from practicum.models.config import ScorerConfig
from practicum.recipe import Recipe
from practicum.runs import trace_file
from practicum.runs.trace_file import score_traces


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2)
    return folder


def build_recipe(models: Path, path: Path) -> Recipe:
    changes = {
        "task": {"type": "traces", "path": str(path)},
        "rollout.source": f"traces({path})",
        "rollout.max_new_tokens": 16,
        "evaluation.prompts": 0,
    }
    return toy_recipe(models, changes)


def test_sampled_tokens_get_the_teachers_log_probabilities(models: Path, tmp_path: Path) -> None:
    loaded = load(ScorerConfig(model=str(models / "teacher")))
    talks = [talk(loaded.renderer), talk(loaded.renderer, question="cab", task="b")]
    path = write(tmp_path / "t.jsonl", *talks, talk(loaded.renderer, agent={"trainable": False}))
    scored = score_traces(build_recipe(models, path), tmp_path / "scored.jsonl")
    assert (scored.answers, scored.tokens) == (2, 10)
    lines = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    given = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[:2]:
        tokens = torch.tensor([token for node in line["nodes"][:4] for token in node["token_ids"]])
        with torch.no_grad():
            logits = loaded.language_model.model(tokens[None]).logits[0, :-1]
        logits = logits[:, : loaded.language_model.vocab_size]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        mask = torch.tensor([seen for node in line["nodes"][:4] for seen in node["mask"]])
        written = [node.pop("reference_logprobs", []) for node in line["nodes"]]
        assert [len(values) for values in written] == [0, 3, 0, 2, 0]
        assert torch.allclose(
            torch.tensor([value for values in written for value in values]),
            logprobs[mask[1:]],
            atol=1e-5,
        )
    assert lines == given


def test_an_interrupted_file_goes_on_with_the_same_bytes(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two conversations and an empty one; killed within a chunk, in the middle of a line, and at a chunk's end."""
    monkeypatch.setattr(trace_file, "CHUNK", 2)
    renderer = load(ScorerConfig(model=str(models / "teacher"))).renderer
    talks = [talk(renderer, question=text, task=text) for text in ("abc", "cab", "b", "ba", "cc")]
    talks.insert(1, talk(renderer, agent={"trainable": False}))
    recipe = build_recipe(models, write(tmp_path / "t.jsonl", *talks))
    whole = score_traces(recipe, tmp_path / "whole.jsonl")
    expected = (tmp_path / "whole.jsonl").read_bytes()
    lines = expected.splitlines(keepends=True)
    assert (whole.answers, whole.tokens, len(lines)) == (5, 25, 6)
    for count, torn in ((1, 0), (2, 20), (4, 0), (6, 0)):
        path = tmp_path / f"{count}.jsonl"
        score_traces(recipe, path)
        path.write_bytes(b"".join(lines[:count]) + b"".join(lines[count:])[:torn])
        assert score_traces(recipe, path) == whole
        assert path.read_bytes() == expected
    write(tmp_path / "t.jsonl", *talks[:5])
    with pytest.raises(DataError, match=r"begun with other settings \(traces"):
        score_traces(recipe, tmp_path / "1.jsonl")


def test_what_cannot_be_scored_is_refused(models: Path, tmp_path: Path) -> None:
    renderer = load(ScorerConfig(model=str(models / "teacher"))).renderer
    path = write(tmp_path / "t.jsonl", talk(renderer))
    with pytest.raises(DataError, match="exists and was not begun by this command"):
        score_traces(build_recipe(models, path), path)
    with pytest.raises(RecipeError, match=r"rollout\.source has no traces to write into"):
        score_traces(toy_recipe(models), tmp_path / "scored.jsonl")
