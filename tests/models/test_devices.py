"""What a device cannot do is said in one line."""

from pathlib import Path

import pytest
from toy import make_model, toy_run

from practicum.errors import ModelError
from practicum.models.devices import explain_missing_operations

NO_OPERATION = NotImplementedError(
    "The operator 'aten::_standard_gamma' is not currently implemented for the MPS device. If you want "
    "this op to be considered for addition please comment on an issue.\nWARNING: this will be slower"
)
NO_FLOAT64 = TypeError(
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)


@pytest.mark.parametrize(
    ("error", "missing"), [(NO_OPERATION, "aten::_standard_gamma"), (NO_FLOAT64, "float64")]
)
def test_an_operation_that_mps_lacks_is_named_in_one_line(error: Exception, missing: str) -> None:
    line = f"device is 'mps', and this torch has no {missing} there; set device: cpu"
    with pytest.raises(ModelError) as refused, explain_missing_operations():
        raise error
    assert str(refused.value) == line


@pytest.mark.parametrize("error", [TypeError("not a text"), NotImplementedError("of ours")])
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explain_missing_operations():
        raise error
    assert raised.value is error


def test_a_run_ends_with_this_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("student", "teacher"):
        make_model(tmp_path / name)

    def fail(*_: object, **__: object) -> None:
        raise NO_OPERATION

    monkeypatch.setattr("practicum.runs.session.train", fail)
    with pytest.raises(ModelError, match=r"^device is 'mps', and this torch has no aten::"):
        toy_run(tmp_path, tmp_path / "runs")
