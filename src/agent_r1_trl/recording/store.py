"""The trajectories of a run on disk, without loss.

    RUN/trajectories/step_000010.jsonl           trained on in step 10, by the first process
    RUN/trajectories/step_000010_rank1.jsonl     by the second
    RUN/trajectories/eval_step_000010.jsonl      of an evaluation after step 10
    RUN/trajectories/superseded/                 files of steps that a resumed run repeated

A line is the trajectory (`Trajectory.to_dict`) plus `step`, `split`, `rank`, how its advantages were estimated
(`estimator`, `scale`) and, for readers without this package, `messages`, `token_rewards` and `total_reward`. Secrets
are masked, in texts and, as ids can be decoded, in the ids of the part that they stand in.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1_trl import safe_text
from agent_r1_trl.safe_text import dump_json
from agent_r1_trl.trajectory import Trajectory

MASKED_ID = 0
"""Stands for every id of a prompt, turn or observation in which a secret was found."""
_TEXTS = ("prompt_messages", "turns", "messages", "info", "error", "example_id")


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
    """What the sampled tokens of a turn spell."""
    return [turn["message"], *(result["call"] for result in turn["tool_results"])]


def _answered(turn: dict[str, Any]) -> list[Any]:
    """What the tokens after them spell."""
    return [turn["observations"], *(result["content"] for result in turn["tool_results"])]


def _masked_ids(ids: Sequence[int]) -> list[int]:
    return [MASKED_ID] * len(ids)


logger = logging.getLogger(__name__)

FOLDER = "trajectories"
FIX = " Pass the output directory of a run."
"""The end of a message about a file that holds something else."""
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
        self._written: set[tuple[str, int]] = set()
        """(split, step) of the files that this process has begun."""
        self.num_lost = 0
        """Number of trajectories that could not be written."""
        self._causes: set[str] = set()
        """Why trajectories are being lost, as far as it was said."""

    def write(self, step: int, trajectories: Sequence[Trajectory], split: str = "train") -> Path | None:
        """Append the trajectories of one rollout; returns the file (None if nothing was written).

        What cannot be written, as on a full disk, is counted in `num_lost` and said in the log.

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
            if (split, step) not in self._written:
                self._supersede(path)
                self._written.add((split, step))
            _append(path, (encode_line(trajectory, extra) for trajectory in trajectories))
        except OSError as error:  # a full disk, as a rule: not worth a training run
            self._lose(len(trajectories), error)
            return None
        if self._causes:
            logger.warning("Trajectories are recorded again; %d were not, so far.", self.num_lost)
            self._causes.clear()
        return path

    def forget_after(self, step: int) -> None:
        """The run goes back to a step: files of later ones are moved to `superseded/` when they are written again."""
        self._written = {key for key in self._written if key[1] <= step}

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
        """Put the file of an earlier start aside."""
        if not path.exists():
            return
        attic = self.folder / SUPERSEDED
        attic.mkdir(exist_ok=True)
        numbers = itertools.count(1)
        os.replace(path, next(to for n in numbers if not (to := attic / f"{path.stem}.{n}{path.suffix}").exists()))


def _append(path: Path, lines: Iterable[bytes]) -> None:
    """Append lines completely or not at all; no more than one of them is in memory."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            for line in lines:
                rest = memoryview(line)
                while rest:
                    rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(size)
            raise


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
    path: str | os.PathLike[str], *, step: int | None = None, split: str | None = None
) -> Iterator[Record]:
    """The records of a run, a folder or a file; see `trajectory_files`.

    The last line is skipped with a warning if it is incomplete because the run was killed.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: a line is not a trajectory; the message names file and line.
    """
    counts: Counter[tuple[str, int]] = Counter()
    for file in trajectory_files(path, step=step, split=split):
        of_eval = bool((match := _NAME.fullmatch(file.name)) and match["split"])
        for values in read_lines(file, "a recorded trajectory", ("completion_ids", "turns")):
            record_step = int(values.get("step", file_step(file)))
            record_split = str(values.get("split", "eval" if of_eval else "train"))
            counts[(record_split, record_step)] += 1
            if step not in (None, record_step) or split not in (None, record_split):
                continue
            try:
                trajectory = Trajectory.from_dict(values)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{file}: not a recorded trajectory ({type(error).__name__}: {error}).{FIX}"
                ) from error
            yield Record(
                trajectory=trajectory,
                step=record_step,
                split=record_split,
                rank=int(values.get("rank", 0)),
                index=counts[(record_split, record_step)] - 1,
                path=file,
                is_masked=bool(values.get("is_masked")),
                estimator=values.get("estimator"),
                scale=values.get("scale"),
            )


def read_trajectories(
    path: str | os.PathLike[str], *, step: int | None = None, split: str | None = None
) -> Iterator[Trajectory]:
    """Like `read_records`, the trajectories alone."""
    for record in read_records(path, step=step, split=split):
        yield record.trajectory


def read_lines(path: Path, what: str, names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file; a last line that was cut off by a kill is left out with a warning.

    Args:
        path: the file.
        what: an object is, for errors.
        names: keys that each must have.

    Raises:
        ValueError: a line is something else; the message names file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or any(name not in row for name in names):
                    raise ValueError(f"no object with {' and '.join(names)}" if names else "no object")
            except ValueError as error:
                if not line.endswith(b"\n"):
                    logger.warning("%s, line %d was cut off while it was written; left out.", path, number)
                    return
                raise ValueError(f"{path}, line {number}: not {what} ({error}).{FIX}") from error
            yield row


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
