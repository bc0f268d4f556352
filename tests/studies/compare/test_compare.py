"""Comparisons: what may be compared, their results, and which conclusions are allowed."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from toy import command, environment, forked, make_model, rows, write_recipe

from practicum.errors import DataError, RecipeError, ResourceError
from practicum.run_dir import RunDir, write_json
from practicum.runs import run
from practicum.studies.compare import ComparisonBudget, ComparisonSettings, compare, run_comparison
from practicum.studies.compare.arms import (
    STOPPING_MONITORS,
    Arm,
    build_recipe,
    read_design,
    split_words,
)
from practicum.studies.compare.comparison_page import write_page
from practicum.studies.compare.outcomes import (
    FailedRun,
    Outcome,
    Point,
    compare_outcomes,
    read_outcome,
)
from practicum.studies.compare.run_jobs import RunJob, clear_comparison, plan_jobs, start_run
from practicum.studies.compare.tables import build_arm_table, build_pair_table

CHANGES = {
    "task.heldout_size": 24,
    "evaluation.prompts": 24,
    "evaluation.teacher": False,
    "train.steps": 2,
    "train.prompts_per_step": 4,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe with a student that can reverse strings and a teacher that cannot, so that an arm may spoil it."""
    folder = tmp_path_factory.mktemp("able")
    make_model(folder / "student", seed=2, hidden_size=64, layers=2, heads=4, pretrain=200)
    make_model(folder / "teacher", seed=3)
    return write_recipe(folder, folder / "able.yaml", CHANGES)


def done(words: Sequence[str], settings: ComparisonSettings) -> None:
    """Do the runs of a comparison in this process, with the files that separate processes would leave."""
    found = read_design(words, settings)
    for job in plan_jobs(found, settings.out, resume=False):
        job.recipe_path.parent.mkdir(parents=True, exist_ok=True)
        write_json(job.recipe_path, dict(job.resolved_recipe))
        run(job.recipe_path, out=job.recipe_path.parent)


@pytest.mark.slow
def test_identical_arms_are_not_told_apart_and_a_spoilt_one_is(recipe, tmp_path):
    words = [
        f"kept={recipe},optimizer.learning_rate=0.0000001",
        f"same={recipe},optimizer.learning_rate=0.0000001",
    ]
    words.append(f"spoilt={recipe},optimizer.learning_rate=0.3")
    settings = ComparisonSettings(seeds=3, out=tmp_path / "out")
    done(words, settings)
    found = run_comparison(words, replace(settings, resume=True))
    pairs = {(pair.one, pair.other): pair for pair in found.pairs}
    same = pairs["kept", "same"]
    assert (same.mean, same.p, same.resolved, same.seeds_needed) == (0.0, 1.0, False, None)
    assert pairs["kept", "spoilt"].resolved
    assert pairs["same", "spoilt"].resolved
    assert found.verdict[0].startswith(
        "kept leads, but no difference is resolved between it and same"
    )
    assert (
        "no difference resolved between kept and same: +0.000 in each of 3 seeds, so no interval, p = 1.000"
        in found.verdict
    )
    saved = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert saved["verdict"] == list(found.verdict)
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "kept leads" in page and "http:" not in page and "<script" not in page


@pytest.mark.long
def test_equal_budgets_are_equal_within_one_step(recipe, tmp_path):
    words = [f"one={recipe}", f"two={recipe},rollout.n=2"]
    settings = ComparisonSettings(
        1, ComparisonBudget("flops", 4e8), out=tmp_path / "out", common=("train.steps=100",)
    )
    done(words, settings)
    found = run_comparison(words, replace(settings, resume=True))
    for outcome in found.outcomes:
        costs = [
            row["cost/flops"] for row in rows(tmp_path / "out" / outcome.folder / "metrics.jsonl")
        ]
        assert outcome.spent["flops"] == sum(costs)
        assert sum(costs) <= 4e8 < sum(costs) + max(costs[-10:])
        assert len(costs) < 100
    assert not any(line.startswith("unequal") for line in found.verdict)
    assert found.verdict[0].startswith("single seed: how much seeds differ is unknown")


