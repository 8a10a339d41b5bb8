"""`agent-r1-trl merge`: write a plain Hugging Face model from an adapter or a checkpoint.

agent-r1-trl merge outputs/my-agent --output_dir outputs/my-agent-merged
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1_trl.cli.arguments import DTYPES
from agent_r1_trl.cli.errors import DependencyError, PlainParser, UsageError, model_problem, users_mistakes

COMMAND = "agent-r1-trl merge"


def make_parser() -> PlainParser:
    """The parser of the command's options."""
    parser = PlainParser(COMMAND, __doc__.partition(": ")[2])
    parser.add_argument("model", metavar="MODEL", help="Directory of a model, adapter or checkpoint, or a Hub id.")
    output = "Where the model is written; it must not exist yet."
    parser.add_argument("--output_dir", required=True, metavar="DIR", help=output)
    dtype = "Of the weights. Not set: that of the model, or of the adapter's base."
    parser.add_argument("--dtype", choices=DTYPES[1:], help=dtype)
    parser.add_argument("--trust_remote_code", action="store_true", help="Let code that comes with the model run.")
    return parser


def run(argv: Sequence[str]) -> int:
    """Write the model; returns the exit code."""
    arguments = make_parser().read(argv)

    from agent_r1_trl.features.serve.merging import merge_model

    try:
        with users_mistakes():
            options = {"dtype": arguments.dtype, "trust_remote_code": arguments.trust_remote_code}
            done = merge_model(arguments.model, arguments.output_dir, **options)
    except OSError as error:
        if error.errno is not None:  # of the file system: a full disk, no permission
            raise DependencyError(f"output_dir={arguments.output_dir!r}: cannot be written ({error}).") from error
        raise UsageError(model_problem(arguments.model, error)) from error
    kind = {"adapter": "adapter merged into its base", "model": "copied"}[done["kind"]]
    print(f"{arguments.output_dir}: {done['num_parameters']:,} parameters, {done['dtype']}; {kind}")
    return 0
