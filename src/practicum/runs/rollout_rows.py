"""The rollouts of a run as rows for a program, with the top tokens of student and teacher."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.core.waits import show_wait
from practicum.errors import DataError, RecipeError
from practicum.losses import compare_signals
from practicum.losses.passes import build_score_requests
from practicum.objective import Full, Sampled, TopK
from practicum.ports import Capabilities
from practicum.recipe import Recipe
from practicum.rollouts import RolloutRow
from practicum.run_dir import RunDir, read_rows, shapes
from practicum.runs.assembly import RunComponents
from practicum.runs.opening import open_run, require_checkpoint
from practicum.runs.records import locate_vocabulary
from practicum.runs.state import restore_components
from practicum.text import Renderer
from practicum.training.forensics import OTHER_TOKENS
from practicum.types import Prompt, Rollout, TeacherSignal

log = logging.getLogger(__name__)

MOST_ROWS = 64
"""The number of rows with top tokens, unless the caller sets a limit."""

ROWS_TOGETHER = 8
"""The number of rollouts that the models read at once."""

CHUNK = 64
"""The number of tokens that are compared in one chunk."""

TopTokens = list[list[tuple[str, float]]]
"""The top tokens at each position: text and log-probability, in order."""


def list_rollout_rows(
    folder: Path,
    *,
    step: int | None = None,
    top: int = 0,
    limit: int | None = None,
    recipe: Recipe | None = None,
) -> list[dict[str, Any]]:
    """Return one row per rollout of a run, at most `limit`, of one `step` or of all.

    With `top`, rows also have the top tokens of student and teacher. `recipe` is the run's recipe
    with its objects of Python, which the folder does not hold.
    """
    _check_numbers(step, top, limit)
    run_dir = RunDir(folder)
    texts = {
        row["id"]: row["text"] for row in read_rows(locate_vocabulary(run_dir), shapes.VOCABULARY)
    }
    chosen = (
        row
        for row in read_rows(run_dir.rollouts_jsonl, shapes.ROLLOUT)
        if step is None or row["step"] == step
    )
    most = MOST_ROWS if top and limit is None else limit
    saved = list(islice(chosen, most))
    if not saved and step is not None:
        raise DataError(f"{folder}: no rollouts of step {step}; leave step out for all steps")
    if most is not None and limit is None and next(chosen, None) is not None:
        log.info(f"the first {most} rollouts; set limit or step for others")
    rows = [_build_row(row, texts) for row in saved]
    if top:
        tops = _compute_tops(run_dir, recipe or open_run(run_dir.path)[1], saved, top)
        rows = [{**row, **columns} for row, columns in zip(rows, tops, strict=True)]
    return rows


def _check_numbers(step: int | None, top: int, limit: int | None) -> None:
    """Raise RecipeError if an argument is not a whole number in its range."""
    for name, number, least in (("step", step, 1), ("top", top, 0), ("limit", limit, 1)):
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (is_whole and number >= least):
            raise RecipeError(f"{name}={number!r}: give a whole number from {least} on")


def _build_row(row: Mapping[str, Any], texts: Mapping[int, str]) -> dict[str, Any]:
    """Return the columns of a row that the journals hold."""
    count = len(row["tokens"])
    authors = [
        part["author"] for part in row.get("authors", ()) for _ in range(part["tokens"])
    ] or [row["source"] for _ in range(count)]
    return {
        "step": row["step"],
        "prompt": row["prompt"],
        "sample": row["sample"],
        "source": row["source"],
        "text": row["text"],
        "stop_reason": row["stop_reason"],
        "reward": row["reward"],
        "judgements": row.get("judgements", {}),
        "prompt_tokens": row["prompt_tokens"],
        "tokens": row["tokens"],
        "token_texts": [texts.get(token, f"<{token}>") for token in row["tokens"]],
        "mask": row["loss_mask"],
        "authors": authors,
        "student_logprobs": row["policy_logprobs"],
        "sampling_logprobs": row["sampling_logprobs"],
        "teacher_logprobs": row["teacher_logprobs"],
        "divergence": row["divergence"],
        "student_entropy": row.get("student_entropy"),
        "teacher_entropy": row.get("teacher_entropy"),
        "weight": row.get("weight"),
    }


def _compute_tops(
    run_dir: RunDir, recipe: Recipe, rows: Sequence[Mapping[str, Any]], top: int
) -> list[dict[str, Any]]:
    """Return the top tokens of each row, by the newest checkpoint's student and by its teacher."""
    step = require_checkpoint(run_dir).step
    with show_wait("top tokens", len(rows)) as wait:
        components = restore_components(run_dir, recipe)
        prompts = {prompt.id: prompt for prompt in components.parts.prompts}
        columns = []
        with closing(components), torch.no_grad():
            for start in range(0, len(rows), ROWS_TOGETHER):
                part = rows[start : start + ROWS_TOGETHER]
                rollouts = [_restore_rollout(row, prompts) for row in part]
                columns += _read_tops(components, rollouts, top)
                wait.advance(len(part))
    return [{"top_step": step, **tops} for tops in columns]


