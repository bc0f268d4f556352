"""`practicum doctor` as a command: its output, its files, its exit code, and the rule of its verdict."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pairs import ALPHABET
from toy import command, forked, make_model, write_recipe

import practicum
from practicum.errors import PracticumError, RecipeError
from practicum.recipe import load_recipe
from practicum.runs.check_outcome import CheckOutcome
from practicum.runs.overrides import apply_overrides
from practicum.statistics import Interval
from practicum.studies.doctor import CHECKS, GO, RULES, CheckResult
from practicum.studies.doctor.diagnosis_page import choose_tone
from practicum.studies.doctor.findings import (
    find_worst_status,
    format_interval,
    grade,
    validate_fix,
)
from practicum.studies.doctor.teachability import TEACHER_ACCURACY, UNREWARDED
from practicum.studies.doctor.verdict import decide

pytestmark = pytest.mark.long


def said(tmp_path: Path, *words: str) -> tuple[int, str]:
    output = tmp_path / "output"
    status = forked(command(*words), output=output)
    return status, output.read_text(encoding="utf-8")


def test_a_diagnosis_is_printed_and_written(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(models, tmp_path / "mine.yaml", {"name": "mine"})
    status, text = said(tmp_path, "doctor", str(recipe), "--prompts", "4", "--samples", "2")
    found = json.loads((tmp_path / "runs" / "mine.doctor.json").read_text())
    assert (
        status == found["verdict"]["exit_code"]
        and found["verdict"]["word"] in text
        and "\x1b" not in text
    )
    assert [row["id"] for row in found["checks"]] == [check.id for check in CHECKS]
    assert (
        all(check.id in text for check in CHECKS)
        and "SFT, OPD or RL?" in text
        and "the student answers" in text
    )
    assert (tmp_path / "runs" / "mine.doctor.html").is_file()


def test_json_is_one_object_a_line_and_ends_with_the_diagnosis(
    models: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(models, tmp_path / "mine.yaml")
    out = tmp_path / "here.json"
    status, text = said(
        tmp_path, "doctor", str(recipe), "--prompts", "4", "--out", str(out), "--json"
    )
    events = [json.loads(line) for line in text.splitlines()]
    last = events[-1]["summary"]
    assert events[-1]["event"] == "finish" and last["diagnosis"] == json.loads(out.read_text())
    assert (
        last["verdict"] == last["diagnosis"]["verdict"]["word"]
        and status == last["diagnosis"]["verdict"]["exit_code"]
    )


def test_vocabularies_that_differ_are_a_verdict_with_its_code(models: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "other", alphabet=ALPHABET[::-1])
    recipe = write_recipe(models, tmp_path / "mine.yaml")
    words = (
        "doctor",
        str(recipe),
        f"teacher.model={tmp_path / 'other'}",
        "--out",
        str(tmp_path / "x.json"),
    )
    status, text = said(tmp_path, *words)
    assert (
        status == 20
        and "BROKEN-SETUP" in text
        and "Traceback" not in text
        and 'set \'teacher={"type": "translated", "teacher": {"type": "model"' in text
    )
    # Eighteen lines repeated that a check does not apply, and the refusal appeared three times.
    (line,) = [line for line in text.splitlines() if "not applicable" in line]
    assert line.startswith("19 checks not applicable (P2, P3, ") and line.endswith("be sampled")
    assert text.count("or learn from its text") == 1 and text.count("BROKEN-SETUP") == 1
    page = (tmp_path / "x.html").read_text()
    assert page.count("not applicable") == 1 and page.count("or learn from its text") == 1


def test_a_recipe_that_cannot_be_right_is_an_error_as_everywhere(
    models: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(models, tmp_path / "mine.yaml", {"seeed": 1})
    status, text = said(tmp_path, "doctor", str(recipe))
    assert status == 2 and "did you mean 'seed'" in text
    status, text = said(tmp_path, "doctor", str(recipe), "--prompts", "0")
    assert status == 2


def test_the_function_is_the_command(models: Path, tmp_path: Path) -> None:
    recipe = write_recipe(models, tmp_path / "mine.yaml")
    found = practicum.doctor(
        recipe, ["train.steps=2"], prompts=2, samples=1, out=tmp_path / "x.json"
    )
    assert isinstance(found, practicum.Diagnosis) and found.prompts == 2
    assert json.loads((tmp_path / "x.json").read_text()) == found.to_json()
    # A folder is a valid path too, and findings under the page's name do not overwrite it.
    folder = tmp_path / "checks"
    folder.mkdir()
    paths = (folder / "toy.doctor.json", folder / "toy.doctor.html")
    assert found.write(folder) == found.write(paths[1]) == paths
    assert json.loads(paths[0].read_text()) == found.to_json()
    assert paths[1].read_text().startswith("<!")
    with pytest.raises(RecipeError, match="give no answers"):
        practicum.doctor(recipe, prompts=0)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing_and_shows_text_as_text(models: Path, tmp_path: Path) -> None:
    rows = [
        {"id": f"<script>{n}\u202e", "prompt": f"a<assistant>b{n}", "answer": "b"} for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"type": "jsonl", "path": str(tmp_path / "rows.jsonl"), "heldout": 1}
    recipe = write_recipe(models, tmp_path / "mine.yaml", {"task": task})
    status, text = said(tmp_path, "doctor", str(recipe), "--out", str(tmp_path / "x.json"))
    page = (tmp_path / "x.html").read_text()
    tags = _Tags()
    tags.feed(page)
    assert not tags.open and not tags.loaded and "<script>" not in page and "&lt;script&gt;" in page
    assert "\u202e" not in page + text and "\\u202e" in text, status


def _results(**statuses: str) -> list[CheckResult]:
    findings = {
        check.id: CheckOutcome("pass", check.name, Interval(0.5, 0.4, 0.6)) for check in CHECKS
    }
    values = {"below": Interval(-0.2, -0.3, -0.1), "within": Interval(0.0, -0.02, 0.02)}
    for check, status in statuses.items():
        word = "fail" if status in values else status.partition("+")[0]
        zeros = {
            "unseen": {TEACHER_ACCURACY: 0.0},
            "unrewarded": {TEACHER_ACCURACY: 0.0, UNREWARDED: 64.0},
        }
        details = zeros.get(status, {})
        word = "inconclusive" if details else word
        fix = ("train.steps=2",) if status.endswith("+fix") else ()
        findings[check] = CheckOutcome(
            word, check, values.get(status, Interval(0.5, 0.4, 0.6)), fix=fix, details=details
        )  # type: ignore[arg-type]
    return [CheckResult(check, findings[check.id]) for check in CHECKS]


@pytest.mark.parametrize(
    ("statuses", "word"),
    [
        ({}, "GO"),
        ({"P1": "fail", "P11": "fail"}, "BROKEN-SETUP"),
        ({"P2": "fail"}, "BROKEN-SETUP"),
        ({"P4": "fail", "P5": "fail"}, "BROKEN-SETUP"),
        ({"P2": "fail", "P10": "unrewarded"}, "BROKEN-SETUP"),
        ({"P6": "fail", "P10": "unrewarded", "P12": "fail"}, "NO-REWARD"),
        ({"P11": "fail", "P5": "fail"}, "NO-GO"),
        ({"P10": "below", "P6": "fail"}, "NO-GO"),
        ({"P10": "within", "P5": "fail"}, "NO-GAP"),
        ({"P5": "fail", "P9": "fail+fix"}, "COLD-START-FIRST"),
        ({"P6": "fail", "P10": "inconclusive"}, "COLD-START-FIRST"),
        ({"P9": "fail+fix", "P10": "inconclusive"}, "CHANGE-FIRST"),
        ({"P6": "warn+fix"}, "GO"),
        ({"P9": "fail"}, "CHANGE-FIRST"),
        ({"P9": "warn"}, "GO"),
        ({"P9": "fail+fix", "P10": "unseen"}, "INCONCLUSIVE"),
        ({"P10": "inconclusive", "P12": "warn"}, "INCONCLUSIVE"),
        ({"P11": "inconclusive", "P16": "warn+fix"}, "GO"),
        ({"P12": "fail"}, "CHANGE-FIRST"),
    ],
)
def test_the_first_rule_that_holds_decides(statuses: dict[str, str], word: str) -> None:
    verdict = decide(_results(**statuses), None)
    assert verdict.word == word
    assert word == "GO" or all(line.split()[0] in statuses for line in verdict.because)


@pytest.mark.parametrize(
    ("word", "statuses", "tone"),
    [
        ("GO", ["pass", "warn"], "good"),
        ("GO", ["pass", "fail"], "mixed"),
        ("CHANGE-FIRST", ["fail"], "mixed"),
        ("NO-GO", ["fail"], "bad"),
        ("INCONCLUSIVE", ["pass"], ""),
    ],
)
def test_no_verdict_is_green_beside_a_failing_check(
    word: str, statuses: list[str], tone: str
) -> None:
    assert choose_tone(word, statuses) == tone


def test_sft_instead_where_answers_are_short_and_the_teacher_is_far_larger() -> None:
    assert decide(_results(P16="warn"), 12.0).advice.startswith("SFT instead")
    assert decide(_results(P16="warn"), 2.0).advice.startswith("OPD should work")
    assert decide(_results(), 12.0).advice.startswith("OPD.")


def test_rl_is_no_advice_where_no_prompt_is_solved_sometimes() -> None:
    results = _results(P12="warn")
    assert "RL can follow" in decide(results, None).advice
    unsolved = replace(results[-1].outcome, value=Interval(0.0, 0.0, 0.2))
    results = [
        replace(result, outcome=replace(unsolved, status=result.outcome.status))
        if result.check.id == "P12"
        else result
        for result in results
    ]
    assert "RL" not in decide(results, None).advice


def test_exit_codes_are_their_own_and_only_a_go_is_zero() -> None:
    codes = {rule.word: rule.exit_code for rule in (*RULES, GO)}
    assert [word for word, code in codes.items() if code == 0] == ["GO"]
    rest = [code for code in codes.values() if code]
    kinds = PracticumError.__subclasses__()
    assert len(set(rest)) == len(rest) and not set(rest) & {kind.exit_code for kind in kinds}


def test_a_check_fails_only_where_the_whole_interval_does() -> None:
    assert grade(Interval(0.4, 0.3, 3.0), 0.5, 1.0) == "pass"
    assert grade(Interval(2.0, 0.9, 3.0), 0.5, 1.0) == "warn"
    assert grade(Interval(2.0, 1.1, 3.0), 0.5, 1.0) == "fail"
    assert grade(Interval(0.8, 0.1, 0.9), 0.7, 0.5) == "pass"
    assert grade(Interval(0.4, 0.3, 0.6), 0.7, 0.5) == "warn"
    assert grade(Interval(0.4, 0.3, 0.45), 0.7, 0.5) == "fail"
    assert (
        find_worst_status("pass", "warn", "not applicable") == "warn"
        and find_worst_status("pass", "not applicable") == "pass"
    )


def test_a_fix_that_the_recipe_refuses_or_already_has_is_not_offered() -> None:
    recipe = load_recipe("smoke/toy", ["signal=sampled"])

    def offer(fix: str) -> tuple[str, ...]:
        return validate_fix(recipe, CheckOutcome("warn", "", fix=(fix,))).fix

    assert offer("rollout.top_p=0.9") == (), "a truncated sampler does not go with sampled tokens"
    assert offer(f"rollout.temperature={recipe.rollout.temperature}") == ()
    assert offer("weights=prefix(8)") == ("weights=prefix(8)",)
    assert apply_overrides(recipe, ["weights=prefix(8)"]).objective.losses[0].weights.arguments == {
        "length": 8
    }


def test_numbers_are_shown_with_the_digits_they_have() -> None:
    assert format_interval(Interval(0.123456, 0.1, 0.15), "nats") == "0.123 [0.1, 0.15] nats"
    assert (
        format_interval(Interval(12345.6, 12345.6, 12345.6)) == "12346"
        and format_interval(None) == ""
    )
