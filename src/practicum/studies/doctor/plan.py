"""The checks of cost and settings: memory against the machine's, temperature, and step size."""

from statistics import median_high

from practicum.runs.check_outcome import CheckOutcome
from practicum.runs.preflight import compare_with_table, judge_memory
from practicum.statistics import Interval
from practicum.studies.doctor.evidence import Evidence

TEMPERATURES = (0.7, 1.3)
MAX_STEP = 1.0


def check_memory(evidence: Evidence) -> CheckOutcome:
    """P17: Compare the peak that `practicum plan` predicts, without Python and its libraries, with
    the machine's memory."""
    return judge_memory(evidence.recipe)


def check_settings(evidence: Evidence) -> CheckOutcome:
    """P19: Check the sampling temperature, and the learning rate against the table of settings; of a
    model from scratch, how far one step of AdamW can move a layer's output."""
    recipe = evidence.recipe
    temperature, rate = evidence.plan.sampling.temperature, recipe.optimizer.learning_rate
    low, high = TEMPERATURES
    step = rate * _estimate_sensitivity(evidence)
    warnings: list[str] = []
    fix: list[str] = []
    if not low <= temperature <= high:
        warnings.append(
            f"answers are sampled at temperature {temperature:g} and the loss is at 1, "
            "so the student trains on answers that it would not give"
        )
        fix.append("rollout.temperature=1")
    too_high = compare_with_table(recipe)
    if too_high:
        warnings.append(too_high.sentence)
        fix += too_high.fix
    elif step > MAX_STEP and recipe.student.lora is None:
        warnings.append(
            f"one step at learning rate {rate:g} can change a layer's output "
            f"by {step:.0%} of its size"
        )
        fix.append(f"optimizer.learning_rate={rate * MAX_STEP / step / 10:.1g}")
    text = "; ".join(warnings) or (
        f"temperature {temperature:g}; one step can change a layer's output "
        f"by {step:.1%} of its size"
    )
    exact = Interval(step, step, step)
    status = too_high.status if too_high else "warn" if warnings else "pass"
    return CheckOutcome(status, text, exact, "of a layer's output a step", tuple(fix))


def _estimate_sensitivity(evidence: Evidence) -> float:
    """Return a layer's relative change of output per learning rate, the median matrix's."""
    # A step of AdamW moves each weight by about the learning rate, and all weights of a row can
    # move together: the output moves by lr * fan-in, and its size is rms(w) * sqrt(fan-in). This is
    # why wide models need smaller rates (arXiv 2203.03466).
    matrices = [
        weight.detach().float()
        for weight in evidence.components.weights.values()
        if weight.ndim == 2
    ]
    ratios = [
        weight.shape[1] ** 0.5 / max(weight.square().mean().sqrt().item(), 1e-12)
        for weight in matrices
    ]
    return median_high(ratios) if ratios else 0.0
