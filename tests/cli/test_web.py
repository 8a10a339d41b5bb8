"""An address on which no server can listen is refused by what is wrong with it, its host or its port."""

import errno
import socket

import pytest
from aiohttp import web

from agent_r1_trl.cli.errors import DependencyError
from agent_r1_trl.cli.web import serve_app


def refused(host, port):
    """The message of `serve_app` at that address."""
    with pytest.raises(DependencyError) as caught:
        serve_app(web.Application(), host, port, lambda url: None)
    message = str(caught.value)
    assert message.startswith(f"--host {host} --port {port}: cannot listen there (")
    return message


@pytest.mark.parametrize("host", ["no-such-name.invalid", "192.0.2.1"], ids=["a bad name", "another machine"])
def test_a_host_that_is_not_this_machine_is_refused_by_its_name(host):
    message = refused(host, 0)
    assert message.endswith("Pass --host 127.0.0.1, or another address of this machine.")


def test_a_port_that_is_taken_is_refused_by_its_number():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert refused("127.0.0.1", taken.getsockname()[1]).endswith("Pass another --port, or 0 for a free one.")


def test_a_port_that_needs_root_is_refused_by_its_number(monkeypatch):
    def no_right(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", no_right)
    assert refused("127.0.0.1", 80).endswith("Pass a --port from 1024 on, or 0 for a free one.")
