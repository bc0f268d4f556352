"""The command line: one line per mistake, documented exit codes, and output that programs and pipes can read."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toy import command, environment, forked, make_model, rows, said, write_recipe
from transformers import AutoModelForCausalLM

from practicum.backends.local.backend import LocalStudent
from practicum.cli._output import print_summary
from practicum.cli.app import app
from practicum.cli.completion import complete_recipe
from practicum.errors import RecipeError
from practicum.recipe import FAMILIES
from practicum.runs import open_student

pytestmark = pytest.mark.long

COMMANDS = [
    "run",
    "check",
    "convert",
    "doctor",
    "plan",
    "show",
    "schema",
    "ls",
    "answers",
    "laws",
    "eval",
    "chat",
    "export",
    "report",
    "watch",
    "compare",
    "probe",
    "serve",
]


def test_help_is_instant_because_torch_stays_unloaded() -> None:
    code = (
        "import sys; sys.argv = ['practicum', '--help']\n"
        "from practicum.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'pydantic', 'yaml'} & set(sys.modules), 'imported too much'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        all(name in done.stdout for name in COMMANDS)
        and "Example: practicum run quickstart" in done.stdout
    )


def test_packaged_recipes_are_read_and_checked_without_transformers() -> None:
    code = (
        "import sys; sys.argv = ['practicum', 'check', 'quickstart']\n"
        "from practicum.cli import main\n"
        "from practicum.runs.stages import load_pipeline_or_recipe as load\n"
        "from practicum.recipe import list_recipe_names\n"
        "for name in list_recipe_names():\n"
        "    load(name)\n"
        "    assert 'transformers' not in sys.modules, name\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        # Only the chat template of an existing model needs them.
        "assert 'transformers' not in sys.modules, 'check'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nquickstart: no mistakes found\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example(tmp_path: Path, name: str) -> None:
    status, text = said(tmp_path, name, "--help")
    assert status == 0 and f"Example: practicum {name}" in text


def test_a_run_and_everything_after_it(models: Path, tmp_path: Path) -> None:
    recipe = write_recipe(models, tmp_path / "r.yaml", {"evaluation.prompts": 4})
    status, text = said(
        tmp_path, "run", str(recipe), "train.steps=2", "--out", str(tmp_path / "runs")
    )
    assert status == 0 and "step 2/2" in text and "\x1b" not in text
    folder = tmp_path / "runs" / "toy"
    status, text = said(
        tmp_path, "run", str(recipe), "train.steps=2", "--out", str(tmp_path / "runs"), "--resume"
    )
    assert status == 0 and "nothing to do" in text
    status, text = said(
        tmp_path, "run", str(recipe), "train.steps=2", "--out", str(tmp_path / "runs")
    )
    assert status == 0 and "runs/toy holds a finished run, so the new run is toy-2" in text
    status, text = said(tmp_path, "eval", str(folder), "--json")
    assert status == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert json.loads(text)["reverse_kl"] == pytest.approx(summary["after"]["reverse_kl"], rel=1e-5)
    status, text = said(
        tmp_path, "eval", str(models / "student"), "--recipe", str(recipe), "--json"
    )
    assert status == 0 and json.loads(text.splitlines()[-1])["prompts"] == 4
    status, text = said(tmp_path, "eval", str(models / "student"))
    assert status == 2 and "--recipe" in text


def test_json_output_is_one_object_a_line(models: Path, tmp_path: Path) -> None:
    recipe = write_recipe(models, tmp_path / "r.yaml", {"evaluation.prompts": 4, "train.steps": 2})
    status, text = said(tmp_path, "run", str(recipe), "--out", str(tmp_path / "runs"), "--json")
    events = [json.loads(line) for line in text.splitlines()]
    assert status == 0 and [event["step"] for event in events if event["event"] == "step"] == [1, 2]
    assert events[-1]["event"] == "finish"
    for words in (["ls", "divergences"], ["ls", "recipes"], ["show", str(recipe)]):
        status, text = said(tmp_path, *words, "--json")
        assert status == 0 and all(isinstance(json.loads(line), dict) for line in text.splitlines())


def test_show_prints_a_recipe_that_reads_back(models: Path, tmp_path: Path) -> None:
    recipe = write_recipe(models, tmp_path / "r.yaml")
    status, text = said(tmp_path, "show", str(recipe), "objective.divergence=jsd(0.3)")
    assert status == 0 and "jsd" in text
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert said(tmp_path, "show", str(again)) == (0, text)


@pytest.mark.parametrize(
    "room", ["recipes", "divergences", "teachers", "tasks", "backends", "weights", "corrections"]
)
def test_every_room_can_be_listed(tmp_path: Path, room: str) -> None:
    status, text = said(tmp_path, "ls", room)
    assert (
        status == 0
        and text.strip()
        and all(len(line.split()) >= 2 for line in text.splitlines() if line)
    )


def test_a_broken_law_ends_with_1_and_is_one_object_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_losses.py").write_text(
        "from practicum import functional as F\n"
        'wrong = F.Divergence("wrong", lambda s, t, _: s.exp() * (t - s), None, "", "")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    status, text = said(tmp_path, "laws", "own_losses:wrong")
    assert status == 1 and "BROKEN  The value is positive where they differ" in text
    status, text = said(tmp_path, "laws", "own_losses", "--json")
    rows = [json.loads(line) for line in text.splitlines()]
    assert status == 1 and {row["entry"] for row in rows} == {"divergence own_losses:wrong"}
    assert [row["holds"] for row in rows].count(False) == sum(
        row["counterexample"] is not None for row in rows
    )


def test_help_lines_are_whole(tmp_path: Path) -> None:
    """Check the width: half of the descriptions were cut with "..." at eighty columns."""
    status, text = said(tmp_path, "--help")
    assert status == 0 and "..." not in text.partition("Commands:")[2]
    assert "<int range>" not in said(tmp_path, "doctor", "--help")[1]


def test_recipes_are_listed_by_family(tmp_path: Path) -> None:
    status, text = said(tmp_path, "ls")
    headings = [line.partition(":")[0] for line in text.splitlines() if line and line[0] != " "]
    order = [family for family in FAMILIES if family in headings]
    assert status == 0 and headings == order and headings[0] == "start"
    assert "quickstart" in text.partition("\n\n")[0]
    status, text = said(tmp_path, "ls", "recipes", "--like", "ENTROPY", "--family", "white-box")
    assert status == 0 and "papers/entropy-aware-opd" in text and "papers/gkd" not in text
    for words, error in {
        ("--like", "qwertz"): "nothing under recipes --like qwertz",
        ("--family", "whitebox"): "did you mean 'white-box'",
    }.items():
        status, text = said(tmp_path, "ls", "recipes", *words)
        assert status == 2 and error in text
    status, text = said(tmp_path, "ls", "teachers", "--family", "start")
    assert status == 2 and "only recipes have a family" in text


def test_an_evaluation_is_printed_without_a_dict(capsys: pytest.CaptureFixture[str]) -> None:
    """Check the printed calibration: it was a Python dict."""
    interval = {"mean": 0.5, "low": 0.1, "high": 0.9}
    calibration = {"confidence": 0.25, "overconfidence": interval, "error": 0.2}
    summary = {"accuracy": interval, "reverse_kl": None, "by_domain": {}}
    print_summary({**summary, "calibration": calibration}, as_json=False)
    text = capsys.readouterr().out
    assert "{" not in text and "reverse kl        unknown" in text
    assert "  overconfidence  0.500 [0.100, 0.900]" in text


MISTAKES = {
    "a recipe that is not there": (["run", "nowhere.yaml"], 2, "no recipe 'nowhere.yaml'"),
    "nearly a recipe": (["check", "quikstart"], 2, "did you mean 'quickstart'? practicum ls"),
    "a paper's recipe without its folder": (["check", "gdk"], 2, "did you mean 'papers/gkd'?"),
    "nearly a key of a file": (["check", "smoke/toy", "extnds=x"], 2, "did you mean 'extends'?"),
    "a room that is not there": (["ls", "teacher"], 2, "did you mean 'teachers'"),
    "an override that is none": (
        ["check", "smoke/toy", "steps"],
        2,
        "use for example train.steps=4",
    ),
    "a run that is not there": (["export", "nowhere", "there"], 2, "nowhere"),
    "a model that is not there": (["chat", "./nowhere"], 4, "no model './nowhere'"),
    "an unknown command": (["rnu"], 2, "rnu"),
    "an unknown option": (["run", "--fast"], 2, "--fast"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_its_exit_code_and_no_traceback(tmp_path: Path, name: str) -> None:
    words, code, text = MISTAKES[name]
    status, printed = said(tmp_path, *words)
    assert (status, "Traceback" in printed) == (code, False), printed
    assert text in printed


def test_all_mistakes_of_a_recipe_are_printed_one_a_line(models: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        models, tmp_path / "r.yaml", {"train.steps": 0, "seeed": 1, "rollout.n": "x"}
    )
    for name in ("check", "run", "show"):
        status, text = said(tmp_path, name, str(recipe))
        assert status == 2 and len(text.splitlines()) == 3 and "did you mean 'seed'" in text


def test_debug_shows_where_an_error_came_from() -> None:
    with pytest.raises(RecipeError, match="nowhere"):
        app(["check", "nowhere.yaml", "--debug"], standalone_mode=False)


@pytest.mark.parametrize(
    "name", ["../x", "/tmp/x", "a/b", "..", "", "a\0b", "x" * 300, "CON", "-rf", ".hidden", "a\nb"]
)
def test_a_name_that_leaves_the_folder_is_refused(models: Path, tmp_path: Path, name: str) -> None:
    recipe = write_recipe(models, tmp_path / "r.yaml", {"name": name})
    before = sorted(tmp_path.iterdir())
    status, text = said(tmp_path, "run", str(recipe), "--out", str(tmp_path / "runs"))
    assert status == 2 and "Traceback" not in text and len(text.splitlines()) == 1
    left = set(tmp_path.rglob("*")) - set(before) - {tmp_path / "output"}
    assert left <= {tmp_path / "runs"}


def asking(questions: Path, *words: str) -> Callable[[], None]:
    """Return work for a fork: a command with its questions on standard input."""

    def work() -> None:
        os.dup2(os.open(questions, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0, closefd=False)
        command(*words)()

    return work


def test_chat_answers_each_line_of_a_pipe(finished: Path, tmp_path: Path) -> None:
    output, questions = tmp_path / "output", tmp_path / "questions"
    questions.write_text("ab\ncd\n\nnever read\n")
    assert (
        forked(asking(questions, "chat", str(finished), "--max-new-tokens", "4"), output=output)
        == 0
    )
    text = output.read_text(encoding="utf-8")
    assert text.count("teacher") in (0, 2) and "never" not in text and "> " not in text


def test_chat_prints_no_control_character_of_an_answer(tmp_path: Path) -> None:
    strange = "\x1b\u202e\u2066\x07\x9b"
    folder = make_model(tmp_path / "model", alphabet=strange + "ab", seed=5)
    output, questions = tmp_path / "output", tmp_path / "questions"
    questions.write_text("a\nb\n")
    words = ("chat", str(folder), "--temperature", "1", "--max-new-tokens", "60")
    assert forked(asking(questions, *words), output=output) == 0
    text = output.read_text(encoding="utf-8")
    assert "\\x07" in text and not set(strange) & set(text)


def test_an_exported_student_is_a_plain_model_with_the_same_logits(
    finished: Path, tmp_path: Path
) -> None:
    target = tmp_path / "exported"
    status, text = said(tmp_path, "export", str(finished), str(target))
    assert status == 0 and str(target) in text
    _, student = open_student(finished)
    assert isinstance(student, LocalStudent)
    plain = AutoModelForCausalLM.from_pretrained(target).eval()
    ids = torch.tensor([[3, 7, 8, 4]])
    with torch.no_grad():
        assert plain(ids).logits.equal(student.loaded.language_model.model.eval()(ids).logits)
    status, text = said(tmp_path, "export", str(finished), str(target))
    assert status == 2 and "exists already" in text
    status, text = said(tmp_path, "chat", str(target))
    assert status == 0


POOR = {"HOME": "", "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def piped(line: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Return a shell line in which "$@" is `practicum WORDS`, without home, terminal or non-ASCII letters."""
    return subprocess.run(
        [
            "bash",
            "-c",
            f"set -o pipefail; {line}",
            "bash",
            sys.executable,
            "-m",
            "practicum",
            *words,
        ],
        env=environment(POOR),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_poor_terminal_whose_reader_goes_away_is_good_enough(
    models: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(models, tmp_path / "r.yaml", {"about": "\u00fc\u202e", "train.steps": 1})
    done = piped('"$@" | head -1', "run", str(recipe), "--out", str(tmp_path / "runs"))
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)
    assert rows(tmp_path / "runs" / "toy" / "metrics.jsonl")


@pytest.mark.slow
def test_a_run_without_standard_output_is_a_run(models: Path, tmp_path: Path) -> None:
    recipe = write_recipe(models, tmp_path / "r.yaml", {"train.steps": 1})
    done = piped('"$@" >&-', "run", str(recipe), "--out", str(tmp_path / "runs"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("line", "word"), [('"$@" | true', "ls"), ('"$@" >&-', "--help")])
def test_a_reader_that_goes_away_is_no_error(line: str, word: str) -> None:
    done = piped(line, word)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_imported_from_the_current_folder(models: Path, tmp_path: Path) -> None:
    for name in ("torch.py", "yaml.py", "typer.py", "practicum_plugin.py"):
        (tmp_path / name).write_text("open('owned', 'w')\n")
    recipe = write_recipe(models, tmp_path / "r.yaml", {"task": {"type": "practicum_plugin.x"}})
    script = Path(sys.executable).with_name("practicum")
    done = subprocess.run(
        [script, "check", str(recipe)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and not (tmp_path / "owned").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_recipes(shell: str, tmp_path: Path) -> None:
    words = {
        "bash": {"COMP_WORDS": "practicum run smoke/", "COMP_CWORD": "2"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "practicum run smoke/"},
        "fish": {
            "_TYPER_COMPLETE_ARGS": "practicum run smoke/",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
    }
    code = "import sys; sys.argv = ['practicum']; from practicum.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment({"_PRACTICUM_COMPLETE": f"complete_{shell}", **words[shell]}),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert "smoke/toy" in done.stdout, done.stderr


def test_completion_offers_names_files_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").write_text("")
    (tmp_path / "quick.txt").write_text("")
    (tmp_path / "quarter").mkdir()
    assert complete_recipe("qu") == ["quickstart", "quarter/", "quick.yaml"]


def test_completing_a_recipe_imports_no_model_library() -> None:
    code = (
        "import sys; from practicum.cli.app import app; "
        "from practicum.cli.completion import complete_recipe; complete_recipe('s'); "
        "assert not {'torch', 'pydantic', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


def test_the_schema_is_printed_as_json(tmp_path: Path) -> None:
    status, text = said(tmp_path, "schema")
    assert status == 0 and json.loads(text)["properties"]["train"]
