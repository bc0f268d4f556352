"""The checks of cost and settings: memory against the machine's, temperature, and step size."""

from statistics import median_high

from practicum.runs.check_outcome import CheckOutcome, Status
from practicum.runs.preflight import compare_with_table, judge_memory
from practicum.statistics import Interval
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.findings import find_worst_status

TEMPERATURES, TOLERATED_TEMPERATURES = (0.7, 1.3), (0.3, 2.0)
MAX_STEP, DESTRUCTIVE_STEP = 1.0, 3.0
"""The change of a layer's output by one step, as a share of its size, that warns and that fails."""

MIN_MOVE = 0.03
"""The same for all steps together, below which a run teaches nothing."""


def check_memory(evidence: Evidence) -> CheckOutcome:
    """P17: Compare the peak that `practicum plan` predicts, without Python and its libraries, with
    the machine's memory."""
    return judge_memory(evidence.recipe)


def check_settings(evidence: Evidence) -> CheckOutcome:
    """P19: Check the sampling temperature, and the learning rate against the table of settings; of all
    weights, how far one step of AdamW, and all steps, can move a layer's output."""
    recipe = evidence.recipe
    temperature = evidence.plan.sampling.temperature
    findings = [_judge_temperature(temperature), compare_with_table(recipe)]
    step = 0.0
    if recipe.student.lora is None:
        step = recipe.optimizer.learning_rate * _estimate_sensitivity(evidence)
        # The table is more certain than the estimate.
        findings[1] = findings[1] or _judge_step(evidence, step)
    warnings = [finding for finding in findings if finding is not None]
    text = "; ".join(warning.sentence for warning in warnings) or (
        f"temperature {temperature:g}; one step can change a layer's output "
        f"by {step:.1%} of its size"
    )
    exact = Interval(step, step, step) if step else None
    statuses: list[Status] = ["pass", *(warning.status for warning in warnings)]
    fix = tuple(change for warning in warnings for change in warning.fix)
    return CheckOutcome(
        find_worst_status(*statuses), text, exact, "of a layer's output a step", fix
    )


def _judge_temperature(temperature: float) -> CheckOutcome | None:
    """Return a warning or failure for answers that the student would not give at temperature 1."""
    low, high = TEMPERATURES
    if low <= temperature <= high:
        return None
    low, high = TOLERATED_TEMPERATURES
    text = (
        f"answers are sampled at temperature {temperature:g} and the loss is at 1, "
        "so the student trains on answers that it would not give"
    )
    status: Status = "warn" if low <= temperature <= high else "fail"
    return CheckOutcome(status, text, fix=("rollout.temperature=1",))


def _judge_step(evidence: Evidence, step: float) -> CheckOutcome | None:
    """Return a warning or failure if one step can change a layer too much, or all steps too little."""
    rate, train = evidence.recipe.optimizer.learning_rate, evidence.recipe.train
    updates = train.steps * train.updates_per_step * train.epochs
    if step > MAX_STEP:
        text = f"one step at learning rate {rate:g} can change a layer's output by {step:.0%} of its size"
        status: Status = "fail" if step > DESTRUCTIVE_STEP else "warn"
        return CheckOutcome(
            status, text, fix=(f"optimizer.learning_rate={rate * MAX_STEP / step / 10:.1g}",)
        )
    if step * updates < MIN_MOVE:
        text = (
            f"{updates} updates at learning rate {rate:g} can change a layer's output by "
            f"{step * updates:.1%} of its size at most, which teaches nothing: raise the rate or train.steps"
        )
        return CheckOutcome("fail", text)
    return None


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
