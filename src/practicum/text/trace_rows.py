"""Traces of agents in the format of the library verifiers (schema 1): one JSON object a line.

A trace is a graph of messages with their tokens. Each path from its beginning to a last message is
one conversation, token for token as the model read and wrote it. Any harness of that library writes
such lines; they are read here without it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from practicum.errors import DataError
from practicum.types import Message, Prompt, StopReason, Turn

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Logprob = Annotated[float, Field(ge=-1e4, le=0.1)]
"""The log-probability of a sampled token, which may exceed 0 by rounding."""
LARGEST_REWARD = 1e15
"""The largest absolute reward; its square is still finite in float32."""

STOP_REASONS: Mapping[str, StopReason] = {
    "max_turns": "turns",
    "max_total_tokens": "length",
    "max_output_tokens": "length",
    "context_length": "length",
    "length": "length",
}
"""The conditions that end a trace, other than the model and an error."""


class _TracePart(BaseModel):
    # Fields that are not read here belong to others; a later schema has another `version`.
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class _TextPart(_TracePart):
    type: Literal["text"]
    text: str


class _MessageRow(_TracePart):
    role: str
    content: str | list[_TextPart] | None = None
    name: str | None = None

    def to_message(self) -> Message:
        """Return the message as a prompt holds it."""
        parts = [self.content or ""] if not isinstance(self.content, list) else self.content
        texts = [part if isinstance(part, str) else part.text for part in parts]
        return Message(self.role, "".join(texts), self.name)


class _LinkRow(_TracePart):
    node: int
    type: str


class NodeRow(_TracePart):
    """One message: the tokens that it adds, and which of them the model sampled."""

    parent: int | None = None
    message: _MessageRow
    semantic_parents: list[_LinkRow] = []
    token_ids: list[TokenId] = []
    mask: list[bool] = []
    logprobs: list[Logprob] = []

    @model_validator(mode="after")
    def _check_lengths(self) -> "NodeRow":
        if len(self.mask) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} token_ids and {len(self.mask)} in mask")
        if len(self.logprobs) not in (0, sum(self.mask)):
            raise ValueError(f"{sum(self.mask)} tokens were sampled, {len(self.logprobs)} logprobs")
        return self


class _DataRow(_TracePart):
    id: str | None = None
    idx: int | None = None


class _TaskRow(_TracePart):
    data: _DataRow
    key: str | None = None


class _AgentRow(_TracePart):
    trainable: bool = True


class _RewardRow(_TracePart):
    score: float
    weight: float = 1.0


class _ModelCallRow(_TracePart):
    node: int | None = None
    finish_reason: str | None = None


class TraceRow(_TracePart):
    """One trace: its graph of messages, and the rewards of the whole."""

    version: Literal[1]
    id: str
    task: _TaskRow
    agent: _AgentRow = _AgentRow()
    nodes: list[NodeRow]
    rewards: dict[str, _RewardRow | None] = {}
    calls: list[_ModelCallRow] = []
    stop_condition: str | None = None
    is_timeout: bool = False
    errors: list[JsonValue] = []

    @model_validator(mode="after")
    def _check_graph(self) -> "TraceRow":
        for number, node in enumerate(self.nodes):
            if node.parent is not None and not 0 <= node.parent < number:
                raise ValueError(
                    f"node {number} follows node {node.parent}, which is not before it"
                )
        if not abs(self.reward or 0.0) <= LARGEST_REWARD:
            raise ValueError(f"the sum of its rewards is {self.reward:g}")
        return self

    @property
    def name(self) -> str:
        """The name of the task that the trace is about, else its own."""
        data = self.task.data
        index = None if data.idx is None else str(data.idx)
        return data.id or index or self.task.key or self.id

    @property
    def reward(self) -> float | None:
        """The weighted sum of its rewards; None if nothing was scored."""
        rewards = [reward for reward in self.rewards.values() if reward is not None]
        return sum(reward.score * reward.weight for reward in rewards) if rewards else None

    def find_stop_reason(self, path: Sequence[int]) -> StopReason:
        """Return what ended a conversation: the trace's end, or the limit of its last answer."""
        if self.is_timeout:
            return "timeout"
        if self.errors:
            return "error"
        last = max(number for number in path if any(self.nodes[number].mask))
        cut = any(call.node == last and call.finish_reason == "length" for call in self.calls)
        return STOP_REASONS.get(self.stop_condition or "", "length" if cut else "stop")

    def list_paths(self) -> list[tuple[int, ...]]:
        """Return the nodes of each trainable conversation, from its beginning.

        Attempts to shorten the history that the harness did not continue from are left out.
        """
        if not self.agent.trainable:
            return []
        followed = {node.parent for node in self.nodes}
        links = [link for node in self.nodes for link in node.semantic_parents]
        resumed = {link.node for link in links if link.type == "compaction"}
        paths = []
        for leaf, node in enumerate(self.nodes):
            is_attempt = any(link.type == "compaction_attempt" for link in node.semantic_parents)
            if leaf in followed or (is_attempt and leaf not in resumed):
                continue
            # Parents come before their children, so this loop ends.
            path, place = [leaf], node.parent
            while place is not None:
                path.append(place)
                place = self.nodes[place].parent
            # A conversation without sampled tokens was recorded for evaluation, only as text.
            if any(any(self.nodes[number].mask) for number in path):
                paths.append(tuple(reversed(path)))
        return paths


@dataclass(frozen=True, slots=True)
class TracedAnswer:
    """One conversation of a trace: its prompt, and all tokens from the first sampled one on.

    `path` are its messages in the trace. `mask` is True at the tokens that the model sampled,
    `logprobs` has their log-probabilities under the sampling distribution, 0 elsewhere and where
    they are not known.
    """

    line: int
    trace: TraceRow
    path: tuple[int, ...]
    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    tokens: list[int]
    mask: list[bool]
    logprobs: list[float]
    turns: tuple[Turn, ...]
    stop_reason: StopReason


