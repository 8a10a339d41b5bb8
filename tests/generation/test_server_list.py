"""Servers join and leave a run while it goes on: the file with their URLs is read again at each sync.

Covered: one process. Several ranks that agree on the list: tests/distributed/test_server_list.py.
"""

import logging
import threading

import pytest
from peft import LoraConfig, get_peft_model

from agent_r1_trl.generation import GenerationError, VLLMServerGenerator
from agent_r1_trl.generation.vllm import server_file
from agent_r1_trl.generation.vllm.server_file import ServerFile
from agent_r1_trl.generation.vllm.settings import ServerSettings
from tests.fake_vllm import BASE, FakeServer
from tests.generation.helpers import tiny_model
from tests.generation.test_server_faults import QUICK, policy, turns


@pytest.fixture
def servers():
    """Three servers that run."""
    with FakeServer() as first, FakeServer() as second, FakeServer() as third:
        yield first, second, third


@pytest.fixture
def listed(tmp_path):
    """`listed(*servers)` writes the file; its path is `listed.path`."""

    def write(*servers):
        write.path.write_text("".join(f"{server.url}\n" for server in servers), encoding="utf-8")

    write.path = tmp_path / "servers.txt"
    return write


@pytest.fixture
def generator_of(listed):
    """`generator_of(**options)` samples from the servers of the file."""
    made = []

    def make(startup_timeout_s=5, adapter_dir=None, **options):
        settings = ServerSettings(**(QUICK | options))
        made.append(
            VLLMServerGenerator(
                listed.path,
                stop_token_ids=[1],
                settings=settings,
                startup_timeout_s=startup_timeout_s,
                adapter_dir=adapter_dir,
            )
        )
        return made[-1]

    yield make
    for generator in made:
        generator.close()


def asked_for_completions(*servers):
    """Which of the servers were sampled from since the last call."""
    asked = [bool(server.bodies) for server in servers]
    for server in servers:
        server.bodies.clear()
    return asked


# -------------------------------------------------------------------- joining and leaving


def test_a_server_that_joins_has_the_weights_before_it_is_sampled_from(servers, listed, generator_of, caplog):
    listed(servers[0])
    generator = generator_of()
    generator.sync(policy(20))
    listed(*servers)
    assert turns(generator, 4) == [20] * 4, "not before the next sync"
    assert asked_for_completions(*servers) == [True, False, False]
    generator.sync(policy(21))
    assert [server.value for server in servers] == [21] * 3
    assert turns(generator, 6) == [21] * 6
    assert asked_for_completions(*servers) == [True] * 3
    joined = [record.getMessage() for record in caplog.records if "joins the run" in record.getMessage()]
    assert sorted(joined) == sorted(f"The vLLM server {server.url} joins the run." for server in servers[1:])


def test_no_turn_goes_to_a_server_that_joined_until_the_weights_are_there(servers, listed, generator_of):
    listed(servers[0])
    generator = generator_of()
    generator.sync(policy(20))
    listed(*servers)
    generator._http.run(generator._read_file())  # the first part of a sync
    assert turns(generator, 6) == [20] * 6
    assert asked_for_completions(*servers) == [True, False, False]
    assert generator._fleet.models.keys() == {server.url for server in servers}


def test_a_server_that_joins_gets_the_frozen_weights_too(servers, listed, generator_of):
    """All others have them since the first sync, and get the trained ones alone."""
    model = policy(20)
    model.bias.requires_grad_(False)
    listed(servers[0])
    generator = generator_of()
    generator.sync(model)
    listed(servers[0], servers[1])
    generator.sync(model)
    assert servers[1].sums.keys() == {"weight", "bias"}


