"""Results of another design decide nothing and are not extended."""

from dataclasses import replace

import pytest
import yaml

from laboratory import load_reproduction
from laboratory.page import judge_current, render_claims, render_study
from laboratory.results import Results
from practicum.errors import RecipeError
from practicum.recipe import parse_recipe
from practicum.runs.opening import build_task

PAIR = {"hidden_size": 16, "layers": 1, "heads": 2}
DESIGN = {
    "question": "Which one?",
    "student": {"model": {**PAIR, "seed": 1}},
    "teacher": {"type": "model", "model": {**PAIR, "seed": 2}},
    "task": {"type": "reverse", "train_size": 8, "heldout_size": 8},
    "train": {"steps": 2},
    "arms": {
        "one": {"about": "one", "set": {}},
        "two": {"about": "two", "set": {"train": {"steps": 4}}},
    },
    "learning_rates": [0.001],
    "full": {"seeds": 2},
    "claims": [
        {
            "claim": "one is better",
            "paper": "2306.13649",
            "theirs": "1",
            "tests": [{"better": "one", "than": "two"}],
        }
    ],
}


def load(folder, **changes):
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump({**DESIGN, **changes}))
    return load_reproduction(file)


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({"question": "Another question?", "about": "a description", "remarks": "late"}, True),
        ({"full": {"seeds": 5}}, True),
        ({"quick": {"seeds": 1, "set": {"train": {"steps": 1}}}}, True),
        ({"claims": [{**DESIGN["claims"][0], "theirs": "2"}]}, True),
        ({"arms": {**DESIGN["arms"], "one": {"about": "first", "set": {}}}}, True),
        ({"train": {"steps": 3}}, False),
        ({"learning_rates": [0.001, 0.003]}, False),
        ({"full": {"seeds": 2, "set": {"train": {"prompts_per_step": 4}}}}, False),
        ({"arms": {**DESIGN["arms"], "one": {"about": "one", "set": {"seed": 4}}}}, False),
        (
            {
                "arms": {"one": DESIGN["arms"]["one"], "2": DESIGN["arms"]["two"]},
                "claims": [{**DESIGN["claims"][0], "tests": [{"better": "one", "than": "2"}]}],
            },
            False,
        ),
    ],
)
def test_a_design_is_all_that_the_runs_depend_on(tmp_path, changes, is_same):
    assert (
        load(tmp_path).digest_design("full") == load(tmp_path, **changes).digest_design("full")
    ) is is_same


def test_results_of_another_design_give_no_verdict(tmp_path):
    study = load(tmp_path)
    readings = {"one": {"accuracy": {0: 0.9, 1: 0.8}}, "two": {"accuracy": {0: 0.2, 1: 0.1}}}
    current = Results(
        "small",
        "full",
        [0, 1],
        readings,
        design=study.digest_design("full"),
        versions={"commit": "abc1234", "processor": "a processor"},
    )
    old = replace(current, design="")
    claim = study.spec.claims[0]
    assert judge_current(study, claim, current)[0] != "old design"
    assert judge_current(study, claim, old) == ("old design", [])
    assert "**old design**" in render_claims([study], {"small": old}, {})
    assert "Of 0 differences" in render_claims([study], {"small": old}, {})
    assert "have changed since these runs" in render_study(study, old)
    assert "commit abc1234, processor a processor" in render_study(study, current)


def test_results_with_other_seeds_stand_next_to_the_verdict_and_are_counted(tmp_path):
    study = load(tmp_path)
    readings = {"one": {"accuracy": {0: 0.9, 1: 0.8}}, "two": {"accuracy": {0: 0.2, 1: 0.1}}}
    first = Results("small", "full", [0, 1], readings, design=study.digest_design("full"))
    contrary = {
        "one": {"accuracy": {100: 0.2, 101: 0.1}},
        "two": {"accuracy": {100: 0.9, 101: 0.8}},
    }
    again = replace(first, seeds=[100, 101], readings=contrary)
    assert "Again" not in render_study(study, first)
    assert "**holds**" in render_study(study, first)
    page = render_study(study, first, again)
    assert "Again: **the contrary" in page and "--first-seed 100`: 2 seeds" in page
    assert "Again: **holds**" in render_study(study, first, first)
    old = replace(again, design="")
    assert "Again: **" not in render_study(study, first, old)
    stored = {"small": first}
    assert "small: 1 of 1 verdicts" in render_claims([study], stored, stored)
    assert "small: 0 of 1 verdicts" in render_claims([study], stored, {"small": again})
    assert "Run again" not in render_claims([study], stored, {"small": old})


def test_a_measure_that_is_not_taken_at_that_time_is_refused_before_the_runs(tmp_path):
    test = {"better": "one", "than": "two", "measure": "accuracy/words", "at": "equal_flops"}
    with pytest.raises(RecipeError, match=r"claims\[0\]: accuracy/words is only measured at"):
        load(tmp_path, claims=[{**DESIGN["claims"][0], "tests": [test]}])


def test_the_held_out_products_of_concise_are_in_no_training_row_in_either_order():
    study = load_reproduction("concise")
    recipe = parse_recipe(study.build_recipe("told_nothing", study.spec.full), "concise")
    task = build_task(recipe)
    trained, heldout = (
        {tuple(sorted(prompt.id.split("x"))) for prompt in prompts}
        for prompts in (task.train_prompts(), task.heldout_prompts())
    )
    assert trained and not trained & heldout
    assert len(task.heldout_prompts()) == recipe.evaluation.prompts
    for prompt in task.heldout_prompts():
        first, second = prompt.id.split("x")
        assert prompt.question == f"What is {first} times {second}?"
        assert prompt.answer == str(int(first) * int(second))
