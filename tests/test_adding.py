"""The examples of docs/adding.md for parts of other packages: each is one file that a recipe names, without registration."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from toy import rows, toy_recipe, toy_run

from practicum.cli.listing import list_names
from practicum.errors import PracticumError, RecipeError
from practicum.foreign import find_published
from practicum.functional import DIVERGENCES, WEIGHTS
from practicum.functional.laws import WEIGHT_LAWS
from practicum.objective import SIGNALS, Objective
from practicum.recipe import parse_recipe, resolve_recipe
from practicum.recipe.json_schema import build_schema
from practicum.rollouts import SOURCES, SourceChoice
from tests.functional.divergence_laws import LAWS, random_logits

PAGE = Path(__file__).resolve().parents[1] / "docs" / "adding.md"
FILES = dict(
    re.findall(
        r"^```python\n# file: (my_parts/\w+\.py)\n(.*?)^```$",
        PAGE.read_text("utf-8"),
        re.DOTALL | re.M,
    )
)
SAMPLED = {"objective.signal": "sampled"}
ADDITIONS = {
    "hellinger": {"objective.divergence": "my_parts.hellinger"},
    "late": {"objective.weights": "my_parts.late(1)"},
    "flat": SAMPLED | {"teacher": {"type": "my_parts.flat"}},
    "nucleus": {"objective.signal": "my_parts.nucleus(0.8)"},
    "even": SAMPLED | {"objective.estimator": "my_parts.even"},
    "surest": {"rollout.source": "my_parts.surest(3)"},
    "slow_start": {"monitors": {"my_parts.slow_start": "log"}},
    "double": {"task": {"type": "my_parts.double", "letters": "abcd"}},
    "rewards": {
        "task": {
            "type": "jsonl",
            "path": "ROWS",
            "heldout": 1,
            "verifier": "my_parts.rewards:overlap",
            "reward_range": [-1, 1],
        }
    },
}


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Write one file of the page to the module path, and return the folder."""
    site = tmp_path / "site"
    (site / "my_parts").mkdir(parents=True)
    loaded = [name for name in sys.modules if name.partition(".")[0] == "my_parts"]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(site))

    def added(name: str) -> Path:
        (site / "my_parts" / f"{name}.py").write_text(
            FILES[f"my_parts/{name}.py"], encoding="utf-8"
        )
        return site

    yield added
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_parts"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ADDITIONS)
def test_a_part_of_another_package_is_one_file(
    name: str, add: Any, models: Path, tmp_path: Path
) -> None:
    site = add(name)
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{letter}", "answer": "{letter * 2}"}}\n' for letter in "abcd")
    )
    changes = json.loads(json.dumps(ADDITIONS[name]).replace("ROWS", str(tmp_path / "rows.jsonl")))
    result = toy_run(models, tmp_path / "runs", {**changes, "train.steps": 2})
    assert [path.name for path in site.rglob("*.py")] == [f"{name}.py"]
    assert (
        len(rows(result.folder / "metrics.jsonl")) == 2
        and (result.folder / "report.html").is_file()
    )
    recipe = toy_recipe(models, changes)
    assert (
        f"my_parts.{name}" in str(resolve_recipe(recipe))
        and parse_recipe(resolve_recipe(recipe), "toy") == recipe
    )


def test_a_signal_of_another_package_is_the_whole_distribution_at_its_end(
    add: Any, models: Path, tmp_path: Path
) -> None:
    add("nucleus")
    curves = {
        signal: [
            row["loss"]
            for row in rows(
                toy_run(models, tmp_path / str(number), {"objective.signal": signal}).folder
                / "metrics.jsonl"
            )
        ]
        for number, signal in enumerate(["full", "my_parts.nucleus(1)", "my_parts.nucleus(0.5)"])
    }
    whole, at_end, cut = curves.values()
    assert at_end == pytest.approx(whole, rel=1e-4), "with all of the mass nothing is cut"
    assert cut[0] < 0.9 * whole[0], "the cut acts"


def test_a_signal_of_another_package_refuses_what_it_cannot_be(add: Any) -> None:
    add("nucleus")
    with pytest.raises(ValueError, match="nucleus is differentiated; leave out target"):
        Objective.model_validate({"signal": "my_parts.nucleus", "estimator": "score_function"})
    add("surest")
    with pytest.raises(ValueError, match="no signal: its Config is not below"):
        Objective.model_validate({"signal": "my_parts.surest"})


