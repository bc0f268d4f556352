"""The student that learns is the same function that samples; dropout of a config is off unless it is requested."""

import pytest
import torch

from practicum.backends.local import Config, build
from practicum.core.notes import show_notes
from practicum.models.config import StudentConfig
from practicum.objective import Objective
from practicum.ports import BackendContext, SampleRequest, SamplingParams
from practicum.types import Datum, Prompt, Rollout

from .folders import model_folder
from .mixtures import family_folder
from .toys import toy_data

NOISY = {
    "gpt2": {},
    "seed_oss": {},
    "mixtral": {"router_jitter_noise": 0.3},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
}
"""Families with the settings that make them noisy in training; the first two are noisy by default."""


def learner(folder, **choices):
    """Return the student with the notes from its creation."""
    remarks: list[str] = []
    context = BackendContext(0, folder, nothing, nothing)
    with show_notes(remarks.append):
        student = build(Config(), context).load_student(StudentConfig(model=str(folder), **choices))
    return student, remarks[1:]  # the first remark reports the loaded model


def nothing():
    raise AssertionError("a model folder needs no task and no other backend")


def sampled(trainer, folder) -> list[Datum]:
    """Sample completions of the student, with a teacher's signal for completions of the same lengths."""
    data = toy_data(folder)
    requests = [
        SampleRequest(datum.rollout.prompt_tokens, number) for number, datum in enumerate(data)
    ]
    samples = trainer.build_sampling_client().sample(requests, SamplingParams(6))
    return [
        Datum(
            Rollout(
                prompt=Prompt(str(number), ()),
                prompt_tokens=datum.rollout.prompt_tokens,
                tokens=sample.tokens,
                loss_mask=torch.ones(6, dtype=torch.bool),
                sampling_logprobs=sample.sampling_logprobs,
                policy_logprobs=sample.policy_logprobs,
                policy_version=0,
                stop_reason="length",
                text="",
            ),
            datum.signal,
        )
        for number, (datum, sample) in enumerate(zip(data, samples, strict=True))
        if len(sample.tokens) == 6
    ]


@pytest.mark.parametrize("family", NOISY)
def test_the_learner_gives_tokens_the_probability_that_the_sampler_gave_them(tmp_path, family):
    folder = family_folder(tmp_path / "model", family, **NOISY[family])
    quiet, remarks = learner(folder)
    result = quiet.trainer.forward_backward(sampled(quiet.trainer, folder), Objective(), 0)
    assert result.metrics["sampler_mismatch"] < 1e-5
    assert remarks == [
        f"student: the config of {folder} asks for dropout or a router's noise in training, which is left off; set "
        "student.dropout: true to train with it"
    ]
    noisy, remarks = learner(folder, dropout=True)
    result = noisy.trainer.forward_backward(sampled(noisy.trainer, folder), Objective(), 0)
    assert result.metrics["sampler_mismatch"] > 1e-3
    assert remarks == []


def test_of_a_model_without_noise_nothing_is_said(tmp_path):
    _, remarks = learner(model_folder(tmp_path / "model"))
    assert remarks == []


def test_dropout_of_a_from_scratch_model_is_like_any_other(tmp_path):
    folder = model_folder(tmp_path / "model", dropout=0.3)
    built, remarks = learner(folder)
    assert len(remarks) == 1
    result = built.trainer.forward_backward(sampled(built.trainer, folder), Objective(), 0)
    assert result.metrics["sampler_mismatch"] < 1e-5
