"""`agent-r1-trl merge`: write a plain Hugging Face model from an adapter or a checkpoint.

agent-r1-trl merge outputs/my-agent --output_dir outputs/my-agent-merged
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from agent_r1_trl.cli.arguments import DTYPES
from agent_r1_trl.cli.errors import InfrastructureError, UsageError, explain_argparse, model_problem, run_command

COMMAND = "agent-r1-trl merge"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{explain_argparse(message)} {self.prog} --help lists the options.")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    description = "Write a plain Hugging Face model from an adapter or a checkpoint."
    parser = _Parser(prog=COMMAND, description=description, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="Directory of a model, adapter or checkpoint, or a Hub id.")
    parser.add_argument(
        "--output_dir", required=True, metavar="DIR", help="Where the model is written; it must not exist yet."
    )
    parser.add_argument(
        "--dtype",
        choices=[name for name in DTYPES if name != "auto"],
        help="Of the weights. Not set: that of the model, or of the adapter's base.",
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="Allow code that comes with the model to run."
    )
    return parser


def run(argv: Sequence[str]) -> int:
    """Write the model; returns the exit code."""
    arguments = make_parser().parse_args(argv)

    from agent_r1_trl.merging import merge_model

    try:
        done = merge_model(
            arguments.model,
            arguments.output_dir,
            dtype=arguments.dtype,
            trust_remote_code=arguments.trust_remote_code,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        if error.errno is not None:  # of the file system: a full disk, no permission
            raise InfrastructureError(f"output_dir={arguments.output_dir!r}: cannot be written ({error}).") from error
        raise UsageError(model_problem(arguments.model, error)) from error
    kind = {"adapter": "adapter merged into its base", "shards": "shards gathered", "model": "copied"}[done["kind"]]
    print(f"{arguments.output_dir}: {done['num_parameters']:,} parameters, {done['dtype']}; {kind}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.merge`."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
