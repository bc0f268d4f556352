"""Any outside text is parsed or refused with one error of ours: no other exception leaves a parser."""

import copy
import hashlib
import json
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from test_foreign_text import Client

from practicum.core.notes import show_notes
from practicum.errors import PracticumError
from practicum.objective import Sampled, Signal, TopK
from practicum.ports import Capabilities, TaskContext
from practicum.rollouts.tape import RolloutArchive, RolloutRow, load_recorded_rollouts
from practicum.tasks.jsonl import Config, build
from practicum.teaching import dialects
from practicum.teaching.chat import ChatServer, TokenPrices
from practicum.teaching.chat_protocols import PROTOCOLS
from practicum.teaching.probe import Probe, build_canary, list_models, probe
from practicum.teaching.remote import RemoteClient, ServerGenerator, ServerLimits
from practicum.teaching.scores import ScoreStore
from practicum.teaching.stored_answers import AnswerStore
from practicum.text import Renderer, build_character_tokenizer
from practicum.types import Message, Prompt, SampleRequest, SamplingParams, ScoreRequest

pytestmark = pytest.mark.long

ODD = st.sampled_from(
    [
        10**400,
        -(10**400),
        2**63,
        -1,
        1e308,
        -0.0,
        "",
        "\ud800",
        "\x00",
        "1" * 5000,
        "\u0663",
        "token_id:\u0663",
        "token_id:-1",
        None,
        True,
    ]
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), ODD)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the path to each value inside a value, itself first."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, part in inside for place in places(part, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, whole: Any) -> Any:
    """Draw a right answer with a changed, removed or repeated part."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(places(value)))
        if not path:
            return draw(JSON)
        inside = value
        for key in path[:-1]:
            inside = inside[key]
        way = draw(st.sampled_from(["another", "another", "gone", "twice"]))
        if way == "another":
            inside[path[-1]] = draw(JSON)
        elif way == "gone":
            del inside[path[-1]]
        elif isinstance(inside, list):
            inside.insert(path[-1], inside[path[-1]])
    return value


def reads(work: Callable[[], object]) -> None:
    """Check that work ends in a value or in one line of ours."""
    try:
        work()
    except PracticumError as error:
        assert len(str(error).splitlines()) == 1, str(error)  # noqa: PT017 - most are no error


# Servers.

VOCABULARY = 11
CANARY = build_canary(VOCABULARY)
ABOUT = ScoreRequest((1, 2), (3, 4, 5))
DIALECTS = {dialect.name: dialect for dialect in dialects.DIALECTS}


def right(name: str, about: ScoreRequest, k: int) -> Any:
    """Return the answers of a server of a dialect."""
    ids = [*about.prompt_tokens, *about.tokens]
    best = list(range(k))
    if name == "vllm":
        rows = [
            {
                str(t): {"logprob": -1.5 - t / 50, "rank": 1, "decoded_token": "w"}
                for t in {own, *best}
            }
            for own in ids
        ]
        return {
            "model": "m",
            "choices": [
                {"text": "", "finish_reason": "length", "prompt_logprobs": [None, *rows[1:]]}
            ],
        }
    if name == "sglang":
        own = [[-1.5 - t / 50, t, "w"] for t in ids]
        top = [[[-1.5 - t / 50, t, "w"] for t in best] for _ in ids]
        return {"text": "", "meta_info": {"input_token_logprobs": own, "input_top_logprobs": top}}
    words = [f"token_id:{t}" for t in [*ids, 0]]
    tops = [{f"token_id:{t}": -1.5 - t / 50 for t in best} for _ in words]
    about_ids = {
        "tokens": words,
        "token_logprobs": [None, *[-1.5 - t / 50 for t in ids[1:]], -1.0],
        "top_logprobs": tops,
    }
    return {"choices": [{"text": "", "logprobs": about_ids}]}


WRITTEN = {
    "vllm": {
        "choices": [
            {
                "text": "ab",
                "finish_reason": "stop",
                "token_ids": [3, 4],
                "logprobs": {"token_logprobs": [-1.0, -2.0]},
            }
        ]
    },
    "sglang": {
        "text": "ab",
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 2},
            "output_token_logprobs": [[-1.0, 3, None], [-2.0, 4, None]],
        },
    },
    "echo": {"choices": [{"text": "ab", "finish_reason": "stop"}]},
}
SAID = {
    "openai": {
        "choices": [
            {
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    },
    "anthropic": {
        "content": [{"type": "text", "text": "ab"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 3, "output_tokens": 2},
    },
}
PRICES = TokenPrices(input=1.0, output=2.0)


def speaker(answer: Any) -> ServerGenerator:
    renderer = Renderer(
        build_character_tokenizer("abcd"),
        template="{{ messages[0].content }}",
        stop_ids=frozenset({2}),
    )
    return ServerGenerator(Client(answer), "m", renderer, ServerLimits())


def remote(name: str, answer: Any) -> RemoteClient:
    """Return a client of a server that was probed, and answers differently now."""
    k = 3
    found = Probe(
        "m",
        ("m",),
        DIALECTS[name],
        k,
        canary=torch.full((24,), -1.0),
        sequence=CANARY,
        answered_by="m" if name == "vllm" else None,
    )
    can = Capabilities(frozenset({"sampled", "topk"}), frozenset({"teacher"}), largest_k=k)
    return RemoteClient(speaker(answer), found, DIALECTS[name], can, VOCABULARY)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    "signal", [Sampled(), TopK(k=3, support="teacher")], ids=["sampled", "topk"]
)
@given(answers=st.data())
def test_scores_of_a_server_are_read_or_refused(
    name: str, signal: Signal, answers: st.DataObject
) -> None:
    k = 3 if isinstance(signal, TopK) else 0
    (good,) = remote(name, right(name, ABOUT, k)).score([ABOUT], signal)
    assert good.logprobs is not None
    answer = answers.draw(st.one_of(changed(right(name, ABOUT, k)), JSON))
    reads(lambda: remote(name, answer).score([ABOUT], signal))


@pytest.mark.parametrize("name", DIALECTS)
@given(answers=st.data())
def test_what_a_server_writes_is_read_or_refused(name: str, answers: st.DataObject) -> None:
    params = SamplingParams(4, stop_ids=frozenset({2}))
    (sample,) = remote(name, WRITTEN[name]).sample([SampleRequest((1,), 0)], params)
    assert len(sample.tokens) == 3

    def written(answer: Any) -> None:
        (sample,) = remote(name, answer).sample([SampleRequest((1,), 0)], params)
        assert (
            1 <= len(sample.tokens) <= 4
            and 0 <= int(sample.tokens.min()) <= int(sample.tokens.max()) < VOCABULARY
        )

    answer = answers.draw(st.one_of(changed(WRITTEN[name]), JSON))
    reads(lambda: written(answer))


@pytest.mark.parametrize("name", PROTOCOLS)
@given(answers=st.data())
def test_what_a_chat_says_is_read_or_refused(name: Any, answers: st.DataObject) -> None:
    answer = answers.draw(st.one_of(changed(SAID[name]), JSON))
    params = SamplingParams(4, stop_ids=frozenset({2}))
    server = ChatServer(speaker(answer), PROTOCOLS[name], AnswerStore(None), prices=PRICES)
    reads(lambda: server.reply([[Message("user", "a")]], [0], params))


@given(
    st.one_of(changed({"data": [{"id": "m", "max_model_len": 64}, {"id": "n"}]}), JSON),
    st.binary(max_size=40),
)
def test_a_list_of_models_is_read_or_refused(answer: Any, garbage: bytes) -> None:
    reads(lambda: list_models(Client(answer)))
    reads(lambda: list_models(Client(garbage)))


@pytest.mark.parametrize("name", DIALECTS)
@given(
    answers=st.data(),
    vocabulary=st.sampled_from([None, VOCABULARY]),
    status=st.sampled_from([200, 200, 200, 400]),
)
def test_a_probe_finds_something_or_says_why_not(
    name: str, answers: st.DataObject, vocabulary: int | None, status: int
) -> None:
    models = answers.draw(
        st.one_of(st.just({"data": [{"id": "m"}]}), changed({"data": [{"id": "m"}]}))
    )
    answer = answers.draw(changed(right(name, build_canary(vocabulary), 3)))
    client = Client(models, answer, status=status)
    reads(lambda: probe(client, "auto", None, 3, vocabulary).render_lines())


# A service of the Tinker API. The package reads the wire; the content still comes from the service.

ARRAYS = st.one_of(
    st.none(),
    st.lists(st.floats(width=32), max_size=7).map(
        lambda values: np.array(values, dtype=np.float32)
    ),
    st.integers(0, 3).map(lambda rows: np.zeros((rows, 2), dtype=np.float32)),
)


@given(
    logprobs=ARRAYS,
    ids=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=2), max_size=6),
    values=st.lists(st.lists(st.floats(width=32), min_size=2, max_size=2), max_size=6),
    tokens=st.lists(st.integers(-(2**70), 2**70), max_size=6),
    k=st.sampled_from([0, 2]),
)
def test_answers_of_a_service_are_read_or_refused(
    logprobs: Any, ids: list[list[int]], values: list[list[float]], tokens: list[int], k: int
) -> None:
    from practicum.remote.tinker.sampling import ServiceSampler

    table = SimpleNamespace(
        token_ids=np.array(ids, dtype=np.int32).reshape(-1, 2),
        logprobs=np.array(values, dtype=np.float32).reshape(-1, 2),
    )
    sequence = SimpleNamespace(
        tokens=tokens, logprobs=None if logprobs is None else logprobs.flatten().tolist()
    )
    answer = SimpleNamespace(
        prompt_logprobs_np=logprobs,
        topk_prompt_logprobs_np=table,
        target_prompt_logprobs=None,
        sequences=[sequence],
    )
    connection: Any = SimpleNamespace(
        address="http://localhost",
        reopened=0,
        service=None,
        largest_seed=2**31 - 1,
        wait=lambda requests, what: list(requests),
        request=lambda request, what: request(),
    )
    pytest.importorskip("tinker")
    sampler = ServiceSampler(
        connection, lambda service: SimpleNamespace(sample=lambda *_, **__: answer), 7
    )
    signal: Signal = TopK(k=k, support="teacher") if k else Sampled()
    reads(lambda: sampler.score([ABOUT], signal))
    reads(lambda: sampler.sample([SampleRequest((1,), 0)], SamplingParams(4)))


# Files.

ROW = {
    "id": "a",
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
    "answer": "4",
    "response": "2 + 2 = 4",
    "domain": "d",
    "teacher": "t",
    "privileged": {"hint": "h"},
}


# Rows as other tools write them: they are recognised by their columns.
FOREIGN_ROWS = [
    {
        "prompt": [{"role": "user", "content": "q"}],
        "reward_model": {"ground_truth": "72"},
        "data_source": "d",
    },
    {"prompt": "q", "completion": [{"role": "assistant", "content": "a"}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"instruction": "i", "input": "", "output": "a", "history": [["h", "g"]], "system": "s"},
]


def lines_of(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(st.one_of(changed(ROW), JSON), min_size=1, max_size=3).map(lines_of),
    )
)
@example(b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}")
@example(b'{"a\\nb": 1}')
def test_task_rows_are_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "rows.jsonl").write_bytes(content)
        for allowed in (0.0, 1.0):
            for verifier in ("exact", "number"):
                config = Config(path=Path("rows.jsonl"), max_rejected=allowed, verifier=verifier)  # type: ignore[arg-type]
                said: list[str] = []
                context = TaskContext(
                    seed=0, base_dir=Path(place), rejected_path=Path(place) / "rejected.jsonl"
                )
                with show_notes(said.append):
                    reads(lambda config=config, context=context: build(config, context))
                assert not any("\n" in text for text in said)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
@given(
    content=st.data(),
    columns=st.sampled_from([{}, {"prompt": "prompt", "answer": "reward_model.ground_truth"}]),
)
def test_files_of_every_kind_are_read_or_refused(
    suffix: str, content: st.DataObject, columns: dict[str, str]
) -> None:
    rows = st.lists(st.sampled_from([ROW, *FOREIGN_ROWS]).flatmap(changed), min_size=1, max_size=3)
    cells = st.text(st.sampled_from('prompt,answer\t\n\r";\x00\ufeff'), max_size=40)
    written = st.one_of(
        st.binary(max_size=60),
        cells.map(lambda text: f"prompt,answer\n{text}".encode()),
        rows.map(lines_of),
        rows.map(lambda row: json.dumps(row).encode()),
        st.binary(max_size=60).map(lambda inner: b"PAR1" + inner + b"PAR1"),
    )
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / f"rows{suffix}"
        path.write_bytes(content.draw(written))
        for strict in (False, True):
            config = Config(path=path, max_rejected=1.0, columns=columns, strict=strict)
            notes: list[str] = []
            with show_notes(notes.append):
                reads(lambda config=config: build(config, TaskContext(0, Path(place))))
            assert not any("\n" in text for text in notes)


RENDERER = Renderer(
    build_character_tokenizer("abcd"), template="{{ messages[0].content }}", stop_ids=frozenset({2})
)
PROMPT = Prompt("p", (Message("user", "ab"),))
TAPE = {
    "step": 1,
    "prompt": "p",
    "sample": 0,
    "source": "student",
    "policy_version": 0,
    "text": "a",
    "stop_reason": "stop",
    "prompt_tokens": list(RENDERER.render(PROMPT.messages)),
    "tokens": [7, 2],
    "loss_mask": [True, True],
    "sampling_logprobs": [-1.0, -2.0],
    "policy_logprobs": [-1.0, None],
}


@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(st.one_of(changed(TAPE), JSON), min_size=1, max_size=3).map(lines_of),
    )
)
@example(lines_of([TAPE | {"tokens": [2**70, 2]}]))
@example(lines_of([TAPE | {"tokens": [2**40, 2]}]))
@example(lines_of([TAPE | {"policy_logprobs": [10**400, None]}]))
def test_tape_rows_are_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        tape = Path(place) / "rollouts.jsonl"
        tape.write_bytes(content)
        reads(lambda: load_recorded_rollouts(tape, [PROMPT], RENDERER, 8))


@given(st.lists(st.one_of(changed(TAPE), JSON), min_size=1, max_size=3))
def test_rows_to_be_replayed_are_restored_or_refused(rows: list[Any]) -> None:
    reads(lambda: RolloutArchive(newest=deque(maxlen=4)).restore(rows, [PROMPT], 1))


@given(st.data())
def test_kept_scores_are_read_or_refused(draws: st.DataObject) -> None:
    key = hashlib.sha256(b"key").digest()
    with tempfile.TemporaryDirectory() as place:
        scores = ScoreStore(Path(place), 1 << 20)
        scores.keep(
            {
                key: {
                    "logprobs": torch.tensor([-1.0, -2.0]),
                    "ids": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
                }
            }
        )
        (path,) = Path(place).glob("*.safetensors")
        content = path.read_bytes()
        path.unlink()
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length]
        if draws.draw(st.booleans()):
            header = json.dumps(draws.draw(changed(json.loads(header)))).encode()
        prefix = draws.draw(
            st.one_of(st.just(len(header).to_bytes(8, "little")), st.binary(min_size=8, max_size=8))
        )
        body = draws.draw(st.one_of(st.just(content[8 + length :]), st.binary(max_size=120)))
        # The name is the checksum of the header, which anyone who writes the file can compute.
        name = hashlib.sha256(prefix + header).hexdigest()
        (Path(place) / f"{name}.safetensors").write_bytes(prefix + header + body)
        again = ScoreStore(Path(place), 1 << 20)

        def read() -> None:
            again.refresh()
            if key in again:
                again.read(key)

        reads(read)


def test_a_row_of_a_tape_is_a_rollout() -> None:
    assert RolloutRow.model_validate(TAPE).to_rollout(PROMPT).tokens.tolist() == [7, 2]
