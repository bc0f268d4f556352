"""Pictures in prompts: what transformers computes from its own processor, in each family."""

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from picture_files import draw_picture, write_url
from pydantic import ValidationError
from vision_checks import ANSWER, compare_with_processor, get_pictures, score
from vision_models import FAMILIES, build_vision_model

from practicum.backends._sharded.building import load_in_shards
from practicum.backends.local.ending import load_ending
from practicum.backends.local.export import export
from practicum.backends.local.loading import LoadedModel, add_pictures, load, load_student
from practicum.backends.local.newest import NewestEntries
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.pictures import Media
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer
from practicum.errors import ModelError
from practicum.models.config import Lora, ModelConfig, StudentConfig
from practicum.objective import Objective, Sampled
from practicum.pictures import is_picture
from practicum.ports import AdamParams
from practicum.prompts import Message, Prompt
from practicum.text import Renderer
from practicum.types import (
    Datum,
    Rollout,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

WIDE, TALL = write_url(draw_picture(0, 84, 56)), write_url(draw_picture(1, 56, 84))
QUESTION = (Message("user", "<image>how many?", images=(WIDE,)),)
OTHER = (Message("user", "<image>how many?", images=(TALL,)),)
TWO = (
    Message("user", "is <image>so?", images=(WIDE,)),
    Message("assistant", "no"),
    Message("user", "and <image> and<image>", images=(TALL, WIDE)),
)
TEXT = (Message("user", "how?"),)
PROMPTS = (QUESTION, TEXT, OTHER, TWO)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return open_model(request.param, tmp_path_factory.getbasetemp())


@cache
def open_model(family: str, folder: Path) -> LoadedModel:
    source = build_vision_model(folder / f"vision-{family}", family)
    return add_pictures(load(ModelConfig(model=str(source))))


@torch.no_grad()
def test_a_prompt_has_the_processors_tokens_and_the_models_own_logprobs(
    loaded: LoadedModel,
) -> None:
    for prompt, actual in zip(PROMPTS, score(loaded, PROMPTS, ANSWER), strict=True):
        compare_with_processor(loaded, prompt, actual)


def test_a_reply_with_pictures_continues_the_prompt_as_the_template_writes_both(
    loaded: LoadedModel,
) -> None:
    renderer = loaded.renderer
    prompt, answer, reply = TWO[:1], TWO[1], TWO[2]
    stop = renderer.encode_answer(prompt, answer, 100)
    tokens = (*renderer.render(prompt), *stop, *renderer.render_reply(reply))
    assert tokens == renderer.render(TWO)
    # The cached reply of a text with the same words has its own picture.
    other = replace(reply, images=(WIDE, WIDE))
    assert renderer.render_reply(other) != renderer.render_reply(reply)
    written = Message("user", get_pictures(loaded).place)
    assert not any(map(is_picture, renderer.render_reply(written)))


@torch.no_grad()
def test_a_continued_conversation_is_sampled_and_scored_as_its_whole_text(
    loaded: LoadedModel,
) -> None:
    """After a reply with pictures, sampled tokens have the log-probabilities of one pass over the text."""
    renderer, model = loaded.renderer, loaded.language_model
    prompt = renderer.render(TWO[:1])
    between = (*renderer.encode_answer(TWO[:1], TWO[1], 100), *renderer.render_reply(TWO[2]))
    params = SamplingParams(max_new_tokens=4, stop_ids=frozenset())
    sampler = LocalSampler(model)
    (sample,) = sampler.sample([SampleRequest((*prompt, *between), 3)], params)
    written = (*between, *sample.tokens.tolist())
    (signal,) = sampler.score([ScoreRequest(prompt, written)], Sampled())
    assert signal.logprobs is not None
    torch.testing.assert_close(signal.logprobs[-4:], sample.policy_logprobs, atol=2e-4, rtol=0)


def test_a_written_placeholder_is_text(loaded: LoadedModel) -> None:
    place = get_pictures(loaded).place
    turns = (*QUESTION, Message("assistant", f"a {place} b"), *TEXT)
    tokens = loaded.renderer.render(turns)
    assert tokens.count(tokens[[*map(is_picture, tokens)].index(True)]) == sum(
        map(is_picture, loaded.renderer.render(QUESTION))
    )
    assert get_pictures(loaded)._image_id not in tokens


@torch.no_grad()
def test_a_text_is_read_as_by_the_language_part_alone(loaded: LoadedModel) -> None:
    (actual,) = score(loaded, [TEXT], (8, 9))
    model: Any = loaded.language_model.model
    ids = torch.tensor([[*loaded.renderer.render(TEXT), 8, 9]])
    states = model.get_decoder()(input_ids=ids).last_hidden_state
    expected = model.get_output_embeddings()(states)[0, -3:-1].log_softmax(-1)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


@torch.no_grad()
def test_the_same_picture_gives_kl_zero_and_another_does_not(loaded: LoadedModel) -> None:
    first, again, other = score(loaded, [QUESTION, QUESTION, OTHER], (8, 9))
    assert torch.equal(first, again)
    kl = (first.exp() * (first - other)).sum(dim=-1)
    assert (kl > 1e-4).all(), kl


def sample(loaded: LoadedModel, prompts: Any, rows: int = 8) -> list[Any]:
    requests = [SampleRequest(loaded.renderer.render(prompt), len(prompt)) for prompt in prompts]
    return LocalSampler(loaded.language_model, batch_size=rows).sample(requests, SamplingParams(12))


def test_sampled_logprobs_are_those_of_a_forward_pass(loaded: LoadedModel) -> None:
    samples = sample(loaded, PROMPTS)
    requests = [
        ScoreRequest(loaded.renderer.render(prompt), tuple(sample.tokens.tolist()))
        for prompt, sample in zip(PROMPTS, samples, strict=True)
    ]
    signals = LocalSampler(loaded.language_model).score(requests, Sampled())
    for sampled, signal in zip(samples, signals, strict=True):
        torch.testing.assert_close(sampled.policy_logprobs, signal.logprobs, atol=5e-5, rtol=0)
        assert get_pictures(loaded).banned_ids.isdisjoint(sampled.tokens.tolist())


def test_the_batch_does_not_change_a_text(loaded: LoadedModel) -> None:
    together = sample(loaded, PROMPTS)
    for rows, prompts in ((8, PROMPTS[::-1]), (1, PROMPTS[::-1]), (2, (*PROMPTS, *PROMPTS)[::-1])):
        for sampled, expected in zip(sample(loaded, prompts, rows)[::-1], together, strict=False):
            assert torch.equal(sampled.tokens, expected.tokens)


def test_tokens_of_pictures_are_never_sampled(loaded: LoadedModel) -> None:
    pictures = get_pictures(loaded)
    weight = loaded.language_model.head().weight
    saved = weight.detach().clone()
    with torch.no_grad():
        weight[sorted(pictures.banned_ids)] *= 50
    try:
        tokens = {token for sampled in sample(loaded, PROMPTS) for token in sampled.tokens.tolist()}
    finally:
        with torch.no_grad():
            weight.copy_(saved)
    assert pictures.banned_ids.isdisjoint(tokens)


@pytest.mark.parametrize("settings", [{"lora": {"rank": 2}}, {}, {"trainable_layers": 1}])
def test_only_the_language_part_is_trained(loaded: LoadedModel, settings: dict[str, Any]) -> None:
    config = StudentConfig.model_validate({"model": loaded.source, **settings})
    student = add_pictures(load_student(config, 0)).language_model
    model: Any = student.model
    decoder = set(map(id, model.get_decoder().parameters()))
    head = set(map(id, model.get_output_embeddings().parameters()))
    trained = student.trainable_parameters()
    assert trained
    assert {id(weight) for weight in trained.values()} <= decoder | head
    request = ScoreRequest(loaded.renderer.render(QUESTION), (8, 9))
    # The student's own renderer knows the picture.
    student.pictures.read(WIDE)  # type: ignore[union-attr]
    compute_hidden_states(student, [request]).square().sum().backward()
    assert all(
        weight.grad is None for weight in student.model.parameters() if not weight.requires_grad
    )
    assert any(weight.grad is not None and weight.grad.any() for weight in trained.values())


def test_the_encoder_learns_only_if_the_recipe_says_so(loaded: LoadedModel, models: Path) -> None:
    config = StudentConfig(model=loaded.source, train_encoder=True)
    student = add_pictures(load_student(config, 0)).language_model
    model: Any = student.model
    assert set(map(id, student.trainable_parameters().values())) == set(map(id, model.parameters()))
    student.pictures.read(WIDE)  # type: ignore[union-attr]
    request = ScoreRequest(loaded.renderer.render(QUESTION), (8, 9))
    compute_hidden_states(student, [request]).square().sum().backward()
    decoder = set(map(id, model.get_decoder().parameters()))
    others = [weight for weight in model.parameters() if id(weight) not in decoder]
    assert any(weight.grad is not None and weight.grad.any() for weight in others)
    with pytest.raises(ModelError, match=r"train_encoder: .* reads only text; remove the key"):
        load_student(StudentConfig(model=str(models / "student"), train_encoder=True), 0)
    with pytest.raises(ValidationError, match="train_encoder: only with all weights"):
        StudentConfig(model="any", train_encoder=True, trainable_layers=1)


def test_newest_pictures_are_kept_and_others_are_computed_again(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = score(loaded, PROMPTS, (8, 9))
    monkeypatch.setattr(get_pictures(loaded), "_newest", NewestEntries[int, Media](0))
    with torch.no_grad():
        for first, again in zip(before, score(loaded, PROMPTS, (8, 9)), strict=True):
            assert torch.equal(first, again)


def test_a_model_that_reads_text_refuses_pictures(loaded: LoadedModel) -> None:
    renderer = Renderer(loaded.renderer.tokenizer, stop_ids=loaded.renderer.stop_ids)
    with pytest.raises(
        ModelError, match="a prompt has pictures or sounds, and they are not read here"
    ):
        renderer.render(QUESTION)


@torch.no_grad()
def test_without_pictures_texts_are_packed_with_the_same_numbers(loaded: LoadedModel) -> None:
    plain = load(ModelConfig(model=loaded.source))
    assert plain.language_model.pictures is None
    # Gemma 3 packs texts within its window, and these texts are shorter.
    assert plain.language_model.max_packed_tokens > 0
    prompts = [TEXT, (Message("user", "is it so?"),)]
    for packed, alone in zip(
        score(plain, prompts, (8, 9)), score(loaded, prompts, (8, 9)), strict=True
    ):
        torch.testing.assert_close(packed, alone, atol=2e-5, rtol=0)


def test_a_model_of_pictures_is_not_split_between_processes(loaded: LoadedModel) -> None:
    with pytest.raises(ModelError, match="a model of pictures is not split between processes"):
        load_in_shards(ModelConfig(model=loaded.source))


def test_the_head_of_a_model_of_pictures_is_not_read_alone(loaded: LoadedModel) -> None:
    with pytest.raises(ModelError, match="the head of a model of pictures is not read apart"):
        load_ending(ModelConfig(model=loaded.source))


def test_an_export_loads_with_the_same_logits(loaded: LoadedModel, tmp_path: Path) -> None:
    student = load_student(StudentConfig(model=loaded.source, lora=Lora(rank=2)), 0)
    with torch.no_grad():
        for weight in student.language_model.trainable_parameters().values():
            weight += 0.1
    export(student, tmp_path)
    again = add_pictures(load(ModelConfig(model=str(tmp_path))))
    seeing = add_pictures(student)
    with torch.no_grad():
        for expected, actual in zip(
            score(seeing, PROMPTS, (8, 9)), score(again, PROMPTS, (8, 9)), strict=True
        ):
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


def test_a_resumed_step_has_the_same_bytes(loaded: LoadedModel) -> None:
    students = [add_pictures(load_student(StudentConfig(model=loaded.source), 0)) for _ in range(2)]
    first, again = (LocalTrainer(student.language_model) for student in students)
    take_step(first, students[0], 0)
    again.load_state(copy.deepcopy(first.save_state()))
    for trainer, student in zip((first, again), students, strict=True):
        take_step(trainer, student, 1)
    expected, actual = first.save_state()["student"], again.save_state()["student"]
    assert all(torch.equal(weight, actual[name]) for name, weight in expected.items())


def take_step(trainer: LocalTrainer, student: LoadedModel, number: int) -> None:
    """Do one step of likelihood on two answers to pictures."""
    data = [
        Datum(
            Rollout(
                Prompt(str(place), prompt),
                student.renderer.render(prompt),
                torch.tensor([8 + number, 9]),
                torch.ones(2, dtype=torch.bool),
                torch.zeros(2),
                torch.zeros(2),
                0,
                "stop",
                "",
            ),
            TeacherSignal(),
        )
        for place, prompt in enumerate((QUESTION, OTHER))
    ]
    objective = Objective.model_validate({"signal": "text", "divergence": "ce"})
    trainer.forward_backward(data, objective, number)
    assert trainer.optim_step(AdamParams(0.01))["skipped"] == 0


def test_other_types_of_models_are_refused_by_name(tmp_path: Path) -> None:
    folder = build_vision_model(tmp_path, "idefics3")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "aya_vision"}))
    with pytest.raises(ModelError, match="aya_vision reads pictures, and is not supported yet"):
        load(ModelConfig(model=str(folder)))
