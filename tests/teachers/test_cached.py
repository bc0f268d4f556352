"""A cached teacher gives equal answers on misses and hits, asks its model once, and does not change a resumed run."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import rollout
from safetensors import safe_open
from teacher_services import Functions
from toy import (
    RecordingConsole,
    assert_same_run,
    curve,
    exit_status,
    forked,
    start_fork,
    toy_recipe,
    toy_run,
)

from practicum import functional as F
from practicum.backends.local.loading import load_student
from practicum.backends.local.trainer import LocalTrainer
from practicum.errors import RecipeError, TeacherError
from practicum.functional.head import Head
from practicum.models.config import ScorerConfig, StudentConfig
from practicum.objective import Full, Sampled, Signal, TopK
from practicum.ports import (
    Capabilities,
    Model,
    SamplingClient,
    TeacherContext,
)
from practicum.recipe import Recipe
from practicum.runs import evaluate
from practicum.teachers import privileged
from practicum.teachers.cached import (
    CachingClient,
    Config,
    ModelScores,
    build,
    restore_states,
    scale_states,
)
from practicum.teachers.model import compute_fingerprint
from practicum.teaching.scores import FULL, TEMPORARY, ScoreStore
from practicum.text import Renderer
from practicum.types import Message, Prompt, ScoreRequest, TeacherSignal

WIDTH, VOCABULARY = 16, 11
MIB = 2**20


@dataclass
class ServerGenerator(SamplingClient):
    """A model with answers that depend on the rest of the batch, as with rounding, but large enough to see."""

    asked: list[list[ScoreRequest]] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    size: float = 1.0
    topk: bool = False
    capabilities = Capabilities(signals=frozenset({"sampled", "topk", "full"}))

    def __post_init__(self) -> None:
        self.head = Head(
            torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0)), VOCABULARY
        )

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        self.asked.append(list(requests))
        company = sum(sum(request.tokens) + 7 * sum(request.prompt_tokens) for request in requests)
        return [
            self._answer(request, company + place, signal) for place, request in enumerate(requests)
        ]

    def _answer(self, request: ScoreRequest, seed: int, signal: Signal) -> TeacherSignal:
        length = len(request.tokens)
        numbers = (
            torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed)) * self.size
        )
        if signal.name == "sampled":
            return TeacherSignal(logprobs=-numbers[:, 0].abs())
        if self.topk:
            return TeacherSignal(
                topk_ids=torch.arange(3).expand(length, 3), topk_logprobs=-numbers[:, :3].abs()
            )
        return TeacherSignal(hidden=numbers.to(self.dtype), head=self.head)

    def sample(self, requests: object, params: object) -> list[Any]:
        raise AssertionError("nobody asked for that")


def client(folder: Path | None, bare: ServerGenerator, max_bytes: int = MIB) -> CachingClient:
    """Return a client as in a process that has just started."""
    return CachingClient(
        bare,
        lambda: ModelScores("model", None if folder is None else ScoreStore(folder, max_bytes)),
    )


def request(number: int, length: int = 4) -> ScoreRequest:
    return ScoreRequest(
        (1, 2, number), tuple((number + place) % VOCABULARY for place in range(length))
    )


def tensors(answer: TeacherSignal) -> list[torch.Tensor]:
    values = (answer.logprobs, answer.topk_ids, answer.topk_logprobs, answer.hidden)
    return [value for value in values if value is not None]


def same(one: Sequence[TeacherSignal], other: Sequence[TeacherSignal]) -> bool:
    return len(one) == len(other) and all(
        len(tensors(mine)) == len(tensors(theirs))
        and all(
            a.equal(b) and a.dtype == b.dtype
            for a, b in zip(tensors(mine), tensors(theirs), strict=True)
        )
        for mine, theirs in zip(one, other, strict=True)
    )


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# Answers


@pytest.mark.parametrize(
    ("signal", "bare"),
    [
        (Full(), ServerGenerator()),
        (Full(), ServerGenerator(size=1e30)),
        (Full(), ServerGenerator(size=1e-30)),
        (Full(), ServerGenerator(dtype=torch.bfloat16)),
        (Sampled(), ServerGenerator()),
        (TopK(k=3), ServerGenerator(topk=True)),
        (TopK(k=3), ServerGenerator()),
    ],
)
def test_a_hit_says_what_a_miss_said_to_the_bit_and_asks_nobody(
    tmp_path: Path, signal: Signal, bare: ServerGenerator
) -> None:
    requests = [request(number, length) for number, length in enumerate((4, 1, 9))]
    mine = client(tmp_path, bare)
    missed = mine.score(requests, signal)
    assert len(bare.asked) == 1
    assert same(missed, mine.score(requests, signal))
    assert same(missed[::-1], mine.score(requests[::-1], signal))
    assert len(bare.asked) == 1
    assert same(
        missed,
        client(None, ServerGenerator(dtype=bare.dtype, size=bare.size, topk=bare.topk)).score(
            requests, signal
        ),
    )
    assert (mine.counts.requests, mine.counts.hits) == (9, 6)


def test_a_process_that_begins_with_hits_asks_for_the_head_alone(tmp_path: Path) -> None:
    requests = [request(1), request(2)]
    missed = client(tmp_path, ServerGenerator()).score(requests, Full())
    bare = ServerGenerator()
    again = client(tmp_path, bare)
    found = again.score(requests, Full())
    assert same(missed, found) and all(answer.head is bare.head for answer in found)
    again.score(requests, Full())
    assert [[len(one.tokens) for one in call] for call in bare.asked] == [[1]]
    sampling = ServerGenerator()
    client(tmp_path, sampling).score([request(1)], Sampled())
    again = client(tmp_path, sampling)
    again.score([request(1)], Sampled())
    assert len(sampling.asked) == 1, "log-probabilities need no head"


def test_only_what_was_not_said_is_asked_and_equal_completions_once(tmp_path: Path) -> None:
    bare = ServerGenerator()
    mine = client(tmp_path, bare)
    mine.score([request(1)], Full())
    one, other, again, equal = mine.score([request(1), request(2), request(3), request(2)], Full())
    assert bare.asked[1] == [request(2), request(3)]
    assert same([other], [equal]) and not same([one], [other]) and not same([other], [again])


def test_what_another_kept_since_is_found(tmp_path: Path) -> None:
    bare = ServerGenerator()
    mine, other = client(tmp_path, bare), client(tmp_path, ServerGenerator())
    mine.score([request(1)], Full())
    said = other.score([request(2)], Full())
    assert same(said, mine.score([request(2)], Full())) and len(bare.asked) == 1


def test_no_requests_open_nothing() -> None:
    def never() -> ModelScores:
        raise AssertionError("nothing was asked")

    assert CachingClient(ServerGenerator(), never).score([], Full()) == []


def test_hidden_states_answer_every_question_about_candidates_but_not_the_sampled_token(
    tmp_path: Path,
) -> None:
    bare = ServerGenerator()
    mine = client(tmp_path, bare)
    said = mine.score([request(1)], Full())
    assert same(said, mine.score([request(1)], TopK(k=3)))
    assert len(bare.asked) == 1
    assert mine.score([request(1)], Sampled())[0].hidden is None
    assert len(bare.asked) == 2


def test_candidates_are_found_for_their_own_k_and_support_only(tmp_path: Path) -> None:
    bare = ServerGenerator(topk=True)
    mine = client(tmp_path, bare)
    for signal in (TopK(k=3), TopK(k=2), TopK(k=3, support="teacher"), TopK(k=3, tail="drop")):
        mine.score([request(1)], signal)
    assert len(bare.asked) == 3


def test_what_an_answer_depends_on_is_in_its_key() -> None:
    asked = ScoreRequest((1, 2), (3, 4))
    keys = [
        ModelScores(model, None).build_key(which, form)
        for model, which, form in [
            ("a", asked, "full"),
            ("b", asked, "full"),
            ("a", asked, "sampled"),
            ("a", ScoreRequest((1,), (2, 3, 4)), "full"),
            ("a", ScoreRequest((1, 2), (3, 5)), "full"),
            ("a", ScoreRequest((1, 2, 3, 4), ()), "full"),
        ]
    ]
    assert len(set(keys)) == len(keys)


def test_a_models_fingerprint_is_its_content_not_its_place(models: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(models / "teacher", tmp_path / "copy")
    known = compute_fingerprint(ScorerConfig(model=str(models / "teacher")))
    assert (
        compute_fingerprint(ScorerConfig(model=str(copy), residency="disk", system="other"))
        == known
    )
    assert compute_fingerprint(ScorerConfig(model=str(copy), dtype="bfloat16")) != known
    assert compute_fingerprint(ScorerConfig(model=str(models / "student"))) != known
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.5}))
    assert compute_fingerprint(ScorerConfig(model=str(copy))) != known
    assert compute_fingerprint(ScorerConfig(model="nobody/no-such-model")) != compute_fingerprint(
        ScorerConfig(model="smollm2")
    )


# The stored form.


@given(st.floats(-140, 127), st.integers(0, 2**31))
def test_scaled_hidden_states_lose_no_more_than_float16_and_never_overflow(
    magnitude: float, seed: int
) -> None:
    hidden = (
        torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed)).clamp(-0.99, 0.99)
        * 2.0**magnitude
    )
    half, exponents = scale_states(hidden)
    back = restore_states(half, exponents)
    assert torch.isfinite(half).all()
    largest = hidden.abs().amax(dim=-1, keepdim=True)
    bound = hidden.abs().double() * 2.0**-11 + largest.double() * 2.0**-38 + 2.0**-124
    assert ((back.double() - hidden.double()).abs() <= bound).all()
    assert restore_states(*scale_states(back)).equal(back), "rounding twice is rounding once"


def test_each_token_has_a_scale_of_its_own() -> None:
    hidden = torch.tensor([[1e30, -3e29], [2e-30, 1e-30], [0.0, 0.0], [1.0, -1.0]])
    half, exponents = scale_states(hidden)
    torch.testing.assert_close(restore_states(half, exponents), hidden, rtol=2**-11, atol=0)
    assert restore_states(half, exponents)[2:].equal(hidden[2:])


def test_sixteen_bits_are_kept_as_they_are(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        bare = ServerGenerator(dtype=dtype)
        (said,) = client(tmp_path / str(dtype), bare).score([request(1)], Full())
        (own,) = ServerGenerator(dtype=dtype).score([request(1)], Full())
        assert said.hidden is not None and own.hidden is not None
        assert said.hidden.dtype == dtype and said.hidden.equal(own.hidden)


def test_a_token_takes_two_bytes_a_width_and_at_most_sixteen(tmp_path: Path) -> None:
    bare = ServerGenerator()
    mine = client(tmp_path, bare)
    mine.score([request(number, 32) for number in range(16)], Full())
    assert mine.scores is not None
    tokens = 16 * 32
    assert mine.scores.tokens == tokens
    (file,) = files(tmp_path)
    assert mine.scores.size == file.stat().st_size <= (2 * WIDTH + 16) * tokens


def test_the_files_are_safetensors_that_anyone_reads(tmp_path: Path) -> None:
    said = client(tmp_path, ServerGenerator()).score([request(1, 4), request(2, 3)], Full())
    (path,) = files(tmp_path)
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("lengths").tolist() == [4, 3]
        hidden = restore_states(file.get_tensor("hidden"), file.get_tensor("exponents"))
    assert hidden.equal(torch.cat([answer.hidden for answer in said if answer.hidden is not None]))


def test_the_gradient_of_the_reverse_kl_is_that_of_float32_within_three_thousandths() -> None:
    generator = torch.Generator().manual_seed(0)
    width, vocabulary, tokens = 128, 2000, 64
    hidden = torch.randn(tokens, width, generator=generator)
    head = torch.randn(vocabulary, width, generator=generator) * 3.5 / width**0.5
    noise = torch.randn(tokens, vocabulary, generator=generator) * 0.7

    def gradient(states: torch.Tensor) -> torch.Tensor:
        teacher = torch.log_softmax(states @ head.T, dim=-1)
        logits = (hidden @ head.T + noise).requires_grad_()
        F.reverse_kl(torch.log_softmax(logits, dim=-1), teacher).sum().backward()
        assert logits.grad is not None
        return logits.grad

    exact, rounded = gradient(hidden), gradient(restore_states(*scale_states(hidden)))
    error = ((rounded - exact).norm() / exact.norm()).item()
    assert 0 < error <= 3e-3


# Resuming.

CALLS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=8)


def sized(numbers: Sequence[int]) -> list[ScoreRequest]:
    """Return completions of very different lengths, so that one that fits can follow one that does not."""
    return [request(number, 50 if number > 4 else 2) for number in numbers]


@pytest.mark.long
@settings(max_examples=100)
@given(CALLS, st.integers(800, 6000), st.data())
def test_a_run_that_goes_back_hears_what_it_heard_before(
    calls: list[list[int]], room: int, data: st.DataObject
) -> None:
    """Wherever a killed run resumes, and with any stored entries, it gets the answers of an uninterrupted run."""
    with tempfile.TemporaryDirectory() as place:
        whole = client(Path(place) / "whole", ServerGenerator(), room)
        heard = [whole.score(sized(call), Full()) for call in calls]
        first = 0
        for _ in range(3):
            mine = client(Path(place) / "killed", ServerGenerator(), room)
            last = data.draw(st.integers(first, len(calls)))
            for number in range(first, last):
                assert same(heard[number], mine.score(sized(calls[number]), Full()))
            first = data.draw(st.integers(0, last))
        mine = client(Path(place) / "killed", ServerGenerator(), room)
        for number in range(first, len(calls)):
            assert same(heard[number], mine.score(sized(calls[number]), Full()))


def test_when_a_call_does_not_fit_nothing_more_is_kept_and_that_is_said_once(
    tmp_path: Path, notes: list[str]
) -> None:
    mine = client(tmp_path, ServerGenerator(), 3000)
    small, large, later = [request(1)], [request(2, 200)], [request(3)]
    mine.score(small, Full())
    mine.score(large, Full())
    mine.score(later, Full())
    assert len(files(tmp_path)) == 1 and (tmp_path / FULL).is_file()
    assert len(notes) == 1 and notes[0].startswith(f"warning: {tmp_path}") and "is full" in notes[0]
    assert mine.counts.left_out == 2
    bare = ServerGenerator()
    again = client(tmp_path, bare, 3000)
    again.score(small, Full())
    again.score(later, Full())
    assert again.counts.hits == 1 and again.counts.left_out == 1 and len(notes) == 2


def test_a_call_with_numbers_that_are_none_is_not_kept(tmp_path: Path) -> None:
    for size in (float("nan"), float("inf")):
        mine = client(tmp_path, ServerGenerator(size=size))
        (said,) = mine.score([request(1)], Full())
        assert said.hidden is not None and not torch.isfinite(said.hidden).all()
    assert files(tmp_path) == []


EPOCHS = {
    "rollout.source": "dataset",
    "task.train_size": 12,
    "train.steps": 8,
    "train.prompts_per_step": 4,
    "train.checkpoint_every": 4,
}


def cached(models: Path, **settings: Any) -> dict[str, Any]:
    inner = {"type": "model", "model": str(models / "teacher")}
    return {**EPOCHS, "teacher": {"type": "cached", "teacher": inner, **settings}}


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run eight steps over three batches of a dataset without interruption."""
    return toy_run(models, tmp_path_factory.mktemp("whole"), cached(models)).folder


