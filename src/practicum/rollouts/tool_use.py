"""Conversations with tools: parse a turn's calls, answer them with the task's tools, count them.

A turn without a call is the answer. A call that cannot be parsed or answered also produces an
observation: the model reads the reason, and may call again.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import get_args

from practicum.ports import (
    Episode,
    Observation,
    OpensEpisodes,
    Task,
    Toolbox,
    ToolSession,
)
from practicum.ports.gate import accept_text
from practicum.ports.tasks import ToolProblem
from practicum.text import Renderer, excerpt
from practicum.text.tool_calls import UnreadableCall
from practicum.types import (
    CallOutcome,
    CallRecord,
    Message,
    Metrics,
    Prompt,
    Rollout,
    ToolCall,
)


def as_environment(task: Task, renderer: Renderer) -> OpensEpisodes | None:
    """Return the task as an environment if its completions are conversations, else None.

    The renderer reads the calls of a task with tools.
    """
    if task.is_harnessed:
        return HarnessEnvironment(task, renderer)
    if task.toolbox is not None:
        return ToolEnvironment(task, task.toolbox, renderer)
    return task if task.opens_episodes else None


@dataclass(frozen=True, slots=True)
class HarnessEnvironment:
    """A task with a harness that runs the conversations; see `practicum.ports.OpensEpisodes`."""

    task: Task
    renderer: Renderer

    def open(self, prompt: Prompt, seed: int) -> Episode:
        """Begin a conversation with the student's tokenizer."""
        return self.task.open_tokens(prompt, seed, self.renderer.save)


@dataclass(frozen=True, slots=True)
class ToolEnvironment:
    """A task with tools as an environment; see `practicum.ports.OpensEpisodes`."""

    task: Task
    toolbox: Toolbox
    renderer: Renderer

    def open(self, prompt: Prompt, seed: int) -> "ToolEpisode":
        """Begin a conversation; its tools and the task's episode are opened on first use."""
        return ToolEpisode(self.task, self.toolbox, self.renderer, prompt, seed)


