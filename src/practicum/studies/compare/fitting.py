"""A scaling law of distillation from finished runs: how the error falls with each quantity that was
varied.

    error = E + sum over quantities x of A_x * (x / x0)^-a_x         E >= 0, A_x >= 0, a_x > 0

Error is 1 - held-out accuracy, or the reverse KL to the teacher. Quantities are the parameters of
the student and of the teacher, the supervised tokens, the rollouts and their mean length; x0 is the
geometric mean of each, so that A_x is its part of the error in the middle of the data. The form
follows Hoffmann et al. 2022 (arXiv 2203.15556, equation 2), with one term per quantity. No
exponents are published for on-policy distillation, and the additive form is an assumption. The fit
minimises Huber's loss of the difference of logarithms (delta 1e-3 there, 0.05 here, since
accuracies are noisier than losses).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.errors import DataError
from practicum.run_dir import read_json, shapes
from practicum.statistics import Interval

QUANTITIES = {
    "N_student": "parameters of the student",
    "N_teacher": "parameters of the teachers",
    "D": "tokens learned from",
    "rollouts": "rollouts",
    "T": "tokens a rollout",
}
"""The quantities that a law can have, by their names in summary.json."""

RESULTS = ("accuracy", "reverse_kl")

MIN_LEVELS = 3
"""Different values that a quantity needs: any law fits through two."""

MAX_CORRELATION = 0.98
"""Quantities with a larger correlation of their logarithms were varied together, so that their
exponents are not identifiable."""

LEVEL_SPREAD = 0.05
"""Values closer than this, in logarithms, are one level."""

RUNS_PER_PARAMETER = 2

MIN_EXPONENT, MAX_EXPONENT = 0.01, 4.0
"""The limits of the search; an interval that comes near one of them is not resolved."""

HUBER_DELTA = 0.05
"""The log-error at which Huber's loss turns from square to absolute."""

RESAMPLES, ROUNDS = 200, 300

MIN_ERROR = 1e-4
"""The floor of errors, since the logarithm of 0 is minus infinity."""

Parameters = Float[Tensor, "b p"]
"""Parameters of b fits: log E, then log A of each quantity, then a transformed exponent of each."""


@dataclass(frozen=True, slots=True)
class LawPoint:
    """One finished run: its quantities and its error."""

    folder: str
    quantities: Mapping[str, float]
    error: float


@dataclass(frozen=True, slots=True)
class Exponent:
    """The exponent `value` of one quantity with its interval.

    `middle` is x0 and `part` is A of the formula above. `resolved` is True if the interval does not
    reach the limits of the search.
    """

    quantity: str
    geometric_mean: float
    coefficient: float
    exponent: float
    interval: Interval
    is_resolved: bool


@dataclass(frozen=True, slots=True)
class Law:
    """A fitted law with intervals; `left_out` gives the reason for each quantity without an
    exponent.

    Half of the runs miss the law by less than `typical_miss`, in logarithms.
    """

    result: str
    runs: int
    floor: float
    floor_interval: Interval
    exponents: Sequence[Exponent]
    left_out: Mapping[str, str]
    typical_miss: float

    def predict(self, quantities: Mapping[str, float]) -> float:
        """Return the error at other quantities; the further from the data, the less it means."""
        return self.floor + sum(
            exponent.coefficient
            * (quantities[exponent.quantity] / exponent.geometric_mean) ** -exponent.exponent
            for exponent in self.exponents
        )


def read_runs(folders: Sequence[Path], result: str) -> list[LawPoint]:
    """Read every finished run below the folders; DataError if none has the result."""
    runs = []
    for path in sorted({path for folder in folders for path in folder.rglob("summary.json")}):
        scaling = read_json(path, shapes.SCALED).get("scaling")
        if isinstance(scaling, Mapping) and scaling["result"].get(result) is not None:
            error = scaling["result"][result]
            error = 1.0 - error if result == "accuracy" else error
            runs.append(LawPoint(str(path.parent), _read_quantities(scaling), error))
    if not runs:
        raise DataError(
            f"{', '.join(map(str, folders))}: no finished run with a held-out {result}; "
            "name folders with summary.json files below"
        )
    return runs


