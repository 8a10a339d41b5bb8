"""Servers made with the package `openenv`, in a process of its own Python, which prints its port.

Each has a path. `/counts` says how many environments were made and closed, `/drop` closes all connections, and
`/refuse/1` refuses new ones until `/refuse/0`.
"""

import random
import socket
import time
from typing import Annotated

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    HTTPEnvServer,
    MCPEnvironment,
    Observation,
    State,
)
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

COUNTS = {"made": 0, "closed": 0, "steps": 0}


class Guess(Action):
    """Guess the number."""

    number: int = Field(ge=0, description="From 0 to 9; 66 fails, 77 takes a second.")

    @field_validator("number")
    @classmethod
    def _is_short(cls, number):
        if number > 9 and number not in (66, 77):
            raise PydanticCustomError("number", "Input should be less than 10, or 66, or 77")
        return number


class Hint(Observation):
    hint: str = ""


class Counted(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    has_seed = True

    def __init__(self, *args):
        super().__init__(*args)
        COUNTS["made"] += 1

    def close(self):
        COUNTS["closed"] += 1

    @property
    def state(self):
        return State()


class GuessEnv(Counted):
    def reset(self, seed=None, low=0):
        self.secret = random.Random(seed if self.has_seed else None).randrange(low, 10**6)
        self.left = 3
        return Hint(hint=f"Above {low}, even: {self.secret % 2 == 0}, code {self.secret}.", metadata={"secret": 1})

    def step(self, action, timeout_s=None):
        COUNTS["steps"] += 1
        if action.number == 66:
            raise RuntimeError("no such number")
        if action.number == 77:
            time.sleep(1.0)
        self.left -= 1
        is_right = action.number % 2 == self.secret % 2
        return Hint(hint=f"{self.left} left", reward=1.0 if is_right else -0.25, done=is_right or self.left == 0)


class ForgetfulEnv(GuessEnv):
    has_seed = False


class Say(Action):
    message: str


class Echo(Observation):
    heard: str = ""
    length: int = 0


class TalkEnv(Counted):
    def reset(self, seed=None):
        self.turns = 0
        return Echo(heard="Hello?")

    def step(self, action, timeout_s=None):
        self.turns += 1
        length = len(action.message)
        return Echo(heard=action.message, length=length, reward=length / 10, done=self.turns == 2)


class CalculatorEnv(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("calculator")

        @server.tool
        def add(a: Annotated[int, "One number."], b: Annotated[int, "The other."]) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def divide(a: Annotated[int, "Of which."], b: Annotated[int, "By which."]) -> float:
            """Divide two numbers."""
            return a / b

        super().__init__(server)
        COUNTS["made"] += 1

    def reset(self, seed=None, **kwargs):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise AssertionError

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        observation.reward = 0.5 if getattr(action, "tool_name", "") == "add" else None
        return observation

    def close(self):
        COUNTS["closed"] += 1
        super().close()

    @property
    def state(self):
        return State()


class Connections:
    """Knows the open connections, to close them."""

    def __init__(self, app):
        self.app = app
        self.open = set()
        self.refuses = False

    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket" and self.refuses:
            await send({"type": "websocket.close"})
            return
        if scope["type"] == "websocket":
            self.open.add(send)
        try:
            await self.app(scope, receive, send)
        finally:
            self.open.discard(send)


SERVERS = {
    "guess": (GuessEnv, Guess, Hint, 32),
    "small": (GuessEnv, Guess, Hint, 2),
    "forgetful": (ForgetfulEnv, Guess, Hint, 32),
    "talk": (TalkEnv, Say, Echo, 32),
    "calculator": (CalculatorEnv, CallToolAction, CallToolObservation, 32),
}

if __name__ == "__main__":
    app = FastAPI()
    connections = Connections(app)
    servers = [HTTPEnvServer(*arguments) for arguments in SERVERS.values()]
    for name, server in zip(SERVERS, servers, strict=True):
        served = FastAPI()
        server.register_routes(served)
        app.mount(f"/{name}", served)

    @app.get("/counts")
    async def counts():
        return COUNTS | {"sessions": sum(server.get_capacity_status().active_sessions for server in servers)}

    @app.get("/drop")
    async def drop():
        for send in list(connections.open):
            await send({"type": "websocket.close", "code": 1011})
        return len(connections.open)

    @app.get("/refuse/{is_on}")
    async def refuse(is_on: int):
        connections.refuses = bool(is_on)

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(connections, log_level="warning")).run(sockets=[listener])
