"""The user's own Python by name: one spelling rule, and one line for every way to be wrong."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from practicum.foreign import describe_error, is_external, load_object

LOSSES = """
import math
from pathlib import Path


class Inner:
    deep = 7


half = 0.5


def halve(number):
    return int(number) / 2
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site" / "own_parts"
    folder.mkdir(parents=True)
    (folder / "losses.py").write_text(LOSSES)
    (folder / "broken.py").write_text("import own_parts.losses\nnumber = own_parts.losses.thrd\n")
    (folder / "needy.py").write_text("import a_package_that_is_missing\n")
    (folder / "unclosed.py").write_text("x = (\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    yield folder.parent
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_parts"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["own_parts.losses:half", "own_parts.losses.half"])
def test_both_spellings_name_the_same_object(site: Path, name: str) -> None:
    assert is_external(name) and load_object(name) == 0.5


def test_a_name_may_lead_into_a_class_and_may_end_with_a_module(site: Path) -> None:
    assert load_object("own_parts.losses:Inner.deep") == load_object("own_parts.losses.Inner.deep")
    assert load_object("own_parts.losses").__name__ == "own_parts.losses"
    assert load_object("math:pi") > 3


@pytest.mark.parametrize(
    "name", ["late", "my..late", ".late", "a:b:c", "lambda x: x", "a b.c", "a.b(1)", ":b", "a:", ""]
)
def test_other_texts_are_no_names_of_objects(name: str) -> None:
    assert not is_external(name)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "own_parts.losses:halv",
            "module 'own_parts.losses' has no 'halv'; did you mean 'halve'? known: Inner, half, halve",
        ),
        (
            "own_parts.loses",
            "module 'own_parts' has no 'loses'; did you mean 'losses'? "
            "known: broken, losses, needy, unclosed",
        ),
        (
            "own_parts.broken:number",
            "module 'own_parts.broken' fails when it is imported: AttributeError: module "
            "'own_parts.losses' has no attribute 'thrd' (broken.py, line 2)",
        ),
        (
            "own_parts.needy.x",
            "module 'own_parts.needy' fails when it is imported: ModuleNotFoundError: No module "
            "named 'a_package_that_is_missing' (needy.py, line 1)",
        ),
        (
            "own_parts.unclosed:x",
            "module 'own_parts.unclosed' fails when it is imported: SyntaxError: '(' was never "
            "closed (unclosed.py, line 1)",
        ),
    ],
)
def test_a_name_that_leads_nowhere_is_one_line(site: Path, name: str, line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        load_object(name)


def test_a_missing_module_names_the_folders_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    line = (
        "no module 'not_there.losses' in the installed packages, /somewhere; if it lies in FOLDER: "
        "write PYTHONPATH=FOLDER before the command, or pip install -e FOLDER"
    )
    with pytest.raises(ValueError, match=f"^{line}$"):
        load_object("not_there.losses:half")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    (tmp_path / "not_there").mkdir()
    with pytest.raises(ValueError, match=f"has 'not_there' and is not .*PYTHONPATH={tmp_path} be"):
        load_object("not_there.losses:half")


def test_an_error_is_told_with_its_place(site: Path) -> None:
    losses = load_object("own_parts.losses")
    with pytest.raises(ValueError, match="invalid literal") as error:
        losses.halve("x\ny")
    assert describe_error(error.value, losses.__file__) == (
        r"ValueError: invalid literal for int() with base 10: 'x\ny' (losses.py, line 14)"
    )
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"
