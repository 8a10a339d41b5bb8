"""A server made with the package `openreward`: python openreward_server.py PORT. `/health` counts the sessions."""

import sys

from openreward.environments import Environment, Server, TextBlock, ToolOutput, tool
from pydantic import BaseModel, Field

TASKS = [{"id": f"t{number}", "problem": f"What is {number} + {number}?", "sum": 2 * number} for number in range(4)]


class Answer(BaseModel):
    number: int = Field(description="The sum.")


class Sums(Environment):
    def __init__(self, task_spec=None, secrets=None):
        super().__init__(task_spec or {})
        self.task = task_spec

    @classmethod
    def list_tasks(cls, split):
        return TASKS

    @classmethod
    def list_splits(cls):
        return ["train"]

    def get_prompt(self):
        return [TextBlock(type="text", text=self.task["problem"])]

    @tool
    async def answer(self, params: Answer) -> ToolOutput:
        """Submit the sum."""
        is_right = params.number == self.task["sum"]
        text = "right" if is_right else "wrong"
        return ToolOutput(blocks=[TextBlock(type="text", text=text)], reward=float(is_right), finished=True)


if __name__ == "__main__":
    server = Server([Sums])
    routes = server.app.router.routes

    @server.app.get("/health")
    async def sessions():
        return len(server._active_envs)

    routes.insert(0, routes.pop())  # in place of its own
    server.run("127.0.0.1", int(sys.argv[1]))
