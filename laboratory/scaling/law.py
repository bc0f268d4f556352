"""Fit the error of a student to its size, its teacher's size and quality, and its tokens.

Three forms are fitted to the cells of the grid, apart for answers of the student and of the teacher. With n, t and d the logarithms
of both models' parameters and of the tokens, and q the logarithm of the teacher's error, each less its mean:

    additive   E + A exp(-a n) + B exp(-b d) + C exp(c q - g t)
    product    E + A exp(-a n - b d + c q - g t)
    broken     ((A exp(-a n - b d))^p + (C exp(c q - g t))^p)^(1/p)

The form is chosen by the cells of the widest student, which the compared fits do not see. Intervals are from a bootstrap over
settings: cells of the same sizes and tokens are drawn together. The first form follows Hoffmann et al. (2203.15556), the last one
is a smooth maximum, as the broken law of Busbridge et al. (2502.08606) has for the teacher's error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.statistics import Interval

Row = Mapping[str, Any]
Parameters = Float[Tensor, "b p"]
Features = Float[Tensor, "b n q"]

RESAMPLES, ROUNDS, STARTS, PEAK = 200, 1500, 16, 0.05
HUBER_DELTA = 0.1
"""The difference of logarithms at which Huber's loss turns from square to absolute."""

FEATURES = ("student_parameters", "teacher_parameters", "learned_tokens", "teacher_errors")
EXPONENTS = {
    "student": "parameters of the student",
    "tokens": "tokens learned from",
    "quality": "error of the teacher",
    "teacher": "parameters of the teacher",
}
"""The exponents of all forms: how the error falls with a quantity, or rises with the teacher's error."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form of the law: its logarithm for a batch of parameters, and the names of the parameters.

    Parameters with the names of `EXPONENTS` are exponents.
    """

    name: str
    parameters: tuple[str, ...]
    predict: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Float[Tensor, "b n"]]

    def read(self, parameters: Parameters, features: Features) -> Float[Tensor, "b n"]:
        """Return the logarithm of the error of n cells under b fits."""
        values = {name: parameters[:, [place]] for place, name in enumerate(self.parameters)}
        columns = {name: features[..., place] for place, name in enumerate(FEATURES)}
        return self.predict(values, columns)


