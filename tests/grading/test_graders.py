"""Verifiers of the user's: a function by name in its own process, and a Python callable in this process."""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toy import make_model

import practicum
from practicum.errors import DataError, SandboxError
from practicum.foreign import name_object
from practicum.grading import graders as grading
from practicum.ports import TaskContext
from practicum.ports.gate import collect_rejections
from practicum.prompts import Message, Prompt
from practicum.runs.resuming import open_run
from practicum.tasks.jsonl import Config, build
from practicum.types import Rollout

REWARDS = '''
import json, os, socket, time
print("noise at import")


def overlap(reply, prompt):
    """The share of the answer's letters, less one for every letter that is not in it."""
    print("noise")
    return sum(1 if letter in prompt.answer else -1 for letter in reply) / max(len(reply), 1)


def equal(reply, prompt):
    return reply == prompt.answer


def needs_no_answer(reply, prompt):
    assert prompt.messages[0].content and prompt.privileged["hint"] == "h"
    return 0.5


def odd(reply, prompt):
    match reply:
        case "nan": return float("nan")
        case "high": return 7
        case "text": return "1.0"
        case "none": return None
        case "exit": raise SystemExit
        case "die": os._exit(1)
        case "hang":
            while True: pass
        case "net": socket.socket()
        case "file": return len(open(__file__).read()) > 0 and open("/etc/hostname").read() and 1.0
        case "key": return float(os.environ.get("JUDGE_KEY") == "k")
    return json.loads(reply)["x"]


def run_program(reply, prompt):
    """Run the reply as a program, as verifiers of code do."""
    exec(reply, {})
    return float(json.dumps is not None and CALLS == [])


CALLS = []


def one(reply):
    return 1.0


number = 3
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a module on the path of this process, which PYTHONPATH does not name."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "own_rewards.py").write_text(REWARDS)
    (site / "own_broken.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(str(site))
    yield site
    for name in ("own_rewards", "own_broken"):
        sys.modules.pop(name, None)


def prompt(answer: str | None = "ab", **fields: Any) -> Prompt:
    return Prompt("p7", (Message("user", "q"),), answer=answer, **fields)


def grade(
    verifier: Any, reply: str, scores: tuple[float, float] = (0.0, 1.0), **fields: Any
) -> Any:
    return grading.open_grader(verifier, "require", scores)(reply, prompt(**fields))


@pytest.mark.long
def test_a_function_runs_in_its_own_process_with_the_whole_prompt(own: Path) -> None:
    overlap = grading.open_grader("own_rewards:overlap", "require", (-1.0, 1.0))
    assert overlap("ab", prompt()) == 1.0 and overlap("xx", prompt()) == -1.0
    assert "own_rewards" not in sys.modules
    assert grade("own_rewards.equal", "ab") == 1.0
    graded = grade(
        "own_rewards:needs_no_answer", "?", answer=None, privileged={"hint": "h"}, domain="d"
    )
    assert graded == 0.5


@pytest.mark.long
def test_a_reply_that_is_run_changes_nothing_for_the_next_one(own: Path) -> None:
    check = grading.open_grader("own_rewards:run_program", "require", (0.0, 1.0))
    assert check("pass", prompt()) == 1.0
    module = "__import__('sys').modules['own_rewards']"
    for attack in (
        f"{module}.run_program = lambda reply, prompt: 1.0",
        f"{module}.CALLS.append(1)",
        f"{module}.json.dumps = None",
        "import builtins; builtins.float = lambda number: 1.0",
        "import threading; threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
        'import os; [os.write(n, b\'{"id": 1, "value": 1.0}\\n\') for n in range(3, 9) if n in (3, 4)]',
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.fork()",
        "import os; os._exit(0)",
    ):
        check(attack, prompt())
        assert check("raise ValueError", prompt()) == 0.0
        assert check("pass", prompt()) == 1.0


@pytest.mark.long
def test_a_function_reads_its_modules_and_no_other_file_next_to_them(own: Path) -> None:
    (own / "rows.jsonl").write_text('{"prompt": "q", "answer": "secret"}')
    (own / ".env").write_text("KEY=1")
    check = grading.open_grader("own_rewards:run_program", "require", (0.0, 1.0))
    for name in ("rows.jsonl", ".env"):
        assert check(f"open({str(own / name)!r})", prompt()) == 0.0
    assert check(f"open({str(own / 'own_rewards.py')!r})", prompt()) == 1.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("{", "JSONDecodeError: Expecting property name .* (own_rewards.py, line "),
        ('{"y": 1}', "KeyError: 'x' (own_rewards.py, line "),
        ("nan", "it returned nan, which is not from 0 to 1"),
        ("high", "it returned 7, which is not from 0 to 1"),
        ("text", "it returned '1.0', which is no number"),
        ("none", "it returned None, which is no number"),
        ("exit", "its process ended by itself"),
        ("die", "its process ended by itself"),
        ("hang", "over 0.5 s"),
        ("net", "OSError: .*; it runs in the sandbox: see task.sandbox"),
        ("file", "PermissionError: .*; it runs in the sandbox: see task.sandbox"),
    ],
)
def test_a_failure_scores_zero_and_is_told_once(
    own: Path, reply: str, reason: str, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = functools.partial(grading.VerifierProcess, seconds=0.5)
    monkeypatch.setattr(grading, "VerifierProcess", slow)
    odd = grading.open_grader("own_rewards:odd", "require", (0.0, 1.0))
    assert odd('{"x": 0.25}', prompt()) == 0.25
    with collect_rejections() as rejections:
        for _ in range(3):
            assert odd(reply, prompt()) == 0.0
    names = [rejection.reason.partition(": ")[0] for rejection in rejections]
    assert names == ["the verifier own_rewards:odd"] * 3
    assert odd('{"x": 0.75}', prompt()) == 0.75
    (note,) = notes
    start = (
        "warning: the verifier own_rewards:odd failed on a completion, which scored 0; prompt p7: "
    )
    assert note.startswith(start)
    head, _, tail = reason.partition(".*")
    assert note[len(start) :].startswith(head) and tail in note


@pytest.mark.long
def test_without_walls_a_function_has_the_files_and_variables_of_the_run(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    walled = grading.open_grader("own_rewards:odd", "require", (0.0, 1.0))
    assert walled("key", prompt()) == 0.0
    free = grading.open_grader("own_rewards:odd", "off", (0.0, 1.0))
    assert free("key", prompt()) == 1.0 and free("file", prompt()) == 1.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("own_rewards:equals", "module 'own_rewards' has no 'equals'; did you mean 'equal'"),
        ("own_rewards:json", "'own_rewards:json' is a module; name a function in it: json:verify"),
        ("own_rewards:number", "'own_rewards:number' is a int and no function; write def verify"),
        ("own_rewards:one", "cannot take a reply and a prompt (too many positional arguments)"),
        ("own_broken:f", "module 'own_broken' fails when it is imported: ModuleNotFoundError"),
        ("not_there:f", "no module 'not_there' in the installed packages"),
    ],
)
def test_a_function_that_cannot_be_had_is_one_line_at_the_start(
    own: Path, name: str, line: str
) -> None:
    with pytest.raises(DataError) as error:
        grading.open_grader(name, "require", (0.0, 1.0))
    assert str(error.value).startswith("task.verifier: ") and line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_module_in_the_working_folder_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 2)
    (tmp_path / "mine_alone.py").write_text("raise SystemExit('it was imported')\n")
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate({"path": "rows.jsonl", "verifier": "mine_alone:verify"})
    (problem,) = config.find_problems(tmp_path)
    assert problem.startswith("task.verifier: no module 'mine_alone' in the installed packages")
    assert problem.endswith(
        f"; {tmp_path} has 'mine_alone' and is not searched: write PYTHONPATH={tmp_path} before the "
        f"command, or pip install -e {tmp_path}"
    )
    with pytest.raises(DataError) as error:
        grading.open_grader("mine_alone:verify", "require", (0.0, 1.0))
    assert str(error.value) == problem
    monkeypatch.syspath_prepend(tmp_path)
    assert config.find_problems(tmp_path) == []


def test_a_callable_runs_here_and_this_is_said_once(notes: list[str]) -> None:
    def verify(reply: str, prompt: Prompt) -> bool:
        return {"yes": True, "no": False}[reply]

    grader = grading.open_grader(verify, "require", (-2.0, -1.0))
    name = f"{__name__}:{verify.__qualname__}"
    assert notes == [
        f"the verifier {name} is a function of this process: it runs here, without a sandbox, and "
        "is not stopped if it hangs"
    ]
    notes.clear()
    # Outside its range, as any failure: the end of the range that is next to 0.
    assert [grader(reply, prompt()) for reply in ("no", "maybe", "yes")] == [-1.0, -1.0, -1.0]
    assert notes == [
        f"warning: the verifier {name} failed on a completion, which scored -1; prompt p7: it "
        "returned 0, which is not from -2 to -1"
    ]


def test_a_callable_that_hangs_is_reported(
    notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "SECONDS", 0.05)
    grader = grading.open_grader(
        lambda reply, prompt: time.sleep(0.3) or 1.0, "require", (0.0, 1.0)
    )
    assert grader("", prompt()) == 1.0
    assert (
        "takes more than 0.05 s for prompt p7; a function of this process cannot be s" in notes[1]
    )
    assert len(notes) == 2


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"verifier": "exat"}, "no verifier named 'exat'; did you mean 'exact'.*package.module:fu"),
        ({"verifier": "rewards"}, "no verifier named 'rewards'; known: contains"),
        ({"verifier": 7}, "no verifier named 7"),
        ({"verifier": lambda reply: 1}, r"cannot take a reply and a prompt \(too many"),
        ({"verifier": "exact", "reward_range": [1, 1]}, "the lower one first, as"),
        ({"verifier": "exact", "reward_range": [0, float("inf")]}, "the lower one first, as"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Config.model_validate({"path": "x", **settings})


@pytest.mark.parametrize(
    ("verifier", "sandbox", "scores", "line"),
    [
        ("__main__:f", "require", (0.0, 1.0), "was a function of a script or notebook"),
        (
            "own:f.<locals>.g",
            "require",
            (0.0, 1.0),
            "move the function into a module and set package.",
        ),
        ("math", "off", (0.0, 1.0), "off is for a function of yours, and 'math' is practicum's"),
        ("exact", "require", (-1.0, 1.0), "'exact' gives 0 or 1; leave it out"),
    ],
)
def test_what_cannot_be_opened_is_one_line(
    verifier: str, sandbox: Any, scores: tuple[float, float], line: str
) -> None:
    with pytest.raises(DataError, match=line):
        grading.open_grader(verifier, sandbox, scores)


def test_a_missing_wall_is_refused_or_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("practicum.sandbox.deadline.missing", lambda: ["files (no Landlock)"])
    with pytest.raises(SandboxError, match="cannot wall off files"):
        grading.open_grader("own_rewards:equal", "require", (0.0, 1.0))


@pytest.mark.parametrize(
    ("verifier", "name"),
    [
        ("number", "number"),
        ("own:f", "own:f"),
        (json.loads, "json:loads"),
        (len, "builtins:len"),
        (functools.partial(len), "functools:partial"),
    ],
)
def test_a_verifier_has_a_readable_name(verifier: str | Callable[..., Any], name: str) -> None:
    assert name_object(verifier) == name


def verify_here(reply: str, prompt: Prompt) -> float:
    return -1.0 + 2.0 * (reply == prompt.answer)


def distill(folder: Path, verifier: Any, steps: int = 2, **settings: Any) -> practicum.RunResult:
    rows = [{"prompt": text, "answer": text[::-1]} for text in ("ab", "cd", "ba", "dc", "ac")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not (folder / "student").exists():
        make_model(folder / "student")
    return practicum.distill(
        name="own",
        student={"model": str(folder / "student")},
        teacher={"type": "none"},
        task={
            "type": "jsonl",
            "path": str(folder / "rows.jsonl"),
            "heldout": 1,
            "verifier": verifier,
            "reward_range": [-1, 1],
        },
        objective={"signal": "score(none)"},
        rollout={"max_new_tokens": 4, "n": 2},
        train={"steps": steps, "prompts_per_step": 2, "threads": 1, "checkpoint_every": 1},
        out=folder / "runs",
        **settings,
    )


def test_a_callable_is_a_name_in_the_recipe_and_a_run_goes_on_with_it(tmp_path: Path) -> None:
    result = distill(tmp_path, verify_here)
    recipe = (result.folder / "recipe.json").read_text()
    assert json.loads(recipe)["recipe"]["task"]["verifier"] == f"{__name__}:verify_here"
    _, loaded = open_run(result.folder)
    assert loaded.task.verifier == f"{__name__}:verify_here"
    lines = (result.folder / "rollouts.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward"] for line in lines]
    assert set(rewards) <= {-1.0, 1.0} and -1.0 in rewards
    again = distill(tmp_path, verify_here, resume=True)
    assert again.summary["steps"] == 2


@pytest.mark.long
def test_a_run_with_a_named_function(tmp_path: Path, own: Path) -> None:
    result = distill(tmp_path, "own_rewards:overlap")
    assert result.summary["steps"] == 2


def test_a_prompt_without_an_answer_is_graded_by_a_function_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    context = TaskContext(seed=0, base_dir=tmp_path)
    rollout = Rollout.from_text(prompt(answer=None), "x")
    ours = build(Config(path=Path("rows.jsonl"), heldout=0), context)
    assert ours.reward(rollout) is None
    own = build(
        Config(path=Path("rows.jsonl"), heldout=0, verifier=lambda reply, prompt: 1), context
    )
    assert own.reward(rollout) == 1.0
