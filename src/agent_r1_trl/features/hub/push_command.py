"""`agent-r1-trl push`: send a trained agent to the Hub, with tokenizer, recipe and card; or its trajectories.

agent-r1-trl push outputs/my-agent --repo_id user/my-agent --dry_run
agent-r1-trl push outputs/my-agent --repo_id user/my-agent-trajectories --trajectories

The files that are listed in `KINDS` are sent and no others, in one commit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1_trl.cli.errors import DependencyError, PlainParser, UsageError, users_mistakes
from agent_r1_trl.safe_text import visible

COMMAND = "agent-r1-trl push"
KINDS: dict[str, tuple[str, ...]] = {
    "weights": (
        "model.safetensors", "model-*.safetensors", "model.safetensors.index.json",
        "pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json",
        "adapter_model.safetensors", "adapter_model.bin",
    ),
    "configuration": ("config.json", "generation_config.json", "adapter_config.json"),
    "code of the model": ("configuration_*.py", "modeling_*.py", "tokenization_*.py"),
    "tokenizer and template": (
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
        "additional_chat_templates/*.jinja", "preprocessor_config.json", "processor_config.json",
    ),
    "recipe": ("recipe.yaml",),
    "evaluation": ("evaluation.json", "evaluation.md", "evaluation/evaluation.json", "evaluation/evaluation.md"),
    "card": ("README.md", "LICENSE", "LICENSE.txt"),
}  # fmt: skip
"""Kind of file -> patterns of names in the directory."""
CRITIC = {"critic": ("critic/*.safetensors", "critic/*.json")}
_LOG_IN = (
    "Log in (`hf auth login`), or set HF_TOKEN to a token that may write, from https://huggingface.co/settings/tokens."
)


def make_parser() -> PlainParser:
    """The parser of the command's options."""
    parser = PlainParser(COMMAND, __doc__.partition(": ")[2].partition("\n\nThe files")[0])
    parser.add_argument("run", metavar="OUTPUT_DIR", help="Output directory of a run, or of a saved model.")
    parser.add_argument("--repo_id", required=True, metavar="USER/NAME", help="Repository; made if there is none.")
    flags = {
        "trajectories": "Send the recorded trajectories as a data set (Parquet) in place of the model.",
        "critic": "Send PPO's critic with the model.",
        "private": "Send to a private repository only.",
        "dry_run": "List what would be sent, search it, and send nothing.",
    }
    for name, about in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=about)
    licence = "The model's licence, as the Hub names it (apache-2.0). Not set: the base model's, if its card is here."
    parser.add_argument("--license", metavar="NAME", help=licence)
    allow = "Files, or patterns of them, that are sent although something in them looks like a secret."
    parser.add_argument("--allow_secrets", nargs="+", default=[], metavar="FILE", help=allow)
    return parser


def run(argv: Sequence[str]) -> int:
    """Collect, search and send the files; returns the exit code."""
    arguments = make_parser().read(argv)
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    from agent_r1_trl.features.hub.secret_scan import check_files

    with users_mistakes(FileNotFoundError), tempfile.TemporaryDirectory(prefix="agent-r1-trl-push-") as scratch:
        if arguments.trajectories and arguments.critic:
            raise ValueError("--critic: goes with a model, and --trajectories sends a data set. Leave one out.")
        try:
            validate_repo_id(arguments.repo_id)
        except HFValidationError as error:
            raise ValueError(f"--repo_id {arguments.repo_id!r}: {error} Pass user/name.") from error
        files = (_dataset_files if arguments.trajectories else _model_files)(arguments, Path(scratch))
        sys.stdout.write(_listing(files, arguments))
        check_files(files, allowed=arguments.allow_secrets, fix="--allow_secrets")
        print("Nothing was sent (--dry_run)." if arguments.dry_run else _push(files, arguments))
    return 0


# ---------------------------------------------------------------- which files


def _model_files(arguments: argparse.Namespace, scratch: Path) -> dict[str, Path]:
    """Name in the repository -> file of the model, with a card that is made now."""
    from agent_r1_trl.environments.factory import tool_schemas
    from agent_r1_trl.evaluation.agent import newest_checkpoint_hint
    from agent_r1_trl.features.hub.card import CARD, make_card, read_facts, split_card

    folder = Path(arguments.run)
    kinds = dict(KINDS)
    if arguments.critic:
        kinds |= CRITIC
    found: dict[str, dict[str, Path]] = {}
    for kind, patterns in kinds.items():
        paths = [path for pattern in patterns for path in folder.glob(pattern)]
        found[kind] = {path.relative_to(folder).as_posix(): path for path in paths}
    if missing := [kind for kind in ("weights", "configuration", "critic") if found.get(kind) == {}]:
        is_sharded = any(folder.glob("*/*_states.pt"))
        shards = "DeepSpeed's shards through its zero_to_fp32.py first, or " if is_sharded else ""
        hint = newest_checkpoint_hint(folder)
        raise UsageError(
            f"{str(folder)!r}: is no directory with weights and what belongs to them ({', '.join(missing)}). Pass "
            f"{shards}one that save_model or a checkpoint wrote; only PPO writes a critic.{hint}"
        )
    facts, path = read_facts(folder, arguments.repo_id), folder / CARD
    facts.own_license = arguments.license or ""
    factory = environment_of(facts.recipe, "the card lists no tools")
    facts.tools = None if factory is None else tool_schemas(factory)
    try:
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: cannot be read ({error}). Write it again in UTF-8, or remove it.") from error
    card = make_card(facts, before)
    if "license" not in split_card(card)[0]:
        print(
            "The card names no licence. Pass --license with its name on the Hub, such as apache-2.0.", file=sys.stderr
        )
    (scratch / CARD).write_text(card, encoding="utf-8")
    files = {name: path for of_kind in found.values() for name, path in of_kind.items()}
    files[CARD] = scratch / CARD
    return files


