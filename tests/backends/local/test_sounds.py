"""Sounds in prompts: what transformers computes from its own processor, in each family."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sound_files import write_sound_url

from practicum.backends.local.loading import LoadedModel, add_pictures, load, load_student
from practicum.backends.local.pictures import SOUND_FAMILIES
from practicum.backends.local.sampler import LocalSampler
from practicum.errors import ModelError
from practicum.models.config import ModelConfig, StudentConfig
from practicum.objective import Sampled
from practicum.pictures import is_picture, load_picture
from practicum.prompts import Message
from practicum.sounds import RATE
from practicum.types import ScoreRequest
from tests.backends.local.test_pictures import WIDE, get_pictures, sample, score
from tests.toy import make_model

SHORT, LONG = write_sound_url(0), write_sound_url(1, 0.6)
QUESTION = (Message("user", "<audio>how?", images=(SHORT,)),)
OTHER = (Message("user", "<audio>how?", images=(write_sound_url(2),)),)
TWO = (
    Message("user", "is <audio>so?", images=(LONG,)),
    Message("assistant", "no"),
    Message("user", "and <audio> and<audio>", images=(SHORT, LONG)),
)
TEXT = (Message("user", "how?"),)
PROMPTS = (QUESTION, TEXT, OTHER, TWO)


@pytest.fixture(scope="module", params=SOUND_FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return open_model(request.param, tmp_path_factory.getbasetemp())


@cache
def open_model(family: str, folder: Path) -> LoadedModel:
    source = folder / f"speech-{family}"
    make_model(source, alphabet="abcdefghijklmnopqrstuvwxyz ?", architecture=family)
    loaded = add_pictures(load(ModelConfig(model=str(source))))
    with torch.no_grad():
        # The default scale leaves a tiny model's logits nearly flat.
        for weight in loaded.language_model.model.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    return loaded


@torch.no_grad()
def test_a_prompt_has_the_processors_tokens_and_the_models_own_logprobs(
    loaded: LoadedModel,
) -> None:
    answer = (8, 9, 10)
    pictures = get_pictures(loaded)
    model: Any = loaded.language_model.model
    processor: Any = pictures._processor
    for prompt, actual in zip(PROMPTS, score(loaded, PROMPTS, answer), strict=True):
        text = loaded.renderer._chat.write(prompt, "~").replace("~", "")
        sounds = [load_picture(sound)[1] for turn in prompt for sound in turn.images]
        # The processor of Audio Flamingo reads one sound per text.
        first, *pieces = text.split(pictures.place)
        outputs = [
            processor(
                audio=[sound],
                text=[pictures.place + piece],
                sampling_rate=RATE,
                add_special_tokens=False,
                return_tensors="pt",
            )
            for sound, piece in zip(sounds, pieces, strict=True)
        ]
        ids = processor.tokenizer(first, add_special_tokens=False)["input_ids"]
        ids = [*ids, *(token for output in outputs for token in output["input_ids"][0].tolist())]
        names = [name for output in outputs[:1] for name in output if "feature" in name]
        inputs = {name: torch.cat([output[name] for output in outputs]) for name in names}
        rendered = loaded.renderer.render(prompt)
        assert [pictures._image_id if is_picture(t) else t for t in rendered] == ids
        expected = model(input_ids=torch.tensor([[*ids, *answer]]), **inputs)
        expected = expected.logits[0, -4:-1].log_softmax(-1)
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


@torch.no_grad()
def test_a_text_is_read_as_by_the_language_part_alone(loaded: LoadedModel) -> None:
    (actual,) = score(loaded, [TEXT], (8, 9))
    model: Any = loaded.language_model.model
    states = model.get_decoder()(torch.tensor([[*loaded.renderer.render(TEXT), 8, 9]]))
    logits = model.get_output_embeddings()(states.last_hidden_state)
    torch.testing.assert_close(actual, logits[0, -3:-1].log_softmax(-1), atol=2e-5, rtol=0)


@torch.no_grad()
def test_the_same_sound_gives_kl_zero_and_another_does_not(loaded: LoadedModel) -> None:
    first, again, other = score(loaded, [QUESTION, QUESTION, OTHER], (8, 9))
    assert torch.equal(first, again)
    kl = (first.exp() * (first - other)).sum(dim=-1)
    assert (kl > 1e-4).all(), kl


def test_sampled_logprobs_are_those_of_a_forward_pass(loaded: LoadedModel) -> None:
    banned = get_pictures(loaded).banned_ids
    assert banned
    weight = loaded.language_model.head().weight
    with torch.no_grad():
        weight[sorted(banned)] *= 50
    samples = sample(loaded, PROMPTS)
    requests = [
        ScoreRequest(loaded.renderer.render(prompt), tuple(sample.tokens.tolist()))
        for prompt, sample in zip(PROMPTS, samples, strict=True)
    ]
    signals = LocalSampler(loaded.language_model).score(requests, Sampled())
    for sampled, signal in zip(samples, signals, strict=True):
        torch.testing.assert_close(sampled.policy_logprobs, signal.logprobs, atol=5e-5, rtol=0)
        assert banned.isdisjoint(sampled.tokens.tolist())
    for sampled, expected in zip(sample(loaded, PROMPTS[::-1])[::-1], samples, strict=True):
        assert torch.equal(sampled.tokens, expected.tokens)


def test_only_the_language_part_is_trained(loaded: LoadedModel) -> None:
    student = load_student(StudentConfig.model_validate({"model": loaded.source}), 0)
    model: Any = student.language_model.model
    language = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    assert set(student.language_model.trainable_parameters().values()) == language


def test_what_a_model_does_not_read_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ModelError, match=r"at most 1 seconds, and one has 1\.20; cut it"):
        loaded.renderer.render([Message("user", "<audio>", images=(write_sound_url(0, 1.2),))])
    with pytest.raises(ModelError, match="a prompt has pictures or sounds, and they are not read"):
        loaded.renderer.render([Message("user", "<image>", images=(WIDE,))])