def _read_quantities(scaling: Mapping[str, Any]) -> dict[str, float]:
    """Return the known nonzero quantities.

    The parameters of several teachers are added.
    """
    quantities = {name: scaling[name] for name in QUANTITIES}
    teachers = quantities["N_teacher"]
    if isinstance(teachers, Mapping):
        quantities["N_teacher"] = sum(teachers.values())
    return {name: float(number) for name, number in quantities.items() if number}


def fit(runs: Sequence[LawPoint], result: str = "accuracy", seed: int = 0) -> Law:
    """Fit the law to the quantities that vary, with intervals by bootstrap over runs.

    Raises DataError if no quantity varies enough or the runs are too few.
    """
    names, left_out = _select_quantities(runs)
    count = 1 + 2 * len(names)
    if not names:
        reasons = "; ".join(f"{name} {reason}" for name, reason in left_out.items())
        raise DataError(
            f"nothing to fit from {len(runs)} runs: {reasons}; "
            f"vary one quantity over {MIN_LEVELS} values or more, in 6 runs or more"
        )
    if len(runs) < RUNS_PER_PARAMETER * count:
        raise DataError(
            f"{len(runs)} runs are too few for an exponent of {', '.join(names)}: "
            f"{count} parameters need at least {RUNS_PER_PARAMETER * count} runs"
        )
    logs = _take_logs(runs, names)
    middle = logs.mean(dim=0)
    errors = torch.tensor([max(run.error, MIN_ERROR) for run in runs], dtype=torch.float64).log()
    best, misses = _fit_best(logs - middle, errors)
    resampled = _fit_resamples(logs - middle, errors, best, seed)
    floors, _, exponent_samples = _decode_parameters(resampled)
    floor, coefficients, values = _decode_parameters(best[None])
    exponents = []
    for index, name in enumerate(names):
        value = values[0, index].item()
        interval = Interval.of_resamples(value, exponent_samples[:, index])
        resolved = interval.low > 1.5 * MIN_EXPONENT and interval.high < MAX_EXPONENT / 1.5
        x0, coefficient = middle[index].exp().item(), coefficients[0, index].item()
        exponents.append(Exponent(name, x0, coefficient, value, interval, resolved))
    return Law(
        result=result,
        runs=len(runs),
        floor=floor[0].item(),
        floor_interval=Interval.of_resamples(floor[0].item(), floors),
        exponents=exponents,
        left_out=left_out,
        typical_miss=misses.abs().median().item(),
    )


def _select_quantities(runs: Sequence[LawPoint]) -> tuple[list[str], dict[str, str]]:
    """Return the independently varied quantities, and the reasons why others were left out."""
    names, left_out = [], {}
    for name in QUANTITIES:
        if any(name not in run.quantities for run in runs):
            left_out[name] = "is not known for every run"
            continue
        levels = _count_levels([run.quantities[name] for run in runs])
        if levels >= MIN_LEVELS:
            names.append(name)
            continue
        plural = "s" if levels > 1 else ""
        left_out[name] = f"has {levels} value{plural}, and {MIN_LEVELS} are needed"
    for first, second in combinations(list(names), 2):
        if first in names and second in names:
            correlation = torch.corrcoef(_take_logs(runs, [first, second]).T)[0, 1]
            # Keep the first of two quantities that were varied together, in the order of `QUANTITIES`.
            if abs(correlation.item()) > MAX_CORRELATION:
                names.remove(second)
                left_out[second] = (
                    f"was varied together with {first}, so their exponents are not identifiable"
                )
    return names, left_out


def _count_levels(values: Sequence[float]) -> int:
    """Count the clearly different values; close ones join the level of the smallest among them."""
    logs = sorted(math.log(value) for value in values)
    count, level = 1, logs[0]
    for log in logs:
        if log - level > LEVEL_SPREAD:
            count, level = count + 1, log
    return count


