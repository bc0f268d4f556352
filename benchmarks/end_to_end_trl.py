"""Run TRL's GKDTrainer once, in its own process: `python -m benchmarks.end_to_end_trl JOB`.

JOB is a JSON file, see `benchmarks.end_to_end`. Only TRL and its packages are imported. The trained weights replace the weights in
the student's folder; its tokenizer and its template do not change.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from trl.experimental.gkd import GKDConfig, GKDTrainer  # type: ignore[import-not-found]


def main() -> None:
    """Train, save the weights, and print the number of steps."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    student = AutoModelForCausalLM.from_pretrained(job["student"], dtype=torch.float32)
    trainer = GKDTrainer(
        model=student,
        teacher_model=AutoModelForCausalLM.from_pretrained(job["teacher"], dtype=torch.float32),
        args=GKDConfig(
            output_dir=job["out"],
            per_device_train_batch_size=job["batch"],
            max_steps=job["steps"],
            learning_rate=job["learning_rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=False,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            temperature=1.0,
            lmbda=job["lmbda"],
            beta=job["beta"],
            max_new_tokens=job["new_tokens"],
            seed=job["seed"],
        ),
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=AutoTokenizer.from_pretrained(job["student"]),
    )
    trainer.train()
    with tempfile.TemporaryDirectory() as name:
        student.save_pretrained(name)
        weights = Path(name, "model.safetensors").read_bytes()
    Path(job["student"], "model.safetensors").write_bytes(weights)
    print(json.dumps({"steps": trainer.state.global_step}))


if __name__ == "__main__":
    main()