def test_a_server_that_joins_gets_the_adapter(listed, generator_of, tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear"))
    with FakeServer(adapters=True) as first, FakeServer(adapters=True) as second:
        listed(first)
        generator = generator_of(adapter_dir=tmp_path)
        generator.sync(model)
        (before,) = turns(generator, 1)
        listed(first, second)
        generator.sync(model)
        asked_for_completions(first, second)
        assert turns(generator, 4) == [before] * 4
        assert asked_for_completions(first, second) == [True, True]


def test_a_server_that_left_is_neither_asked_nor_missed(servers, listed, generator_of, caplog):
    listed(*servers)
    generator = generator_of()
    generator.sync(policy(20))
    turns(generator, 3)
    asked_for_completions(*servers)
    listed(servers[1])
    generator.sync(policy(21))
    servers[0].calls.clear()
    assert turns(generator, 5) == [21] * 5
    assert asked_for_completions(*servers) == [False, True, False]
    assert servers[0].value == 20 and servers[0].calls == []
    assert generator.metrics()["sampling/servers_excluded"] == 0
    assert generator.metrics()["sampling/servers_lost"] == 0
    assert f"{servers[0].url} has left the run" in caplog.text


def test_a_server_that_died_and_left_is_not_asked_for_again(servers, listed, generator_of):
    listed(servers[0], servers[1])
    generator = generator_of()
    generator.sync(policy(20))
    servers[0].kill()
    assert turns(generator, 4) == [20] * 4
    listed(servers[1])
    generator.sync(policy(21))
    servers[0].start()
    assert turns(generator, 4) == [21] * 4
    generator.sync(policy(22))
    assert servers[0].value == BASE and asked_for_completions(servers[0]) == [False]
    assert generator.metrics()["sampling/servers_excluded"] == 0


def test_a_server_that_left_may_come_back(servers, listed, generator_of):
    generator = None
    for value, members in enumerate([servers[:2], servers[:1], servers[:2]], start=20):
        listed(*members)
        generator = generator or generator_of()
        generator.sync(policy(value))
        assert turns(generator, 4) == [value] * 4
        assert asked_for_completions(*servers) == [server in members for server in servers]


def test_where_all_servers_are_gone_a_sync_waits_for_one_that_joins(servers, listed, generator_of):
    listed(servers[0])
    generator = generator_of()
    generator.sync(policy(20))
    servers[0].kill()
    threading.Timer(1, listed, [servers[1]]).start()
    generator.sync(policy(21))
    assert turns(generator, 2) == [21, 21]


# -------------------------------------------------------------------- what cannot join


def test_a_server_that_does_not_answer_yet_joins_later(servers, listed, generator_of, caplog):
    listed(servers[0])
    generator = generator_of()
    generator.sync(policy(20))
    servers[1].kill()
    listed(servers[0], servers[1])
    for value in (21, 22):
        generator.sync(policy(value))
        assert turns(generator, 2) == [value] * 2
    said = [record.getMessage() for record in caplog.records if "Not in the run yet" in record.getMessage()]
    assert len(said) == 1 and servers[1].url in said[0], "once, not at each sync"
    servers[1].start()
    generator.sync(policy(23))
    assert servers[1].value == 23


def test_a_server_with_a_shorter_context_does_not_join(listed, generator_of, caplog):
    with FakeServer() as first, FakeServer() as second:
        first.context, second.context = 64, 63
        listed(first)
        generator = generator_of()
        generator.sync(policy(20))
        listed(first, second)
        generator.sync(policy(21))
        assert second.value == BASE
        assert f"{second.url} takes 63 tokens" in caplog.text and "--max-model-len 64" in caplog.text


def test_a_server_that_cannot_take_the_weights_joins_without_being_sampled_from(servers, listed, generator_of):
    """As where a server breaks off during a sync: it is excluded, and the run goes on."""
    listed(servers[0])
    generator = generator_of()
    generator.sync(policy(20))
    servers[1].machine = "elsewhere"  # it does not see the folder with the weights
    listed(servers[0], servers[1])
    generator.sync(policy(21))
    assert turns(generator, 3) == [21] * 3
    assert generator.metrics()["sampling/servers_excluded"] == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "names no server"),
        (b"10.0.0.5:8000\n", "'10.0.0.5:8000' is no URL of a server"),
        (b"http://a:1\nhttp://a:1/\n", "each once"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_says_nothing_leaves_the_servers_as_they_are(servers, listed, generator_of, caplog, content, said):
    listed(servers[0])
    generator = generator_of()
    generator.sync(policy(20))
    listed.path.write_bytes(content)
    for value in (21, 22):
        generator.sync(policy(value))
        assert turns(generator, 2) == [value] * 2
    warnings = [record.getMessage() for record in caplog.records if "The servers stay as they were" in record.message]
    assert len(warnings) == 1 and said in warnings[0] and f"servers.urls_file='{listed.path}'" in warnings[0]


def test_a_file_that_is_gone_leaves_the_servers_as_they_are(servers, listed, generator_of):
    listed(servers[0])
    generator = generator_of()
    listed.path.unlink()
    generator.sync(policy(20))
    assert turns(generator, 2) == [20, 20]


# -------------------------------------------------------------------- the file at the start


def test_comments_blank_lines_and_slashes_are_left_out(tmp_path):
    path = tmp_path / "servers.txt"
    path.write_text("# mine\n\n  http://a:1/  # the fast one\nhttps://b\n", encoding="utf-8")
    assert ServerFile(path).read() == ["http://a:1", "https://b"]


def test_a_run_waits_until_its_servers_are_known(servers, listed, generator_of, caplog):
    threading.Timer(0.5, listed, [servers[0]]).start()
    generator = generator_of()
    assert turns(generator, 1) == [BASE]
    assert f"until {listed.path} names a server" in caplog.text


def test_a_run_without_servers_ends_with_the_name_of_the_file(listed, generator_of):
    with pytest.raises(GenerationError, match=r"servers\.urls_file='.*servers\.txt' names no server within 0\.2 s"):
        generator_of(startup_timeout_s=0.2)


def test_a_wrong_line_at_the_start_ends_the_run(listed, generator_of):
    listed.path.write_text("localhost:8000\n")
    with pytest.raises(ValueError, match=r"servers\.urls_file=.*'localhost:8000' is no URL"):
        generator_of()


def test_a_folder_in_place_of_the_file_ends_the_run(tmp_path, caplog):
    caplog.set_level(logging.WARNING, server_file.logger.name)
    with pytest.raises(ValueError, match=r"servers\.urls_file=.* cannot be read .*one URL a line"):
        ServerFile(tmp_path).read()
