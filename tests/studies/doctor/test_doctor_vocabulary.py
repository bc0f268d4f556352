"""P1 for vocabularies that agree on common tokens: the number of all other tokens, and their mass."""

from pathlib import Path

import pytest
from pairs import finding
from qwen_pair import pair_recipe, write_pair

from practicum.recipe import parse_recipe
from practicum.studies.doctor import doctor

pytestmark = pytest.mark.long


@pytest.mark.parametrize("larger", ["teacher", "student"])
def test_the_mass_outside_is_a_number_of_the_first_check(tmp_path: Path, larger: str) -> None:
    pair = write_pair(tmp_path)
    sections = {}
    if larger == "student":
        sections = {
            "student": {"model": str(pair / "teacher")},
            "teacher": {"type": "model", "model": str(pair / "student")},
        }
    diagnosis = doctor(parse_recipe(pair_recipe(pair, **sections), "pair"), prompts=4, samples=2)
    found = finding(diagnosis, "P1")
    other = {"teacher": "student", "student": "teacher"}[larger]
    assert f"the {larger} has 4 tokens that the {other} lacks" in found.sentence
    assert found.details[f"tokens only the {larger} has"] == 4
    assert found.details[f"tokens only the {other} has"] == 0
    masses = {
        "teacher": found.details["teacher's mass on tokens only it has"],
        "student": found.details["student's mass on tokens only it has"],
    }
    assert masses[other] == pytest.approx(0, abs=1e-6)
    assert 0 < masses[larger] < 1
    assert found.status == ("pass" if masses[larger] <= 0.01 else "warn")
    # Every other check returns a result too: none fails because the sizes differ.
    assert finding(diagnosis, "P6").value is not None