def stores(run: Path) -> list[Path]:
    return sorted((run / "scores").iterdir())


@pytest.mark.long
def test_epochs_over_a_dataset_are_scored_once(models: Path, whole: Path, tmp_path: Path) -> None:
    (store,) = stores(whole)
    assert len(files(store)) == 3, "the first epoch's three steps"
    plain = toy_run(models, tmp_path, EPOCHS).folder
    assert curve(whole, "reverse_kl") == pytest.approx(curve(plain, "reverse_kl"), rel=1e-3)


@pytest.mark.long
def test_it_says_at_the_end_how_much_was_there(models: Path, tmp_path: Path) -> None:
    console = RecordingConsole()
    toy_run(models, tmp_path, cached(models), console=console)
    assert any(
        "20 of 32 completions were scored before" in line and "bytes per token" in line
        for line in console.events
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        "score:2",
        "score:7",
        "update:6",
        "scores.before_rename:2",
        "save.after_rename:1",
        "rollout:8",
    ],
)
def test_killed_anywhere_the_resumed_run_is_the_same(
    models: Path, whole: Path, tmp_path: Path, fault: str
) -> None:
    assert (
        forked(lambda: toy_run(models, tmp_path, cached(models)), {"PRACTICUM_FAULT": fault}) == 137
    )
    resumed = toy_run(models, tmp_path, cached(models), resume=True).folder
    assert_same_run(whole, resumed)
    assert not list(resumed.rglob(f"*{TEMPORARY}"))


