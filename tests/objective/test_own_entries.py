"""Entries of the user's: by name from a module, or registered; the same paths as practicum's own."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum import functional as F
from practicum.objective import Objective

PARTS = """
import torch
from practicum import functional as F

def _chi(student, teacher, scale):
    s, t = student.exp(), teacher.exp()
    return scale * (s - t).square() / t

chi_square = F.Divergence("chi_square", _chi, F.Parameter("scale", 1.0, 0.0, 9.0, "its size"), "", "Pearson's")

def _late(statistics, start=0):
    return statistics.loss_mask * (statistics.positions >= start)

late = F.Weight("late", _late, "late tokens", needs=("positions",), pointwise=True, identity={"start": 0})

def _first(statistics):
    return [1.0] + [0.0] * (len(statistics.kept) - 1)

first = F.SampleWeight("first", _first, "the first completion")

def _half(log_ratio, advantage, size=0.5):
    return torch.full_like(log_ratio, size)

half = F.Correction("half", _half, "half")
signs = F.Advantage("signs", lambda rewards: [1.0 if reward > 0 else -1.0 for reward in rewards], "the sign")

def _gate(teacher, reward, log_ratio, above=0.0):
    return torch.where(reward > above, teacher + reward, torch.zeros_like(teacher))

gate = F.RewardRule("gate", _gate, "the teacher where the reward is positive", advantage="group_mean")

def _wrong(student):
    return student