def environment_of(recipe: dict[str, Any], consequence: str) -> Callable[..., Any] | None:
    """The environment that a recipe names; None if it names none, or cannot be made here, which is said.

    `consequence` is what follows then.
    """
    from agent_r1_trl.cli.arguments import read_mapping
    from agent_r1_trl.cli.resolve import resolve_env

    if not recipe.get("env"):
        return None
    try:
        given = read_mapping("env_kwargs", recipe.get("env_kwargs"))
        return resolve_env(str(recipe["env"]), {name: value for name, value in given.items() if value is not None})
    except UsageError as error:
        print(visible(f"warning: {consequence}: {error}"), file=sys.stderr)
        return None


def _dataset_files(arguments: argparse.Namespace, scratch: Path) -> dict[str, Path]:
    """The recorded trajectories as a data set, which is written now."""
    from agent_r1_trl.recording.dataset import write_dataset

    folder = scratch / "dataset"
    write_dataset(arguments.run, folder, title=arguments.repo_id.rpartition("/")[2])
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _listing(files: Mapping[str, Path], arguments: argparse.Namespace) -> str:
    width = max(len(name) for name in files)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    kind = "dataset" if arguments.trajectories else "model"
    lines = [f"{kind} {arguments.repo_id}:"]
    lines += [f"  {name:{width}}  {size:>15,} bytes" for name, size in sizes.items()]
    lines.append(f"  {len(files)} files, {sum(sizes.values()) / 1e6:,.1f} MB")
    if not arguments.trajectories:
        tops = {name.split("/")[0] for name in files}
        others = sorted(path for path in Path(arguments.run).iterdir() if path.name not in tops)
        names = [f"{path.name}/" if path.is_dir() else path.name for path in others]
        if names:
            lines.append(f"not sent: {', '.join(names)}")
    return visible("\n".join(lines) + "\n")


# ---------------------------------------------------------------- sending


def _push(files: Mapping[str, Path], arguments: argparse.Namespace) -> str:
    """Make the repository if there is none, and send the files; returns its address.

    Raises:
        UsageError: the Hub refuses the id, the token, the card or a file, or the repository is public and should not
            be; names it, and the fix.
        DependencyError: it cannot be reached, or answers with an error of its own.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="agent-r1-trl")
    repo_type = "dataset" if arguments.trajectories else "model"
    try:
        url = api.create_repo(arguments.repo_id, repo_type=repo_type, private=arguments.private or None, exist_ok=True)
        if arguments.private and api.repo_info(url.repo_id, repo_type=repo_type).private is False:
            raise UsageError(
                f"--private: {url.repo_id} is there already, and is public. Make it private in its settings on the "
                "Hub, pass another --repo_id, or leave --private out."
            )
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
        api.create_commit(url.repo_id, added, repo_type=repo_type, commit_message="Upload with agent-r1-trl")
    except LocalTokenNotFoundError as error:
        raise UsageError(f"token: there is none. {_LOG_IN}") from error
    except OfflineModeIsEnabled as error:
        raise UsageError("HF_HUB_OFFLINE is set, so nothing can be sent. Unset it, or pass --dry_run.") from error
    except Exception as error:
        # Told by its name: huggingface_hub goes through httpx, from 2.4 on through httpx2, which is another package.
        if not any(kind.__name__ == "HTTPError" for kind in type(error).__mro__):
            raise
        raise _explained(f"--repo_id {arguments.repo_id} at {api.endpoint}", error) from error
    return str(url)


def _explained(place: str, error: object) -> Exception:
    """An answer of the Hub, or none, with what to do about it."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    said = getattr(error, "server_message", None) or " ".join(str(error).splitlines()[:1])
    if not 400 <= status < 500 or status in (408, 429):
        return DependencyError(f"{place}: the Hub {'failed' if status else 'cannot be reached'} ({said}). Try again.")
    fix = {401: _LOG_IN, 403: "Use a token that may write there, or pass another repo_id."}
    return UsageError(f"{place}: the Hub refuses this ({said}). {fix.get(status, 'Correct it, and push again.')}")
