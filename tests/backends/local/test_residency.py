"""A model that is loaded for each call gives, bit for bit, the results of a resident model, and leaves nothing in memory."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy import in_check

from backends.folders import TOKENS, change_weights, model_folder
from backends.toys import toy_data
from practicum.backends.local import prepared
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import load
from practicum.backends.local.residency import OffloadedHead, build_scorer
from practicum.backends.local.trainer import LocalTrainer
from practicum.errors import ModelError
from practicum.functional.head import Head
from practicum.models.config import ModelConfig, ScorerConfig
from practicum.objective import Full, Objective, Sampled
from practicum.ports import MixedRequest, MixtureRule, SampleRequest, SamplingClient
from practicum.types import HeadLike, SamplingParams, ScoreRequest

SHAPES = {
    "tied": {},
    "padded rows": {"padded_vocabulary": 32},
    "capped logits": {"architecture": "gemma3"},
    "qwen3": {"architecture": "qwen3"},
}
REQUESTS = [
    ScoreRequest((3, 4, 5), (6, 7, 8, 9)),
    ScoreRequest((5,), (4,)),
    ScoreRequest((3, 4), (9, 10)),
]


@pytest.fixture(params=in_check(SHAPES, "padded rows"))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model", **SHAPES[request.param])


def client(folder: Path, residency: str, **settings: str) -> SamplingClient:
    config = ScorerConfig.model_validate(
        {"model": str(folder), "device": "cpu", "residency": residency, **settings}
    )
    return build_scorer(load(config), config, batch_size=2, chunk_tokens=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("residency", ["swap", "disk"])
@pytest.mark.parametrize("layout", [False, True], ids=["own maps", "prepacked maps"])
def test_scores_are_those_of_the_resident_model_bit_for_bit(
    folder: Path, residency: str, dtype: str, layout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "count_cached_bytes", lambda weights: layout * weights)
    resident, visiting = (
        client(folder, "resident", dtype=dtype),
        client(folder, residency, dtype=dtype),
    )
    for _ in range(2):
        for one, other in zip(
            resident.score(REQUESTS, Full()), visiting.score(REQUESTS, Full()), strict=True
        ):
            assert other.hidden.equal(one.hidden)
            assert other.head.logprobs(other.hidden).equal(one.head.logprobs(one.hidden))
            assert other.head.vocab_size == TOKENS
        for one, other in zip(
            resident.score(REQUESTS, Sampled()), visiting.score(REQUESTS, Sampled()), strict=True
        ):
            assert other.logprobs.equal(one.logprobs)


@pytest.mark.parametrize("residency", ["swap", "disk"])
def test_it_writes_what_the_resident_model_writes(folder: Path, residency: str) -> None:
    resident, visiting = client(folder, "resident"), client(folder, residency)
    requests = [SampleRequest((3, 4, 5), 1), SampleRequest((5,), 2), SampleRequest((3,), 3)]
    params = SamplingParams(6)
    for one, other in zip(
        resident.sample(requests, params), visiting.sample(requests, params), strict=True
    ):
        assert other.tokens.equal(one.tokens)
        assert other.policy_logprobs.equal(one.policy_logprobs)


@pytest.mark.parametrize("residency", ["resident", "swap", "disk"])
def test_it_stops_at_a_text(folder: Path, residency: str) -> None:
    visiting, asked = client(folder, residency), [SampleRequest((3, 4, 5), 1)]
    (free,) = visiting.sample(asked, SamplingParams(6))
    text = load(ModelConfig(model=str(folder), device="cpu")).renderer.tokenizer.decode(
        free.tokens[:1]
    )
    (sample,) = visiting.sample(asked, SamplingParams(6, stop_texts=(text,)))
    assert sample.tokens.equal(free.tokens[:1]) and sample.stop_reason == "stop"


@pytest.mark.parametrize("residency", ["resident", "swap", "disk"])
def test_it_decodes_together_with_another_model(folder: Path, residency: str) -> None:
    visiting, student = client(folder, residency), client(folder, "resident")
    assert visiting.decodes_by_token and student.decodes_by_token
    requests = [MixedRequest((3, 4), (5, 6, 7), 1), MixedRequest((3,), (4,), 2)]
    written = student.sample_mixed(requests, visiting, MixtureRule(0.5), SamplingParams(5))
    expected = student.sample_mixed(requests, student, MixtureRule(0.5), SamplingParams(5))
    assert [sample.tokens.tolist() for sample in written] == [
        sample.tokens.tolist() for sample in expected
    ]
    assert [
        len(sample.tokens)
        for sample in visiting.sample_mixed(requests, student, MixtureRule(0.5), SamplingParams(5))
    ] == [5, 5]


@pytest.mark.parametrize("residency", ["swap", "disk"])
def test_no_requests_fetch_nothing(
    folder: Path, residency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    visiting = client(folder, residency)
    for path in folder.glob("*"):
        path.unlink()
    assert visiting.score([], Full()) == []
    assert visiting.sample([], SamplingParams(3)) == []


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> "weakref.WeakSet[torch.nn.Module]":
    """Return the modules of every language model that is still held."""
    held: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    made = LanguageModel.__init__

    def init(self: LanguageModel, model: torch.nn.Module, *rest: object, **named: object) -> None:
        held.add(model)
        made(self, model, *rest, **named)

    monkeypatch.setattr(LanguageModel, "__init__", init)
    return held


def test_nothing_of_a_model_on_disk_stays_in_memory(
    folder: Path, alive: "weakref.WeakSet[torch.nn.Module]"
) -> None:
    gc.disable()  # dropped only by reference counting, so immediately
    try:
        visiting = client(folder, "disk")
        assert not alive
        answers = visiting.score(REQUESTS, Full())
        assert not alive
        assert visiting.sample([SampleRequest((3,), 1)], SamplingParams(2))
        answers[0].head.logprobs(answers[0].hidden)
        assert not alive
        reading = visiting.open_decode_batch([(3, 4)], 1, 4)
        assert len(alive) == 1, "a reading needs its model"
        del reading
        assert not alive
    finally:
        gc.enable()


def test_a_resident_model_stays(folder: Path, alive: "weakref.WeakSet[torch.nn.Module]") -> None:
    resident = client(folder, "resident")
    assert resident.score(REQUESTS, Full())
    assert len(alive) == 1


def stored_head(calls: list[int]) -> OffloadedHead:
    def fetch() -> Head:
        calls.append(1)
        return Head(torch.eye(4), 4)

    return OffloadedHead(4, fetch)


def test_a_stored_head_is_fetched_when_it_is_read_and_again_after_its_release() -> None:
    calls: list[int] = []
    head = stored_head(calls)
    hidden = torch.randn(2, 4)
    assert not calls
    expected = Head(torch.eye(4), 4).logprobs(hidden)
    assert head.logprobs(hidden).equal(expected)
    assert head.logprobs(hidden[0]).equal(expected[0])
    assert len(calls) == 1
    key = head.key
    head.release()
    assert head.logprobs(hidden).equal(expected)
    assert len(calls) == 2
    assert head.key == key != stored_head(calls).key


def test_both_kinds_of_heads_are_heads() -> None:
    head = Head(torch.eye(4), 3)
    assert isinstance(head, HeadLike) and isinstance(stored_head([]), HeadLike)
    assert head.key == Head(head.weight, 3).key != Head(head.weight, 4).key
    head.release()
    assert head.logprobs(torch.ones(4)).shape == (3,)


def test_every_answer_of_one_teacher_shares_its_head_and_two_teachers_do_not(folder: Path) -> None:
    one, other = client(folder, "disk"), client(folder, "disk")
    keys = {
        answer.head.key for answer in (*one.score(REQUESTS, Full()), *one.score(REQUESTS, Full()))
    }
    assert len(keys) == 1
    assert keys.isdisjoint({answer.head.key for answer in other.score(REQUESTS, Full())})


def test_a_trainer_learns_the_same_from_a_model_on_disk(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    data = toy_data(folder)
    requests = [
        ScoreRequest(item.prompt_tokens, tuple(item.tokens.tolist()))
        for item in (d.rollout for d in data)
    ]
    gradients = []
    for residency in ("resident", "swap", "disk"):
        answers = client(folder, residency).score(requests, Full())
        student = load(ModelConfig(model=str(folder), device="cpu")).language_model
        student.model.requires_grad_(True)
        torch.nn.init.normal_(
            student.model.model.norm.weight, generator=torch.Generator().manual_seed(0)
        )
        learned = [
            replace(datum, signal=answer) for datum, answer in zip(data, answers, strict=True)
        ]
        LocalTrainer(student).forward_backward(learned, Objective(), seed=0)
        gradients.append(student.model.get_input_embeddings().weight.grad)
    assert gradients[0].abs().sum() > 0
    assert gradients[1].equal(gradients[0]) and gradients[2].equal(gradients[0])


def test_a_head_that_the_folder_does_not_hold_as_it_is_used_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    config = ScorerConfig(model=str(folder), device="cpu", residency="disk")
    loaded = load(config)
    change_weights(folder, lambda weights: weights["model.embed_tokens.weight"].mul_(2))
    with pytest.raises(
        ModelError, match=r"weights of the head \(.*embed_tokens.*set residency: swap or resident"
    ):
        build_scorer(loaded, config, 2, 3)


def test_the_head_is_found_among_several_files(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    model = load(ScorerConfig(model=str(folder))).language_model.model
    weights = {
        name: weight.clone() for name, weight in model.state_dict().items()
    }  # of the file that is now replaced
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, state_dict=weights, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    expected = client(folder, "resident").score(REQUESTS, Full())
    for one, other in zip(expected, client(folder, "disk").score(REQUESTS, Full()), strict=True):
        assert other.head.logprobs(other.hidden).equal(one.head.logprobs(one.hidden))


def test_weights_of_half_precision_on_disk_are_read_as_the_model_reads_them(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    change_weights(
        folder, lambda weights: weights.update({name: w.bfloat16() for name, w in weights.items()})
    )
    assert all(
        weight.dtype == torch.bfloat16
        for weight in load_file(folder / "model.safetensors").values()
    )
    for one, other in zip(
        client(folder, "resident").score(REQUESTS, Full()),
        client(folder, "disk").score(REQUESTS, Full()),
        strict=True,
    ):
        assert other.head.logprobs(other.hidden).equal(one.head.logprobs(one.hidden))


@pytest.mark.gpu
def test_swapped_out_the_weights_are_in_cpu_memory_and_swapped_in_on_the_device(
    tmp_path: Path,
) -> None:
    folder = model_folder(tmp_path / "model")
    config = ScorerConfig(model=str(folder), residency="swap")
    resident, visiting = (
        client(folder, "resident", device="cuda"),
        build_scorer(load(config), config, 2, 3),
    )
    before = torch.cuda.memory_allocated()
    answers = visiting.score(REQUESTS, Full())
    for one, other in zip(resident.score(REQUESTS, Full()), answers, strict=True):
        assert other.hidden.is_cuda and other.hidden.equal(one.hidden)
        assert other.head.logprobs(other.hidden).equal(one.head.logprobs(one.hidden))
        other.head.release()
    del answers, one, other
    assert torch.cuda.memory_allocated() <= before
