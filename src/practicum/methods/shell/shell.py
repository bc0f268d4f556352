"""Repair the files of a small project in a shell, until its tests pass.

A file is one line of Python about `x`, such as `x+3` or `9-x`, and its test expects the values at two
`x`. Some files have a wrong number. The commands, one per turn:

    ls            the names of the files
    cat a         the text of a file
    echo x+4 > a  write a file
    test          run the tests: `ok`, or the first that fails, as `a(2)=6`: the value expected at 2
    exit          end

The tests run what the model wrote, only in a sandboxed process and only sums and products of whole
numbers, so their results are the same on every machine.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.randomness import seed_of
from practicum.errors import DataError
from practicum.ports import Episode, Observation, Task, TaskConfig, TaskContext
from practicum.sandbox.deadline import Canary, VerifierProcess, Walls
from practicum.types import CallRecord, Message, Prompt, Rollout

MODULE = "practicum.grading.run_programs"
CANARY = Canary({"reply": "x=2\na=x+3", "answer": "a=5"}, 1.0)
CACHED_RESULTS = 1 << 16
"""A file and its test run once; this many results are remembered."""

DRAWS = 100
"""Draws of one project before the projects count as used up."""

NAMES = "abcdefgh"
FORMS = ("x+{}", "{}-x")
UNKNOWN = "?"
"""The output of an unknown command."""
CAT = re.compile(r"cat (\w)")
ECHO = re.compile(r"echo (.+) > (\w)")


class Config(TaskConfig):
    """The files, how many are wrong, and the turns to repair them."""

    type: Literal["shell"] = "shell"
    files: int = Field(default=5, ge=1, le=len(NAMES), description="files of a project")
    least_wrong: int = Field(
        default=3, ge=1, description="least number of files with a wrong number"
    )
    inputs: int = Field(default=4, ge=1, le=4, description="largest `x` of a test")
    turns: int = Field(default=30, ge=1, le=100, description="commands before the shell closes")
    slip: float = Field(
        default=0.04,
        ge=0,
        lt=1,
        description="probability that the expert enters any command but exit",
    )
    turn_rewards: bool | Literal["judged"] = Field(
        default=False,
        description="also reward each command by the change in the share of tests that pass; "
        "`judged`: by 0.5 for the expert's command and -0.5 for any other",
    )
    train_size: int = Field(default=2048, ge=1, description="projects to train on")
    heldout_size: int = Field(default=128, ge=0, description="other projects, to evaluate on")
    seed: int | None = Field(default=None, description="seed of the projects; none: the run's seed")
    train_seed: int | None = Field(
        default=None, description="seed of only the training projects; none: the same as `seed`"
    )
    sandbox: Walls = Field(
        default="require",
        description="`best_effort` runs the tests without the walls that this machine cannot put up",
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> "Config":
        if self.least_wrong > self.files:
            raise ValueError(
                f"{self.least_wrong} of {self.files} files cannot be wrong; lower least_wrong, or raise files"
            )
        needed = 3 * self.files + 2
        if self.turns < needed:
            raise ValueError(
                f"the expert needs {needed} turns for {self.files} wrong files, and turns is {self.turns}; "
                "raise turns, or lower files"
            )
        return self


@dataclass(frozen=True, slots=True)
class FileTest:
    """The test of a file: the values at `x` and `x` + 1, which differ by the slope, 1 or -1."""

    x: int
    value: int
    slope: int

    def write_repaired(self) -> str:
        """Return the text that passes."""
        return f"x+{self.value - self.x}" if self.slope > 0 else f"{self.value + self.x}-x"


@dataclass(frozen=True, slots=True)
class Project:
    """The initial files, and a test of each."""

    files: Mapping[str, str]
    tests: Mapping[str, FileTest]


class Shell:
    """The state of a project after some commands; `passes` runs a test on a file's text."""

    def __init__(self, project: Project, passes: Callable[[str, FileTest], bool]) -> None:
        self.files = dict(project.files)
        self.is_open = True
        self._seen: set[str] = set()
        """The commands without an effect since the last change of a file."""
        self._project = project
        self._passes = passes

    def list_failures(self) -> list[str]:
        """Return the files with a test that fails."""
        tests = self._project.tests
        return [name for name, test in tests.items() if not self._passes(self.files[name], test)]

    def execute(self, command: str) -> str | None:
        """Execute a command and return its output; None for an unknown command."""
        command = command.strip()
        if (match := ECHO.fullmatch(command)) and match[2] in self.files:
            self.files[match[2]] = match[1]
            self._seen.clear()
            return ""
        self._seen.add(command)
        if (match := CAT.fullmatch(command)) and match[1] in self.files:
            return self.files[match[1]]
        if command == "test":
            failures = self.list_failures()
            return self._describe(failures[0]) if failures else "ok"
        if command == "exit":
            self.is_open = False
            return ""
        return " ".join(self.files) if command == "ls" else None

    def _describe(self, name: str) -> str:
        test = self._project.tests[name]
        return f"{name}({test.x})={test.value}"

    def choose_command(self) -> str:
        """Return the expert's command: test, read the file that fails, repair it, and test again."""
        failures = self.list_failures()
        if "test" not in self._seen:
            return "test"
        if not failures:
            return "exit"
        name = failures[0]
        if f"cat {name}" not in self._seen:
            return f"cat {name}"
        return f"echo {self._project.tests[name].write_repaired()} > {name}"


