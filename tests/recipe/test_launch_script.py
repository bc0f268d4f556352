"""A script that starts verl is read as bash expands it, and no part of it is run."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from practicum.errors import RecipeError
from practicum.recipe import load_recipe
from practicum.recipe.launch_script import read_launch_script
from practicum.recipe.verl import convert_verl

# The layout of verl's own examples.
SCRIPT = """\
#!/usr/bin/env bash
# on-policy distillation

set -xeuo pipefail

STUDENT=${STUDENT:-org/student-1b}   # may be set outside
TEACHER="${TEACHER:-org/teacher-8b}"
export VLLM_USE_V1=1
prompt_length=${PROMPT_LENGTH:-256}
response_length=${RESPONSE_LENGTH:-${LONGEST:-512}}
total=$(( (prompt_length + response_length) * 2 / 1 + 1 ))

train=$HOME/data/train.parquet
train_files="['$train', '${HOME}/data/more.parquet']"

DATA=(
    data.train_files="$train_files"
    data.train_batch_size=64  # prompts
    data.max_prompt_length=${prompt_length}
    data.max_response_length=$response_length
    # data.truncation='left'
    data.truncation='error'
)
MODEL=(actor_rollout_ref.model.path="$STUDENT" actor_rollout_ref.rollout.n=1)
MODEL+=( actor_rollout_ref.rollout.max_model_len=$total )
EXTRA=(
    distillation.enabled=True
    +distillation.teacher_models.one.model_path="$TEACHER"
    distillation.distillation_loss.loss_mode=k1
    distillation.distillation_loss.use_policy_gradient=True
    distillation.distillation_loss.use_task_rewards=False
    actor_rollout_ref.rollout.prompt_length='${data.max_prompt_length}'
    trainer.logger='["console","wandb"]'
    trainer.experiment_name="a \\"b\\" \\$c"
)
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ]; then
    LAUNCH=(uv run python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo --config-name=ppo \\
    "${DATA[@]}" \\
    "${MODEL[@]}" \\
    "${EXTRA[@]}" \\
    trainer.total_epochs=3 \\
    "$@" 2>&1 | tee log.txt
"""


def test_the_arguments_are_those_of_bash() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    # The command of the script prints its arguments, one per line.
    printing = SCRIPT.replace("LAUNCH=(uv run python3)", ":").replace(" 2>&1 | tee log.txt", "")
    printing = printing.replace("set -xeuo", "python3() { printf '%s\\n' \"$@\"; }\nset -euo")
    output = subprocess.run(
        [bash, "-c", printing], env={"HOME": "~"}, capture_output=True, text=True, check=True
    )
    expected = [line.lstrip("+") for line in output.stdout.splitlines() if "." in line]
    script = read_launch_script(SCRIPT, "run.sh")
    written = [f"{key}={text}" for key, text in script.arguments.items()]
    assert written == expected[1:] and len(written) > 15
    assert script.notes == [
        "not followed, since it is in a branch or a loop: LAUNCH= uv run python3",
        "not taken: --config-name=ppo",
    ]


def test_a_script_becomes_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    recipe, notes = convert_verl(tmp_path / "run.sh", tmp_path / "recipe.yaml")
    assert recipe["student"]["model"] == "org/student-1b"
    assert recipe["teacher"]["model"] == "org/teacher-8b"
    assert recipe["task"]["path"] == ["~/data/train.parquet", "~/data/more.parquet"]
    assert (recipe["prompt_tokens"], recipe["rollout"]["max_new_tokens"]) == (256, 512)
    assert "not taken: actor_rollout_ref.rollout.max_model_len = 1537" in notes


def test_what_only_the_shell_knows_is_named() -> None:
    command = "python -m verl.trainer.main_ppo a.b=1 c.d=$(nproc) e.f=$WORLD_SIZE g.h=${X%/*} i.j=2"
    script = read_launch_script(f"N=$(date)\n{command} k.l=$N", "run.sh")
    assert script.arguments == {"a.b": "1", "i.j": "2"}
    assert [note.rpartition(" compute ")[2] for note in script.notes] == [
        "$(nproc)",
        "$WORLD_SIZE",
        "${X%/*}",
        "$N",
    ]


def test_branches_loops_and_functions_are_not_followed() -> None:
    text = """\
    lr=1
    for lr in 2 3; do
        python -m verl.trainer.main_ppo a.lr=$lr
    done
    run() {
        lr=4
    }
    while true; do if x; then lr=5; fi; done
    cd here && python -m verl.trainer.main_ppo a.lr=$lr > log 2>&1 &
    python -m verl.trainer.main_ppo a.lr=9
    """
    script = read_launch_script(text, "run.sh")
    assert script.arguments == {"a.lr": "1"}
    assert [note.partition(": ")[2] for note in script.notes[:-1]] == [
        "python -m verl.trainer.main_ppo a.lr=$lr",
        "lr=4",
        "lr=5",
    ]
    assert "several times" in script.notes[-1]


@pytest.mark.parametrize("text", ["", "echo a.b=1", "python -m verl.trainer.main_ppo", "'", '"$(('])
def test_a_script_that_does_not_start_verl_is_refused(text: str) -> None:
    with pytest.raises(
        RecipeError, match=r"run\.sh: no command starts verl's main_ppo with arguments"
    ):
        read_launch_script(text, "run.sh")


def test_verls_default_estimator_is_a_critic(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        SCRIPT.replace("use_task_rewards=False", "use_task_rewards=True")
        .replace("data.train_batch_size=64", "data.train_batch_size=512")
        .replace("trainer.total_epochs=3", "trainer.total_training_steps=7 critic.ppo_epochs=2")
    )
    recipe, notes = convert_verl(tmp_path / "run.sh", tmp_path / "recipe.yaml")
    assert recipe["objective"]["losses"][0] == {
        "signal": "score(none)",
        "scorer": "critic",
        "correction": "ratio_clip(0.2, 0.2)",
    }
    assert recipe["scorers"]["critic"] == {
        "type": "value",
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "normalize": True,
        "clip": 0.5,
        "learning_rate": 1e-5,
        "max_grad_norm": 1.0,
        "updates": 4,
    }
    assert any("critic.model.path is missing" in note for note in notes)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert load_recipe(tmp_path / "recipe.yaml").scorers.keys() == {"critic"}
