"""The control of a recipe that joins a reward and a teacher: what remains with the teacher off, and its option."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from papers.worlds import gradient, random_batch

from practicum.errors import RecipeError
from practicum.functional.estimators import CORRECTIONS
from practicum.objective import VERIFIER, Term
from practicum.objective.signals.unlikely import Config as Unlikely
from practicum.recipe import (
    SECTIONS,
    Recipe,
    build_control,
    list_recipe_names,
    load_recipe,
    parse_recipe,
    resolve_recipe,
)
from practicum.recipe.controls import list_teaching_scorers
from practicum.rollouts.sources.student import Config as StudentSource
from practicum.run_dir import read_json
from practicum.runs import run
from practicum.runs.stages import Pipeline, load_pipeline_or_recipe
from practicum.types import Judgement, Rollout


def every_recipe() -> dict[str, Recipe]:
    """Return every packaged recipe, and every stage of a pipeline, by its name."""
    recipes = {}
    for name in list_recipe_names():
        found = load_pipeline_or_recipe(name)
        parts = found.build_recipes() if isinstance(found, Pipeline) else {"": found}
        recipes |= {f"{name} {stage}".strip(): recipe for stage, recipe in parts.items()}
    return recipes


RECIPES = every_recipe()
CONTROLS = {
    name: control
    for name, recipe in RECIPES.items()
    if (control := build_control(recipe)) is not None
}


def is_taught(recipe: Recipe) -> bool:
    """Return whether the student learns from a teacher or a dataset in addition to the verifier."""
    return recipe.objective.signal is not None or not {"teacher", "dataset"}.isdisjoint(
        recipe.rollout.source.other_writers
    )


def test_recipes_that_join_a_reward_and_a_teacher_have_a_control() -> None:
    joined = "echo hdpo kdrl llm4teach luffy mimo-mopd pi-distill rlad rlsd rpd scope sdpg skill-sd slime srpo vold-text"
    assert set(CONTROLS) >= {*(f"papers/{name}" for name in joined.split()), "teams/mimo_v2 mopd"}
    rewarded = {
        name
        for name, recipe in RECIPES.items()
        if any(term.signal.name == "score" for term in recipe.objective.losses)
    }
    rewarded |= {
        name
        for name, recipe in RECIPES.items()
        if any(term.has_reward for term in recipe.objective.losses)
    }
    users = {"served/openclaw-rl"}
    assert {name for name in rewarded if is_taught(RECIPES[name])} - users <= set(CONTROLS)


def test_without_a_teacher_or_without_a_reward_there_is_none() -> None:
    for name in (
        "papers/grpo",
        "papers/gkd",
        "papers/sft",
        "papers/dagger",
        "served/openclaw-rl",
        "default rl_polish",
        "default self_distillation",
    ):
        assert build_control(RECIPES[name]) is None, name
    # Here the verifier only selects or weights the teacher's signal: with the teacher off nothing remains.
    for name in ("papers/sdpo", "papers/caopd", "papers/sd-zero", "papers/paced"):
        assert build_control(RECIPES[name]) is None, name


def test_an_environment_that_is_learned_from_is_a_teacher() -> None:
    """For ECHO, GRPO remains, term for term."""
    recipe, control = RECIPES["papers/echo"], CONTROLS["papers/echo"]
    assert control.objective.losses == recipe.objective.losses[:1]


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_asks_no_teacher_and_changes_nothing_else(name: str) -> None:
    recipe, control = RECIPES[name], CONTROLS[name]
    assert not is_taught(control)
    assert control.teacher.type == "none"
    assert any(term.learns_from_reward for term in control.objective.losses)
    assert parse_recipe(resolve_recipe(control), name) == control
    assert build_control(control) is None
    before, after = resolve_recipe(recipe), resolve_recipe(control)
    words = {"name", "about", "paper", "claim", "differs"}
    assert {key for key in before if before[key] != after[key]} <= {*SECTIONS, *words}
    # The turns of the student's conversations are its own, so the control also learns from them.
    source = "turns" if recipe.rollout.source.type == "turns" else "student"
    assert {**before["rollout"], "source": source} == after["rollout"]
    assert before["objective"]["aggregate"] == after["objective"]["aggregate"]
    assert after["about"].startswith("control: ") and after["name"].endswith("-teacher-off")


def with_teacher_at_zero(term: Term, recipe: Recipe) -> Term:
    """Return a term with the answers, correction and reward of its control."""
    arguments = {**term.correction.arguments, **CORRECTIONS[term.correction.name].without_teacher}
    filtered = "all" if term.signal.name == "score" else term.filter
    correction = term.correction.model_copy(update={"arguments": arguments})
    # A judge that rejects nothing leaves the verifier's reward; a critic stays.
    scorer = VERIFIER if term.scorer in list_teaching_scorers(recipe) else term.scorer
    return term.model_copy(update={"correction": correction, "filter": filtered, "scorer": scorer})


def judge_alike(rollouts: list[Rollout], recipe: Recipe) -> list[Rollout]:
    """Return the rollouts with a judgement of each scorer of the recipe, of whole answers and of tokens."""
    return [
        replace(
            rollout,
            judgements={
                name: Judgement(number % 3 / 2, torch.linspace(-0.5, 0.8, len(rollout.tokens)))
                for name in recipe.scorers
            },
        )
        for number, rollout in enumerate(rollouts)
    ]


@pytest.mark.parametrize("name", CONTROLS)
def test_a_teacher_that_says_what_the_student_says_adds_nothing_to_its_control(name: str) -> None:
    recipe = RECIPES[name]
    # Terms after the teacher's prompt have a pass of their own, which a control leaves out.
    losses = tuple(
        with_teacher_at_zero(term, recipe)
        for term in recipe.objective.losses
        if term.context == "student"
    )
    agreed = recipe.objective.model_copy(update={"losses": losses})
    for seed in range(3):
        # More tokens than a paper's bins of actions.
        batch = random_batch(seed, 300)
        # A target with a reference compares the teacher with it, so there the two agree.
        compares = any(term.target.name == "log_linear" for term in losses)
        teacher = batch.R if compares else batch.S
        batch = replace(batch, T=teacher, answers=judge_alike(batch.answers, recipe))
        expected = gradient(CONTROLS[name].objective.model_dump(), batch)
        assert expected.norm() > 0
        torch.testing.assert_close(
            gradient(agreed.model_dump(), batch), expected, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("seed", range(3))
def test_a_reward_that_the_teacher_weighs_is_plain_at_strength_0(seed: int) -> None:
    batch = random_batch(seed)
    plain = load_recipe("papers/rlsd", ["reward=modulate(strength=0)"]).objective
    control = load_recipe("papers/rlsd", ["teacher=off"]).objective
    torch.testing.assert_close(
        gradient(plain.model_dump(), batch), gradient(control.model_dump(), batch)
    )


def test_an_added_reward_keeps_its_size() -> None:
    recipe = load_recipe(
        "papers/slime",
        ["reward=add_advantage(0.5, leave_one_out)", "coefficient=3", "weights=prefix(4)"],
    )
    control = build_control(recipe)
    assert control is not None
    (term,) = control.objective.losses
    assert (str(term.signal.model_dump()), term.coefficient) == (
        "score(advantage=leave_one_out, unit=rollout)",
        1.5,
    )
    assert str(term.weights.model_dump()) == "prefix(length=4)"
    assert term.correction == recipe.objective.losses[0].correction


def test_what_is_about_the_teacher_does_not_stay() -> None:
    changes = [
        "clip=advantage(-1, 1)",
        "weights=trust(2)",
        "samples=ppl_softmax(teacher)",
        "estimator=score_function(0.5)",
    ]
    (term,) = load_recipe("papers/slime", [*changes, "teacher=off"]).objective.losses
    assert term == Term.model_validate({"signal": "score", "correction": "ratio_clip(0.2, 0.28)"})
    losses = "[{signal: text, divergence: ce}, {signal: score}, {signal: text, divergence: ce, filter: correct}]"
    likelihood = load_recipe(
        "papers/pi-distill", [f"objective.losses={losses}", "teacher=off"]
    ).objective
    assert [term.signal.name for term in likelihood.losses] == ["score", "text"], (
        "its own answers are not imitated, unless right"
    )


def test_the_answers_that_a_filter_left_to_the_teacher_are_the_rewards() -> None:
    assert [term.filter for term in CONTROLS["papers/srpo"].objective.losses] == ["all"]
    assert [term.filter for term in CONTROLS["papers/hdpo"].objective.losses] == ["all"]
    # Likelihood of right answers learns from the reward only by its filter.
    assert [term.filter for term in CONTROLS["papers/scope"].objective.losses] == ["correct"]


def test_a_schedule_follows_its_term() -> None:
    losses = "[{signal: full, coefficient: 'linear(1, 0)'}, {signal: score, coefficient: 'cosine(1, 0.5)'}]"
    control = load_recipe("papers/vold-text", [f"objective.losses={losses}", "teacher=off"])
    assert {path: schedule.type for path, schedule in control.schedules.items()} == {
        "objective.losses.0.coefficient": "cosine"
    }


@pytest.mark.parametrize(
    ("changes", "schedules"),
    [
        (["reward=add_advantage(coefficient=linear(1, 0))"], {"objective.losses.0.coefficient"}),
        (["coefficient=linear(1, 0)"], {"objective.losses.0.coefficient"}),
        (
            ["correction=ratio_clip(low=linear(0.2, 0.1), high=0.28)"],
            {"objective.losses.0.correction.low"},
        ),
        (
            [
                "rollout.source=mix(student=linear(0, 1), other=teacher)",
                "rollout.max_new_tokens=linear(4, 8)",
            ],
            {"rollout.max_new_tokens"},
        ),
        (
            [
                "reward=modulate(strength=linear(1, 0))",
                "optimizer.learning_rate=linear(1e-3, 1e-4)",
            ],
            {"optimizer.learning_rate"},
        ),
    ],
)
def test_schedules_go_where_their_numbers_go(changes: list[str], schedules: set[str]) -> None:
    control = load_recipe("papers/slime", [*changes, "teacher=off"])
    assert set(control.schedules) == schedules


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            ["coefficient=2", "reward=add_advantage(coefficient=linear(1, 0))"],
            "is multiplied by 2; write 1 there",
        ),
        (
            ["coefficient=linear(1, 0)", "reward=add_advantage(coefficient=linear(1, 0))"],
            "another number that changes too",
        ),
    ],
)
def test_a_product_of_numbers_that_change_is_refused(changes: list[str], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason) as refused:
        load_recipe("papers/slime", [*changes, "teacher=off"])
    assert "\n" not in str(refused.value)


def test_what_a_monitor_sets_goes_where_its_number_goes() -> None:
    changes = "{objective.losses.1.coefficient: x0.5, objective.losses.0.coefficient: 2.0, optimizer.learning_rate: x0.1}"
    control = load_recipe("papers/vold-text", [f"monitors.M21.set={changes}", "teacher=off"])
    assert control.monitors["M21"].set == {
        "objective.losses.0.coefficient": 2.0,
        "optimizer.learning_rate": "x0.1",
    }


# Its door.


def test_the_switch_comes_after_all_other_overrides() -> None:
    control = load_recipe(
        "papers/kdrl", ["teacher=off", "train.steps=3", "objective.losses.1.coefficient=1"]
    )
    assert (control.name, control.train.steps, len(control.objective.losses)) == (
        "kdrl-teacher-off",
        3,
        1,
    )
    assert load_recipe("papers/kdrl", ["name=mine", "teacher=off"]).name == "mine"


def test_a_pipeline_has_the_teacher_off_where_a_stage_joins_the_two() -> None:
    pipeline, control = (
        load_pipeline_or_recipe("teams/mimo_v2"),
        load_pipeline_or_recipe("teams/mimo_v2", ["teacher=off"]),
    )
    assert isinstance(pipeline, Pipeline) and isinstance(control, Pipeline)
    assert control.recipe.name == "mimo_v2-teacher-off"
    changed = [
        name
        for name, recipe in control.build_recipes().items()
        if recipe != pipeline.build_recipes()[name]
    ]
    assert changed == ["mopd"]
    assert control.build_recipes()["mopd"].objective == CONTROLS["teams/mimo_v2 mopd"].objective


@pytest.mark.parametrize("name", ["papers/gkd", "papers/grpo", "teams/qwen3"])
def test_a_recipe_without_a_control_says_so_in_one_line(name: str) -> None:
    with pytest.raises(RecipeError, match="teacher=off keeps only the reward") as refused:
        load_pipeline_or_recipe(name, ["teacher=off"])
    assert "\n" not in str(refused.value)


def test_the_run_folder_of_a_control_says_what_it_is(tmp_path: Path) -> None:
    short = [
        "train.steps=1",
        "train.prompts_per_step=2",
        "evaluation.prompts=4",
        "student.model.pretrain.steps=1",
    ]
    result = run("papers/kdrl", [*short, "teacher=off"], out=tmp_path)
    assert result.folder.name == "kdrl-teacher-off"
    recipe = read_json(result.folder / "recipe.json")["recipe"]
    assert recipe["about"].startswith("control: only the reward") and recipe["teacher"] == {
        "type": "none"
    }
    assert "control: only the reward" in (result.folder / "report.html").read_text(encoding="utf-8")


def test_the_students_answers_are_as_many() -> None:
    control = CONTROLS["papers/hdpo"]
    assert (control.rollout.source, control.rollout.n) == (StudentSource(), 4)


def test_a_judge_in_words_is_a_teacher() -> None:
    control = build_control(load_recipe("papers/ovd"))
    assert control is not None and not control.scorers and control.teacher.type == "none"
    (term,) = control.objective.losses
    assert term.scorer == "verifier" and term.learns_from_reward
    assert control.rollout.source.type == "student"
    alone = resolve_recipe(load_recipe("papers/ovd"))
    alone["rollout"]["source"] = "replace(grade, writer=student)"
    without_judge = build_control(parse_recipe(alone, "ovd"))
    assert without_judge is not None and without_judge.rollout.source.type == "student"
    free = build_control(load_recipe("papers/ovd"), Unlikely())
    assert free is not None and not free.scorers and len(free.objective.losses) == 2