def _sum_terms(*terms: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    """Return the logarithm of a sum of terms that are given by their logarithms."""
    return torch.stack(torch.broadcast_tensors(*terms)).logsumexp(dim=0)


def _read_teaching(values: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Tensor:
    """Return the logarithm of the teacher's term, but for its coefficient."""
    quality = values["quality"] * columns["teacher_errors"]
    return quality - values["teacher"] * columns["teacher_parameters"]


def _read_learning(values: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Tensor:
    """Return the logarithm of the student's term, but for its coefficient."""
    size = -values["student"] * columns["student_parameters"]
    return size - values["tokens"] * columns["learned_tokens"]


def _predict_additive(values: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Tensor:
    return _sum_terms(
        values["E"],
        values["A"] - values["student"] * columns["student_parameters"],
        values["B"] - values["tokens"] * columns["learned_tokens"],
        values["C"] + _read_teaching(values, columns),
    )


def _predict_product(values: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Tensor:
    term = values["A"] + _read_learning(values, columns) + _read_teaching(values, columns)
    return _sum_terms(values["E"], term)


def _predict_broken(values: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Tensor:
    # From 1, a plain sum, on: the larger, the nearer to the maximum of both.
    sharpness = 1 + torch.nn.functional.softplus(values["p"])
    learning = values["A"] + _read_learning(values, columns)
    teaching = values["C"] + _read_teaching(values, columns)
    return _sum_terms(sharpness * learning, sharpness * teaching) / sharpness


FORMS = {
    form.name: form
    for form in (
        Form("additive", ("E", "A", "B", "C", *EXPONENTS), _predict_additive),
        Form("product", ("E", "A", *EXPONENTS), _predict_product),
        Form("broken", ("A", "C", "p", *EXPONENTS), _predict_broken),
    )
}


@dataclass(frozen=True, slots=True)
class CellTable:
    """Cells as numbers: features less their means, logarithms of the error, and the number of each cell's setting."""

    features: Float[Tensor, "n q"]
    means: Float[Tensor, " q"]
    errors: Float[Tensor, " n"]
    settings: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted form: its parameters, the parameters of the resamples, and its misses in logarithms."""

    form: Form
    table: CellTable
    best: Float[Tensor, " p"]
    resampled: Parameters
    misses: Float[Tensor, " n"]

    def predict(self, features: Float[Tensor, "n q"]) -> tuple[Tensor, Tensor]:
        """Return the logarithm of the error at other features [n], and under each resample [b, n]."""
        centred = (features - self.table.means)[None]
        many = self.form.read(self.resampled, centred)
        return self.form.read(self.best[None], centred)[0], many

    def get_exponent(self, name: str) -> Interval:
        """Return an exponent with its interval."""
        place = self.form.parameters.index(name)
        return Interval.of_resamples(self.best[place].item(), self.resampled[:, place])


def read_features(rows: Sequence[Row], reading: str) -> Float[Tensor, "n q"]:
    """Return the logarithms of the features of cells, with the teacher's error in a reading."""
    return torch.tensor(
        [[*(row[name] for name in FEATURES[:3]), row["teacher_errors"][reading]] for row in rows],
        dtype=torch.float64,
    ).log()


def build_table(rows: Sequence[Row], reading: str) -> CellTable:
    """Return cells as numbers; cells of the same sizes and tokens are one setting."""
    features = read_features(rows, reading)
    places = [(row["student"], row["teacher"], row["tokens"]) for row in rows]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    errors = torch.tensor([row["after"][reading] for row in rows], dtype=torch.float64)
    means = features.mean(dim=0)
    return CellTable(
        features - means, means, errors.log(), tuple(numbers[place] for place in places)
    )


def fit(form: Form, table: CellTable, resamples: int = RESAMPLES, seed: int = 0) -> Fit:
    """Fit a form: the best descent of several starts, and a bootstrap over settings from there."""
    starts = _draw_starts(form, table, seed)
    fits = _minimize(form, starts, table.features[None], table.errors[None])
    losses = _compute_losses(form, fits, table.features[None], table.errors[None])
    best = fits[losses.argmin()]
    weights = _draw_weights(table, resamples, seed)
    resampled = _minimize(
        form, best.expand(resamples, -1), table.features[None], table.errors[None], weights
    )
    misses = table.errors - form.read(best[None], table.features[None])[0]
    return Fit(form, table, best, resampled, misses)


def _draw_starts(form: Form, table: CellTable, seed: int) -> Parameters:
    generator = torch.Generator().manual_seed(seed_of(seed, "starts"))
    noise = torch.randn(STARTS, len(form.parameters), generator=generator, dtype=torch.float64)
    middle = [0.4 if name in EXPONENTS else 0.0 for name in form.parameters]
    # Coefficients begin near the mean error, and a floor well below it.
    level = [
        table.errors.mean().item() - (3.0 if name == "E" else 0.7) if name in "EABC" else 0.0
        for name in form.parameters
    ]
    return torch.tensor(middle) + torch.tensor(level) + 0.3 * noise


def _draw_weights(table: CellTable, count: int, seed: int) -> Float[Tensor, "b n"]:
    """Return how often each cell is in each resample; a setting is in it with all its cells."""
    generator = torch.Generator().manual_seed(seed_of(seed, "bootstrap"))
    settings = max(table.settings) + 1
    picks = torch.randint(settings, (count, settings), generator=generator)
    times = torch.zeros(count, settings, dtype=torch.float64)
    times.scatter_add_(1, picks, torch.ones_like(picks, dtype=torch.float64))
    return times[:, list(table.settings)]


def _minimize(
    form: Form,
    starts: Parameters,
    features: Features,
    errors: Float[Tensor, "b n"],
    weights: Float[Tensor, "b n"] | None = None,
) -> Parameters:
    """Return the parameters of many fits, by Adam at a rate that falls to 0."""
    parameters = starts.clone().requires_grad_()
    optimizer = torch.optim.Adam([parameters], lr=PEAK)
    for round_index in range(ROUNDS):
        optimizer.param_groups[0]["lr"] = PEAK * (1 - round_index / ROUNDS)
        optimizer.zero_grad()
        # The fits share no parameter, so the gradient of the sum is the gradient of each fit.
        _compute_losses(form, parameters, features, errors, weights).sum().backward()
        optimizer.step()
    return parameters.detach()


def _compute_losses(
    form: Form,
    parameters: Parameters,
    features: Features,
    errors: Float[Tensor, "b n"],
    weights: Float[Tensor, "b n"] | None = None,
) -> Float[Tensor, " b"]:
    loss = torch.nn.HuberLoss(reduction="none", delta=HUBER_DELTA)
    predictions = form.read(parameters, features)
    misses = loss(predictions, errors.expand_as(predictions))
    return (misses if weights is None else misses * weights).sum(dim=1)


def choose_form(rows: Sequence[Row], reading: str) -> tuple[Form, dict[str, float]]:
    """Return the form that misses the widest student's cells least when it is fitted without them.

    Also returns the mean miss, in logarithms, of each form and of the nearest cell.
    """
    widest = max(row["student"] for row in rows)
    narrower = [row for row in rows if row["student"] != widest]
    left_out = [row for row in rows if row["student"] == widest]
    table, features = build_table(narrower, reading), read_features(left_out, reading)
    errors = build_table(left_out, reading).errors
    misses = {}
    for name, form in FORMS.items():
        predictions, _ = fit(form, table, resamples=1).predict(features)
        misses[name] = (predictions - errors).abs().mean().item()
    best = min(misses, key=lambda name: misses[name])
    misses["nearest cell"] = (find_nearest(table, features) - errors).abs().mean().item()
    return FORMS[best], misses


def find_nearest(table: CellTable, features: Float[Tensor, "n q"]) -> Float[Tensor, " n"]:
    """Return the logarithm of the error of the nearest known cell, which any law has to beat."""
    scale = table.features.std(dim=0)
    distances = torch.cdist((features - table.means) / scale, table.features / scale)
    return table.errors[distances.argmin(dim=1)]


def predict_errors(fitted: Fit, rows: Sequence[Row], reading: str) -> list[Interval]:
    """Return the error of single runs with its 80 % interval: the spread of the fit and the misses of its cells."""
    middle, many = fitted.predict(read_features(rows, reading))
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(fitted.misses), many.shape, generator=generator)
    low, high = (many + fitted.misses[picks]).quantile(
        torch.tensor([0.1, 0.9], dtype=torch.float64), dim=0
    )
    ends = torch.stack([middle, low, high], dim=1).exp().tolist()
    return [Interval(*row) for row in ends]


def find_best_size(fitted: Fit, budget: float, teacher: float, quality: float) -> Interval:
    """Return the student's parameters with the least error for a budget of operations.

    A token costs 2 operations per parameter of the student to sample, 2 of the teacher to score and 6 of the student to
    train on. Sizes are searched within three times the range of the cells.
    """
    sizes = torch.logspace(math.log10(6e3), math.log10(3.5e6), 121, dtype=torch.float64)
    tokens = budget / (8 * sizes + 2 * teacher)
    features = torch.stack(
        [sizes, torch.full_like(sizes, teacher), tokens, torch.full_like(sizes, quality)], dim=1
    ).log()
    best, many = fitted.predict(features)
    return Interval.of_resamples(sizes[best.argmin()].item(), sizes[many.argmin(dim=1)])
