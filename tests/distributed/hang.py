"""A worker that never ends: `python -m tests.distributed.hang OUTPUT_DIR` leaves its process id there."""

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    (Path(sys.argv[1]) / f"{os.getpid()}.pid").touch()
    time.sleep(3600)
