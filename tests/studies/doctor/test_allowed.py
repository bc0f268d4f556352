"""Requirements of a teacher and a task: each published method is allowed, needs no teacher, or is refused for a reason."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_server import Stub
from toy import command, forked, toy_recipe, write_recipe

from practicum.objective import Capabilities
from practicum.recipe import list_recipe_names
from practicum.rollouts import SourceConfig
from practicum.studies.doctor import AllowedMethods, find_allowed_methods
from practicum.studies.doctor.allowed import NO_ANSWERS, NO_TURNS, NO_VERIFIER, NO_WRITER, Money
from practicum.types import Message, Prompt

TEXT = Capabilities(frozenset(), frozenset(), largest_k=0)
EVERYTHING = Capabilities(frozenset({"sampled", "topk", "full"}), raw_logits=True)
NOTHING = Capabilities(frozenset(), frozenset(), writes=False)


def list_all(found: AllowedMethods) -> list[str]:
    refused = [name for names in found.refused.values() for name in names]
    return [*found.with_teacher, *found.without_teacher, *refused]


@pytest.mark.parametrize("has_verifier", [True, False, None])
@pytest.mark.parametrize("capabilities", [TEXT, EVERYTHING, NOTHING])
def test_every_published_method_has_one_place(
    capabilities: Capabilities, has_verifier: bool | None
) -> None:
    papers = [name for name in list_recipe_names() if name.startswith("papers/")]
    names = list_all(find_allowed_methods(capabilities, has_verifier))
    assert sorted(names) == [name.removeprefix("papers/") for name in sorted(papers)]


def test_text_is_enough_for_black_boxes_and_for_no_divergence() -> None:
    found = find_allowed_methods(TEXT, has_verifier=True)
    assert {"gad", "ovd", "seqkd", "orpo-distill"} <= set(found.with_teacher)
    assert "gkd" in found.refused["needs the teacher's signal 'full'"]
    assert "thinking-machines" in found.refused["needs the teacher's signal 'sampled'"]
    assert {"grpo", "spin", "sft"} <= set(found.without_teacher)


def test_without_a_verifier_nothing_learns_from_a_reward() -> None:
    found = find_allowed_methods(TEXT, has_verifier=False)
    assert {"dpo", "grpo", "luffy"} <= set(found.refused[NO_VERIFIER])
    assert {"gad", "seqkd", "orpo-distill"} <= set(found.with_teacher)
    assert "ovd" in found.refused[NO_VERIFIER] and "spin" in found.without_teacher
    lines = "\n".join(found.render_lines())
    assert "with no verifier" in lines and NO_VERIFIER in lines


def test_a_teacher_of_everything_is_refused_nothing_but_what_the_task_lacks() -> None:
    assert not find_allowed_methods(EVERYTHING, has_verifier=True).refused
    bare = [Prompt("a", (Message("user", "ab"),))]
    found = find_allowed_methods(EVERYTHING, False, bare)
    assert set(found.refused) == {NO_VERIFIER, NO_ANSWERS} and "sft" in found.refused[NO_ANSWERS]
    answered = [Prompt("a", (Message("user", "ab"),), answer="ba")]
    assert NO_ANSWERS not in find_allowed_methods(EVERYTHING, False, answered).refused


def test_a_teacher_that_writes_nothing_and_a_task_that_answers_are_reasons() -> None:
    boxes = {"gad", "ovd", "seqkd", "orpo-distill"}
    assert boxes <= set(find_allowed_methods(NOTHING, True).refused[NO_WRITER])
    found = find_allowed_methods(EVERYTHING, True, is_conversation=True)
    assert set(found.refused) == {NO_TURNS} and "sft" in found.refused[NO_TURNS]


def test_few_candidates_of_the_teacher_are_a_reason_of_their_own() -> None:
    few = Capabilities(frozenset({"sampled", "topk"}), frozenset({"teacher"}), largest_k=20)
    (reason,) = [r for r in find_allowed_methods(few).refused if "candidates" in r]
    assert "opcd" in find_allowed_methods(few).refused[reason]


def test_a_terminal_shows_the_first_names_and_the_page_all() -> None:
    found = find_allowed_methods(TEXT)
    short, long = found.render_lines(2), found.render_lines()
    assert len(short) == len(long) and any(" more" in line for line in short)
    assert not any(" more" in line for line in long)
    assert json.loads(json.dumps(found.to_json()))["lines"] == long


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("student", 0),
        ("teacher", 4),
        ("mix(student=0.25, other=teacher)", 3),
        ("mix(student=0.25, other=dataset)", 0),
        ("join(teacher+reference, 2)", 2),
        ("join(dataset, 2)", 0),
        ("prefix(3)", 4),
        ("prefix(3, dataset)", 0),
    ],
)
def test_the_answers_of_a_teacher_are_counted_by_the_source(
    models: Path, source: str, count: int
) -> None:
    changes = {"rollout": {"source": source, "n": 4, "max_new_tokens": 5}}
    changes["reference"] = {"type": "self"}
    changes["objective"] = {"signal": "text", "divergence": "ce"}
    found = toy_recipe(models, changes).rollout.source
    assert isinstance(found, SourceConfig) and found.count_teacher_answers(4) == count


def test_money_is_said_with_what_a_budget_pays_for() -> None:
    assert "nothing stops it" in Money(0.5, 10, None).describe()
    assert "about 5 in all, within teacher.budget, 6" in Money(0.5, 10, 6.0).describe()
    assert "teacher.budget, 2, pays for about 4 of them" in Money(0.5, 10, 2.0).describe()


# Exactly as typed.


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub(context=None) as stub:
        yield stub


@pytest.mark.long
@pytest.mark.parametrize("has_verifier", [True, False])
def test_the_doctor_says_what_an_api_is_enough_for(
    models: Path, stub: Stub, tmp_path: Path, has_verifier: bool
) -> None:
    rows = [
        {"id": f"{n}", "prompt": "ab" * (n + 1), **({"answer": "ab"} if has_verifier else {})}
        for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes: dict[str, Any] = {
        "teacher": {
            "type": "chat_api",
            "url": stub.url,
            "model": "m",
            "prices": {"input": 3.0, "output": 15.0},
            "budget": 0.003,
        },
        "task": {"type": "jsonl", "path": str(tmp_path / "rows.jsonl"), "heldout": 1},
        "objective": {"signal": "text", "divergence": "ce"},
        "rollout": {"source": "teacher", "max_new_tokens": 5},
    }
    recipe = write_recipe(models, tmp_path / "mine.yaml", changes)
    out, output = tmp_path / "found.json", tmp_path / "output"
    words = ("doctor", str(recipe), "--prompts", "2", "--samples", "1", "--out", str(out))
    forked(command(*words), output=output)
    text, found = output.read_text(), json.loads(out.read_text())["methods"]
    assert "the teacher gives text" in text and "seqkd" in text and "Traceback" not in text
    assert found["has_verifier"] is has_verifier and "seqkd" in found["with_teacher"]
    assert ("grpo" in found["without_teacher"]) is has_verifier
    assert found["money"]["answers"] == 32 and found["money"]["per_answer"] > 0
    assert "an answer of the teacher costs about" in text
    assert found["lines"][0] in out.with_suffix(".html").read_text()


def test_another_recipe_is_named_where_a_writer_is_asked_to_score(
    models: Path, stub: Stub, tmp_path: Path
) -> None:
    changes = {"teacher": {"type": "chat_api", "url": stub.url, "model": "m"}}
    recipe = write_recipe(models, tmp_path / "mine.yaml", changes)
    output = tmp_path / "output"
    assert forked(command("run", str(recipe), "--out", str(tmp_path)), output=output) == 2
    assert "'chat_api' only writes" in output.read_text() and "papers/seqkd" in output.read_text()
