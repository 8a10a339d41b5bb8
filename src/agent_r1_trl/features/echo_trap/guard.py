"""The guard against the echo trap: acts on the verdict of `agent_r1_trl.features.echo_trap` after each optimizer step.

Covered here: when something is done, on all ranks alike, and what it changes; what is written about it. Not covered:
which action is due (`escalation.py`), which a run can take (`checks.py`), the verdict (`feature.py`).

A rollback is a resumption inside the process. The Trainer's loop is left and entered again with the checkpoint, so
that everything comes back that a resumed run gets back. What differs is written into the checkpoint first: a run that
is killed after that, and resumed, goes on as if it had not been killed.

    checkpoint-40/echo_guard.json                the guard's state and the verdict when it was saved
    checkpoint-40/echo_guard_rolled_back.json    the guard's state after a rollback to it; read in place of the other,
                                                 whose size stands in the checkpoint's manifest

transformers 5.17 names that this file touches: `optimizer.param_groups`, `state`, `control`, `is_deepspeed_enabled`,
`neftune_noise_alpha`, `neftune_hook_handle`; of TRL `_metrics`, and `epsilon_low`, `epsilon_high` and `beta`, which
TRL reads anew in every loss.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import uuid
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.integrations.neftune import deactivate_neftune

from agent_r1_trl.errors import RunError
from agent_r1_trl.features.echo_trap.checks import EPSILON, EPSILON_HIGH, clip_matters, refusal
from agent_r1_trl.features.echo_trap.escalation import HEALTHY, GuardState, due_actions
from agent_r1_trl.features.echo_trap.settings import ACTIONS, ALL
from agent_r1_trl.recording.events import describe_event, write_event
from agent_r1_trl.rollout import derive_seed
from agent_r1_trl.trainers.callbacks import RolloutCallback
from agent_r1_trl.trainers.checkpoints import problem_of, sync_to_disk
from agent_r1_trl.trainers.config_checks import RolloutShape

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

logger = logging.getLogger(__name__)

FILTER_RULE, FILTER_VALUE, RESAMPLE_ROUNDS = "top_p", 0.9, 2
"""The settings of the action `filter` (RAGEN-2)."""

Change = tuple[str, list[tuple[Any, str, Any]]]
"""An action's effect, in words; and objects, names of their attributes, and the new values."""


class CollapsedError(RunError):
    """The run has collapsed, and the guard has ended it; names the last healthy checkpoint."""

    exit_code = 4


class RestartError(RunError):
    """The run goes back to a healthy checkpoint, which takes a new process."""


