"""The test suite; it mirrors src one to one."""

import os
import sys

if os.environ.get("TESTS_WITHOUT_VLLM"):
    # In a process that a test starts: TRL imports vLLM wherever it is installed, and that takes as long as all else.
    sys.modules["vllm"] = None
