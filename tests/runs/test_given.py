"""Python objects in place of a teacher, a task, a scorer and a source."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import toy_data

import practicum
from practicum.errors import AlarmError, PracticumError, RecipeError
from practicum.functional import Divergence, Weight
from practicum.monitors import MONITORS
from practicum.monitors.settings import replace_pauses
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    Task,
    Teacher,
)
from practicum.ports.scoring import Scorer
from practicum.run_dir import read_rows, shapes
from practicum.runs import RunResult, open_run
from practicum.types import Judgement, Message, Metrics, Prompt, Rollout, TeacherSignal

ROWS = [
    {"prompt": text, "answer": text[::-1]}
    for text in ("ab", "abc", "bc", "bcd", "cd", "cda", "da", "dab", "ac", "bd")
]


class Flat:
    """A teacher that finds all tokens equally likely, and gives the log-probability of each."""

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[torch.Tensor]:
        return [torch.full((len(rollout.tokens),), -math.log(8)) for rollout in rollouts]


class Table:
    """A teacher that gives the distribution at each position: the token 3 is likely."""

    def __init__(self, vocabulary: int) -> None:
        self.logprobs = torch.log_softmax(2.0 * (torch.arange(vocabulary) == 3).float(), dim=-1)

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[torch.Tensor]:
        return [self.logprobs.expand(len(rollout.tokens), -1) for rollout in rollouts]


class Popular(Teacher):
    """A teacher with a state: the share of each token in the answers so far."""

    def __init__(self) -> None:
        self.counts = torch.ones(64)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(signals=frozenset({"sampled"}), writes=False)

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        logprobs = (self.counts / self.counts.sum()).log()
        return [TeacherSignal(logprobs=logprobs[rollout.tokens]) for rollout in rollouts]

    def after_step(self, step: int, data: Sequence[Any]) -> None:
        for datum in data:
            self.counts += torch.bincount(datum.rollout.tokens, minlength=64)

    def save_state(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts}

    def load_state(self, tensors: Any) -> None:
        self.counts = tensors["counts"].clone()


class Double(Task):
    """A task: write a letter twice."""

    letters = "abcd"

    def train_prompts(self) -> list[Prompt]:
        return [Prompt(letter, (Message("user", letter),), answer=2 * letter) for letter in "abc"]

    def heldout_prompts(self) -> list[Prompt]:
        return [Prompt("d", (Message("user", "d"),), answer="dd")]

    def reward(self, rollout: Rollout) -> float:
        return float(rollout.text == rollout.prompt.answer)


class Shortness(Scorer):
    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        return [Judgement(-float(len(rollout.tokens))) for rollout in rollouts]

    def fit(self, rollouts: Sequence[Rollout]) -> Metrics:
        return {"fitted": float(len(rollouts))}


def overlap(prompt: Prompt, answer: str) -> float:
    """Score the share of the answer's letters that are in the right answer."""
    return sum(letter in (prompt.answer or "") for letter in answer) / max(len(answer), 1)


def verify(reply: str, prompt: Prompt) -> bool:
    return reply == prompt.answer


def write_first(prompt: Prompt, seed: int) -> str:
    """Answer with the first letter, repeated by the seed."""
    return prompt.question[0] * (1 + seed % 3)


@pytest.fixture
def distill(models: Path, tmp_path: Path) -> Callable[..., RunResult]:
    """Call `practicum.distill` with a tiny run as the default."""

    def call(**changes: Any) -> RunResult:
        sections = toy_data(models, {"train.steps": 2, "train.prompts_per_step": 4})
        return practicum.distill(**{**sections, **changes}, out=tmp_path, progress=False)

    return call


def saved(result: RunResult) -> dict[str, Any]:
    return json.loads((result.folder / "recipe.json").read_text())["recipe"]


def rollouts_of(result: RunResult) -> list[Any]:
    return list(read_rows(result.folder / "rollouts.jsonl", shapes.ROLLOUT))


def test_a_teacher_is_an_object_with_score(distill: Callable[..., RunResult]) -> None:
    result = distill(teacher=Flat(), objective={"signal": "sampled"})
    record = saved(result)["teacher"]
    assert record["type"] == "practicum.ports.given.teacher" and record["object"].endswith(":Flat")
    assert len(record["digest"]) == 12
    assert rollouts_of(result)[0]["teacher_logprobs"][0] == pytest.approx(-math.log(8))


def test_a_tensor_of_all_tokens_is_a_full_distribution(distill: Callable[..., RunResult]) -> None:
    with pytest.raises(PracticumError, match=r"scores 99 tokens and the student has \d+") as error:
        distill(teacher=Table(99), name="size")
    vocabulary = int(str(error.value).split("student has ")[1].split(";")[0])
    result = distill(teacher=Table(vocabulary), objective={"divergence": "jsd(0.3)"})
    assert all(row["reverse_kl"] > 0 for row in result.metrics())
    again = distill(teacher=Table(vocabulary), objective={"signal": "topk(3)"}, name="topk")
    assert again.summary["steps"] == 2


def test_a_teacher_with_a_state_resumes_it(distill: Callable[..., RunResult]) -> None:
    teacher = Popular()
    sections = {"teacher": teacher, "objective": {"signal": "sampled"}}
    first = distill(**sections, train={"steps": 2, "prompts_per_step": 4, "checkpoint_every": 1})
    counts = teacher.counts
    train = {"steps": 3, "prompts_per_step": 4, "checkpoint_every": 1}
    fresh = Popular()
    result = distill(teacher=fresh, objective={"signal": "sampled"}, train=train, resume=True)
    assert result.folder == first.folder and result.summary["steps"] == 3
    assert fresh.counts.sum() > counts.sum()


