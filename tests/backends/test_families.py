"""What can be done with each architecture is what docs/models.md says, made from `families.json`."""

import json
import warnings

import pytest

from .families import COLUMNS, FAMILIES, OUTCOME, outcome

SHORT = ("Qwen3", "LFM2", "Bamba", "Llama 4 text")
"""Tried by `make check` too: one that packs, two kinds of state, and a body under another name."""


def test_every_family_has_its_outcome():
    written = json.loads(OUTCOME.read_text(encoding="utf-8"))
    assert list(written) == [family.name for family in FAMILIES]
    assert all(set(found) <= {"model_type", *COLUMNS} for found in written.values())


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family.name in SHORT else pytest.mark.long)
        for family in FAMILIES
    ],
    ids=lambda family: family.name.replace(" ", "-"),
)
def test_the_outcome_is_as_written_down(family, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about configs as small as these
        assert (
            outcome(family, tmp_path)
            == json.loads(OUTCOME.read_text(encoding="utf-8"))[family.name]
        )
