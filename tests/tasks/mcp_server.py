"""A server of the Model Context Protocol with four tools, for `python tests/tasks/mcp_server.py`."""

import os
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("words")


@server.tool()
def count_letter(word: str, letter: str) -> str:
    """Count a letter in a word."""
    return str(word.count(letter))


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no")


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
