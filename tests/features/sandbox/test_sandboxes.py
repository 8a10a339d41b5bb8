"""What a sandbox does with good code and bad, and what is left of it afterwards."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agent_r1_trl.features.sandbox import (
    LocalSandbox,
    MontySandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    local,
    make_sandbox_factory,
    processes,
    render_sandbox_result,
)
from agent_r1_trl.features.sandbox.tools import default_sandbox
from tests.features.sandbox.attacks import processes_with
from tests.features.sandbox.test_containment import why_not_sandlock

LIMITS = SandboxLimits(timeout_s=20, memory_mb=256, disk_mb=8, max_processes=8, max_output_chars=1000)
HURRIED = SandboxLimits(timeout_s=0.5)
BACKENDS = ["limits", "sandlock"]


def make(backend, limits=LIMITS):
    if backend == "monty":
        return MontySandbox(limits)
    if backend == "sandlock" and (reason := why_not_sandlock()):
        pytest.skip(reason)
    return LocalSandbox(backend, limits)


@pytest.fixture(params=BACKENDS)
def sandbox(request):
    made = make(request.param)
    yield made
    made.close()


@pytest.fixture(params=[*BACKENDS, "monty"])
def any_sandbox(request):
    made = make(request.param)
    yield made
    made.close()


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


# -------------------------------------------------------------------- good code


def test_variables_survive_and_the_last_expression_is_shown(any_sandbox):
    assert any_sandbox.run("x = 20\ndef double(n):\n    return 2 * n") == SandboxResult()
    assert any_sandbox.run("print('twice', x)\ndouble(x)") == SandboxResult(output="twice 20\n", value="40")
    assert any_sandbox.run("None").value is None


def test_files_survive_and_are_shared_with_the_shell(sandbox):
    sandbox.run("with open('notes.txt', 'w') as stream:\n    stream.write('from python')")
    assert sandbox.run("cat notes.txt", "shell") == SandboxResult(output="from python")
    sandbox.run("mkdir sub && cd sub && echo from shell > more.txt", "shell")
    assert sandbox.run("open('sub/more.txt').read()").value == repr("from shell\n")


def test_the_output_of_child_processes_and_of_stderr_keeps_its_order(sandbox):
    code = "import os, sys\nprint('one')\nos.system('echo two')\nprint('three', file=sys.stderr)\nprint('four')"
    assert sandbox.run(code).output == "one\ntwo\nthree\nfour\n"


def test_the_environment_is_clean(sandbox, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    names = eval(sandbox.run("import os\nsorted(os.environ)").value)
    assert "HF_TOKEN" not in names
    assert set(names) >= {"HOME", "PATH", "TMPDIR"}
    assert sandbox.run("os.environ['HOME'] == os.getcwd() == os.environ['TMPDIR']").value == "True"


# -------------------------------------------------------------------- bad code


def test_an_exception_is_a_short_traceback_of_the_models_code_alone(sandbox):
    error = sandbox.run("def f(n):\n    return 1 / n\n\nf(0)").error
    assert error.splitlines()[0] == "Traceback (most recent call last):"
    assert "return 1 / n" in error and error.endswith("ZeroDivisionError: division by zero")
    assert "sandbox" not in error and "exec(" not in error


def test_exceptions_leave_the_variables_alone(any_sandbox):
    any_sandbox.run("x = 1")
    for code in ("1 / 0", "x = (", "def f():\n    return f()\nf()", "undefined"):
        result = any_sandbox.run(code)
        assert result.error and not result.lost
    assert any_sandbox.run("x").value == "1"


@pytest.mark.parametrize(
    "code", ["raise SystemExit(3)", "raise KeyboardInterrupt", "input()", "'\\ud800'", "10 ** 5000"]
)
def test_odd_endings_are_results(sandbox, code):
    sandbox.run("x = 1")
    assert not sandbox.run(code).lost
    assert sandbox.run("x").value == "1"


@pytest.mark.parametrize("backend", [*BACKENDS, "monty"])
def test_an_endless_loop_is_stopped_and_the_model_is_told_what_is_lost(backend):
    sandbox = make(backend, HURRIED)
    sandbox.run("x = 1")
    began = time.monotonic()
    result = sandbox.run("while True:\n    pass")
    assert time.monotonic() - began < 5
    assert result.error == "Timeout: it ran for longer than 0.5 s and was stopped."
    assert result.lost == "variables"
    assert "variables, functions and imports of earlier calls are gone" in render_sandbox_result(result, 1000)
    assert "NameError" in sandbox.run("x").error
    sandbox.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shell_command_that_hangs_is_stopped_and_costs_no_files(backend):
    sandbox = make(backend, HURRIED)
    result = sandbox.run("echo begun; echo > kept; sleep 60", "shell")
    assert (result.output, result.lost) == ("begun\n", "variables")
    assert result.error == "Timeout: it ran for longer than 0.5 s and was stopped."
    assert sandbox.run("ls", "shell").output == "kept\n"
    sandbox.close()


def test_a_shell_command_that_fails_says_how(sandbox):
    assert sandbox.run("echo out; echo err >&2; exit 3", "shell") == SandboxResult(
        output="out\nerr\n", error="exit code 3"
    )


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os._exit(3)", "The code ended the interpreter (exit code 3)."),
        ("import os; os.kill(os.getpid(), 11)", "The interpreter crashed (SIGSEGV)."),
        ("import os; os.close(1); os.close(2); os._exit(0)", "The code ended the interpreter (exit code 0)."),
    ],
)
def test_code_that_ends_the_interpreter_is_told_so(sandbox, code, error):
    sandbox.run("x = 1\nopen('kept.txt', 'w').close()")
    result = sandbox.run(code)
    assert (result.error, result.lost) == (error, "variables")
    assert sandbox.run("import os\nos.listdir()").value == "['kept.txt']"


def test_a_number_of_too_many_digits_is_the_codes_own_error(any_sandbox):
    any_sandbox.run("x = 10**5000")
    result = any_sandbox.run("x")
    assert "ValueError: Exceeds the limit" in result.error and not result.lost
    assert any_sandbox.run("x > 1").value == "True"


def test_a_command_with_a_null_byte_costs_no_variables(sandbox):
    sandbox.run("x = 1")
    result = sandbox.run("echo a\x00b", "shell")
    assert "null byte" in result.error and not result.lost
    assert sandbox.run("x").value == "1"


def test_output_without_end_is_cut_and_does_not_fill_the_memory(any_sandbox):
    result = any_sandbox.run("for i in range(20_000):\n    print('spam', i)")
    text = render_sandbox_result(result, 1000)
    assert text.startswith("spam 0\nspam 1\n") and "[truncated" in text
    assert len(text) < 1200


def test_many_small_files_count_against_the_disk_too(sandbox):
    result = sandbox.run("for i in range(40):\n    open(f'{i}', 'wb').write(b'x' * (1 << 20))")
    assert "No space left" in result.error or "Disk full: the limit is 8 MB" in result.error
    sandbox.run("import os\nfor name in os.listdir():\n    os.remove(name)")
    assert sandbox.run("open('small', 'w').write('x')").value == "1"


def test_memory_of_several_processes_is_counted_together(sandbox):
    result = sandbox.run(
        "import os, time\nfor i in range(4):\n    if os.fork() == 0:\n        break\n"
        "else:\n    time.sleep(60)\nx = b'x' * (100 << 20)\ntime.sleep(60)"
    )
    assert "memory" in result.error.lower()
    assert sandbox.run("1").value == "1"


def test_a_child_that_the_code_forks_takes_no_request_of_its_parents(sandbox):
    assert sandbox.run("import os\npid = os.fork()\n'one answer'").value == repr("one answer")
    assert [sandbox.run(f"{n}").value for n in range(3)] == ["0", "1", "2"]


def test_nothing_runs_between_calls(sandbox):
    sandbox.run("import threading, time\nticks = []\n")
    sandbox.run("threading.Thread(target=lambda: [ticks.append(time.sleep(0.01)) for _ in range(1000)]).start()")
    first = int(sandbox.run("len(ticks)").value)
    time.sleep(0.5)
    assert int(sandbox.run("len(ticks)").value) - first < 20


@pytest.mark.parametrize(
    "forged", ['{"value": "forged"}\\n', '{"value": "for', "\\n[1]\\n"], ids=["whole", "torn", "other"]
)
def test_what_the_code_writes_into_the_pipe_of_the_answers_is_no_answer(sandbox, forged):
    write = f"try:\n        os.write(fd, b'{forged}')\n    except OSError:\n        pass"
    result = sandbox.run(f"import os\nfor fd in range(3, 60):\n    {write}\n'true'")
    assert (result.value, result.lost) == (repr("true"), "")
    assert [sandbox.run(str(number)).value for number in range(6)] == [str(number) for number in range(6)]


def test_an_answer_that_is_written_late_is_not_taken_for_the_next_one(sandbox):
    late = 'import os, threading, time\nline = b\'{"value": "late"}\\n\'\n'
    late += "def write():\n    time.sleep(0.2)\n    os.write(41, line)\n"
    sandbox.run(f"{late}threading.Thread(target=write).start()")
    time.sleep(0.3)
    assert sandbox.run("time.sleep(0.4)\n7").value == "7"


# -------------------------------------------------------------------- the end


def test_code_that_stops_its_supervisor_ends_its_own_sandbox():
    with contextlib.closing(make("limits")) as sandbox:
        began = time.monotonic()
        result = sandbox.run("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass")
        assert (result.error, result.lost) == ("The code ended the sandbox.", "everything")
        assert time.monotonic() - began < LIMITS.timeout_s
        assert sandbox.run("6 * 7").value == "42"


def test_a_folder_that_was_hidden_is_counted_and_stays_as_it_was(tmp_path):
    folder, deep = tmp_path / "hidden", tmp_path / "deep" / "/".join("n" * 150)
    folder.mkdir()
    (folder / "file").write_bytes(b"x" * 10_000)
    (tmp_path / "link").symlink_to("/usr")
    folder.chmod(0)
    size, entries = processes.directory_usage(str(tmp_path))
    assert size >= 10_000 and entries == 3 and folder.stat().st_mode & 0o777 == 0
    folder.chmod(0o700)
    deep.mkdir(parents=True)
    assert processes.directory_usage(str(tmp_path), max_entries=999)[1] == 999
    assert processes.directory_usage(str(tmp_path / "gone")) == (0, 0)


def test_honest_code_does_not_meet_the_filter_of_system_calls(sandbox):
    code = """
