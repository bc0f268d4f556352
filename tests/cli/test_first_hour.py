"""The mistakes of a user's first hour: each ends with its exit code and a line that names the remedy."""

import json
import shutil
from pathlib import Path

import pytest
from toy import write_recipe
from typer.testing import CliRunner

from practicum.cli.app import app

ROUTE = "teacher={type: route, key: domain, teachers: {x: {type: model, model: MODELS/teacher}}}"
API = "teacher={type: openai_api, url: 'http://localhost:9'"


def task(text: str) -> str:
    """Return the override of a task with files of rows."""
    return f"task={{type: jsonl, path: {text}}}"


MISTAKES = [
    # Recipes.
    ("run quikstart", 2, "did you mean 'quickstart'?"),
    ("run typo", 2, "practicum ls recipes --like WORD"),
    ("run r.yml", 2, "did you mean 'r.yaml'?"),
    ("check empty.yaml", 2, "empty.yaml: the file is empty"),
    ("check list.yaml", 2, "a recipe is a mapping of names"),
    ("check bad.yaml", 2, "bad.yaml: not YAML"),
    ("check bare.yaml", 2, "no `student` and no `task`"),
    # Options and overrides.
    ("run", 2, "Missing argument 'RECIPE'"),
    ("runn r.yaml", 2, "Did you mean 'run'?"),
    ("run r.yaml --steps 4", 2, "a key of a recipe is written train.steps=4"),
    ("run r.yaml --steps=4", 2, "a key of a recipe is written train.steps=4"),
    ("check r.yaml --lr 0.1", 2, "written optimizer.learning_rate=0.1"),
    ("check r.yaml --learning-rate 1", 2, "written optimizer.learning_rate=1"),
    ("run r.yaml --batch-size 8", 2, "written train.prompts_per_step=8"),
    ("plan r.yaml --max-new-tokens 8", 2, "written rollout.max_new_tokens=8"),
    ("run r.yaml --frobnicate", 2, "No such option: --frobnicate"),
    ("check r.yaml steps=4", 2, "steps: no such key; use train.steps"),
    ("check r.yaml learning_rate=1", 2, "no such key; use optimizer.learning_rate"),
    ("check r.yaml train.stepz=4", 2, "did you mean 'steps'?"),
    ("check r.yaml train.steps=four", 2, "train.steps: input should be a valid integer"),
    ("check r.yaml train.steps=0", 2, "train.steps: input should be greater"),
    ("check r.yaml train.steps", 2, "is not key=value; use for example train.steps=4"),
    ("check r.yaml name=false", 2, "name: YAML reads this value as false"),
    ("check r.yaml name=a/b", 2, "'a/b' cannot name a folder"),
    ("check r.yaml seed=x", 2, "seed: input should be a valid integer"),
    ("check r.yaml optimizer.learning_rate=10", 2, "learning_rate: input should be less than 10"),
    ("check r.yaml optimizer.learning_rate=1e10", 2, "should be less than 10"),
    ("check r.yaml optimizer.learning_rate=-1", 2, "learning_rate: input should be greater than 0"),
    ("check r.yaml evaluation.prompts=-1", 2, "evaluation.prompts: input should be greater"),
    ("check r.yaml student.lora={rank: 0}", 2, "student.lora.rank"),
    ("check r.yaml objective.divergence=revers_kl", 2, "did you mean 'reverse_kl'?"),
    ("check r.yaml objective.divergence=jsd(2)", 2, "beta must be in (0, 1)"),
    ("check r.yaml teacher.type=modle", 2, "did you mean 'model'?"),
    ("run r.yaml tracking=wandbb", 2, "did you mean 'wandb'?"),
    (
        "run r.yaml --tracking wandb",
        2,
        "no option --tracking: a key of a recipe is written tracking=wandb",
    ),
    # Models.
    ("check r.yaml student.model=my-lora", 2, "no model 'my-lora' at HERE/my-lora"),
    ("check r.yaml teacher.model=./nope", 2, "teacher: no model './nope' at HERE/nope"),
    ("check r.yaml student.model=bare", 2, "bare: no tokenizer"),
    ("check r.yaml student.model=rows", 2, "no config.json, so this is not a model folder"),
    # Rows.
    (f"check r.yaml {task('nope.jsonl')}", 2, "HERE/nope.jsonl cannot be read"),
    (f"check r.yaml {task('german.jsonl')}", 2, "write columns: {prompt: frage}"),
    (f"check r.yaml {task('table.csv')}", 2, "columns: {prompt: question, answer: solution}"),
    (f"check r.yaml {task('none.jsonl')}", 2, "no rows; write one row per line"),
    (f"check r.yaml {task('latin.jsonl')}", 2, "not UTF-8"),
    (f"check r.yaml {task('text.jsonl')}", 2, "not JSON"),
    (f"check r.yaml {task('one.jsonl')} evaluation.prompts=4", 0, "0 of 1 rows held out"),
    (f"check r.yaml {task('rows.jsonl, verifier: nope')}", 2, "no verifier named 'nope'"),
    (f"check r.yaml {task('rows.jsonl, verifier: absent:fn')}", 2, "PYTHONPATH=FOLDER"),
    (f"check r.yaml {task('rows.jsonl, heldout: rows.jsonl')}", 3, "every training row is also"),
    (f"check r.yaml {task('rows.jsonl')} {ROUTE}", 3, "has no domain; the route knows x"),
    (f"check r.yaml {task('d.jsonl, heldout: rows.jsonl')} {ROUTE}", 3, "has no domain"),
    # Teachers at a server.
    (f"check r.yaml {API}}} objective.signal=topk(64)", 2, "at most k=20, not 64"),
    (f"check r.yaml {API}}} objective.signal=full", 2, "it can give: sampled, topk"),
    ("probe localhost:9", 2, "write for example https://host"),
    # Folders.
    ("run r.yaml --out /proc/nope", 8, "this place allows no new folder; use --out"),
    ("run r.yaml --out r.yaml", 2, "is a file where a run needs a folder"),
    ("run r.yaml --resume name=new", 2, "there is no such folder"),
    ("run r.yaml --resume --overwrite", 2, "either continued or replaced"),
    ("run r.yaml --allow-changed seed", 2, "add --resume"),
    ("chat runs/typo", 2, "there is no folder HERE/runs/typo; did you mean 'runs/toy'?"),
    ("serve nope/", 4, "no model 'nope/' at HERE/nope: it is not a folder"),
    ("serve runs/typo", 2, "there is no folder HERE/runs/typo; did you mean 'runs/toy'?"),
    ("run r.yaml student.model=runs/typo", 2, "did you mean 'runs/toy'?"),
    ("eval runs/typo", 2, "did you mean 'runs/toy'?"),
    ("export runs/typo x", 2, "there is no such folder"),
    ("report runs/typo", 2, "there is no such folder"),
    ("watch runs/typo", 2, "there is no such folder"),
    # Other commands.
    ("plan r.yaml --memory lots", 8, "use for example 8GiB"),
    ("compare a=r.yaml a=r.yaml", 2, "two arms are named 'a'"),
    ("ls recipes --family x", 2, "no family 'x'; known:"),
    ("laws jsdd", 2, "did you mean 'jsd'?"),
]