@pytest.mark.long
def test_evaluations_on_the_way_change_nothing_else(recipe, tmp_path):
    found = read_design(
        [f"often={recipe},evaluation.every=1", f"never={recipe},evaluation.every=9"],
        ComparisonSettings(seeds=1),
    )
    folders = [
        run(found.recipes[name][0], out=tmp_path / name).folder for name in ("often", "never")
    ]
    often, never = (rows(folder / "metrics.jsonl") for folder in folders)
    assert all("heldout_accuracy" in row for row in often)
    told = [
        {name: value for name, value in row.items() if not name.startswith("heldout_")}
        for row in often
    ]
    assert told == never
    assert (folders[0] / "rollouts.jsonl").read_bytes() == (
        folders[1] / "rollouts.jsonl"
    ).read_bytes()
    curve = read_outcome("often", 0, folders[0], tmp_path).curve
    assert curve[-1].accuracy == rows_after(folders[0])
    assert [point.spent.get("steps", 0.0) for point in curve] == [0.0, 1.0, 2.0]


def rows_after(folder: Path) -> float:
    return json.loads((folder / "summary.json").read_text())["after"]["accuracy"]["mean"]


def outcome(arm: str, seed: int, rewards: Sequence[float], **more: object) -> Outcome:
    """Return a run with these rewards for its prompts."""
    scores = {f"prompt {place}": reward for place, reward in enumerate(rewards)}
    accuracy = sum(rewards) / len(rewards)
    spent = {"flops": 100.0, "steps": 10.0}
    curve = [Point(spent, accuracy)]
    return replace(
        Outcome(arm, seed, f"{arm}/seed-{seed}", "BETTER", accuracy, 0.1, spent, scores, curve),
        **more,
    )


def said(
    outcomes: Sequence[Outcome],
    failures: Sequence[FailedRun] = (),
    budget: Mapping[str, float] | None = None,
) -> list[str]:
    methods = dict.fromkeys(
        [one.arm for one in outcomes] + [failure.arm for failure in failures], "method"
    )
    return list(compare_outcomes(methods, outcomes, failures, budget or {}).verdict)


GOOD, BAD = [1.0] * 18 + [0.0] * 2, [1.0] * 4 + [0.0] * 16


def test_a_difference_over_seeds_and_prompts_is_resolved():
    lines = said(
        [outcome("a", seed, GOOD[seed:]) for seed in range(3)]
        + [outcome("b", seed, BAD[seed:]) for seed in range(3)]
    )
    assert lines[0] == "a is best, resolved against every other arm"
    assert lines[1].startswith("a is better than b: +0.")


def test_one_lucky_prompt_in_every_seed_is_not_a_difference():
    """The seeds agree exactly, so Student's t by itself would be certain; the prompts show a chance of one in twenty."""
    one, other = GOOD, [*GOOD[:17], 0.0, 0.0, 0.0]
    lines = said(
        [outcome("a", seed, one) for seed in range(3)]
        + [outcome("b", seed, other) for seed in range(3)]
    )
    assert lines[0] == "no difference resolved"
    assert (
        "p = 1.000; a difference like this needs about" in lines[1]
        and "held-out prompts" in lines[1]
    )


def test_seeds_that_disagree_ask_for_more_seeds():
    runs = [outcome("a", 0, GOOD), outcome("a", 1, BAD), outcome("a", 2, GOOD)]
    runs += [outcome("b", seed, BAD) for seed in range(3)]
    lines = said(runs)
    assert lines[0] == "no difference resolved"
    assert lines[1] == (
        "no difference resolved between a and b: +0.467 [-0.537, +1.471], p = 0.184; a difference like this needs about 8 seeds"
    )


def test_a_single_seed_resolves_nothing():
    lines = said([outcome("a", 0, GOOD), outcome("b", 0, BAD)])
    assert lines[0].startswith(
        "single seed: how much seeds differ is unknown, so no difference is called resolved; use seeds=3"
    )
    assert (
        lines[1]
        == "a over b: +0.700 [+0.426, +0.855] on a single seed (interval over prompts only)"
    )


def test_arms_that_are_one_recipe_are_named(recipe):
    """Two names for one recipe ran twice, and the table showed +0.000 [0.000, 0.000]."""
    words = [f"kl={recipe},divergence=reverse_kl", f"jsd={recipe}", f"far={recipe},divergence=jsd"]
    lines = read_design(words, ComparisonSettings(seeds=1)).list_equal_arms()
    assert lines == [
        "kl and jsd are the same recipe, so their runs will also be the same; "
        f"was jsd meant to differ? use jsd={recipe},KEY=VALUE"
    ]


