"""Print how exactly each family is trained, one line for a family and a layout.

python -m tests.families                       # all families, about half an hour on one core
python -m tests.families qwen3 gemma2          # these
python -m tests.families --layouts packed      # all families, in this layout
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings

from tests.families.configurations import FAMILIES
from tests.families.oracle import LAYOUTS, RefusedError, measure


def main() -> None:
    """Measure the families that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.families} - {*FAMILIES}):
        parser.error(f"no such family: {', '.join(unknown)}. There are {', '.join(FAMILIES)}.")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    for family in arguments.families:
        for layout in arguments.layouts:
            start = time.perf_counter()
            outcome = _outcome(family, layout)
            print(f"{family:26s} {layout:8s} {outcome}  ({time.perf_counter() - start:.1f} s)", flush=True)


def _outcome(family: str, layout: str) -> str:
    try:
        measures = measure(family, layout)
    except RefusedError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"FAILED with {type(error).__name__}: {error}"
    verdict = "" if measures.is_exact else "  WRONG"
    return f"{measures}  rows of {measures.shortest} to {measures.longest} tokens, {measures.num_turns} turns{verdict}"


if __name__ == "__main__":
    main()
