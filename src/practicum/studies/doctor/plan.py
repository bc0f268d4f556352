"""Can this recipe be run here, and are its settings of the usual size?"""

from practicum.errors import PracticumError
from practicum.statistics import Interval
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.findings import CheckOutcome, skipped
from practicum.studies.plan import memory_limit, plan, run_device

GIB = 2**30
FULL = (0.7, 0.95)
TEMPERATURES = (0.7, 1.3)
LARGEST_STEP = 1.0


def memory(evidence: Evidence) -> CheckOutcome:
    """P17: the peak that `practicum plan` foretells, Python and its libraries left out, against the memory of the machine."""
    there = memory_limit(run_device(evidence.recipe))
    try:
        found = plan(evidence.recipe, limit=int(FULL[0] * there), process=0)
    except PracticumError as error:
        return skipped(f"it cannot be planned: {error}")
    needed, share = found.memory.peak / GIB, found.memory.peak / there
    status = "fail" if share > FULL[1] else "warn" if share > FULL[0] else "pass"
    text = f"about {needed:.1f} of {there / GIB:.0f} GiB; see practicum plan"
    value = Interval(needed, needed, needed)
    details = {phase: found.memory.of(phase) / GIB for phase in found.memory.phases}
    return CheckOutcome(status, text, value, "GiB", found.change or (), details=details)


def settings(evidence: Evidence) -> CheckOutcome:
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
        said.append(
            f"one step at learning rate {rate:g} can change what a layer gives out by {step:.0%} of its size"
        )
        fix.append(f"optimizer.learning_rate={rate * LARGEST_STEP / step / 10:.1g}")
    value = Interval(step, step, step)
    unit = "of a layer's output a step"
    if not said:
        text = f"temperature {temperature:g}; one step can change what a layer gives out by {step:.1%} of its size"
        return CheckOutcome("pass", text, value, unit)
    return CheckOutcome("warn", "; ".join(said), value, unit, tuple(fix))


def _sensitivity(evidence: Evidence) -> float:
    """The relative change of a layer's output for each unit of learning rate, in the median of the matrices that learn.

    A step of AdamW moves each weight by about the learning rate, and all of a row can agree: lr times the fan-in, against
    rms(w) times its square root. This is why wide models need smaller rates (arXiv 2203.03466).
    """
    matrices = [
        weight.detach().float() for weight in evidence.built.weights.values() if weight.ndim == 2
    ]
    ratios = sorted(
        weight.shape[1] ** 0.5 / max(weight.square().mean().sqrt().item(), 1e-12)
        for weight in matrices
    )
    return ratios[len(ratios) // 2] if ratios else 0.0
