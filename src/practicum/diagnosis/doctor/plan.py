"""Can this recipe be run here, and are its settings of the usual size? A rough estimate; `practicum plan` knows more."""

import os

import torch

from practicum.diagnosis.doctor.evidence import Evidence
from practicum.diagnosis.doctor.findings import Finding
from practicum.model_config import ModelConfig
from practicum.statistics import Interval

GIB = 2**30
FULL = (0.7, 0.95)
LOGITS_COPIES = 5
"""A chunk of logits is held about so many times over while its loss is differentiated."""

TRAINED_BYTES = 16
"""Weight, gradient and the two moments of AdamW in float32."""

TEMPERATURES = (0.7, 1.3)
LARGEST_STEP = 1.0


def memory(evidence: Evidence) -> Finding:
    """P17: weights, optimizer, one chunk of logits and what a backward pass keeps, against the memory of the machine."""
    train = evidence.recipe.train
    weights = list(evidence.built.student.language_model.model.parameters())
    student = sum(
        weight.numel() * (TRAINED_BYTES if weight.requires_grad else weight.element_size()) for weight in weights
    )
    teacher = sum(scorer.parameters for scorer in evidence.scorers) * _teacher_bytes(evidence)
    logits = LOGITS_COPIES * train.chunk_tokens * evidence.built.student.language_model.vocab_size * 4
    needed = (student + teacher + logits + train.graph_mib * 2**20) / GIB
    there = _memory(evidence) / GIB
    share = needed / there
    status = "fail" if share > FULL[1] else "warn" if share > FULL[0] else "pass"
    text = f"about {needed:.1f} of the machine's {there:.0f} GiB; see practicum plan"
    value = Interval(needed, needed, needed)
    details = {"student": student / GIB, "teacher": teacher / GIB, "logits": logits / GIB}
    fix = () if status == "pass" else (f"train.chunk_tokens={max(train.chunk_tokens // 4, 16)}", "train.graph_mib=256")
    return Finding(status, text, value, "GiB", fix, details=details)


def settings(evidence: Evidence) -> Finding:
    """P19: the temperature of sampling, and how far one step of AdamW can move what a layer gives out."""
    recipe = evidence.recipe
    temperature, rate = evidence.plan.sampling.temperature, recipe.optimizer.learning_rate
    low, high = TEMPERATURES
    step = rate * _sensitivity(evidence)
    said: list[str] = []
    fix: list[str] = []
    if not low <= temperature <= high:
        said.append(
            f"answers are drawn at temperature {temperature:g} and learned from at 1, so the student practises on answers that it "
            "would not give"
        )
        fix.append("rollout.temperature=1")
    if step > LARGEST_STEP and recipe.student.lora is None:
        said.append(f"one step at learning rate {rate:g} can change what a layer gives out by {step:.0%} of its size")
        fix.append(f"optimizer.learning_rate={rate * LARGEST_STEP / step / 10:.1g}")
    value = Interval(step, step, step)
    unit = "of a layer's output a step"
    if not said:
        text = f"temperature {temperature:g}; one step can change what a layer gives out by {step:.1%} of its size"
        return Finding("pass", text, value, unit)
    return Finding("warn", "; ".join(said), value, unit, tuple(fix))


def _sensitivity(evidence: Evidence) -> float:
    """The relative change of a layer's output for each unit of learning rate, in the median of the matrices that learn.

    A step of AdamW moves each weight by about the learning rate, and all of a row can agree: lr times the fan-in, against
    rms(w) times its square root. This is why wide models need smaller rates (arXiv 2203.03466).
    """
    parameters = evidence.built.student.language_model.model.parameters()
    matrices = [weight.detach().float() for weight in parameters if weight.requires_grad and weight.ndim == 2]
    ratios = sorted(weight.shape[1] ** 0.5 / max(weight.square().mean().sqrt().item(), 1e-12) for weight in matrices)
    return ratios[len(ratios) // 2] if ratios else 0.0


def _teacher_bytes(evidence: Evidence) -> int:
    config = evidence.recipe.teacher
    return 2 if isinstance(config, ModelConfig) and config.dtype == "bfloat16" else 4


def _memory(evidence: Evidence) -> int:
    """Bytes of the device that learns."""
    device = evidence.built.student.language_model.device
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
