"""Helpers of the tests of foreign packages and servers: odd values, and a task's reaction to them."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from practicum.core.plugins import load_plugin
from practicum.errors import PracticumError, VerifierError
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    SamplingClient,
    Task,
    TaskContext,
)
from practicum.ports.gate import check_prompts, repair_text
from practicum.prompts import ToolUse
from practicum.rollouts import as_environment
from practicum.rollouts.conversation import Conversation, run_conversations
from practicum.rollouts.openings import ConversationRequest
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.types import (
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

HALF = "\ud800"
LONG = "x" * ((1 << 20) + 1)
DEEP = "[" * 100_000

INNER = {"type": "reverse", "train_size": 4, "heldout_size": 1}
"""A task within a task."""

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
    "{{ '<assistant>' if m.role == 'assistant' else '<user>' }}{{ m.content }}"
    "{{ '</s>' if m.role == 'assistant' else '' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = build_character_tokenizer("".join(map(chr, range(32, 127))))
STOP_IDS = collect_stop_ids(TOKENIZER, None)


def is_valid(text: str) -> bool:
    return text == repair_text(text)


def build_task(folder: Path, name: str, **settings: Any) -> Task:
    module = load_plugin("tasks", name)
    config = module.Config.model_validate({"type": name, **settings})
    return module.build(config, TaskContext(0, folder, folder / "rejected.jsonl"))


def read_refusal(build: Callable[[], Task]) -> str:
    """Return the error line of a task that refuses to be built or shown; empty if its prompts are valid."""
    try:
        check_prompts(build().train_prompts())
    except PracticumError as error:
        line = str(error)
        assert line and "\n" not in line and is_valid(line), repr(line)
        return line
    return ""


class Voice(SamplingClient):
    """Writes its turns in order."""

    def __init__(self, renderer: Renderer, *turns: str) -> None:
        self.renderer, self.turns = renderer, turns

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(signals=frozenset())

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        return [self._say(request, params) for request in requests]

    def _say(self, request: SampleRequest, params: SamplingParams) -> Sample:
        marker = TOKENIZER.convert_tokens_to_ids("<assistant>")
        turn = request.prompt_tokens.count(marker) - 1
        said = request.prompt_tokens[::-1].index(marker)
        whole = [*self.renderer.encode(self.turns[turn]), *STOP_IDS][said:]
        tokens = torch.tensor(whole[: params.max_new_tokens])
        logprobs = torch.full((len(tokens),), -1.0)
        ends = len(tokens) == len(whole)
        return Sample(tokens, logprobs, logprobs, "stop" if ends else "length")

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        raise NotImplementedError


def converse(task: Task, *turns: str, tools: ToolUse | None = None) -> Conversation | str:
    """Return a conversation with valid values about the task's first prompt, or the line that ends the run."""
    renderer = make_renderer()
    renderer = renderer if tools is None else renderer.with_tools(tools)
    environment = as_environment(task, renderer)
    assert environment is not None
    prompt = task.train_prompts()[0]
    client = PromptedClient(Voice(renderer, *turns), renderer.render(prompt.messages))
    request = ConversationRequest(prompt, client, 0)
    params = SamplingParams(300, stop_ids=STOP_IDS, max_turns=2)
    try:
        (held,) = run_conversations([request], environment, renderer, params)
    except VerifierError as error:
        # The only conversation failed.
        line = str(error)
        assert "\n" not in line and is_valid(line), repr(line)
        return line
    for turn in held.turns:
        assert is_valid(turn.text) and math.isfinite(turn.reward or 0.0)
    return held


def make_renderer() -> Renderer:
    return Renderer(TOKENIZER, template=TEMPLATE, stop_ids=STOP_IDS)