@dataclass(slots=True)
class ShellEpisode(Episode):
    """One conversation with a shell; see `practicum.ports.Episode`."""

    shell: Shell
    config: Config
    count: int = 0

    def step(self, turn: str) -> Observation:
        """Execute the turn as a command; an unknown command is a call without a result."""
        kind, shell = self.config.turn_rewards, self.shell
        is_best = kind == "judged" and turn.strip() == shell.choose_command()
        before = len(shell.list_failures()) if kind else 0
        output = shell.execute(turn)
        self.count += 1
        after = len(shell.list_failures()) if kind else 0
        reward = is_best - 0.5 if kind == "judged" else (before - after) / self.config.files
        is_over = not self.shell.is_open or self.count >= self.config.turns
        return Observation(
            None if is_over else Message("user", UNKNOWN if output is None else output),
            reward=reward if kind else None,
            calls=(CallRecord("shell", "unknown" if output is None else "answered"),),
        )


class ShellTask(Task):
    """Projects by the name of their prompt, and an expert that repairs them."""

    def __init__(self, config: Config, seed: int) -> None:
        self._config = config
        seed = seed if config.seed is None else config.seed
        train_seed = seed if config.train_seed is None else config.train_seed
        self._projects = draw_projects(config, seed, train_seed)
        self._prompts = [
            Prompt(name, (Message("user", " ".join(project.files)),))
            for name, project in self._projects.items()
        ]
        self._process = VerifierProcess(MODULE, canary=CANARY, sandbox=config.sandbox)
        self._commands = list_commands(NAMES[: config.files])
        self._results: dict[tuple[str, FileTest], bool] = {}

    @property
    def letters(self) -> str:
        """The characters of files, commands and outputs."""
        commands = "ls cat echo test exit ok?()=+->x0123456789"
        return "".join(sorted({*commands, *NAMES[: self._config.files]}))

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the training projects, each as the names of its files."""
        return self._prompts[self._config.heldout_size :]

    def heldout_prompts(self) -> Sequence[Prompt]:
        """Return the held-out projects."""
        return self._prompts[: self._config.heldout_size]

    def open(self, prompt: Prompt, seed: int) -> Episode:
        """Begin in the project of the prompt; each answer is a command's output."""
        return ShellEpisode(self._start(prompt), self._config)

    def expert(self, prompt: Prompt, turns: Sequence[str]) -> Mapping[str, float]:
        """Return the expert's probability of each command, other commands included."""
        best = self._play(prompt, turns).choose_command()
        if not self._config.slip:
            return {best: 1.0}
        chances = dict.fromkeys(self._commands, self._config.slip / len(self._commands))
        return chances | {best: chances.get(best, 0.0) + 1 - self._config.slip}

    def reward(self, rollout: Rollout) -> float | None:
        """Return 1 if all tests pass at the end, else 0."""
        # A command that was cut off was not executed.
        replies = rollout.replies[:-1] if rollout.stop_reason == "length" else rollout.replies
        return float(not self._play(rollout.prompt, replies[: self._config.turns]).list_failures())

    def _play(self, prompt: Prompt, commands: Sequence[str]) -> Shell:
        """Return the shell after some commands."""
        shell = self._start(prompt)
        for command in commands:
            if shell.is_open:
                shell.execute(command)
        return shell

    def _start(self, prompt: Prompt) -> Shell:
        return Shell(self._projects[prompt.id], self._run_test)

    def _run_test(self, text: str, test: FileTest) -> bool:
        """Return True if a file's text has both values."""
        key = (text, test)
        if key in self._results:
            return self._results[key]
        problems: list[str] = []
        passes = True
        for step in (0, 1):
            program = f"x={test.x + step}\na={text}"
            answer = f"a={test.value + step * test.slope}"
            passes &= bool(
                self._process.call({"reply": program, "answer": answer}, problems.append)
            )
        # A result is remembered, but not the failure of a process that was too slow.
        if not problems and len(self._results) < CACHED_RESULTS:
            self._results[key] = passes
        return passes