SHORT_FILLS = {(0.001, "full"), (0.003, "sampled")}
"""The sizes and signals that the suite tries; `make slow` tries all of them."""


@pytest.mark.parametrize(
    ("max_mib", "signal"),
    [
        pytest.param(
            size,
            signal,
            marks=pytest.mark.long if (size, signal) in SHORT_FILLS else pytest.mark.slow,
        )
        for size in (0.001, 0.003)
        for signal in ("full", "sampled", "topk(3)")
    ],
)
def test_full_in_the_middle_the_resumed_run_is_the_same(
    models: Path, tmp_path: Path, max_mib: float, signal: str
) -> None:
    changes = {
        **cached(models, max_mib=max_mib),
        "objective": {"signal": signal},
        "rollout.source": "student",
        "train.steps": 6,
        "train.checkpoint_every": 2,
    }
    one = toy_run(models, tmp_path / "whole", changes).folder
    out = tmp_path / "killed"
    assert forked(lambda: toy_run(models, out, changes), {"PRACTICUM_FAULT": "update:4"}) == 137
    assert (
        forked(lambda: toy_run(models, out, changes, resume=True), {"PRACTICUM_FAULT": "score:2"})
        == 137
    )
    assert_same_run(one, toy_run(models, out, changes, resume=True).folder)


