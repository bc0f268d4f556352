"""Model folders from elsewhere: damaged or hostile settings are refused in one line."""

import json
import shutil
from pathlib import Path

import pytest

from practicum.errors import ModelError, RecipeError
from practicum.models.config import ModelConfig
from practicum.models.sources import locate
from practicum.recipe import load_recipe
from practicum.report.markup import render_document, render_report_link

END_TOKENS = ([[1]], "x", -1, 2**70, [1, "x"], True)


@pytest.fixture
def folder(models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models / "student", tmp_path / "student"))


def refuse(folder: Path) -> str:
    with pytest.raises(ModelError) as refusal:
        locate(ModelConfig(model=str(folder)))
    text = str(refusal.value)
    assert "\n" not in text and len(text) < 500
    return text


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"], ids=["deep", "digits"]
)
def test_json_without_end_is_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert name in refuse(folder)


@pytest.mark.parametrize("eos", END_TOKENS, ids=str)
def test_end_tokens_are_token_ids(folder: Path, eos: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert "eos_token_id" in refuse(folder)


def test_layers_must_fit_into_the_weights(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 10**9}))
    assert "num_hidden_layers" in refuse(folder)


def test_a_name_of_thousands_of_letters_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "no model" in refuse(Path("x" * 5000))
    recipe = tmp_path / "recipe.yaml"
    for text in (f"extends: {'x' * 5000}\n", f"student: {{model: {'x' * 5000}}}\n"):
        recipe.write_text(text)
        with pytest.raises(RecipeError) as refusal:
            load_recipe(str(recipe))
        assert all(len(line) < 1000 for line in str(refusal.value).splitlines())


@pytest.mark.parametrize(
    "place", ["javascript:alert(1)//", "../other", "/etc", "a/../../b", "", "a b"]
)
def test_a_page_links_only_to_runs_below_it(place: str) -> None:
    assert render_report_link(place, "report") == "report"
    assert 'href="stages/01-sft/report.html"' in render_report_link("stages/01-sft", "report")


def test_every_page_has_a_policy() -> None:
    assert "script-src 'none'" in render_document("a", "p {}", "b")
