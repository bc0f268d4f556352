"""The README's Python code runs unchanged, and its recipe is valid."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from typer.main import get_group

from practicum.backends.local import scratch
from practicum.cli.app import app
from practicum.recipe import list_recipe_names, parse_recipe
from practicum.studies.doctor import CHECKS

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.long
@pytest.mark.parametrize("code", blocks("python"), ids=["distill", "run", "functional"])
def test_python_block_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pretrain = scratch._pretrain

    def pretrain_shortly(model, renderer, settings, *lessons):
        """Skip pretraining: it changes no line of the code and takes seven seconds."""
        pretrain(model, renderer, settings.model_copy(update={"steps": 2}), *lessons)

    monkeypatch.setattr(scratch, "_pretrain", pretrain_shortly)
    exec(compile(code, str(README), "exec"), {})


def test_recipe_is_valid() -> None:
    (recipe,) = blocks("yaml")
    assert parse_recipe(yaml.safe_load(recipe), "README").teacher.model == "Qwen/Qwen3-8B"


def test_the_commands_of_the_readme_and_of_the_demo_exist() -> None:
    demo = (README.parent / "Makefile").read_text(encoding="utf-8")
    lines = re.findall(
        r"^(?:\t@echo \")?practicum (\w+)", README.read_text(encoding="utf-8") + demo, re.MULTILINE
    )
    assert {"chat", "export", "doctor", "run"} <= set(lines) <= set(get_group(app).commands)


def test_relative_links_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_the_verdicts_are_counted_as_the_evidence_has_them() -> None:
    evidence = (README.parent / "docs" / "evidence.md").read_text(encoding="utf-8")
    counts = Counter(re.findall(r"\| \*\*([a-z ]+)\*\* \| [^|]*\|$", evidence, re.MULTILINE))
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert (
        f"of {counts.total()} published claims tested here on small models, {counts['holds']} hold, "
        f"{counts['holds in part']} hold in part, {counts['not resolved']} are not resolved, "
        f"{counts['does not hold here']} do not hold and "
        f"for {counts['the contrary holds here']} the contrary holds"
    ) in text


def test_the_checks_of_the_doctor_are_counted() -> None:
    counts = re.findall(r"(\d+) checks", README.read_text(encoding="utf-8"))
    assert set(counts) == {str(len(CHECKS))}


def test_the_range_against_trl_is_that_of_the_table() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    for pattern, claim in (
        (
            r"([\d.]+) times as fast, [\d.]+ of its memory \(",
            r"is ([\d.]+) to ([\d.]+) times as fast",
        ),
        (r"times as fast, ([\d.]+) of its memory \(", r"takes ([\d.]+) to ([\d.]+) of its memory"),
    ):
        measured = sorted(map(float, re.findall(pattern, text)))
        stated = re.search(claim, text)
        assert stated and (float(stated[1]), float(stated[2])) == (measured[0], measured[-1])


def test_the_recipes_are_counted() -> None:
    papers = [name for name in list_recipe_names() if name.startswith("papers/")]
    assert f"{len(papers)} published methods" in README.read_text(encoding="utf-8")
