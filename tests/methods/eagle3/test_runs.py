"""Whole runs of drafters: resumed after a kill, exported and read back, evaluated, and refused."""

import json
import os
import signal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy import TASK, assert_same_run, curve, forked, said, toy_recipe, toy_run

from practicum.errors import CapabilityError, CheckpointError, ModelError, RecipeError
from practicum.methods.eagle3 import eagle3
from practicum.recipe import parse_recipe, resolve_recipe
from practicum.recipe.settings import choose_setting
from practicum.report.cards import render_run_card
from practicum.runs.console import PlainConsole
from practicum.runs.evaluating import evaluate
from practicum.runs.exporting import export_run
from practicum.runs.opening import open_student
from practicum.runs.plan import plan
from practicum.studies.doctor import doctor
from practicum.training import loop

from .small import make_target

MODEL = {"architecture": "llama", "hidden_size": 32, "layers": 4, "heads": 2, "seed": 1}
DRAFTER: dict[str, Any] = {
    "student": {"model": MODEL, "drafter": {"layers": [1, 2, 3], "vocabulary": 4, "depth": 3}},
    "teacher": {"type": "self", "weights": "frozen"},
    "objective": {"signal": "full", "divergence": "forward_kl"},
    "rollout": {"n": 1, "max_new_tokens": 8},
    "train.checkpoint_every": 1,
    "evaluation": {"prompts": 6},
}
REPLAYS = {**DRAFTER, "rollout": {"source": "drafts(errors=2)", "max_new_tokens": 8}}
LEARNS = {
    **DRAFTER,
    "student.model": {**MODEL, "pretrain": {"steps": 150}},
    "task": {**TASK, "shortest": 4, "longest": 6, "train_size": 96, "heldout_size": 24},
    "optimizer.learning_rate": 0.02,
    "evaluation": {"prompts": 24},
    "train.steps": 15,
}
"""A target that can reverse strings: a drafter learns its texts in seconds."""


def change(**settings: Any) -> dict[str, Any]:
    """Return the changes with other settings of the drafter."""
    drafter = {**DRAFTER["student"]["drafter"], **settings}
    return {**DRAFTER, "student": {"model": MODEL, "drafter": drafter}}