import asyncio, fcntl, multiprocessing, os, shutil, socket, sqlite3, subprocess, sys
async def talk():
    process = await asyncio.create_subprocess_exec("echo", "said", stdout=subprocess.PIPE)
    return (await process.communicate())[0].decode().strip()
sqlite3.connect("data.db").execute("create table t (a)")
shutil.copyfile("data.db", "copy.db")
fcntl.flock(open("copy.db"), fcntl.LOCK_EX)
left, right = socket.socketpair()
right.setblocking(False)
queue = multiprocessing.Pipe()
os.set_inheritable(left.fileno(), True)
[asyncio.run(talk()), sys.stdout.isatty(), shutil.get_terminal_size().columns]
"""
    result = sandbox.run(code)
    assert (result.value, result.error) == ("['said', False, 80]", None)


def test_close_kills_what_runs_and_wakes_the_call(sandbox):
    mark = "61.0625"
    ended = threading.Event()

    def call():
        sandbox.run(f"import os\nos.system('sleep {mark}')")
        ended.set()

    threading.Thread(target=call, daemon=True).start()
    assert wait_until(lambda: processes_with(f"sleep\0{mark}"))
    sandbox.close()
    assert ended.wait(5)
    assert wait_until(lambda: not processes_with(f"sleep\0{mark}"))
    sandbox.close()
    assert sandbox.run("1 + 1").value == "2"


PARENT = """
import os, sys, threading, time
from agent_r1_trl.features.sandbox import LocalSandbox, SandboxLimits
kind, mark, how = sys.argv[1:4]
sandboxes = [LocalSandbox(kind, SandboxLimits(timeout_s=60)) for _ in range(2)]
print(sandboxes[0].run("import os\\nos.getcwd()").value.strip("'"), flush=True)
code = f"import os\\nif os.fork() == 0:\\n    os.setsid()\\n    os.system('sleep {mark}')\\nos.system('sleep {mark}')"
threading.Thread(target=sandboxes[1].run, args=(code,), daemon=True).start()
if how == "ends":
    while not os.path.exists(sys.argv[4]):
        time.sleep(0.02)
