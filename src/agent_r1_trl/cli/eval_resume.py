"""An evaluation that was killed goes on: nothing that its journals hold is played again.

While an evaluation runs, its output directory holds the file `unfinished`; a start that finds it goes on with the
journals of the rows. The file stays if something failed for no fault of a model, which the next start plays again.
What an evaluation depends on stands in the journals, and a start that differs is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.rollout.failures import may_pass
from agent_r1_trl.safe_text import rules

if TYPE_CHECKING:
    from agent_r1_trl.cli.arguments import EvalArguments
    from agent_r1_trl.cli.eval_plan import PlannedRow
    from agent_r1_trl.evaluation import EvaluationResult

MARK = "unfinished"
_OF_HOSTED = ("endpoint", "endpoint_options")
_OF_LOADED = ("dtype", "use_vllm", "thinking", "chat_template_kwargs", "chat_template", "response_template")
_WEIGHTS = ("*.safetensors", "*.bin", "*.json")


@contextlib.contextmanager
def unfinished(arguments: EvalArguments) -> Iterator[bool]:
    """Marks the output directory while rows are played; yields whether to go on with what is there.

    Raises:
        OutputInUseError: another evaluation is writing there.
    """
    from agent_r1_trl.trainers.output_lock import EVALUATION_LOCK_FILE, output_lock

    if not arguments.output_dir:
        yield False
        return
    with output_lock(Path(arguments.output_dir), EVALUATION_LOCK_FILE):
        if not arguments.journal:
            yield False
            return
        mark = Path(arguments.output_dir) / MARK
        goes_on = arguments.resume and mark.exists()
        mark.touch()
        yield goes_on
        mark.unlink(missing_ok=True)  # not after an error: then the next start goes on


def leave_failures(arguments: EvalArguments, results: Sequence[EvaluationResult]) -> str | None:
    """Let the next start play what failed for no fault of a model, and may not fail again.

    Returns:
        What to tell the user; None if nothing failed so, or there is no journal.
    """
    trajectories = [item for result in results for item in result.trajectories]
    failed = sum(may_pass(item, is_refused=False) for item in trajectories)
    if not failed or not (arguments.output_dir and arguments.journal):
        return None
    (Path(arguments.output_dir) / MARK).touch()
    return (
        f"{failed} of {len(trajectories)} trajectories failed for no fault of the model. The same command plays those "
        "again, and only those (--no_resume: all)."
    )


def identity_of(arguments: EvalArguments, row: PlannedRow) -> dict[str, Any]:
    """What the trajectories of a row depend on besides their requests, limits and sampling settings."""
    names = _OF_HOSTED if row.is_hosted else _OF_LOADED
    settings = {name: getattr(arguments, name) for name in ("env", "env_kwargs", "seed", "baseline_prompt", *names)}
    if row.is_hosted:
        return {"method": row.method, "model": row.model, **rules().mask_all(settings)}
    return {"method": row.method, "model": row.model, "weights": _fingerprint(row.model), **settings}


def _fingerprint(model: str | None) -> str | None:
    """Changes when the files of a model in a directory are written anew; None for a Hub id."""
    folder = Path(str(model))
    if not folder.is_dir():
        return None
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)} - {folder / "evaluation.json"})
    state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()
