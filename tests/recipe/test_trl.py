"""`practicum convert SCRIPT.py`: scripts in the layout of TRL's examples are read, and never run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.cli.convert import write_recipe
from practicum.errors import RecipeError
from practicum.recipe import parse_recipe
from practicum.recipe.trl import convert_trl

Convert = Callable[[str], tuple[dict[str, Any], list[str]]]

GKD = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

raise SystemExit("this script was run")

student_name = "Qwen/Qwen3-0.6B"
tokenizer = AutoTokenizer.from_pretrained(student_name)
model = AutoModelForCausalLM.from_pretrained(student_name, dtype="auto")
teacher = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")
train_dataset = load_dataset("my-org/chats", split="train")

training_args = GKDConfig(
    output_dir="runs/gkd 1",
    learning_rate=1e-5,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    lmbda=0.7,
    beta=0.1,
    max_steps=300,
    warmup_ratio=0.1,
    save_steps=100,
    bf16=True,
    teacher_model_init_kwargs={"dtype": "bfloat16"},
)
trainer = GKDTrainer(
    model=model,
    teacher_model=teacher,
    args=training_args,
    processing_class=tokenizer,
    train_dataset=train_dataset,
)
trainer.train()
"""

PARSED = """
import argparse
from trl import GOLDConfig, GOLDTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

def main():
    parser = TrlParser((ScriptArguments, GOLDConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    dataset = load_dataset(script_args.dataset_name)
    trainer = GOLDTrainer(
        model=model_args.model_name_or_path,
        teacher_model=training_args.teacher_model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        peft_config=LoraConfig(r=32, lora_alpha=16, target_modules="all-linear"),
    )

if __name__ == "__main__":
    main()
"""

