"""The unchanged tinker package and the unchanged recipe of its cookbook against a server in a separate process.

`PRACTICUM_TINKER_PYTHON` names an interpreter that has both; the default is the interpreter of the tests.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from toy import environment
from transformers import AutoConfig, AutoModelForCausalLM

from practicum import functional as F
from practicum.text import build_character_tokenizer

pytest.importorskip("uvicorn")

PYTHON = os.environ.get("PRACTICUM_TINKER_PYTHON", sys.executable)
CLIENT = Path(__file__).parent / "sdk_client.py"
SOURCE = Path(__file__).resolve().parents[2] / "src"


def needs(module):
    try:
        asked = subprocess.run(
            [PYTHON, "-c", f"import {module}"], capture_output=True, timeout=120, check=False
        )
    except OSError as error:
        pytest.skip(f"{PYTHON} cannot be run ({error})")
    if asked.returncode:
        pytest.skip(f"{PYTHON} cannot import {module}; set PRACTICUM_TINKER_PYTHON to one that can")


@contextlib.contextmanager
def server(folder, *words):
    """Run `practicum serve` until the block ends; yield its address and its log file."""
    log = folder / f"server-{len(list(folder.glob('server-*')))}.log"
    env = environment({"PYTHONPATH": str(SOURCE)})
    with log.open("w") as out:
        command = [
            sys.executable,
            "-m",
            "practicum",
            "serve",
            *words,
            "--port",
            "0",
            "--device",
            "cpu",
        ]
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        address = wait_for(log, r"TINKER_BASE_URL=(\S+)", process)
        yield address, log
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM, log.read_text()
    finally:
        process.kill()
        process.wait()


def wait_for(log, pattern, process):
    for _ in range(600):
        match = re.search(pattern, log.read_text())
        if match:
            return match[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def client(address, *words, cwd=None):
    env = environment({"TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-local", "PYTHONPATH": ""})
    done = subprocess.run(
        [PYTHON, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


@pytest.mark.slow
def test_the_tinker_package_samples_scores_trains_and_resumes(models, tmp_path):
    needs("tinker")
    words = (
        f"teacher={models / 'teacher'}",
        "--student",
        f"student={models / 'student'}",
        "--out",
        "served",
    )
    with server(tmp_path, *words) as (address, _):
        found = json.loads(client(address, str(CLIENT), "-").stdout.splitlines()[-1])
    with server(tmp_path, *words) as (address, _):
        resumed = json.loads(client(address, str(CLIENT), found["path"]).stdout.splitlines()[-1])[
            "resumed"
        ]
    assert resumed == found["whole"][2:]
    assert found["whole"][-1] < found["whole"][0]
    assert found["same_seed"] and found["lengths"] == [5, 5] and found["base"] == "teacher"
    scored = found["prompt_logprobs"]
    assert scored[0] is None and found["last"][:4] == [None] * 4
    assert found["last"][4:] == pytest.approx(scored[4:], abs=1e-5)
    assert (
        found["topk"][0] is None
        and all(len(row) == 2 for row in found["topk"][1:])
        and found["sample_topk"] == 1
    )
    assert (
        found["dense"] == found["sparse"]
        and found["dense"][1] == [0.0, 0.0]
        and found["dense"][2][0] < 0
    )
    assert found["alternatives"] == [5, 2]
    own = torch.tensor(found["own"])
    sampler, advantages = (
        torch.tensor([-1.0, -2.0, -3.0, -1.5]),
        torch.tensor([0.0, 1.0, -0.5, 2.0]),
    )
    for name, value in found["sums"].items():
        assert value == pytest.approx(
            F.POLICY_LOSSES[name].function(own, sampler, advantages).sum().item(), abs=1e-4
        )
    assert found["wide"] == [[4, 2], [4, 2]]
    assert found["custom"]["mine"] == pytest.approx((own**2).sum().item(), abs=1e-4)
    assert found["saved"] == pytest.approx(found["snapshot"], abs=1e-6)
    assert found["snapshot"] == pytest.approx(found["own"], abs=1e-5)
    assert [text.split(":")[0] for text in found["failures"]] == [
        "NotFoundError",
        "RequestFailedError",
        "BadRequestError",
    ]
    assert "no model 'nobody' is served here" in found["failures"][0]
    assert "loss_fn stable_reinforce and its" in found["failures"][1]
    assert found["run"] == "student" and "weights/half" in found["checkpoints"]


@pytest.mark.slow
def test_the_cookbooks_on_policy_distillation_runs_and_resumes_unchanged(tmp_path):
    needs("tinker_cookbook.recipes.distillation.on_policy_distillation")
    names = (
        "Qwen/Qwen3.5-9B-Base",
        "Qwen/Qwen3.5-9B",
    )  # known to the recipe; here folders of tiny models
    for seed, name in enumerate(names):
        write_model(tmp_path / name, seed)
    data = tmp_path / "zwhe99" / "DeepMath-103K"
    data.mkdir(parents=True)
    rows = [json.dumps({"question": f"What is {n} + {n * 7 % 31}?"}) for n in range(32)]
    (data / "train.jsonl").write_text("\n".join(rows))
    recipe = [
        "-m",
        "tinker_cookbook.recipes.distillation.on_policy_distillation",
        f"model_name={names[0]}",
        f"teacher_model={names[1]}",
        "renderer_name=role_colon",
        "groups_per_batch=2",
        "group_size=2",
        "max_tokens=12",
        "learning_rate=1e-2",
        "lora_rank=4",
        "save_every=1",
        "log_path=log",
    ]
    with server(tmp_path, *names, "--out", "served") as (address, _):
        client(address, *recipe, "max_steps=2", "behavior_if_log_dir_exists=delete", cwd=tmp_path)
    with server(tmp_path, *names, "--out", "served") as (address, log):
        client(address, *recipe, "max_steps=4", "behavior_if_log_dir_exists=resume", cwd=tmp_path)
        said = log.read_text()
    rows = [
        json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if "teacher_kl" in row] == [0, 1, 2, 3]
    assert re.search(r"Qwen3.5-9B-Base: loaded tinker://\S+/weights/", said)
    assert re.search(r"Qwen/Qwen3.5-9B: \d+ requests, scored", said)
    assert re.search(r"forward_backward importance_sampling on 4 texts", said)


QUESTIONS = [f"What is {n} + {n * 7 % 31}?" for n in range(32)]


@pytest.mark.slow
def test_the_cookbooks_two_teachers_teach_each_its_own_prompts_unchanged(tmp_path):
    needs("tinker_cookbook.recipes.distillation.on_policy_multi_teacher")
    names = ("Qwen/Qwen3.5-9B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.5-397B-A17B")
    for seed, name in enumerate(names):
        write_model(tmp_path / name, seed)
    write_rows(
        tmp_path / "zwhe99" / "DeepMath-103K", [{"question": question} for question in QUESTIONS]
    )
    turns = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    write_rows(tmp_path / "allenai" / "tulu-3-sft-mixture", turns)
    recipe = [
        "-m",
        "tinker_cookbook.recipes.distillation.on_policy_multi_teacher",
        "renderer_name=role_colon",
        "deepmath_groups_per_batch=2",
        "tulu3_groups_per_batch=2",
        "group_size=2",
        "max_tokens=12",
        "lora_rank=4",
        "max_steps=2",
        "log_path=log",
    ]
    with server(tmp_path, *names, "--out", "served") as (address, log):
        client(address, *recipe, cwd=tmp_path)
        said = log.read_text()
    rows = [
        json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if "teacher_kl" in row] == [0, 1]
    for teacher in names[1:]:
        assert re.search(rf"{re.escape(teacher)}: \d+ requests, scored", said), said


@pytest.mark.slow
@pytest.mark.parametrize("how", [("topk=4",), ("topk=4", "reverse=True")], ids=" ".join)
def test_the_cookbooks_self_distillation_runs_unchanged(tmp_path, how):
    needs("tinker_cookbook.recipes.sdft.train")
    name = "Qwen/Qwen3-8B"
    write_model(tmp_path / name, 0)
    make = (
        "import datasets\nrows = [{'prompt': f'{n} + 1 =', 'golden_response': [str(n + 1)]} for n in range(12)]\n"
        "datasets.Dataset.from_list(rows).save_to_disk('tools')"
    )
    recipe = [
        "-m",
        "tinker_cookbook.recipes.sdft.train",
        "dataset=toolalpaca",
        "toolalpaca_data_path=tools",
        "renderer_name=role_colon",
        "groups_per_batch=2",
        "max_tokens=8",
        "lora_rank=4",
        "max_context_length=256",
        "eval_every=0",
        "max_steps=2",
        "log_path=log",
        *how,
    ]
    with server(tmp_path, name, "--out", "served") as (address, _):
        client(address, "-c", make, cwd=tmp_path)
        client(address, *recipe, cwd=tmp_path)
    rows = [
        json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len([row for row in rows if any(key.startswith("sdft/") for key in row)]) == 2


def write_rows(folder, rows):
    """Write a dataset where the cookbook's `load_dataset` finds it in the current folder."""
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.slow
def test_a_model_in_training_is_saved_when_the_server_is_told_to_stop(models, tmp_path):
    import httpx

    from .client import V1

    def post(name, **body):
        return httpx.post(f"{address}{V1}/{name}", json=body, timeout=60).json()

    with server(tmp_path, f"student={models / 'student'}", "--out", "served") as (address, log):
        session = post("create_session", tags=[])["session_id"]
        made = post(
            "create_model",
            session_id=session,
            model_seq_id=0,
            base_model="student",
            lora_config={"rank": 2},
        )
        model = post("retrieve_future", request_id=made["request_id"])["model_id"]
        stepped = post("optim_step", model_id=model, adam_params={})
        assert "metrics" in post("retrieve_future", request_id=stepped["request_id"])
    assert f"saved tinker://{model}/weights/closing-1" in log.read_text()
    assert list((tmp_path / "served").glob("*/weights/closing-1/checkpoints/step-1/MANIFEST.json"))


def write_model(folder, seed):
    tokenizer = build_character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