@pytest.fixture(scope="module")
def run_folder(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_run(models, tmp_path_factory.mktemp("runs"), DRAFTER).folder


@pytest.mark.parametrize("changes", [DRAFTER, REPLAYS], ids=["eagle3", "replays"])
def test_a_killed_run_resumes_to_the_same_bytes(
    models: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = toy_run(models, tmp_path / "whole", changes).folder

    def die() -> None:
        original = loop.update_student

        def update(step: int, *rest: Any) -> Any:
            if step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(step, *rest)

        loop.update_student = update
        toy_run(models, tmp_path / "killed", changes)

    assert forked(die) == 137
    resumed = toy_run(models, tmp_path / "killed", changes, resume=True).folder
    assert_same_run(whole, resumed)
    assert curve(whole, "drafts/tokens_per_call")[0] >= 1


def test_the_student_answers_as_its_target(run_folder: Path) -> None:
    summary = json.loads((run_folder / "summary.json").read_text())
    assert summary["after"]["reverse_kl"] == pytest.approx(0, abs=1e-5)
    assert summary["after"]["drafts/tokens_per_call"] >= 1


def test_the_end_of_a_run_is_about_the_drafts(models: Path, tmp_path: Path) -> None:
    stream = StringIO()
    folder = toy_run(models, tmp_path, LEARNS, console=PlainConsole(stream)).folder
    summary = json.loads((folder / "summary.json").read_text())
    before, after, gain = (summary[key] for key in ("before", "after", "draft_gain"))
    calls = [part["drafts/tokens_per_call"] for part in (before, after)]
    shares = [part["drafts/acceptance"] for part in (before, after)]
    assert gain["mean"] == pytest.approx(calls[1] - calls[0], abs=1e-12)
    assert gain["low"] <= gain["mean"] <= gain["high"]
    (change, acceptance) = summary["verdict"]["reasons"][:2]
    assert change.startswith(
        f"{calls[0]:.2f} to {calls[1]:.2f} tokens per target call ({gain['mean']:+.2f} ["
    )
    assert acceptance == f"acceptance {shares[0]:.2f} to {shares[1]:.2f}"
    text = stream.getvalue()
    step = curve(folder, "drafts/acceptance")[0]
    assert f" | acceptance {step:.3g} | " in next(
        line for line in text.splitlines() if line.startswith("step 1/15")
    )
    table = {line[:20].strip(): line[20:].split() for line in text.splitlines()}
    assert table["tokens / target call"] == [f"{value:.2f}" for value in calls]
    assert table["draft acceptance"] == [f"{value:.2f}" for value in shares]
    assert f"verdict: BETTER: {change}; {acceptance}" in text and gain["low"] > 0
    assert "gain in tokens per target call: " in text and "gain in accuracy" not in text
    page = (folder / "report.html").read_text()
    assert "tokens per target call on held-out prompts, " in page
    assert "smallest gain that" not in page
    assert "<td>draft acceptance</td>" in render_run_card("toy", "runs/toy", summary)


def test_states_on_disk_change_no_byte_of_a_run(
    models: Path, run_folder: Path, tmp_path: Path
) -> None:
    source = {"type": "cache", "path": str(run_folder / "rollouts.jsonl")}
    replayed = {**DRAFTER, "rollout": {**DRAFTER["rollout"], "source": source}}
    cached = {**replayed, "student": change(cache=str(tmp_path / "states"))["student"]}
    whole = toy_run(models, tmp_path / "whole", replayed).folder
    for name in ("writes", "reads"):
        assert_same_run(whole, toy_run(models, tmp_path / name, cached).folder)
    texts = len((run_folder / "rollouts.jsonl").read_text().splitlines())
    assert 0 < len(list((tmp_path / "states").iterdir())) <= texts
    with pytest.raises(ModelError, match="is not about this target after layers"):
        toy_run(models, tmp_path / "other", {**cached, "student.model": {**MODEL, "seed": 2}})


NAMES = {
    "fc.weight": (32, 96),
    "norm.weight": (32,),
    "lm_head.weight": (4, 32),
    "{}hidden_norm.weight": (32,),
    "{}input_layernorm.weight": (32,),
    "{}post_attention_layernorm.weight": (32,),
    "{}self_attn.q_proj.weight": (32, 64),
    "{}self_attn.k_proj.weight": (16, 64),
    "{}self_attn.v_proj.weight": (16, 64),
    "{}self_attn.o_proj.weight": (32, 32),
    "{}mlp.gate_proj.weight": (128, 32),
    "{}mlp.up_proj.weight": (128, 32),
    "{}mlp.down_proj.weight": (32, 128),
    "d2t": (4,),
}
"""The tensors of SpecForge's `LlamaForCausalLMEagle3` (specforge/modeling/draft/llama3_eagle.py, a6b6b023) and, with another
prefix of the layer, of Speculators' `Eagle3DraftModel` (src/speculators/models/eagle3/core.py, 0.9.0), for these sizes."""


@pytest.mark.parametrize(
    ("layout", "prefix"), [("sglang", "midlayer."), ("speculators", "layers.0.")]
)
def test_an_export_has_the_names_of_the_engines_and_reads_back(
    run_folder: Path, tmp_path: Path, layout: str, prefix: str
) -> None:
    folder = export_run(run_folder, tmp_path / "drafter", format=layout).folder
    tensors = load_file(folder / "model.safetensors")
    rows = len(tensors["t2d"])
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {name.format(prefix): shape for name, shape in NAMES.items()}
    assert shapes == {**expected, "t2d": (rows,), "embed_tokens.weight": (rows, 32)}
    assert tensors["t2d"].dtype == torch.bool and tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].nonzero()[:, 0].equal(tensors["d2t"] + torch.arange(4))
    described = json.loads((folder / "config.json").read_text())
    if layout == "sglang":
        assert described["architectures"] == ["LlamaForCausalLMEagle3"]
        assert described["model_type"] == "llama" and described["num_hidden_layers"] == 1
        assert described["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    else:
        assert described["architectures"] == ["Eagle3Speculator"]
        assert described["speculators_model_type"] == "eagle3"
        assert described["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
        assert described["transformer_layer_config"]["vocab_size"] == rows
        assert described["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert described["draft_vocab_size"] == 4
    _, student = open_student(run_folder)
    trainer = student.trainer
    again = eagle3.read(folder, trainer.language_model.model)
    states = torch.randn(5, 32)
    assert again.layers == trainer.drafter.layers
    mine, theirs = (part.head.logits(part.finish(states)) for part in (again, trainer.drafter))
    assert mine.equal(theirs)
    # A new run can begin with it.
    settings = {
        **DRAFTER,
        "student": {"model": MODEL, "drafter": {"depth": 3, "start": str(folder)}},
    }
    result = toy_run(run_folder, tmp_path / "second", {**settings, "train.steps": 1})
    assert result.folder.is_dir()


def test_a_model_is_evaluated_with_an_exported_drafter(run_folder: Path, tmp_path: Path) -> None:
    folder = export_run(run_folder, tmp_path / "drafter", format="sglang").folder
    trained = evaluate(run_folder, progress=False)
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(resolve_recipe(toy_recipe(run_folder, DRAFTER))))
    model = str(run_folder / "models" / "student")
    summary = evaluate(model, recipe=recipe, drafter=str(folder), progress=False)
    names = ["drafts/tokens_per_call", "drafts/acceptance", "drafts/acceptance_0"]
    assert [summary[name] for name in names] == [trained[name] for name in names]
    assert summary["drafts/seconds"] > 0 and summary["drafts/seconds_without"] > 0
    alone = evaluate(model, recipe=recipe, progress=False)
    assert alone["accuracy"] == summary["accuracy"], "the target answers as with its drafter"
    assert "drafts/seconds" not in alone
    with pytest.raises(RecipeError, match="is a run; give the model"):
        evaluate(run_folder, drafter=str(folder), progress=False)


@pytest.fixture(scope="module")
def trained_drafter(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run = toy_run(models, folder, {**LEARNS, "rollout": {"source": "teacher", "max_new_tokens": 8}})
    return export_run(run.folder, folder / "drafter", format="speculators").folder


@pytest.mark.parametrize("width", [1, 2])
def test_a_student_samples_the_same_text_with_a_drafter(
    models: Path, trained_drafter: Path, tmp_path: Path, width: int
) -> None:
    changes = {
        **{key: LEARNS[key] for key in ("task", "student.model", "evaluation")},
        "train": {"steps": 3, "prompts_per_step": 4, "checkpoint_every": 1, "threads": 1},
    }
    draft = {"drafter": str(trained_drafter), "width": width, "most_texts": 4}
    plain, drafted = (
        toy_run(models, tmp_path / name, {**changes, "rollout": {**rollout, "max_new_tokens": 8}})
        for name, rollout in (("plain", {}), ("drafted", {"draft": draft}))
    )
    assert max(curve(drafted.folder, "drafts/tokens_per_call")) > 1.3
    assert_same_run(plain.folder, drafted.folder, journals=("rollouts.jsonl", "alarms.jsonl"))
    metrics = [
        [
            {key: value for key, value in row.items() if not key.startswith("drafts/")}
            for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        ]
        for folder in (plain.folder, drafted.folder)
    ]
    assert metrics[0] == metrics[1]
    # The evaluation has more texts than `most_texts`; the verdict is about accuracy in any case.
    assert "draft_gain" not in json.loads((drafted.folder / "summary.json").read_text())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rollout.max_staleness": 1}, "a copy of the student samples"),
        ({"rollout.engine": "vllm"}, "an engine samples"),
        ({"rollout.source": "speculative"}, "sample each token together"),
        ({"backend": {"type": "ray"}}, "'ray' samples without drafts"),
        (DRAFTER, r"student\.drafter already drafts"),
    ],
)
def test_a_drafter_that_would_not_be_used_is_refused(
    models: Path, changes: dict[str, Any], text: str
) -> None:
    data = {**changes, "rollout.draft": {"drafter": "folder"}}
    with pytest.raises(RecipeError, match=rf"rollout\.draft: .*{text}.*; leave draft out"):
        toy_recipe(models, data)


def test_bad_folders_are_refused_in_one_line(run_folder: Path, tmp_path: Path) -> None:
    folder = export_run(run_folder, tmp_path / "drafter", format="sglang").folder
    target = make_target()
    with pytest.raises(ModelError, match=r"for a target of .* and this target has 64 and 32"):
        eagle3.read(folder, target.model)
    tensors = load_file(folder / "model.safetensors")
    rows = len(tensors["t2d"])
    with pytest.raises(ModelError, match="embedding of another target"):
        eagle3.read(folder, make_target(rows=rows).model)
    own = open_student(run_folder)[1].trainer.language_model.model
    ids = tensors["t2d"].nonzero()[:, 0]
    save_file({**tensors, "d2t": ids}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="d2t does not hold offsets"):
        eagle3.read(folder, own)
    del tensors["fc.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"fc\.weight is missing"):
        eagle3.read(folder, own)
    with pytest.raises(ModelError, match="no drafter can be read"):
        eagle3.read(tmp_path / "nothing", own)
    with pytest.raises(RecipeError, match="written as speculators or sglang"):
        export_run(run_folder, tmp_path / "other", format="gguf")
    with pytest.raises(RecipeError, match="the run trained a drafter"):
        export_run(run_folder, tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (change(layers=[1, 2, 4]), RecipeError, "three rising numbers from 1 to 3"),
        (change(vocabulary=1), RecipeError, "vocabulary: 1 tokens are too few"),
        (change(type="eagle9"), RecipeError, "no drafter named 'eagle9'"),
        ({**DRAFTER, "objective": {"signal": "sampled"}}, CapabilityError, "whole distribution"),
        (
            {**DRAFTER, "teacher": {"type": "model", "model": {**MODEL, "seed": 2}}},
            ModelError,
            "not those of the drafter's target",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    models: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        toy_run(models, tmp_path, changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("student", "text"),
    [
        ({"trainable_layers": 1}, "trainable_layers has no effect"),
        ({"drafter": {"width": 2}}, "set verify: shared"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    models: Path, student: dict[str, Any], text: str
) -> None:
    data = {**DRAFTER, "student": {**DRAFTER["student"], **student}}
    with pytest.raises(RecipeError, match=text):
        toy_recipe(models, data)


def test_another_backend_is_refused(models: Path) -> None:
    data = resolve_recipe(toy_recipe(models, DRAFTER))
    with pytest.raises(RecipeError, match=r"student\.drafter: backend 'ray' trains no drafter"):
        parse_recipe({**data, "backend": {"type": "ray"}}, "toy")


def test_a_resumed_run_keeps_its_vocabulary(models: Path, run_folder: Path, tmp_path: Path) -> None:
    changes = change(vocabulary=4)
    first = toy_run(models, tmp_path, {**changes, "train.steps": 2}).folder
    checkpoint = max((first / "checkpoints").iterdir()) / "student.safetensors"
    saved = load_file(checkpoint)
    assert saved["t2d"].sum() == 4
    trainer = open_student(first)[1].trainer
    with pytest.raises(CheckpointError, match="another vocabulary"):
        trainer.load_state({"student": {**saved, "t2d": ~saved["t2d"]}, "optimizer": {}})


def test_the_source_of_replays_needs_a_drafter(models: Path, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="replays the errors of a drafter"):
        toy_run(models, tmp_path, {"rollout": {"source": "drafts", "max_new_tokens": 5}})


def test_the_command_line_exports_a_drafter(run_folder: Path, tmp_path: Path) -> None:
    status, text = said(
        tmp_path, "export", str(run_folder), str(tmp_path / "out"), "--format", "speculators"
    )
    assert status == 0 and "as its draft model" in text


def test_neither_the_doctor_nor_the_plan_judges_a_drafter_as_a_student(models: Path) -> None:
    recipe = toy_recipe(models, DRAFTER)
    for examine in (doctor, plan):
        with pytest.raises(RecipeError, match=r"^student\.drafter: .*; run"):
            examine(recipe)
    # The target does not learn, so the rate of a student of its size does not fit.
    data = {"student": {"model": "smollm2-135m-instruct"}}
    drafted = {"student": {**data["student"], "drafter": {"type": "eagle3"}}}
    choices = choose_setting(data), choose_setting(drafted)
    assert choices[0] is not None and choices[1] is not None
    assert choices[0].setting.parameters is not None and choices[1].setting.parameters is None
    assert choices[1].setting.learning_rate == 20 * choices[0].setting.learning_rate
    assert choices[1].setting.steps == choices[0].setting.steps
