"""Targets as parts: the properties of each, and a part of another package that is used like ours."""

import sys
from pathlib import Path

import pytest
import torch

from practicum.core.plugins import list_plugins, load_plugin
from practicum.objective import TARGETS, Objective, TargetCall

FILE = '''
"""A target for tests: the teacher with a floor under each probability."""

from typing import Literal

from practicum.objective import TargetCall


class Config(TargetCall):
    """`(1 - share) T + share / V`."""

    type: Literal["my_targets.floored"] = "my_targets.floored"
    share: float = 0.1

    def build(self, teacher, student, reference):
        """Return the mixture with the uniform distribution."""
        probs = (1 - self.share) * teacher.exp() + self.share / teacher.shape[-1]
        return probs.log(), None
'''


@pytest.mark.parametrize("name", list_plugins(TARGETS))
def test_a_target_is_a_distribution_of_the_models(name: str) -> None:
    target = load_plugin(TARGETS, name).Config()
    assert isinstance(target, TargetCall) and target.name == name
    models = [torch.randn(5, 7, dtype=torch.float64).log_softmax(-1) for _ in range(3)]
    built, size = target.build(*models)
    torch.testing.assert_close(built.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    assert (size is None) == (name != "contrast")
    if target.is_plain:
        assert built.equal(models[0])


def test_a_product_of_sampled_tokens_differs_by_a_constant_of_the_state() -> None:
    target = load_plugin(TARGETS, "log_linear").Config(teacher=0.6, student=0.3, reference=0.4)
    models = [torch.randn(5, 7, dtype=torch.float64).log_softmax(-1) for _ in range(3)]
    whole = target.build(*models)[0]
    columns = [target.combine(*(model[:, token] for model in models)) for token in range(7)]
    gap = torch.stack(columns, dim=-1) - whole
    torch.testing.assert_close(gap, gap[:, :1].expand_as(gap))


def test_a_target_of_another_package_is_named_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_targets").mkdir()
    (tmp_path / "my_targets" / "floored.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    (term,) = Objective.model_validate({"target": "my_targets.floored(0.2)"}).losses
    assert term.model_dump()["target"] == "my_targets.floored(share=0.2)"
    assert not term.targets_teacher
    with pytest.raises(ValueError, match="renormalised over the whole vocabulary"):
        Objective.model_validate({"target": "my_targets.floored", "signal": "sampled"})
    for name in [name for name in sys.modules if name.startswith("my_targets")]:
        del sys.modules[name]
