"""The trajectories of a run on disk, without loss.

    RUN/trajectories/step_000010.jsonl           trained on in step 10, by the first process
    RUN/trajectories/step_000010_rank1.jsonl     by the second
    RUN/trajectories/step_000010.columns.jsonl   what the update knew of its tokens
    RUN/trajectories/steps.jsonl                 what advantages were worked out with, a line for each step
    RUN/trajectories/eval_step_000010.jsonl      of an evaluation after step 10
    RUN/trajectories/superseded/                 files of steps that a resumed run repeated

A line is the trajectory (`Trajectory.to_dict`) plus `step`, `split`, `rank`, how its advantages were estimated
(`estimator`, `scale`), which group it belongs to and whether it is trained on (`group`, `is_kept`, `in_loss`) and, for
readers without this package, `messages`, `token_rewards` and `total_reward`. Secrets are masked, in texts and, as ids
can be decoded, in the ids of the part that they stand in.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1_trl import safe_text
from agent_r1_trl.recording.lines import FIX, FOLDER, append_lines, read_lines
from agent_r1_trl.safe_text import dump_json
from agent_r1_trl.trajectory import Trajectory

MASKED_ID = 0
"""Stands for every id of a prompt, turn or observation in which a secret was found."""
_TEXTS = ("prompt_messages", "turns", "messages", "info", "error", "example_id", "tags", "rendered")


def mask_record(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record with secrets masked; the record itself if it holds none.

    Lengths, masks, log-probabilities and rewards stay. A record that was changed has `is_masked: true`.

    Args:
        record: fields as they are written, ids included.
    """
    rules = safe_text.rules()
    texts = json.loads(dump_json({name: record[name] for name in _TEXTS}))  # an environment may put anything into info
    named = rules.values_in(texts)  # what stands under a secret's name in this one
    if rules.is_idle and not named:
        return record
    masked = rules.mask_all(texts, named)
    if dump_json(masked) == dump_json(texts):
        return record
    prompt_ids, completion_ids = record["prompt_ids"], list(record["completion_ids"])
    if masked["prompt_messages"] != texts["prompt_messages"]:
        prompt_ids = _masked_ids(prompt_ids)
    starts = [turn["start"] for turn in texts["turns"]]
    for before, after, next_start in zip(
        texts["turns"], masked["turns"], [*starts[1:], len(completion_ids)], strict=True
    ):
        start, end = before["start"], before["end"]
        for is_spelled, span in ((_sampled, slice(start, end)), (_answered, slice(end, next_start))):
            if is_spelled(before) != is_spelled(after):
                completion_ids[span] = _masked_ids(completion_ids[span])
    # A rewritten context may repeat any part of the conversation.
    segments = [
        {**item, "prompt_ids": item["prompt_ids"] and _masked_ids(item["prompt_ids"])} for item in record["segments"]
    ]
    changed = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "segments": segments, "is_masked": True}
    return {**record, **masked, **changed}


def _sampled(turn: dict[str, Any]) -> list[Any]:
    """The text of a turn's sampled tokens."""
    return [turn["message"], *(result["call"] for result in turn["tool_results"])]


def _answered(turn: dict[str, Any]) -> list[Any]:
    """The text of the tokens after them."""
    return [turn["observations"], *(result["content"] for result in turn["tool_results"])]


def _masked_ids(ids: Sequence[int]) -> list[int]:
    return [MASKED_ID] * len(ids)


logger = logging.getLogger(__name__)

SUPERSEDED = "superseded"
SPLITS = ("train", "eval")

_NAME = re.compile(r"(?P<split>eval_)?step_(?P<step>\d+)(?:_rank(?P<rank>\d+))?\.jsonl")


@dataclass(kw_only=True)
class Record:
    """A trajectory with the place where it was recorded."""

    trajectory: Trajectory
    step: int
    """The number under which its metrics are logged: of the first step that trains on it; for an
    evaluation, of the last step before it."""
    split: str
    """`train` or `eval`."""
    rank: int
    """The process of its rollout."""
    index: int
    """Position among the records of its step and split, over all processes."""
    path: Path
    is_masked: bool = False
    """Whether a secret was masked in it."""
    estimator: str | None = None
    """Name of the estimator of its advantages; None if the run recorded none."""
    scale: str | None = None
    """The `scale_rewards` of that estimator, if it reads it."""
    group: int | None = None
    """Number of its group among those of the step, of all processes, replaced ones included; None if not recorded."""
    is_kept: bool | None = None
    """Whether the group filter left it in the update; None if not recorded."""
    in_loss: bool | None = None
    """Whether any of its tokens may have got a gradient; None if not recorded."""
    bootstrap_value: float = 0.0
    """The critic's value behind its last token, which stood for what a limit kept it from earning."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Name -> (n,) float32 of numpy, a number for each of the n tokens that the policy sampled, NaN where there is
    none; see `encode`. Empty unless asked for."""


