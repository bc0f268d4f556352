"""The counts of a run: by hand, as sums of its steps, separate from its evaluations, and the budget that ends it."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from toy import assert_same_run, curve, forked, make_model, rows, toy_run

from practicum.costs import (
    BudgetTracker,
    Ledger,
    ModelDims,
    UsageByPhase,
    count_read_tokens,
    summarize_costs,
)
from practicum.recipe.sections import Budget, Prices

SHAPE = ModelDims(
    parameters=13_000, body=1000, vocabulary=50, width=8, layers=2, heads=2, kv_heads=1, head_dim=4
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2, pretrain=20)
    return folder


def test_a_meter_counts_texts_and_heads() -> None:
    ledger = Ledger()
    ledger.dims = {"student": SHAPE, "teacher": SHAPE}
    student, teacher = ledger.meter("student"), ledger.meter("teacher")
    student.count_sampled([((1, 2, 3), 4), ((1, 2, 3), 2)])
    teacher.count_scored([((1, 2, 3), 4), ((1, 2, 3), 2)], heads=False)
    teacher.count_head(6)
    row = ledger.take()
    # prompt once: contexts 1 + 2 + 3; answers: 4 + 5 + 6 and 4; six tokens are drawn
    assert row["cost/flops_sample"] == 2000 * (3 + 3 + 1) + 64 * (6 + 15 + 4) + 800 * 6
    # a prompt this short is read again with each of its answers
    assert row["cost/flops_score"] == 2000 * (6 + 3 + 1) + 64 * (12 + 15 + 4) + 800 * 6
    assert (row["cost/sampled_tokens"], row["cost/prompt_tokens"]) == (6.0, 3.0)
    assert (row["cost/scored_tokens"], row["cost/scored_prompt_tokens"]) == (6.0, 6.0)
    assert row["cost/flops"] == row["cost/flops_sample"] + row["cost/flops_score"]
    assert not any(ledger.take().values())


def test_a_thread_that_works_ahead_counts_apart_until_its_lap_is_put_in() -> None:
    ledger = Ledger()
    teacher = ledger.meter("teacher")

    def asked_ahead() -> UsageByPhase:
        with ledger.record_separately() as lap:
            teacher.count_scored([((1,), 5)], heads=True)
        return lap

    with ThreadPoolExecutor(1) as pool:
        lap = pool.submit(asked_ahead).result()
    teacher.count_scored([((1,), 2)], heads=True)
    assert ledger.take()["cost/scored_tokens"] == 2.0
    ledger.merge(lap)
    assert ledger.take()["cost/scored_tokens"] == 5.0 and not any(ledger.take().values())


def test_of_an_unknown_model_the_tokens_alone_are_counted() -> None:
    ledger = Ledger()
    ledger.meter("teacher").count_scored([((1,), 5)], heads=True)
    ledger.meter("teacher").count_bytes("score", 40)
    ledger.meter("teacher").count_bytes("sample", 2)
    assert ledger.take_bytes() == {"wire_bytes": 42.0}
    row = ledger.take()
    assert (row["cost/scored_tokens"], row["cost/flops"]) == (5.0, 0.0)
    assert "cost/wire_bytes" not in row and ledger.take_bytes() == {"wire_bytes": 0.0}


def test_of_a_model_whose_size_alone_is_known_two_operations_a_token_and_parameter() -> None:
    ledger = Ledger()
    judge = ledger.meter("scorer-grade")
    judge.declare_size(70)
    judge.count_sampled([((1, 2, 3), 2), ((1, 2, 4), 5), ((1, 2, 4), 3)])
    # Each prompt is read once, and the last token of an answer is never read.
    assert ledger.take()["cost/flops_sample"] == 2 * 70 * (3 + 3 + 1 + 4 + 2)


def test_several_scorers_have_columns_of_their_own() -> None:
    ledger = Ledger()
    ledger.dims = {"teacher/math": SHAPE}
    for name in ("teacher/math", "teacher/code", "reference"):
        ledger.meter(name)
    ledger.meter("teacher/math").count_scored([((1,), 5)], heads=True)
    row = ledger.take()
    assert [row[f"cost/scored_tokens/{name}"] for name in ("math", "code", "reference")] == [
        5.0,
        0.0,
        0.0,
    ]
    assert summarize_costs([row, row])["score"]["teachers"]["math"]["tokens"] == 10.0


def test_a_run_counts_what_it_did(models: Path, tmp_path: Path) -> None:
    run = toy_run(models, tmp_path, {"evaluation.prompts": 4})
    metrics, recorded = rows(run.folder / "metrics.jsonl"), rows(run.folder / "rollouts.jsonl")
    for row in metrics:
        own = [rollout for rollout in recorded if rollout["step"] == row["step"]]
        tokens = sum(len(rollout["tokens"]) for rollout in own)
        texts = [(tuple(rollout["prompt_tokens"]), len(rollout["tokens"])) for rollout in own]
        assert (
            row["cost/sampled_tokens"]
            == row["cost/scored_tokens"]
            == row["cost/update_tokens"]
            == tokens
        )
        assert row["cost/prompt_tokens"] == count_read_tokens(texts, decoded=True).prompt_tokens
        assert row["cost/flops"] == sum(
            row[f"cost/flops_{phase}"] for phase in ("sample", "score", "update")
        )
    cost = run.summary["cost"]
    assert cost["flops"] == sum(row["cost/flops"] for row in metrics)
    assert cost["update"]["tokens"] == run.summary["tokens"]
    assert (
        cost["evaluation"]["before"]["sample"]["teacher_tokens"]
        > 0
        == cost["sample"]["teacher_tokens"]
    )
    assert cost["evaluation"]["after"]["flops"] > 0 and "wire_bytes" not in cost
    assert {row["wire_bytes"] for row in rows(run.folder / "timings.jsonl")} == {0.0}
    scaling = run.summary["scaling"]
    assert scaling["D"] == run.summary["tokens"] and scaling["rollouts"] == 32
    assert scaling["T"] * 32 == pytest.approx(scaling["D"])
    assert scaling["N_student"] == scaling["N_teacher"]["teacher"]


def test_a_teacher_that_gives_hidden_states_costs_as_much_as_one_that_gives_logprobs(
    models: Path, tmp_path: Path
) -> None:
    """Check that the head is counted where it is applied."""
    full = toy_run(models, tmp_path / "full", {"train.steps": 1}).summary["cost"]
    sampled = toy_run(
        models, tmp_path / "sampled", {"train.steps": 1, "objective": {"signal": "sampled"}}
    ).summary["cost"]
    assert full["score"] == sampled["score"] and full["sample"] == sampled["sample"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.source": "token_mix(0.5)"},
        {"rollout.source": "prefix(2, origin=teacher)"},
        {"rollout.source": "mix(0.5, other=teacher)"},
    ],
    ids=lambda changes: str(changes["rollout.source"]),
)
def test_what_a_teacher_writes_is_counted(
    models: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    row = rows(
        toy_run(models, tmp_path, {"train.steps": 1, "rollout.max_new_tokens": 6, **changes}).folder
        / "metrics.jsonl"
    )[0]
    assert row["cost/teacher_tokens"] > 0 < row["cost/sampled_tokens"]


def test_routed_teachers_share_out_what_one_would_have_scored(models: Path, tmp_path: Path) -> None:
    member = {"type": "model", "model": str(models / "teacher")}
    teacher = {
        "type": "route",
        "key": "outcome",
        "teachers": {"correct": member, "incorrect": {**member}},
    }
    row = rows(
        toy_run(models, tmp_path, {"train.steps": 1, "teacher": teacher}).folder / "metrics.jsonl"
    )[0]
    each = [row[f"cost/scored_tokens/{name}"] for name in ("correct", "incorrect")]
    assert sum(each) == row["cost/scored_tokens"] == row["tokens"]
    assert (
        sum(row[f"cost/flops_score/{name}"] for name in ("correct", "incorrect"))
        == row["cost/flops_score"]
    )


@pytest.mark.long
@pytest.mark.parametrize("teacher", ["cached", "plain"])
def test_resumed_and_cached_runs_count_the_same(models: Path, tmp_path: Path, teacher: str) -> None:
    member = {"type": "model", "model": str(models / "teacher")}
    changes = {"teacher": {"type": "cached", "teacher": member} if teacher == "cached" else member}
    changes |= {"evaluation.prompts": 2, "train.steps": 3, "train.checkpoint_every": 1}
    whole = toy_run(models, tmp_path / "whole", changes).folder
    assert (
        forked(lambda: toy_run(models, tmp_path / "cut", changes), {"PRACTICUM_FAULT": "update:3"})
        == 137
    )
    assert_same_run(whole, toy_run(models, tmp_path / "cut", changes, resume=True).folder)


def test_a_budget_ends_the_run_before_the_step_that_would_exceed_it(
    models: Path, tmp_path: Path
) -> None:
    flops = curve(toy_run(models, tmp_path / "whole").folder, "cost/flops")
    dearest = max(flops[:2])
    run = toy_run(
        models, tmp_path / "cut", {"train.budget": {"flops": flops[0] + flops[1] + dearest - 1}}
    )
    assert curve(run.folder, "cost/flops") == flops[:2]
    assert (
        run.summary["ended"] == "budget spent: no further step fits its flops"
        and run.summary["steps"] == 2
    )
    assert (run.folder / "checkpoints" / "step-2").is_dir()
    exactly = toy_run(
        models, tmp_path / "exact", {"train.budget": {"flops": flops[0] + flops[1] + dearest}}
    )
    assert exactly.summary["steps"] == 3


@pytest.mark.long
def test_a_budget_that_is_not_reached_changes_nothing(models: Path, tmp_path: Path) -> None:
    plain = toy_run(models, tmp_path / "plain", {"optimizer.schedule": "cosine"}).folder
    budget = toy_run(
        models, tmp_path / "budget", {"optimizer.schedule": "cosine", "train.budget.tokens": 10**9}
    )
    assert_same_run(plain, budget.folder)
    assert budget.summary["ended"] == "all steps done"


def test_a_learning_rate_follows_the_planned_steps_under_a_budget(
    models: Path, tmp_path: Path
) -> None:
    changes = {"optimizer.schedule": "linear"}
    whole = toy_run(models, tmp_path / "whole", changes).folder
    cut = toy_run(
        models,
        tmp_path / "cut",
        {**changes, "train.budget.tokens": 2 * max(curve(whole, "tokens")[:2])},
    ).folder
    assert curve(cut, "learning_rate") == curve(whole, "learning_rate")[:2]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["update:2", "rollout:3", "save.after_rename:1"])
def test_a_run_under_a_budget_ends_at_the_same_step_after_a_kill(
    models: Path, tmp_path: Path, fault: str
) -> None:
    costs = curve(toy_run(models, tmp_path / "long", {"train.steps": 5}).folder, "cost/flops")
    changes = {
        "train.steps": 5,
        "train.checkpoint_every": 1,
        "evaluation.prompts": 2,
        "train.budget.flops": sum(costs[:3]) + 1,
    }
    whole = toy_run(models, tmp_path / "whole", changes)
    assert whole.summary["steps"] < 5
    assert (
        forked(lambda: toy_run(models, tmp_path / "cut", changes), {"PRACTICUM_FAULT": fault})
        == 137
    )
    assert_same_run(whole.folder, toy_run(models, tmp_path / "cut", changes, resume=True).folder)


@pytest.mark.long
def test_a_run_killed_after_its_budget_does_not_go_on_training(
    models: Path, tmp_path: Path
) -> None:
    changes = {"train.budget.tokens": 1, "evaluation.prompts": 2}
    whole = toy_run(models, tmp_path / "whole", changes)
    out = tmp_path / "cut"
    assert (
        forked(lambda: toy_run(models, out, changes), {"PRACTICUM_FAULT": "save.after_rename:1"})
        == 137
    )
    assert_same_run(whole.folder, toy_run(models, out, changes, resume=True).folder)


def test_seconds_end_a_run_too(models: Path, tmp_path: Path) -> None:
    assert toy_run(models, tmp_path, {"train.budget.seconds": 1e-6}).summary["steps"] == 1


def test_the_first_part_of_a_budget_that_a_step_would_exceed_is_named() -> None:
    budget = Budget(tokens=10, seconds=5)
    step = {"flops": 1e30, "tokens": 1.0, "seconds": 1.0}
    assert budget.find_exceeded({"flops": 1e30, "tokens": 9.0, "seconds": 4.0}, step) is None
    assert budget.find_exceeded({"flops": 0.0, "tokens": 9.5, "seconds": 6.0}, step) == "tokens"


def test_the_next_step_is_foretold_by_the_dearest_of_the_last_ten() -> None:
    spending = BudgetTracker()
    assert spending.next_step == {"flops": 0.0, "tokens": 0.0, "seconds": 0.0}
    spending.add({"tokens": 3.0, "cost/flops": 7.0, "seconds_sample": 0.5})
    spending.add({"step": 2, "seconds_update": 1.0})
    assert spending.totals == {"flops": 7.0, "tokens": 3.0, "seconds": 1.5}
    assert spending.next_step == {"flops": 7.0, "tokens": 3.0, "seconds": 1.0}
    for _ in range(10):
        spending.add({"tokens": 2.0, "cost/flops": 1.0})
    assert spending.next_step == {"flops": 1.0, "tokens": 2.0, "seconds": 1.0}


def test_money_is_what_the_prices_say_and_nothing_else() -> None:
    cost = summarize_costs(
        [{"cost/scored_tokens": 1e6, "cost/scored_prompt_tokens": 5e5, "cost/teacher_tokens": 2e6}]
    )
    assert Prices().compute_money(cost, 7200.0) == {}
    assert Prices(machine_hour=2, million_scored_tokens=4, million_sampled_tokens=10).compute_money(
        cost, 7200.0
    ) == {
        "machine": 4.0,
        "sampled tokens": 20.0,
        "scored tokens": 6.0,
    }


@pytest.mark.long
def test_prices_stay_out_of_what_a_resume_compares(models: Path, tmp_path: Path) -> None:
    whole = toy_run(models, tmp_path / "whole").folder
    assert forked(lambda: toy_run(models, tmp_path / "cut"), {"PRACTICUM_FAULT": "update:3"}) == 137
    resumed = toy_run(models, tmp_path / "cut", {"prices": {"machine_hour": 2}}, resume=True).folder
    assert_same_run(whole, resumed)
    assert "prices" not in json.loads((whole / "summary.json").read_text())


def test_the_report_shows_what_it_cost_in_money_too(models: Path, tmp_path: Path) -> None:
    prices = {"million_scored_tokens": 1000, "currency": "<b>EUR"}
    folder = toy_run(
        models, tmp_path, {"train.steps": 2, "train.budget.tokens": 1, "prices": prices}
    ).folder
    page = (folder / "report.html").read_text()
    assert (
        "<dt>operations</dt>" in page
        and "&lt;b&gt;EUR" in page
        and "scored tokens" in page
        and "<b>EUR" not in page
    )
    assert "no further step fits its tokens" in page and "step 1 of 2" in page
