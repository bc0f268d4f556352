"""Rollouts from recorded traces of the student under another harness, token for token."""

import math
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Literal

import torch

from practicum.errors import DataError
from practicum.rollouts.source import Tape
from practicum.rollouts.sources.cache import RecordedPath, RecordedSource
from practicum.rollouts.tape import mark_authors
from practicum.text import Renderer
from practicum.text.trace_rows import TracedAnswer, read_traced_answers
from practicum.types import Prompt, Rollout


class Config(RecordedSource):
    """Conversations that an agent of the student recorded under another harness, token for token.

    `path` has traces of the `verifiers` library (schema 1), one per line, with their rewards.
    """

    type: Literal["traces"] = "traces"
    path: RecordedPath

    def load_tape(
        self, folder: Path, prompts: Sequence[Prompt], renderer: Renderer, max_tokens: int
    ) -> Tape:
        """Return the conversations of the file."""
        file = folder / self.path
        return Tape(file, load_traced_rollouts(file, prompts, renderer, max_tokens))


def load_traced_rollouts(
    path: Path, prompts: Sequence[Prompt], renderer: Renderer, max_tokens: int
) -> dict[str, list[Rollout]]:
    """Return the rollouts of a file of traces for these prompts, by prompt id, with their rewards.

    Raises the errors of `list_traced_rollouts`.
    """
    recorded: dict[str, list[Rollout]] = {}
    for _, rollout in list_traced_rollouts(path, prompts, renderer, max_tokens):
        recorded.setdefault(rollout.prompt.id, []).append(rollout)
    return recorded


def list_traced_rollouts(
    path: Path, prompts: Sequence[Prompt], renderer: Renderer, max_tokens: int
) -> list[tuple[TracedAnswer, Rollout]]:
    """Return the conversations of a file of traces about these prompts, each with its rollout.

    Raises DataError with the line of a conversation that another tokenizer or template wrote, or
    that is longer than `max_tokens`.
    """
    by_id = {prompt.id: prompt for prompt in prompts}
    rollouts = []
    for answer in read_traced_answers(path):
        if (prompt := by_id.get(answer.prompt.id)) is not None:
            _check_answer(answer, prompt, renderer, max_tokens, f"{path}: line {answer.line}")
            rollouts.append((answer, _build_rollout(answer, prompt, renderer)))
    return rollouts


def _build_rollout(answer: TracedAnswer, prompt: Prompt, renderer: Renderer) -> Rollout:
    """Return a traced conversation as a rollout of the student, with the trace's reward."""
    mask = torch.tensor(answer.mask)
    replies = [turn.text for turn in answer.turns if turn.role == "assistant"]
    text = "\n".join(reply.replace("\n", " ") for reply in replies)
    return Rollout(
        prompt=prompt,
        prompt_tokens=answer.prompt_tokens,
        tokens=torch.tensor(answer.tokens),
        loss_mask=mask,
        sampling_logprobs=torch.tensor(answer.logprobs, dtype=torch.float32),
        policy_logprobs=torch.full((len(answer.tokens),), math.nan),
        policy_version=0,
        stop_reason=answer.stop_reason,
        text=text or renderer.decode(answer.tokens),
        reward=answer.trace.reward,
        authors=None if mask.all() else mark_authors(mask, "student", "environment"),
        turns=answer.turns,
    )


def _check_answer(
    answer: TracedAnswer, prompt: Prompt, renderer: Renderer, max_tokens: int, where: str
) -> None:
    # The teacher renders the prompt in its own template, so the messages must contain all of it.
    rendered = renderer.render(prompt.messages)
    if answer.prompt_tokens != rendered:
        pairs = zip(answer.prompt_tokens, rendered, strict=False)
        equal = takewhile(lambda pair: pair[0] == pair[1], pairs)
        place = sum(1 for _ in equal)
        raise DataError(
            f"{where}: from token {place} on, the prompt of {prompt.id!r} differs from its messages "
            "in this student's template; use the student that the trace was recorded with, with the "
            "same system turn and template"
        )
    if max(answer.tokens) >= renderer.vocab_size:
        raise DataError(
            f"{where} has the token {max(answer.tokens)}, and the student's tokens end at "
            f"{renderer.vocab_size - 1}; use the student that the trace was recorded with"
        )
    if len(answer.tokens) > max_tokens:
        raise DataError(
            f"{where} has {len(answer.tokens)} tokens after its prompt; raise "
            f"rollout.max_new_tokens, which is {max_tokens}"
        )