def list_commands(names: str) -> list[str]:
    """Return the commands except `exit`; `echo` writes texts in the two forms of a project."""
    texts = [form.format(digit) for form in FORMS for digit in range(10)]
    echoes = [f"echo {text} > {name}" for name in names for text in texts]
    return ["ls", "test", *(f"cat {name}" for name in names), *echoes]


def draw_projects(config: Config, seed: int, train_seed: int) -> dict[str, Project]:
    """Draw distinct projects by name, the held-out ones first; DataError if there are too few."""
    projects: dict[str, Project] = {}
    used: set[tuple[object, ...]] = set()
    for part, size, part_seed in (
        ("heldout", config.heldout_size, seed),
        ("train", config.train_size, train_seed),
    ):
        for number in range(size):
            for draw in range(DRAWS):
                project = draw_project(config, seed_of(part_seed, "shell", part, number, draw))
                key = (*project.files.items(), *project.tests.items())
                if key not in used:
                    break
            else:
                raise DataError(
                    f"task shell: {config.heldout_size + config.train_size} different projects of "
                    f"{config.files} files are hardly found; raise files, or lower the sizes"
                )
            used.add(key)
            projects[f"{part}-{number}"] = project
    return projects


def draw_project(config: Config, seed: int) -> Project:
    """Draw a project: at least `least_wrong` of its files have a wrong number."""
    draw = random.Random(seed)
    names = NAMES[: config.files]
    wrong = draw.sample(names, draw.randint(config.least_wrong, config.files))
    files: dict[str, str] = {}
    tests: dict[str, FileTest] = {}
    for name in names:
        x, form = draw.randint(1, config.inputs), draw.choice(FORMS)
        slope = 1 if form.startswith("x") else -1
        number = draw.randint(0, 9 - x) if slope > 0 else draw.randint(x, 9)
        tests[name] = FileTest(x, number + slope * x, slope)
        if name in wrong:
            number = draw.choice([digit for digit in range(10) if digit != number])
        files[name] = form.format(number)
    return Project(files, tests)


def build(config: Config, context: TaskContext) -> Task:
    """Draw the projects."""
    return ShellTask(config, context.seed)
