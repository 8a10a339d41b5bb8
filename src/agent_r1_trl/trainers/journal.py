"""The journal of a training run: which recorded rollouts a resumed run may use again, and which are kept.

A resumed run starts at its checkpoint and asks for the rollouts behind it once more. Each of them is in the journal,
whole or in part, and is used if it was sampled from the same weights with the same settings; a run whose updates are
deterministic therefore plays only what no process had played.

Not covered here: files and records (`agent_r1_trl.journal`).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from agent_r1_trl.environments.factory import EnvFactory, users_environments
from agent_r1_trl.generation import SamplingParams
from agent_r1_trl.journal import Cassette, ReplayError, RolloutLog, rank_folder, rollout_file
from agent_r1_trl.journal.reader import RecordedRollout, read_rollout
from agent_r1_trl.journal.records import VERSION, Record
from agent_r1_trl.rollout import RolloutLimits, RolloutRequest
from agent_r1_trl.trajectory import Trajectory

logger = logging.getLogger(__name__)

LIMITS = (
    "max_turns",
    "max_completion_length",
    "max_tokens_per_turn",
    "max_observation_tokens",
    "max_invalid_calls",
    "max_model_length",
    "max_tool_calling_iterations",
    "context_policy",
    "context_turns",
    "context_tokens",
    "summary_tokens",
    "summary_prompt",
)
"""Limits that decide what a trajectory is; the others decide how long it takes."""
CHUNK = 2**22
"""Elements that are summed at once, so that the fingerprint needs no memory to speak of."""


class TrainingJournal:
    """Opens the journal of each rollout of this process.

    Args:
        args: of the trainer.
        accelerator: of the trainer.
        template: source of the chat template.
        env_factory: makes the environments.

    Raises:
        ReplayError: `replay` names no journal.
    """

    def __init__(self, args: Any, accelerator: Any, template: str, env_factory: EnvFactory) -> None:
        self._cassette = None if args.replay is None else Cassette(args.replay, rank=accelerator.process_index)
        self._env_factory = env_factory
        self._plays_finished = False
        """Whether reward functions look at environments, which a recorded trajectory does not have."""
        self._is_on, self._keep = bool(args.journal) and self._cassette is None, args.journal_keep
        self._overlaps = args.overlap_rollout
        self._folder = rank_folder(args.output_dir, accelerator.process_index)
        self._settings = {
            "processes": accelerator.num_processes,
            "template": hashlib.blake2b(template.encode("utf-8", "replace"), digest_size=8).hexdigest(),
        }
        # A run that was to be resumed and has no checkpoint yet begins with the weights that it had then.
        self._asks_to_resume = str(args.resume_from_checkpoint).lower() in ("true", "last")
        self._is_resumed = self._asks_to_resume
        self._weights = ""
        self._base: str | None = None
        self._has_said_end = False
        self._is_first = True
        """Whether no rollout of this run has been opened."""
        self._needed_from = math.inf if args.save_strategy == "no" else 0
        """Micro-step of the last checkpoint: what lies before it is not needed any more."""
        self._logs: list[RolloutLog] = []
        """Of the last two rollouts: a later one may begin while the trajectories of one are played again."""

    def resume(self) -> None:
        """The run goes on from a checkpoint: what lies behind it in the journal is its own."""
        self._is_resumed = True

    def end_run(self) -> None:
        """Close the files; the next run is another one."""
        for log in self._logs:
            log.close()
        self._logs = []
        self._is_resumed, self._is_first = self._asks_to_resume, True

    def attach(self, trainer: Any) -> None:
        """Look at the trainer's reward functions, and end its run where a replay ends.

        Raises:
            ReplayError: `replay` is set, and one of the functions looks at environments.
        """
        self._plays_finished = reads_environments(trainer.reward_funcs)
        if not self.is_replay:
            return
        trainer.add_callback(StopAtTheEnd(self, trainer.args.steps_per_generation * trainer.args.num_iterations))
        if self._plays_finished:
            raise ReplayError(
                "replay: a reward function reads `environments`, and a replay has none. Leave that function out, or "
                "leave replay out."
            )

    # ---------------------------------------------------------------- replay

    @property
    def is_replay(self) -> bool:
        """Whether rollouts come from a journal (`replay`)."""
        return self._cassette is not None

    def replay(
        self,
        requests: Sequence[RolloutRequest],
        limits: RolloutLimits,
        micro_step: int,
        optimizer_step: int,
        round_number: int = 0,
    ) -> ReplayedRollout | None:
        """The recorded rollout; None if rollouts are played.

        Reward functions that have changed find other groups to replace (`resampling.py`) than those that were played;
        a round that is not there has no trajectories.

        Raises:
            ReplayError: the journal holds another one, or none.
        """
        if self._cassette is None:
            return None
        try:
            trajectories = self._cassette.play(requests, micro_step, round_number, _limits_record(limits))
        except ReplayError as error:
            if not round_number:
                raise
            self._say_end_of_rounds(error)
            trajectories = []
        environments = users_environments([None] * len(requests), self._env_factory)
        return ReplayedRollout(requests, trajectories, environments, synced_step=optimizer_step)

    def _say_end_of_rounds(self, error: ReplayError) -> None:
        if not self._has_said_end:
            logger.warning(
                "Of micro-steps whose rewards differ from the recorded run's, the replay replaces no groups without "
                "signal that were not replaced there: %s This is said once; sampling/groups_with_signal counts on.",
                error,
            )
        self._has_said_end = True

    def has_rollout(self, micro_step: int) -> bool:
        """Whether the rollout that a micro-step begins to train on can be had; only a replay has an end."""
        return self._cassette is None or micro_step in self._cassette.micro_steps

    # ---------------------------------------------------------------- the rollouts of this run

    def take_base(self, base: str | None) -> None:
        """Note the frozen weights of this run (`base_fingerprint`), once: no update changes them."""
        self._base = base

    def take_weights(self, policy: nn.Module, position: Any) -> None:
        """Look at the weights that the next rollouts are sampled from."""
        if self._is_on and position.is_training:
            self._weights = fingerprint(policy.named_parameters())

    def open(
        self,
        requests: Sequence[RolloutRequest],
        limits: RolloutLimits,
        params: SamplingParams,
        micro_step: int,
        optimizer_step: int,
        round_number: int = 0,
    ) -> RolloutLog | None:
        """The journal of a rollout; None if there is none (any more).

        Args:
            requests: of this process.
            limits: of every trajectory.
            params: how tokens are drawn.
            micro_step: that trains first on it.
            optimizer_step: number of optimizer steps behind the weights.
            round_number: of a rollout that replaces groups of the micro-step's first one, from 1 on.
        """
        self._is_on = self._is_on and not any(log.has_failed for log in self._logs)
        if not self._is_on:
            return None
        path = self._folder / rollout_file(micro_step, round_number)
        if self._is_first and not self._is_resumed:  # what is there is the journal of another run
            self._delete(self._files())
        unneeded = sorted({_micro_step(file) for file in self._files()} - {micro_step})
        unneeded = [step for step in unneeded if step < self._needed_from]
        unneeded = unneeded[: max(0, len(unneeded) - self._keep)]
        self._delete([file for file in self._files() if _micro_step(file) in unneeded])
        header = {
            "micro_step": micro_step,
            "optimizer_step": optimizer_step,
            "weights": self._weights,
            "size": len(requests),
            "params": asdict(params),
            "limits": _limits_record(limits),
            **({"round": round_number} if round_number else {}),
            **({} if self._base is None else {"base": self._base}),
            **self._settings,
        }
        recorded = self._usable(read_rollout(path), header) if self._is_resumed else None
        self._is_first = False
        log = RolloutLog(path, header, recorded=recorded, plays_finished=self._plays_finished)
        for old in self._logs[:-1]:
            old.close()
        self._logs = [*self._logs[-1:], log]
        return log

    def discard(self, micro_step: int, round_number: int = 0) -> None:
        """Remove the journal of a rollout that nothing may be trained on, now or by a resumed run."""
        path = self._folder / rollout_file(micro_step, round_number)
        for log in self._logs:
            if log.path == path:
                log.close()
        if self._is_on:
            self._delete([path])

    def saved(self, micro_step: int) -> None:
        """A checkpoint is whole: with the next rollout, what lies before it goes."""
        self._needed_from = micro_step

    def roll_back(self, micro_step: int) -> None:
        """The run goes back to a checkpoint, and plays other rollouts from there on."""
        self._needed_from = micro_step
        if self._is_on:
            self._delete([path for path in self._files() if _micro_step(path) >= micro_step])

    # ---------------------------------------------------------------- inside

    def _usable(self, recorded: RecordedRollout | None, header: Record) -> RecordedRollout | None:
        if recorded is None:
            return None
        expected = {"version": VERSION, **header}
        changed = [name for name, value in expected.items() if recorded.header.get(name) != value]
        if self._overlaps and self._is_first and recorded.header.get("optimizer_step") == header["optimizer_step"] - 1:
            # The rollout behind a checkpoint was begun before its last update, as overlap_rollout has it.
            changed = [name for name in changed if name not in ("optimizer_step", "weights")]
        if not changed:
            return recorded
        logger.warning(
            "The journal of the rollout of micro-step %d is not used again: %s differ%s from what was recorded. The "
            "rollout is played anew.",
            header["micro_step"],
            ", ".join(changed),
            "s" if len(changed) == 1 else "",
        )
        return None

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("rollout_*.journal"))

    def _delete(self, files: Sequence[Path]) -> None:
        for file in files:
            file.unlink(missing_ok=True)


def _limits_record(limits: RolloutLimits) -> dict[str, Any]:
    return {name: getattr(limits, name, None) for name in LIMITS}


def _micro_step(path: Path) -> int:
    return int(path.name.rpartition("_")[2].partition(".")[0])


class ReplayedRollout:
    """A rollout that needs not be played, in the place of `Rollout`.

    Args:
        requests: of the rollout.
        trajectories: of the journal.
        environments: what reward functions receive; there is nothing in it.
        synced_step: number of optimizer steps behind the weights.
    """

    seconds = 0.0

    def __init__(
        self,
        requests: Sequence[RolloutRequest],
        trajectories: list[Trajectory],
        environments: list[Any] | None,
        *,
        synced_step: int,
    ) -> None:
        self.requests = requests
        self.rows: Sequence[dict[str, Any]] = [request.example for request in requests]
        self.trajectories = trajectories
        self.environments = environments
        self.synced_step = synced_step

    def wait(self) -> None:
        """Nothing to wait for."""

    def cancel(self, timeout_s: float = 0.0) -> bool:
        """Nothing to stop."""
        return True


class StopAtTheEnd(TrainerCallback):
    """Ends a replay behind the last recorded rollout, so that `max_steps` and the schedules can stay as they were.

    Args:
        journal: of the trainer.
        steps_per_rollout: micro-steps that train on one rollout.
    """

    def __init__(self, journal: TrainingJournal, steps_per_rollout: int) -> None:
        self._journal = journal
        self._steps_per_rollout = steps_per_rollout

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop if the next rollout is not there."""
        micro_step = state.global_step * args.gradient_accumulation_steps
        if micro_step % self._steps_per_rollout == 0 and not self._journal.has_rollout(micro_step):
            logger.warning("The replayed journal ends with optimizer step %d, and so does the run.", state.global_step)
            control.should_training_stop = True