@pytest.mark.long
def test_teacher_and_reference_share_a_folder_and_resume(models: Path, tmp_path: Path) -> None:
    teacher = cached(models)["teacher"]
    changes = {
        **cached(models),
        "reference": teacher,
        "objective": {
            "losses": [
                {"signal": "full", "divergence": "reverse_kl"},
                {
                    "signal": "full",
                    "divergence": "forward_kl",
                    "against": "reference",
                    "coefficient": 0.1,
                },
            ]
        },
    }
    one = toy_run(models, tmp_path / "whole", changes).folder
    assert len(files(stores(one)[0])) == 3
    assert (
        forked(lambda: toy_run(models, tmp_path / "cut", changes), {"PRACTICUM_FAULT": "score:6"})
        == 137
    )
    assert_same_run(one, toy_run(models, tmp_path / "cut", changes, resume=True).folder)


@pytest.mark.long
def test_an_evaluation_after_the_run_leaves_what_is_kept_as_it_is(
    models: Path, tmp_path: Path
) -> None:
    changes = {**cached(models), "train.steps": 3, "evaluation.prompts": 4}
    run = toy_run(models, tmp_path, changes).folder
    before = files(stores(run)[0])
    evaluate(run, ["seed=1"])
    assert files(stores(run)[0]) == before


