"""The scaling law: a known law is recovered, the form is found, and the process is what the task draws from."""

import itertools
import json
import math
from typing import Any

import pytest
import torch

from laboratory.scaling import chain
from laboratory.scaling.__main__ import (
    PREDICTIONS,
    SUMMARY,
    choose_rate,
    list_wider_rates,
    read_cells,
)
from laboratory.scaling.cells import AUTHORS, list_cells
from laboratory.scaling.law import (
    EXPONENTS,
    FORMS,
    Form,
    build_table,
    choose_form,
    find_best_size,
    fit,
    predict_errors,
)
from laboratory.scaling.summary import (
    average_miss,
    count_held,
    fit_trend,
    list_pairs,
    measure_pairs,
    render_law,
    select_cells,
    summarise_law,
)
from practicum.errors import DataError

TRUE = {
    "E": -4.0,
    "A": -1.0,
    "B": -1.3,
    "C": -1.6,
    "p": 1.0,
    "student": 0.4,
    "tokens": 0.6,
    "quality": 0.8,
    "teacher": 0.1,
}
SIZES = {24: 18e3, 48: 70e3, 96: 280e3, 192: 1.1e6}


def write_cells(form: Form, noise: float = 0.0) -> list[dict[str, Any]]:
    """Return the cells of a grid under a known law, with the means of the features at 0."""
    draw = torch.Generator().manual_seed(0)
    rows: list[dict[str, Any]] = [
        {
            "part": "grid",
            "draw": draw_number,
            "student": student,
            "teacher": teacher,
            "quality": quality,
            "tokens": tokens,
            "author": "student",
            "divergence": "reverse_kl",
            "answers": 1,
            "student_parameters": SIZES[student],
            "teacher_parameters": SIZES[teacher],
            "learned_tokens": tokens * 0.97,
            "teacher_errors": {"error": 0.05 * 3**quality * (1 + 0.3 * draw_number)},
        }
        for draw_number, student, teacher, quality, tokens in itertools.product(
            (0, 1), SIZES, (48, 96, 192), (0, 1), (12_500, 50_000, 200_000)
        )
    ]
    for row in rows:
        row["after"] = {"error": 1.0}
    features = build_table(rows, "error").features
    parameters = torch.tensor([[TRUE[name] for name in form.parameters]], dtype=torch.float64)
    errors = form.read(parameters, features[None])[0]
    errors = errors + noise * torch.randn(len(rows), generator=draw, dtype=torch.float64)
    for row, error in zip(rows, errors.exp().tolist(), strict=True):
        row["after"] = {"error": error}
    return rows


@pytest.mark.parametrize("name", FORMS)
def test_a_known_law_is_recovered(name: str):
    fitted = fit(FORMS[name], build_table(write_cells(FORMS[name]), "error"), resamples=2)
    assert fitted.misses.abs().max() < 0.02
    for exponent in EXPONENTS:
        assert fitted.get_exponent(exponent).mean == pytest.approx(TRUE[exponent], abs=0.08)


@pytest.mark.parametrize("name", ["additive", "broken"])
def test_the_form_is_found_by_the_widest_student(name: str):
    form, misses = choose_form(write_cells(FORMS[name], noise=0.01), "error")
    assert form.name == name
    assert misses[name] < 0.05 < misses["nearest cell"]


def test_intervals_hold_the_truth_and_single_runs():
    rows = write_cells(FORMS["product"], noise=0.05)
    fitted = fit(FORMS["product"], build_table(rows, "error"), resamples=100)
    for exponent in EXPONENTS:
        interval = fitted.get_exponent(exponent)
        assert interval.low - 0.02 <= TRUE[exponent] <= interval.high + 0.02
    inside = sum(
        interval.low <= row["after"]["error"] <= interval.high
        for row, interval in zip(rows, predict_errors(fitted, rows, "error"), strict=True)
    )
    assert 0.7 < inside / len(rows) < 0.95


def test_more_operations_ask_for_a_larger_student():
    rows = write_cells(FORMS["additive"])
    fitted = fit(FORMS["additive"], build_table(rows, "error"), resamples=20)
    small, large = (find_best_size(fitted, budget, 280e3, 0.1) for budget in (1e10, 1e12))
    assert small.mean < large.mean
    # With a free teacher and exponents a and b, the best size grows as budget^(b / (a + b)).
    sizes = [find_best_size(fitted, budget, 1.0, 0.1).mean for budget in (1e10, 1e12)]
    assert math.log(sizes[1] / sizes[0]) / math.log(100) == pytest.approx(0.6, abs=0.05)


def test_pairs_differ_in_one_thing_alone():
    rows = write_cells(FORMS["product"])
    others = [
        {**row, "author": "teacher", "after": {"error": 2 * row["after"]["error"]}}
        for row in rows[::2]
    ]
    pairs = list_pairs([*rows, *others], author="teacher")
    assert len(pairs) == len(others)
    assert all(ratio == pytest.approx(math.log(2)) for _, ratio in measure_pairs(pairs, "error"))


