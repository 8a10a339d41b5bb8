"""A server of MCP in a process of its own: `python mcp_server.py` (stdio), or with a port (streamable HTTP)."""

import os
import sys
import time

import anyio
from mcp.server import MCPServer

server = MCPServer("desk")
count = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await anyio.sleep(seconds)
    return "waited"


@server.tool()
def block(seconds: float) -> str:
    """Be busy."""
    time.sleep(seconds)
    return "blocked"


@server.tool()
async def step() -> str:
    """Count the calls of this process."""
    global count
    count += 1
    return f"{count} of {os.getpid()}"


@server.tool()
def refuse(what: str) -> str:
    """Fail."""
    raise ValueError(what)


@server.tool()
async def die() -> str:
    """End the process."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
