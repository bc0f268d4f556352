"""A teacher behind a server: answers equal the local model, wrong answers are refused, and a run survives its failure."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorder import prompt, rollout
from stub_server import Fault, FolderModel, Stub, changed, flood, hang_up, late, raw, status, table
from teacher_services import Functions
from torch import Tensor
from toy import assert_same_run, curve, make_model, rows, toy_recipe, toy_run

from practicum.backends.local.loading import load, load_student
from practicum.backends.local.sampler import LocalSampler
from practicum.errors import CapabilityError, RecipeError, TeacherError, VocabularyError
from practicum.functional import TEACHER_FLOOR, temper
from practicum.models.config import ModelConfig, StudentConfig
from practicum.objective import Sampled, Signal, TopK
from practicum.ports import Teacher, TeacherContext, TeacherRequest
from practicum.remote.http import JsonClient, Server
from practicum.run_dir import list_changed_fields
from practicum.teachers.openai_api import Config, build
from practicum.teaching.probe import probe
from practicum.text.tokenizers import load_renderer
from practicum.types import Message, Rollout, SamplingParams, ScoreRequest

pytestmark = pytest.mark.long

TOP3 = TopK(k=3, support="teacher")


@pytest.fixture
def stub() -> Iterator[Stub]:
    """Run a server with a table of eleven tokens, the toy vocabulary."""
    with Stub() as stub:
        yield stub


@pytest.fixture
def server(models: Path) -> Iterator[Stub]:
    """Run a server of the toy teacher."""
    with Stub(FolderModel(models / "teacher")) as stub:
        yield stub


@pytest.fixture(scope="module")
def make(models: Path) -> Callable[..., Teacher]:
    student = load_student(StudentConfig(model=str(models / "student")), seed=0)

    def made(stub: Stub, **fields: Any) -> Teacher:
        config = Config(url=stub.url, **{"retry_seconds": 5.0, **fields})
        context = TeacherContext(student.renderer, Functions(load_renderer=load_renderer))
        return build(config, context)

    return made


def completion(tokens: list[int]) -> Rollout:
    """Return some tokens after a prompt."""
    count = torch.zeros(len(tokens))
    return replace(
        rollout(prompt("ab")),
        tokens=torch.tensor(tokens, dtype=torch.long),
        loss_mask=count == 0,
        sampling_logprobs=count,
        policy_logprobs=count,
    )


def said(teacher: Teacher, signal: Signal, count: int = 2) -> Any:
    """Return the answer about the second of some completions, which scripts refer to."""
    about = [completion([3, (2 + n) % 11, 5]) for n in range(count)]
    return teacher.score(about, signal)


# Scores


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "echo"])
def test_a_server_says_what_its_model_says_here(
    models: Path, server: Stub, make: Callable[..., Teacher], dialect: str
) -> None:
    server.dialect = dialect
    teacher = make(server)
    own = LocalSampler(load(ModelConfig(model=str(models / "teacher"))).language_model)
    renderer = load(ModelConfig(model=str(models / "student"))).renderer
    about = [completion(ids) for ids in ([7, 8, 2], [9], [])]
    requests = [
        ScoreRequest(renderer.render(r.prompt.messages), tuple(r.tokens.tolist())) for r in about
    ]
    for mine, here in zip(teacher.score(about, TOP3), own.score(requests, Sampled()), strict=True):
        torch.testing.assert_close(mine.logprobs, here.logprobs, atol=1e-5, rtol=1e-5)
    (first, *_) = teacher.score(about, TOP3)
    (whole, *_) = own.score(requests, TopK(k=3, support="teacher"))
    best = whole.head.logprobs(whole.hidden).topk(3, dim=-1)  # type: ignore[union-attr]
    assert first.topk_ids is not None and first.topk_ids.equal(best.indices)
    torch.testing.assert_close(first.topk_logprobs, best.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_server_scores_the_candidates_that_the_student_names(
    models: Path, server: Stub, make: Callable[..., Teacher], dialect: str
) -> None:
    server.dialect, server.names = dialect, True
    teacher = make(server)
    assert teacher.capabilities.supports == {"teacher", "student"}
    own = LocalSampler(load(ModelConfig(model=str(models / "teacher"))).language_model)
    renderer = load(ModelConfig(model=str(models / "student"))).renderer
    # Longer than one of SGLang's blocks, and unordered.
    generator = torch.Generator().manual_seed(0)
    tokens = [[(3 * n * n + n) % 11 for n in range(40)], [9], []]
    about = [
        replace(
            completion(ids),
            candidates=torch.stack(
                [torch.randperm(11, generator=generator)[:4] for _ in range(len(ids))]
                or [torch.zeros(4, dtype=torch.long)]
            )[: len(ids)],
        )
        for ids in tokens
    ]
    requests = [
        ScoreRequest(renderer.render(r.prompt.messages), tuple(r.tokens.tolist())) for r in about
    ]
    expected = own.score(requests, TopK(k=11, support="teacher"))
    server.asked.clear()
    answers = teacher.score(about, TopK(k=4, support="student"))
    for row, answer, whole in zip(about[:2], answers, expected, strict=False):
        logprobs = whole.head.logprobs(whole.hidden)
        assert answer.topk_ids.equal(row.candidates)
        torch.testing.assert_close(
            answer.topk_logprobs, logprobs.gather(1, row.candidates), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            answer.logprobs, logprobs.gather(1, row.tokens[:, None])[:, 0], atol=1e-5, rtol=0
        )
    assert len(server.asked) == (2 if dialect == "vllm" else 3)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "echo"])
def test_a_server_that_names_no_candidates_is_not_asked_about_them(
    stub: Stub, make: Callable[..., Teacher], dialect: str
) -> None:
    stub.dialect = dialect
    assert make(stub).capabilities.supports == {"teacher"}


def test_scores_are_asked_at_temperature_1_whatever_the_servers_defaults(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    said(make(stub), Sampled())
    body = stub.scored()[-1]
    assert (body["temperature"], body["top_p"], body["top_k"], body["repetition_penalty"]) == (
        1.0,
        1.0,
        -1,
        1.0,
    )
    assert body["max_tokens"] == 1 and body["prompt_logprobs"] == 0


# D7, D8: answers that cannot be right.


def _entry(answer: Any, place: int = -1) -> dict[str, Any]:
    return answer["choices"][0]["prompt_logprobs"][place]


def _set(value: Any) -> Fault:
    """Return the last token's log-probability."""
    return changed(lambda answer: _entry(answer)["5"].update(logprob=value))


