"""The page that follows a run: over HTTP while the record grows, and in a browser.

Covered: what is built when, what is said before anything is recorded, other names of this machine, refused options,
Ctrl-C. The policy of a file, which allows no request, is in test_page.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from agent_r1_trl.cli import main
from agent_r1_trl.features.inspector import LivePage
from agent_r1_trl.recording import TrajectoryStore
from agent_r1_trl.recording.events import METRICS_FILE
from tests.features.inspector.test_browser import Visit, browser  # noqa: F401
from tests.features.inspector.test_page import blocks_of
from tests.recording.examples import two_turns


@contextlib.contextmanager
def serving(run, *options):
    """The URL of `view --serve`, which ends with Ctrl-C and exit code 0."""
    command = [sys.executable, "-m", "agent_r1_trl.cli", "view", str(run), "--serve", *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        line = process.stdout.readline()
        yield re.match(r"(http://127\.0\.0\.1:\d+)  the page of ", line)[1]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.wait()


def get(url, **headers):
    """Status and text."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read().decode("utf-8")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8")


def until(function):
    """The first value of the function that is not false; a build follows the last one after a pause."""
    for _ in range(300):
        if value := function():
            return value
        time.sleep(0.1)
    raise AssertionError("it never became true")


def test_the_page_is_built_anew_when_the_record_has_grown_and_only_then(tmp_path):
    store = TrajectoryStore(tmp_path)
    with serving(tmp_path) as url:
        status, text = get(url)
        assert status == 503 and "holds no recorded trajectories" in text
        store.write(1, [two_turns(example_id="first")])
        status, html = get(url)
        version = get(f"{url}/version")[1]
        assert status == 200 and f'"version":"{version}"' in blocks_of(html)["meta0"] and '["first"]' in html
        assert "connect-src 'self'" in html and get(f"{url}/version") == (200, version)
        store.write(2, [two_turns(example_id="second")])
        newer = until(lambda: (found := get(f"{url}/version")[1]) != version and found)
        html = get(url)[1]
        assert f'"version":"{newer}"' in html and '"examples":["second","first"]' in html
        (tmp_path / METRICS_FILE).write_text('{"step": 2, "reward": 0.5}\n')
        until(lambda: get(f"{url}/version")[1] != newer)
        assert get(url, Host="evil.example")[0] == 403
        assert get(url, Host="localhost:1")[0] == 200
        assert get(f"{url}/recipe.yaml")[0] == 404
    assert not list(tmp_path.glob("*.html"))


def test_builds_leave_most_of_the_time_to_the_training_and_a_failed_one_is_tried_again(tmp_path, monkeypatch):
    now, built = [0.0], []
    monkeypatch.setattr("agent_r1_trl.features.inspector.live.time", SimpleNamespace(monotonic=lambda: now[0]))

    def write(version):
        now[0] += 10.0
        built.append(version)
        if len(built) == 1:
            raise ValueError("nothing yet")

    async def visit():
        live = LivePage([tmp_path], tmp_path / "a.html", write)
        with pytest.raises(ValueError, match="nothing yet"):
            await live.refresh()
        await live.refresh()  # the first one does not count: it loads packages
        store = TrajectoryStore(tmp_path)
        for step, (moment, expected) in enumerate([(20.0, 3), (69.0, 3), (70.0, 4), (80.0, 4)]):
            store.write(step, [two_turns()])
            now[0] = moment  # the third ends at 30 s: the next one from 30 + 4 * 10 on
            await live.refresh()
            await live.refresh()
            assert len(built) == expected and live.version == built[-1]
        assert len(set(built[1:])) == 3

    asyncio.run(visit())


def test_options_that_do_not_go_with_it_are_refused(tmp_path, capsys):
    TrajectoryStore(tmp_path).write(1, [two_turns()])
    for options, message in {
        ("--serve", "--html", "a.html"): "--html a.html: --serve keeps no file",
        ("--port", "80"): "--port 80: is for --serve",
        ("--serve", "--port", "99999"): "--port=99999",
        ("--serve", "--against", str(tmp_path / "nowhere")): "nowhere: no such file",
    }.items():
        assert main(["view", str(tmp_path), *options]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_a_browser_loads_the_newer_page_at_the_same_trajectory(browser, tmp_path):  # noqa: F811
    store = TrajectoryStore(tmp_path)
    store.write(1, [two_turns(generation=generation) for generation in (0, 1)])
    with serving(tmp_path) as url:
        visit = Visit(browser, f"{url}/", "#1/0/1")
        assert visit.text("#count") == "2 trajectories"
        with visit.page.expect_navigation(timeout=60_000):
            store.write(2, [two_turns()])
        visit.until("document.querySelector('#count')?.innerText === '3 trajectories' && document.body.dataset.ready")
        visit.until("document.querySelector('#middle h1')?.innerText.includes('generation 1')")
        assert visit.page.evaluate("location.hash") == "#1/0/1"
        assert set(visit.errors) == {f"{url}/", f"{url}/version"}  # its requests, and no error
