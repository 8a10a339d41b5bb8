"""`python -m agent_r1_trl.cli COMMAND` is `agent-r1-trl COMMAND`."""

import sys

from agent_r1_trl.cli import main

if __name__ == "__main__":
    sys.exit(main())
