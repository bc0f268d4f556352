"""The gate passes on valid values from tasks, tools, scorers and notes, and counts all invalid values.

The first half asks every task, tool, scorer and note on disk about texts that break parsers. In the second half,
doubles return values of the wrong kind, in single calls and in whole runs.
"""

import math
from collections import Counter
from contextlib import closing
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
import torch
from picture_files import draw_picture, write_url
from test_scorers import CASES as SCORERS
from test_scorers import write_rollouts
from toy import toy_recipe

from practicum import ports
from practicum.core.plugins import list_plugins, load_plugin
from practicum.errors import DataError, TeacherError, VerifierError
from practicum.ports import (
    Observation,
    Task,
    TaskContext,
    ToolSession,
)
from practicum.ports.gate import (
    LONGEST_TEXT,
    Kind,
    Refused,
    accept_judgement,
    accept_metrics,
    accept_number,
    accept_observation,
    accept_text,
    ask_expert,
    ask_feedback,
    ask_reward,
    check_prompts,
    collect_rejections,
    count_answers,
    list_kinds,
    measure_rejections,
    repair_text,
)
from practicum.ports.notes import NoteMoment
from practicum.ports.tasks import ToolProblem
from practicum.recipe import parse_recipe
from practicum.rollouts import add_notes
from practicum.run_dir import read_rows, shapes
from practicum.runs import run
from practicum.runs.assembly import assemble_run
from practicum.sandbox import missing
from practicum.tasks.walker import Config as WalkerConfig
from practicum.tasks.walker import Walker
from practicum.training.judging import judge_with
from practicum.types import CallRecord, Judgement, Message, Prompt, Rollout

T = TypeVar("T")
HALF = "\ud800"
ODD = (
    "",
    HALF,
    f"a\udc00{HALF}\n{HALF}",
    "\x00\x1b[2J\u202e",
    "9" * 5000,
    "-1e999 NaN Infinity 1/0",
    "[" * 5000,
    "\\boxed{" * 500,
    '<tool_call>{"name": "\\ud800", "arguments": {"code": "\\ud800"}}</tool_call>',
    '[python(code=b"x")]',
)
"""Texts of a model that break parsers, encodings and arithmetic."""

REVERSE = {"type": "reverse", "train_size": 4, "heldout_size": 1}
TASKS: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            "calculator",
            "frozen_lake",
            "memos",
            "mixture",
            "programs",
            "reverse",
            "skills",
        )
    },
    **{
        name: {}
        for name in (
            "needles",
            "python_expressions",
            "shell",
            "sokoban",
            "spoken",
            "topics",
            "walker",
        )
    },
    "gymnasium": {"env": "CartPole-v1"},
    "jsonl": {"path": "rows.jsonl", "heldout": 0, "verifier": "number"},
    "served": {"task": REVERSE},
    "shapes": {"train_size": 8},
    "tools": {"task": REVERSE, "tools": [{"type": "interpreter"}]},
    "user": {"task": REVERSE, "asks": ["Why {question}?"]},
}
OUTSIDE = {"datasets", "openenv", "played", "reasoning_gym", "traces", "verifiers"}
"""Tasks of a package, a service or an earlier run: see test_foreign_packages.py and test_foreign_servers.py."""


def test_every_task_on_disk_is_asked_here() -> None:
    assert sorted({*TASKS, *OUTSIDE}) == list_plugins("tasks")


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}\n')
    module = load_plugin("tasks", request.param)
    config = module.Config.model_validate({"type": request.param, **TASKS[request.param]})
    return module.build(config, TaskContext(0, tmp_path))


def test_a_task_answers_odd_texts_with_valid_values(task: Task) -> None:
    prompt = task.train_prompts()[0]
    for text in ODD:
        with collect_rejections() as rejections:
            rollout = ask_reward(task, Rollout.from_text(prompt, text))
            count_answers(task, rollout)
            ask_feedback(task, rollout)
            if task.has_expert:
                ask_expert(task, prompt, ())
        assert not rejections, f"{text!r:.40}"


