"""Agents of the `verifiers` library: its tasksets, its harnesses, and a chat loop in this process."""

import asyncio
import importlib.util
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from practicum.agents.token_engine import MODEL
from practicum.core.strict_json import JsonError, parse_json
from practicum.errors import DataError, suggest_install
from practicum.text.safe import excerpt
from practicum.types import Message

KEY = "PRACTICUM_ENGINE_KEY"
"""The name of an environment variable that is never set; the library requires a name."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """A task of a taskset: its name, and the initial messages of its agent."""

    name: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """The result of an agent's run: its reward if it was scored, and its error, if any."""

    reward: float | None
    problem: str = ""


@cache
def start_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all agents of this process, which runs in a separate thread."""
    # The library shares locks between its clients, and a lock belongs to one loop. Two stages of a
    # pipeline, for example, must therefore share the loop.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


class VerifiersRunner:
    """Runs agents with the `verifiers` library."""

    def __init__(
        self, taskset: str, settings: Mapping[str, JsonValue], harness: str | None
    ) -> None:
        self._vf: Any = import_module("verifiers.v1")
        loaders: Any = import_module("verifiers.v1.utils.loaders")
        config = loaders.taskset_config_type(taskset).model_validate({**settings, "id": taskset})
        self._taskset = loaders.load_taskset(config)
        self._harness = harness
        self._tasks: list[Any] = []

    def list_tasks(self, count: int) -> list[AgentTask]:
        """Return the first tasks with the prompts that a chat loop begins with.

        DataError if a task cannot be loaded or its prompt is not text.
        """
        described: list[AgentTask] = []
        try:
            self._tasks = list(islice(iter(self._taskset), count))
            for number, task in enumerate(self._tasks):
                described.append(_describe_task(task.data, number))
        except DataError:
            raise
        # A taskset is foreign code, which may fail in any way.
        except Exception as error:
            raise DataError(
                f"task.taskset: its task {len(described)} cannot be read "
                f"({excerpt(f'{type(error).__name__}: {error}')}); fix the taskset or its settings"
            ) from error
        return described

    def executes_code(self) -> bool:
        """Return True if the harness lets the model run programs on this machine.

        DataError if there is no such harness.
        """
        try:
            return bool(self._find_harness().EXECUTES_CODE)
        # A harness is foreign code, which may fail in any way while it is imported.
        except Exception as error:
            raise DataError(
                f"task.harness: {self._harness!r} cannot be loaded "
                f"({excerpt(f'{type(error).__name__}: {error}')})"
            ) from error

    def _find_harness(self) -> Any:
        loaders: Any = import_module("verifiers.v1.utils.loaders")
        return build_chat_loop() if self._harness is None else loaders.harness_class(self._harness)

    def start(self, index: int, base_url: str, tokenizer: Path) -> "Future[AgentEnd]":
        """Start an agent on a task, with the model at an endpoint."""
        return asyncio.run_coroutine_threadsafe(
            self._run(self._tasks[index], base_url, tokenizer), start_loop()
        )

    async def _run(self, task: Any, base_url: str, tokenizer: Path) -> AgentEnd:
        try:
            return await self._work(task, base_url, tokenizer)
        # An uncaught SystemExit would end the event loop of all agents.
        except SystemExit as error:
            return AgentEnd(None, f"the harness left with {error!r}")

    async def _work(self, task: Any, base_url: str, tokenizer: Path) -> AgentEnd:
        # Our chat loop is not a plug-in with an id; it replaces the library's `null` harness.
        name = self._harness or "null"
        loaders: Any = import_module("verifiers.v1.utils.loaders")
        harness = loaders.harness_config_type(name)(id=name)
        # No key is read from the environment: the address itself is the secret.
        client = self._vf.TrainClientConfig(
            base_url=base_url, api_key_var=KEY, renderer_model_name=str(tokenizer)
        )
        agent = self._vf.make_agent(
            self._vf.AgentConfig(
                model=MODEL, harness=harness, runtime=self._vf.SubprocessConfig(), client=client
            )
        )
        if self._harness is None:
            agent.harness = build_chat_loop()(harness)
        trace = await agent.run(task)
        scored = any(reward is not None for reward in trace.rewards.values())
        problem = "" if trace.last_error is None else excerpt(str(trace.last_error))
        return AgentEnd(float(trace.reward) if scored else None, problem)


def _describe_task(details: Any, number: int) -> AgentTask:
    if details.prompt is None:
        raise DataError(
            f"task.taskset: task {number} has no prompt, because another participant opens its "
            "conversation; use a taskset in which every task has a prompt"
        )
    turns = (
        [{"role": "user", "content": details.prompt}]
        if isinstance(details.prompt, str)
        else [message.model_dump() for message in details.prompt]
    )
    if details.system_prompt is not None:
        turns = [{"role": "system", "content": details.system_prompt}, *turns]
    if not all(isinstance(turn["content"], str) for turn in turns):
        raise DataError(f"task.taskset: the prompt of task {number} contains more than text")
    messages = tuple(Message(turn["role"], turn["content"]) for turn in turns)
    return AgentTask(str(details.id or number), messages)


def build_chat_loop() -> Any:
    """Return a harness that asks the model until it calls no tool, inside this process."""
    vf: Any = import_module("verifiers.v1")

    class ChatLoop(vf.Harness):  # type: ignore[misc]
        """See `verifiers.v1.Harness`."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        # The library defines the parameters.
        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: Mapping[str, str],
            data: Any,
        ) -> Any:
            """Chat through the endpoint; the trace contains every request."""
            system, prompt = self.resolve_prompt(data)
            messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                wire: Any = import_module("verifiers.v1.dialects.chat")
                messages += [wire.message_to_wire(message) for message in prompt or []]
            await _chat(endpoint, secret, messages, mcp_urls)
            runtimes: Any = import_module("verifiers.v1.runtimes")
            return runtimes.ProgramResult(exit_code=0, stdout="", stderr="")

    return ChatLoop


