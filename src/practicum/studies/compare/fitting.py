"""A scaling law of distillation from finished runs: how the error falls with each quantity that was varied.

    error = E + sum over quantities x of A_x * (x / x0)^-a_x         E >= 0, A_x >= 0, a_x > 0

Error is 1 - held-out accuracy, or the reverse KL to the teacher. Quantities are the parameters of the student and of the
teacher, the tokens learned from, the rollouts and their mean length; x0 is each one's geometric mean, so that A_x is its
part of the error in the middle of the data. The form is that of Hoffmann et al. 2022 (arXiv 2203.15556, equation 2), with one
term a quantity. For on-policy distillation nobody has published exponents, and an additive form is an assumption. The fit
minimises Huber's loss of the difference of logarithms (delta 1e-3 there, 0.05 here, since accuracies are noisier than losses).
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
"""What a law may be fitted in, by its name in summary.json."""

RESULTS = ("accuracy", "reverse_kl")

LEVELS = 3
"""Different values that a quantity needs: two give a line through two points, whatever the law."""

TOGETHER = 0.98
"""Quantities whose logarithms correlate more than this were varied together, so their exponents cannot be told apart."""

SPREAD = 0.05
"""Values closer than this, in logarithms, are one level."""

RUNS_PER_PARAMETER = 2

LOWEST, HIGHEST = 0.01, 4.0
"""The exponents that are searched; an interval that reaches one of them is not resolved."""

DELTA = 0.05
"""Where Huber's loss of a log-error turns from square to absolute."""

RESAMPLES, ROUNDS = 200, 300

SMALLEST = 1e-4
"""Errors below this are taken as this, since the logarithm of none is minus infinity."""

Starts = Float[Tensor, "b p"]
"""Parameters of many fits side by side: log E, then log A and a transformed exponent for each quantity."""


@dataclass(frozen=True, slots=True)
class LawPoint:
    """One finished run: its quantities and its error."""

    folder: str
    quantities: Mapping[str, float]
    error: float


@dataclass(frozen=True, slots=True)
class Exponent:
    """What the data say of one quantity; `resolved` where the interval stays inside of what was searched."""

    quantity: str
    middle: float
    part: float
    value: float
    interval: Interval
    resolved: bool


@dataclass(frozen=True, slots=True)
class Law:
    """A fitted law; `left_out` says of each quantity without an exponent why."""

    result: str
    runs: int
    floor: float
    floor_interval: Interval
    exponents: Sequence[Exponent]
    left_out: Mapping[str, str]
    typical_miss: float

    def predict(self, quantities: Mapping[str, float]) -> float:
        """The error at other quantities; the further from the data, the less it means."""
        return self.floor + sum(
            exponent.part * (quantities[exponent.quantity] / exponent.middle) ** -exponent.value
            for exponent in self.exponents
        )


def read_runs(folders: Sequence[Path], result: str) -> list[LawPoint]:
    """Every finished run below the folders; DataError where there is none with a result."""
    runs = []
    for path in sorted({path for folder in folders for path in folder.rglob("summary.json")}):
        scaling = read_json(path, shapes.SCALED).get("scaling")
        if isinstance(scaling, Mapping) and scaling["result"].get(result) is not None:
            value = scaling["result"][result]
            runs.append(
                LawPoint(
                    str(path.parent),
                    _numbers(scaling),
                    1.0 - value if result == "accuracy" else value,
                )
            )
    if not runs:
        shown = ", ".join(map(str, folders))
        raise DataError(
            f"{shown}: no finished run with a held-out {result}; name folders with summary.json files below"
        )
    return runs


def _numbers(scaling: Mapping[str, Any]) -> dict[str, float]:
    """The quantities as numbers: the teachers of a set together."""
    teachers = scaling["N_teacher"]
    together = (
        float(sum(teachers.values())) if isinstance(teachers, Mapping) else float(teachers or 0)
    )
    values = {
        **{name: scaling[name] for name in QUANTITIES if name != "N_teacher"},
        "N_teacher": together,
    }
    return {name: float(values[name]) for name in QUANTITIES if values[name]}


def fit(runs: Sequence[LawPoint], result: str = "accuracy", seed: int = 0) -> Law:
    """Fit the law to what varies, with intervals by bootstrap over runs; DataError where the runs cannot carry it."""
    names, left_out = _varied(runs)
    needed = RUNS_PER_PARAMETER * (1 + 2 * len(names))
    if not names:
        reasons = "; ".join(f"{name} {reason}" for name, reason in left_out.items())
        raise DataError(
            f"nothing to fit from {len(runs)} runs: {reasons}; vary one quantity over {LEVELS} values or more, in 6 runs or more"
        )
    if len(runs) < needed:
        raise DataError(
            f"{len(runs)} runs are too few for an exponent of {', '.join(names)}: {1 + 2 * len(names)} parameters need at "
            f"least {needed} runs"
        )
    logs = torch.tensor(
        [[math.log(run.quantities[name]) for name in names] for run in runs], dtype=torch.float64
    )
    middle = logs.mean(dim=0)
    errors = torch.tensor([max(run.error, SMALLEST) for run in runs], dtype=torch.float64).log()
    best, misses = _best(logs - middle, errors)
    floors, _, values = _readable(_resampled(logs - middle, errors, best, seed))
    floor, part, value = _readable(best[None])
    exponents = [
        _exponent(
            name,
            middle[place].exp().item(),
            part[0, place].item(),
            value[0, place].item(),
            values[:, place],
        )
        for place, name in enumerate(names)
    ]
    return Law(
        result=result,
        runs=len(runs),
        floor=floor[0].item(),
        floor_interval=Interval.of_resamples(floor[0].item(), floors),
        exponents=exponents,
        left_out=left_out,
        typical_miss=misses.abs().median().item(),
    )