else:
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("backend", "how"),
    [*((backend, "kill -9") for backend in BACKENDS), ("limits", "ends"), ("limits", "stops")],
)
def test_nothing_outlives_the_training_process(backend, how, tmp_path):
    make(backend).close()
    mark = f"62.{BACKENDS.index(backend)}{len(how)}25"
    arguments = [sys.executable, "-c", PARENT, backend, mark, how, str(tmp_path / "end")]
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    directory = Path(parent.stdout.readline().strip())
    assert wait_until(lambda: len(processes_with(f"sleep\0{mark}")) == 2)
    (tmp_path / "end").touch()
    if how != "ends":
        parent.send_signal(signal.SIGKILL if how == "kill -9" else signal.SIGTERM)
    parent.wait(20)
    assert wait_until(lambda: not processes_with(f"sleep\0{mark}"))
    assert wait_until(lambda: not directory.parent.exists()), list(directory.parent.iterdir())


@pytest.mark.parametrize("backend", ["limits", "sandlock"])
def test_directories_that_resist_removal_are_removed(backend):
    sandbox = make(backend)
    directory = Path(sandbox.run("import os\nos.getcwd()").value.strip("'"))
    sandbox.run("os.makedirs('locked/inside')\nos.chmod('locked', 0)")
    sandbox.run("for _ in range(1100):\n    os.mkdir('d')\n    os.chdir('d')")
    sandbox.close()
    assert wait_until(lambda: not directory.exists())


