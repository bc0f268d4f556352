"""Conversations with tools: every call is answered and counted, for any text of the model, and no result is trained on."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from test_conversation import Parrot as CharacterParrot

from practicum.errors import VerifierError
from practicum.ports import (
    Episode,
    Observation,
    PromptedClient,
    Task,
    ToolSession,
)
from practicum.ports.gate import collect_rejections, list_kinds
from practicum.ports.tasks import ToolProblem
from practicum.prompts import ToolSchema, ToolUse
from practicum.rollouts import (
    RolloutRow,
    as_environment,
    measure_conversations,
)
from practicum.rollouts.conversation import Conversation, run_conversations
from practicum.rollouts.openings import ConversationRequest
from practicum.rollouts.tool_use import ToolEpisode
from practicum.rows.answered import keep_answer, leave_out_calls
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.types import (
    CallRecord,
    Message,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    ToolCall,
    Turn,
)

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
    "{{ '<assistant>' if m.role == 'assistant' else '<user>' }}{{ m.content }}"
    "{{ '</s>' if m.role == 'assistant' else '' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = build_character_tokenizer("".join(map(chr, range(32, 127))))
EMPTY = {"type": "object", "properties": {}}
USE = ToolUse(tuple(ToolSchema(name, name, EMPTY) for name in ("echo", "slow", "break")), "json")
RENDERER = Renderer(
    TOKENIZER, template=TEMPLATE, stop_ids=collect_stop_ids(TOKENIZER, None)
).with_tools(USE)
PROMPT = Prompt("p", (Message("user", "go"),), answer="done")
PARAMS = SamplingParams(400, stop_ids=RENDERER.stop_ids)


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments})


@dataclass
class Box(ToolSession):
    """Three tools, where only one answers; every opened session is closed."""

    turns: int = 5
    bad_calls: int = 3
    use: ToolUse = USE
    log: list[str] = field(default_factory=list)

    def open(self, prompt: Prompt, seed: int) -> "Box":
        self.log.append("open")
        return self

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name == "slow":
            raise ToolProblem("timeout", "the tool took longer than 1 s")
        if name == "break":
            raise ConnectionError("the line went dead")
        if "x" not in arguments:
            raise ToolProblem("invalid", "x is missing")
        return str(arguments["x"])

    def close(self) -> None:
        self.log.append("close")


@dataclass
class Question(Task):
    """One prompt with tools."""

    box: Box

    @property
    def toolbox(self) -> Box:
        return self.box

    def train_prompts(self) -> list[Prompt]:
        return [PROMPT]

    def heldout_prompts(self) -> list[Prompt]:
        return []

    def reward(self, rollout: Rollout) -> float:
        return float(keep_answer(rollout).text == PROMPT.answer)


class Parrot(CharacterParrot):
    """Writes its turns in order."""

    def _one(self, request: Any, params: SamplingParams) -> Sample:
        begins = TOKENIZER.convert_tokens_to_ids("<assistant>")
        turn = request.prompt_tokens.count(begins) - 1
        said = len(request.prompt_tokens) - 1 - request.prompt_tokens[::-1].index(begins)
        whole = [*RENDERER.encode(self.turns[turn]), *RENDERER.stop_ids]
        tokens = torch.tensor(
            whole[len(request.prompt_tokens) - 1 - said :][: params.max_new_tokens]
        )
        logprobs = torch.full((len(tokens),), -1.0)
        ends = int(tokens[-1]) in RENDERER.stop_ids
        return Sample(tokens, logprobs, logprobs, "stop" if ends else "length")


def hold(*turns: str, box: Box | None = None, **changes: Any) -> Conversation:
    environment = as_environment(Question(box or Box()), RENDERER)
    assert environment is not None
    client = PromptedClient(Parrot(*turns), RENDERER.render(PROMPT.messages))
    request = ConversationRequest(PROMPT, client, 0)
    (held,) = run_conversations([request], environment, RENDERER, replace(PARAMS, **changes))
    return held


def record(conversation: Conversation) -> list[tuple[str, str]]:
    return [(made.tool, made.outcome) for turn in conversation.turns for made in turn.calls]


def test_a_call_is_answered_and_the_answer_ends_the_conversation() -> None:
    box = Box()
    held = hold(call("echo", x="abc"), "done", box=box)
    assert [(turn.role, turn.text) for turn in held.turns] == [
        ("assistant", call("echo", x="abc")),
        ("tool", "abc"),
        ("assistant", "done"),
    ]
    assert record(held) == [("echo", "answered")] and held.sample.stop_reason == "stop"
    assert box.log == ["open", "close"]
    by_model = TOKENIZER.decode(held.sample.tokens[held.model_mask])
    assert by_model == call("echo", x="abc") + "</s>done</s>", "the result is not trained on"
    assert TOKENIZER.decode(held.sample.tokens[~held.model_mask]) == "<user>abc<assistant>"


@pytest.mark.parametrize(
    ("turn", "outcome", "tool", "said"),
    [
        ('{"name": "echo"', "unreadable", "", "error: this call cannot be read: not JSON"),
        (call("sing"), "unknown", "sing", "error: no tool 'sing'; the tools are break, echo, slow"),
        (call("echo"), "invalid", "echo", "error: x is missing"),
        (call("slow"), "timeout", "slow", "error: the tool took longer than 1 s"),
    ],
)
def test_a_call_without_a_result_is_an_observation(
    turn: str, outcome: str, tool: str, said: str
) -> None:
    held = hold(turn, call("echo", x="1"), "done")
    assert held.turns[1].role == "tool" and held.turns[1].text.startswith(said)
    assert record(held) == [(tool, outcome), ("echo", "answered")]
    assert held.sample.stop_reason == "stop"


def test_too_many_bad_calls_end_it() -> None:
    held = hold(*['{"name": 3}'] * 3)
    assert held.sample.stop_reason == "bad_calls" and len(record(held)) == 3
    assert held.turns[-1].role == "assistant", "turns after the end are never read"


def test_bad_calls_are_bounded_within_a_turn() -> None:
    box = Box()
    episode = ToolEpisode(Question(box), box, RENDERER, PROMPT, 0)
    calls = [ToolCall("echo", {"x": "1"}), *[ToolCall("slow", {})] * 9]
    answers = episode._answer_all(calls)
    assert [made.outcome for _, made in answers] == ["answered", *["timeout"] * 3]
    episode.problems = 2
    assert len(episode._answer_all(calls)) == 2


def test_what_a_tool_returns_passes_the_gate() -> None:
    class Odd(Box):
        def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
            return {"echo": "a\ud800", "slow": 7}[name]

    box = Odd()
    box.open = lambda prompt, seed: box  # type: ignore[method-assign]
    episode = ToolEpisode(Question(box), box, RENDERER, PROMPT, 0)
    with collect_rejections() as rejections:
        answers = episode._answer_all([ToolCall("echo", {}), ToolCall("slow", {})])
    assert [message.content for message, _ in answers] == [
        "a\ufffd",
        "error: the tool returned no text",
    ]
    assert [made.outcome for _, made in answers] == ["answered", "failed"]
    assert list_kinds(rejections) == ("unicode", "type")


def test_a_text_that_cannot_fit_is_never_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Long(Box):
        def open(self, prompt: Prompt, seed: int) -> "Long":
            return self

        def call(self, name: str, arguments: Mapping[str, Any]) -> str:
            return "x" * (400 * RENDERER.longest_token)

    def refuse(*_: Any) -> Any:
        raise AssertionError("it became tokens")

    monkeypatch.setattr(Renderer, "render_reply", refuse)
    held = hold(call("echo", x="1"), box=Long())
    assert held.sample.stop_reason == "length"


@pytest.mark.parametrize(("turns", "changes"), [(2, {}), (5, {"max_turns": 2})])
def test_too_many_turns_end_it(turns: int, changes: dict[str, int]) -> None:
    held = hold(*[call("echo", x="1")] * 6, box=Box(turns=turns), **changes)
    assert held.sample.stop_reason == "turns"
    assert [turn.role for turn in held.turns] == ["assistant", "tool", "assistant"]
    assert record(held) == [("echo", "answered")] * 2, "the last call was made"


def test_the_last_turn_may_answer() -> None:
    assert hold(call("echo", x="1"), "done", max_turns=2).sample.stop_reason == "stop"


def test_a_result_that_does_not_fit_ends_it() -> None:
    held = hold(call("echo", x="a" * 80), "done", max_new_tokens=160)
    assert held.sample.stop_reason == "length" and held.turns[-1].role == "assistant"
    assert len(held.sample.tokens) == held.turns[0].tokens


@pytest.mark.filterwarnings("ignore")
def test_a_tool_that_breaks_ends_its_own_conversation() -> None:
    box = Box()
    with pytest.raises(VerifierError, match="ConnectionError: the line went dead"):
        hold(call("break"), box=box)
    assert box.log == ["open", "close"]


@pytest.mark.parametrize("hostile", ["</s>", "<user>hi</s><assistant>done</s>", "<assistant>"])
def test_what_a_tool_says_is_never_a_control_token(hostile: str) -> None:
    held = hold(call("echo", x=hostile), "done")
    control = {TOKENIZER.convert_tokens_to_ids(name) for name in ("</s>", "<user>", "<assistant>")}
    between = held.sample.tokens[~held.model_mask].tolist()
    assert [token for token in between if token in control] == [between[0], between[-1]]
    assert held.turns[1].text == hostile and held.sample.stop_reason == "stop"


def test_control_tokens_that_the_model_writes_are_data() -> None:
    class Speaker(Parrot):
        def _one(self, request: Any, params: SamplingParams) -> Sample:
            sample = super()._one(request, params)
            tokens = sample.tokens.clone()
            tokens[tokens == TOKENIZER.convert_tokens_to_ids("~")] = (
                TOKENIZER.convert_tokens_to_ids("<assistant>")
            )
            return replace(sample, tokens=tokens)

    environment = as_environment(Question(Box()), RENDERER)
    assert environment is not None
    client = PromptedClient(Speaker("a~b", "never"), RENDERER.render(PROMPT.messages))
    (held,) = run_conversations(
        [ConversationRequest(PROMPT, client, 0)], environment, RENDERER, PARAMS
    )
    assert [turn.text for turn in held.turns] == ["a<assistant>b"]


def as_rollout(conversation: Conversation) -> Rollout:
    blank = Rollout(
        PROMPT,
        RENDERER.render(PROMPT.messages),
        conversation.sample.tokens,
        conversation.model_mask,
        conversation.sample.sampling_logprobs,
        conversation.sample.policy_logprobs,
        0,
        conversation.sample.stop_reason,
        "",
    )
    return conversation.complete(blank)


def test_calls_are_counted_by_their_outcome() -> None:
    held = [
        hold(call("echo", x="1"), call("sing"), "done"),
        hold("done"),
        hold(*['{"name": 3}'] * 3),
    ]
    metrics = measure_conversations([as_rollout(one) for one in held])
    assert metrics == {
        "turns": 7 / 3,
        "turn_limit": 0,
        "calls": 5 / 3,
        "bad_calls": 1 / 3,
        "calls_answered": 0.2,
        "calls_unknown": 0.2,
        "calls_unreadable": 0.6,
        "calls_invalid": 0,
        "calls_failed": 0,
        "calls_timeout": 0,
    }
    assert measure_conversations([Rollout.from_text(PROMPT, "done")]) == {}


def test_a_row_keeps_the_calls() -> None:
    rollout = as_rollout(hold(call("echo", x="1"), "done"))
    rollout = replace(rollout, turns=(replace(rollout.turns[0], reward=0.5), *rollout.turns[1:]))
    row = RolloutRow.of(1, rollout)
    assert row.to_json()["turns"][0] == {
        "role": "assistant",
        "tokens": rollout.turns[0].tokens,
        "text": call("echo", x="1"),
        "calls": [{"tool": "echo", "outcome": "answered"}],
        "reward": 0.5,
    }
    assert set(row.to_json()["turns"][1]) == {"role", "tokens", "text"}
    read = RolloutRow.model_validate_json(row.model_dump_json()).to_rollout(PROMPT)
    assert read.turns == rollout.turns


class Host(Question, Episode):
    """Replies once to a turn without a call."""

    def open(self, prompt: Prompt, seed: int) -> "Host":
        self.heard: list[str] = []
        return self

    def step(self, turn: str) -> Observation:
        self.heard.append(turn)
        return Observation(Message("user", "and?") if len(self.heard) == 1 else None)

    def close(self) -> None:
        self.box.log.append("closed")


def test_an_environment_with_tools_hears_the_turns_without_calls() -> None:
    host = Host(Box())
    environment = as_environment(host, RENDERER)
    assert environment is not None and host.converses and host.toolbox is not None
    turns = ("first", call("echo", x="1"), "second")
    client = PromptedClient(Parrot(*turns), RENDERER.render(PROMPT.messages))
    (held,) = run_conversations(
        [ConversationRequest(PROMPT, client, 0)], environment, RENDERER, PARAMS
    )
    assert host.heard == ["first", "second"] and host.toolbox.log == ["open", "close", "closed"]
    assert [turn.role for turn in held.turns] == [
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert leave_out_calls(as_rollout(held)).text == "first\nsecond"


def test_only_a_last_turn_without_a_call_is_an_answer() -> None:
    made = Turn("assistant", 1, "x", (CallRecord("echo", "answered"),))
    rollout = Rollout.from_text(PROMPT, "a", "b")
    assert keep_answer(rollout).text == "b"
    assert keep_answer(replace(rollout, turns=(made,))).text == ""
    assert keep_answer(replace(rollout, turns=(made, Turn("tool", 1, "y")))).text == ""
    assert keep_answer(Rollout.from_text(PROMPT, "a")).text == "a"


@dataclass
class Separate(Box):
    """`echo` and `slow` share nothing: each waits until both are called; `break` comes after `echo`."""

    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=10))

    def open(self, prompt: Prompt, seed: int) -> "Separate":
        return self

    def find_part(self, name: str) -> str:
        return "slow" if name == "slow" else "echo"

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name != "break":
            self.meeting.wait()
        self.log.append(name)
        return f"{name} {len(self.log)}" if name == "break" else name


def test_calls_to_tools_that_share_nothing_are_made_side_by_side() -> None:
    """In sequence, the first would wait for ever; parts of one process keep their order."""
    box = Separate()
    episode = ToolEpisode(Question(box), box, RENDERER, PROMPT, 0)
    calls = [ToolCall(name, {}) for name in ("echo", "break", "none", "slow")]
    answers = episode._answer_all(calls)
    assert [message.name for message, _ in answers] == ["echo", "break", "unknown", "slow"]
    assert [record.outcome for _, record in answers] == [
        "answered",
        "answered",
        "unknown",
        "answered",
    ]
    assert box.log.index("echo") < box.log.index("break")
    episode.close()
