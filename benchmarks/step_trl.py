"""Run one trainer of TRL on the models and prompts of a workload, in a separate process: `python -m benchmarks.step_trl JOB`.

JOB is a JSON file, see `benchmarks.step` and, for a GPU, `benchmarks.gpu_trl`. Only TRL and its dependencies are imported.
Seconds are processor seconds and memory is the process's; on a GPU, wall-clock seconds and the device's memory.
"""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import DistillationConfig, DistillationTrainer  # type: ignore[import-not-found]
from trl.experimental.gkd import GKDConfig, GKDTrainer  # type: ignore[import-not-found]

from benchmarks.measuring import read_memory
from benchmarks.models import render_words


class Marks(TrainerCallback):
    """Seconds and tokens at the end of each step."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.count = 0
        self.generating = 0.0
        self.generated: list[float] = []

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        self.seconds.append(self.read_clock())
        self.tokens.append(self.count)
        self.generated.append(self.generating)

    def read_clock(self) -> float:
        """Return the seconds after all that the device was given."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    """Compare the loss on given answers, then train and print the seconds and tokens of each step."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    imports = read_memory("VmRSS")
    marks = Marks(job.get("device", "cpu"))
    trainer = {"gkd": _build_gkd, "distillation": _build_distillation}[job["trainer"]](job, marks)
    loss = {"gkd": _compute_gkd_loss, "distillation": _compute_distillation_loss}[job["trainer"]](
        trainer, job
    )
    trainer.add_callback(marks)
    trainer.train()
    answer = {
        "seconds": _subtract_marks(marks.seconds),
        "tokens": _subtract_marks(marks.tokens),
        "sample": _subtract_marks(marks.generated),
        "loss": loss,
        "peak_mib": read_memory("VmHWM")
        if marks.device == "cpu"
        else torch.cuda.max_memory_allocated() / 2**20,
        "imports_mib": imports,
    }
    print(json.dumps(answer))


def _subtract_marks(marks: list[Any]) -> list[Any]:
    """The differences of the marks: every step but the first, which warms up."""
    return [later - earlier for earlier, later in itertools.pairwise(marks)]


def _build_settings(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": job["out"],
        "per_device_train_batch_size": job["batch"],
        "gradient_accumulation_steps": len(job["prompts"]) // job["batch"],
        "max_steps": job["steps"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "bf16": job.get("bfloat16", False),
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": job.get("device", "cpu") == "cpu",
        "temperature": 1.0,
        "beta": 1.0,
        "seed": job["seed"],
    }


def _load_models(job: dict[str, Any]) -> tuple[Any, Any, Any]:
    student = AutoModelForCausalLM.from_pretrained(job["student"], dtype=torch.float32)
    dtype = job.get("teacher_dtype", "float32")
    teacher = AutoModelForCausalLM.from_pretrained(job["teacher"], dtype=dtype)
    if not job["stops"]:
        student.generation_config.eos_token_id = None
    return student, teacher, AutoTokenizer.from_pretrained(job["student"])


def _build_gkd(job: dict[str, Any], marks: Marks) -> Any:
    student, teacher, tokenizer = _load_models(job)
    rows = [
        {
            "messages": [
                {"role": "user", "content": render_words(prompt)},
                {"role": "assistant", "content": render_words([2])},
            ]
        }
        for prompt in job["prompts"]
    ]
    plain = GKDTrainer.generate_on_policy_outputs

    def generate(*arguments: Any, **keywords: Any) -> Any:
        start = marks.read_clock()
        ids, mask, labels = plain(*arguments, **keywords)
        marks.generating += marks.read_clock() - start
        marks.count += int((labels != -100).sum())
        return ids, mask, labels

    GKDTrainer.generate_on_policy_outputs = staticmethod(generate)
    return GKDTrainer(
        model=student,
        teacher_model=teacher,
        args=GKDConfig(**_build_settings(job), lmbda=1.0, max_new_tokens=job["new_tokens"]),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def _build_distillation(job: dict[str, Any], marks: Marks) -> Any:
    student, teacher, tokenizer = _load_models(job)

    class Counted(DistillationTrainer):
        def _generate(self, *arguments: Any, **keywords: Any) -> Any:
            start = marks.read_clock()
            made = super()._generate(*arguments, **keywords)
            marks.generating += marks.read_clock() - start
            marks.count += sum(map(len, made[1]))
            return made

    return Counted(
        model=student,
        teacher_model=teacher,
        args=DistillationConfig(
            **_build_settings(job), max_completion_length=job["new_tokens"], top_k=0
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": render_words(prompt)} for prompt in job["prompts"]]
        ),
        processing_class=tokenizer,
    )


@torch.no_grad()
def _compute_gkd_loss(trainer: Any, job: dict[str, Any]) -> float:
    """The mean over the tokens of the given answers."""
    texts = [(*prompt, *answer) for prompt, answer in job["answers"]]
    ids, mask = _pad_texts(texts, "right")
    labels = ids.masked_fill(mask == 0, -100)
    for row, (prompt, _) in enumerate(job["answers"]):
        labels[row, : len(prompt)] = -100
    return float(
        trainer.compute_loss(
            trainer.model, {"input_ids": ids, "attention_mask": mask, "labels": labels}
        )
    )


@torch.no_grad()
def _compute_distillation_loss(trainer: Any, job: dict[str, Any]) -> float:
    """The same."""
    prompt_ids, prompt_mask = _pad_texts([prompt for prompt, _ in job["answers"]], "left")
    completion_ids, completion_mask = _pad_texts([answer for _, answer in job["answers"]], "right")
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
    }
    return float(trainer._compute_loss(trainer.model, inputs, None)[0])


def _pad_texts(texts: list[Any], side: str) -> tuple[Tensor, Tensor]:
    width = max(map(len, texts))
    ids, mask = torch.zeros(2, len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        part = slice(width - len(text), width) if side == "left" else slice(0, len(text))
        ids[row, part] = torch.tensor(text)
        mask[row, part] = 1
    return ids, mask


if __name__ == "__main__":
    main()
