"""Answers that are regenerated with a note in view: which answers, which parts are learned, and in which prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from toy import assert_same_run, curve, forked, rows, toy_recipe, toy_run

from practicum.errors import RecipeError
from practicum.methods.kepo.retry import Config
from practicum.objective import Sampled
from practicum.ports import Task
from practicum.ports.notes import Note, NoteMoment
from practicum.rollouts import (
    RolloutBatch,
    RolloutWriters,
    SourceChoice,
    collect_rollouts,
)
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.types import Prompt, Rollout, SamplingParams, ScoreRequest

SOURCE: TypeAdapter[Any] = TypeAdapter(SourceChoice)


@dataclass
class Whims(Task):
    """Treats an answer as right if it begins with one of the letters."""

    prompts: Sequence[Prompt]
    right: str

    def train_prompts(self) -> Sequence[Prompt]:
        return self.prompts

    def heldout_prompts(self) -> Sequence[Prompt]:
        return []

    def reward(self, rollout: Rollout) -> float | None:
        return float(rollout.text[:1] in tuple(self.right))


class Said(Note):
    """Gives one note, and no note for the second answer."""

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        return ["cc" if rollout.sample != 1 else None for rollout in rollouts]


@pytest.fixture(scope="module")
def parts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    return assemble_run(toy_recipe(models), tmp_path_factory.mktemp("models"))


def collect(parts: RunComponents, source: str, letters: str = "a") -> list[Rollout]:
    components = parts.parts
    task = Whims(components.prompts, letters)
    writers = RolloutWriters(
        components.sampler,
        components.teacher,
        components.renderer,
        task=task,
        notes={"hint": Said(), "later": Said()},
    )
    batch = RolloutBatch(components.prompts[:3], 4, 0, 1)
    params = SamplingParams(5, stop_ids=components.renderer.stop_ids)
    return collect_rollouts(batch, SOURCE.validate_python(source), writers, params)


def test_a_prompt_without_a_right_answer_is_tried_again_and_only_what_is_right_stays(
    parts: RunComponents,
) -> None:
    first = collect(parts, "student")
    right = {rollout.prompt.id for rollout in first if rollout.text[:1] == "a"}
    assert 0 < len(right) < 3, "one of the three prompts at least has no right answer"
    again = collect(parts, "retry(hint)")
    marks = {
        mark: [r for r in again if r.notes["retried"] == mark] for mark in ("no", "yes", "failed")
    }
    assert all(r.prompt.id in right or r.sample == 1 for r in marks["no"])
    assert all(r.prompt.id not in right for r in [*marks["yes"], *marks["failed"]])
    assert all(r.reward == 1.0 and r.notes["hint"] == "cc" for r in marks["yes"])
    for before, after in zip(first, again, strict=True):
        assert after.prompt_tokens == before.prompt_tokens, "the note is not learned"
        if after.notes["retried"] != "yes":
            assert after.tokens.equal(before.tokens)
            assert after.policy_logprobs.isfinite().all()
        else:
            # Sampled under the note: its probability with the note is known, without the note it is not.
            assert after.policy_logprobs.isnan().all() and after.sampling_logprobs.isfinite().all()
    shares = Config.measure(again)
    assert shares["retried"] == (len(marks["yes"]) + len(marks["failed"])) / 12
    assert shares["retry_failed"] == len(marks["failed"]) / 12
    assert Config.measure(first) == {}


def test_all_are_given_again_with_the_note_in_the_prompt_that_is_learned(
    parts: RunComponents,
) -> None:
    first, again = (
        collect(parts, "student"),
        collect(parts, "retry(hint, filter=all, prompt=with_note)"),
    )
    renderer = parts.parts.renderer
    for before, after in zip(first, again, strict=True):
        if after.sample == 1:
            assert after.notes["retried"] == "no" and after.tokens.equal(before.tokens)
            continue
        shown = after.prompt.messages[-1].content
        assert shown == f"cc\n\n{before.prompt.messages[-1].content}"
        assert after.prompt_tokens == renderer.render(after.prompt.messages)
        assert after.prompt.id == before.prompt.id and after.policy_logprobs.isfinite().all()


@pytest.mark.parametrize("learn", ["with_note", "without_note"])
def test_a_note_begins_the_answer_as_an_environments_words(
    parts: RunComponents, learn: str
) -> None:
    first = collect(parts, "student")
    again = collect(parts, f"retry(hint, filter=all, prompt={learn}, place=answer)")
    renderer = parts.parts.renderer
    words = renderer.encode("cc\n\n") if learn == "with_note" else []
    for before, after in zip(first, again, strict=True):
        if after.sample == 1:
            continue
        assert after.prompt == before.prompt and after.prompt_tokens == before.prompt_tokens
        assert after.tokens[: len(words)].tolist() == words
        own = after.tokens[len(words) :]
        assert after.loss_mask.tolist() == [False] * len(words) + [True] * len(own)
        assert after.mark_tokens_by("environment").equal(~after.loss_mask)
        assert after.text == renderer.decode(own.tolist()), "the beginning is not rewarded"
        # Sampled after the beginning, whether or not it is learned.
        context = (*before.prompt_tokens, *renderer.encode("cc\n\n"))
        (signal,) = parts.parts.sampler.score(
            [ScoreRequest(context, tuple(own.tolist()))], Sampled()
        )
        assert signal.logprobs is not None
        torch.testing.assert_close(
            after.sampling_logprobs[len(words) :], signal.logprobs, rtol=1e-4, atol=1e-5
        )


def test_wrong_answers_alone_are_given_again(parts: RunComponents) -> None:
    wrong = [r.text[:1] not in ("a", "b") for r in collect(parts, "student")]
    tried = [r.notes["retried"] != "no" for r in collect(parts, "retry(hint, incorrect)", "ab")]
    seen = [is_wrong for row, is_wrong in enumerate(wrong) if row % 4 != 1]
    assert [is_tried for row, is_tried in enumerate(tried) if row % 4 != 1] == seen


KEPO: dict[str, Any] = {
    "rollout": {"n": 3, "max_new_tokens": 5, "source": "retry(hint)"},
    "notes": {"hint": {"type": "written", "template": "{question}", "author": "teacher"}},
    "objective": {
        "losses": [
            {"signal": "score(group_mean)"},
            {"signal": "full", "divergence": "reverse_kl", "filter": "correct"},
        ]
    },
    "train.checkpoint_every": 1,
    "train.steps": 3,
}


def test_a_run_that_tries_again_is_the_same_after_a_kill(models: Path, tmp_path: Path) -> None:
    whole, out = toy_run(models, tmp_path / "whole", KEPO).folder, tmp_path / "parts"
    assert forked(lambda: toy_run(models, out, KEPO), {"PRACTICUM_FAULT": "update:2"}) == 137
    assert_same_run(whole, toy_run(models, out, KEPO, resume=True).folder)
    assert max(curve(whole, "retried")) > 0
    hinted = [row for row in rows(whole / "rollouts.jsonl") if "hint" in row["notes"]]
    assert all(row["notes"]["retried"] == "yes" and row["reward"] == 1.0 for row in hinted)


def test_a_note_that_is_not_there_is_refused(models: Path) -> None:
    line = r"rollout.source: retry\(note=hnt\): no field or note is named 'hnt'; add it to notes"
    with pytest.raises(RecipeError, match=line):
        toy_recipe(models, {**KEPO, "rollout.source": "retry(hnt)"})
