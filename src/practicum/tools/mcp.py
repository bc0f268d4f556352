"""The tools of a server that speaks the Model Context Protocol (MCP) over standard input.

The server is a program of the user's choice: it has the files and the network of this process, and
it ends with the run. One server answers all conversations, so what it remembers outlives them.
"""

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from pydantic import Field

from practicum.errors import DataError, suggest_install
from practicum.ports.gate import LONGEST_TEXT, reject
from practicum.ports.tasks import ToolProblem
from practicum.prompts import ToolSchema
from practicum.text.safe import excerpt
from practicum.types import FrozenConfig

MAX_PAGES = 100
"""The most pages of a list of tools that are asked for."""


class Config(FrozenConfig):
    """The program of the server, its environment, and the longest call."""

    type: Literal["mcp"] = "mcp"
    command: tuple[str, ...] = Field(
        min_length=1, description="the server's program and its arguments"
    )
    env: dict[str, str] = Field(default={}, description="variables of its environment")
    tools: tuple[str, ...] = Field(default=(), description="tools to offer; none: all it has")
    seconds: float = Field(default=30.0, gt=0, description="the longest call")


class PackageServer:
    """A connection through the `mcp` package; its event loop runs in a separate thread."""

    def __init__(self, config: Config) -> None:
        start_blocking_portal = import_module("anyio.from_thread").start_blocking_portal
        mcp, stdio = import_module("mcp"), import_module("mcp.client.stdio")
        program, *arguments = config.command
        settings = mcp.StdioServerParameters(
            command=program, args=arguments, env=dict(config.env) or None
        )
        self._open: list[AbstractContextManager[Any]] = []
        try:
            # The server's log would appear between the lines of the console.
            nowhere = self._enter(open(os.devnull, "w"))  # noqa: SIM115  (`close` closes it)
            self._portal = self._enter(start_blocking_portal())
            streams = self._enter(
                self._portal.wrap_async_context_manager(stdio.stdio_client(settings, nowhere))
            )
            self._session = self._enter(
                self._portal.wrap_async_context_manager(
                    mcp.ClientSession(*streams, read_timeout_seconds=config.seconds)
                )
            )
            self._portal.call(self._session.initialize)
        except BaseException:
            self.close()
            raise

    def _enter(self, manager: AbstractContextManager[Any]) -> Any:
        entered = manager.__enter__()
        self._open.append(manager)
        return entered

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the server's tools, page by page."""
        types = import_module("mcp.types")
        tools: list[dict[str, Any]] = []
        cursor = None
        for _ in range(MAX_PAGES):
            params = types.PaginatedRequestParams(cursor=cursor)
            page = self._portal.call(lambda params=params: self._session.list_tools(params=params))
            tools += [tool.model_dump(mode="json", by_alias=True) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools

    def call_tool(self, name: str, arguments: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the result of a call, an error of the protocol as a result with an error."""
        mcp, types = import_module("mcp"), import_module("mcp.types")
        try:
            result = self._portal.call(
                lambda: self._session.call_tool(name, dict(arguments), read_timeout_seconds=seconds)
            )
        except mcp.MCPError as error:
            if error.code == types.REQUEST_TIMEOUT:
                raise TimeoutError(error.message) from None
            if error.code == types.CONNECTION_CLOSED:
                raise ConnectionError("the MCP server ended by itself") from error
            return {"isError": True, "content": [{"type": "text", "text": error.message}]}
        return result.model_dump(mode="json", by_alias=True)

    def close(self) -> None:
        """Leave the session, and end the server and the thread if they were started."""
        while self._open:
            self._open.pop().__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class McpTool:
    """The tools of one server, for all conversations."""

    schemas: Sequence[ToolSchema]
    connection: PackageServer
    seconds: float

    def open(self, seed: int) -> "McpTool":
        """Return the tools themselves, for every conversation."""
        return self

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the texts of a call's result; ToolProblem if the server reports an error."""
        try:
            result = self.connection.call_tool(name, arguments, self.seconds)
        except TimeoutError:
            problem = f"the tool took longer than {self.seconds:g} s"
            raise ToolProblem("timeout", problem) from None
        parts = result.get("content") if isinstance(result, Mapping) else None
        if not isinstance(parts, Sequence) or isinstance(parts, str):
            reject("type", f"the MCP server answered a call of {name!r} with {result!r:.80}")
            raise ToolProblem("failed", "the server returned an invalid result")
        text = "\n".join(map(_read_content, parts))
        if result.get("isError"):
            raise ToolProblem("failed", text)
        return text

    def close(self) -> None:
        """Do nothing: the server answers other conversations too."""


def _read_content(part: Any) -> str:
    """Return a part of a result as text; what is no text is named by its type."""
    # Pictures and links have no place in a text model's turn.
    if not isinstance(part, Mapping):
        return "[content]"
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type', 'content')}]"


def read_schemas(tools: Sequence[Any], offered: Sequence[str]) -> list[ToolSchema]:
    """Return the schemas of the offered tools, or of all tools.

    DataError if a tool is missing or its description cannot be shown to a model.
    """
    by_name: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools, start=1):
        if problem := _find_tool_problem(tool):
            raise DataError(
                f"task.tools: tool {number} of the MCP server {problem}; fix the server"
            )
        by_name[tool["name"]] = tool
    if lacking := [name for name in offered if name not in by_name]:
        raise DataError(
            f"task.tools: the MCP server has no tool {lacking[0]!r}; it has {', '.join(by_name)}"
        )
    return [
        ToolSchema(name, by_name[name].get("description") or "", by_name[name]["inputSchema"])
        for name in offered or by_name
    ]


def connect(config: Config) -> PackageServer:
    """Start the server and greet it; DataError if it does not start or does not answer."""
    if importlib.util.find_spec("mcp") is None:
        raise DataError(
            f"task.tools: a tool of type mcp needs the package mcp; {suggest_install('mcp')}"
        )
    try:
        return PackageServer(config)
    # A program of the user's may end or answer in any way, and groups of errors come out of anyio.
    except Exception as error:
        raise DataError(
            f"task.tools: the MCP server {' '.join(config.command)!r} did not start "
            f"({excerpt(f'{type(error).__name__}: {error}')}); run the command by itself to see why"
        ) from error


def _find_tool_problem(tool: Any) -> str:
    """Return what keeps a tool of a server from standing in a prompt; empty if nothing does."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        return f"has no name: {tool!r:.80}"
    name, description = tool["name"], tool.get("description")
    if not isinstance(description, str | None):
        return f"({excerpt(name)!r}) has a description that is no text"
    if not isinstance(tool.get("inputSchema"), Mapping):
        return f"({excerpt(name)!r}) has no inputSchema"
    try:
        text = json.dumps(
            [name, description, tool["inputSchema"]], ensure_ascii=False, allow_nan=False
        )
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = "half of a surrogate pair" if isinstance(error, UnicodeError) else str(error)
        return f"({excerpt(name)!r}) has a schema that is no JSON ({excerpt(reason)})"
    return "" if len(text) <= LONGEST_TEXT else f"({excerpt(name)!r}) has {len(text)} characters"


def build(config: Config) -> McpTool:
    """Start the server and read its tools; DataError if it does not list them."""
    connection = connect(config)
    try:
        tools = connection.list_tools()
    # The server is a program of the user's, and errors of many kinds come out of the package.
    except Exception as error:
        connection.close()
        raise DataError(
            f"task.tools: the MCP server {' '.join(config.command)!r} does not list its tools "
            f"({excerpt(f'{type(error).__name__}: {error}')}); run the command by itself to see why"
        ) from error
    if not isinstance(tools, Sequence):
        raise DataError(f"task.tools: the MCP server lists a {type(tools).__name__} of tools")
    return McpTool(read_schemas(tools, config.tools), connection, config.seconds)