# Files.


def flipped(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda path: os.truncate(path, path.stat().st_size - 1), "its length differs"),
    "empty": (lambda path: os.truncate(path, 0), "header does not match"),
    "another header": (lambda path: flipped(path, 20), "header does not match"),
    "an answer": (lambda path: flipped(path, path.stat().st_size - 20), "an answer does not match"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"0"), "its length differs"),
    "another file": (lambda path: path.write_text("hello"), "header does not match"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    client(tmp_path, ServerGenerator()).score([request(1), request(2)], Full())
    (path,) = files(tmp_path)
    damage, reason = DAMAGES[name]
    damage(path)
    with pytest.raises(
        TeacherError, match=rf"{path.name} is damaged \(.*{reason}.*delete it"
    ) as caught:
        client(tmp_path, ServerGenerator()).score([request(1), request(2)], Full())
    assert "\n" not in str(caught.value)
    path.unlink()
    assert client(tmp_path, ServerGenerator()).score([request(1), request(2)], Full())


def test_a_damaged_index_is_found(tmp_path: Path) -> None:
    client(tmp_path, ServerGenerator()).score([request(1)], Full())
    (path,) = files(tmp_path)
    flipped(path, 8 + int.from_bytes(path.read_bytes()[:8], "little") + 3)
    with pytest.raises(TeacherError, match="its index does not match"):
        client(tmp_path, ServerGenerator()).score([request(1)], Full())


def test_a_file_that_goes_while_it_is_known_is_named(tmp_path: Path) -> None:
    mine = client(tmp_path, ServerGenerator())
    mine.score([request(1)], Full())
    files(tmp_path)[0].unlink()
    with pytest.raises(TeacherError, match="cannot be read"):
        mine.score([request(1)], Full())


def test_files_of_others_and_what_a_dead_process_left_are_not_looked_at(tmp_path: Path) -> None:
    for name in ("notes.txt", "model.safetensors", f"{'a' * 64}.tmp", TEMPORARY):
        (tmp_path / name).write_text("not ours")
    said = client(tmp_path, ServerGenerator()).score([request(1)], Full())
    assert same(said, client(tmp_path, ServerGenerator()).score([request(1)], Full()))
    assert not (tmp_path / TEMPORARY).exists() and (tmp_path / "notes.txt").exists()


@pytest.mark.long
def test_two_processes_share_a_folder_and_every_answer_has_one_value(tmp_path: Path) -> None:
    def work(first: int) -> None:
        mine = client(tmp_path / "shared", ServerGenerator())
        for number in range(30):
            numbers = [(first * number + place) % 40 for place in range(5)]
            heard = mine.score([request(one) for one in numbers], Full())
            torch.save([answer.hidden for answer in heard], tmp_path / f"{first}-{number}.pt")

    pids = [
        start_fork(lambda first=first: work(first), output=tmp_path / f"out-{first}")
        for first in (3, 7)
    ]
    assert [exit_status(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0], (
        tmp_path / "out-3"
    ).read_text()
    later = client(tmp_path / "shared", ServerGenerator())
    for first in (3, 7):
        for number in range(30):
            numbers = [(first * number + place) % 40 for place in range(5)]
            found = later.score([request(one) for one in numbers], Full())
            heard = torch.load(tmp_path / f"{first}-{number}.pt")
            assert all(
                a.hidden is not None and a.hidden.equal(b)
                for a, b in zip(found, heard, strict=True)
            )
    assert later.counts.hits == later.counts.requests


def test_a_folder_that_cannot_be_written_stops_the_run_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file.*cannot be (kept|read)"):
        client(tmp_path / "file" / "scores", ServerGenerator()).score([request(1)], Full())


# Settings.

MODEL = {"type": "model", "model": "some/model"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "live": ({"teacher": {"type": "self", "weights": "live"}}, "live weights follows the student"),
    "ema": ({"teacher": {"type": "self", "weights": "ema"}}, "ema weights follows the student"),
    "periodic": ({"teacher": {"type": "self", "weights": "periodic"}}, "periodic weights follows"),
    "frozen": ({"teacher": {"type": "self"}}, r"name the student's model as \{type: model"),
    "self in a context": (
        {
            "teacher": {
                "type": "privileged",
                "teacher": {"type": "self", "weights": "ema"},
                "system": "s",
            }
        },
        "follows the student",
    ),
    "route": (
        {"teacher": {"type": "route", "teachers": {"a": MODEL}}},
        "put `cached` inside each member",
    ),
    "pool": (
        {"teacher": {"type": "pool", "teachers": {"a": MODEL}}},
        "put `cached` inside each member",
    ),
    "cached": ({"teacher": {"type": "cached", "teacher": MODEL}}, "already cached"),
    "none": ({"teacher": "none"}, "scores without a model"),
    "scripted": ({"teacher": {"type": "scripted", "tape": "t.jsonl"}}, "scores without a model"),
    "scratch": (
        {"teacher": {"type": "model", "model": {"seed": 1}}, "folder": "s"},
        "differs in every run",
    ),
    "nothing to hold": ({"teacher": MODEL, "max_mib": 0}, "greater than 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_in_one_line(models: Path, name: str) -> None:
    settings, text = REFUSED[name]
    with pytest.raises(RecipeError, match=text) as caught:
        toy_recipe(models, {"teacher": {"type": "cached", **settings}})
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


def test_a_member_of_a_route_or_a_pool_can_be_cached(models: Path) -> None:
    member = {"type": "cached", "teacher": MODEL}
    for kind in ("route", "pool"):
        recipe = toy_recipe(
            models, {"teacher": {"type": kind, "teachers": {"a": member, "b": {"type": "self"}}}}
        )
        assert isinstance(recipe, Recipe)


@pytest.fixture(scope="module")
def trainer(models: Path) -> tuple[LocalTrainer, Renderer]:
    loaded = load_student(StudentConfig(model=str(models / "student")), seed=0)
    return LocalTrainer(loaded.language_model), loaded.renderer


@pytest.fixture
def loading(
    trainer: tuple[LocalTrainer, Renderer], tmp_path: Path
) -> Callable[[ServerGenerator], TeacherContext]:
    """Return a context in which every model is the given client."""

    def context(bare: ServerGenerator) -> TeacherContext:
        model = Model(bare, trainer[1], 512, "speaker")
        services = Functions(trainer[0].build_self_teacher, lambda config: model)
        return TeacherContext(trainer[1], services, base_dir=tmp_path)

    return context


@pytest.fixture
def model_folder(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def test_a_context_is_part_of_the_prompt_that_is_looked_up(
    loading: Callable[[ServerGenerator], TeacherContext], model_folder: str
) -> None:
    """Around or inside a context, each sibling that is shown makes a separate prompt."""
    asked = Prompt("p", (Message("user", "ab"),))
    group = [rollout(asked, sample=number, reward=1.0, text="abc"[number]) for number in range(3)]
    model = {"type": "model", "model": model_folder}
    shown = {"type": "privileged", "reference": "{sibling}"}
    kept = {"type": "cached", "folder": "kept"}
    around, inside = ServerGenerator(), ServerGenerator()
    outer = build(
        Config.model_validate({**kept, "teacher": {**shown, "teacher": model}}), loading(around)
    )
    first = outer.score(group, Full())
    assert [len(call) for call in around.asked] == [2], (
        "the first shows the second, all further ones show the first"
    )
    assert same(first, outer.score(group, Full())) and len(around.asked) == 1
    outer.score([replace(one, text="d") for one in group], Full())
    assert len(around.asked) == 2, "another sibling is another prompt"
    settings = privileged.Config.model_validate({**shown, "teacher": {**kept, "teacher": model}})
    assert same(first, privileged.build(settings, loading(inside)).score(group, Full()))
    assert [len(one.tokens) for call in inside.asked for one in call] == [1], "the head alone"


def test_without_a_run_and_a_folder_it_only_rounds(
    loading: Callable[[ServerGenerator], TeacherContext],
    tmp_path: Path,
    model_folder: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bare = ServerGenerator()
    config = Config.model_validate({"teacher": {"type": "model", "model": model_folder}})
    context = loading(bare)
    teacher = build(config, context)
    asked = [rollout(Prompt("p", (Message("user", "ab"),)))]
    first = teacher.score(asked, Full())
    assert same(first, teacher.score(asked, Full())) and len(bare.asked) == 2
    (remark,) = context.after_training
    with caplog.at_level("INFO", "practicum"):
        remark()
    assert caplog.messages == ["0 of 2 completions were scored before"], "nothing is kept"
    kept = build(config, replace(loading(bare), scores_dir=tmp_path / "home"))
    assert same(first, kept.score(asked, Full())) and list((tmp_path / "home").iterdir())


def test_a_folder_starts_at_the_recipe_and_holds_one_folder_a_model(
    loading: Callable[[ServerGenerator], TeacherContext], tmp_path: Path, model_folder: str
) -> None:
    config = Config.model_validate(
        {"teacher": {"type": "model", "model": model_folder}, "folder": "kept"}
    )
    teacher = build(config, replace(loading(ServerGenerator()), scores_dir=tmp_path / "home"))
    teacher.score([rollout(Prompt("p", (Message("user", "ab"),)))], Full())
    (store,) = (tmp_path / "kept").iterdir()
    assert (
        store.name == compute_fingerprint(ScorerConfig(model=model_folder))
        and not (tmp_path / "home").exists()
    )


def test_the_teachers_voice_draws_with_the_model(
    loading: Callable[[ServerGenerator], TeacherContext], model_folder: str
) -> None:
    bare = ServerGenerator()
    config = Config.model_validate({"teacher": {"type": "model", "model": model_folder}})
    voice = build(config, loading(bare)).bind_prompt(Prompt("p", (Message("user", "ab"),)))
    assert (
        voice is not None and isinstance(voice.client, CachingClient) and voice.client.bare is bare
    )


def test_a_teacher_without_a_model_is_named_when_it_is_built(
    loading: Callable[[ServerGenerator], TeacherContext],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Entries of other packages are only known at that point."""
    source = (
        "from typing import Literal\nfrom practicum.ports import TeacherConfig\n"
        "from practicum.objective import NO_CAPABILITIES\nfrom practicum.teachers.none import NoTeacher\n"
        "class Config(TeacherConfig):\n    type: Literal['my_cached_parts.quiet'] = 'my_cached_parts.quiet'\n"
        "    def capabilities(self):\n        return NO_CAPABILITIES\ndef build(config, context):\n    return NoTeacher()\n"
    )
    (tmp_path / "my_cached_parts").mkdir()
    (tmp_path / "my_cached_parts" / "quiet.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    config = Config.model_validate({"teacher": "my_cached_parts.quiet"})
    with pytest.raises(RecipeError, match="loads 0 models"):
        build(config, loading(ServerGenerator()))
