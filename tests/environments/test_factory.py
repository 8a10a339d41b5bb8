"""What may be called to make environments, and that each one that is made to be looked at is closed."""

import asyncio
import functools
import os
import subprocess

import pytest

from agent_r1_trl import ToolEnv
from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.cli.resolve import resolve_env
from agent_r1_trl.environments.factory import makes_environments, read_form, resolve_env_factory, tool_schemas
from agent_r1_trl.testing import AddEnv


class Counted(AddEnv):
    is_open = 0

    def __init__(self, weight=1):
        Counted.is_open += 1

    def close(self):
        Counted.is_open -= 1


class ClosedLater(Counted):
    async def close(self):
        await asyncio.sleep(0)
        super().close()


@pytest.fixture(params=[Counted, ClosedLater])
def counted(request):
    Counted.is_open = 0
    return request.param


def test_environments_that_are_made_to_be_looked_at_are_closed(counted):
    assert [schema["function"]["name"] for schema in tool_schemas(counted)] == ["add"]
    assert Counted.is_open == 0
    assert resolve_env(f"tests.environments.test_factory:{counted.__name__}") is not None
    assert Counted.is_open == 0

    async def in_a_notebook():
        return tool_schemas(counted)

    asyncio.run(in_a_notebook())
    assert Counted.is_open == 0


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_environments_that_cannot_close_before_their_reset_disturb_nobody():
    class Plain(AddEnv):
        def close(self):
            self.connection.close()

    class Async(AddEnv):
        async def close(self):
            self.connection.close()

    assert tool_schemas(Plain) and tool_schemas(Async)


def test_environments_of_trls_forms_are_closed_when_their_form_was_read(monkeypatch):
    closed = []
    monkeypatch.setattr(ToolEnv, "close", lambda self: closed.append(type(self).__name__))
    game = type("Game", (), {"reset": lambda self, **row: None})
    read_form(resolve_env_factory(environment_factory=game))
    read_form(resolve_env_factory(tools=[AddEnv.tools[0]]))
    assert closed == ["TRLEnvAdapter", "FunctionToolsEnv"]


# -------------------------------------------------------------------- what may be called


def make():
    return AddEnv()


REFUSED = {
    "os:system": {"command": "touch {}"},
    "os.system": {"command": "touch {}"},
    "subprocess:run": {"args": ["touch", "{}"]},
    "subprocess:Popen": {"args": ["touch", "{}"]},
    "subprocess:check_output": {"args": ["touch", "{}"]},
    "builtins:exec": {"source": "open('{}', 'w')"},
    "pathlib:Path": {},
    "pathlib:Path.cwd": {},
    "functools:partial": {},
    "runpy:run_path": {"path_name": "{}"},
}


@pytest.mark.parametrize("path", REFUSED)
def test_nothing_is_called_that_makes_no_environments(path, tmp_path):
    marker = str(tmp_path / "called")

    def fill(value):
        return [fill(item) for item in value] if isinstance(value, list) else value.format(marker)

    with pytest.raises(UsageError, match="env="):
        resolve_env(path, {name: fill(value) for name, value in REFUSED[path].items()})
    assert not os.path.exists(marker)


def test_functions_of_users_make_environments_in_every_form():
    functions = [make, lambda: AddEnv(), functools.partial(AddEnv), functools.partial(make), functools.cache(make)]
    for function in [*functions, type("Maker", (), {"__call__": lambda self: AddEnv(), "__module__": __name__})()]:
        assert makes_environments(function) is None
    for function in (os.system, subprocess.run, functools.partial(os.system, "true"), eval, print):
        assert makes_environments(function) is not None
        with pytest.raises(ValueError, match="env="):
            resolve_env_factory(function)