# ---------------------------------------------------------------- weights and reward functions


def fingerprint(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of the trained parameters, of this process's part of them where they are sharded.

    The bits of each tensor are added up as whole numbers: exact in any order, at the speed of reading them.
    """
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    return _digest([name for name, _ in trained], _bit_sums([parameter for _, parameter in trained]))


def base_fingerprint(model: nn.Module, accelerator: Any) -> str | None:
    """A digest of the frozen weights below an adapter, the same on any number of processes. All ranks must call it.

    Args:
        model: of the trainer, not wrapped.
        accelerator: of the trainer.

    Returns:
        None without an adapter: then a checkpoint holds all weights. Adapters count as none of the base: TRL's "ref"
        is a copy of the one that is trained.
    """
    marks = [f".{name}." for name in getattr(model, "peft_config", None) or ()]
    if not marks:
        return None
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    frozen = {name: value for name, value in frozen.items() if not any(mark in f"{name}." for mark in marks)}
    sums = _bit_sums(list(frozen.values()))
    if any(hasattr(value, "ds_tensor") for value in frozen.values()):  # the parts of the ranks add up
        sums = accelerator.reduce(sums.to(accelerator.device), "sum")
    return _digest([*frozen], sums)


def _digest(names: list[str], sums: torch.Tensor) -> str:
    return hashlib.blake2b(json.dumps([names, sums.tolist()]).encode(), digest_size=8).hexdigest()


def _bit_sums(parameters: list[torch.Tensor]) -> torch.Tensor:
    """(N,) on the device of the first, so that one copy brings them to the host."""
    sums = [_bit_sum(_local(parameter)) for parameter in parameters]
    return torch.stack([item.to(sums[0].device) for item in sums]) if sums else torch.zeros(0, dtype=torch.int64)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The values that this process holds, under DeepSpeed ZeRO-3 and FSDP2 as well."""
    if hasattr(parameter, "to_local"):
        return parameter.to_local()
    if parameter.numel() == 0 and hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    return parameter


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(whole)
    return torch.stack([chunk.sum(dtype=torch.int64) for chunk in bits.split(CHUNK)]).sum()


def reads_environments(functions: Sequence[Any]) -> bool:
    """Whether one of the user's reward functions looks at the environments of the trajectories."""
    for function in functions:
        if isinstance(function, nn.Module) or str(getattr(function, "__module__", "")).startswith("agent_r1_trl."):
            continue
        while isinstance(function, functools.partial):
            function = function.func
        function = inspect.unwrap(getattr(function, "__func__", function))
        if not hasattr(function, "__code__"):  # an object that can be called
            function = type(function).__call__
        code = getattr(function, "__code__", None)
        # Without code nothing is known; with it, the name stands among its arguments, or its texts (kwargs["..."]).
        if code is None or "environments" in (*code.co_varnames, *code.co_consts, *code.co_names):
            return True
    return False