@pytest.fixture(scope="module")
def place(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a recipe, rows, model folders and an earlier run."""
    here = tmp_path_factory.mktemp("here")
    write_recipe(models, here / "r.yaml")
    rows = {
        name: [{question: f"ab{i}", **fields} for i in range(count)]
        for name, question, fields, count in (
            ("rows", "prompt", {"answer": "ba"}, 8),
            ("d", "prompt", {"answer": "ba", "domain": "x"}, 9),
            ("german", "frage", {"loesung": "ba"}, 8),
            ("one", "prompt", {"answer": "ba"}, 1),
            ("none", "prompt", {}, 0),
        )
    }
    for name, entries in rows.items():
        text = "".join(f"{json.dumps(row)}\n" for row in entries)
        (here / f"{name}.jsonl").write_text(text)
    (here / "latin.jsonl").write_bytes('{"prompt": "für"}\n'.encode("latin-1"))
    (here / "text.jsonl").write_text("hello\n")
    (here / "table.csv").write_text("question;solution\nab;ba\nbc;cb\n")
    (here / "empty.yaml").write_text("# nothing yet\n")
    (here / "list.yaml").write_text("- a\n")
    (here / "bad.yaml").write_text("student: [")
    (here / "bare.yaml").write_text("extends: papers/gkd\n")
    (here / "rows").mkdir()
    (here / "runs" / "toy").mkdir(parents=True)
    (here / "runs" / "toy" / "recipe.json").write_text("{}")
    shutil.copytree(models / "student", here / "bare", ignore=shutil.ignore_patterns("token*"))
    return here


def split(words: str) -> list[str]:
    """Split the words of a command line, where an override in braces is one word."""
    parts, depth = [""], 0
    for letter in words:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == " " and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def test_mistakes_of_the_first_hour_name_their_remedy(
    models: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    wrong = []
    for words, code, phrase in MISTAKES:
        result = CliRunner().invoke(app, split(words.replace("MODELS", str(models))))
        expected = phrase.replace("HERE", str(place))
        if (
            result.exit_code != code
            or expected not in result.output
            or result.output.count("Traceback")
        ):
            wrong.append((words, result.exit_code, result.output[-400:]))
    assert len(MISTAKES) >= 60
    assert not wrong, "\n".join(map(str, wrong))
