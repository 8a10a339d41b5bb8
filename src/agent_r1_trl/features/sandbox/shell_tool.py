"""The shell tool: runs command lines in a sandbox of the trajectory.

class MyEnv(ToolEnv):
    tools = [PythonTool(), ShellTool()]      # they share one private directory
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

from agent_r1_trl.features.sandbox.base import Language
from agent_r1_trl.features.sandbox.python_tool import SandboxTool


class ShellTool(SandboxTool):
    """A tool `shell(command)`: bash (or sh) in the private directory of the trajectory. Arguments as `SandboxTool`.

    Files stay from call to call. Each call is a shell of its own that starts in that directory, and what it leaves
    running in the background ends with it. `sandbox="monty"` has no shell and is refused.
    """

    language: ClassVar[Language] = "shell"

    def _make_function(self) -> Callable[[str], Awaitable[str]]:
        async def shell(command: str) -> str:
            """Run a command line with bash and return its output.

            Each command starts in the same directory; files stay for later commands.

            Args:
                command: The command line to run.
            """
            return await self._execute(command)

        return shell