def test_few_prompts_have_no_interval():
    """Check two prompts: their interval was [1.00, 1.00]."""
    runs = [outcome("a", 0, [1.0, 1.0]), outcome("b", 0, [0.0, 0.0])]
    result = compare_outcomes({"a": "m", "b": "m"}, runs, [], {})
    assert result.verdict[1].endswith("on a single seed (2 prompts: too few for an interval)")
    content = json.loads(json.dumps(_as_data(result)))
    assert build_pair_table(content)[1][0][3] == "too few"


def test_destroyed_students_are_named_and_counted(tmp_path):
    runs = [outcome("a", seed, GOOD) for seed in range(3)]
    runs += [outcome("b", seed, BAD, verdict="COLLAPSED") for seed in range(2)]
    runs += [outcome("b", 2, BAD, verdict="NO DETECTABLE CHANGE")]
    result = compare_outcomes({"a": "m", "b": "m"}, runs, [], {})
    assert "b: 2 of 3 runs destroyed the student (COLLAPSED)" in result.verdict
    content = json.loads(json.dumps(_as_data(result)))
    verdicts = [row[2] for row in build_arm_table(content)[1]]
    assert verdicts == ["3 BETTER", "2 COLLAPSED, 1 NO DETECTABLE CHANGE"]
    content["design"] = {"seeds": [0, 1, 2], "budget": "b", "arms": []}
    write_page(tmp_path / "page.html", content)
    assert (tmp_path / "page.html").read_text().count("<td>COLLAPSED</td>") == 2


def test_an_interval_without_width_is_not_shown_as_knowledge(tmp_path):
    runs = [outcome(arm, seed, [1.0] * 20) for arm in "ab" for seed in range(3)]
    result = compare_outcomes({"a": "m", "b": "m"}, runs, [], {})
    assert result.verdict[1] == (
        "no difference resolved between a and b: +0.000 in each of 3 seeds, so no interval, p = 1.000"
    )
    content = json.loads(json.dumps(_as_data(result)))
    assert [row[4] for row in build_arm_table(content)[1]] == ["all equal", "all equal"]
    assert [row[2:4] for row in build_pair_table(content)[1]] == [
        ["all equal", "[-0.161, 0.161]"]
    ], "prompts that agree still say how many they are"
    content["design"] = {"seeds": [0, 1, 2], "budget": "b", "arms": []}
    write_page(tmp_path / "page.html", content)
    page = (tmp_path / "page.html").read_text()
    assert "[0.000, 0.000]" not in page and 'class="bar"' not in page


def test_failed_runs_are_named_and_counted_and_pairs_use_the_seeds_that_both_finished():
    runs = [outcome("a", seed, GOOD) for seed in range(3)] + [
        outcome("b", seed, GOOD) for seed in (0, 2)
    ]
    failure = FailedRun("b", 1, "failed: the disk <b>is</b> full")
    found = compare_outcomes({"a": "m", "b": "m"}, runs, [failure], {})
    assert found.pairs[0].seeds == 2
    assert found.verdict[-2:] == [
        "1 of 6 runs failed and count nowhere",
        "b, seed 1, failed: the disk <b>is</b> full",
    ]
    assert [(arm.finished, arm.failed) for arm in found.arms] == [(3, 0), (2, 1)]


def test_a_run_short_of_its_budget_is_named():
    lines = said(
        [outcome("a", 0, GOOD), outcome("b", 0, BAD, spent={"flops": 62.0})],
        budget={"flops": 100.0},
    )
    assert (
        "unequal: b spent 62% of the flops, because its train.steps or a monitor end it; raise them, or turn that off"
        in lines
    )
    coarse = outcome("b", 0, BAD, spent={"flops": 62.0}, by_budget=True)
    lines = said(
        [outcome("a", 0, GOOD, spent={"flops": 93.0}, by_budget=True), coarse],
        budget={"flops": 100.0},
    )
    assert [line for line in lines if line.startswith("unequal")] == [
        "unequal: b spent 62% of the flops, because one more step would exceed it; make its steps smaller, or the budget larger"
    ]