def _restore_rollout(row: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> Rollout:
    """Return the rollout of a row; a prompt that the task no longer has is restored by name only."""
    fields = {name: row[name] for name in RolloutRow.model_fields if name in row}
    prompt = prompts.get(row["prompt"], Prompt(row["prompt"], ()))
    return replace(RolloutRow.model_validate(fields).to_rollout(prompt), reward=row["reward"])


def _read_tops(
    components: RunComponents, rollouts: Sequence[Rollout], top: int
) -> Iterator[dict[str, TopTokens | None]]:
    """Yield the top tokens of student and teacher for each rollout."""
    parts = components.parts
    student = parts.sampler.score(
        build_score_requests(rollouts), _choose_signal(parts.sampler.capabilities, top)
    )
    capabilities = parts.teacher.capabilities
    asks = bool(capabilities.signals)
    teacher = (
        parts.teacher.score(rollouts, _choose_signal(capabilities, top))
        if asks
        else [TeacherSignal() for _ in rollouts]
    )
    names = ("student_top_ids", "student_top_logprobs", "teacher_top_ids", "teacher_top_logprobs")
    for rollout, *signals in zip(rollouts, student, teacher, strict=True):
        compared = compare_signals((signals[0], signals[1]), rollout.tokens, CHUNK, names, top)
        pairs = {
            "student_top": (compared.student_top_ids, compared.student_top_logprobs),
            "teacher_top": (compared.teacher_top_ids, compared.teacher_top_logprobs),
        }
        # A server's teacher has no distribution to compare, but its own top tokens.
        sent = {
            name: (signal.topk_ids, signal.topk_logprobs)
            for name, signal in zip(pairs, signals, strict=True)
        }
        yield {
            name: _list_top(*(sent[name] if pair[0] is None else pair), parts.renderer)
            for name, pair in pairs.items()
        }


def _list_top(
    ids: Int[Tensor, "T K"] | None, logprobs: Float[Tensor, "T K"] | None, renderer: Renderer
) -> TopTokens | None:
    """Return texts and log-probabilities at each position; None if the model gives none."""
    if ids is None or logprobs is None:
        return None
    return [
        [
            # A teacher with another vocabulary has one entry after the student's tokens.
            (OTHER_TOKENS if token == renderer.vocab_size else renderer.decode_token(token), number)
            for token, number in zip(row_ids, row_logprobs, strict=True)
        ]
        for row_ids, row_logprobs in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]


def _choose_signal(capabilities: Capabilities, top: int) -> Full | TopK | Sampled:
    """Return the richest signal that a model gives."""
    if "full" in capabilities.signals:
        return Full()
    if "topk" in capabilities.signals and "teacher" in capabilities.supports:
        return TopK(k=min(top, capabilities.largest_k or top), support="teacher")
    return Sampled()
