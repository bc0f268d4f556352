"""A teacher that only writes, behind an API: two protocols, answers paid for once, a budget, refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from stub_server import Stub, changed, status
from toy import assert_same_run, command, forked, rows, toy_recipe, toy_run, write_recipe

from practicum.errors import DataError, RecipeError, TeacherError
from practicum.prompts import Message, ToolCall
from practicum.runs.plan import plan
from practicum.teachers.chat_api import Config
from practicum.teaching.chat import list_turns
from practicum.teaching.chat_protocols import PROTOCOLS, ChatAnswer, ProtocolName
from practicum.teaching.stored_answers import AnswerStore
from practicum.types import SamplingParams

PRICES = {"input": 3.0, "output": 15.0}
COST = (10 * 3.0 + 2 * 15.0) / 1e6
"""The price of one answer of the stub."""


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub(context=None) as stub:
        yield stub


def build_changes(stub: Stub, folder: Path | None = None, **fields: Any) -> dict[str, Any]:
    kept = {} if folder is None else {"folder": str(folder)}
    return {
        "teacher": {"type": "chat_api", "url": stub.url, "model": "m", **kept, **fields},
        "objective": {"signal": "text", "divergence": "ce"},
        "rollout": {"source": "teacher", "max_new_tokens": 5},
        "train.steps": 2,
    }


def list_asked(stub: Stub) -> list[Any]:
    return [body for _, body in stub.asked if body is not None]


# Protocols.


@pytest.mark.parametrize("name", PROTOCOLS)
def test_both_protocols_send_messages_and_read_the_reply(name: str) -> None:
    protocol = PROTOCOLS[name]  # type: ignore[index]
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "ba"},
        {"role": "user", "content": "cd"},
    ]
    params = SamplingParams(5, 0.5, banned_ids=frozenset({3}))
    body = protocol.build_request("m", turns, 2**40 + 7, params).body
    assert body is not None and body["max_tokens"] == 5 and body["temperature"] == 0.5
    assert "logit_bias" not in body  # ids of the student mean other tokens there
    if name == "openai":
        assert body["messages"] == turns and body["seed"] == 7
    else:
        assert body["system"] == "be brief" and body["messages"] == turns[1:]
        assert not {"seed", "top_p", "top_k"} & set(body)


def test_calls_of_tools_are_sent_with_the_identities_of_their_results() -> None:
    calls = (ToolCall("g", {"a": [1]}), ToolCall("f", {}))
    turns = list_turns(
        [
            Message("user", "two sums"),
            Message("assistant", "now", reasoning="hm", tool_calls=calls[:1]),
            Message("user", "never mind"),
            Message("assistant", "", tool_calls=calls),
            Message("tool", "6", "g"),
            Message("tool", "7", "f"),
        ]
    )
    asked = [call for turn in turns for call in turn.get("tool_calls", ())]
    assert [call["id"] for call in asked] == ["call00000", "call00001", "call00002"]
    assert [turn.get("tool_call_id") for turn in turns[4:]] == ["call00001", "call00002"]
    assert asked[0]["function"] == {"name": "g", "arguments": '{"a": [1]}'}
    params = SamplingParams(5, 0.5)
    body = PROTOCOLS["openai"].build_request("m", turns, 0, params).body
    assert body is not None and body["messages"] == turns
    with pytest.raises(DataError, match="results of tools, which this protocol only takes with"):
        PROTOCOLS["anthropic"].build_request("m", turns, 0, params)
    body = PROTOCOLS["anthropic"].build_request("m", turns[:1], 0, params).body
    assert body is not None and body["messages"] == [{"role": "user", "content": "two sums"}]


def test_an_answer_is_read_with_its_end_its_refusal_and_its_tokens() -> None:
    openai, anthropic = PROTOCOLS["openai"], PROTOCOLS["anthropic"]

    def choice(content: Any, reason: str | None, **message: Any) -> dict[str, Any]:
        message = {"content": content, **message}
        return {"choices": [{"message": message, "finish_reason": reason}]}

    assert openai.parse_answer(choice("x", "length")) == ChatAnswer("x", False)
    assert openai.parse_answer(choice(None, "content_filter")).is_refused
    assert openai.parse_answer(choice("", "stop", refusal="I can't")).is_refused
    parts = [{"type": "thinking", "thinking": "?"}, *({"type": "text", "text": t} for t in "ab")]
    assert openai.parse_answer(choice(parts, "stop")) == ChatAnswer("ab", True)
    assert openai.parse_answer(choice("", "stop")) == ChatAnswer("", True)
    assert openai.parse_answer(choice([], "length")) == ChatAnswer("", False)
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for reason in ("tool_calls", "function_call", "stop", None, "of 2031"):
        calls_only = openai.parse_answer(choice(None, reason, tool_calls=call))
        assert calls_only.is_refused and not calls_only.text
    assert openai.parse_answer(choice(None, "of 2031")).is_refused
    assert not openai.parse_answer(choice("a", "tool_calls", tool_calls=call)).is_refused
    for wrong in (7, True, {"text": "a"}, ["a"], [{"type": "text"}], [{"type": "text", "text": 7}]):
        with pytest.raises((TypeError, LookupError)):
            openai.parse_answer(choice(wrong, "stop"))
    with pytest.raises(ValueError, match="a part of type 'image_url', which is no text"):
        openai.parse_answer(choice([{"type": "image_url", "image_url": {}}], "stop"))
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": True}}
    counted = openai.parse_answer(choice("x", "stop") | usage)
    assert (counted.input_tokens, counted.output_tokens) == (3, None)

    def blocks(reason: str, *texts: str) -> dict[str, Any]:
        content = [{"type": "text", "text": text} for text in texts]
        return {"content": content, "stop_reason": reason}

    assert anthropic.parse_answer(blocks("end_turn", "a", "b")) == ChatAnswer("ab", True)
    assert anthropic.parse_answer(blocks("refusal")).is_refused
    used = [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]
    for end in ("tool_use", "end_turn"):
        assert anthropic.parse_answer({"content": used, "stop_reason": end}).is_refused
    assert anthropic.parse_answer(blocks("pause_turn")).is_refused
    assert anthropic.parse_answer(blocks("end_turn")) == ChatAnswer("", True)
    with pytest.raises(TypeError):
        anthropic.parse_answer(
            {"content": [{"type": "text", "text": 7}], "stop_reason": "end_turn"}
        )
    assert not anthropic.parse_answer(blocks("max_tokens", "a")).is_stopped


WHOLE_ANSWERS: dict[str, tuple[ProtocolName, dict[str, Any], ChatAnswer]] = {
    "OpenAI, as documented": (
        "openai",
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1741570283,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "content": "13 * 2 = 26",
                        "refusal": None,
                        "annotations": [],
                    },
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": 19,
                "completion_tokens": 8,
                "total_tokens": 27,
                "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
            },
            "service_tier": "default",
        },
        ChatAnswer("13 * 2 = 26", True, False, 19, 8),
    ),
    "Anthropic, as documented": (
        "anthropic",
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [
                {"type": "thinking", "thinking": "twice 13", "signature": "abc"},
                {"type": "text", "text": "13 * 2 = 26", "citations": None},
            ],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 21,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 9,
                "service_tier": "standard",
            },
        },
        ChatAnswer("13 * 2 = 26", True, False, 21, 9),
    ),
    "llama.cpp, recorded": (
        "openai",
        {
            "choices": [
                {
                    "finish_reason": "length",
                    "index": 0,
                    "message": {"role": "assistant", "content": "8 times 7 is "},
                }
            ],
            "created": 1795537935,
            "model": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            "system_fingerprint": "b0-unknown",
            "object": "chat.completion",
            "usage": {
                "completion_tokens": 6,
                "prompt_tokens": 37,
                "total_tokens": 43,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            "id": "chatcmpl-iGuP2cASw5accqSnjkrNKiCxOnzLoaDk",
            "timings": {"cache_n": 0, "prompt_n": 37, "prompt_ms": 3005.356},
        },
        ChatAnswer("8 times 7 is ", False, False, 37, 6),
    ),
}


@pytest.mark.parametrize("whose", WHOLE_ANSWERS)
def test_a_whole_answer_is_read(whose: str) -> None:
    protocol, answer, expected = WHOLE_ANSWERS[whose]
    assert PROTOCOLS[protocol].parse_answer(answer) == expected


def test_a_temperature_that_a_protocol_does_not_know_is_refused_before_it_is_sent() -> None:
    with pytest.raises(RecipeError, match=r"temperature of 1\.2.*teacher\(temperature=1\.0\)"):
        PROTOCOLS["anthropic"].build_request("m", [], 0, SamplingParams(5, 1.2))


# Runs.


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_run_learns_from_what_an_api_writes(
    models: Path, stub: Stub, tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret-key-1234")
    stub.key = "secret-key-1234"
    changes = build_changes(stub, protocol=protocol, api_key_env="A_KEY", system="be brief")
    folder = toy_run(models, tmp_path, changes).folder
    written = rows(folder / "rollouts.jsonl")
    assert {row["text"] for row in written} == {"ab"} and len(written[0]["tokens"]) == 3
    first = list_asked(stub)[0]
    assert "be brief" in (first.get("system"), first["messages"][0]["content"])
    assert all(
        "secret-key" not in path.read_text(errors="ignore")
        for path in folder.rglob("*")
        if path.is_file()
    )


def test_an_answer_is_paid_for_once_also_across_runs_and_a_kill(
    models: Path, stub: Stub, tmp_path: Path
) -> None:
    changes = build_changes(stub, tmp_path / "kept", prices=PRICES, budget=1.0, parameters=1000)
    whole = toy_run(models, tmp_path / "whole", changes).folder
    paid = len(list_asked(stub))
    assert paid == 16  # two steps of eight prompts, all different
    again = toy_run(models, tmp_path / "again", changes).folder
    assert len(list_asked(stub)) == paid
    assert_same_run(whole, again)
    # Every prompt is read and an answer's first two tokens of three, for stored and new answers.
    first, *_ = rows(again / "metrics.jsonl")
    assert first["cost/flops_sample"] >= 2 * 1000 * 8 * (1 + 2)
    store = AnswerStore(tmp_path / "kept")
    assert len(store) == paid and store.money == pytest.approx(paid * COST)


def test_a_prompt_that_comes_again_is_asked_again_only_without_reuse(
    models: Path, stub: Stub, tmp_path: Path
) -> None:
    changes = build_changes(stub, tmp_path / "kept") | {"task.train_size": 8}
    toy_run(models, tmp_path / "reuse", changes)
    assert len(list_asked(stub)) == 8
    stub.asked.clear()
    changes["teacher"] = {**changes["teacher"], "reuse": False, "folder": str(tmp_path / "other")}
    toy_run(models, tmp_path / "anew", changes)
    assert len(list_asked(stub)) == 16


def test_several_answers_to_a_prompt_are_several_answers(
    models: Path, stub: Stub, tmp_path: Path
) -> None:
    changes = build_changes(stub, tmp_path / "kept")
    changes["rollout"] = {**changes["rollout"], "n": 3}
    toy_run(models, tmp_path / "three", {**changes, "train.steps": 1})
    assert len(list_asked(stub)) == 24


def test_a_run_stops_before_it_exceeds_its_budget_and_goes_on_without_paying_again(
    models: Path, stub: Stub, tmp_path: Path
) -> None:
    def build(budget: float) -> dict[str, Any]:
        # Two requests are open at the same time, so at most two are paid for beyond the check.
        limits = {"prices": PRICES, "budget": budget, "concurrency": 2}
        changes = build_changes(stub, **limits)
        return {**changes, "train.steps": 4, "train.checkpoint_every": 10}

    money = 20 * COST + 2 * 500e-6
    with pytest.raises(
        TeacherError,
        match=r"step \d: .* the answers so far cost 0\.\d+, and the next 2 may cost .* more than "
        r"teacher\.budget, .*raise it and resume.*is saved",
    ):
        toy_run(models, tmp_path, build(money))
    paid = len(list_asked(stub))
    assert 16 < paid < 32 and paid * COST <= money
    result = toy_run(models, tmp_path, build(1.0), resume=True)
    assert len(list_asked(stub)) == 32
    fresh = toy_run(models, tmp_path / "fresh", build(1.0)).folder
    assert_same_run(result.folder, fresh)


def test_without_a_count_the_most_that_it_may_be_is_charged(
    models: Path, stub: Stub, tmp_path: Path
) -> None:
    stub.script = [changed(lambda answer: answer.pop("usage") and answer)]
    changes = build_changes(stub, tmp_path / "kept", prices=PRICES, concurrency=1)
    toy_run(models, tmp_path / "run", {**changes, "train.steps": 1})
    lines = rows(tmp_path / "kept" / "answers.jsonl")
    assert lines[0]["money"] > lines[1]["money"] == pytest.approx(COST)


def test_a_refused_answer_is_counted_and_not_learned_from(
    models: Path, stub: Stub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(answer: Any) -> None:
        answer["choices"][0]["message"] = {"content": None, "refusal": "no"}

    stub.script = [changed(refuse)]
    changes = {**build_changes(stub, tmp_path / "kept"), "train.steps": 1}
    folder = toy_run(models, tmp_path / "run", changes).folder
    (row,) = rows(folder / "metrics.jsonl")
    assert row["failed"] == 1 / 8 and row["unsupervised_prompts"] == 1
    reasons = [entry["stop_reason"] for entry in rows(folder / "rollouts.jsonl")]
    assert sorted(reasons) == ["error"] + ["stop"] * 7


def test_a_rate_limit_is_obeyed_and_counted(
    models: Path, stub: Stub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stub.script = [status(429, b"slow down", Retry_After="1"), None, status(429, b"")]
    toy_run(models, tmp_path, {**build_changes(stub), "train.steps": 1})
    assert "2 waits for a rate limit" in caplog.text and "0 refused" in caplog.text


# Answers on disk.


def test_a_line_that_a_kill_cut_off_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = AnswerStore(tmp_path)
    store.add("a", ChatAnswer("x", True, False, 1, 2), 0.5)
    store.add("b", ChatAnswer("\ud83d", True), 0.25)
    file = tmp_path / "answers.jsonl"
    file.write_text(file.read_text() + '{"key": "c", "mon')
    again = AnswerStore(tmp_path)
    assert len(again) == 2 and again.money == 0.75 and "1 lines are not answers" in caplog.text
    assert again.get("a") == ChatAnswer("x", True, False, 1, 2)
    again.add("c", ChatAnswer("z", False), 0.0)
    assert len(AnswerStore(tmp_path)) == 3
    again.add("a", ChatAnswer("other", True), 0.5)  # another process paid for it too
    both = AnswerStore(tmp_path)
    assert both.get("a") == ChatAnswer("x", True, False, 1, 2) and both.money == 1.25


# Settings.


def test_a_budget_without_prices_is_refused() -> None:
    with pytest.raises(ValidationError, match="it needs prices; set for"):
        Config(url="http://localhost:1", model="m", budget=1.0)


def test_a_plan_asks_nobody(models: Path, stub: Stub) -> None:
    metrics = plan(toy_recipe(models, build_changes(stub))).run.metrics
    assert metrics["cost/teacher_tokens"] == 8 * 5 and not stub.asked


def test_a_key_that_is_wrong_ends_the_run_in_one_line(
    models: Path, stub: Stub, tmp_path: Path
) -> None:
    stub.key = "another"
    recipe = str(write_recipe(models, tmp_path / "mine.yaml", build_changes(stub)))
    output = tmp_path / "out.txt"
    assert forked(command("run", recipe, "--out", str(tmp_path)), output=output) == 5
    (line,) = [line for line in output.read_text().splitlines() if "error:" in line]
    assert "401" in line and "api_key_env" in line
