"""Settings that a service would silently ignore are named before a run: for our own service, and with SkyRL's limits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from service import LEFT_OPEN, Served, serving
from toy import curve, toy_run

from practicum.backends.local.hosted import LocalAdapters
from practicum.errors import CapabilityError, TeacherError
from practicum.ports import AdamParams
from practicum.remote.tinker import sampling
from practicum.server import training

pytestmark = [pytest.mark.long, LEFT_OPEN]
ALL = ["betas", "epsilon", "max_grad_norm", "weight_decay"]
SAMPLED = {"objective": {"signal": "sampled", "divergence": "reverse_kl"}}


@pytest.fixture(scope="module")
def served(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(models, tmp_path_factory.mktemp("served")) as served:
        yield served


def at(served: Served, **more: Any) -> dict[str, Any]:
    backend = {"type": "tinker", "url": served.url, **more}
    return {"student.model": "student", "student.lora": {"rank": 4}, "backend": backend}


def ignore(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the service take its steps without some of the settings that it receives."""
    step = LocalAdapters.optim_step
    unset = {
        name: AdamParams.__dataclass_fields__[name].default
        for name in names
        if name != "max_grad_norm"
    }
    if "max_grad_norm" in names:
        unset["max_grad_norm"] = float("inf")

    def by_itself(adapters: LocalAdapters, params: AdamParams) -> dict[str, float]:
        metrics = step(adapters, replace(params, **unset))
        return {("skyrl.ai/grad_norm" if k == "grad_norm" else k): v for k, v in metrics.items()}

    monkeypatch.setattr(LocalAdapters, "optim_step", by_itself)


def keep_last_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the service keep one target per token, the last, as in SkyRL's protocol."""
    check = training._check_datum

    def narrow(loss: Any, parameters: Any, datum: Any, where: str, base: Any) -> Any:
        inputs = {
            name: values[:, -1].contiguous() if values.dim() == 2 else values
            for name, values in datum.inputs.items()
        }
        return check(loss, parameters, replace(datum, inputs=inputs), where, base)

    monkeypatch.setattr(training, "_check_datum", narrow)


def test_our_own_service_does_what_it_is_sent(served: Served, models: Path, tmp_path: Path) -> None:
    changes = {**at(served), "objective": {"signal": "topk(4)"}, "train.steps": 1}
    assert curve(toy_run(models, tmp_path, changes).folder, "grad_norm")[0] > 0


@pytest.mark.parametrize("name", ALL)
def test_each_setting_that_is_ignored_is_named(
    served: Served, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ignore(monkeypatch, name)
    with pytest.raises(CapabilityError, match=f"ignores optimizer settings: {name}; "):
        toy_run(models, tmp_path, {**at(served), **SAMPLED})


def test_a_service_with_skyrls_limits_trains_on_sampled_tokens_once_its_settings_are_named(
    served: Served, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore(monkeypatch, *ALL)
    keep_last_target(monkeypatch)
    sampled = {**SAMPLED, "train.steps": 2}
    with pytest.raises(CapabilityError, match=r"ignores optimizer settings: .*backend\.fixed: \["):
        toy_run(models, tmp_path / "refused", {**at(served), **sampled})
    folder = toy_run(models, tmp_path / "run", {**at(served, fixed=ALL), **sampled}).folder
    assert min(curve(folder, "grad_norm")) > 0, "read from skyrl.ai/grad_norm"
    with pytest.raises(CapabilityError, match=r"service at .* two targets .* set signal: sampled"):
        toy_run(
            models,
            tmp_path / "candidates",
            {**at(served, fixed=ALL), "objective": {"signal": "topk(4)"}},
        )


def test_a_teacher_that_ignores_the_students_candidates_ends_the_run(
    served: Served, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A service that does not know the field answers as if it were missing.
    monkeypatch.setattr(sampling, "_build_targets", lambda *_: None)
    teacher = {"type": "tinker", "url": served.url, "model": "teacher"}
    with pytest.raises(TeacherError, match=r"lack the candidates .* set support=teacher"):
        toy_run(models, tmp_path, {"teacher": teacher, "objective": {"signal": "topk(4)"}})