def test_an_environment_answers_odd_texts_with_valid_values(task: Task) -> None:
    if not task.opens_episodes:
        pytest.skip("its completions are single answers")
    for text in ODD:
        episode = task.open(task.train_prompts()[0], 0)
        with collect_rejections() as rejections:
            for observation in (episode.step(text) for _ in range(3)):
                accepted = accept_observation(observation, 100)
                assert all(is_valid(message.content) for message in accepted.messages)
                if not observation.messages:
                    break
        # Text that repeats the model's half of a surrogate pair is repaired, and nothing else is wrong.
        assert set(list_kinds(rejections)) <= {"unicode"}, f"{text!r:.40}"
        episode.close()


def is_valid(text: str) -> bool:
    return text == repair_text(text)


@pytest.mark.long
@pytest.mark.skipif(bool(missing()), reason="this machine has no sandbox")
def test_a_tool_answers_odd_calls_with_texts_or_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tasks"))
    tools: list[dict[str, Any]] = [
        {"type": "interpreter"},
        {"type": "function", "function": "tool_functions:find"},
    ]
    module = load_plugin("tasks", "tools")
    config = module.Config.model_validate({"type": "tools", "task": REVERSE, "tools": tools})
    task = module.build(config, TaskContext(0, tmp_path))
    assert task.toolbox is not None
    session = task.toolbox.open(task.train_prompts()[0], 0)
    odd: list[dict[str, Any]] = [
        *({"code": text, "word": text} for text in ODD),
        {},
        {"code": 7},
        {HALF: None, "word": HALF},
        {"code": f"print('{HALF}')"},
    ]
    for name in ("python", "find"):
        for arguments in odd:
            only = {
                key: value for key, value in arguments.items() if key != "code" or name != "find"
            }
            result = _call(session, name, only)
            assert len(result) < 2100 and is_valid(result)
    session.close()


def _call(session: ToolSession, name: str, arguments: dict[str, Any]) -> str:
    """Return the result or the problem, as the model reads it."""
    try:
        return accept_text(session.call(name, arguments), name) or ""
    except ToolProblem as problem:
        return repair_text(str(problem))


def test_numbers_are_finite_and_texts_are_valid() -> None:
    for value, kind in (
        (math.nan, "number"),
        (math.inf, "number"),
        (-1e300, "number"),
        (10**400, "number"),
        ("1", "type"),
        (None, "type"),
        (torch.ones(2), "type"),
        (1j, "type"),
    ):
        with collect_rejections() as rejections:
            assert accept_number(value, "x") is None
        assert list_kinds(rejections) == (kind,), value
    with collect_rejections() as rejections:
        assert [accept_number(value, "x") for value in (1, True, torch.tensor(0.5))] == [1, 1, 0.5]
    assert not rejections
    for value, text, kinds in (
        ("ok \U0001f600", "ok \U0001f600", ()),
        (f"a{HALF}", "a\ufffd", ("unicode",)),
        ("\ud83d\ude00", "\U0001f600", ("unicode",)),
        ("x" * (LONGEST_TEXT + 1), "x" * LONGEST_TEXT, ("size",)),
        (b"x", None, ("type",)),
    ):
        with collect_rejections() as rejections:
            assert accept_text(value, "x") == text
        assert list_kinds(rejections) == kinds


@pytest.mark.parametrize("half", [HALF, "\udfff", "\udc00\ud800", "\ud800a\udc00", "\ud800" * 3])
def test_each_half_of_a_pair_becomes_one_character(half: str) -> None:
    repaired = repair_text(f"x{half}\u00e9")
    repaired.encode()
    assert repaired == f"x{''.join('a' if c == 'a' else chr(0xFFFD) for c in half)}\u00e9"


