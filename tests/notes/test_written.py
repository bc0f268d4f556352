"""The choice between several drafts of a written note: by overlap with the student, or by the teacher's answer to the note."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import toy_data, toy_recipe

from practicum.errors import CapabilityError, RecipeError
from practicum.notes import written
from practicum.ports import Capabilities, Teacher, TeacherRequest
from practicum.ports.notes import NoteContext, NoteMoment
from practicum.recipe import parse_recipe
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.training.candidates import compute_candidates
from practicum.types import (
    Message,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    TeacherSignal,
)


@dataclass
class Reader(Teacher):
    """Writes drafts, and shares its most likely token with the student for each x of a note."""

    drafts: Sequence[str]
    own: dict[str, torch.Tensor]
    is_silent: bool = False
    right: Sequence[str] = ()
    asked: list[str] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset({"topk"}))

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        none = torch.zeros(0)
        shown = [request.prompt.privileged.get("hint") for request in requests]
        if any(shown):
            assert params.temperature == 0
            answers = ["ba" if hint in self.right else "ab" for hint in shown]
            return [Sample(none.long(), none, none, "stop", text) for text in answers]
        self.asked += [request.prompt.question for request in requests]
        text = self.drafts[len(self.asked) // len(requests) - 1]
        return [Sample(none.long(), none, none, "stop", text) for _ in requests]

    def score(self, rollouts: Sequence[Rollout], signal: Any) -> list[TeacherSignal]:
        assert (signal.k, signal.support) == (2, "teacher")
        return [self._answer(rollout) for rollout in rollouts]

    def _answer(self, rollout: Rollout) -> TeacherSignal:
        if self.is_silent:
            return TeacherSignal()
        ids = self.own[rollout.text].clone()
        # All is shared at the last token, which has no loss.
        ids[:-1].view(-1)[rollout.notes["hint"].count("x") :] = 99
        return TeacherSignal(topk_ids=ids, topk_logprobs=torch.zeros(ids.shape))


@pytest.fixture(scope="module")
def parts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    return assemble_run(toy_recipe(models), tmp_path_factory.mktemp("models"))


def answer(number: int) -> Rollout:
    return Rollout(
        prompt=Prompt("p", (Message("user", "ab?"),), answer="ba"),
        prompt_tokens=(4, 5),
        tokens=torch.tensor([4, 5, 4, 5]) + number,
        loss_mask=torch.tensor([True, True, True, False]),
        sampling_logprobs=torch.zeros(4),
        policy_logprobs=torch.zeros(4),
        policy_version=0,
        stop_reason="stop",
        text="ab"[number],
        sample=number,
    )


def choose(
    parts: RunComponents,
    *drafts: str,
    is_silent: bool = False,
    right: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """Return the notes of two answers."""
    components, rollouts = parts.parts, [answer(0), answer(1)]
    own = compute_candidates(components.sampler, rollouts, 2)
    known = {rollout.text: ids for rollout, ids in zip(rollouts, own, strict=True)}
    reader = Reader(drafts, known, is_silent, right)
    config = written.Config(
        template="{attempt}",
        author="teacher",
        drafts=len(drafts),
        top_tokens=2,
        **{"choose": "overlap", **settings},
    )
    context = NoteContext("hint", components.renderer, components.task, 5, {"teacher": reader})
    return written.build(config, context).write(rollouts, NoteMoment(1, components.sampler))


@pytest.mark.parametrize(
    ("drafts", "chosen"),
    [
        (("longer x", "xx", "none of it"), "xx"),
        (("xxx", "longer x", "none of it"), "xxx"),
        (("longer x", "ox", "none of it"), "ox"),
        (("ax", "bx", "c"), "ax"),
        (("same", "same"), "same"),
        (("so", ""), "so"),
        (("", ""), None),
    ],
)
def test_the_draft_with_the_most_overlap_stays_and_of_equal_ones_the_shortest(
    parts: RunComponents, drafts: tuple[str, ...], chosen: str | None
) -> None:
    """Section 3.2 of 2603.10165: argmax over h of the sum over i of |S_i and S_i^h|, one hint for an answer."""
    assert choose(parts, *drafts) == [chosen, chosen]


def test_drafts_that_are_too_short_are_not_compared_and_a_silent_teacher_prefers_none(
    parts: RunComponents,
) -> None:
    assert choose(parts, "longer x", "xx", shortest=4) == ["longer x"] * 2
    assert choose(parts, "longer x", "xx", is_silent=True) == ["xx"] * 2


@pytest.mark.parametrize("count", range(4))
def test_of_the_drafts_that_the_teacher_answers_rightly_the_longest_stays(
    parts: RunComponents, count: int
) -> None:
    """Test the probe filter: the teacher that answers the probe reaches the answer to the question."""
    drafts = ["so", "longer", "the longest"]
    for right in combinations(drafts, count):
        kept = max(right, key=len, default=None)
        assert choose(parts, *drafts, choose="right", right=right) == [kept, kept], right
    assert choose(parts, "", "x", choose="right", right=["x"], shortest=2) == [None, None]


def test_a_teacher_that_fails_or_cannot_write_keeps_no_draft(
    parts: RunComponents, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Reader.sample

    def fail(self: Reader, requests: Sequence[TeacherRequest], params: SamplingParams) -> Any:
        samples = write(self, requests, params)
        shown = any("hint" in request.prompt.privileged for request in requests)
        return [replace(sample, stop_reason="error") for sample in samples] if shown else samples

    monkeypatch.setattr(Reader, "sample", fail)
    assert choose(parts, "so", choose="right", right=["so"]) == [None, None]

    def refuse(self: Reader, requests: Sequence[TeacherRequest], params: SamplingParams) -> Any:
        shown = any("hint" in request.prompt.privileged for request in requests)
        return None if shown else write(self, requests, params)

    monkeypatch.setattr(Reader, "sample", refuse)
    with pytest.raises(CapabilityError, match=r"notes.hint: this teacher cannot write here"):
        choose(parts, "so", choose="right", right=["so"])


def test_the_teacher_that_chooses_tells_its_likeliest_tokens_and_is_not_asked_ahead(
    models: Path,
) -> None:
    chosen = {"type": "written", "template": "{attempt}", "drafts": 2, "choose": "overlap"}
    frozen = {"type": "privileged", "teacher": {"type": "self", "weights": "frozen"}}
    recipe = toy_data(
        models, {"teacher": {**frozen, "reference": "{hint}"}, "notes": {"hint": chosen}}
    )
    parse_recipe(recipe, "toy")
    alone = {**recipe, "teacher": {"type": "none"}, "objective": {"signal": "score"}}
    with pytest.raises(RecipeError, match=r"notes.hint.choose: overlap compares with the teacher"):
        parse_recipe(alone, "toy")
    silent = {**alone, "notes": {"hint": {**chosen, "choose": "right"}}}
    with pytest.raises(RecipeError, match=r"notes.hint.choose: right asks the teacher for answers"):
        parse_recipe(silent, "toy")
    config = written.Config(**{**chosen, "writer": {"type": "scripted", "tape": "x"}})
    can = Capabilities(frozenset({"topk"}), follows_student=True)
    assert config.follows_student({"teacher": can})
    assert config.model_copy(update={"choose": "right"}).follows_student({"teacher": can})
    assert not config.follows_student({"teacher": replace(can, follows_student=False)})
