"""`agent-r1-trl push`: send a trained agent to the Hub, with tokenizer, recipe and card; or its trajectories.

agent-r1-trl push outputs/my-agent --repo_id user/my-agent --dry_run
agent-r1-trl push outputs/my-agent --repo_id user/my-agent-trajectories --trajectories
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from agent_r1_trl.cli.errors import InfrastructureError, UsageError, explain_argparse, run_command
from agent_r1_trl.safe_text import visible

if TYPE_CHECKING:
    from agent_r1_trl.publishing.files import Sent

COMMAND = "agent-r1-trl push"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{explain_argparse(message)} {self.prog} --help lists the options.")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    description = "Send a trained agent to the Hub, with its tokenizer, its recipe and a card; or its trajectories."
    parser = _Parser(prog=COMMAND, description=description, allow_abbrev=False)
    parser.add_argument("run", metavar="OUTPUT_DIR", help="Output directory of a run, or of a saved model.")
    parser.add_argument("--repo_id", required=True, metavar="USER/NAME", help="Repository; made if there is none.")
    parser.add_argument(
        "--trajectories",
        action="store_true",
        help="Send the recorded trajectories as a data set (Parquet) in place of the model.",
    )
    parser.add_argument("--critic", action="store_true", help="Send PPO's critic with the model.")
    parser.add_argument("--private", action="store_true", help="Send to a private repository only.")
    parser.add_argument("--dry_run", action="store_true", help="List what would be sent, search it, and send nothing.")
    parser.add_argument(
        "--allow_secrets",
        nargs="+",
        default=[],
        metavar="FILE",
        help="Files, or patterns of them, that are sent although something in them looks like a secret.",
    )
    parser.add_argument("--message", default="Upload with agent-r1-trl", help="Message of the commit.")
    return parser


def run(argv: Sequence[str]) -> int:
    """Collect, search and send the files; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    if arguments.trajectories and arguments.critic:
        raise UsageError("--critic: goes with a model, and --trajectories sends a data set. Leave one of them out.")
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    from agent_r1_trl.publishing.hub import HubError, push_files
    from agent_r1_trl.secret_scan import check_files

    try:
        validate_repo_id(arguments.repo_id)
    except HFValidationError as error:
        raise UsageError(f"--repo_id {arguments.repo_id!r}: {error} Pass user/name.") from error
    repo_type = "dataset" if arguments.trajectories else "model"
    with tempfile.TemporaryDirectory(prefix="agent-r1-trl-push-") as scratch:
        try:
            collect = _dataset_files if arguments.trajectories else _model_files
            files = collect(arguments, Path(scratch))
            sys.stdout.write(_listing(files, arguments, repo_type))
            check_files(
                {item.name: item.path for item in files}, allowed=arguments.allow_secrets, cure="--allow_secrets"
            )
            if arguments.dry_run:
                print("Nothing was sent (--dry_run).")
                return 0
            url = push_files(
                arguments.repo_id,
                files,
                repo_type=repo_type,
                private=arguments.private or None,
                message=arguments.message,
            )
        except HubError as error:
            raise InfrastructureError(str(error)) from error
        except (ValueError, FileNotFoundError) as error:
            raise UsageError(str(error)) from error
    print(url)
    return 0


def _model_files(arguments: argparse.Namespace, scratch: Path) -> list[Sent]:
    """The model's files, with a card and curves that are made now."""
    from agent_r1_trl.environments.factory import tool_schemas
    from agent_r1_trl.publishing.card import CARD, make_card, read_card, read_facts
    from agent_r1_trl.publishing.curves import IMAGE, draw_curves
    from agent_r1_trl.publishing.files import Sent, files_of_model

    folder = Path(arguments.run)
    files = files_of_model(folder, critic=arguments.critic)
    facts = read_facts(folder, arguments.repo_id)
    facts.env_factory = environment_of(facts.recipe, "the card lists no tools")
    facts.tools = [] if facts.env_factory is None else tool_schemas(facts.env_factory)
    if draw_curves(facts.history, scratch / IMAGE):
        facts.curves = IMAGE
    (scratch / CARD).write_text(make_card(facts, read_card(folder)), encoding="utf-8")
    made = [Sent(scratch / name, name, "card") for name in (CARD, facts.curves) if name]
    return [*(item for item in files if item.name not in {new.name for new in made}), *made]


def environment_of(recipe: dict[str, Any], consequence: str) -> Callable[..., Any] | None:
    """The environment that a recipe names; None if it names none, or if it cannot be made here, which is said.

    Args:
        recipe: settings of a run.
        consequence: what follows if it cannot be made.
    """
    from agent_r1_trl.cli.arguments import read_mapping
    from agent_r1_trl.cli.resolve import resolve_env

    if not recipe.get("env"):
        return None
    try:
        given = read_mapping("env_kwargs", recipe.get("env_kwargs"))
        given = {name: value for name, value in given.items() if value is not None}
        return resolve_env(str(recipe["env"]), given)
    except UsageError as error:
        print(visible(f"warning: {consequence}: {error}"), file=sys.stderr)
        return None


def _dataset_files(arguments: argparse.Namespace, scratch: Path) -> list[Sent]:
    """The recorded trajectories as a data set, which is written now."""
    from agent_r1_trl.publishing.files import Sent
    from agent_r1_trl.recording.dataset import write_dataset

    folder = scratch / "dataset"
    write_dataset(arguments.run, folder, title=arguments.repo_id.rpartition("/")[2])
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [Sent(path, path.relative_to(folder).as_posix(), "trajectories") for path in paths]


def _listing(files: Sequence[Sent], arguments: argparse.Namespace, repo_type: str) -> str:
    from agent_r1_trl.publishing.files import left_out

    width = max(len(item.name) for item in files)
    lines = [f"{repo_type} {arguments.repo_id}:"]
    lines += [f"  {item.name:{width}}  {_size(item.size):>9}  {item.kind}" for item in files]
    lines.append(f"  {len(files)} files, {_size(sum(item.size for item in files))}")
    others = [] if arguments.trajectories else left_out(Path(arguments.run), list(files))
    if others:
        lines.append(f"not sent: {', '.join(others)}")
    return visible("\n".join(lines) + "\n")


def _size(num_bytes: int) -> str:
    if num_bytes < 10_000:
        return f"{num_bytes} B"
    return f"{num_bytes / 1e3:.0f} kB" if num_bytes < 10_000_000 else f"{num_bytes / 1e6:.0f} MB"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.push`."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
