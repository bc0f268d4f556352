"""The table of starting values, by the size of a student: learning rates, batches, lengths and adapters.

It is their only place: `practicum.recipe.settings` chooses a row, and the schema's own defaults are those
of `CAREFUL`.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Setting:
    """Starting values for students of one size.

    `parameters` is the largest number of parameters; None stands for a model from scratch. The rates
    are for training all weights (or the last layers) and for training adapters. Answers on a CPU are
    shorter, because sampling takes most of the time there. `source` names the publication of the
    values, or the command that measured them. The rank and alpha of adapters belong to their rate.
    """

    parameters: float | None
    learning_rate: float
    adapter_learning_rate: float
    warmup_steps: int
    prompts_per_step: int
    max_new_tokens: int
    cpu_max_new_tokens: int
    steps: int
    rank: int
    alpha: float
    source: str
    adapter_source: str

    @property
    def title(self) -> str:
        """Return the name of the row."""
        if self.parameters is None:
            return "a model from scratch"
        if self.parameters == math.inf:
            return "pretrained, larger or of unknown size"
        size = (
            f"{self.parameters / 1e9:g} billion"
            if self.parameters >= 1e9
            else f"{self.parameters / 1e6:g} million"
        )
        return f"pretrained, up to {size} parameters"


_TOY = Setting(
    parameters=None,
    learning_rate=1e-3,
    adapter_learning_rate=3e-3,
    warmup_steps=10,
    prompts_per_step=64,
    max_new_tokens=32,
    cpu_max_new_tokens=32,
    steps=40,
    rank=8,
    alpha=16.0,
    source="the packaged toys",
    adapter_source="ours, not measured",
)

SETTINGS: tuple[Setting, ...] = (
    _TOY,
    replace(_TOY, parameters=0.02e9),
    Setting(
        parameters=0.25e9,
        learning_rate=5e-5,
        adapter_learning_rate=5e-4,
        warmup_steps=3,
        prompts_per_step=16,
        max_new_tokens=256,
        cpu_max_new_tokens=64,
        steps=100,
        rank=16,
        alpha=32.0,
        source="measured: python -m benchmarks settings --steps 8",
        adapter_source="measured: python -m benchmarks settings --steps 8",
    ),
    Setting(
        parameters=1e9,
        learning_rate=2e-5,
        adapter_learning_rate=2e-4,
        warmup_steps=0,
        prompts_per_step=32,
        max_new_tokens=512,
        cpu_max_new_tokens=128,
        steps=100,
        rank=64,
        alpha=16.0,
        source=(
            "TRL, examples/scripts/distillation.py, Qwen2.5-0.5B-Instruct; no result published"
        ),
        adapter_source=(
            "TRL, examples/scripts/distillation.py, its command with LoRA; no result published"
        ),
    ),
    Setting(
        parameters=2.5e9,
        learning_rate=2e-5,
        adapter_learning_rate=5e-5,
        warmup_steps=10,
        prompts_per_step=128,
        max_new_tokens=1024,
        cpu_max_new_tokens=128,
        steps=100,
        rank=16,
        alpha=128.0,
        source=(
            "NeMo RL, examples/configs/distillation_math.yaml, Qwen3-1.7B-Base; length of DistiLLM-2"
        ),
        adapter_source=(
            "DistiLLM-2 (2503.07067), qwen2.5-1.5b-distillm2.yaml (its answers are sampled once)"
        ),
    ),
    Setting(
        parameters=6e9,
        learning_rate=2e-5,
        adapter_learning_rate=5e-5,
        warmup_steps=10,
        prompts_per_step=64,
        max_new_tokens=2048,
        cpu_max_new_tokens=128,
        steps=100,
        rank=8,
        alpha=32.0,
        source=("NeMo RL, recipes/llm/distillation-qwen3-32b-to-4b-base; length of ms-swift"),
        adapter_source=(
            "ms-swift, examples/train/rlhf/gkd/teacher_server.sh, Qwen3.5-4B; no result published"
        ),
    ),
    Setting(
        parameters=math.inf,
        learning_rate=5e-6,
        adapter_learning_rate=1e-4,
        warmup_steps=0,
        prompts_per_step=128,
        max_new_tokens=4096,
        cpu_max_new_tokens=128,
        steps=100,
        rank=128,
        alpha=32.0,
        source=(
            "OPCD (2602.12275), math_consolidate.sh, Qwen3-8B; length of Lightning OPD (qwen3-8b-opd.py)"
        ),
        adapter_source=("Tinker cookbook, recipes/distillation, Qwen3-8B-Base"),
    ),
)
"""The rows, from the smallest student to the largest."""


CAREFUL = SETTINGS[-1]
"""The row of the largest students, also used if a size is unknown."""