@dataclass(slots=True)
class ToolEpisode(Episode):
    """A conversation in which the model may call tools; see `practicum.ports.Episode`."""

    task: Task
    toolbox: Toolbox
    renderer: Renderer
    prompt: Prompt
    seed: int
    problems: int = 0
    turns: int = 0
    session: ToolSession | None = None
    inner: Episode | None = None
    opened: ExitStack = field(default_factory=ExitStack)

    def step(self, turn: str) -> Observation:
        """Answer the calls of the turn, or end the conversation with a turn that has none."""
        try:
            calls = self.renderer.read_calls(turn)
        except UnreadableCall as reason:
            refusal = Message("tool", f"error: this call cannot be read: {reason}", "unreadable")
            return self._observe([(refusal, CallRecord("", "unreadable"))])
        return self._observe(self._answer_all(calls)) if calls else self._reply(turn)

    def _reply(self, turn: str) -> Observation:
        """Return the reply of the task's own episode to a turn without a call, if it has one."""
        if not self.task.opens_episodes:
            return Observation(None)
        if self.inner is None:
            self.inner = self.task.open(self.prompt, self.seed)
            self.opened.callback(self.inner.close)
        return self.inner.step(turn)

    def _answer_all(self, calls: Sequence[ToolCall]) -> list[tuple[Message, CallRecord]]:
        """Answer the calls in order; calls to independent tools run in parallel."""
        parts = [self._find_part(call.name) for call in calls]
        by_part = {
            part: [call for call, owner in zip(calls, parts, strict=True) if owner == part]
            for part in parts
        }
        if len(by_part) == 1:
            return self._answer_part(calls)
        with ThreadPoolExecutor(len(by_part)) as pool:
            # Notes belong to the context of the run.
            runs = {
                part: pool.submit(copy_context().run, self._answer_part, group)
                for part, group in by_part.items()
            }
            answers = {part: iter(run.result()) for part, run in runs.items()}
        # A part that ended early has no answers for its last calls.
        ordered = [next(answers[part], None) for part in parts]
        return [answer for answer in ordered if answer is not None]

    def _answer_part(self, calls: Sequence[ToolCall]) -> list[tuple[Message, CallRecord]]:
        """Answer the calls to one part, up to a bad call that ends the conversation."""
        answers: list[tuple[Message, CallRecord]] = []
        # Each part counts its own bad calls, so the calls made do not depend on the clock.
        remaining = self.toolbox.bad_calls - self.problems
        for call in calls:
            if remaining <= 0:
                break
            answer = self._answer(call)
            remaining -= answer[1].outcome != "answered"
            answers.append(answer)
        return answers

    def _find_part(self, name: str) -> Hashable:
        """Return an identifier of the tools that a call may affect; None for an unknown tool."""
        if name not in {schema.name for schema in self.toolbox.use.schemas}:
            return None
        return self._open_tools().find_part(name)

    def _open_tools(self) -> ToolSession:
        # Start the process on first use: most conversations of an untrained model never call a tool.
        if self.session is None:
            self.session = self.toolbox.open(self.prompt, self.seed)
            self.opened.callback(self.session.close)
        return self.session

    def _answer(self, call: ToolCall) -> tuple[Message, CallRecord]:
        names = {schema.name for schema in self.toolbox.use.schemas}
        # The name is text of the model; truncate it to keep the log small.
        name = excerpt(call.name, most=64)
        if call.name not in names:
            text = f"error: no tool {name!r}; the tools are {', '.join(sorted(names))}"
            return Message("tool", text, "unknown"), CallRecord(name, "unknown")
        try:
            result = self._open_tools().call(call.name, call.arguments)
        except ToolProblem as problem:
            refusal = Message("tool", f"error: {problem}", call.name)
            return refusal, CallRecord(name, problem.outcome)
        text = accept_text(result, f"the result of the tool {name!r}")
        if text is None:
            refusal = Message("tool", "error: the tool returned no text", call.name)
            return refusal, CallRecord(name, "failed")
        return Message("tool", text, call.name), CallRecord(name, "answered")

    def _observe(self, answers: Sequence[tuple[Message, CallRecord]]) -> Observation:
        """Join the answers into one observation; too many bad calls end the conversation."""
        records = tuple(record for _, record in answers)
        self.problems += sum(record.outcome != "answered" for record in records)
        self.turns += 1
        if self.problems >= self.toolbox.bad_calls:
            return Observation(None, calls=records, stop_reason="bad_calls")
        if self.turns >= self.toolbox.turns:
            return Observation(None, calls=records, stop_reason="turns")
        first, *more = (message for message, _ in answers)
        return Observation(first, more=tuple(more), calls=records)

    def close(self) -> None:
        """Close the tools and the task's own episode."""
        self.opened.close()


def measure_conversations(rollouts: Sequence[Rollout]) -> Metrics:
    """Return turns and calls per rollout, the shares of bad ends, and the shares of call outcomes.

    Empty if no rollout is a conversation; the metrics of calls are omitted if there are no calls.
    """
    conversations = [rollout for rollout in rollouts if rollout.turns]
    if not conversations:
        return {}
    turns = [
        turn for rollout in conversations for turn in rollout.turns if turn.role == "assistant"
    ]
    stops = Counter(rollout.stop_reason for rollout in conversations)
    metrics = {
        "turns": len(turns) / len(conversations),
        "turn_limit": stops["turns"] / len(conversations),
        # Omitted without timeouts, because most environments never time out.
        **({"timed_out": stops["timeout"] / len(conversations)} if stops["timeout"] else {}),
    }
    outcomes = Counter(call.outcome for turn in turns for call in turn.calls)
    if not outcomes:
        return metrics
    calls, surplus = outcomes.total(), _count_surplus(conversations)
    return {
        **metrics,
        **({} if surplus is None else {"calls_surplus": surplus}),
        "calls": calls / len(conversations),
        "bad_calls": stops["bad_calls"] / len(conversations),
        **{f"calls_{name}": outcomes[name] / calls for name in get_args(CallOutcome)},
    }


def _count_surplus(conversations: Sequence[Rollout]) -> float | None:
    """Return the mean number of calls of correct answers in excess of their prompt's minimum.

    Unnecessary calls add cost without solving more. None if no prompt has two correct answers.
    """
    by_prompt: dict[str, list[int]] = {}
    for rollout in conversations:
        if rollout.reward is not None and rollout.reward >= 1:
            calls = sum(len(turn.calls) for turn in rollout.turns)
            by_prompt.setdefault(rollout.prompt.id, []).append(calls)
    surpluses = [
        count - min(counts) for counts in by_prompt.values() if len(counts) > 1 for count in counts
    ]
    return sum(surpluses) / len(surpluses) if surpluses else None