class TrajectoryStore:
    """Writes the trajectories of one process.

    Several writes to one step append. A resumed or repeated run repeats steps; the file of the earlier start is
    then moved to `superseded/`, so that the files of a step hold the trajectories that the policy was trained on.

    Args:
        output_dir: of the run; files are written to its folder `trajectories`.
        rank: index of this process; processes never share a file.
        credit: `estimator` and `scale` of the advantages (see `Record`), for every line of the split "train".
    """

    def __init__(
        self, output_dir: str | os.PathLike[str], *, rank: int = 0, credit: Mapping[str, str] | None = None
    ) -> None:
        self.folder = Path(output_dir) / FOLDER
        self.rank = rank
        self.credit = dict(credit or {})
        self.num_lines: dict[tuple[str, int], int] = {}
        """(split, step) -> number of lines, of the files that this process has begun."""
        self.num_lost = 0
        """Number of trajectories that could not be written."""
        self._causes: set[str] = set()
        """Why trajectories are being lost, as far as it was said."""

    def write(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        split: str = "train",
        fields: Sequence[Mapping[str, Any]] | None = None,
    ) -> Path | None:
        """Append the trajectories of one rollout; returns the file (None if nothing was written).

        Each may have `fields` of its own. What cannot be written, as on a full disk, is counted in `num_lost` and said
        in the log.

        Raises:
            ValueError: for an unknown split or a negative step.
        """
        if split not in SPLITS or step < 0:
            raise ValueError(f"split={split!r}, step={step}: must be one of {SPLITS} and >= 0. Pass such values.")
        if not trajectories:
            return None
        rank = f"_rank{self.rank}" if self.rank else ""
        path = self.folder / f"{'eval_' if split == 'eval' else ''}step_{step:06d}{rank}.jsonl"
        extra = {"step": step, "split": split, "rank": self.rank, **(self.credit if split == "train" else {})}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (split, step) not in self.num_lines:
                self._supersede(path)
                self.num_lines[split, step] = 0
            of_each = fields or [{}] * len(trajectories)
            pairs = zip(trajectories, of_each, strict=True)
            append_lines(path, (encode_line(trajectory, {**extra, **own}) for trajectory, own in pairs))
            self.num_lines[split, step] += len(trajectories)
        except OSError as error:  # a full disk, as a rule: not worth a training run
            self._lose(len(trajectories), error)
            return None
        if self._causes:
            logger.warning("Trajectories are recorded again; %d were not, so far.", self.num_lost)
            self._causes.clear()
        return path

    def forget_after(self, step: int) -> None:
        """The run goes back to a step: files of later ones are moved to `superseded/` when they are written again."""
        self.num_lines = {key: number for key, number in self.num_lines.items() if key[1] <= step}

    def _lose(self, count: int, error: OSError) -> None:
        self.num_lost += count
        cause = f"{type(error).__name__} {error.errno}"
        if cause not in self._causes:
            self._causes.add(cause)
            logger.error(
                "%d trajectories of process %d could not be recorded under %s: %s. The run goes on without them. Free "
                "some space, and recording goes on by itself. This cause is reported once.",
                count,
                self.rank,
                self.folder,
                error,
            )

    def _supersede(self, path: Path) -> None:
        """Put the file of an earlier start aside, and its columns."""
        found = [item for item in (path, sidecar(path)) if item.exists()]
        if not found:
            return
        attic = self.folder / SUPERSEDED
        attic.mkdir(exist_ok=True)
        names = (attic / f"{path.stem}.{n}{path.suffix}" for n in itertools.count(1))
        free = next(name for name in names if not (name.exists() or sidecar(name).exists()))
        for item in found:
            os.replace(item, free if item == path else sidecar(free))


# ---------------------------------------------------------------- reading


def trajectory_files(path: str | os.PathLike[str], *, step: int | None = None, split: str | None = None) -> list[Path]:
    """The files of a run (its output directory, its folder `trajectories`, or one file), in the order of their steps.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: the file is of another kind.
    """
    source = Path(path)
    if source.is_file():
        if source.suffix != ".jsonl":
            raise ValueError(f"{source}: trajectories are .jsonl files.{FIX}")
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such file or directory.{FIX}")
    folder = source / FOLDER if (source / FOLDER).is_dir() else source
    found = []
    for candidate in folder.iterdir():
        match = _NAME.fullmatch(candidate.name)
        if match is None:
            continue
        key = (int(match["step"]), bool(match["split"]), int(match["rank"] or 0))
        if (step is None or key[0] == step) and (split is None or key[1] == (split == "eval")):
            found.append((key, candidate))
    return [candidate for _, candidate in sorted(found)]


def file_step(path: Path) -> int:
    """The step in the name of a file; 0 if there is none."""
    match = _NAME.fullmatch(path.name)
    return int(match["step"]) if match else 0


