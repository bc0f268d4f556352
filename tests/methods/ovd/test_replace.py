"""Replaced answers: accepted tokens stay unchanged, the author of the rest is recorded, and nothing is dropped silently."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from toy import make_model, rows, toy_recipe, toy_run

from practicum.errors import CapabilityError, RecipeError
from practicum.methods.ovd.replace import Config
from practicum.ports import PromptedClient, Teacher, TeacherRequest
from practicum.ports.scoring import (
    Scorer,
)
from practicum.rollouts import (
    RolloutArchive,
    RolloutBatch,
    RolloutRow,
    RolloutWriters,
    SourceChoice,
    collect_rollouts,
)
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.types import AUTHORS, Judgement, Rollout, Sample, SamplingParams

LIMIT = 7


class Accepting(Scorer):
    """Rejects an answer at its first `d`, or completely, and returns nothing else."""

    def __init__(self, *, is_whole: bool = False) -> None:
        self.is_whole = is_whole
        self.decode: Any = None
        self.asked: list[int] = []

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        return [Judgement(None) for _ in rollouts]

    def count_accepted(self, rollouts: Sequence[Rollout]) -> list[int | None]:
        self.asked.append(len(rollouts))
        return [self._cut(list(map(self.decode, rollout.tokens.tolist()))) for rollout in rollouts]

    def _cut(self, letters: Sequence[str]) -> int | None:
        if "d" not in letters:
            return None
        return 0 if self.is_whole else letters.index("d")


@dataclass
class WritingTeacher(Teacher):
    """A teacher that writes the same tokens, or refuses; it continues from tokens if `accepts_tokens` is set."""

    tokens: tuple[int, ...]
    accepts_tokens: bool = True
    refuses: bool = False
    shown: list[tuple[int, ...]] = field(default_factory=list)

    def sample(self, requests: Sequence[Any], params: SamplingParams) -> list[Sample]:
        self.shown += [
            () if isinstance(request, TeacherRequest) else request.prompt_tokens
            for request in requests
        ]
        tokens = torch.tensor(self.tokens[: params.max_new_tokens], dtype=torch.long)
        logprobs = torch.full(tokens.shape, -0.25)
        reason = "error" if self.refuses else "stop"
        return [Sample(tokens, logprobs, logprobs, reason) for _ in requests]

    def bind_prompt(self, prompt: Any) -> PromptedClient:
        return PromptedClient(self, (3, 4), accepts_tokens=self.accepts_tokens)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def built(models: Path, tmp_path_factory: pytest.TempPathFactory) -> RunComponents:
    return assemble_run(toy_recipe(models), tmp_path_factory.mktemp("models"))


def collect(
    built: RunComponents,
    source: str,
    scorer: Scorer | None = None,
    *,
    teacher: Teacher | None = None,
    prompts: Any = None,
) -> list[Rollout]:
    scorers = {"grade": scorer or Accepting()}
    for judge in scorers.values():
        if isinstance(judge, Accepting):
            judge.decode = built.parts.renderer.decode_token
    writers = RolloutWriters(
        built.trainer.build_sampling_client(),
        teacher or built.parts.teacher,
        built.parts.renderer,
        RolloutArchive(),
        scorers=scorers,
    )
    params = SamplingParams(LIMIT, stop_ids=built.parts.renderer.stop_ids)
    choice = TypeAdapter(SourceChoice).validate_python(source)
    chosen = built.parts.prompts[:4] if prompts is None else prompts
    return collect_rollouts(RolloutBatch(chosen, 5, 0, 2), choice, writers, params)


def find_letter(built: RunComponents, rollout: Rollout, letter: str) -> int | None:
    letters = list(map(built.parts.renderer.decode_token, rollout.tokens.tolist()))
    return letters.index(letter) if letter in letters else None


def test_what_is_accepted_stays_and_the_teacher_writes_the_rest(built: RunComponents) -> None:
    stop = next(iter(built.parts.renderer.stop_ids))
    teacher = WritingTeacher((5, 6, stop))
    before = collect(built, "student")
    after = collect(built, "replace(grade)", teacher=teacher)
    kinds = set()
    for old, new in zip(before, after, strict=True):
        cut = find_letter(built, old, "d")
        kinds.add(None if cut is None else cut > 0)
        if cut is None:
            assert new.tokens.equal(old.tokens) and new.authors is None
            assert (new.source, new.notes["replaced"]) == ("student", "no")
            continue
        end = (5, 6, stop)[: LIMIT - cut]
        assert new.tokens.tolist() == [*old.tokens[:cut].tolist(), *end]
        assert new.text == built.parts.renderer.decode(new.tokens.tolist())
        assert new.sampling_logprobs[:cut].equal(old.sampling_logprobs[:cut])
        assert new.policy_logprobs[:cut].equal(old.policy_logprobs[:cut])
        assert (
            new.sampling_logprobs[cut:].eq(-0.25).all() and new.policy_logprobs[cut:].isnan().all()
        )
        assert new.loss_mask.all() and new.notes["replaced"] == "teacher"
        if cut:
            assert new.source == "student" and new.authors is not None
            wrote = [AUTHORS[author] for author in new.authors.tolist()]
            assert wrote == ["student"] * cut + ["teacher"] * len(end)
            assert (3, 4, *old.tokens[:cut].tolist()) in teacher.shown
        else:
            assert new.source == "teacher" and new.authors is None
        row = RolloutRow.of(2, new)
        assert RolloutRow.of(2, row.to_rollout(new.prompt)) == row
    assert kinds == {None, False, True}
    share = sum(find_letter(built, old, "d") is not None for old in before) / len(before)
    assert Config.measure(after) == {"replaced": share, "replaced_refused": 0.0}
    assert Config.measure(before) == {}


def test_a_writer_of_whole_answers_replaces_all_of_one(built: RunComponents) -> None:
    for teacher in (WritingTeacher((5, 6), accepts_tokens=False), WritingTeacher((5, 6))):
        scorer = Accepting(is_whole=teacher.accepts_tokens)
        replaced = collect(built, "replace(grade)", scorer, teacher=teacher)
        again = [rollout for rollout in replaced if rollout.notes["replaced"] == "teacher"]
        assert again and all(rollout.tokens.tolist() == [5, 6] for rollout in again)
        assert all(rollout.source == "teacher" for rollout in again)
        assert set(teacher.shown) == {()}


def test_the_student_writes_again_until_it_is_accepted(built: RunComponents) -> None:
    before, scorer = collect(built, "student"), Accepting()
    after = collect(built, "replace(grade, writer=student, tries=30)", scorer)
    assert all(find_letter(built, rollout, "d") is None for rollout in after)
    assert sorted(scorer.asked, reverse=True) == scorer.asked and len(scorer.asked) > 2
    for old, new in zip(before, after, strict=True):
        cut = find_letter(built, old, "d")
        assert new.tokens[:cut].equal(old.tokens[:cut])
        assert new.source == "student" and new.authors is None
        assert new.policy_logprobs.isfinite().all() and len(new.tokens) <= LIMIT
    # A single attempt may be rejected again: the answer stays, and the judge leaves it out.
    once = collect(built, "replace(grade, writer=student)")
    assert any(find_letter(built, rollout, "d") is not None for rollout in once)


def test_a_prompt_does_not_depend_on_the_others(built: RunComponents) -> None:
    source = "replace(grade, writer=student, tries=3)"
    together = collect(built, source)
    apart = [r for p in built.parts.prompts[:4] for r in collect(built, source, prompts=[p])]
    assert [r.tokens.tolist() for r in together] == [r.tokens.tolist() for r in apart]


def test_a_refusal_leaves_the_rejected_answer_and_is_counted(built: RunComponents) -> None:
    teacher = WritingTeacher((), refuses=True)
    before, after = collect(built, "student"), collect(built, "replace(grade)", teacher=teacher)
    assert all(a.tokens.equal(b.tokens) for a, b in zip(before, after, strict=True))
    refused = sum(rollout.notes["replaced"] == "refused" for rollout in after)
    assert Config.measure(after) == {"replaced": 0.0, "replaced_refused": refused / len(after)}


class Silent(Scorer):
    """A scorer that rejects nothing."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        return [Judgement(None) for _ in rollouts]


