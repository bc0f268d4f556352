"""The plan of a recipe: its counts equal the counts of a run, and its verdict on memory is right."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy import command, forked, make_model, rows, toy_recipe, toy_run, write_recipe

from practicum.backends.local.paper import measure_footprint
from practicum.cli.plan import format_plan
from practicum.costs import ModelDims, TrainableDims, count_read_tokens
from practicum.costs.cluster import forecast_step
from practicum.costs.workload import Gpu, Split
from practicum.errors import ModelError, RecipeError, ResourceError, TeacherError
from practicum.models.sources import locate
from practicum.objective import Objective
from practicum.runs.assembly import RunComponents
from practicum.runs.plan import describe_plan, dry_runs, plan, planning
from practicum.runs.plan.cluster import build_workload, describe_clusters, parse_cluster
from practicum.runs.plan.memory import count_tiles, estimate_memory, parse_bytes
from practicum.runs.plan.methods import compare_methods, count_wire_bytes, find_break_even
from practicum.runs.plan.planning import StepTiming

SHAPE = ModelDims(
    parameters=13_000, body=1000, vocabulary=50, width=8, layers=2, heads=2, kv_heads=1, head_dim=4
)
ALL = TrainableDims(parameters=13_000, layers=2, body=1000, adapters=0, head=True)
MIB = 2**20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2)
    return folder


def member(models: Path) -> dict[str, Any]:
    return {"type": "model", "model": str(models / "teacher")}


SELF = {"type": "self", "weights": "frozen"}
CASES: dict[str, Any] = {
    "sampled": {"objective": {"signal": "sampled"}, "rollout.n": 2},
    "whole sequences": {"objective": {"signal": "sampled", "estimator": "score_function(gamma=1)"}},
    "adapters": {"student.lora": {"rank": 4, "alpha": 8}},
    "privileged": {
        "teacher": {"type": "privileged", "teacher": SELF, "system": "abcdabcdabcdabcdabcd"}
    },
    "a pool": {"teacher": {"type": "pool", "kind": "sum", "teachers": {"a": "MODEL", "b": SELF}}},
    "a cached teacher": {"teacher": {"type": "cached", "teacher": "MODEL"}},
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_step_on_paper_counts_what_a_real_one_counts(
    models: Path, tmp_path: Path, name: str
) -> None:
    """Check where every answer has maximum length, to the last operation."""
    changes = json.loads(json.dumps(CASES[name]).replace('"MODEL"', json.dumps(member(models))))
    changes |= {"rollout.max_new_tokens": 1, "train.steps": 1}
    real = rows(toy_run(models, tmp_path, changes).folder / "metrics.jsonl")[0]
    paper = plan(toy_recipe(models, changes)).run.metrics
    counted = {key: value for key, value in real.items() if key.startswith("cost/")}
    assert counted == {key: value for key, value in paper.items() if key.startswith("cost/")}
    assert counted["cost/flops"] > 0


def test_conversations_keep_keys_and_values_up_to_a_bound(models: Path) -> None:
    walk = {"task": {"type": "walker", "turns": 2}, "teacher": {"type": "expert"}}
    walk |= {"rollout.max_new_tokens": 20, "student": {"model": {"hidden_size": 16, "layers": 1, "heads": 2}}}  # fmt: skip
    of_walk = plan(toy_recipe(models, walk))
    item = "keys and values of conversations"
    longest = max(map(len, of_walk.run.prompts)) + 20
    kept = of_walk.memory.phases["sample"][item]
    assert kept == of_walk.run.record.dims.count_kv_bytes(8 * longest, 4)
    bounded = replace(of_walk.run.record, max_text_bytes=100)
    run = replace(of_walk.run, record=bounded)
    assert estimate_memory(run, 0).phases["sample"][item] == 100
    assert item not in plan(toy_recipe(models)).memory.phases["sample"]


def test_keys_and_values_have_the_dtype_of_the_products(models: Path) -> None:
    planned = plan(toy_recipe(models)).run
    single, half = (
        estimate_memory(replace(planned, record=replace(planned.record, dtype=dtype)), 0)
        for dtype in ("float32", "bfloat16")
    )
    item = "keys and values"
    assert single.phases["sample"][item] == 2 * half.phases["sample"][item] > 0


def test_methods_by_hand() -> None:
    """Check one prompt of two tokens, answers of three: contexts 1 to 4 go through the body, three tokens through the head."""
    table = {row["method"]: row for row in compare_methods([(1, 2)], 3, 1, SHAPE, ALL, SHAPE)}
    forward = 2000 * 4 + 64 * 10 + 800 * 3
    assert table["SFT on given answers"]["flops"] == 3 * forward
    assert table["SFT on the teacher's answers"]["flops"] == 4 * forward
    assert table["OPD, 1 answer"]["flops"] == 5 * forward
    read = count_read_tokens([((1, 2), 3)] * 8)
    generate = 2000 * (2 + 8 * 2) + 64 * (3 + 8 * 7) + 800 * 24
    assert table["GRPO, 8 answers"]["generate"] == generate
    assert table["GRPO, 8 answers"]["update"] == 3 * (
        2000 * read.tokens + 64 * read.contexts + 800 * 24
    )
    assert find_break_even(list(table.values())) == pytest.approx(
        5 * forward / (table["GRPO, 8 answers"]["flops"] / 8)
    )


def test_the_worked_example_of_qwen3_at_2048_tokens() -> None:
    """Check 0.6B taught by 8B: 1.43 and 15.7 GFLOP per token at an average context of 1,024; 43.9 TFLOP for one answer."""
    small = ModelDims(
        596_000_000,
        28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072),
        151_936,
        1024,
        28,
        16,
        8,
        128,
    )
    large = ModelDims(
        8_190_000_000,
        36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288),
        151_936,
        4096,
        36,
        32,
        8,
        128,
    )
    assert small.count_forward_flops(1024) == pytest.approx(1.43e9, rel=0.01)
    assert large.count_forward_flops(1024) == pytest.approx(15.7e9, rel=0.01)
    everything = TrainableDims(small.parameters, 28, small.body, 0, True)
    table = {
        row["method"]: row for row in compare_methods([(1,)], 2048, 1, small, everything, large)
    }
    assert table["OPD, 1 answer"]["flops"] == pytest.approx(43.9e12, rel=0.01)
    assert table["GRPO, 8 answers"]["flops"] == pytest.approx(93.5e12, rel=0.01)
    assert find_break_even(list(table.values())) == pytest.approx(3.8, abs=0.05)


def test_bytes_on_a_wire_by_hand() -> None:
    assert count_wire_bytes(10, 4, SHAPE) == {
        "sampled": 56 + 40,
        "top-64": 56 + 3840,
        "hidden": 56 + 160,
        "full": 56 + 1000,
    }


def test_the_plan_of_a_toy(models: Path) -> None:
    data = describe_plan(plan(toy_recipe(models), limit=2**40))
    assert json.loads(json.dumps(data)) == data
    assert data["models"]["student"]["parameters"] == data["models"]["teacher"]["parameters"]
    assert data["run"]["cost"]["flops"] == 4 * data["step"]["cost"]["flops"]
    assert (
        data["step"]["seconds"] is None
        and data["run"]["seconds"] is None
        and data["run"]["money"] is None
    )
    phases = data["memory"]["phases"]
    assert list(phases) == ["sample", "score", "update", "save"]
    assert data["memory"]["fits"] and data["memory"]["change"] is None
    assert data["memory"]["peak"] == max(sum(items.values()) for items in phases.values())
    moving = 4 * data["models"]["student"]["learns"]
    assert (
        phases["update"]["gradients"] == moving
        and phases["update"]["moments of AdamW"] == 2 * moving
    )


@pytest.mark.parametrize(
    ("changes", "repeats"),
    [
        ({}, False),
        ({"rollout.n": 4}, True),
        ({"rollout.n": 4, "objective": {"filter": "failed_group"}}, False),
        ({"rollout.n": 4, "objective": {"signal": "score(group_normalized)"}}, False),
    ],
)
def test_several_answers_without_a_use_are_told(
    models: Path, changes: dict[str, Any], repeats: bool
) -> None:
    data = describe_plan(plan(toy_recipe(models, changes), limit=2**40))
    assert data["repeats_prompts"] == repeats
    assert any("docs/scaling-law.md" in line for line in format_plan(data)) == repeats


def test_rollouts_ahead_hold_copies_of_what_learns_and_phases_at_once(models: Path) -> None:
    in_turn, ahead = (
        plan(toy_recipe(models, {"rollout.max_staleness": lag}), limit=2**40).memory.phases
        for lag in (0, 2)
    )
    moving = in_turn["update"]["gradients"]
    assert ahead["sample"]["copies of what learns, for rollouts ahead"] == 3 * moving
    assert ahead["update"]["hidden states of steps ahead"] == 2 * in_turn["update"]["hidden states"]
    assert (
        ahead["update"].keys()
        >= in_turn["sample"].keys() | in_turn["score"].keys() | in_turn["update"].keys()
    )


def test_what_does_not_fit_is_told_with_a_change_that_does(models: Path) -> None:
    long = {"rollout.max_new_tokens": 400, "train.prompts_per_step": 32}
    whole = plan(toy_recipe(models, long), limit=2**40)
    limit = whole.memory.peak - whole.run.body.update.each * 100
    tight = plan(toy_recipe(models, long), limit=limit)
    assert not tight.fits and tight.change is not None
    assert tight.largest_micro_batch < whole.largest_micro_batch
    assert tight.change == (f"backend.micro_batch_tokens={tight.largest_micro_batch}",)
    assert plan(toy_recipe(models, long), limit=1).change is None


def test_a_calibration_tells_seconds_by_the_operations_of_each_phase() -> None:
    seconds = {"sample": 2.0, "score": 1.0, "update": 4.0}
    flops = {"sample": 10.0, "score": 0.0, "update": 8.0}
    found = StepTiming(seconds, flops, 3.0).predict({"sample": 20.0, "score": 0.0, "update": 2.0})
    assert found == {"sample": 4.0, "score": 1.0, "update": 1.0}


def test_calibrated_seconds_and_money(models: Path) -> None:
    prices = {"machine_hour": 3600, "million_scored_tokens": 1e6, "currency": "EUR"}
    data = describe_plan(plan(toy_recipe(models, {"prices": prices}), calibrate=True))
    assert data["run"]["seconds"] == pytest.approx(4 * sum(data["step"]["seconds"].values()))
    assert data["run"]["money"]["machine"] == pytest.approx(data["run"]["seconds"])
    assert data["run"]["currency"] == "EUR"
    unknown = describe_plan(plan(toy_recipe(models, {"prices": prices})))
    assert "machine" not in unknown["run"]["money"] and unknown["run"]["money"]["scored tokens"] > 0


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_student_at_a_service_is_refused_before_anything_is_asked_there(
    models: Path, calibrate: bool
) -> None:
    there = {
        "student": {"model": "base", "lora": {"rank": 4}},
        "backend": {"type": "tinker", "url": "http://127.0.0.1:9"},
        "objective.signal": "sampled",
    }
    with pytest.raises(RecipeError, match="plan: the student is at a service"):
        plan(toy_recipe(models, there), calibrate=calibrate)


@pytest.mark.parametrize("calibrate", [False, True])
def test_what_was_opened_is_closed_where_a_step_fails(
    models: Path, monkeypatch: pytest.MonkeyPatch, calibrate: bool
) -> None:
    def fail(*_: object) -> None:
        raise TeacherError("the teacher is gone")

    closed: list[RunComponents] = []
    monkeypatch.setattr(planning if calibrate else dry_runs, "train_step", fail)
    monkeypatch.setattr(RunComponents, "close", lambda self: closed.append(self))
    with pytest.raises(TeacherError, match="the teacher is gone"):
        plan(toy_recipe(models), calibrate=calibrate)
    assert len(closed) == (2 if calibrate else 1)


def test_tiles_are_those_of_the_logit_side() -> None:
    assert count_tiles(Objective()) == 6
    assert count_tiles(Objective.model_validate({"signal": "sampled"})) == 4
    assert count_tiles(Objective.model_validate({"signal": "topk(4)"})) == 12


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 * 2**30), ("1.5 MiB", 3 * MIB // 2), ("2gb", 2 * 10**9), ("7", 7)]
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "3 furlongs", "inf"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(ResourceError, match="not an amount of memory; use for example 8GiB"):
        parse_bytes(text)


def test_the_command(models: Path, tmp_path: Path) -> None:
    recipe = str(write_recipe(models, tmp_path / "mine.yaml"))
    output = tmp_path / "out.txt"
    assert forked(command("plan", recipe, "--memory", "64GiB"), output=output) == 0
    text = output.read_text()
    assert (
        "4 steps:" in text
        and "seconds are not known without --calibrate" in text
        and " here: it fits" in text
    )
    assert "OPD, 1 answer" in text and "GRPO, 8 answers" in text and "Traceback" not in text
    assert forked(command("plan", recipe, "--memory", "much"), output=output) == 8
    assert (
        output.read_text().startswith("error: --memory 'much'")
        and len(output.read_text().splitlines()) == 1
    )


def test_the_command_for_clusters(models: Path, tmp_path: Path) -> None:
    recipe = str(write_recipe(models, tmp_path / "mine.yaml"))
    output = tmp_path / "out.txt"
    clusters = ("--cluster", "8xh100", "--cluster", "64xH200/4")
    assert forked(command("plan", recipe, *clusters), output=output) == 0
    text = output.read_text()
    assert "8 h100 in nodes of 8" in text and "64 h200 in nodes of 4" in text
    assert "the first split takes 2 of 8 GPUs" in text and "; busy: trainers " in text
    assert "warning: trainers are idle for more than half of the step; raise train" in text
    assert "prompts x 8" in text and "a step between two sites at 1 Gbit/s" in text
    # Its student and teacher are made from scratch, in a folder that is gone after the dry run.
    toy = ("plan", "smoke/toy", "--cluster", "8xh100", "rollout.n=1")
    assert forked(command(*toy), output=output) == 0
    assert "to run it: backend='{type: ray, trainers:" in output.read_text()
    assert forked(command("plan", recipe, "--cluster", "8xtpu"), output=output) == 8
    line = output.read_text()
    assert line.startswith("error: --cluster '8xtpu'") and "64xh100/4" in line and "b200" in line


def test_the_work_on_a_cluster_is_that_of_the_step_on_paper(models: Path) -> None:
    run = plan(toy_recipe(models, {"rollout.n": 2})).run
    work = build_workload(run)
    metrics = run.metrics
    assert work.sampled_tokens == metrics["cost/sampled_tokens"]
    assert work.sample_flops == metrics["cost/flops_sample"]
    (teacher,) = work.teachers
    assert teacher.tokens == metrics["cost/scored_tokens"]
    head = teacher.dims.count_head_flops(teacher.tokens)
    assert teacher.flops + head == metrics["cost/flops_score"]
    # Layers are always recomputed there: one more forward pass of the body.
    read = count_read_tokens(
        [(d.rollout.prompt_tokens, len(d.rollout.tokens)) for d in run.record.datums]
    )
    again = work.student.count_hidden_flops(read.tokens, read.contexts)
    assert work.update_flops == metrics["cost/flops_update"] + again + head


def test_the_work_of_scorers_that_learn_is_that_of_the_step_on_paper(models: Path) -> None:
    adapted = {"model": str(models / "student"), "lora": {"rank": 2}}
    scorers = {"critic": {"type": "value", "updates": 2, "model": adapted}}
    one, two = (plan(toy_recipe(models, changes)).run for changes in ({}, {"scorers": scorers}))
    (critic,) = build_workload(two).learners
    phases = ("cost/flops_score", "cost/flops_update")
    assert critic.flops == sum(two.metrics[name] - one.metrics[name] for name in phases) > 0
    weights = two.record.scalars["scorer-critic"].dims.parameters
    assert 4 * weights < critic.num_bytes
    (cluster,) = describe_clusters(two, [parse_cluster("8xh100")])
    assert cluster["learners"] == ["scorer-critic"]


def test_a_teacher_with_the_weights_of_the_student_needs_no_gpus(models: Path) -> None:
    run = plan(
        toy_recipe(models, {"teacher": {"type": "privileged", "teacher": SELF, "system": "abcd"}})
    ).run
    (cluster,) = describe_clusters(run, [parse_cluster("8xh100")])
    assert all(not split["split"]["teachers"] for split in cluster["splits"])
    assert cluster["splits"][0]["seconds"]["score"] > 0


def test_a_cluster_plan_of_float32_is_slower_than_of_bfloat16(models: Path) -> None:
    """Check that the dtype of the recipe reaches the rates of student and teacher."""
    half = {"student.dtype": "bfloat16", "teacher.dtype": "bfloat16"}
    works = [build_workload(plan(toy_recipe(models, changes)).run) for changes in ({}, half)]
    assert [work.item_bytes for work in works] == [4, 2]
    assert [work.teachers[0].item_bytes for work in works] == [4, 2]
    cluster = parse_cluster("8xh100")
    split = Split(4, 2, 2)
    full, half_seconds = (
        forecast_step(work, cluster, split, ahead=False).seconds for work in works
    )
    assert full["update"] == pytest.approx(half_seconds["update"] * 989 / 67)
    assert full["score"] == pytest.approx(half_seconds["score"] * 989 / 67)


def test_what_fits_on_no_split_is_said_beside_the_clusters_that_hold_it(models: Path) -> None:
    run = plan(toy_recipe(models)).run
    tiny = replace(parse_cluster("8xh100"), gpu=Gpu("tiny", 1e12, 1e12, 1e12, 1000))
    small, large = describe_clusters(run, [tiny, parse_cluster("8xh100")])
    assert "each sampler holds the whole student" in small["refused"] and not small["splits"]
    assert large["refused"] is None and large["splits"]


def test_what_a_run_keeps_beside_its_steps_is_planned(models: Path) -> None:
    """Check copies of frozen weights laid out for decoding, and the state while it is saved."""
    changes = {"student.trainable_layers": 1, "rollout.max_new_tokens": 16}
    frozen = plan(toy_recipe(models, changes))
    dims, learning = frozen.run.record.dims, frozen.run.record.trainable_dims
    kept = 4 * (dims.body * (dims.layers - 1) // dims.layers + (0 if learning.head else dims.head))
    name = "weights kept laid out for decoding"
    assert {phase[name] for phase in frozen.memory.phases.values()} == {kept}
    assert frozen.memory.phases["sample"]["weights laid out for decoding"] == (
        4 * (dims.body + dims.head) - kept
    )
    saving = plan(toy_recipe(models, {**changes, "train.save_in_background": True}))
    copied = saving.memory.phases["update"]["copy of the state being saved"]
    assert copied == 3 * 4 * learning.parameters
    assert saving.memory.of("update") == frozen.memory.of("update") + copied


def test_a_folder_without_weights_can_be_planned_and_not_run(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sizes"
    shutil.copytree(models / "student", folder)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    recipe = toy_recipe(models, {"student.model": str(folder)})
    assert plan(recipe).run.metrics["cost/flops"] > 0
    with pytest.raises(ModelError, match="no weights; convert them"):
        locate(recipe.student)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_memory_of_a_pass_grows_with_its_tokens_and_layers(tmp_path: Path, dtype: str) -> None:
    """Also where the casts of a layer take more than short texts do."""
    folder = make_model(tmp_path / "wide", seed=1, hidden_size=1024)
    config = toy_recipe(tmp_path, {"student.model": str(folder), "student.dtype": dtype}).student
    for recompute in (False, True):
        few, many = (
            measure_footprint(config, str(folder), layers, recompute).update for layers in (1, 24)
        )
        assert 0 < few.each <= many.each


def test_a_plan_keeps_no_answer_of_a_cached_teacher(models: Path, tmp_path: Path) -> None:
    """Check that planned answers have no width; a run that found them would learn from them."""
    inner = {"type": "model", "model": str(models / "teacher")}
    teacher = {"type": "cached", "folder": str(tmp_path / "kept"), "teacher": inner}
    plan(toy_recipe(models, {"teacher": teacher}))
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(("name", "share"), [("int8", 0.25), ("nf4", 4.127 / 32), ("nvfp4", 1.0)])
def test_fewer_bits_of_a_teacher_are_counted(models: Path, name: str, share: float) -> None:
    whole, rounded = (
        plan(toy_recipe(models, {"teacher.quantization": bits}), process=0) for bits in (None, name)
    )
    body = whole.run.record.scorers["teacher"].dims.body
    saved = [found.memory.phases["score"]["teachers"] for found in (whole, rounded)]
    assert saved[0] - saved[1] == pytest.approx(4 * body * (1 - share), abs=1)


def test_a_base_that_adapters_share_is_counted_once(models: Path, tmp_path: Path) -> None:
    settings = {"base_model_name_or_path": str(models / "teacher"), "peft_type": "LORA"}
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"")

    def estimate(residency: str) -> dict[str, int]:
        member = {"type": "model", "residency": residency}
        members = {name: {**member, "model": str(tmp_path / name)} for name in "abc"}
        teacher = {"type": "pool", "kind": "sum", "teachers": members}
        return dict(plan(toy_recipe(models, {"teacher": teacher})).memory.phases["score"])

    alone, together = estimate("resident"), estimate("shared")
    assert alone["teachers"] == 3 * together["teachers"] > 0
    assert "a visiting teacher" not in alone
    assert together["a visiting teacher"] >= together["teachers"]