def read_records(
    path: str | os.PathLike[str], *, step: int | None = None, split: str | None = None, columns: bool = False
) -> Iterator[Record]:
    """The records of a run, a folder or a file; see `trajectory_files`. With `columns` each has those of its tokens.

    The last line is skipped with a warning if it is incomplete because the run was killed.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: a line is not a trajectory; the message names file and line.
    """
    counts: Counter[tuple[str, int]] = Counter()
    for file in trajectory_files(path, step=step, split=split):
        of_eval = bool((match := _NAME.fullmatch(file.name)) and match["split"])
        beside = read_columns(file) if columns else {}
        for line, values in enumerate(read_lines(file, "a recorded trajectory", ("completion_ids", "turns"))):
            try:
                record_step = int(values.get("step", file_step(file)))
                rank = int(values.get("rank", 0))
                record_split = str(values.get("split", "eval" if of_eval else "train"))
                counts[(record_split, record_step)] += 1
                if step not in (None, record_step) or split not in (None, record_split):
                    continue
                trajectory = Trajectory.from_dict(values)
                bootstrap_value = float(values.get("bootstrap_value", 0.0))
                own_columns = decode_all(beside.get(line, {}), trajectory.num_action_tokens)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{file}: not a recorded trajectory ({type(error).__name__}: {error}).{FIX}"
                ) from error
            yield Record(
                trajectory=trajectory,
                step=record_step,
                split=record_split,
                rank=rank,
                index=counts[(record_split, record_step)] - 1,
                path=file,
                is_masked=bool(values.get("is_masked")),
                estimator=values.get("estimator"),
                scale=values.get("scale"),
                **{name: values.get(name) for name in ("group", "is_kept", "in_loss")},
                bootstrap_value=bootstrap_value,
                columns=own_columns,
            )


def read_trajectories(
    path: str | os.PathLike[str], *, step: int | None = None, split: str | None = None
) -> Iterator[Trajectory]:
    """Like `read_records`, the trajectories alone."""
    for record in read_records(path, step=step, split=split):
        yield record.trajectory


def encode_line(trajectory: Trajectory, extra: dict[str, Any]) -> bytes:
    """One line of JSONL with its newline, secrets masked."""
    record = {
        **extra,
        **trajectory.to_dict(),
        "messages": trajectory.messages,
        "token_rewards": trajectory.token_rewards(),
        "total_reward": trajectory.total_reward,
    }
    return dump_json(mask_record(record)).encode("utf-8") + b"\n"


# ---------------------------------------------------------------- columns

MAX_FLOAT16 = 65504.0


def sidecar(path: Path) -> Path:
    """The file of columns beside one of trajectories."""
    return path.with_suffix(".columns.jsonl")


def encode(values: Any) -> str:
    """A column, (n,) of numpy, as text: a number for each token that the policy sampled, NaN where there is none.

    Columns are what the update knew of each of these tokens, in the order of time. A line of `sidecar` has those of
    the trajectory in line `line`, from 0, of the file beside it:

        entropy      of the policy, at the first pass of the loss over the token
        log_ratio    the trainer's log-prob in that pass minus the sampler's: a number of its own, since the difference
                     of two float16 is off by up to 0.003
        value        the critic's, before the update
        return       the critic's target
        reference    the reference's log-prob
        kl_reward    the KL penalty, where it is part of the rewards

    They are base64 of little-endian float16 (`f2:`), or float32 (`f4:`) where a number is too large for that: 2.7
    bytes a token, so that all columns of a critic's run take less than a tenth of what the trajectories take.
    """
    import numpy as np

    kind = "f4" if (np.isfinite(values) & (np.abs(values) > MAX_FLOAT16)).any() else "f2"
    return f"{kind}:{base64.b64encode(values.astype(f'<{kind}').tobytes()).decode()}"


def decode(text: str) -> Any:
    """(n,) float32 of numpy.

    >>> decode("f2:ADwAwA==").tolist()
    [1.0, -2.0]
    """
    import numpy as np

    kind, _, data = text.partition(":")
    return np.frombuffer(base64.b64decode(data), dtype=f"<{kind}").astype(np.float32)


def read_columns(path: Path) -> dict[int, dict[str, str]]:
    """Line of a trajectory -> its columns as they are written; none where the update did not come that far.

    Raises:
        ValueError: a line is something else; the message names file and line.
    """
    beside = sidecar(path)
    if not beside.is_file():
        return {}
    lines = read_lines(beside, "columns of a trajectory", ("line",))
    return {int(item.pop("line")): item for item in lines}


def decode_all(encoded: Mapping[str, str], num_tokens: int) -> dict[str, Any]:
    """Name -> (num_tokens,) float32; without columns of another length, which are another trajectory's."""
    columns = {name: decode(text) for name, text in encoded.items()}
    return {name: values for name, values in columns.items() if len(values) == num_tokens}