def test_without_a_verifier_the_distance_from_the_teacher_is_compared():
    near = [
        outcome("near", seed, GOOD, accuracy=None, scores={}, reverse_kl=0.1 + seed / 100)
        for seed in range(3)
    ]
    far = [
        outcome("far", seed, GOOD, accuracy=None, scores={}, reverse_kl=0.9 + seed / 90)
        for seed in range(3)
    ]
    found = compare_outcomes({"far": "m", "near": "m"}, [*near, *far], [], {})
    assert found.metric == "reverse_kl"
    assert found.verdict[:1] == ["near is best, resolved against every other arm"]
    assert [round(arm.mean, 2) for arm in found.arms] == [0.91, 0.11]


def test_estimates_are_compared_with_estimates_only() -> None:
    spent = {"steps": 1.0}
    exact, estimated = (
        Outcome(arm, 0, "", "BETTER", None, exact, spent, {}, [], reverse_kl_estimate=estimate)
        for arm, exact, estimate in (("a", 0.1, None), ("b", None, -0.01))
    )
    arms = {"a": "", "b": ""}
    result = compare_outcomes(arms, [replace(estimated, arm="a"), estimated], [], {})
    assert result.metric == "reverse_kl_estimate" and result.arms[0].mean == -0.01
    with pytest.raises(DataError, match="know the reverse KL exactly and some estimate it"):
        compare_outcomes(arms, [exact, estimated], [], {})


def test_runs_without_any_measure_are_refused():
    with pytest.raises(DataError, match="the runs share no measure"):
        said([outcome("a", 0, GOOD, accuracy=None, reverse_kl=None)])


def test_many_arms_are_corrected_for_their_number():
    """Eight arms make 28 pairs: a difference that passes a single test at 0.01 is not resolved."""
    slightly = [1.0] * 12 + [0.0] * 8
    runs = [outcome(f"arm{number}", seed, GOOD[seed:]) for number in range(7) for seed in range(3)]
    runs += [outcome("low", seed, slightly[seed:]) for seed in range(3)]
    found = compare_outcomes(
        dict.fromkeys([f"arm{n}" for n in range(7)] + ["low"], "m"), runs, [], {}
    )
    assert len(found.pairs) == 28
    assert not any(pair.resolved for pair in found.pairs)


def test_tables_and_page_are_safe_to_show(tmp_path):
    failure = FailedRun("b", 0, "failed: <script>alert(1)</script> \u202e")
    found = compare_outcomes({"a": "<i>m</i>", "b": "m"}, [outcome("a", 0, GOOD)], [failure], {})
    content = json.loads(
        json.dumps({"design": {"seeds": [0], "budget": "b", "arms": []}, **_as_data(found)})
    )
    write_page(tmp_path / "page.html", content)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>" not in page and "<i>m</i>" not in page and "\u202e" not in page
    columns, lines = build_arm_table(content)
    assert list(columns) == [
        "arm",
        "runs",
        "verdicts",
        "accuracy",
        "95 % over seeds",
        "reverse KL",
        "flops",
        "steps",
    ]
    assert list(lines[0]) == ["a", "1 of 1", "1 BETTER", "0.900", "", "0.100", "100 FLOP", "10"]
    assert list(lines[1]) == ["b", "0 of 1", "", "", "", "", "", ""]
    assert list(build_pair_table(content)[1]) == []


def _as_data(found: object) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(found)  # type: ignore[call-overload]


