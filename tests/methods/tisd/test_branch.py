"""Failed answers that take the teacher's token once: where, which token, and what stays."""

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from toy import assert_same_run, curve, forked, rows, toy_recipe, toy_run

from practicum.errors import CapabilityError
from practicum.losses import read_tokens
from practicum.methods.tisd.branch import Config
from practicum.objective import Full
from practicum.ports import Capabilities, Task
from practicum.rollouts import RolloutBatch, RolloutWriters, SourceChoice, collect_rollouts
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.types import Prompt, Rollout, SamplingParams, ScoreRequest

SOURCE: TypeAdapter[Any] = TypeAdapter(SourceChoice)


class Whims(Task):
    """Treats an answer as right if it begins with a letter of the first half of the alphabet."""

    def train_prompts(self) -> list[Prompt]:
        return []

    heldout_prompts = train_prompts

    def reward(self, rollout: Rollout) -> float | None:
        return float(rollout.text[:1] < "d")


@pytest.fixture(scope="module")
def parts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    return assemble_run(toy_recipe(models), tmp_path_factory.mktemp("models"))


def collect(parts: RunComponents, source: str, longest: int = 5) -> list[Rollout]:
    components = parts.parts
    writers = RolloutWriters(
        components.sampler, components.teacher, components.renderer, task=Whims()
    )
    batch = RolloutBatch(components.prompts[:6], 4, 0, 1)
    params = SamplingParams(longest, stop_ids=components.renderer.stop_ids)
    return collect_rollouts(batch, SOURCE.validate_python(source), writers, params)


@pytest.mark.parametrize("longest", [2, 5])
@torch.no_grad()
def test_a_failed_answer_takes_the_teachers_token_where_the_two_differ_most(
    parts: RunComponents, longest: int
) -> None:
    first, again = (collect(parts, source, longest) for source in ("student", "branch"))
    places, student, teacher = [], parts.parts.sampler, parts.parts.teacher
    for before, after in zip(first, again, strict=True):
        assert after.prompt_tokens == before.prompt_tokens and len(after.tokens) <= longest
        if before.text[:1] < "d":
            assert after.notes["branched"] == "no" and after.tokens.equal(before.tokens)
            continue
        request = ScoreRequest(before.prompt_tokens, tuple(before.tokens.tolist()))
        signals = student.score([request], Full())[0], teacher.score([before], Full())[0]
        own, other = (read_tokens(signal, slice(None)).full for signal in signals)
        assert own is not None and other is not None
        gaps = [float((s.exp() * (s - t)).sum()) for s, t in zip(own, other, strict=True)]
        place = gaps.index(max(gaps))
        token = int(other[place].argmax())
        assert after.notes["branched"] == str(place)
        assert after.tokens[: place + 1].tolist() == [*before.tokens[:place].tolist(), token]
        assert after.mark_tokens_by("teacher").nonzero()[:, 0].tolist() == [place]
        assert after.loss_mask.all() and after.reward == 0.0, "the first attempt's reward"
        # The student wrote the rest, and could have written the token.
        (signal,) = student.score([replace(request, tokens=tuple(after.tokens.tolist()))], Full())
        full = read_tokens(signal, slice(None)).full
        assert full is not None
        expected = full.gather(-1, after.tokens[:, None])[:, 0]
        torch.testing.assert_close(after.policy_logprobs, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after.sampling_logprobs, expected, rtol=1e-4, atol=1e-5)
        ends = after.tokens[-1].item() in parts.parts.renderer.stop_ids
        assert after.stop_reason == ("stop" if ends else "length")
        places.append(place)
    assert 0 < len(places) < len(first)
    assert len(set(places)) > 1 if longest > 2 else longest - 1 in places, "also the last token"
    assert Config.measure(again) == {"branched": len(places) / len(first)}
    assert Config.measure(first) == {}


def test_a_teacher_of_samples_is_refused(
    parts: RunComponents, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = Capabilities(frozenset({"sampled"}))
    monkeypatch.setattr(type(parts.parts.teacher), "capabilities", sampled)
    line = "branch compares full distributions, which the teacher does not give"
    with pytest.raises(CapabilityError, match=line):
        collect(parts, "branch")


TISD: dict[str, Any] = {
    "teacher": {
        "type": "privileged",
        "teacher": {"type": "self", "weights": "ema", "rate": 0.1},
        "question": "{question}\n\n{sibling}",
    },
    "task": {
        "type": "reverse",
        "alphabet": "abcd",
        "shortest": 1,
        "longest": 2,
        "train_size": 16,
        "heldout_size": 4,
    },
    "rollout": {"n": 8, "max_new_tokens": 5, "source": "branch"},
    "objective": {"signal": "topk(5, student, bucket)", "divergence": "reverse_kl"},
    "train.checkpoint_every": 1,
    "train.steps": 3,
}


def test_a_run_is_the_same_after_a_kill_and_keeps_what_no_sibling_informs(
    models: Path, tmp_path: Path
) -> None:
    whole, out = toy_run(models, tmp_path / "whole", TISD).folder, tmp_path / "parts"
    assert forked(lambda: toy_run(models, out, TISD), {"PRACTICUM_FAULT": "update:2"}) == 137
    assert_same_run(whole, toy_run(models, out, TISD, resume=True).folder)
    assert max(curve(whole, "branched")) > 0
    groups = defaultdict(list)
    for row in rows(whole / "rollouts.jsonl"):
        groups[row["step"], row["prompt"]].append(row)
    kinds = Counter()
    for group in groups.values():
        is_informed = any(row["reward"] == 1.0 for row in group)
        kinds[is_informed] += 1
        for row in group:
            is_branched = row["notes"]["branched"] != "no"
            assert is_branched == (is_informed and row["reward"] < 1.0)
    assert min(kinds.values()) > 0 and len(kinds) == 2
