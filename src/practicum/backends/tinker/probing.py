"""Test whether a service supports several targets per token and all AdamW settings.

A service that lacks one of these may not report it: it may train on other targets, or use its own
settings for steps. Each feature is tried in a case in which ignoring it changes the answer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from practicum.errors import TeacherError
from practicum.remote.tinker import Connection

TOKENS = 8
"""The length of the trial text, in tokens."""

RATE = 0.005
"""The learning rate of trial steps: large, so that a step is visible above 16-bit rounding."""

TINY_NORM, HUGE_EPSILON = 1e-12, 1e6
"""A clipping norm and an epsilon that reduce a step to nothing."""

MOMENTUM_STEPS = 5
"""The steps that build up momentum before a step in the opposite direction."""

ROUNDING = 0.02
"""Nats by which a service's own log-probabilities of one text may differ from call to call."""


def explain_ignored_targets(connection: Connection, client: Any, vocabulary: int) -> str | None:
    """Explain how a service fails to score two targets per token; return None if it scores both."""
    text = _choose_text(vocabulary)
    following, shifted = text[1:], text[:-1].roll(1)
    try:
        answers = _forward(
            connection, client, text, [following, shifted, torch.stack([following, shifted], dim=1)]
        )
    except TeacherError as error:
        return f"refuses two targets per token ({error})"
    first, second, both = answers
    if both.shape != (TOKENS, 2):
        return f"answers two targets per token with the shape {list(both.shape)}"
    columns = torch.stack([first.reshape(-1), second.reshape(-1)], dim=1)
    if (both - columns).abs().max().item() > ROUNDING:
        return "scores other tokens than the two targets that it is sent"
    return None


def find_ignored_settings(connection: Connection, client: Any, vocabulary: int) -> list[str]:
    """Return the optimizer settings that a service ignores, by trial steps of new adapters.

    `client` trains throwaway adapters. The results are names of a recipe's `optimizer` settings,
    and `epsilon`.
    """
    trial = _Trial(connection, client, _choose_text(vocabulary))
    ignored = []
    start = trial.measure()
    # Nothing has changed yet, so a change here means that a setting was ignored.
    trial.step(clip=TINY_NORM)
    clipped = trial.measure() - start
    trial.step()
    after_step = trial.measure()
    move = after_step - start - clipped
    if abs(clipped) > abs(move) / 4:
        ignored.append("max_grad_norm")
    trial.step(epsilon=HUGE_EPSILON)
    after_epsilon = trial.measure()
    if abs(after_epsilon - after_step) > abs(move) / 4:
        ignored.append("epsilon")
    # Momentum builds up while the gradient stays the same: steps with almost no learning rate do
    # not change the weights.
    for _ in range(MOMENTUM_STEPS):
        trial.step(rate=RATE * TINY_NORM)
    # Without momentum a step follows its own gradient; with momentum it follows earlier gradients.
    trial.step(direction=-1.0, betas=(0.0, 0.0))
    if (trial.measure() - after_epsilon) * move > 0:
        ignored.append("betas")
    for _ in range(2):
        trial.step(betas=(0.0, 0.0))
    away = trial.measure() - start
    # A decay of 1 / rate resets the adapters to zero, their initial state.
    trial.step(weight_decay=1.0 / RATE, epsilon=HUGE_EPSILON)
    if abs(trial.measure() - start) > abs(away) / 2:
        ignored.append("weight_decay")
    return ignored


class _Trial:
    """Adapters that learn one text, or unlearn it."""

    def __init__(self, connection: Connection, client: Any, text: Tensor) -> None:
        self._connection = connection
        self._client = client
        self._text = text

    def measure(self) -> float:
        """Return the text's log-probability."""
        (answer,) = _forward(self._connection, self._client, self._text, [self._text[1:]])
        return answer.sum().item()

    def step(
        self,
        *,
        rate: float | None = None,
        direction: float = 1.0,
        clip: float = 0.0,
        epsilon: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        """Take one step that raises the text's log-probability, or lowers it; 0 is no clip."""
        from tinker import types

        datum = _build_datum(self._text, self._text[1:], direction)
        adam = types.AdamParams(
            learning_rate=RATE if rate is None else rate,
            beta1=betas[0],
            beta2=betas[1],
            eps=epsilon,
            weight_decay=weight_decay,
            grad_clip_norm=clip,
        )
        request = self._connection.request
        request(lambda: self._client.forward_backward([datum], "cross_entropy"), "a trial gradient")
        request(lambda: self._client.optim_step(adam), "a trial step")


def _choose_text(vocabulary: int) -> Tensor:
    """Return a fixed text of random tokens, one token longer than the part that is read."""
    stream = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (TOKENS + 1,), generator=stream)


def _forward(
    connection: Connection, client: Any, text: Tensor, targets: Sequence[Tensor]
) -> list[Tensor]:
    """Return the log-probabilities of each of the targets at the text's tokens."""
    datums = [_build_datum(text, ids, 0.0) for ids in targets]
    output = connection.request(
        lambda: client.forward(datums, "cross_entropy"), "the log-probabilities of a trial"
    )
    answers = [record["logprobs"].to_torch().float() for record in output.loss_fn_outputs]
    if len(answers) != len(datums):
        raise TeacherError(
            f"{connection.address}: {len(answers)} of {len(datums)} texts were answered; look at the "
            "service"
        )
    return answers


def _build_datum(text: Tensor, targets: Tensor, weight: float) -> Any:
    from tinker import types

    inputs = {
        "target_tokens": types.TensorData.from_torch(targets),
        "weights": types.TensorData.from_torch(torch.full(targets.shape, weight)),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(text[:-1].tolist()), loss_fn_inputs=inputs
    )
