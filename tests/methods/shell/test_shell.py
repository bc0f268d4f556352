"""The shell: its commands by hand, the tests in the sandbox, an expert that repairs, and a run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from practicum.errors import DataError
from practicum.methods.shell.shell import (
    Config,
    FileTest,
    Project,
    Shell,
    ShellTask,
    build,
    draw_project,
    draw_projects,
)
from practicum.ports import TaskContext
from practicum.runs.pipeline import run
from practicum.sandbox.deadline import VerifierProcess
from practicum.types import Prompt, Rollout


def build_task(**settings: object) -> ShellTask:
    task = build(
        Config.model_validate({"train_size": 8, "heldout_size": 4, **settings}),
        TaskContext(0, Path()),
    )
    assert isinstance(task, ShellTask)
    return task


@pytest.fixture(scope="module")
def task() -> ShellTask:
    return build_task(files=3, least_wrong=2)


def passes(text: str, test: FileTest) -> bool:
    """Run a test without the sandbox, for texts of this file."""
    values = [eval(text, {"x": test.x + step}) for step in (0, 1)]
    return values == [test.value, test.value + test.slope]


def test_a_repair_by_hand() -> None:
    project = Project({"a": "x+1", "b": "8-x"}, {"a": FileTest(2, 3, 1), "b": FileTest(1, 5, -1)})
    shell = Shell(project, passes)
    conversation = [
        ("ls", "a b"),
        ("test", "b(1)=5"),
        ("cat b", "8-x"),
        ("cat c", None),
        ("rm -r /", None),
        ("echo 6-x > c", None),
        ("echo 5 > b", ""),
        ("test", "b(1)=5"),
        ("echo 6-x > b", ""),
        (" test ", "ok"),
    ]
    for command, output in conversation:
        assert shell.execute(command) == output, command
    assert shell.is_open and shell.execute("exit") == "" and not shell.is_open
    assert shell.files == {"a": "x+1", "b": "6-x"}


@given(st.integers(0, 1 << 30), st.integers(1, 8), st.data())
def test_projects_have_the_wrong_files_that_are_asked_for(
    seed: int, files: int, data: st.DataObject
) -> None:
    wrong = data.draw(st.integers(1, files))
    project = draw_project(Config(files=files, least_wrong=wrong), seed)
    failures = [
        name for name, test in project.tests.items() if not passes(project.files[name], test)
    ]
    assert len(project.files) == files and wrong <= len(failures) <= files
    for name in failures:
        repaired = project.tests[name].write_repaired()
        assert passes(repaired, project.tests[name])
        assert len(repaired) == len(project.files[name]) == 3, "only the digit differs"


def play(task: ShellTask, prompt: Prompt, turns: list[str]) -> list[str]:
    """Let the expert continue after some turns; return all turns."""
    episode, turns = task.open(prompt, 0), list(turns)
    for turn in turns:
        assert episode.step(turn).message is not None
    while True:
        chances = task.expert(prompt, turns)
        assert sum(chances.values()) == pytest.approx(1)
        turns.append(max(chances, key=chances.__getitem__))
        message = episode.step(turns[-1]).message
        assert set(turns[-1]) <= set(task.letters)
        if message is None:
            return turns
        assert set(message.content) <= set(task.letters)


def test_an_expert_that_never_slips_has_one_command() -> None:
    task = build_task(files=3, least_wrong=2, slip=0)
    for prompt in task.train_prompts():
        assert task.expert(prompt, []) == {"test": 1.0}


def rate(task: ShellTask, prompt: Prompt, turns: list[str]) -> float | None:
    return task.reward(Rollout.from_text(prompt, *turns))


def test_the_expert_repairs_also_what_the_student_broke(task: ShellTask) -> None:
    for prompt in [*task.train_prompts(), *task.heldout_prompts()]:
        clean = play(task, prompt, [])
        assert len(clean) in (8, 11) and rate(task, prompt, clean) == 1
        assert rate(task, prompt, clean[:-3]) == 0, "the last file is wrong"
        broken = play(task, prompt, ["echo x+x > a", "cat c", "wait", "echo (x > b"])
        assert broken[-1] == "exit" and rate(task, prompt, broken) == 1
    assert task.letters and task.opens_episodes and task.has_expert


@pytest.mark.parametrize("inputs", [1, 2, 3, 4])
def test_the_x_of_the_tests_are_at_most_as_large_as_asked(inputs: int) -> None:
    config = Config(inputs=inputs)
    tests = [test for seed in range(40) for test in draw_project(config, seed).tests.values()]
    assert {test.x for test in tests} == set(range(1, inputs + 1))


@pytest.mark.parametrize(
    "text", ["__import__('os').system('id')", "9**9**9", "x+1;a=5", "(" * 90, "x\x00", "y"]
)
def test_what_is_no_sum_fails_its_test_and_harms_nothing(task: ShellTask, text: str) -> None:
    prompt = task.train_prompts()[0]
    episode = task.open(prompt, 0)
    for name in "abc":
        episode.step(f"echo {text} > {name}")
    message = episode.step("test").message
    assert message is not None and message.content.startswith("a(")
    assert rate(task, prompt, [f"echo {text} > {name}" for name in "abc"]) == 0


def test_rewards_of_turns_sum_to_the_share_that_was_repaired() -> None:
    task = build_task(files=4, least_wrong=2, turn_rewards=True)
    for prompt in task.train_prompts():
        episode = task.open(prompt, 0)
        steps = [episode.step(turn) for turn in play(task, prompt, [])]
        rewards = [step.reward or 0.0 for step in steps]
        repairs = sum(reward > 0 for reward in rewards)
        assert repairs >= 2 and sum(rewards) == pytest.approx(repairs / 4)
    step = task.open(task.train_prompts()[0], 0).step("make")
    assert step.calls[0].outcome == "unknown" and step.reward == 0


def test_judged_commands_earn_half_a_point_if_the_expert_enters_them() -> None:
    task = build_task(files=4, least_wrong=2, turn_rewards="judged")
    for prompt in task.train_prompts():
        episode = task.open(prompt, 0)
        first, *rest = play(task, prompt, [])
        assert episode.step("ls").reward == episode.step("make").reward == -0.5
        assert episode.step(f" {first}").reward == 0.5
        assert all(episode.step(turn).reward == 0.5 for turn in rest)


def test_the_shell_closes_after_its_turns() -> None:
    task = build_task(files=1, least_wrong=1, turns=5)
    episode = task.open(task.train_prompts()[0], 0)
    replies = [episode.step("ls").message for _ in range(5)]
    assert replies[3] is not None and replies[4] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"least_wrong": 6}, "6 of 5 files cannot be wrong; lower least_wrong"),
        (
            {"turns": 16},
            "the expert needs 17 turns for 5 wrong files, and turns is 16; raise turns",
        ),
    ],
)
def test_projects_that_no_expert_can_repair_are_refused(
    settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate(settings)


def test_no_project_is_drawn_twice_and_too_few_are_refused() -> None:
    sizes = {"files": 1, "least_wrong": 1, "heldout_size": 64}
    task = build_task(**sizes, train_size=256)
    projects = draw_projects(Config.model_validate(sizes | {"train_size": 256}), 0, 0)
    texts = {(*project.files.items(), *project.tests.items()) for project in projects.values()}
    assert len(texts) == 64 + 256 == len(task.train_prompts()) + len(task.heldout_prompts())
    with pytest.raises(DataError, match="2112 different projects of 1 files are hardly found"):
        build_task(**sizes, train_size=2048)


def test_a_command_that_was_cut_off_earns_nothing(task: ShellTask) -> None:
    prompt = task.train_prompts()[0]
    turns = play(task, prompt, [])[:-2]
    assert turns[-1].startswith("echo") and rate(task, prompt, turns) == 1
    cut = replace(Rollout.from_text(prompt, *turns), stop_reason="length")
    assert task.reward(cut) == 0


def test_a_file_with_a_question_mark_is_no_unknown_command(task: ShellTask) -> None:
    episode = task.open(task.train_prompts()[0], 0)
    episode.step("echo ? > a")
    step = episode.step("cat a")
    assert step.message is not None and step.message.content == "?"
    assert step.calls[0].outcome == "answered"


def test_a_test_that_a_slow_process_failed_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    task, calls = build_task(files=1, least_wrong=1), []

    def call(
        self: VerifierProcess, request: dict[str, str], report: Callable[[str], None]
    ) -> float:
        calls.append(request)
        if len(calls) == 1:
            report("over 5 s")
        return float(len(calls) > 1)

    monkeypatch.setattr(VerifierProcess, "call", call)
    prompt = task.train_prompts()[0]
    assert [rate(task, prompt, ["ls"]) for _ in range(3)] == [0, 1, 1]
    assert len(calls) == 4, "two for each run; the second run is remembered"


def test_a_training_seed_changes_only_the_training_projects() -> None:
    first, second = build_task(seed=3), build_task(seed=3, train_seed=4)

    def list_first_failures(task: ShellTask, part: list[Prompt]) -> list[str]:
        episodes = [task.open(prompt, 0).step("test").message for prompt in part]
        return [message.content for message in episodes if message is not None]

    heldout, train = first.heldout_prompts(), first.train_prompts()
    assert list_first_failures(first, [*heldout]) == list_first_failures(second, [*heldout])
    assert list_first_failures(first, [*train]) != list_first_failures(second, [*train])


def test_every_stage_of_the_recipe_runs(tmp_path: Path) -> None:
    changes = ["train.steps=1", "train.prompts_per_step=4", "evaluation.prompts=2"]
    result = run("pipelines/shell", changes, out=tmp_path)
    assert [stage["steps"] for stage in result.summary["stages"]] == [1] * 4