def read_traced_answers(path: Path) -> list[TracedAnswer]:
    """Return the conversations of a trace file, in order; an unchanged file is read only once.

    Prompts have the name of their task; further prompts of the same task get a numeric suffix.
    Raises DataError with the number of a line that is not a trace, or if the file has no trainable
    conversation.
    """
    try:
        state = path.stat()
    except OSError as error:
        raise DataError(f"the traces {path} cannot be read ({error.strerror})") from error
    # The recipe's check, the task and the source all ask for the same conversations.
    return list(_read_answers(path.resolve(), state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=1)
def _read_answers(path: Path, changed: int, size: int) -> tuple[TracedAnswer, ...]:
    # A task may be asked in several ways, and a prompt's id has to name one of them: tapes, random
    # streams and reports go by it.
    names: dict[str, dict[tuple[Message, ...], str]] = {}
    answers = []
    for line, trace in read_traces(path):
        for nodes in trace.list_paths():
            parts = [trace.nodes[number] for number in nodes]
            first = next(number for number, node in enumerate(parts) if any(node.mask))
            messages = tuple(node.message.to_message() for node in parts[:first])
            same = names.setdefault(trace.name, {})
            name = f"{trace.name}#{len(same) + 1}" if same else trace.name
            prompt = Prompt(same.setdefault(messages, name), messages)
            answers.append(_build_answer(line, trace, nodes, prompt, first))
    if not answers:
        raise DataError(
            f"{path}: no trace has tokens that a model sampled; record traces with a client that "
            "returns token ids (verifiers: TrainClientConfig)"
        )
    return tuple(answers)


def read_traces(path: Path) -> Iterator[tuple[int, TraceRow]]:
    """Yield the number of each line and its trace; DataError if the file or a line is not readable."""
    for number, line in enumerate(read_lines(path), start=1):
        try:
            yield number, TraceRow.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "line"
            raise DataError(
                f"{path}: line {number} is no trace of verifiers, schema 1 ({field}: "
                f"{first['msg']}); write one JSON object of a trace a line"
            ) from error


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file of traces; DataError if it cannot be read."""
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"the traces {path} cannot be read ({error.strerror})") from error


def add_reference_logprobs(line: bytes, scores: Mapping[int, Sequence[float]]) -> str:
    """Return a trace's line with a teacher's log-probabilities of the sampled tokens of some nodes."""
    trace: dict[str, Any] = json.loads(line)
    for number, values in scores.items():
        trace["nodes"][number]["reference_logprobs"] = list(values)
    return json.dumps(trace, ensure_ascii=False)


def split_by_node(answer: TracedAnswer, values: Sequence[float]) -> dict[int, list[float]]:
    """Return the numbers of an answer's sampled tokens by the nodes of the trace that they are in."""
    # In the order of the path, in which the answer's tokens were joined.
    sampled = iter(
        [value for value, is_sampled in zip(values, answer.mask, strict=True) if is_sampled]
    )
    counts = {number: sum(answer.trace.nodes[number].mask) for number in answer.path}
    return {number: list(islice(sampled, count)) for number, count in counts.items() if count}


def _build_answer(
    line: int, trace: TraceRow, nodes: tuple[int, ...], prompt: Prompt, first: int
) -> TracedAnswer:
    """Return the conversation of a path; its first sampled token is in message number `first`."""
    parts = [trace.nodes[number] for number in nodes]
    tokens = [token for node in parts for token in node.token_ids]
    mask = [sampled for node in parts for sampled in node.mask]
    logprobs = [value for node in parts for value in _spread(node)]
    # What follows the last sampled token is neither learned from nor read.
    start, stop = mask.index(True), len(mask) - mask[::-1].index(True)
    return TracedAnswer(
        line,
        trace,
        nodes,
        prompt,
        tuple(tokens[:start]),
        tokens[start:stop],
        mask[start:stop],
        logprobs[start:stop],
        _list_turns(parts[first:], mask[start:stop]),
        trace.find_stop_reason(nodes),
    )


def _spread(node: NodeRow) -> list[float]:
    """Return the log-probability of each sampled token, and 0 for all other tokens."""
    # A sampled token without a recorded log-probability also gets 0: a behaviour probability of 1,
    # like the tokens of a dataset.
    values = iter(node.logprobs)
    return [next(values, 0.0) if sampled else 0.0 for sampled in node.mask]


def _list_turns(parts: Sequence[NodeRow], mask: Sequence[bool]) -> tuple[Turn, ...]:
    """Return the turns from the first sampled turn on; their token counts add up to the mask's.

    The environment's turn has all tokens between two turns of the model, template tokens included.
    """
    counts = [(sampled, len(list(run))) for sampled, run in groupby(mask)]
    replies = [node.message.to_message() for node in parts if any(node.mask)]
    between: list[list[Message]] = [[]]
    for node in parts[1:]:
        if any(node.mask):
            between.append([])
        else:
            between[-1].append(node.message.to_message())
    if len(counts) != 2 * len(replies) - 1:
        # A message's sampled tokens have gaps, and its text does not show which part is which.
        return ()
    turns = []
    for number, (sampled, count) in enumerate(counts):
        if sampled:
            turns.append(Turn("assistant", count, replies[number // 2].content))
            continue
        messages = between[number // 2]
        text = "\n".join(message.content for message in messages)
        # The role of the newest message; a harness may also let the model continue without one.
        turns.append(Turn(messages[-1].role if messages else "user", count, text))
    return tuple(turns) if len(turns) > 1 else ()