def test_a_resume_without_the_object_says_so_in_one_line(distill: Callable[..., RunResult]) -> None:
    result = distill(teacher=Flat(), objective={"signal": "sampled"})
    (result.folder / "summary.json").unlink()
    with pytest.raises(RecipeError) as error:
        practicum.run(
            open_run(result.folder)[1],
            out=result.folder.parent,
            resume=True,
            progress=False,
        )
    assert "\n" not in str(error.value)
    assert "practicum.distill(teacher=..., resume=True)" in str(error.value)


def test_rows_with_a_verifier_and_a_task_object_are_tasks(
    distill: Callable[..., RunResult],
) -> None:
    pair = distill(task=(ROWS, verify), name="pair")
    assert saved(pair)["task"]["verifier"] == f"{__name__}:verify"
    task = distill(task=Double(), evaluation={"prompts": 1}, name="object")
    assert saved(task)["task"]["object"] == f"{__name__}:Double"
    assert task.summary["before"]["prompts"] == 1


def test_a_scorer_is_a_function_or_an_object(distill: Callable[..., RunResult]) -> None:
    result = distill(
        scorers={"overlap": overlap, "short": Shortness()},
        objective={"signal": "score(group_mean)", "scorer": "overlap"},
        rollout={"n": 2, "max_new_tokens": 4},
    )
    assert saved(result)["scorers"]["overlap"]["object"] == f"{__name__}:overlap"
    assert all(0 <= row["judgements"]["overlap"] <= 1 for row in rollouts_of(result))
    assert result.metrics()[0]["scorer-short/fitted"] == 8


def test_a_function_is_a_source(distill: Callable[..., RunResult]) -> None:
    source = {"source": write_first, "n": 2, "max_new_tokens": "linear(6, 5)"}
    result = distill(rollout=source, objective={"divergence": "forward_kl"})
    assert saved(result)["rollout"]["source"].startswith(f"function(object={__name__}:write_first")
    rows = rollouts_of(result)
    assert {row["source"] for row in rows} == {"dataset"}
    assert all(len(set(row["text"])) == 1 for row in rows)


@pytest.mark.usefixtures("clean_tables")
def test_an_entry_is_given_itself(distill: Callable[..., RunResult]) -> None:
    chi = Divergence("chi_of_mine", lambda s, t, _: (s - t).exp().square(), None, "", "a test")
    late = Weight("late_of_mine", lambda statistics: statistics.loss_mask.float(), "all", needs=())
    result = distill(objective={"divergence": chi, "weights": late})
    assert saved(result)["objective"]["losses"][0]["divergence"] == "chi_of_mine"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "teacher-number": ({"teacher": 3}, "type int is not accepted; give a path, a hub name"),
    "teacher-class": (
        {"teacher": Flat},
        r"the class Flat is not accepted; give an object, Flat\(...\)",
    ),
    "task-number": ({"task": 3}, "task: an object of type int is not accepted; give a mapping"),
    "task-class": ({"task": Double}, "the class Double is not accepted"),
    "verifier-order": ({"task": (ROWS, overlap)}, "takes the prompt first, and a verifier takes"),
    "scorer-order": ({"scorers": {"a": verify}}, "a function def score.prompt: Prompt, answer"),
    "scorer-number": ({"scorers": {"a": 1.0}}, "type float is not accepted"),
    "source-arguments": ({"rollout": {"source": len}}, "cannot take a prompt and a seed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_object_is_refused_with_what_is_accepted(
    distill: Callable[..., RunResult], case: str
) -> None:
    changes, message = WRONG[case]
    with pytest.raises(RecipeError, match=message) as error:
        distill(**changes)
    assert "\n" not in str(error.value)


def test_top_tokens_ask_the_object_of_the_run(distill: Callable[..., RunResult]) -> None:
    result = distill(teacher=Table(11))
    (row, *_) = result.rollouts(top=2, progress=False)
    assert row["teacher_top"][0][0][1] == pytest.approx(2.0 - math.log(math.exp(2.0) + 10))
    with pytest.raises(RecipeError, match=r"practicum.distill\(teacher=..., resume=True\)"):
        practicum.load_run(result.folder).rollouts(top=2, progress=False)


def test_a_pause_only_warns_unless_it_is_asked_for(distill: Callable[..., RunResult]) -> None:
    """Check that M35 pauses `practicum run`: every token of this teacher has the same log-probability."""
    sections = {
        "teacher": Flat(),
        "objective": {"signal": "sampled"},
        "rollout": {"max_new_tokens": 16},
    }
    result = distill(name="warned", **sections)
    assert result.summary["steps"] == 2 and "M35" in result.summary["alarms"]
    with pytest.raises(AlarmError, match=r"paused by M35 .*resume with resume=True"):
        distill(name="paused", **sections, monitors={"M35": "pause"})


def test_every_monitor_that_pauses_is_replaced() -> None:
    softened = replace_pauses({"M4": "pause", "M8": {"level": -9.0}, "M1": False})
    assert softened["M4"] == "pause"
    assert softened["M8"] == {"action": "warn", "level": -9.0}
    assert softened["M1"] is False
    assert {name for name, settings in softened.items() if settings == {"action": "warn"}} == {
        name for name, monitor in MONITORS.items() if monitor.can_pause
    } - {"M4", "M8"}
    assert replace_pauses("off") == "off"