PUBLISHED = {
    "surest": ("sources", SOURCES, {"rollout.source": "surest(tries=8)"}),
    "nucleus": ("signals", SIGNALS, {"objective.signal": "nucleus(p=0.8)"}),
    "flat": ("teachers", "teachers", SAMPLED | {"teacher": "flat"}),
}


@pytest.fixture
def publish() -> Iterator[Callable[[Path, str, str], None]]:
    """Let a folder be an installed package that publishes one part of it."""

    def published(site: Path, kind: str, name: str) -> None:
        data = site / "my_parts-1.0.dist-info"
        data.mkdir()
        (data / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 1.0\n")
        entry = f"[practicum.{kind}]\n{name} = my_parts.{name}\n"
        (data / "entry_points.txt").write_text(entry)
        find_published.cache_clear()

    yield published
    find_published.cache_clear()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_part_is_listed_is_in_the_schema_and_runs(
    name: str, add: Any, publish: Any, models: Path, tmp_path: Path
) -> None:
    kind, room, changes = PUBLISHED[name]
    publish(add(name), kind, name)
    summary = FILES[f"my_parts/{name}.py"].split('"""')[1]
    assert {"name": name, "summary": summary} in list_names(kind)
    choices = build_schema()["$defs"][room]["anyOf"]
    assert name in choices[0]["enum"]
    assert any(choice.get("properties", {}).get("type") == {"const": name} for choice in choices)
    folder = toy_run(models, tmp_path / name, changes).folder
    assert f"my_parts.{name}" in (folder / "recipe.json").read_text()
    recipe = toy_recipe(models, changes)
    assert parse_recipe(resolve_recipe(recipe), "toy") == recipe


def test_a_published_entry_has_a_word(add: Any, models: Path, publish: Any, tmp_path: Path) -> None:
    publish(add("hellinger"), "divergences", "hellinger")
    assert "hellinger" in [row["name"] for row in list_names("divergences")]
    assert "hellinger" in str(build_schema()["$defs"]["Term"]["properties"]["divergence"])
    folder = toy_run(models, tmp_path / "runs", {"objective.divergence": "hellinger"}).folder
    dotted = {"objective.divergence": "my_parts.hellinger"}
    same = toy_run(models, tmp_path / "same", dotted).folder
    losses = [[row["loss"] for row in rows(path / "metrics.jsonl")] for path in (folder, same)]
    assert losses[0] == losses[1] and "hellinger" not in DIVERGENCES
    with pytest.raises(ValueError, match="did you mean 'hellinger'"):
        Objective.model_validate({"divergence": "helinger"})


def test_a_monitor_of_another_package_raises_its_alarm(
    add: Any, publish: Any, models: Path, tmp_path: Path
) -> None:
    publish(add("slow_start"), "monitors", "slow_start")
    assert "slow_start" in [row["name"] for row in list_names("monitors")]
    assert "slow_start" in str(build_schema()["properties"]["monitors"])
    settings = {"action": "finish", "change": 2.0, "persistence": 2}
    changes = {"monitors": {"slow_start": settings}, "train.steps": 30}
    folder = toy_run(models, tmp_path / "runs", changes).folder
    (alarm,) = [row for row in rows(folder / "alarms.jsonl") if row["id"] == "slow_start"]
    assert (alarm["step"], alarm["action"]) == (21, "finish")
    assert alarm["rule"] == "less than 2 above the first ten steps, in 2 steps in a row"
    assert len(rows(folder / "metrics.jsonl")) == 21, "it ends the run"
    with pytest.raises(RecipeError, match="no monitor 'slow_stat'; did you mean 'slow_start'"):
        toy_recipe(models, {"monitors": {"slow_stat": "warn"}})


def test_a_published_part_that_fails_harms_no_other(add: Any, publish: Any) -> None:
    site = add("hellinger")
    (site / "my_parts" / "bad.py").write_text("import no_such_package\n")
    publish(site, "sources", "bad")
    entries = site / "my_parts-1.0.dist-info" / "entry_points.txt"
    kinds = ("divergences", "monitors")
    entries.write_text(
        entries.read_text() + "".join(f"[practicum.{kind}]\nbad = my_parts.bad\n" for kind in kinds)
    )
    assert "bad" in [row["name"] for row in list_names("sources")]
    for kind in kinds:
        summary = next(row["summary"] for row in list_names(kind) if row["name"] == "bad")
        assert summary.startswith("cannot be used: module 'my_parts.bad' fails"), summary
    assert "bad" in build_schema()["$defs"][SOURCES]["anyOf"][0]["enum"]
    with pytest.raises(ValueError, match=r"'my_parts\.bad' is not one of the sources: module"):
        TypeAdapter(SourceChoice).validate_python("bad")


WRONG = {
    "signal": (
        "from practicum.objective import Full, SignalCall\n"
        "class Config(SignalCall):\n"
        "    type: str = 'my_parts.wrong'\n"
        "    measures = compares = True\n"
        "    question = property(lambda self: Full())\n"
        "    def compare(self, comparison):\n"
        "        return comparison.contributions(comparison.student, comparison.teacher.full)\n",
        {"objective.signal": "my_parts.wrong"},
        r"signal: compare returns \(2, 3\) and not a tensor of shape \(2,\)",
    ),
    "target": (
        "from practicum.objective import TargetCall\n"
        "class Config(TargetCall):\n"
        "    type: str = 'my_parts.wrong'\n"
        "    def build(self, teacher, student, reference):\n"
        "        return teacher.no_such_method(), None\n",
        {"objective.target": "my_parts.wrong"},
        r"target: 'my_parts.wrong' fails on one token: AttributeError: .*no_such_method",
    ),
    "nameless": (
        "from practicum.rollouts import SourceConfig\nclass Config(SourceConfig):\n    pass\n",
        {"rollout.source": "my_parts.wrong"},
        r"source: 'my_parts.wrong': its Config has no type; set type: Literal",
    ),
    "source": (
        "from practicum.rollouts import SourceConfig\n"
        "class Config(SourceConfig):\n"
        "    type: str = 'my_parts.wrong'\n"
        "    def collect(self, keys, parts):\n"
        "        return [][0]\n",
        {"rollout.source": "my_parts.wrong"},
        r"rollout.source: my_parts.wrong: IndexError: list index out of range \(wrong.py, line 5\)",
    ),
    "rollouts": (
        "from practicum.rollouts import SourceConfig\n"
        "class Config(SourceConfig):\n"
        "    type: str = 'my_parts.wrong'\n"
        "    def collect(self, keys, parts):\n"
        "        return ['text']\n",
        {"rollout.source": "my_parts.wrong"},
        r"rollout.source: my_parts.wrong: collect returns no list of rollouts",
    ),
    "no rollouts": (
        "from practicum.rollouts import SourceConfig\n"
        "class Config(SourceConfig):\n"
        "    type: str = 'my_parts.wrong'\n"
        "    def collect(self, keys, parts):\n"
        "        return []\n",
        {"rollout.source": "my_parts.wrong"},
        r"my_parts.wrong: collect returned no rollouts for \d+ keys; return at least one",
    ),
    "estimator": (
        "from practicum.objective import EstimatorCall\n"
        "class Config(EstimatorCall):\n"
        "    type: str = 'my_parts.wrong'\n"
        "    accumulates = property(lambda self: True)\n"
        "    def compute_returns(self, advantages, turns):\n"
        "        return advantages[1:]\n",
        SAMPLED | {"objective.estimator": "my_parts.wrong"},
        r"estimator: compute_returns returns \(2,\) and not a tensor of shape \(3,\)",
    ),
    "task settings": (
        "from pydantic import BaseModel\n"
        "class Config(BaseModel):\n"
        "    type: str = 'my_parts.wrong'\n"
        "def build(config, context):\n"
        "    pass\n",
        {"task": {"type": "my_parts.wrong"}},
        r"task: .* is no task: its Config is not below practicum.ports.tasks.TaskConfig",
    ),
    "task": (
        "from practicum.ports import TaskConfig\n"
        "class Config(TaskConfig):\n"
        "    type: str = 'my_parts.wrong'\n"
        "def build(config, context):\n"
        "    return 7\n",
        {"task": {"type": "my_parts.wrong"}},
        r"'my_parts.wrong': build returned a int; return an object of a class below .*tasks.Task",
    ),
    "episode": (
        "from practicum.ports import TaskConfig\n"
        "from practicum.rows import PromptSet\n"
        "from practicum.types import Message, Prompt\n"
        "class Config(TaskConfig):\n"
        "    type: str = 'my_parts.wrong'\n"
        "class Wrong(PromptSet):\n"
        "    def open(self, prompt, seed):\n"
        "        return object()\n"
        "def build(config, context):\n"
        "    return Wrong([Prompt('a', (Message('user', 'a'),), answer='a')], [])\n",
        {"task": {"type": "my_parts.wrong"}, "rollout.max_new_tokens": 64},
        r"open\(\) returned a object, which is not below practicum.ports.Episode",
    ),
    "monitor": (
        "from practicum.monitors import Monitor\n"
        "entry = Monitor('m', lambda view, limits: view.row['none'], 'm', 'x', patches=())\n",
        {"monitors": {"my_parts.wrong": "warn"}},
        r"monitors.my_parts.wrong: KeyError: 'none' \(wrong.py, line 2\)",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_part_of_another_package_is_one_line(
    kind: str, add: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, changes, message = WRONG[kind]
    (add("flat") / "my_parts" / "wrong.py").write_text(text)
    with pytest.raises(PracticumError, match=message) as raised:
        toy_run(models, tmp_path, changes)
    assert "\n" not in str(raised.value)


def test_a_package_that_fails_when_it_is_looked_for_is_listed(add: Any, publish: Any) -> None:
    site = add("surest")
    (site / "my_parts" / "__init__.py").write_text("raise RuntimeError('broken')\n")
    publish(site, "sources", "surest")
    assert {"name": "surest", "summary": ""} in list_names("sources")


def test_a_source_of_another_package_acts(add: Any, models: Path, tmp_path: Path) -> None:
    add("surest")
    sureness = [
        rows(
            toy_run(
                models, tmp_path / tries, {"rollout.source": f"my_parts.surest({tries})"}
            ).folder
            / "metrics.jsonl"
        )[0]["sureness"]
        for tries in ("8", "1")
    ]
    assert sureness[0] > sureness[1] + 0.1


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_laws_hold_for_the_divergence_of_the_page(law: Any, add: Any) -> None:
    add("hellinger")
    law(DIVERGENCES["my_parts.hellinger"], None, *random_logits(1))


@pytest.mark.parametrize("law", WEIGHT_LAWS, ids=lambda law: law.__name__)
def test_the_laws_hold_for_the_weight_of_the_page(law: Any, add: Any) -> None:
    add("late")
    law(WEIGHTS["my_parts.late"], {"start": 1}, 0, 6)


def test_the_facts_of_an_entry_decide_where_it_can_be_used(add: Any) -> None:
    add("late")
    (term,) = Objective.model_validate(
        {"signal": "score", "weights": "my_parts.late(start=2)"}
    ).losses
    assert term.weights.arguments == {"start": 2}
    assert not term.weighs_by_teacher and not term.needs_sequences


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "my_parts.late(end=1)",
            "weight 'my_parts.late' has no parameter 'end'",
        ),
        (
            "my_parts.lat",
            "module 'my_parts' has no 'lat'; did you mean 'late'\\? known: late",
        ),
        (
            "your_parts.late",
            "no module 'your_parts.late' in the installed packages.*; if it lies in FOLDER: "
            "write PYTHONPATH=FOLDER before the command, or pip install -e FOLDER",
        ),
        (
            "torch.nn",
            r"module 'torch.nn' has no Weight named 'entry'; write entry = "
            r"practicum.functional.Weight\(\.\.\.\) in it",
        ),
        (
            "my_parts.late:late",
            r"'my_parts.late:late' is a function and no Weight; put it into entry = "
            r"practicum.functional.Weight\(\.\.\.\), and name that",
        ),
        ("my_parts.late:lat", "module 'my_parts.late' has no 'lat'; did you mean 'late'"),
        ("my_parts:late:x", "no weight named 'my_parts:late:x'"),
        ("late", "no weight named 'late'; known: accepted, all"),
        ("my..late", "no weight named 'my..late'; known: accepted, all"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(text: str, message: str, add: Any) -> None:
    add("late")
    with pytest.raises(ValueError, match=message):
        Objective.model_validate({"weights": text})


def test_an_entry_is_looked_up_when_it_is_asked_for(add: Any) -> None:
    add("late")
    assert "my_parts.late" not in WEIGHTS and "my_parts" not in sys.modules
    assert WEIGHTS["my_parts.late"].defaults == {"start": 0}
    with pytest.raises(KeyError):
        WEIGHTS["late"]
