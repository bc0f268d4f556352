"""Differentiate a loss of target tokens' log-probabilities: the Tinker API's forward_backward.

Each position has K target tokens, which need not include the next token. The [T, V] matrix of all
positions is never in memory. A batch is split into micro-batches as in `LocalTrainer`; the loss is
a sum, so splitting only changes rounding.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from practicum.backends.local.device_limits import find_limits
from practicum.backends.local.graph import activation_checkpointing
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.trainer import LocalTrainer
from practicum.costs import GraphPlan
from practicum.costs.segments import split_by_tokens
from practicum.errors import NumericError
from practicum.functional.chunked import chunks
from practicum.functional.head import Head
from practicum.ports.hosting import GivenResult, GivenTokens
from practicum.types import ScoreRequest


def forward_backward_targets(
    trainer: LocalTrainer, datums: Sequence[GivenTokens], seed: int
) -> GivenResult:
    """Add the gradient of the summed loss to the accumulated gradients; `seed` seeds dropout.

    Raises NumericError if a loss is not a number. The accumulated gradients do not change then, nor
    if no target is supervised.
    """
    with trainer.add_gradients(), torch.enable_grad():
        plan = trainer.plan_micro_batch(max(len(datum.tokens) for datum in datums) + 1)
        trainer.set_training_mode()
        torch.manual_seed(seed)
        with activation_checkpointing(trainer.language_model, plan.recompute):
            result = _run_micro_batches(trainer, datums, plan, train=True)
        if not result.supervises:
            # A gradient of zeros would still change the weights, through momentum and weight decay.
            trainer.language_model.model.zero_grad(set_to_none=True)
    return result


@torch.no_grad()
def forward_targets(trainer: LocalTrainer, datums: Sequence[GivenTokens]) -> GivenResult:
    """Return the same log-probabilities and losses without computing a gradient."""
    trainer.language_model.model.eval()
    plan = GraphPlan(find_limits(trainer.language_model.device).scored_tokens, recompute=False)
    return _run_micro_batches(trainer, datums, plan, train=False)


def _run_micro_batches(
    trainer: LocalTrainer, datums: Sequence[GivenTokens], plan: GraphPlan, *, train: bool
) -> GivenResult:
    model = trainer.language_model
    head = model.head()
    texts_logprobs, losses, supervises = [], [], False
    # Every position predicts, including the last: token 0 is a placeholder for the token after the
    # text.
    requests = [ScoreRequest(datum.tokens[:1], (*datum.tokens[1:], 0)) for datum in datums]
    for micro_batch in split_by_tokens(requests, plan.tokens, model.max_packed_tokens):
        hidden = compute_hidden_states(model, requests[micro_batch])
        gradient = torch.zeros_like(hidden)
        start = 0
        for datum in datums[micro_batch]:
            rows = slice(start, start + len(datum.tokens))
            start = rows.stop
            logprobs, loss = _compute_loss(
                head, hidden[rows], gradient[rows], datum, trainer.limits.chunk_tokens, train=train
            )
            if not math.isfinite(loss):
                raise NumericError(
                    f"datum {len(losses)}: its loss is {loss}, not a number; look for logprobs, "
                    "advantages and weights that are not finite or far too large"
                )
            texts_logprobs.append(logprobs)
            losses.append(loss)
        if hidden.requires_grad:
            hidden.backward(gradient)
            supervises = supervises or bool(gradient.any())
    return GivenResult(texts_logprobs, losses, supervises)


def _compute_loss(
    head: Head,
    hidden: Tensor,
    gradient: Tensor,
    datum: GivenTokens,
    chunk_tokens: int,
    *,
    train: bool,
) -> tuple[Tensor, float]:
    """Return a text's target log-probabilities and its loss.

    With `train`, writes the gradient with respect to `hidden` into `gradient`.
    """
    if datum.needs_all_positions:
        datum = _separate_loss(head, hidden, datum, chunk_tokens)
    logprobs, losses = [], []
    for piece in chunks(len(datum.tokens), chunk_tokens):
        states = hidden[piece].detach().requires_grad_(train)
        chosen = head.logprobs(states).gather(-1, datum.targets[piece].to(states.device))
        loss = datum.loss(chosen, piece).sum()
        if train:
            loss.backward()
            assert states.grad is not None
            gradient[piece] = states.grad
        logprobs.append(chosen.detach())
        losses.append(loss.detach().double())
    # Read from the device once per text; reading after each chunk would wait for the device each
    # time.
    return torch.cat(logprobs).cpu(), torch.stack(losses).sum().item()


def _separate_loss(
    head: Head, hidden: Tensor, datum: GivenTokens, chunk_tokens: int
) -> GivenTokens:
    """Return the text with a loss of the same value and gradient that can be computed in chunks."""
    # First differentiate the full loss by all log-probabilities. A token with loss L and
    # derivative g then gets the loss L + g (log p - sg(log p)), which needs no other token.
    with torch.no_grad():
        chunk_logprobs = [
            head.logprobs(hidden[piece]).gather(-1, datum.targets[piece].to(hidden.device))
            for piece in chunks(len(datum.tokens), chunk_tokens)
        ]
    logprobs = torch.cat(chunk_logprobs)
    with torch.enable_grad():
        leaf = logprobs.clone().requires_grad_()
        losses = datum.loss(leaf, slice(0, len(datum.tokens)))
        (derivative,) = torch.autograd.grad(losses.sum(), leaf)
    values = losses.detach()

    def compute_chunk_loss(chosen: Tensor, piece: slice) -> Tensor:
        return values[piece] + derivative[piece] * (chosen - chosen.detach())

    return GivenTokens(datum.tokens, datum.targets, compute_chunk_loss)
