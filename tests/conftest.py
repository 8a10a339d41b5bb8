"""How the suite is shared between two processes (`pytest -n 2 --dist loadgroup`, which `make test` calls).

The tests of a file stay together, for the sake of the servers, engines and runs that they share, unless a test names
another group (`pytest.mark.xdist_group`). Slow tests begin first, so that neither process waits long for the other.
"""

import os

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("slow", "vllm")))