async def _chat(
    endpoint: str, secret: str, messages: list[Any], mcp_urls: Mapping[str, str]
) -> None:
    """Ask the model and answer its tool calls until a turn has no calls."""
    openai: Any = import_module("openai")
    tools: Any = import_module("verifiers.v1.harnesses.utils.mcp")
    servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
    async with (
        AsyncExitStack() as stack,
        openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client,
    ):
        schemas, dispatch, connections = await tools.connect_mcp(servers, stack)
        more = {"tools": schemas} if schemas else {}
        while True:
            completion = await client.chat.completions.create(
                model=MODEL, messages=messages, **more
            )
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                text = await _call_tool(tools, connections, dispatch, call.function)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def _call_tool(tools: Any, connections: Any, dispatch: Mapping[str, Any], call: Any) -> str:
    """Return the tool's answer or an error text; the model reads either."""
    if call.name not in dispatch:
        return f"error: no tool {call.name!r}; the tools are {', '.join(sorted(dispatch))}"
    try:
        arguments = parse_json(call.arguments or "{}")
    except JsonError as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return str(await tools.call_mcp(connections, dispatch, call.name, arguments))


def open_runner(
    taskset: str, settings: Mapping[str, JsonValue], harness: str | None
) -> VerifiersRunner:
    """Open the library; DataError if it is missing or has no such taskset or harness."""
    if importlib.util.find_spec("verifiers") is None:
        raise DataError(
            f"task: type verifiers needs the package verifiers; {suggest_install('verifiers')}"
        )
    try:
        return VerifiersRunner(taskset, settings, harness)
    # A taskset is foreign code, which may fail in any way while it is loaded.
    except Exception as error:
        raise DataError(
            f"task.taskset: {taskset!r} cannot be loaded "
            f"({excerpt(f'{type(error).__name__}: {error}')})"
        ) from error
