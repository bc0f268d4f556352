"""The report: one page that loads nothing, executes no text, and shows the data of the run."""

import base64
import hashlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from report_pages import HOSTILE, Elements, copied, edit, edit_rows
from toy import rows, toy_run

from practicum.errors import CheckpointError, RecipeError
from practicum.report import write_report
from practicum.report.accounting import build_dropped_section
from practicum.report.charts import Axis, compute_running_mean, downsample, fit_axis, format_tick
from practicum.report.heatmap import NATS, Quantity, choose_colour
from practicum.report.page import build_page_parts, embed_json
from practicum.report.run_data import read_run, sample_rows
from practicum.report.tables import describe_gain
from practicum.report.tokens import KINDS, build_token_table, identify_kind
from practicum.report.verdict import count_tokens, estimate_recovery
from practicum.run_dir import shapes
from practicum.runs.console import PlainConsole
from practicum.statistics import Interval


def page_of(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    """Return the numbers under the page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize("which", ["rich", "harmful"])
def test_the_page_loads_nothing_and_runs_its_own_script_alone(
    which: str, request: pytest.FixtureRequest
) -> None:
    page = page_of(request.getfixturevalue(which))
    elements = Elements(page)
    for tag, attributes in elements.found:
        assert tag not in {
            "img",
            "iframe",
            "link",
            "object",
            "embed",
            "base",
            "form",
            "image",
            "foreignobject",
        }
        assert not [
            name
            for name in attributes
            if name.startswith("on") or name in {"src", "srcset", "action", "style"}
        ]
        assert (attributes.get("href") or "#").startswith("#")
    assert [tag for tag, _ in elements.found].count("script") == 2
    bare = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|url\(|@import|//cdn", bare)


def test_the_policy_names_this_style_and_this_script_and_nothing_else(rich: Path) -> None:
    page = page_of(rich)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    style, script = (
        re.search(r"<style>(.*?)</style>", page, re.DOTALL),
        re.findall(r"<script>(.*?)</script>", page, re.DOTALL),
    )
    assert policy is not None and style is not None and len(script) == 1
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == "'none'"
    for name, text in (("style-src", style[1]), ("script-src", script[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert "unsafe" not in policy[1]


def test_hostile_text_is_shown_and_not_obeyed(harmful: Path) -> None:
    page = page_of(harmful)
    assert not set("\u202e\u2066\x1b\x07") & set(page)
    assert Elements(page).text.count("<script>alert(1)</script>") >= 12
    inside = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert inside is not None and not set("<>&") & set(inside[1])
    assert "<script>alert(1)" in json.dumps(data_of(page), ensure_ascii=False)


def test_data_inside_the_page_cannot_end_its_element() -> None:
    text = embed_json({"a": "</script><!-- &", "b": "\u2028"})
    assert not set("<>&\u2028") & set(text) and json.loads(text) == {
        "a": "</script><!-- &",
        "b": "\u2028",
    }


def test_the_page_has_the_numbers_of_the_summary(rich: Path) -> None:
    page = page_of(rich)
    summary = json.loads((rich / "summary.json").read_text())
    for when in ("before", "after"):
        assert f"{summary[when]['reverse_kl']:.3g}" in page
        assert f"{summary[when]['accuracy']['mean']:.2f}" in page
    assert f"{summary['tokens']:,} supervised" in page and "single seed" in page


@pytest.mark.parametrize("signal", ["sampled", "full", "topk(4)"])
def test_a_sampled_divergence_is_called_an_estimate(
    models: Path, tmp_path: Path, signal: str
) -> None:
    screen = io.StringIO()
    changes = {"objective": {"signal": signal}, "train.steps": 2}
    folder = toy_run(models, tmp_path, changes, console=PlainConsole(screen)).folder
    is_estimate = signal == "sampled"
    label = "KL (estimate)" if is_estimate else "KL"
    assert re.search(rf"\| {re.escape(label)} -?\d", screen.getvalue())
    for row in rows(folder / "metrics.jsonl"):
        assert row.get("reverse_kl_estimated") == (1.0 if is_estimate else None)
    page = page_of(folder)
    assert ("<b>Reverse KL to the teacher (estimate)</b>" in page) == is_estimate
    assert "reverse_kl_estimated" not in page


def test_a_curve_has_a_point_a_step_and_an_alarm_its_flag(rich: Path) -> None:
    page = page_of(rich)
    figures = re.findall(r'<figure class="chart">.*?</figure>', page, re.DOTALL)
    first = next(figure for figure in figures if "Reverse KL" in figure)
    points = re.search(r'points="([^"]+)"', first)
    assert points is not None and len(points[1].split()) == 4
    rows = [json.loads(line) for line in (rich / "metrics.jsonl").read_text().splitlines()]
    known = data_of(page)["charts"]["reverse_kl"]["curves"][0]
    assert known["values"] == [pytest.approx(row["reverse_kl"], rel=1e-4) for row in rows]
    assert all(figure.count('<g class="alarm') == 2 for figure in figures)
    cut = next(figure for figure in figures if "Cut off" in figure)
    assert cut.count('<g class="alarm">') == 1 and first.count('<g class="alarm other">') == 2
    assert "optimizer.learning_rate=0.001</code> (set)" in page
    assert "step 2: truncation" in first and "rollout.max_new_tokens=8" in page


def test_every_element_is_closed(rich: Path) -> None:
    page = page_of(rich)
    tags = (
        "table",
        "tr",
        "td",
        "th",
        "svg",
        "figure",
        "section",
        "details",
        "pre",
        "article",
        "i",
        "p",
        "div",
        "g",
        "dl",
    )
    for tag in tags:
        assert len(re.findall(f"<{tag}[ >]", page)) == page.count(f"</{tag}>"), tag


def test_writing_it_again_gives_the_same_page(rich: Path) -> None:
    page = page_of(rich)
    assert write_report(rich).read_text() == page


def test_a_run_writes_its_page_at_its_end(finished: Path) -> None:
    assert "</html>" in page_of(finished) and "Token by token" in page_of(finished)


def test_every_file_but_the_recipe_may_be_absent(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path / "toy")
    write_report(folder)
    for path in sorted(folder.glob("*.json*")):
        if path.name != "recipe.json":
            path.unlink()
            assert "</html>" in write_report(folder).read_text(), path.name
    assert "has not finished a step yet" in page_of(folder)


def test_a_folder_that_is_no_run_is_named(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"holds no run: recipe.json is missing; name the folder of a run"
    ):
        write_report(tmp_path)
    with pytest.raises(RecipeError, match="there is no such folder"):
        write_report(tmp_path / "nowhere")
    folder = copied(finished, tmp_path / "toy")
    (folder / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(
        CheckpointError, match=r"metrics.jsonl line 1 is not a JSON object; remove the line"
    ):
        write_report(folder)


def test_a_row_that_is_still_being_written_is_left_out(finished: Path, tmp_path: Path) -> None:
    folder = copied(finished, tmp_path / "toy")
    whole = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(whole[:3]) + whole[3][:20])
    assert len(read_run(folder).metrics) == 3


def test_a_teacher_of_sampled_tokens_shows_what_there_is(models: Path, tmp_path: Path) -> None:
    changes = {"objective": {"signal": "sampled"}, "evaluation.prompts": 4, "train.steps": 2}
    folder = toy_run(models, tmp_path, changes).folder
    edit_rows(
        folder / "rollouts.jsonl", lambda row: row.update(divergence=[None] * len(row["tokens"]))
    )
    for name in ("before.json", "after.json"):
        edit(folder / name, _only_sampled)
    page = write_report(folder).read_text()
    data = data_of(page)["heat"]
    assert "divergence" not in [quantity["key"] for quantity in data["quantities"]]
    assert (
        data["quantities"][0]["key"] in ("student_entropy", "gap") and "Log-ratio by token" in page
    )
    assert data["views"][0]["sides"] == {}


def _only_sampled(value: dict[str, Any]) -> None:
    for trace in value["student"]["traces"]:
        nothing = [None] * len(trace["text"])
        trace.update(
            reverse_kl=nothing,
            student_entropy=nothing,
            teacher_entropy=nothing,
            student=None,
            teacher=None,
        )


@pytest.mark.parametrize(
    ("text", "control", "kind"),
    [
        ("<|im_end|>", True, "special"), ("\n\n", False, "newline"), ("  ", False, "space"), ("42", False, "digit"),
        (" the", False, "word start"), ("ing", False, "word piece"), ("é", False, "word piece"), (".", False, "punctuation"),
        (" +", False, "punctuation"), ("½", False, "other"), ("\\xe2", False, "word piece"),
    ],
)  # fmt: skip
def test_a_token_has_the_kind_that_it_reads_as(text: str, control: bool, kind: str) -> None:
    assert identify_kind(text, control) == kind and kind in KINDS


def rollout(
    step: int, prompt: str, divergence: list[float | None], mask: list[bool]
) -> dict[str, Any]:
    length = len(mask)
    return {
        "step": step, "prompt": prompt, "tokens": list(range(length)), "loss_mask": mask, "divergence": divergence,
        "policy_logprobs": [-1.0] * length, "teacher_logprobs": [-3.0] * length, "stop_reason": "stop", "reward": 1.0,
    }  # fmt: skip


def test_only_tokens_that_were_learned_from_count() -> None:
    rows = [rollout(1, "a", [1.0, 2.0, None], [True, False, True]), rollout(2, "b", [4.0], [True])]
    tokens = build_token_table(rows)
    assert (
        tokens.value.tolist() == [1.0, 4.0]
        and tokens.position.tolist() == [0, 0]
        and tokens.step.tolist() == [1, 2]
    )
    assert tokens.exact and tokens.estimate_mean(0).mean == 2.5  # type: ignore[union-attr]


def test_without_a_divergence_the_value_is_the_sampled_log_ratio() -> None:
    tokens = build_token_table([rollout(1, "a", [None, None], [True, True])])
    assert not tokens.exact and tokens.value.tolist() == [2.0, 2.0]


def test_a_value_has_the_colour_between_its_edges() -> None:
    quantity = Quantity("q", "q", "", NATS, tuple("01234567"))
    assert [choose_colour(value, quantity) for value in (0.0, 0.02, 0.3, 2.0, 99.0)] == [
        "0",
        "1",
        "4",
        "7",
        "7",
    ]
    assert choose_colour(None, quantity) == "none"


def test_an_axis_is_round_and_holds_its_values() -> None:
    axis = fit_axis([0.3, 7.7], 100.0, 0.0)
    assert (
        (axis.low, axis.high) == (0, 8)
        and axis.choose_ticks(4) == [0, 2, 4, 6, 8]
        and axis.project(4) == 50
    )
    assert fit_axis([1.0, 1.0000001], 100.0, 0.0).high == 1
    assert fit_axis([-3.0, 2.0], 100.0, 0.0).low == -4
    flat = [fit_axis([value], 100.0, 0.0) for value in (0.0, 2.0, -2.0)]
    assert [(axis.low, axis.high) for axis in flat] == [(0, 1), (0, 2), (-3, 0)]
    assert Axis(0.0, 1.0, 0.0, 10.0).choose_ticks(2) == [0.0, 0.5, 1.0]
    assert [format_tick(value) for value in (0, 0.25, 12, 120_000, 1e-5)] == [
        "0",
        "0.25",
        "12",
        "1.2e5",
        "1e-5",
    ]


def test_thinning_keeps_every_spike() -> None:
    points = [(float(step), 100.0 if step == 777 else float(step % 7)) for step in range(5000)]
    kept = downsample(points, 400)
    assert len(kept) <= 400 and (777.0, 100.0) in kept and kept == sorted(kept)
    assert downsample(points[:10]) == points[:10]
    assert compute_running_mean([(float(step), 2.0) for step in range(100)]) == [
        (float(step), 2.0) for step in range(100)
    ]


def test_rows_are_sampled_evenly_with_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "tokens": []}) + "\n" for step in range(1000)) + '{"torn'
    )
    found, total = sample_rows(path, 5, shapes.REJECTED)
    assert total == 1000 and [row["step"] for row in found] == [0, 249, 499, 749, 999]
    assert len(sample_rows(path, 5000, shapes.REJECTED)[0]) == 1000


def test_the_gap_recovered_is_a_ratio_over_prompts(rich: Path) -> None:
    run = read_run(rich)

    def with_scores(*rewards: float) -> dict[str, Any]:
        return {
            "answers": [
                {"prompt": str(place), "reward": reward} for place, reward in enumerate(rewards)
            ]
        }

    evaluations = {
        "before": with_scores(*[0.0] * 10),
        "after": with_scores(*[1.0] * 4, *[0.0] * 6),
        "teacher": with_scores(*[1.0] * 8, 0.0, 0.0),
    }
    found = estimate_recovery(_with(run, **evaluations))
    assert (
        found is not None
        and found.mean == pytest.approx(0.5)
        and 0 <= found.low < 0.5 < found.high <= 1
    )
    assert (
        estimate_recovery(_with(run, **{**evaluations, "teacher": evaluations["before"]})) is None
    )


def _with(run: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(run, **changes)


def test_what_was_dropped_adds_up(rich: Path) -> None:
    run = read_run(rich)
    metrics = [
        {"step": 1, "rollouts": 4.0, "length": 10.0, "tokens": 30.0, "from_dataset": 0.0},
        {
            "step": 2,
            "rollouts": 4.0,
            "length": 5.0,
            "tokens": 20.0,
            "from_dataset": 0.5,
            "nonfinite": 1.0,
        },
        {
            "step": 3,
            "rollouts": 4.0,
            "length": 5.0,
            "tokens": 20.0,
            "from_dataset": 0.0,
            "supervised": 5.0,
        },
        {
            "step": 4,
            "rollouts": 4.0,
            "length": 5.0,
            "tokens": 20.0,
            "from_dataset": 0.0,
            "supervised": 0.0,
        },
    ]
    rejected = [
        {"reason": "id 'a' was used before"},
        {"reason": "id 'b' was used before"},
        {"reason": "not JSON"},
    ]
    rejected.append({"reason": "not JSON", "file": "/data/heldout.jsonl"})
    run = _with(
        run,
        recipe={**run.recipe, "task": {"heldout": "heldout.jsonl"}},
        metrics=metrics,
        prompts={"used": 90, "too_long": 7},
        rejected=rejected,
    )
    section = build_dropped_section(run)
    assert section is not None
    lines = re.findall(
        r'<th scope="row">(.*?)</th><td class="n">(.*?)</td><td class="n">(.*?)</td>', section.body
    )
    assert lines == [
        ("used as training prompts", "90", "90.0 %"), ("too long", "7", "7.0 %"), ("rejected: id", "2", "2.0 %"),
        ("rejected: not JSON", "1", "1.0 %"), ("<b>together</b>", "<b>100</b>", "<b>100 %</b>"),
        ("supervised", "35", "35.0 %"), ("in updates that were skipped", "20", "20.0 %"),
        ("left out by filters, weights or advantages", "35", "35.0 %"),
        ("masked: not supervised", "10", "10.0 %"), ("<b>together</b>", "<b>100</b>", "<b>100 %</b>"),
        ("steps taken", "2", "50.0 %"), ("steps skipped: loss or gradient not finite", "1", "25.0 %"),
        ("steps skipped: no token to learn from", "1", "25.0 %"), ("<b>together</b>", "<b>4</b>", "<b>100 %</b>"),
    ]  # fmt: skip
    assert count_tokens(metrics) == (90.0, 100.0)


@pytest.mark.parametrize(
    ("verdict", "found", "word"),
    [
        ("GO", "BETTER", "held"),
        ("NO-GAP", "BETTER", "did not hold"),
        ("NO-GAP", "NO DETECTABLE CHANGE", "held"),
        ("INCONCLUSIVE", "BETTER", "neither"),
    ],
)
def test_what_was_foretold_is_held_against_the_outcome(
    rich: Path, verdict: str, found: str, word: str
) -> None:
    run = read_run(rich)
    low = 0.4 if found == "BETTER" else -0.1
    gain = {"mean": low + 0.1, "low": low, "high": low + 0.2}
    judged = {"verdict": found, "reasons": ["so it is"], "next": []}
    summary = {**run.summary, "gain": gain, "verdict": judged}
    run = _with(run, doctor={"verdict": verdict, "checks": []}, summary=summary)
    assert word in build_page_parts(run).html["doctor"]


def test_a_gain_on_few_prompts_has_no_interval_on_the_page(rich: Path) -> None:
    """Check the text: a gain over two prompts read [1.00, 1.00], and then "the student is better"."""
    run = read_run(rich)
    gain = {"mean": 1.0, "low": 1.0, "high": 1.0}
    before = {**run.summary["before"], "prompts": 2}
    doctor = {"verdict": "GO", "checks": []}
    run = _with(run, doctor=doctor, summary={**run.summary, "gain": gain, "before": before})
    html = build_page_parts(run).html
    assert "2 held-out prompts, which are too few for an interval" in html["verdict"]
    assert "to +1.00" not in html["verdict"] and "the student is better" not in html["verdict"]
    assert "too few prompts" in html["doctor"]
    assert describe_gain(Interval(1.0, -0.3, 1.0), 2) == (
        "1.00 (2 held-out prompts: too few for an interval)"
    )


def test_an_interval_of_zero_width_is_not_shown(rich: Path) -> None:
    run = read_run(rich)
    gain = {"mean": 0.2, "low": 0.2, "high": 0.2}
    before = {**run.summary["before"], "prompts": 12}
    run = _with(run, summary={**run.summary, "gain": gain, "before": before})
    html = build_page_parts(run).html["verdict"]
    assert "all prompts agree; no interval" in html and "95 % interval +0.20" not in html
    assert describe_gain(Interval(**gain), 12) == "0.20 (all prompts agree; no interval)"


def test_the_verdict_is_the_first_line_of_the_page(rich: Path) -> None:
    run = read_run(rich)
    verdict = {
        "verdict": "COLLAPSED",
        "reasons": ["<b>15 times"],
        "next": ["practicum doctor RUN"],
    }
    html = build_page_parts(_with(run, summary={**run.summary, "verdict": verdict})).html
    start = html["verdict"].index("COLLAPSED")
    assert start < html["verdict"].index('class="gain"')
    assert "&lt;b&gt;15 times" in html["verdict"]
    assert "<code>practicum doctor RUN</code>" in html["verdict"]
    assert 'class="outcome bad"' in html["verdict"]
    unfinished = build_page_parts(_with(run, summary=None)).html["verdict"]
    assert "outcome" not in unfinished


def test_a_reward_between_0_and_1_is_a_number(rich: Path) -> None:
    """Check colours: a reward of 0.8 was shown in red as wrong."""
    run = read_run(rich)
    trace = {**run.after["traces"][0], "reward": 0.8}
    samples = [{**run.summary["samples"][0], "reward_before": 0.25, "reward_after": 0.8}]
    run = _with(
        run,
        after={**run.after, "traces": [trace]},
        summary={**run.summary, "samples": samples},
    )
    html = build_page_parts(run).html
    heat = next(part for part in html.values() if 'class="graded"' in part)
    assert "reward 0.8" in heat
    assert 'class="wrong"' not in html["answers"] and "reward 0.25" in html["answers"]
    assert "1 got a higher reward, 0 a lower one, 0 the same" in html["answers"]


def test_the_doctor_is_found_in_the_folder_or_beside_it(rich: Path, tmp_path: Path) -> None:
    shutil.copytree(rich, tmp_path / "toy")
    shutil.move(tmp_path / "toy" / "doctor.json", tmp_path / "toy.doctor.json")
    found = build_page_parts(read_run(tmp_path / "toy")).html["doctor"]
    assert "<b>GO</b> was predicted (no check failed)" in found
    assert "-1.2 [-1.5, -0.9]" in found and "<code>student.stop=[2]</code>" in found
    edit(
        tmp_path / "toy.doctor.json",
        lambda value: value.update(
            verdict="GO", checks=[{"id": "P2", "value": 1, "low": 0, "high": 2}]
        ),
    )
    assert "1 [0, 2]" in build_page_parts(read_run(tmp_path / "toy")).html["doctor"]


def test_pass_at_k_and_agreement_where_there_are_several_answers(
    models: Path, tmp_path: Path
) -> None:
    changes = {
        "evaluation.prompts": 6,
        "evaluation.samples": 4,
        "evaluation.temperature": 1.0,
        "rollout.n": 2,
        "train.steps": 2,
    }
    folder = toy_run(models, tmp_path, changes).folder
    page = page_of(folder)
    assert "pass@4" in page and "Confidence is the share of a prompt's answers" in page
    assert "different answers of a prompt" in page and "distinct 2-grams" in page


def test_one_answer_a_prompt_is_as_sure_as_its_likelihood(rich: Path) -> None:
    page = page_of(rich)
    assert "pass@" not in page and "gave its whole text" in page and "ECE" in page


def test_a_traced_answer_reads_as_it_was_written(rich: Path) -> None:
    before = json.loads((rich / "before.json").read_text())["student"]
    assert len(before["traces"]) == 6
    for trace in before["traces"]:
        length = len(trace["text"])
        for name in (
            "control",
            "logprobs",
            "teacher_logprobs",
            "reverse_kl",
            "student_entropy",
            "teacher_entropy",
        ):
            assert len(trace[name]) == length, name
        for place in range(length):
            shares = trace["teacher"]["probabilities"][place]
            assert (
                shares == sorted(shares, reverse=True)
                and 0 < sum(shares) <= 1 + 1e-6
                and len(shares) == 5
            )
            said, mine = trace["text"][place], trace["student"]
            if said in mine["texts"][place] and not trace["control"][place]:
                share = mine["probabilities"][place][mine["texts"][place].index(said)]
                assert share == pytest.approx(
                    torch.tensor(trace["logprobs"][place]).exp().item(), rel=1e-4
                )
        assert all(value >= -1e-6 for value in trace["reverse_kl"])
        spoken = "".join(
            text
            for text, control in zip(trace["text"], trace["control"], strict=True)
            if not control
        )
        whole = next(
            answer["text"] for answer in before["answers"] if answer["prompt"] == trace["prompt"]
        )
        assert spoken == "".join(whole.split("<")[0]) or "<" in whole


def test_the_page_of_a_pipeline_still_has_its_style(rich: Path, tmp_path: Path) -> None:
    shutil.copytree(rich, tmp_path / "toy")
    from practicum.report import STYLE

    assert (
        ".scroll" in STYLE and ".axis" in STYLE and "</style" not in STYLE and HOSTILE not in STYLE
    )