def test_an_arm_is_a_recipe_with_a_name_and_changes():
    assert Arm.parse("recipes/papers/gkd.yaml") == Arm("gkd", "recipes/papers/gkd.yaml")
    text = "mix=papers/gkd,rollout.source=mix(student=0.5,other=teacher),train.budget2={a: 1, b: 2}"
    assert Arm.parse(text).overrides == (
        "rollout.source=mix(student=0.5,other=teacher)",
        "train.budget2={a: 1, b: 2}",
    )
    assert split_words("a='x,y',b") == ["a='x,y'", "b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["papers/gkd"], "a comparison needs at least two arms; give two recipes, or NAME=RECIPE"),
        (["papers/gkd", "papers/gkd"], "two arms are named 'gkd'; use NAME=RECIPE for each"),
        (["../x=papers/gkd", "papers/sft"], "cannot name it; use NAME=RECIPE,key=value"),
        (["a=papers/gkd,seed=3", "papers/sft"], "'seed=3' is the comparison's to set"),
        (
            ["a=papers/gkd", "b=papers/gkd,evaluation.samples=4"],
            r"arms 'a' and 'b' differ in evaluation.samples \(1 and 4\)",
        ),
        (
            ["a=papers/gkd", "b=papers/gkd,task.longest=5"],
            "arms 'a' and 'b' differ in the held-out prompts; a comparison",
        ),
        (
            ["a=papers/gkd", "b=papers/gkd,train.steps=41"],
            r"arms 'a' and 'b' differ in train.steps \(40 and 41\)",
        ),
        (["a=papers/gkd,evaluation.prompts=0", "papers/gkd"], "no held-out prompts to compare on"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(words, message):
    with pytest.raises(RecipeError, match=message) as caught:
        read_design(words, ComparisonSettings(seeds=1))
    assert len(str(caught.value).splitlines()) == 1


def test_an_arms_own_changes_win_over_those_of_all():
    found = read_design(
        ["a=papers/gkd,optimizer.learning_rate=0.5", "b=papers/gkd"],
        ComparisonSettings(
            1, ComparisonBudget("steps", 7.0), common=("optimizer.learning_rate=0.1",)
        ),
    )
    assert [found.recipes[name][0].optimizer.learning_rate for name in "ab"] == [0.5, 0.1]
    assert found.recipes["a"][0].train.steps == 7
    assert found.recipes["a"][0].train.threads == 1


@pytest.mark.parametrize(
    ("own", "action"), [((), "warn"), (("monitors.M4=pause",), "pause"), (("monitors=off",), "off")]
)
def test_no_monitor_ends_a_run_unless_its_recipe_says_so(own, action):
    found = build_recipe(Arm("one", "smoke/toy", own), 0, ComparisonSettings())
    assert found.monitors["M4"].action == action
    assert all(found.monitors[name].action in ("warn", action) for name in STOPPING_MONITORS)


@pytest.mark.parametrize(
    "text", ["flops", "flops=many", "flops=-1", "euros=3", "tokens=0", "steps=nan"]
)
def test_a_budget_that_is_none_is_refused(text):
    with pytest.raises(
        RecipeError, match="use flops=1e12, tokens=100000, seconds=60, steps=40, or steps"
    ):
        ComparisonBudget.parse(text)


def test_budgets_become_recipe_keys():
    assert ComparisonBudget.parse("flops=1e12").build_overrides() == [
        "train.budget={flops: 1000000000000.0}"
    ]
    assert ComparisonBudget.parse("steps=40").build_overrides() == ["train.steps=40"]
    assert ComparisonBudget.parse("steps").build_overrides() == []


@pytest.mark.long
def test_a_folder_with_a_comparison_is_not_written_over_and_an_arm_may_not_change(recipe, tmp_path):
    words = [f"a={recipe}", f"b={recipe}"]
    (job, _) = plan_jobs(read_design(words, ComparisonSettings(seeds=1)), tmp_path, resume=False)
    with pytest.raises(RecipeError, match="holds no comparison to resume; leave resume=True out"):
        plan_jobs(read_design(words, ComparisonSettings(seeds=1)), tmp_path, resume=True)
    job.recipe_path.parent.mkdir()
    write_json(job.recipe_path, dict(job.resolved_recipe))
    with pytest.raises(RecipeError, match="already holds a comparison; use resume=True"):
        plan_jobs(read_design(words, ComparisonSettings(seeds=1)), tmp_path, resume=False)
    assert (
        len(
            plan_jobs(
                read_design([*words, f"c={recipe}"], ComparisonSettings(seeds=2)),
                tmp_path,
                resume=True,
            )
        )
        == 6
    ), "arms and seeds may be added"
    with pytest.raises(
        RecipeError,
        match=r"arm 'a' changed; undo this, name a new arm, or use .*:\ntrain[.]steps: 2 in the run, 9 now",
    ):
        plan_jobs(
            read_design(words, ComparisonSettings(1, ComparisonBudget("steps", 9.0))),
            tmp_path,
            resume=True,
        )


@pytest.mark.slow
def test_a_broken_arm_leaves_the_others_alone(recipe, tmp_path):
    words = ["compare", f"good={recipe}", f"broken={recipe},student.model={tmp_path / 'nowhere'}"]
    words += ["--out", str(tmp_path / "out"), "--seeds", "1", "--jobs", "2"]
    status = forked(command(*words), environment({}), tmp_path / "said")
    said = (tmp_path / "said").read_text()
    assert status == 1, said
    assert (
        "error: 1 of 2 runs failed, and the table does not include them; --resume tries them again"
        in said
    )
    saved = json.loads((tmp_path / "out" / "compare.json").read_text())
    (failure,) = saved["failures"]
    assert failure["reason"].startswith("failed: ") and "nowhere" in failure["reason"]
    assert "\n" not in failure["reason"]
    assert [run["arm"] for run in saved["outcomes"]] == ["good"]


@pytest.mark.slow
def test_a_comparison_that_was_killed_and_resumed_has_the_same_table(recipe, tmp_path):
    words = [
        f"a={recipe},train.steps=8",
        f"b={recipe},train.steps=8,optimizer.learning_rate=0.1",
        "--seeds",
        "2",
    ]

    def line(out: str, *more: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "practicum",
            "compare",
            *words,
            "--out",
            str(tmp_path / out),
            *more,
        ]

    subprocess.run(line("whole"), env=environment(), check=True, capture_output=True)
    killed = subprocess.run(
        line("torn"), env=environment({"PRACTICUM_FAULT": "compare.run_ended:1"}), check=False
    )
    assert killed.returncode == -signal.SIGKILL
    time.sleep(1)  # its runs end when it dies
    stopped = subprocess.Popen(
        line("torn", "--resume"), env=environment(), stderr=subprocess.PIPE, text=True
    )
    when_running(tmp_path / "torn")
    stopped.terminate()
    assert "resume with --resume" in stopped.communicate()[1]
    assert stopped.returncode == 128 + signal.SIGTERM
    subprocess.run(line("torn", "--resume"), env=environment(), check=True, capture_output=True)
    assert table(tmp_path / "whole") == table(tmp_path / "torn")


def when_running(home: Path, patience: float = 120.0) -> None:
    """Wait until a run holds its lock and has done a step."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if any(
            path.stat().st_size and not (path.parent / "summary.json").exists()
            for path in home.glob("*/*/metrics.jsonl")
        ):
            return
        time.sleep(0.05)
    raise AssertionError("no run came to its first step")


def table(home: Path) -> object:
    """Return the results of a comparison, without the times."""
    found = json.loads((home / "compare.json").read_text())
    for place in [
        *found["arms"],
        *found["outcomes"],
        *(point for one in found["outcomes"] for point in one["curve"]),
    ]:
        place["spent"].pop("seconds", None)
    return found


@pytest.mark.long
def test_a_run_of_a_comparison_is_this_package_and_no_file_that_stands_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "practicum.py").write_text("print('a file of the working directory')")
    monkeypatch.chdir(tmp_path)
    job = RunJob("one", 0, {"no": "recipe"}, tmp_path / "home")
    assert start_run(job, None).wait() == RecipeError.exit_code
    assert "a file of the working directory" not in job.log_path.read_text()


def test_overwriting_clears_the_runs_of_a_comparison_and_nothing_else(tmp_path: Path) -> None:
    run = tmp_path / "a" / "seed-0"
    run.mkdir(parents=True)
    for path in (run / "recipe.json", run / "metrics.jsonl", run.with_suffix(".json")):
        path.write_text('{"recipe": {}}')
    for path in (run.with_suffix(".log"), tmp_path / "compare.json", tmp_path / "notes.txt"):
        path.write_text("")
    clear_comparison(tmp_path)
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == ["a/seed-0/run.lock", "notes.txt", "run.lock"]
    clear_comparison(tmp_path / "none")


def test_a_comparison_that_is_running_is_not_cleared(tmp_path: Path) -> None:
    recipe_path = tmp_path / "a" / "seed-0.json"
    recipe_path.parent.mkdir()
    recipe_path.write_text("{}")
    with RunDir(tmp_path).lock(), pytest.raises(ResourceError, match="is in use by process"):
        clear_comparison(tmp_path)
    assert recipe_path.is_file()


def test_a_comparison_is_either_continued_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "seed-0.json").write_text("{}")
    with pytest.raises(RecipeError, match="resume=True, overwrite=True"):
        compare(["a=smoke/toy", "b=smoke/toy"], out=tmp_path, resume=True, overwrite=True)
    assert (tmp_path / "a" / "seed-0.json").is_file()