def _candidates(edit: Callable[[dict[str, Any]], Any]) -> Fault:
    return changed(lambda answer: edit(_entry(answer)))


def _drop(row: dict[str, Any]) -> None:
    for token in [token for token in row if token != "5"][:2]:
        del row[token]


def _likely(row: dict[str, Any]) -> None:
    for entry in row.values():
        entry["logprob"] = math.log(0.45)


WRONG: dict[str, tuple[Fault, Signal, str]] = {
    "above 0": (_set(0.5), Sampled(), "the log-probability of token 2 is 0.5, and none is above 0"),
    "a text": (_set("high"), Sampled(), "token 2 is not a number"),
    "NaN": (_set(math.nan), Sampled(), "not JSON"),
    "another token": (
        changed(lambda a: _entry(a).pop("5") and None),
        Sampled(),
        "scored other tokens .* from token 2 on",
    ),
    "one too few": (
        changed(lambda a: a["choices"][0]["prompt_logprobs"].pop() and None),
        Sampled(),
        "not the form of the probe",
    ),
    "none": (
        changed(lambda a: a["choices"][0].pop("prompt_logprobs") and None),
        Sampled(),
        "not the form of the probe",
    ),
    "a list": (changed(lambda a: [a]), Sampled(), "not the form of the probe"),
    "fewer candidates": (_candidates(_drop), TOP3, "candidates at token 2 instead of 3"),
    "out of the vocabulary": (
        _candidates(lambda row: row.update({"99": {"logprob": -0.001}})),
        TOP3,
        "candidate 99 at token 2 is not in the vocabulary of 11 tokens",
    ),
    "too much mass": (_candidates(_likely), TOP3, "a probability of 1.35 together"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_that_cannot_be_right_is_refused_by_name(
    stub: Stub, make: Callable[..., Teacher], name: str
) -> None:
    fault, signal, words = WRONG[name]
    teacher = make(stub, concurrency=1)
    stub.script = [None, fault, fault, fault]
    with pytest.raises(
        TeacherError, match=rf"{stub.url}/v1/completions: .*completion 2 of 2.*{words}"
    ) as caught:
        said(teacher, signal)
    assert "\n" not in str(caught.value)


def test_answers_that_were_mixed_up_are_found_out(stub: Stub, make: Callable[..., Teacher]) -> None:
    teacher = make(stub, concurrency=1)
    kept: list[bytes] = []
    stub.script = [lambda _, data: kept.append(data) or data, lambda _, data: kept[0]]
    with pytest.raises(
        TeacherError,
        match="scored other tokens than it was asked about, from token 1 on; answers were mixed",
    ):
        said(teacher, Sampled())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda about: about["input_top_logprobs"][-1].reverse(), "not ordered, most likely first"),
        (
            lambda about: about["input_top_logprobs"][-1].__setitem__(
                1, about["input_top_logprobs"][-1][0]
            ),
            "is listed twice",
        ),
        (lambda about: about["input_token_logprobs"][-1].__setitem__(1, 9), "scored other tokens"),
        (lambda about: about["input_token_logprobs"].clear(), "not the form of the probe"),
    ],
)
def test_candidates_of_lists_are_checked_too(
    stub: Stub, make: Callable[..., Teacher], edit: Callable[[Any], Any], words: str
) -> None:
    stub.dialect = "sglang"
    teacher = make(stub, concurrency=1, dialect="sglang")
    stub.script = [None, changed(lambda answer: edit(answer["meta_info"]))]
    with pytest.raises(TeacherError, match=words):
        said(teacher, TOP3)


