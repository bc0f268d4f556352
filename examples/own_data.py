"""Your own rows and your own reward: `python examples/own_data.py`.

The rows are a list of dicts; the path of a file or a `datasets.Dataset` works too. The reward is a function of the answer
and the prompt. Both models are tiny and made from scratch; for real models, use names such as
`Qwen/Qwen2.5-0.5B-Instruct`.
"""

import random
import tempfile
from typing import Any

import practicum

STUDENT = {"hidden_size": 64, "layers": 2, "heads": 4, "seed": 1, "pretrain": {"steps": 30}}
TEACHER = {"hidden_size": 96, "layers": 2, "heads": 4, "seed": 2, "pretrain": {"steps": 200}}


def build_rows(count: int, seed: int) -> list[dict[str, str]]:
    """Return rows with a text as the prompt and its reverse as the answer."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices("abcd", k=3)) for _ in range(count)]
    return [{"prompt": text, "answer": text[::-1]} for text in texts]


def reward(reply: str, prompt: Any) -> float:
    """Return the share of characters in the right place; 0 for a wrong length."""
    if len(reply) != len(prompt.answer):
        return 0.0
    return sum(map(str.__eq__, reply, prompt.answer)) / len(reply)


def main(steps: int = 60, out: str | None = None) -> practicum.RunResult:
    """Distil the teacher into the student on the rows, and print what was gained."""
    with tempfile.TemporaryDirectory() as folder:
        result = practicum.distill(
            name="own-data",
            out=out or folder,
            student={"model": STUDENT},
            teacher={"type": "model", "model": TEACHER},
            task=(build_rows(200, seed=0), reward),
            objective={"divergence": "reverse_kl"},
            rollout={"max_new_tokens": 6},
            optimizer={"learning_rate": 0.003, "warmup_steps": 5},
            train={"steps": steps, "prompts_per_step": 32},
            evaluation={"prompts": 32, "max_new_tokens": 6},
        )
    before, after = result.summary["before"], result.summary["after"]
    print(
        f"mean reward on held-out rows: {before['accuracy']['mean']:.2f} to {after['accuracy']['mean']:.2f}"
    )
    return result


if __name__ == "__main__":
    main()