@pytest.mark.parametrize(("slope", "crossing"), [(0.3, math.exp(-0.5 / 0.3)), (0.0, None)])
def test_the_crossing_of_two_ways_is_found_where_there_is_one(slope: float, crossing: float | None):
    rows = write_cells(FORMS["product"])
    draw = torch.Generator().manual_seed(1)
    others = []
    for row in rows:
        size = math.log(row["student_parameters"] / row["teacher_parameters"])
        ratio = 0.5 + slope * size + 0.02 * torch.randn(1, generator=draw).item()
        error = row["after"]["error"] * math.exp(ratio)
        others.append({**row, "author": "teacher", "after": {"error": error}})
    trend = fit_trend(list_pairs([*rows, *others], author="teacher"), "error", relative=True)
    assert trend.slope.low <= slope <= trend.slope.high
    assert (trend.crossing is None) == (crossing is None)
    if trend.crossing is not None and crossing is not None:
        assert trend.crossing.mean == pytest.approx(crossing, rel=0.15)


def test_a_summary_is_rendered_as_it_is_stored():
    rows = write_cells(FORMS["broken"], noise=0.02)
    for row in rows:
        row["after"] |= {"modelling": 0.1, "generation": 0.2}
    summary = summarise_law(rows, {}, resamples=5)
    stored = json.loads(json.dumps(summary))
    assert stored == summary
    text = render_law(stored)
    assert "broken" in text and "parameters of the student" in text


def test_the_grid_has_every_pair_of_quantities():
    cells = list_cells("grid")
    assert len({cell.name for cell in cells}) == len(cells) == 184
    for first, second in itertools.combinations(("student", "teacher", "quality", "tokens"), 2):
        met = {(getattr(cell, first), getattr(cell, second)) for cell in cells}
        levels = [{getattr(cell, name) for cell in cells} for name in (first, second)]
        assert len(met) == len(levels[0]) * len(levels[1])


def test_texts_follow_the_process():
    process = chain.Chain(seed=3)
    texts = process.sample(4000, chain.ORDER + 8, "train")
    logprobs = process.read(texts)
    assert logprobs.exp().sum(dim=-1) == pytest.approx(torch.ones(4000, 8), abs=1e-5)
    letters = texts[:, chain.ORDER :, None]
    written = -logprobs.gather(2, letters).mean()
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1).mean()
    assert written == pytest.approx(entropy.item(), abs=0.02)
    assert not torch.equal(texts[:10], process.sample(4000, chain.ORDER + 8, "heldout")[:10])


def test_the_page_says_what_the_recorded_cells_show():
    """The conclusions of docs/scaling-law.md, from results/scaling_law.json."""
    recorded = {row["name"]: row for row in read_cells()}
    assert list_wider_rates(list_cells("rates"), recorded) == [], "a best rate is at an edge"
    summary = json.loads(SUMMARY.read_text("utf-8"))
    for fitted in summary["fits"].values():
        misses = fitted["misses"]
        assert fitted["form"] == "broken" == min(misses, key=lambda name: misses[name])
        mean, low, high = fitted["exponents"]["teacher"]
        assert low < 0 and high < 0.01 and 4**-mean == pytest.approx(1.02, abs=0.004)
        assert low < 1 < fitted["exponents"]["quality"][2]
        assert fitted["exponents"]["tokens"][1] > 2 * fitted["exponents"]["student"][2]
    student, teacher = (summary["fits"][name]["exponents"]["teacher"] for name in AUTHORS)
    assert teacher[2] < 0 < student[2]
    for row in summary["split"]:
        assert row["size"][2] < row["teacher"] and row["teacher"] > 4 * row["size"][0]
    for trend in summary["trends"].values():
        assert trend["crossing"] is None and trend["slope"]["low"] < 0 < trend["slope"]["high"]
    ratios = {(row["title"], row["width"]): row for row in summary["pairs"]}
    for (title, _), row in ratios.items():
        if "teacher's answers" in title:
            assert row["error"][2] < 1
        elif "answers per prompt" in title:
            assert row["error"][0] > 1 and row["error"][1] > 0.99
        else:
            assert row["modelling"][2] < 1 and row["generation"][0] > 0.995


def test_the_page_says_how_the_predictions_ended():
    larger = json.loads(SUMMARY.read_text("utf-8"))["larger"]
    predictions = json.loads(PREDICTIONS.read_text("utf-8"))
    assert {row["name"]: row["predicted"] for row in larger} == predictions
    same, wider = ([row for row in larger if row["width"] == width] for width in (192, 384))
    assert (len(same), len(wider)) == (8, 8)
    assert (count_held(same), count_held(wider)) == (8, 2)
    assert 5.5 < average_miss(same, "nearest") / average_miss(same, "predicted") < 6.5
    assert average_miss(wider, "predicted") == pytest.approx(
        average_miss(wider, "nearest"), rel=0.02
    )
    assert max(row["error"] / row["predicted"][0] for row in wider) == pytest.approx(1.84, abs=0.01)
    errors = {row["name"]: row["error"] for row in wider}
    for name, error in errors.items():
        assert errors[name.replace("student", "teacher")] <= error


def test_a_cell_without_a_tried_rate_is_refused():
    with pytest.raises(DataError, match="run the part `rates` first"):
        choose_rate(list_cells("grid")[0], {})


def test_the_recorded_exponents_are_those_of_the_recorded_cells():
    summary = json.loads(SUMMARY.read_text("utf-8"))
    for author, recorded in summary["fits"].items():
        cells = select_cells(read_cells(), author=author)
        assert recorded["cells"] == len(cells)
        fitted = fit(FORMS[recorded["form"]], build_table(cells, "error"), resamples=1)
        for name in EXPONENTS:
            mean = fitted.get_exponent(name).mean
            assert mean == pytest.approx(recorded["exponents"][name][0], abs=1e-3)