class EchoGuard(RolloutCallback):
    """Takes the actions of `echo.actions` when a run collapses; see `docs/echo-trap.md`."""

    name = "echo_guard"
    _judge: Any

    def __init__(self) -> None:
        self._rollback: Rollback | None = None
        """The exception that leaves the Trainer's loop as soon as this step is logged."""
        self._ending: RunError | None = None
        """The exception of `train` once the Trainer's loop has ended."""
        self._rates: list[float] = []
        """Learning rates of the parameter groups, while they are lowered."""
        self._before: dict[str, list[tuple[Any, str, Any]]] = {}
        """Attributes' values before an action changed them; no two actions change the same one."""
        self.state = GuardState()

    def attach(self, trainer: MultiTurnTrainer) -> None:
        """Choose the actions that the run can take.

        Raises:
            ValueError: one that was asked for cannot be taken.
        """
        super().attach(trainer)
        self._judge = trainer.features["echo_signals"].judge
        self._needs_new_process = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        names = list(trainer.args.echo.actions)
        found = {name: self._refusal(name) for name in (ACTIONS if names == [ALL] else names)}
        self._actions = [name for name, text in found.items() if text is None]
        for name, text in found.items():
            if text is not None and names != [ALL]:
                raise ValueError(f"echo.actions={names!r}: {name!r} {text} Or remove {name!r} from echo.actions.")
            if text is not None and trainer.is_world_process_zero():
                logger.warning("echo.actions: [all] leaves %r out, which %s", name, text)

    def _refusal(self, name: str) -> str | None:
        text = refusal(name, self.trainer.args)
        if name == "learning_rate" and self.trainer.is_deepspeed_enabled:
            text = "does not reach the optimizer step that DeepSpeed makes inside the backward pass. Use DDP."
        elif name == "filter" and text is None and not self.change(name)[1]:
            text = (
                "would change nothing: groups are filtered already, and are replaced or (in a streamed data set) have "
                "none to replace them. Remove sampling.filter_groups."
            )
        return text

    # ---------------------------------------------------------------- the run

    def around_run(self, train: Any) -> Any:
        """The Trainer's loop, entered again after a `Rollback`."""
        for name in [*self._before]:
            self._put_back(name)
        self._rollback = self._ending = None
        self.state = GuardState(run=uuid.uuid4().hex, is_dry=self.trainer.args.echo.dry_run)
        self.trainer.rollouts.seed = self.trainer.args.seed
        trainer, call = self.trainer, train
        while True:
            try:
                return call()
            except Rollback as rollback:
                folder = rollback.folder
                forget_after(trainer, folder, rollback.micro_step)
            if trainer.neftune_noise_alpha is not None:
                deactivate_neftune(trainer.model, trainer.neftune_hook_handle, trainer.accelerator)
            trainer.args.resume_without = None  # it said what the run's first start did without
            call = from_checkpoint(train, folder)

    def end_run(self) -> None:
        """Raise what the guard has ended the run with.

        Raises:
            CollapsedError: the action `stop` was taken.
            RestartError: a run with DeepSpeed or FSDP goes back to a checkpoint.
        """
        if self._ending is not None:
            raise self._ending

    def save(self, folder: Path) -> None:
        """Write what a resumed run needs into a checkpoint."""
        if self.trainer.args.should_save:
            place = {"step": self.trainer.state.global_step, "micro_step": self.trainer._step}
            write_guard(folder, place | {"verdict": self._judge.verdict.state, "guard": asdict(self.state)})

    def load(self, folder: Path) -> None:
        """Go on as the run did that has written a checkpoint. All ranks must call it."""
        content = self.trainer._on_main_process(lambda: read_guard(folder))
        if content is None:
            if self.trainer.is_world_process_zero():
                logger.warning("%s holds nothing of the guard, which begins anew.", folder)
            return
        self._rollback = None
        saved, is_dry = GuardState(**content["guard"]), self.state.is_dry
        if saved.is_dry != is_dry:  # what was only said is still to be done
            kept = {name: getattr(saved, name) for name in ("run", "num_steps", "num_rollbacks", "events")}
            saved = GuardState(is_dry=is_dry, **kept)
        self.state = saved
        for name in [*self._before]:
            self._put_back(name)
        for name in self._actions if not is_dry else []:
            if saved.num_taken.get(name) and ACTIONS[name] < ACTIONS["rollback"]:
                self._apply(name)
        if saved.num_rollbacks:
            self.trainer.rollouts.seed = derive_seed(self.trainer.args.seed, "rollback", saved.num_rollbacks)

    def kept_checkpoints(self) -> list[Path]:
        """Checkpoints that `save_total_limit` must not delete: the one to go back to, and its successor."""
        trusted, others = self._healthy()
        return [*trusted[:1], *others[-1:]]

    def _healthy(self) -> tuple[list[Path], list[Path]]:
        """The healthy checkpoints to go back to, and those that may hold the collapse, the newest first.

        A collapse shows in the rollouts behind it, of which a verdict needs two at least, and N rollouts later where
        they run ahead: what was saved later than so many rollouts before it was noticed may hold it.
        """
        args = self.trainer.args
        noticed_at = self.state.noticed_at
        if noticed_at is None:
            noticed_at = self.trainer.state.global_step + 1
        num_rollouts = 2 + args.rollouts_ahead
        until = noticed_at - math.ceil(num_rollouts * RolloutShape.of(args).updates_per_rollout)
        trusted, others = [], []
        for path in healthy_checkpoints(Path(args.output_dir), self.state.run):
            if _step(path) <= until:
                trusted.append(path)
            else:
                others.append(path)
        return trusted, others

    # ---------------------------------------------------------------- the Trainer's events

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Lower the learning rates for this step alone: schedule and checkpoints do not see it."""
        if self.learning_rate_factor == 1.0:
            return
        groups = self.trainer.optimizer.param_groups
        self._rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self.learning_rate_factor

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Put the learning rates back."""
        for group, rate in zip(self.trainer.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []

    @property
    def learning_rate_factor(self) -> float:  # type: ignore[override]
        """The factor of the pending step's learning rates: less after every further rollback."""
        is_lowered = self.state.num_steps < self.state.rate_until
        return self.trainer.args.echo.rate_factor ** max(1, self.state.num_rollbacks) if is_lowered else 1.0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Act on the verdict of the main process, which is that of all."""
        metrics = {"learning_rate_factor": self.learning_rate_factor}
        self.state.num_steps += 1
        verdict, of_main = self._judge.verdict, self.trainer._on_main_process
        answered, seen, is_exploding = of_main(lambda: (verdict.answered, verdict.state, verdict.is_exploding))
        self.state.note(state.global_step, is_healthy=seen in HEALTHY)
        signals = self.trainer.features.get("signals")
        if signals is None or not signals.is_ending:  # else a resumed run decides again
            self._undo(seen, self.state.past_actions(args.echo.patience, is_exploding=is_exploding))
            if answered not in HEALTHY:
                self._act(answered, is_exploding, control)
        self._log(metrics | {"steps": self.state.num_steps, "rollbacks": self.state.num_rollbacks})

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Leave the Trainer's loop for a rollback, now that the last step is logged."""
        if self._rollback is not None:
            raise self._rollback

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Act after the last step of an epoch as after any other; a run that ends here saves no checkpoint either."""
        self.on_step_begin(args, state, control)
        if self._ending is not None:  # save_strategy="epoch" has just asked for one
            control.should_save = control.should_evaluate = False

    # ---------------------------------------------------------------- what the milder actions change

    def change(self, name: str) -> Change:
        """The changes that `filter`, `clip` or `learning_rate` would make now."""
        args = self.trainer.args
        if name == "learning_rate":  # `on_pre_optimizer_step` does it
            rates = "the learning rates of policy and critic are" if args.has_critic else "the learning rate is"
            return f"{rates} multiplied by {args.echo.rate_factor:g} for {args.echo.rate_steps} steps", []
        parts = self._filtering() if name == "filter" else self._clipping()
        text = "; ".join(part_text for part_text, _ in parts)
        values = [value for _, part_values in parts for value in part_values]
        return text, values

    def _filtering(self) -> list[Change]:
        groups, resampling = (self.trainer.features[name] for name in ("group_filter", "resampling"))
        changes: list[Change] = []
        if groups.settings.filter_groups is None:
            settings = replace(groups.settings, filter_groups=FILTER_RULE, filter_value=FILTER_VALUE)
            text = f"groups are filtered by {FILTER_RULE} {FILTER_VALUE:g}"
            changes.append((text, [(groups, "settings", settings)]))
        if not hasattr(self.trainer.train_dataset, "__len__"):
            text = "groups without signal are not replaced, because a streamed data set has no others to draw"
            changes.append((text, []))
        elif resampling.rounds == 0:
            text = f"groups without signal are replaced in up to {RESAMPLE_ROUNDS} rounds"
            changes.append((text, [(resampling, "rounds", RESAMPLE_ROUNDS)]))
        return changes or [("groups are filtered and replaced already", [])]

    def _clipping(self) -> list[Change]:
        trainer = self.trainer
        before, changes = (trainer.epsilon_low, trainer.epsilon_high), []
        if clip_matters(trainer.args):
            low, high = max(before[0], EPSILON), max(before[1], EPSILON_HIGH)
            text = f"the clip goes from ({before[0]:g}, {before[1]:g}) to ({low:g}, {high:g})"
            changes.append((text, [(trainer, "epsilon_low", low), (trainer, "epsilon_high", high)]))
        else:  # where a loss reads something else than the clip, it is left alone
            changes.append(("the clip stays, because widening it would change nothing in this run", []))
        if trainer.args.beta != 0:
            text = f"the KL term is switched off (beta from {trainer.beta:g} to 0)"
            changes.append((text, [(trainer, "beta", 0.0)]))
        return changes

    def _apply(self, name: str) -> str:
        text, values = self.change(name)
        for target, attribute, value in values:
            self._before.setdefault(name, []).append((target, attribute, getattr(target, attribute)))
            setattr(target, attribute, value)
        return text

    def _put_back(self, name: str) -> None:
        """Put back what an action has changed, if anything."""
        for target, attribute, value in reversed(self._before.pop(name, [])):
            setattr(target, attribute, value)

    # ---------------------------------------------------------------- actions

    def _undo(self, verdict: str, names: list[str]) -> None:
        """Put back what actions have changed, where a new rollout begins: it is scored for the old settings again."""
        trainer = self.trainer
        if trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations):
            return
        for name in names:
            del self.state.num_taken[name]
            self._put_back(name)
            self._record(name, verdict, "undone", "what it had changed is put back")

    def _act(self, verdict: str, is_exploding: bool, control: TrainerControl) -> None:
        args = self.trainer.args.echo
        healthy = None
        actions = self._actions
        rules: dict[str, Any] = {"patience": args.patience, "max_rollbacks": args.max_rollbacks}
        rules["is_exploding"] = is_exploding
        names = due_actions(actions, self.state, verdict, **rules)
        if {"rollback", "stop"} & {*names}:
            healthy = self._last_healthy()
        if "rollback" in names and healthy is None:
            self._record("rollback", verdict, "not possible", "there is no healthy checkpoint to go back to")
            names = due_actions([name for name in actions if name != "rollback"], self.state, verdict, **rules)
        for name in names:
            control.should_log = True
            self._take(name, verdict, healthy, control)

    def _take(self, name: str, verdict: str, healthy: Path | None, control: TrainerControl) -> None:
        state, is_dry = self.state, self.state.is_dry
        state.take(name)
        if name == "rollback":
            text = f"the run goes back to {healthy and healthy.name}, with other draws from there on"
        elif name == "stop":
            text = f"the run ends; its last healthy checkpoint is {healthy or 'none'}"
        else:
            text = self.change(name)[0] if is_dry else self._apply(name)
        self._record(name, verdict, "dry run" if is_dry else "taken", text)
        self._log({"action": ACTIONS[name]})
        if is_dry:
            return
        if name == "learning_rate":
            state.rate_until = state.num_steps + self.trainer.args.echo.rate_steps
        if name in ("rollback", "stop"):
            control.should_save = control.should_evaluate = False
        if name == "stop":
            self._ending = CollapsedError(self._report(verdict, healthy))
            control.should_training_stop = True
        elif name == "rollback" and healthy is not None:
            self._go_back(healthy, control)

    def _go_back(self, folder: Path, control: TrainerControl) -> None:
        """Write down that the run goes back, and leave the Trainer's loop at the next occasion."""
        trainer, state = self.trainer, self.state
        state.num_rollbacks += 1
        state.noticed_at = None
        if state.rate_until:
            state.rate_until = state.num_steps + trainer.args.echo.rate_steps
        if trainer.is_world_process_zero():
            write_guard(folder, (read_guard(folder) or {}) | {"guard": asdict(state)}, name=ROLLED_BACK)
            delete_after(folder, state.run)
        trainer.accelerator.wait_for_everyone()
        if self._needs_new_process:
            control.should_training_stop = True
            self._ending = RestartError(
                f"The run collapsed at step {trainer.state.global_step} and goes back to {folder}. With DeepSpeed or "
                "FSDP that takes a new process: start it again with resume_from_checkpoint: true."
            )
        else:
            micro_step = trainer._on_main_process(lambda: (read_guard(folder) or {})["micro_step"])
            self._rollback = Rollback(folder, micro_step)

    def _last_healthy(self) -> Path | None:
        def find() -> Path | None:
            for folder in self._healthy()[0]:
                if (problem := problem_of(folder)) is None:
                    return folder
                logger.warning("Passed over %s, which was healthy: %s.", folder, problem)
            return None

        return self.trainer._on_main_process(find)

    # ---------------------------------------------------------------- what is written

    def _report(self, verdict: str, healthy: Path | None) -> str:
        events = [event for event in self.state.events[:-1] if event["outcome"] == "taken"]
        taken = ", ".join(f"{event['action']} (step {event['step']})" for event in events)
        fix = (
            f"Its last healthy checkpoint is {healthy}: set resume_from_checkpoint to it with other settings (a lower "
            "learning_rate, a reward that says more; with resume_without: [rollout] also more num_generations)."
            if healthy is not None
            else "It has no healthy checkpoint: start anew with other settings, and with checkpoints (save_steps)."
        )
        return (
            f"The echo guard has ended the run at step {self.trainer.state.global_step}: it is {verdict}. "
            f"{self._judge.verdict.reason} Actions before: {taken or 'none'}. {fix}"
        )

    def _record(self, name: str, verdict: str, outcome: str, text: str) -> None:
        """Log an action and write it down; its outcome is taken, dry run, undone or (once) not possible."""
        trainer = self.trainer
        known = [(item["action"], item["outcome"]) for item in self.state.events]
        if outcome == "not possible" and (name, outcome) in known:
            return
        event = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": trainer.state.global_step,
            "total_steps": self.state.num_steps,
            "action": name,
            "outcome": outcome,
            "state": verdict,
            "signals": {key: signal.reason for key, signal in self._judge.verdict.signals.items()},
            "text": text,
        }
        self.state.events.append(event)
        if trainer.is_world_process_zero():
            logger.warning("Echo guard: %s", describe_event(event))
            if trainer.store is not None:
                write_event(trainer.args.output_dir, event)

    def _log(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.trainer._metrics["train"][f"echo/{name}"] = [float(value)]


# -------------------------------------------------------------------- rollbacks

GUARD = "echo_guard.json"
ROLLED_BACK = "echo_guard_rolled_back.json"


class Rollback(BaseException):
    """The Trainer's loop is left, to be entered again with a checkpoint; it never leaves `train`."""

    def __init__(self, folder: Path, micro_step: int) -> None:
        super().__init__(folder)
        self.folder, self.micro_step = folder, micro_step


def write_guard(folder: Path, content: dict[str, Any], *, name: str = GUARD) -> None:
    """Write the guard's file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}"
    temporary.write_text(json.dumps(content), encoding="utf-8")
    sync_to_disk(temporary)
    os.replace(temporary, folder / name)


def read_guard(folder: Path) -> dict[str, Any] | None:
    """The last state of `write_guard`; None if the checkpoint holds nothing of a guard, or nothing readable."""
    path = folder / ROLLED_BACK if (folder / ROLLED_BACK).exists() else folder / GUARD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "guard" in content else None


def _checkpoints_of(output_dir: Path, run: str) -> list[tuple[Path, dict[str, Any]]]:
    """The checkpoints of a run, the newest first; the folder may hold those of other runs."""
    folders = [path for path in output_dir.glob("checkpoint-*") if path.name[11:].isdecimal()]
    found = []
    for folder in sorted(folders, key=_step, reverse=True):
        content = read_guard(folder)
        if content is not None and content["guard"].get("run") == run:
            found.append((folder, content))
    return found


def _step(folder: Path) -> int:
    return int(folder.name[11:])


def healthy_checkpoints(output_dir: Path, run: str) -> list[Path]:
    """The checkpoints of a run (its name in `GuardState`) whose verdict was healthy or converged, the newest first."""
    return [path for path, content in _checkpoints_of(output_dir, run) if content.get("verdict") in HEALTHY]


def delete_after(folder: Path, run: str) -> None:
    """Delete the checkpoints of a run behind the one that it goes back to; a resumed run must not take them."""
    behind = [path for path, _ in _checkpoints_of(folder.parent, run) if _step(path) > _step(folder)]
    for path in behind:  # the newest first
        shutil.rmtree(path, ignore_errors=True)
    if behind:
        logger.warning("Deleted %s: the run goes back behind them.", ", ".join(path.name for path in behind))


def from_checkpoint(train: partial[Any], folder: Path) -> partial[Any]:
    """`Trainer.train` with another checkpoint, its first argument; other callbacks' `around_run` stay around it."""
    inner = train.args[0]
    first = from_checkpoint(inner, folder) if isinstance(inner, partial) else str(folder)
    return partial(train.func, first, *train.args[1:], **train.keywords)


def forget_after(trainer: MultiTurnTrainer, folder: Path, micro_step: int) -> None:
    """Drop what this process holds of the steps behind a checkpoint: rollouts, journal, metrics, recorded steps."""
    trainer.rollouts.end_run()
    trainer.features.call("go_back", _step(folder), micro_step)
    trainer.forget_metrics()
    trainer.optimizer.zero_grad(set_to_none=True)
