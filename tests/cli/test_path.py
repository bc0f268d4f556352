"""The command line imports from no folder by itself, and from every folder that the user named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy import environment

from practicum.cli.app import _drop_start_folder

WEIGHT = """
from practicum.functional import Weight

late = Weight("late", lambda statistics: statistics.loss_mask, "late tokens")
"""


@pytest.mark.parametrize(
    ("named", "path", "kept"),
    [
        ("", ["", "/lib"], ["/lib"]),
        ("", ["HERE", "/lib"], ["/lib"]),
        ("", ["/bin of it", "/lib"], ["/lib"]),
        ("HERE", ["/bin of it", "HERE", "/lib"], ["HERE", "/lib"]),
        ("HERE", ["HERE", "HERE", "/lib"], ["HERE", "/lib"]),
        (".", ["/bin of it", "HERE", "/lib"], ["HERE", "/lib"]),
        ("/other:HERE", ["", "/other", "HERE", "/lib"], ["/other", "HERE", "/lib"]),
        # An empty entry is an accident, PYTHONPATH=$PYTHONPATH:/other, and names no folder.
        (":/other", ["/bin of it", "HERE", "/other", "/lib"], ["/other", "/lib"]),
        # An editable installation in the working directory.
        ("", ["/bin of it", "/lib", "HERE"], ["/lib", "HERE"]),
    ],
)
def test_what_python_put_there_goes_and_what_the_user_named_stays(
    named: str, path: list[str], kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(text: str) -> str:
        return text.replace("HERE", str(tmp_path))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/bin of it/practicum"])
    monkeypatch.setenv("PYTHONPATH", place(named))
    monkeypatch.setattr(sys, "path", list(map(place, path)))
    _drop_start_folder()
    assert sys.path == list(map(place, kept))


@pytest.mark.long
@pytest.mark.parametrize("start", [["-m", "practicum"], ["-P", "-m", "practicum"]])
def test_a_module_in_the_working_directory_is_found_if_pythonpath_names_it(
    start: list[str], tmp_path: Path
) -> None:
    (tmp_path / "own_parts.py").write_text(WEIGHT)
    source = str(Path(__file__).parents[2] / "src")

    def list_entries(*folders: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *start, "ls", "own_parts"],
            cwd=tmp_path,
            env=environment({"PYTHONPATH": os.pathsep.join(folders)}),
            capture_output=True,
            text=True,
            check=False,
        )

    named = list_entries(source, str(tmp_path))
    assert (named.returncode, named.stderr) == (0, "")
    assert named.stdout == "own_parts:late  weight: late tokens\n"
    nowhere = list_entries(source)
    assert nowhere.returncode == 2
    assert nowhere.stderr == (
        f"error: no module 'own_parts' in the installed packages, {source}; {tmp_path} has "
        f"'own_parts' and is not searched: write PYTHONPATH={tmp_path} before the command, or pip "
        f"install -e {tmp_path}\n"
    )