def _varied(runs: Sequence[LawPoint]) -> tuple[list[str], dict[str, str]]:
    """The quantities that were varied apart from each other, and why each other one has no exponent."""
    kept, left_out = [], {}
    for name in QUANTITIES:
        if any(name not in run.quantities for run in runs):
            left_out[name] = "is not known of every run"
            continue
        levels = _levels([run.quantities[name] for run in runs])
        if levels < LEVELS:
            left_out[name] = (
                f"has {levels} value{'s' if levels > 1 else ''}, and {LEVELS} are needed"
            )
        else:
            kept.append(name)
    for one, other in combinations(list(kept), 2):
        if one in kept and other in kept and abs(_correlation(runs, one, other)) > TOGETHER:
            kept.remove(other)
            left_out[other] = f"was varied together with {one}, so the two cannot be told apart"
    return kept, left_out


def _levels(values: Sequence[float]) -> int:
    """How many clearly different values there are."""
    ordered = sorted(math.log(value) for value in values)
    count, last = 1, ordered[0]
    for value in ordered:
        if value - last > SPREAD:
            count, last = count + 1, value
    return count


def _correlation(runs: Sequence[LawPoint], one: str, other: str) -> float:
    columns = torch.tensor(
        [[math.log(run.quantities[name]) for run in runs] for name in (one, other)]
    )
    return torch.corrcoef(columns.double())[0, 1].item()


def _exponent(name: str, middle: float, part: float, value: float, resampled: Tensor) -> Exponent:
    interval = Interval.of_resamples(value, resampled)
    resolved = interval.low > 1.5 * LOWEST and interval.high < HIGHEST / 1.5
    return Exponent(name, middle, part, value, interval, resolved)


def _readable(parameters: Starts) -> tuple[Tensor, Tensor, Tensor]:
    """E [b], A [b, q] and the exponents [b, q] of fits."""
    count = (parameters.shape[1] - 1) // 2
    share = parameters[:, 1 + count :].sigmoid()
    return (
        parameters[:, 0].exp(),
        parameters[:, 1 : 1 + count].exp(),
        LOWEST * (HIGHEST / LOWEST) ** share,
    )


def _log_error(parameters: Starts, logs: Float[Tensor, "b n q"]) -> Float[Tensor, "b n"]:
    """The logarithm of the law at every run, for every fit."""
    floor, part, value = _readable(parameters)
    terms = part[:, None, :].log() - value[:, None, :] * logs
    return torch.cat(
        [floor.log()[:, None, None].expand(-1, logs.shape[1], 1), terms], dim=2
    ).logsumexp(dim=2)


def _loss(
    parameters: Starts, logs: Float[Tensor, "b n q"], errors: Float[Tensor, "b n"]
) -> Float[Tensor, " b"]:
    misses = _log_error(parameters, logs) - errors
    return torch.nn.functional.huber_loss(
        misses, torch.zeros_like(misses), reduction="none", delta=DELTA
    ).sum(dim=1)


def _optimise_fits(
    start: Starts, logs: Float[Tensor, "b n q"], errors: Float[Tensor, "b n"]
) -> Starts:
    """Many fits at once by AdamW without decay, at a rate that falls to nothing."""
    parameters = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([parameters], lr=0.1)
    for number in range(ROUNDS):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - number / ROUNDS)
        optimizer.zero_grad()
        _loss(parameters, logs, errors).sum().backward()
        optimizer.step()
    return parameters.detach()


def _best(
    logs: Float[Tensor, "n q"], errors: Float[Tensor, " n"]
) -> tuple[Float[Tensor, " p"], Float[Tensor, " n"]]:
    """The best of fits from a grid of starts, and its misses in logarithms."""
    count = logs.shape[1]
    lowest = errors.min().item()
    starts = torch.tensor(
        [
            [lowest + shift, *([lowest] * count), *([exponent] * count)]
            for shift in (-4.0, -1.0, -0.1)
            for exponent in (-0.5, 0.5, 1.0)
        ],
        dtype=torch.float64,
    )
    logs, errors = logs.expand(len(starts), -1, -1), errors.expand(len(starts), -1)
    fits = _optimise_fits(_optimise_fits(starts, logs, errors), logs, errors)
    best = fits[_loss(fits, logs, errors).argmin()]
    return best, _log_error(best[None], logs[:1])[0] - errors[0]


def _resampled(
    logs: Float[Tensor, "n q"], errors: Float[Tensor, " n"], best: Float[Tensor, " p"], seed: int
) -> Starts:
    """The fits to resampled runs, each begun at the fit to all of them."""
    generator = torch.Generator().manual_seed(seed_of(seed, "scaling law"))
    picks = torch.randint(len(logs), (RESAMPLES, len(logs)), generator=generator)
    return _optimise_fits(best.expand(RESAMPLES, -1), logs[picks], errors[picks])