def _take_logs(runs: Sequence[LawPoint], names: Sequence[str]) -> Float[Tensor, "n q"]:
    """Return the logarithms of some quantities, one row per run."""
    rows = [[math.log(run.quantities[name]) for name in names] for run in runs]
    return torch.tensor(rows, dtype=torch.float64)


def _decode_parameters(parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
    """Return E [b], A [b, q] and the exponents [b, q] of fits."""
    count = (parameters.shape[1] - 1) // 2
    # A sigmoid keeps the exponents within their limits, and logarithms keep E and A positive, so
    # the optimizer needs no constraints.
    share = parameters[:, 1 + count :].sigmoid()
    return (
        parameters[:, 0].exp(),
        parameters[:, 1 : 1 + count].exp(),
        MIN_EXPONENT * (MAX_EXPONENT / MIN_EXPONENT) ** share,
    )


def _predict_log_errors(
    parameters: Parameters, logs: Float[Tensor, "b n q"]
) -> Float[Tensor, "b n"]:
    """Return the logarithm of the law at every run, for every fit."""
    floor, coefficient, exponent = _decode_parameters(parameters)
    terms = coefficient[:, None, :].log() - exponent[:, None, :] * logs
    floors = floor.log()[:, None, None].expand(-1, logs.shape[1], 1)
    return torch.cat([floors, terms], dim=2).logsumexp(dim=2)


def _compute_losses(
    parameters: Parameters, logs: Float[Tensor, "b n q"], errors: Float[Tensor, "b n"]
) -> Float[Tensor, " b"]:
    """Return Huber's loss of each fit, summed over the runs."""
    predictions = _predict_log_errors(parameters, logs)
    loss = torch.nn.HuberLoss(reduction="none", delta=HUBER_DELTA)
    return loss(predictions, errors).sum(dim=1)


def _fit_many(
    start: Parameters, logs: Float[Tensor, "b n q"], errors: Float[Tensor, "b n"]
) -> Parameters:
    """Return the parameters of many fits in one batch, by Adam at a rate that falls to 0."""
    parameters = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([parameters], lr=0.1)
    for round_index in range(ROUNDS):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - round_index / ROUNDS)
        optimizer.zero_grad()
        # The fits share no parameter, so the gradient of the sum is the gradient of each fit.
        _compute_losses(parameters, logs, errors).sum().backward()
        optimizer.step()
    return parameters.detach()


def _fit_best(
    logs: Float[Tensor, "n q"], errors: Float[Tensor, " n"]
) -> tuple[Float[Tensor, " p"], Float[Tensor, " n"]]:
    """Return the best of fits from a grid of starts, and its misses in logarithms."""
    count = logs.shape[1]
    lowest = errors.min().item()
    # The loss has local minima: starts differ in how much of the smallest error is floor, and in
    # slope.
    starts = torch.tensor(
        [
            [lowest + shift, *([lowest] * count), *([exponent] * count)]
            for shift in (-4.0, -1.0, -0.1)
            for exponent in (-0.5, 0.5, 1.0)
        ],
        dtype=torch.float64,
    )
    logs, errors = logs.expand(len(starts), -1, -1), errors.expand(len(starts), -1)
    # A second descent from the first one's end, with the rate back at its start, leaves plateaus.
    fits = _fit_many(_fit_many(starts, logs, errors), logs, errors)
    best = fits[_compute_losses(fits, logs, errors).argmin()]
    return best, _predict_log_errors(best[None], logs[:1])[0] - errors[0]


def _fit_resamples(
    logs: Float[Tensor, "n q"], errors: Float[Tensor, " n"], best: Float[Tensor, " p"], seed: int
) -> Parameters:
    """Return the fits to resampled runs, each started at the fit to all runs."""
    generator = torch.Generator().manual_seed(seed_of(seed, "scaling law"))
    picks = torch.randint(len(logs), (RESAMPLES, len(logs)), generator=generator)
    return _fit_many(best.expand(RESAMPLES, -1), logs[picks], errors[picks])