def test_a_sandbox_that_nobody_holds_any_more_ends():
    made = LocalSandbox("limits", SandboxLimits(timeout_s=60))
    directory = Path(made.run("import os\nos.getcwd()").value.strip("'"))
    assert directory.is_dir()
    del made
    assert wait_until(lambda: not directory.exists())


def test_a_forked_trainer_gets_a_server_of_its_own_and_leaves_its_parents_alone():
    sandbox = make("limits")
    sandbox.run("x = 1")
    pid = os.fork()
    if pid == 0:
        try:
            fine = LocalSandbox("limits", LIMITS).run("2").value == "2"
            local._end_server()
            os._exit(0 if fine else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sandbox.run("x").value == "1"
    sandbox.close()


# -------------------------------------------------------------------- infrastructure, and refusals


def test_a_fork_server_that_cannot_start_is_an_infrastructure_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "_server", None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(SandboxError, match="did not start"):
        LocalSandbox("limits", LIMITS).run("1")


def test_the_sandboxes_run_the_code_that_lies_beside_them():
    assert (Path(local.SOURCE) / "agent_r1_trl/features/sandbox/local.py").samefile(local.__file__)


def test_a_fork_server_that_died_is_started_again():
    sandbox = make("limits")
    sandbox.run("x = 1")
    directory = Path(sandbox.run("import os\nos.getcwd()").value.strip("'"))
    os.kill(local._the_server()._process.pid, signal.SIGKILL)
    assert wait_until(lambda: not local._server.is_alive)
    other = make("limits")
    assert other.run("2").value == "2"
    assert not directory.parent.exists()
    sandbox.close()
    other.close()


def test_an_old_kernel_is_refused_by_name(monkeypatch):
    sandlock = pytest.importorskip("sandlock")
    monkeypatch.setattr(sandlock, "landlock_abi_version", lambda: -1)
    with pytest.raises(ValueError, match='sandbox="sandlock" needs Landlock') as caught:
        make_sandbox_factory("sandlock", LIMITS, "python")
    assert 'sandbox="limits"' in str(caught.value)
    assert make_sandbox_factory("limits", LIMITS, "python")().run("1").value == "1"  # the fix works


def test_without_a_name_the_code_is_isolated_or_a_warning_says_why_not(monkeypatch, caplog):
    default_sandbox.cache_clear()
    assert default_sandbox() == ("limits" if why_not_sandlock() else "sandlock")
    sandlock = pytest.importorskip("sandlock")
    monkeypatch.setattr(sandlock, "landlock_abi_version", lambda: -1)
    default_sandbox.cache_clear()
    caplog.clear()
    assert [default_sandbox(), default_sandbox()] == ["limits", "limits"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "without isolation" in caplog.text and "needs Landlock" in caplog.text
    default_sandbox.cache_clear()


def test_a_capability_that_stays_is_refused(monkeypatch):
    if os.getuid() != 0:
        pytest.skip("only root has capabilities to keep")
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(processes._libc, "capset", lambda *_: -1)
        try:
            processes.drop_privileges()
        except PermissionError as error:
            os._exit(0 if "CapEff" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    ("sandbox", "lacks", "text"),
    [
        ("limits", "linux", "sandbox='limits' needs Linux, and this is darwin"),
        ("sandlock", "linux", "sandbox='sandlock' needs Linux, and this is darwin"),
        ("sandlock", "sandlock", r"sandbox='sandlock'.*agent-r1-trl\[sandbox\]"),
        ("monty", "pydantic_monty", r"sandbox='monty'.*agent-r1-trl\[sandbox\]"),
        ("monty", "python", 'sandbox="monty" runs Python only'),
        ("docker", "", "sandbox='docker': unknown"),
        (LocalSandbox("limits"), "", "needs a sandbox of its own"),
        (7, "", "needs a sandbox of its own"),
    ],
)
def test_what_makes_no_sandbox_here_is_refused(monkeypatch, sandbox, lacks, text):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacks else found(name))
    monkeypatch.setattr(sys, "platform", "darwin" if lacks == "linux" else "linux")
    with pytest.raises(ValueError, match=text):
        make_sandbox_factory(sandbox, LIMITS, "shell" if lacks == "python" else "python")
    if lacks == "linux":
        assert make_sandbox_factory("monty", LIMITS, "python")().run("1").value == "1"  # the fix works


@pytest.mark.parametrize("limit", [{"timeout_s": 0}, {"memory_mb": 1}, {"disk_mb": 1.5}, {"max_processes": True}])
def test_limits_out_of_range_are_refused(limit):
    with pytest.raises(ValueError, match=next(iter(limit))):
        SandboxLimits(**limit)