GRPO = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("json", data_files="rows.jsonl")
rate = 1e-6
rate = rate * 2
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=accuracy_reward,
    args=GRPOConfig(
        learning_rate=rate, num_generations=4, per_device_train_batch_size=16, beta=0.04,
        epsilon_high=0.28, loss_type="dr_grpo", scale_rewards=False, use_vllm=True, num_train_epochs=2,
    ),
    train_dataset=dataset["train"],
    peft_config=LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.1, use_rslora=True, target_modules=["q_proj", "v_proj"]
    ),
)
"""


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    """Return a function that converts the text of a script in a separate folder."""

    def call(text: str) -> tuple[dict[str, Any], list[str]]:
        script = tmp_path / "train.py"
        script.write_text(text, encoding="utf-8")
        return convert_trl(script, tmp_path / "recipe.yaml")

    return call


def test_a_script_of_gkd_becomes_a_recipe_without_being_run(convert: Convert) -> None:
    recipe, notes = convert(GKD)
    assert recipe["name"] == "gkd-1"
    assert recipe["student"] == {"model": "Qwen/Qwen3-0.6B"}
    assert recipe["teacher"] == {"type": "model", "model": "Qwen/Qwen3-8B"}
    assert recipe["task"] == {"type": "datasets", "path": "my-org/chats"}
    assert recipe["rollout"] == {
        "max_new_tokens": 128,
        "temperature": 0.9,
        "source": "mix(student=0.7, other=dataset)",
    }
    assert recipe["objective"]["divergence"] == "jsd(0.1)"
    assert recipe["optimizer"]["learning_rate"] == 1e-5
    assert recipe["optimizer"]["schedule"] == "linear" and recipe["optimizer"]["warmup_steps"] == 30
    assert recipe["train"] == {"prompts_per_step": 32, "steps": 300, "checkpoint_every": 100}
    assert recipe["seed"] == 42
    assert "not taken: GKDConfig.bf16 = True" in notes
    assert any(note.startswith("not taken: GKDConfig.teacher_model_init_kwargs") for note in notes)
    parse_recipe(recipe, "converted")


@pytest.mark.parametrize(
    ("fields", "source", "divergence"),
    [
        ("lmbda=1.0, beta=1.0", "student", "reverse_kl"),
        ("lmbda=0.0, beta=0.0", "dataset", "forward_kl"),
        ("lmbda=0, seq_kd=True", "teacher", "jsd(0.5)"),
        ("seq_kd=True", "mix(student=0.5, other=teacher)", "jsd(0.5)"),
        ("", "mix(student=0.5, other=dataset)", "jsd(0.5)"),
    ],
)
def test_lambda_and_beta_choose_source_and_divergence(
    convert: Convert, fields: str, source: str, divergence: str
) -> None:
    recipe, _ = convert(GKD.replace("lmbda=0.7,\n    beta=0.1,", f"{fields}," if fields else ""))
    assert recipe["rollout"]["source"] == source
    assert recipe["objective"]["divergence"] == divergence
    parse_recipe(recipe, "converted")


@pytest.mark.parametrize(
    ("fields", "metric"),
    [
        ("load_best_model_at_end=True", "reverse_kl"),
        ('load_best_model_at_end=True, metric_for_best_model="eval_loss"', "reverse_kl"),
        ('load_best_model_at_end=True, metric_for_best_model="accuracy"', "accuracy"),
        ('metric_for_best_model="accuracy"', None),
    ],
)
def test_the_metric_of_the_best_checkpoint_is_taken(
    convert: Convert, fields: str, metric: str | None
) -> None:
    evaluation = f'eval_strategy="steps", eval_steps=50, {fields},'
    recipe, notes = convert(GKD.replace("beta=0.1,", f"beta=0.1, {evaluation}"))
    assert recipe["train"].get("metric_for_best_model") == metric
    assert recipe["evaluation"] == {"every": 50}
    assert not any(note.startswith("not taken: GKDConfig.metric") for note in notes)
    parse_recipe(recipe, "converted")


@pytest.mark.parametrize(
    ("named", "tracking", "note"),
    [
        ('"wandb"', {"type": "wandb"}, None),
        ('"none"', None, None),
        ('["trackio", "clearml"]', {"type": "trackio"}, "['trackio', 'clearml']"),
        ('"comet_ml"', None, "'comet_ml'"),
    ],
)
def test_the_tracker_is_taken_or_named(
    convert: Convert, named: str, tracking: dict[str, str] | None, note: str | None
) -> None:
    recipe, notes = convert(GKD.replace("bf16=True,", f"bf16=True, report_to={named},"))
    assert recipe.get("tracking") == tracking
    told = [line for line in notes if "report_to" in line]
    assert told == ([] if note is None else [f"not taken: GKDConfig.report_to = {note}"])


def test_what_only_a_run_knows_is_named_with_its_line(convert: Convert) -> None:
    recipe, notes = convert(PARSED)
    assert any(note.startswith("line 6: TrlParser reads the command line") for note in notes)
    for place in (
        "line 10: GOLDTrainer.model = model_args.model_name_or_path is no literal; not taken",
        "line 11: GOLDTrainer.teacher_model = training_args.teacher_model_name_or_path",
        "line 13: GOLDTrainer.train_dataset = dataset[script_args.dataset_train_split]",
    ):
        assert any(note.startswith(place) for note in notes), place
    assert any("student.model: missing" in note for note in notes)
    assert recipe["student"]["lora"] == {"rank": 32, "alpha": 16}
    assert recipe["optimizer"]["learning_rate"] == 1e-7 and recipe["rollout"]["top_p"] == 0.95


def test_grpo_has_the_reward_and_an_anchor(convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n' * 10)
    recipe, notes = convert(GRPO.replace('"rows.jsonl"', repr(str(tmp_path / "rows.jsonl"))))
    assert recipe["teacher"] == {"type": "none"} and recipe["rollout"]["n"] == 4
    assert recipe["train"]["prompts_per_step"] == 4
    assert recipe["train"]["steps"] == 6, "2 epochs of 10 rows, 4 prompts per step"
    expected = {"rank": 16, "alpha": 32, "rslora": True, "targets": ["q_proj", "v_proj"]}
    assert recipe["student"]["lora"] == expected
    reward, anchor = recipe["objective"]["losses"]
    assert reward == {"signal": "score(group_mean)", "correction": "ratio_clip(0.2, 0.28)"}
    assert anchor["against"] == "reference" and anchor["coefficient"] == 0.04
    assert recipe["task"]["path"] == "rows.jsonl" and recipe["task"]["verifier"] == "math"
    for text in (
        "line 14: GRPOConfig.learning_rate = rate is no literal",
        "line 12: GRPOTrainer.reward_funcs = accuracy_reward is no literal",
        "not taken: GRPOConfig.use_vllm = True",
        "not taken: LoraConfig.lora_dropout = 0.1",
        "loss_type dr_grpo has no equivalent here",
    ):
        assert any(text in note for note in notes), (text, notes)
    parse_recipe(recipe, "converted")


def test_distillation_of_trl_is_on_policy(convert: Convert) -> None:
    script = (
        "from trl import DistillationConfig, DistillationTrainer\n"
        "args = DistillationConfig(teacher_model_name_or_path='big', temperature=0.7)\n"
        "DistillationTrainer(model='small', args=args, train_dataset=load_dataset('rows', 'main'))\n"
    )
    recipe, notes = convert(script)
    assert recipe["teacher"]["model"] == "big" and recipe["task"]["name"] == "main"
    assert "source" not in recipe["rollout"] and recipe["objective"]["divergence"] == "reverse_kl"
    assert any("divides both models' logits by temperature 0.7" in note for note in notes)
    assert any("train.steps: missing; set rows * 3 / 8" in note for note in notes)


MISTAKES = {
    "no trainer": ("print('hello')", "calls none of GKDConfig, GOLDConfig"),
    "no Python": ("GKDConfig(", "is not Python that can be read"),
    "no number": (
        "GKDConfig(learning_rate='fast')",
        "GKDConfig.learning_rate: 'fast' is not a number",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_script_that_cannot_be_read_is_one_line(convert: Convert, name: str) -> None:
    text, message = MISTAKES[name]
    with pytest.raises(RecipeError, match=message):
        convert(text)


def test_the_command_writes_recipe_and_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(GKD)
    write_recipe(tmp_path / "train.py", tmp_path / "recipe.yaml")
    text = (tmp_path / "recipe.yaml").read_text()
    assert yaml.safe_load(text)["train"]["steps"] == 300
    assert "# not taken: GKDConfig.bf16 = True" in text and "bf16" in capsys.readouterr().err
