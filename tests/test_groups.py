"""The processes of `make test` keep the tests of a file together, as tests/conftest.py asks."""

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_pytest_xdist_groups_the_tests(request):
    # Some versions of pytest ignore the groups in silence, and then every process starts every launch anew.
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@test_groups.py")
