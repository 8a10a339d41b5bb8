"""How the suite is shared between two processes (`pytest -n 2 --dist loadgroup`, which `make test` calls).

The tests of a file stay together, for the sake of the servers, engines and runs that they share, unless a test names
another group (`pytest.mark.xdist_group`). Slow tests begin first, so that neither process waits long for the other.

Property tests draw new examples in each run. Those that failed are kept in `.hypothesis/examples` and come first in
the next run; a failure prints what repeats it anywhere. The profile `fuzz` (`make fuzz`) asks for FUZZ_FACTOR
times as many, 10 by default.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from agent_r1_trl.features.reliability.signal_handlers import SIGNALS
from agent_r1_trl.rollout.runner import _FrozenHeap
from agent_r1_trl.tools.event_loop import give_up_loop, shared_loop
from tests.effort import PLAIN_EXAMPLES, SUITE_EXAMPLES
from tests.own_process import forbid_ends, look_packages_up_once
from tests.without_vllm import search_path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores Ctrl-C for what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

forbid_ends()
look_packages_up_once()

# DeepSpeed builds its extension here: in this environment, since another torch cannot use it and builds it anew.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))

settings.register_profile(
    "tests",
    max_examples=SUITE_EXAMPLES,
    deadline=None,
    print_blob=True,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples"),
)
FUZZ_FACTOR = int(os.environ.get("FUZZ_FACTOR", "10"))
settings.register_profile("fuzz", settings.get_profile("tests"), max_examples=FUZZ_FACTOR * PLAIN_EXAMPLES)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tests"))  # `--hypothesis-profile` goes before it


@pytest.fixture(scope="session")
def policy_server(tmp_path_factory):
    """A vLLM server whose policy has other weights than those that trainers start from.

    It takes the better part of a minute to start, so tests share it, in one process (`xdist_group`).
    """
    from tests.servers import serve_policy

    with serve_policy(tmp_path_factory.mktemp("server"), 3) as url:
        yield url


@pytest.fixture(scope="session")
def policy_path(tmp_path_factory):
    """The folder of the tiny policy: TRL loads the reference of a KL term from where the policy is."""
    from agent_r1_trl.testing import make_policy, make_tokenizer

    folder = tmp_path_factory.mktemp("policy")
    make_policy(make_tokenizer("qwen3")).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def handlers_come_back():
    """A signal handler that a test leaves behind changes what the tests after it see, in some orders of the files."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    left = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not before[number]}
    for number in left:
        signal.signal(number, before[number])
    assert not left, f"handlers that the test leaves behind: {left}"


@pytest.fixture
def own_loop():
    """The loop of the rollouts, a fresh one, on which no earlier test has left a task that refuses to be cancelled."""
    give_up_loop(shared_loop())
    return shared_loop()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("hypothesis"):
            item.add_marker("fuzz")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("slow", "vllm")))


def pytest_collection_finish():
    """Keep what the imports made out of later collections: accelerate makes two in each training.

    As a rollout that never ends does: another way of freezing would be counted, object by object, in each rollout.
    """
    gc.collect()
    _FrozenHeap.add(1)
    IMPORT_PATH.extend(sys.path)


@pytest.hookimpl(tryfirst=True)  # before the fixtures
def pytest_runtest_setup(item):
    """Hide vLLM from the processes that a test starts, unless it has the marker `vllm`."""
    os.environ["PYTHONPATH"] = search_path(is_hidden=item.get_closest_marker("vllm") is None)


IMPORT_PATH = []
"""`sys.path` before the first test."""


@pytest.hookimpl(trylast=True)  # after the fixtures of the file
def pytest_runtest_teardown(item, nextitem):
    """Take what a file leaves behind out of later collections and imports: modules, pytest's records, folders of runs.

    Each command adds the folder of its recipe to `sys.path`, and each look for a package reads all of them.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
        sys.path[:] = IMPORT_PATH


def pytest_runtest_logreport(report):
    """Print each failure at once: a run that is cut short says nothing at its end."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} ({report.when}):\n{report.longreprtext}\n", flush=True)


@pytest.fixture
def terminal(request):
    """Makes terminals of so many columns and rows, with environment variables."""
    from tests.display.terminals import Terminal

    def make(*size, **environment):
        made = Terminal(*size, **environment)
        request.addfinalizer(made.close)
        return made

    return make
