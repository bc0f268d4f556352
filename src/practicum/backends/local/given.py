"""The gradient of a loss of given tokens' log-probabilities: what the Tinker API calls forward_backward.

The targets are free: at each position K tokens, whether or not any of them is the next one. The [T, V] matrix of all
positions is never held, and a batch is cut into passes as `LocalTrainer` cuts it; the loss is a sum, so cuts change nothing but
rounding.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from practicum.backends.local.graph import activation_checkpointing
from practicum.backends.local.packing import hidden_states
from practicum.backends.local.sampler import SCORED_TOKENS
from practicum.backends.local.trainer import LocalTrainer
from practicum.costs import GraphPlan
from practicum.costs.segments import how_many_fit
from practicum.errors import NumericError
from practicum.functional.chunked import chunks
from practicum.functional.head import Head
from practicum.ports.hosting import GivenResult, GivenTokens
from practicum.types import ScoreRequest


def forward_backward_targets(
    trainer: LocalTrainer, data: Sequence[GivenTokens], seed: int
) -> GivenResult:
    """Add the gradient of the summed loss to what has been accumulated; dropout is seeded by `seed`.

    Raises NumericError where a loss is not a number; what had been accumulated is then as it was. So it is where nothing is
    supervised: a gradient of zeros would move the weights by momentum and weight decay.
    """
    parameters = trainer.language_model.trainable_parameters().values()
    earlier = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        device = trainer.language_model.device
        plan = trainer.graph_plan(max(len(datum.tokens) for datum in data) + 1)
        trainer.start_learning()
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            torch.enable_grad(),
            activation_checkpointing(trainer.language_model, plan.recompute),
        ):
            torch.manual_seed(seed)
            result = _through(trainer, data, plan, learn=True)
    except BaseException:
        for parameter, gradient in zip(parameters, earlier, strict=True):
            parameter.grad = gradient
        raise
    for parameter, gradient in zip(parameters, earlier, strict=True):
        now = parameter.grad if result.supervises else None
        parameter.grad = now if gradient is None else gradient if now is None else gradient + now
    return result


@torch.no_grad()
def forward_targets(trainer: LocalTrainer, data: Sequence[GivenTokens]) -> GivenResult:
    """The same numbers without a gradient."""
    trainer.language_model.model.eval()
    return _through(trainer, data, GraphPlan(SCORED_TOKENS, recompute=False), learn=False)


def _through(
    trainer: LocalTrainer, data: Sequence[GivenTokens], plan: GraphPlan, *, learn: bool
) -> GivenResult:
    model = trainer.language_model
    head = model.head()
    texts_logprobs, losses, supervises = [], [], False
    for part in _passes(data, plan.tokens, model.packs_up_to):
        hidden = hidden_states(model, [_text(datum) for datum in part])
        gradient = torch.zeros_like(hidden)
        start = 0
        for datum in part:
            rows = slice(start, start + len(datum.tokens))
            start = rows.stop
            logprobs, loss = _read(
                head, hidden[rows], gradient[rows], datum, trainer.limits.chunk_tokens, learn=learn
            )
            if not torch.isfinite(torch.tensor(loss)):
                raise NumericError(
                    f"datum {len(losses)}: its loss is {loss}, not a number; look for logprobs, advantages and "
                    "weights that are not finite or far too large"
                )
            texts_logprobs.append(logprobs)
            losses.append(loss)
        if hidden.requires_grad:
            hidden.backward(gradient)
            supervises = supervises or bool(gradient.any())
    return GivenResult(texts_logprobs, losses, supervises)


def _read(
    head: Head,
    hidden: Tensor,
    gradient: Tensor,
    datum: GivenTokens,
    chunk_tokens: int,
    *,
    learn: bool,
) -> tuple[Tensor, float]:
    """The log-probabilities of a text's targets and its loss; its gradient with respect to `hidden` goes to `gradient`."""
    if datum.whole:
        datum = _by_parts(head, hidden, datum, chunk_tokens)
    logprobs, total = [], 0.0
    for piece in chunks(len(datum.tokens), chunk_tokens):
        states = hidden[piece].detach().requires_grad_(learn)
        chosen = head.logprobs(states).gather(-1, datum.targets[piece].to(states.device))
        loss = datum.loss(chosen, piece).sum()
        if learn:
            loss.backward()
            assert states.grad is not None
            gradient[piece] = states.grad
        logprobs.append(chosen.detach().cpu())
        total += loss.item()
    return torch.cat(logprobs), total


def _by_parts(head: Head, hidden: Tensor, datum: GivenTokens, chunk_tokens: int) -> GivenTokens:
    """Return the text with a loss of the same value and gradient that can be asked for in pieces.

    The log-probabilities are read once to differentiate the loss by all of them, and `L + g (log S - sg(log S))` is the loss of
    a token whose own loss is L and whose derivative is g.
    """
    with torch.no_grad():
        pieces = [
            head.logprobs(hidden[piece]).gather(-1, datum.targets[piece].to(hidden.device))
            for piece in chunks(len(datum.tokens), chunk_tokens)
        ]
    logprobs = torch.cat(pieces)
    with torch.enable_grad():
        leaf = logprobs.clone().requires_grad_()
        losses = datum.loss(leaf, slice(0, len(datum.tokens)))
        (derivative,) = torch.autograd.grad(losses.sum(), leaf)
    values = losses.detach()

    def part(chosen: Tensor, piece: slice) -> Tensor:
        return values[piece] + derivative[piece] * (chosen - chosen.detach())

    return GivenTokens(datum.tokens, datum.targets, part)


def _passes(
    data: Sequence[GivenTokens], limit: int, packs_up_to: int
) -> Iterator[Sequence[GivenTokens]]:
    while data:
        count = how_many_fit([_text(datum) for datum in data], limit, packs_up_to)
        yield data[:count]
        data = data[count:]


def _text(datum: GivenTokens) -> ScoreRequest:
    """Every token is read, and every position predicts: any one token stands for what comes after the last."""
    return ScoreRequest(datum.tokens[:1], (*datum.tokens[1:], 0))