OBSERVATIONS: list[tuple[Any, set[Kind]]] = [
    (Observation(Message("user", HALF), notes={"x": HALF}, reward=math.nan), {"unicode", "number"}),
    (Observation(None, stop_reason="x"), {"type"}),  # type: ignore[arg-type]
    (Observation(None, reward="1"), {"type"}),  # type: ignore[arg-type]
    (Observation(None, notes={"x": 7, 7: "x"}), {"type"}),  # type: ignore[dict-item]
    (Observation(None, notes="x"), {"type"}),  # type: ignore[arg-type]
    (Observation(None, calls=(CallRecord("x", "odd"), 7)), {"type"}),  # type: ignore[arg-type]
    (Observation(Message("tool", "a", name=HALF)), {"unicode"}),
    (Observation(Message("user", "a" * (LONGEST_TEXT + 1))), {"size"}),
]
REFUSED: list[Any] = [
    None,
    {"message": "a"},
    Observation(Message("user", 7)),  # type: ignore[arg-type]
    Observation(Message(None, "a")),  # type: ignore[arg-type]
    Observation("a"),  # type: ignore[arg-type]
    Observation(Message("assistant", "a")),
    Observation(None, more=7),  # type: ignore[arg-type]
    Observation(None, tokens=(10**9, -1)),
    Observation(None, tokens=(True,)),
    Observation(None, tokens="ab"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("observation", "kinds"), OBSERVATIONS)
def test_a_part_of_an_observation_that_is_wrong_is_replaced(
    observation: Observation, kinds: set[Kind]
) -> None:
    with collect_rejections() as rejections:
        accepted = accept_observation(observation, 10)
    assert set(list_kinds(rejections)) == kinds
    with collect_rejections() as rejections:
        assert accept_observation(accepted, 10) == accepted
    assert not rejections, "what the gate gives passes it"


@pytest.mark.parametrize("observation", REFUSED)
def test_an_observation_without_a_next_turn_is_refused(observation: Any) -> None:
    with pytest.raises(Refused):
        accept_observation(observation, 10)


def test_a_judgement_that_is_not_finite_is_none() -> None:
    good = Judgement(0.5, torch.ones(2))
    assert (
        accept_judgement(good, "x") == good and accept_judgement(Judgement(None), "x").value is None
    )
    for value, kind in (
        (0.5, "type"),
        (None, "type"),
        (Judgement(math.inf, torch.ones(2)), "number"),
        (spoil(Judgement(0.5), value="1"), "type"),
        (Judgement(0.5, torch.tensor([math.nan, 1.0])), "number"),
        (spoil(Judgement(0.5), tokens=[1.0, 2.0]), "type"),
    ):
        assert accept_judgement(value, "x") == Judgement(None, rejected=(kind,))
    assert accept_metrics({"a": 1, "b": "x", 7: 1.0}, "x") == {"a": 1.0}
    assert accept_metrics(None, "x") == {} == accept_metrics([1], "x")


def spoil(original: T, /, **changes: Any) -> T:
    """Return a copy with fields of another type, which the suite's checks of types would refuse."""
    spoiled = copy(original)
    for name, field in changes.items():
        object.__setattr__(spoiled, name, field)
    return spoiled


class _Odd:
    """A task, scorer and note of a user: each call returns the next of some values."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def _next(self, *_: Any) -> Any:
        value = self.values.pop(0)
        if isinstance(value, BaseException):
            raise value
        return value

    train_prompts = heldout_prompts = lambda self: []
    reward = feedback = count_answers = expert = score = fit = write = _next


def odd(*values: Any) -> Any:
    """Return an object that gives these values; an exception is raised."""
    return _Odd(*values)


PROMPT = Prompt("p", (Message("user", "a"),))
ANSWER = Rollout.from_text(PROMPT, "b")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (math.nan, "number"),
        ("1", "type"),
        ([1.0], "type"),
        (KeyError("x"), "error"),
        (SystemExit(3), "error"),
        (RecursionError(), "error"),
        (TimeoutError(), "time"),
    ],
)
def test_a_reward_that_is_none_of_the_numbers_is_undecided_and_counted(
    value: Any, kind: Kind
) -> None:
    rewarded = ask_reward(odd(value), ANSWER)
    assert rewarded.reward is None and rewarded.rejected == (kind,)
    assert measure_rejections([rewarded, rewarded]) == {f"rejected_{kind}": 2.0}
    assert ask_reward(odd(1), ANSWER) == replace(ANSWER, reward=1.0)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, "returned a NoneType"),
        ([7], "prompt 1 is a int"),
        ([PROMPT, Prompt("q", (Message("user", HALF),))], "prompt 2 ('q') has a message"),
        ([Prompt("q", ())], "prompt 1 ('q') has no message"),
        ([spoil(PROMPT, messages=(7,))], "prompt 1 ('p') has a message"),
        ([spoil(PROMPT, answer=7)], "prompt 1 ('p') has an answer"),
    ],
)
def test_prompts_that_cannot_be_shown_are_refused_when_they_are_loaded(
    prompts: Any, said: str
) -> None:
    with pytest.raises(DataError) as caught:
        check_prompts(prompts)
    assert said in str(caught.value)
    assert check_prompts([PROMPT]) == [PROMPT]


def test_errors_for_the_user_pass_the_gate() -> None:
    with pytest.raises(VerifierError, match="mend it"):
        ask_reward(odd(VerifierError("mend it")), ANSWER)


@pytest.mark.parametrize(
    "value", [None, {}, {"a": "x"}, {"a": math.nan}, {7: 1.0}, [1], KeyError("x")]
)
def test_an_expert_without_a_distribution_is_an_error_in_one_line(value: Any) -> None:
    with pytest.raises(VerifierError, match=r"expert\(\), turn 1 of prompt 'p'"):
        ask_expert(odd(value), PROMPT, ())


def test_one_odd_answer_does_not_cost_the_others_their_judgement() -> None:
    good = Judgement(1.0)
    found = judge_with("x", odd(ValueError("odd"), [good], ValueError("odd")), [ANSWER, ANSWER])
    assert found == [good, Judgement(None, rejected=("error",))]
    with pytest.raises(TeacherError, match="judged a int of 2 rollouts"):
        judge_with("x", odd(7), [ANSWER, ANSWER])


def test_a_note_that_is_no_text_is_none_and_counted() -> None:
    moment = NoteMoment(1, None)  # type: ignore[arg-type]
    noted = add_notes([ANSWER, ANSWER], {"x": odd(["ok", 7])}, moment)
    assert [rollout.notes for rollout in noted] == [{"x": "ok"}, {}]
    assert noted[0].rejected == ("type",)
    failed = add_notes([ANSWER, ANSWER], {"x": odd(KeyError("x"))}, moment)
    assert [rollout.notes for rollout in failed] == [{}, {}] and failed[0].rejected == ("error",)
    with pytest.raises(TeacherError, match="returned 1 texts for 2 rollouts"):
        add_notes([ANSWER, ANSWER], {"x": odd(["a"])}, moment)


NOTES: dict[str, dict[str, Any]] = {
    "feedback": {},
    "filled": {"correct": "{attempt}", "incorrect": "{attempt}"},
    "memory": {"note": "x"},
    "next_state": {},
    "rate": {},
    "written": {"template": "{question}{attempt}", "max_new_tokens": 2},
}


def test_every_note_on_disk_is_asked_here() -> None:
    assert sorted(NOTES) == list_plugins("practicum.notes")


@pytest.mark.parametrize("name", NOTES)
def test_a_note_about_odd_answers_is_a_text(name: str, models: Path, tmp_path: Path) -> None:
    others = {"x": {"type": "rate"}} if name == "memory" else {}
    recipe = toy_recipe(models, {"notes": {**others, "odd": {"type": name, **NOTES[name]}}})
    with closing(assemble_run(recipe, tmp_path)) as components:
        parts = components.parts
        prompt = parts.prompts[0]
        rollouts = [
            replace(
                ask_reward(parts.task, Rollout.from_text(prompt, text)), notes={"feedback": text}
            )
            for text in map(repair_text, ODD)
        ]
        with collect_rejections() as rejections:
            add_notes(rollouts, parts.notes, NoteMoment(1, parts.sampler))
    assert set(list_kinds(rejections)) <= {"unicode"}


@pytest.mark.parametrize(("name", "settings"), SCORERS)
def test_a_scorer_of_odd_answers_gives_finite_numbers(
    name: str, settings: dict[str, Any], models: Path, tmp_path: Path
) -> None:
    changes = {"rollout.source": "join(teacher)", "rollout.n": 2}
    recipe = toy_recipe(models, {**changes, "scorers": {"odd": {"type": name, **settings}}})
    with closing(assemble_run(recipe, tmp_path)) as components:
        rollouts = [
            replace(rollout, text=text)
            for rollout, text in zip(write_rollouts(), ODD, strict=False)
        ]
        judgements = judge_with("odd", components.parts.scorers["odd"], rollouts)
    assert not any(judgement.rejected for judgement in judgements)


class OddWorld(Walker):
    """A user's walker with rewards and observations that are sometimes wrong."""

    def reward(self, rollout: Rollout) -> float | None:
        return (math.nan, "1", super().reward(rollout))[len(rollout.text) % 3]  # type: ignore[return-value]

    def open(self, prompt: Prompt, seed: int) -> Any:
        inner = super().open(prompt, seed)

        class Episode(ports.Episode):
            def step(self, turn: str) -> Observation:
                observation = inner.step(turn)
                if observation.message is None:
                    return observation
                match (len(turn) + seed) % 5:
                    case 0:
                        return replace(observation, reward=math.nan, notes={"feedback": HALF})
                    case 1:
                        return replace(observation, message=Message("user", f"a{HALF}"))
                    case 2:
                        return Observation(None, stop_reason="x")  # type: ignore[arg-type]
                    case 3:
                        return Observation(Message("user", 7))  # type: ignore[arg-type]
                return Observation(None, tokens=(10**9, -1))

            def close(self) -> None:
                inner.close()

        return Episode()


class OddTask:
    """The plug-in of the environment with odd values."""

    Config = WalkerConfig

    @staticmethod
    def build(config: WalkerConfig, context: TaskContext) -> Task:
        return OddWorld(config, context.seed)


class OddConfig(WalkerConfig):
    """The settings of the environment with odd values."""

    type: Literal["test_foreign_values:OddTask"] = "test_foreign_values:OddTask"  # type: ignore[assignment]


OddTask.Config = OddConfig


@pytest.mark.long
def test_a_run_in_an_odd_world_goes_on_and_counts(tmp_path: Path) -> None:
    recipe = parse_recipe(
        {
            "name": "odd",
            "student": {
                "model": {"hidden_size": 16, "layers": 1, "heads": 2, "tokenizer": "bytes"}
            },
            "teacher": {"type": "self", "weights": "frozen"},
            "task": {
                "type": "test_foreign_values:OddTask",
                "turns": 3,
                "train_size": 12,
                "heldout_size": 4,
            },
            "rollout": {"max_new_tokens": 60},
            "train": {"steps": 2, "prompts_per_step": 8, "threads": 1},
            "evaluation": {"prompts": 4},
        },
        str(tmp_path),
    )
    folder = run(recipe, out=str(tmp_path / "run")).folder
    metrics = list(read_rows(folder / "metrics.jsonl", shapes.METRICS))
    counted = Counter[str]()
    for row in metrics:
        counted += Counter({name: number for name, number in row.items() if "rejected_" in name})
    assert len(metrics) == 2 and {"rejected_number", "rejected_type"} <= counted.keys()
    rollouts = read_rows(folder / "rollouts.jsonl", shapes.ROLLOUT)
    kinds = Counter(kind for row in rollouts for kind in row.get("rejected", []))
    assert {f"rejected_{kind}": number for kind, number in kinds.items()} == counted


def test_a_picture_of_an_environment_is_kept_or_ends_its_conversation() -> None:
    picture = write_url(draw_picture(0))
    good = Message("user", "a<image>b", images=(picture,))
    assert accept_observation(Observation(good), 100).message == good
    for message, words in (
        (Message("user", "no place", images=(picture,)), "1 pictures; write <image> for each"),
        (Message("tool", "<image>", images=(picture,)), "in a user's turn"),
        (Message("user", "<image>", images=("data:image/png;base64,AAAA",)), "no picture that is"),
        (Message("user", "<image>", images=("no/such/file.png",)), "cannot be read"),
        (Message("user", "<image>", images=(7,)), "is a int, not a text"),  # type: ignore[arg-type]
    ):
        with pytest.raises(Refused, match=words):
            accept_observation(Observation(message), 100)