def test_a_scorer_that_rejects_nothing_is_refused(built: RunComponents) -> None:
    with pytest.raises(CapabilityError, match=r"replace\(scorer=grade\): this scorer rejects no"):
        collect(built, "replace(grade)", Silent())


JUDGE = {"type": "judge", "teacher": {"type": "grading_teacher:Plugin"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.source": "replace(grad)"}, "no scorer is named 'grad'; add it to scorers: {grad: {type: judge"),
        ({"scorers": {"grade": JUDGE}}, "scorer 'grade' rejects no answers; use a scorer that does"),
        ({"scorers": {"grade": {"type": "outcome"}}}, "scorer 'grade' rejects no answers"),
        ({"rollout.max_staleness": 1}, "guides the replace; set max_staleness: 0"),
        ({"teacher": {"type": "none"}, "objective": {"signal": "score"}}, "lets the teacher write, but"),
        ({"rollout.source": "replace(grade, writer=reference)"}, "needs a reference, and the recipe has none"),
        ({"rollout.source": "replace(grade, tries=0)"}, "greater than or equal to 1"),
    ],
)  # fmt: skip
def test_what_cannot_replace_is_refused_in_one_line(
    models: Path, changes: dict[str, Any], message: str
) -> None:
    good = {"rollout.source": "replace(grade)", "scorers": {"grade": {**JUDGE, "min_grade": 5}}}
    toy_recipe(models, good)
    with pytest.raises(RecipeError) as refused:
        toy_recipe(models, {**good, **changes})
    assert message in str(refused.value)


def test_a_run_is_resumed_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """A judge grades each word of digits; the teacher rewrites from the first low grade on."""
    letters = "0159 "
    for name, seed in (("student", 1), ("teacher", 2)):
        make_model(tmp_path / name, seed=seed, alphabet=letters)
    changes = {
        "task.alphabet": letters.strip(),
        "rollout": {"source": "replace(grade)", "n": 3, "max_new_tokens": LIMIT},
        "objective": {
            "losses": [
                {"signal": "score(group_mean)", "source": "student", "scorer": "grade"},
                {"signal": "score(group_mean)", "source": "teacher", "scorer": "grade"},
            ]
        },
        "scorers": {
            "grade": {**JUDGE, "step": "word", "min_grade": 5, "template": "{answer}\n> {step}"}
        },
    }
    whole = toy_run(tmp_path, tmp_path / "whole", changes).folder
    toy_run(tmp_path, tmp_path / "cut", {**changes, "train.steps": 2})
    cut = toy_run(
        tmp_path, tmp_path / "cut", changes, resume=True, allow_changed=["train.steps"]
    ).folder
    assert (whole / "rollouts.jsonl").read_bytes() == (cut / "rollouts.jsonl").read_bytes()
    written, metrics = rows(whole / "rollouts.jsonl"), rows(whole / "metrics.jsonl")
    assert {row["notes"]["replaced"] for row in written} == {"no", "teacher"}
    assert any("authors" in row for row in written)
    assert all(0 < row["replaced"] < 1 and row["replaced_refused"] == 0 for row in metrics)
    assert sum(row["scorer-grade/rejected"] for row in metrics) > 0