def test_minus_infinity_is_lifted_and_counted_and_too_many_are_an_error(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    teacher = make(stub, concurrency=1)
    stub.script = [_set(-9999.0), _set(None)]
    answers = said(teacher, Sampled())
    assert [answer.logprobs[2].item() for answer in answers] == [TEACHER_FLOOR] * 2
    stub.script = [_set(-9999.0)] * 20
    with pytest.raises(
        TeacherError, match=r"11 of \d+ log-probabilities are minus infinity or missing"
    ):
        said(teacher, Sampled(), count=20)


# D1 to D4 as the teacher sees them.


@pytest.mark.parametrize(
    "fault", [status(503), status(429, Retry_After="0"), hang_up, raw(b"<html>"), late(0.3)]
)
def test_what_passes_changes_no_answer(
    stub: Stub, make: Callable[..., Teacher], fault: Fault
) -> None:
    teacher = make(stub)
    before = said(teacher, TOP3)
    stub.script = [fault]
    after = said(teacher, TOP3)
    assert all(
        a.logprobs.equal(b.logprobs) and a.topk_ids.equal(b.topk_ids)
        for a, b in zip(before, after, strict=True)
    )


def test_a_flood_is_refused(stub: Stub, make: Callable[..., Teacher]) -> None:
    teacher = make(stub)
    stub.script = [flood]
    with pytest.raises(TeacherError, match=r"completion [12] of 2 is longer than \d+ bytes"):
        said(teacher, Sampled())


def test_nobody_there_at_the_start_is_one_line(stub: Stub, make: Callable[..., Teacher]) -> None:
    stub.stop()
    with pytest.raises(
        TeacherError, match=rf"{stub.url}/v1/models: the list of models failed .* start the server"
    ):
        make(stub, retry_seconds=0.5)


# D9, D10: another model, another temperature.


def test_the_probe_says_whether_scores_follow_the_temperature(
    stub: Stub, make: Callable[..., Teacher], notes: list[str]
) -> None:
    make(stub)
    stub.tempered = True
    make(stub)
    told = [line for line in notes if "canary" in line]
    assert "scores: ignore the request's temperature" in told[0]
    assert "scores: follow the request's temperature, and are requested at 1" in told[1]


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "echo"])
def test_scores_are_those_of_the_teachers_temperature_if_they_follow_it(
    stub: Stub, make: Callable[..., Teacher], dialect: str
) -> None:
    stub.dialect, stub.tempered = dialect, True
    plain, hot = (make(stub, temperature=value) for value in (1.0, 2.5))
    (_, whole), (_, asked) = said(plain, TopK(k=11, support="teacher")), said(hot, TOP3)
    logprobs = torch.zeros(3, 11).scatter(1, whole.topk_ids, whole.topk_logprobs)
    # The whole vocabulary is known here, so its tempered candidates can be computed.
    expected = temper(logprobs, 2.5)
    best = expected.topk(3, dim=-1)
    assert asked.topk_ids.equal(best.indices)
    torch.testing.assert_close(asked.topk_logprobs, best.values, atol=1e-5, rtol=0)
    tokens = torch.tensor([[3], [3], [5]])
    torch.testing.assert_close(asked.logprobs, expected.gather(1, tokens)[:, 0], atol=1e-5, rtol=0)
    hot.load_state(hot.save_state())
    with pytest.raises(TeacherError, match="model changed since the run began"):
        plain.load_state(hot.save_state())