wrong = F.Divergence("wrong", _wrong, None, "", "of one argument")
odd = F.Weight("odd", lambda statistics, flags=(1, 2): statistics.loss_mask, "a tuple as a parameter")
"""

TERMS: dict[str, dict[str, Any]] = {
    "divergence": {"divergence": "own_parts:chi_square(0.5)"},
    "weights": {"weights": "own_parts:late(start=2)"},
    "samples": {"samples": "own_parts:first"},
    "correction": {"signal": "sampled", "correction": "own_parts:half(size=0.25)"},
    "signal": {"signal": "score(own_parts:signs)"},
    "reward": {"signal": "sampled", "reward": "own_parts:gate(0.5)"},
    "advantage": {"signal": "sampled", "reward": "add_advantage(2.0, own_parts:signs)"},
}


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_parts", None)


@pytest.mark.parametrize("key", TERMS)
@pytest.mark.parametrize("spelling", [":", "."])
def test_every_axis_reads_an_entry_of_a_module_and_writes_it_back(
    parts: None, key: str, spelling: str
) -> None:
    data = {name: str(value).replace(":", spelling) for name, value in TERMS[key].items()}
    objective = Objective.model_validate(data)
    text = objective.model_dump_json()
    assert f"own_parts{spelling}" in text
    assert Objective.model_validate_json(text) == objective


def test_a_registered_entry_has_a_name_in_recipes(parts: None, clean_tables: None) -> None:
    own_parts = importlib.import_module("own_parts")

    with pytest.raises(ValueError, match=r"no divergence named 'chi_square'; .*register\(Diverg"):
        Objective.model_validate({"divergence": "chi_square(0.5)"})
    for entry in ("chi_square", "late", "first", "half", "signs", "gate"):
        assert F.register(vars(own_parts)[entry]) is vars(own_parts)[entry]
    for data in TERMS.values():
        short = {name: str(value).replace("own_parts:", "") for name, value in data.items()}
        Objective.model_validate(short)
    # A notebook cell that runs again replaces its entry; names of practicum are taken.
    F.register(own_parts.chi_square)
    with pytest.raises(ValueError, match="'jsd' is one of practicum's; give yours another name"):
        F.register(F.Divergence("jsd", own_parts._chi, None, "", ""))
    with pytest.raises(ValueError, match="registered under a word; 'my jsd' is none"):
        F.register(F.Divergence("my jsd", own_parts._chi, None, "", ""))
    with pytest.raises(
        ValueError, match=r"register takes one of Divergence, Weight, .*not <function"
    ):
        F.register(own_parts._chi)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            {"divergence": lambda s, t: s},
            r"a divergence is an entry with a name, not a function; write entry = "
            r"practicum.functional.Divergence\('name', function, ...\) and give the entry, or package",
        ),
        ({"reward": lambda r: r}, "a reward is an entry with a name, not a function"),
        (
            {"divergence": "own_parts:chi_squar"},
            "module 'own_parts' has no 'chi_squar'; did you mean 'chi_square'",
        ),
        (
            {"divergence": "own_parts"},
            "no divergence named 'own_parts'; .*write package.module:entry",
        ),
        ({"weights": "own_parts:chi_square"}, "'own_parts:chi_square' is a Divergence and no Wei"),
        ({"divergence": "own_parts:_chi"}, "is a function and no Divergence; put it into entry ="),
        (
            {"divergence": "own_parts:wrong"},
            r"divergence 'own_parts:wrong' fails on one token: TypeError: _wrong\(\) takes 1 pos",
        ),
        (
            {"divergence": "own_parts:chi_square(10)"},
            r"chi_square: scale must be in \[0, 9\] \(its size\), got 10",
        ),
        (
            {"weights": "own_parts:odd"},
            r"weight 'own_parts:odd': the default of flags is \(1, 2\); write a number or a text",
        ),
        ({"signal": "score(own_parts:sign)"}, "'own_parts' has no 'sign'; did you mean 'signs'"),
        ({"signal": "score(grou_mean)"}, "no advantage named 'grou_mean'; did you mean 'group_m"),
    ],
)
def test_what_is_no_entry_is_refused_with_what_to_write(
    parts: None, data: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        Objective.model_validate(data)


@pytest.mark.usefixtures("clean_tables")
def test_an_entry_given_itself_is_registered(parts: None) -> None:
    own_parts = importlib.import_module("own_parts")

    for entry in (own_parts.chi_square, F.DIVERGENCES["jsd"]):
        (term,) = Objective.model_validate({"divergence": entry}).losses
        assert term.divergence.name == entry.name and F.DIVERGENCES[entry.name] is entry


def test_a_rule_of_rewards_has_the_reward_alone_as_its_control(parts: None) -> None:
    (term,) = Objective.model_validate(TERMS["reward"]).losses
    assert term.has_rewarded_advantage and term.learns_from_reward
    assert term.reward_advantage == "group_mean"
    assert term.reward_rule.read_factor(term.reward.arguments) == 1.0
    rule = F.REWARDS["own_parts:gate"]
    teacher, reward = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.25])
    assert rule.function(teacher, reward, torch.zeros(2), above=0.5).tolist() == [2.0, 0.0]


def test_a_rule_that_reads_the_log_ratio_is_refused_without_one(parts: None) -> None:
    """Check that a rule is not called with None: raw logits have no log T - log S."""
    with pytest.raises(ValueError, match="reward 'own_parts:gate' reads log T - log S"):
        Objective.model_validate({"signal": "logits", "reward": "own_parts:gate"})


@pytest.mark.parametrize("reward", ["add_advantage", "modulate", "own_parts:gate"])
def test_every_rule_takes_the_name_of_an_advantage(parts: None, reward: str) -> None:
    choice = f"{reward}(advantage=leave_one_out)"
    (term,) = Objective.model_validate({"signal": "sampled", "reward": choice}).losses
    assert term.reward_advantage == "leave_one_out"
    with pytest.raises(ValueError, match="no advantage named 'loo'"):
        Objective.model_validate({"signal": "sampled", "reward": f"{reward}(advantage=loo)"})


@pytest.mark.parametrize("reward", ["modulate(1.5)", "modulate(0.5, 1)"])
def test_a_number_outside_the_range_of_a_rule_is_refused(reward: str) -> None:
    with pytest.raises(ValueError, match=r"modulate needs strength in \[0, 1\]"):
        Objective.model_validate({"signal": "sampled", "reward": reward})