def test_a_temperature_that_the_scores_do_not_follow_is_refused(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    with pytest.raises(CapabilityError, match=r"so it cannot score at 2\.5"):
        make(stub, temperature=2.5)


def test_scores_at_another_temperature_are_not_what_the_recipe_pins(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    mark = probe(JsonClient(Server(stub.url)), "auto", None, 20, 11).canary_sum
    make(stub, canary=mark)
    plain = stub.model
    stub.model = lambda ids: (plain(ids) / 2).log_softmax(-1)
    with pytest.raises(
        TeacherError,
        match=r"the canary is -.* and the recipe pins -.* another model, or .* another temperature",
    ):
        make(stub, canary=mark)


def test_other_weights_under_the_same_name_are_noticed_within_so_many_calls(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    teacher = make(stub, canary_every=3)
    said(teacher, Sampled())
    stub.model = table(seed=1)
    said(teacher, Sampled())
    said(teacher, Sampled())
    with pytest.raises(
        TeacherError,
        match="the server's model changed since the start: a token of the canary moved by",
    ):
        said(teacher, Sampled())


def test_after_any_trouble_the_model_is_recognised_before_its_answers_count(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    teacher = make(stub)
    stub.script = [status(503)]
    stub.model = table(seed=1)
    with pytest.raises(TeacherError, match="the server's model changed"):
        said(teacher, Sampled())


def test_another_name_is_another_model(stub: Stub, make: Callable[..., Teacher]) -> None:
    teacher = make(stub, canary_every=1)
    said(teacher, Sampled())
    stub.name = "other"
    with pytest.raises(
        TeacherError, match="the server's model changed: it has other and no m any more"
    ):
        said(teacher, Sampled())


class ServerCompletion(FolderModel):
    """A table that writes its most likely token."""

    def __call__(self, ids: Sequence[int]) -> Tensor:
        return table()(ids)

    def write(
        self, ids: Sequence[int], most: int, seed: int, temperature: float
    ) -> tuple[list[int], list[float], bool]:
        return [int(self([*ids, 0])[-1].argmax())], [-1.0], False


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("places", [1, -1])
def test_scores_that_are_off_by_one_position_are_refused_at_the_start(
    models: Path, make: Callable[..., Teacher], dialect: str, places: int
) -> None:
    with Stub(ServerCompletion(models / "teacher"), dialect=dialect) as stub:
        make(stub)
        stub.bend = lambda rows: rows.roll(places, 0)
        with pytest.raises(
            TeacherError,
            match=r"its scores are off by one position: .* at the (next one|one before)",
        ):
            make(stub)


def test_scores_of_another_distribution_than_it_writes_from_are_said_at_the_start(
    models: Path, make: Callable[..., Teacher], notes: list[str]
) -> None:
    with Stub(ServerCompletion(models / "teacher")) as stub:
        make(stub)
        assert "written: " not in " ".join(notes)
        stub.bend = lambda rows: rows.flip(-1)
        make(stub)
    assert re.search(
        "written: only .*% of its greedy tokens are also the tokens that it scores best",
        " ".join(notes),
    )


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "echo"])
def test_one_log_probability_for_every_token_is_no_score(
    stub: Stub, make: Callable[..., Teacher], dialect: str
) -> None:
    stub.dialect = dialect
    teacher = make(stub)
    stub.bend = lambda rows: torch.full_like(rows, -math.log(rows.shape[1]))
    with pytest.raises(TeacherError, match=r"all 8 log-probabilities are -2\.398.*ln of 11"):
        teacher.score([completion([3, 4, 5, 6, 7, 8, 9, 10])], Sampled())
    with pytest.raises(
        TeacherError, match=r"the canary is wrong: all 24 log-probabilities are -2\.398"
    ):
        make(stub)


def test_an_answer_by_a_model_of_another_name_is_refused_at_once(
    stub: Stub, make: Callable[..., Teacher], notes: list[str]
) -> None:
    stub.answers_as = "m-2026-01"
    teacher = make(stub)
    assert "model: m (its answers say m-2026-01)" in " ".join(notes)
    said(teacher, Sampled())
    stub.answers_as = "m-2026-02"
    with pytest.raises(
        TeacherError,
        match=r"the server's model changed since the start: .* by m-2026-02 and not m-2026-01",
    ):
        said(teacher, Sampled())


def test_a_saved_teacher_is_only_taken_up_by_the_same_model(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    state = make(stub).save_state()
    make(stub).load_state(state)
    stub.model = table(seed=1)
    with pytest.raises(TeacherError, match="the server's model changed since the run began"):
        make(stub).load_state(state)


# D11: signals that a server cannot give.


def test_the_most_candidates_are_found(stub: Stub, make: Callable[..., Teacher]) -> None:
    for most, found in [(20, 20), (7, 7), (1, 1), (0, 0)]:
        stub.most = most
        assert make(stub).capabilities.largest_k == found
    assert make(stub).capabilities.signals == {"sampled"}


def test_texts_for_candidates_leave_the_sampled_token(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    stub.dialect = "echo_text"
    with pytest.raises(
        VocabularyError, match=r"the server's tokens are not the student's: .* there and .* here"
    ):
        make(stub)
    letters = load_renderer_texts(make, stub)
    assert letters.capabilities.signals == {"sampled"}


def load_renderer_texts(make: Callable[..., Teacher], stub: Stub) -> Teacher:
    """Return the same server with the words of the toy vocabulary."""
    words = ["<pad>", "<s>", "</s>", "<user>", "<assistant>", "<system>", "<unk>", *"abcd"]
    healthy = stub.answer

    def answer(path: str, body: Any) -> tuple[int, Any]:
        code, given = healthy(path, body)
        about = given.get("choices", [{}])[0].get("logprobs") if isinstance(given, dict) else None
        if about and "tokens" in about:
            about["tokens"] = [words[int(word[1:])] for word in about["tokens"]]
        return code, given

    stub.answer = answer  # type: ignore[method-assign]
    return make(stub)


def test_a_recipe_that_asks_for_more_is_refused_with_what_there_is(
    models: Path, server: Stub, tmp_path: Path
) -> None:
    teacher = {"type": "openai_api", "url": server.url}
    with pytest.raises(CapabilityError, match=r"it can give: sampled, topk; teacher\.states reads"):
        toy_recipe(models, {"teacher": teacher})
    # Whether a server accepts candidates is only known after a request.
    with pytest.raises(CapabilityError, match="cannot score support 'student'; it can: teacher"):
        toy_run(models, tmp_path, {"teacher": teacher, "objective": {"signal": "topk(4)"}})
    with pytest.raises(
        CapabilityError,
        match=r"at most k=20, not 64; write topk\(20, support=teacher\), or sampled",
    ):
        toy_recipe(
            models, {"teacher": teacher, "objective": {"signal": "topk(64, support=teacher)"}}
        )
    server.most = 3
    changes = {"teacher": teacher, "objective": {"signal": "topk(4, support=teacher)"}}
    with pytest.raises(
        CapabilityError, match=r"at most k=3, not 4; write topk\(3, support=teacher\), or sampled"
    ):
        toy_run(models, tmp_path, changes)


@pytest.mark.parametrize("around", ["privileged", "route"])
def test_what_a_server_cannot_give_is_seen_through_what_is_around_it(
    models: Path, server: Stub, tmp_path: Path, around: str
) -> None:
    server.most = 0
    inner = {"type": "openai_api", "url": server.url}
    outer = {"type": "privileged", "system": "ab", "teacher": inner}
    if around == "route":
        outer = {"type": "route", "teachers": {"x": inner}, "default": "x"}
    with pytest.raises(CapabilityError, match="cannot give signal 'topk'; it can give: sampled"):
        toy_run(
            models,
            tmp_path,
            {"teacher": outer, "objective": {"signal": "topk(4, support=teacher)"}},
        )


def test_a_server_that_only_writes_gives_text(models: Path, stub: Stub, tmp_path: Path) -> None:
    stub.dialect = "llamacpp"
    changes = {
        "teacher": {"type": "openai_api", "url": stub.url},
        "objective": {"signal": "sampled"},
    }
    with pytest.raises(
        CapabilityError,
        match="'sampled' asks for scores of tokens, and teacher 'openai_api' only writes",
    ):
        toy_run(models, tmp_path / "asks", changes)
    changes |= {
        "objective": {"signal": "text", "divergence": "ce"},
        "rollout": {"source": "teacher", "max_new_tokens": 5},
    }
    folder = toy_run(models, tmp_path / "writes", {**changes, "train.steps": 2}).folder
    row = rows(folder / "rollouts.jsonl")[0]
    assert row["text"] == "ab" and len(row["tokens"]) == 3  # a, b and the stop token
    chats = [body for path, body in stub.asked if path == "/v1/chat/completions"]
    assert chats[-1]["messages"][-1]["role"] == "user" and chats[-1]["max_tokens"] == 5


def test_a_system_turn_goes_before_messages_that_bring_none(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    teacher = make(stub, dialect="chat", system="be brief")
    teacher.sample([TeacherRequest(prompt("ab"), 1)], SamplingParams(5, stop_ids=frozenset({2})))
    assert stub.asked[-1][1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab?"},
    ]
    own = replace(prompt("ab"), messages=(Message("system", "own"), Message("user", "ab")))
    teacher.sample([TeacherRequest(own, 1)], SamplingParams(5, stop_ids=frozenset({2})))
    assert [turn["content"] for turn in stub.asked[-1][1]["messages"]] == ["own", "ab"]


def test_a_server_that_can_do_nothing_says_what_was_tried(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    with pytest.raises(CapabilityError, match=r"no known request for .* works .*sglang: .*404"):
        make(stub, dialect="sglang")


def test_several_models_want_a_choice_and_a_wrong_one_is_named(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    healthy = stub.answer

    def answer(path: str, body: Any) -> tuple[int, Any]:
        return (
            (200, {"data": [{"id": "a"}, {"id": "b"}]})
            if path == "/v1/models"
            else healthy(path, body)
        )

    stub.answer = answer  # type: ignore[method-assign]
    with pytest.raises(
        CapabilityError, match="2 models are served there; set model to one of a, b"
    ):
        make(stub)
    with pytest.raises(TeacherError, match="no model 'c' is served there; it has: a, b"):
        make(stub, model="c")
    assert make(stub, model="b").capabilities.writes


def test_a_text_longer_than_the_context_is_refused_before_it_is_sent(
    stub: Stub, make: Callable[..., Teacher]
) -> None:
    teacher = make(stub)
    long = completion([3] * 62)
    asked = len(stub.asked)
    with pytest.raises(
        TeacherError,
        match=r"a completion of 62 tokens and one .* do not fit the server's context of 64",
    ):
        teacher.score([long], Sampled())
    assert len(stub.asked) == asked


# D12: a budget.


def test_a_budget_ends_a_run_that_goes_on_when_it_is_raised(
    models: Path, server: Stub, tmp_path: Path
) -> None:
    def changes(budget: int | None) -> dict[str, Any]:
        teacher = {"type": "openai_api", "url": server.url, "token_budget": budget}
        return {
            "teacher": teacher,
            "objective": {"signal": "sampled"},
            "train.checkpoint_every": 10,
        }

    with pytest.raises(
        TeacherError,
        match=r"step 3: .* would exceed token_budget, 190; .*state after step 2 is saved",
    ):
        toy_run(models, tmp_path, changes(190))
    assert len(curve(toy_run(models, tmp_path, changes(None), resume=True).folder, "loss")) == 4


# Whole runs.


def teacher_of(stub: Stub, **fields: Any) -> dict[str, Any]:
    return {"type": "openai_api", "url": stub.url, "retry_seconds": 1.0, **fields}


@pytest.mark.parametrize("signal", ["sampled", "topk(5, support=teacher)", "topk(5)"])
def test_a_server_teaches_as_its_model_does_here(
    models: Path, server: Stub, tmp_path: Path, signal: str
) -> None:
    server.names = True
    changes = {"objective": {"signal": signal}, "train.steps": 2}
    here = toy_run(models, tmp_path / "here", changes).folder
    there = toy_run(models, tmp_path / "there", {**changes, "teacher": teacher_of(server)}).folder
    for name in ("loss", "grad_norm"):
        assert curve(there, name) == pytest.approx(curve(here, name), rel=1e-3, abs=1e-5)
    sent = [row["wire_bytes"] for row in rows(there / "timings.jsonl")]
    assert min(sent) > 8 * 100 and not any(
        row["wire_bytes"] for row in rows(here / "timings.jsonl")
    )


def test_a_run_whose_server_dies_is_saved_and_goes_on_as_if_nothing_had_happened(
    models: Path, server: Stub, tmp_path: Path
) -> None:
    changes = {
        "teacher": teacher_of(server),
        "objective": {"signal": "sampled"},
        "train.checkpoint_every": 100,
    }
    whole = toy_run(models, tmp_path / "whole", changes).folder

    class Dies:
        """A console that ends the server after the second step."""

        def step(self, step: int, *_: Any) -> None:
            if step == 2:
                server.stop()

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    with pytest.raises(
        TeacherError,
        match=r"step 3: .*no connection.* \(the state after step 2 is saved; resume with resume=True\)",
    ):
        toy_run(models, tmp_path / "cut", changes, console=Dies())  # type: ignore[arg-type]
    server.start()
    resumed = toy_run(models, tmp_path / "cut", changes, resume=True).folder
    assert_same_run(whole, resumed)


def test_a_server_that_is_away_for_a_moment_costs_nothing_but_time(
    models: Path, server: Stub, tmp_path: Path
) -> None:
    changes = {
        "teacher": teacher_of(server, retry_seconds=30.0),
        "objective": {"signal": "sampled"},
        "train.steps": 2,
    }
    whole = toy_run(models, tmp_path / "whole", changes).folder
    server.script = [*[None] * 12, status(503), hang_up, late(0.2), raw(b"")]
    assert_same_run(whole, toy_run(models, tmp_path / "shaken", changes).folder)


def test_a_cached_server_is_asked_once(models: Path, server: Stub, tmp_path: Path) -> None:
    folder = tmp_path / "scores"
    teacher = {"type": "cached", "folder": str(folder), "teacher": teacher_of(server)}
    changes = {
        "teacher": teacher,
        "objective": {"signal": "topk(5, support=teacher)"},
        "train.steps": 2,
    }
    first = toy_run(models, tmp_path / "first", changes).folder
    asked = len(server.scored())
    second = toy_run(models, tmp_path / "second", changes).folder
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    again = len(server.scored()) - asked
    assert again < 16, f"only the probe asks again, not {again}"
    (place,) = folder.iterdir()
    assert place.name.endswith("-1")
    server.model = table(seed=3)
    toy_run(models, tmp_path / "third", changes)
    assert sorted(path.name[-2:] for path in folder.iterdir()) == ["-1", "-2"], (
        "another model has a separate folder"
    )


def test_a_key_is_nowhere_in_a_run_folder(
    models: Path, server: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "sk-very-secret"
    changes = {
        "teacher": teacher_of(server, api_key_env="TEACHER_KEY"),
        "objective": {"signal": "sampled"},
        "train.steps": 2,
    }
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(RecipeError, match="the environment variable TEACHER_KEY holds no key"):
        toy_run(models, tmp_path / "none", changes)
    monkeypatch.setenv("TEACHER_KEY", "wrong")
    with pytest.raises(TeacherError, match="answered with 401") as caught:
        toy_run(models, tmp_path / "wrong", changes)
    assert "wrong" not in str(caught.value)
    monkeypatch.setenv("TEACHER_KEY", "sk-very-secret")
    folder = toy_run(models, tmp_path / "right", changes).folder
    for path in folder.rglob("*"):
        assert not path.is_file() or b"very-secret" not in path.read_bytes(), path


def test_where_a_server_is_may_change_before_a_resume_and_what_it_is_may_not() -> None:
    def teacher(**fields: Any) -> dict[str, Any]:
        return {
            "teacher": {
                "type": "cached",
                "teacher": {"url": "http://a", "model": "m", "timeout": 1.0, **fields},
            }
        }

    assert not list_changed_fields(teacher(), teacher(url="http://b", timeout=2.0))
    assert list_changed_fields(teacher(), teacher(model="n")) == [
        "teacher.teacher.model: m in the run, n now"
    ]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://key:secret@localhost", "holds a user or a password"),
        ("http://10.0.0.1:8000", "plain http to 10.0.0.1"),
    ],
)
def test_a_recipe_with_an_unsafe_address_is_refused(models: Path, url: str, words: str) -> None:
    with pytest.raises(RecipeError, match=rf"teacher.*: .*{words}") as caught:
        toy_recipe(
            models,
            {"teacher": {"type": "openai_api", "url": url}, "objective": {"signal": "sampled"}},
        )
    assert "secret" not in str(caught.value)


def test_candidates_that_the_student_lacks_are_none(
    make: Callable[..., Teacher], tmp_path: Path
) -> None:
    """A server of 13 tokens under a student of 11, with a named tokenizer: the two extra tokens are in the tail."""
    folder = make_model(tmp_path / "larger", alphabet="abcdef")
    with Stub(table(13)) as stub:
        teacher = make(stub, tokenizer=str(folder))
        (signal, _) = said(teacher, TopK(k=13, support="teacher"))
        (sampled, _) = said(teacher, Sampled())
        (sample,) = teacher.sample([TeacherRequest(prompt("ab"), 0)], SamplingParams(4))
        body = next(body for _, body in reversed(stub.asked) if body and "logit_bias" in body)
    assert body["logit_bias"] == {"11": -100.0, "12": -100.0}
    assert int(sample.tokens.max()) < 11
    assert int(signal.topk_ids.max()) < 11
    assert torch.isneginf(signal.topk_logprobs).sum(-1).tolist() == [2] * 3
    assert (signal.topk_logprobs.exp().sum(-1) < 1).all()
    assert signal.logprobs.equal(sampled.logprobs)
    assert not signal.unknown.any()
