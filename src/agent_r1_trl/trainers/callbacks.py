"""`RolloutCallback`: transformers' callback with the events that a rollout adds, and the list that a trainer holds.

Everything that most runs can do without is one of these, in a folder of `features/`; a callback of a user's own gets
the same events (`callbacks=[...]`, or `trainer.add_callback`). The step itself only calls them, in this order:

    attach                                                     the trainer is made
    begin_run, around_run, load_state_dict, load               `train` begins, perhaps from a checkpoint
      choose_rows, around_rollout, weights_synced, replay, record     the rollout of a step (`rollouts.py`)
      after_rollout (void)                                     its trajectories have ended
      after_scores                                             rewards are placed, the members of groups known
      keep                                                     which trajectories are trained on
      extra_columns                                            log-probs are known, advantages are not
      extra_tokens                                             the tokens of a loss term (`extra_loss`)
      rollout_end                                              advantages are known, TRL's batch is whole
        on_values, extra_loss, on_term, check_loss             each micro-batch
        before_step                                            the optimizer step, with its gradient norm
      state_dict, save, saved                                  a checkpoint
    close_run                                                  the run is over, however it ended
    end_run                                                    `train` has ended well

All ranks call all of them in the same order, and what one decides must be equal on all ranks, unless its text says
otherwise. An event that is not overridden does nothing.

`Agreement`, `raise_everywhere`: what goes wrong on one rank is raised on all of them. A rank that is alone with its
error leaves the others waiting for it in their next collective call, until they run into its timeout.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from agent_r1_trl.closeness import closest
from agent_r1_trl.environments.base import ProtocolError, RewardError
from agent_r1_trl.features import FEATURES, has_feature
from agent_r1_trl.objects import users_code
from agent_r1_trl.tools.faults import InfrastructureError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agent_r1_trl.generation.base import SamplingParams
    from agent_r1_trl.rollout.limits import RolloutLimits
    from agent_r1_trl.trainers.config import MultiTurnConfig
    from agent_r1_trl.trainers.construction import TrainRows
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer
    from agent_r1_trl.trainers.rollout_batch import Position, RolloutBatch, ScoredBatch, UpdateBatch
    from agent_r1_trl.update.entries import Inputs
    from agent_r1_trl.update.rows import TrainingRows


logger = logging.getLogger(__name__)

_KINDS: tuple[type[Exception], ...] = (RewardError, ProtocolError, ValueError, InfrastructureError)
"""Kinds of errors that all ranks raise as they are."""


def is_main_process() -> bool:
    """Whether this is the main process of the run."""
    return PartialState().is_main_process


def raise_everywhere(error: Exception | None) -> None:
    """Raise this rank's error; where it has none, the first of the other ranks' in its words. All ranks must call it.

    Raises:
        Exception: `error` itself; another rank's as one of `_KINDS` if it is one, else as a RuntimeError.
    """
    kind = next((item for item in _KINDS if isinstance(error, item)), RuntimeError)
    text = None if error is None else (kind, f"{type(error).__name__}: {error}")
    texts = gather_object([text]) if PartialState().num_processes > 1 else []
    if error is not None:
        raise error
    for rank, found in enumerate(texts):
        if found is not None:
            raise found[0](f"Rank {rank} has stopped all others: {found[1]}")


@contextlib.contextmanager
def raised_everywhere() -> Iterator[None]:
    """Whatever the block raises on one rank is raised on all. All ranks must enter it; it holds no collective call."""
    caught = None
    try:
        yield
    except Exception as error:
        caught = error
    raise_everywhere(caught)


def num_ranks() -> int:
    """Number of ranks that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Agreement:
    """Small collective operations on the CPU, which make no GPU wait, each with a timeout."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._group: Any = None

    def largest(self, signum: int, error: Exception | None) -> tuple[int, list[str]]:
        """The largest number of a signal (0: none) and what has gone wrong on all ranks. All ranks must call it."""
        texts = [] if error is None else [f"{type(error).__name__}: {error}"]
        if num_ranks() == 1:
            return signum, texts
        if self._group is None:
            has_gloo = "gloo" in dist.get_backend()
            self._group = dist.group.WORLD if has_gloo else dist.new_group(backend="gloo", timeout=self._timeout)
        both = torch.tensor([signum, len(texts)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        if both[1]:
            gathered: list[Any] = [None] * num_ranks()
            dist.all_gather_object(gathered, texts, group=self._group)
            texts = [f"Rank {rank} has stopped all others: {text}" for rank, of in enumerate(gathered) for text in of]
        return int(both[0]), texts


# -------------------------------------------------------------------- callbacks


@dataclass(kw_only=True)
class OptimizerStep:
    """An optimizer step that is about to be made."""

    number: int
    """Number of optimizer steps before it."""
    norms: tuple[Any, ...]
    """Gradient norms: the policy's first, the critic's where it has one of its own."""
    is_finite: bool
    """Whether they are, on all ranks. DeepSpeed has skipped the step by itself if they are not."""
    is_scaled: bool
    """Whether a scaler (float16) skips steps by itself."""
    lacks_tokens: bool = False
    """Whether it has nothing to train on."""
    is_skipped: bool = False
    """Set it to leave weights, optimizer and learning rate schedule as they are."""


class UpdateHooks:
    """Hooks of a trainer's subclass, or a callback, into the update: a loss term, its tokens, numbers for it."""

    def extra_columns(
        self, output: Inputs, trajectories: Sequence[Any], rows: TrainingRows
    ) -> Mapping[str, torch.Tensor] | None:
        """Numbers of your own for the update, worked out once for a rollout, in training and evaluation.

        Rewards and log-probs are known, advantages are not. Estimators read the columns of tokens as
        `CreditInputs.columns`, `extra_tokens` and `extra_loss` read all of them in their `inputs`.

        Args:
            output: TRL's batch of this rank's R rows: `prompt_ids` and `prompt_mask` (R, P), `completion_ids`,
                `completion_mask` and `tool_mask` (R, T), `is_kept` (R,) if some rows are not trained on, and so on.
            trajectories: this rank's.
            rows: of the trajectories: `rows.rows`, R of them, and `rows.index`, (R,), whose each is; -1 for one that
                fills up.

        Returns:
            Name -> (R, T), a number for each token, or (R,), one for each row.
        """
        return None

    def extra_tokens(self, inputs: Inputs) -> torch.Tensor | None:
        """The tokens that `extra_loss` is summed over; not overridden, those of the policy's loss.

        They may be observations, whose log-probs no layout computes otherwise, and stand in rows that a filter has
        excluded (`is_kept`): these rows come back for this term alone.

        Args:
            inputs: as `output` of `extra_columns`, with `advantages` (R, T).

        Returns:
            (R, T) bool; None for no token of this rank.
        """
        return None

    def extra_loss(self, inputs: Inputs, log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """A loss term of your own. (`loss_term` takes a function instead.)

        The trainer divides what it returns by the number of its tokens in the whole optimizer step, on all ranks, and
        adds it to the policy loss. A sum over tokens therefore means the same in every layout, on any number of ranks.

        Args:
            inputs: TRL's micro-batch of B rows: `advantages` (B, T), `completion_ids` (B, T), `old_per_token_logps`
                (B, T) or None (0 outside both masks), `trajectory_rewards` (B,), what the trajectory of each
                row has earned in all (0 if it is outside the baseline), what `extra_columns` gave, and so on.
            log_probs: (B, T) the policy's log-probs of the completion tokens, with gradients; 0 outside `mask`.
            mask: (B, T) bool, the tokens of `extra_tokens`; without it, those that enter the policy's loss.

        Returns:
            A scalar, the term summed over the tokens of `mask`; None for no term.
        """
        return None


class RolloutCallback(UpdateHooks, TrainerCallback):
    """Base of callbacks that take part in the rollout; see the top of this file. Its loss term is logged as `name`.

    For example:

        class CountTurns(RolloutCallback):
            def rollout_end(self, batch, output):
                self.trainer.add_metrics({"my/turns": sum(len(item.turns) for item in batch.trajectories)})
    """

    name = ""
    """Under which `trainer.features[name]` finds it, and its state lies in a checkpoint; "" for neither."""
    trainer: Any = None
    """Set by `attach`."""
    learning_rate_factor = 1.0
    """The factor of the logged learning rate."""
    replaces_sampling = False
    """Whether `replay` gives all rollouts, so that there is no sampler."""

    @property
    def samples_more(self) -> bool:
        """Whether `after_scores` may sample further trajectories; the sampler keeps its memory until then."""
        return False

    def attach(self, trainer: MultiTurnTrainer) -> None:
        """The trainer is made, and is `self.trainer` from now on."""
        self.trainer = trainer

    # ---------------------------------------------------------------- a run

    def begin_run(self) -> None:
        """`train` begins: forget an earlier run of the same trainer."""

    def around_run(self, train: Callable[[], Any]) -> Any:
        """Call `train`, the Trainer's loop, and return its result; may call it again."""
        return train()

    def close_run(self) -> None:
        """The run is over, however it ended, and no trajectory is sampled any more: close what is open."""

    def end_run(self) -> None:
        """`train` has ended well; what this raises is raised by `train`."""

    # ---------------------------------------------------------------- a rollout

    def choose_rows(self, rows: Sequence[dict[str, Any]], micro_step: int) -> Sequence[dict[str, Any]]:
        """The rows to sample a training rollout for; `rows` are this rank's, as the Trainer has drawn them.

        The rollout is trained on after `micro_step` micro-batches; with `rollouts_ahead` the run is not there yet.
        """
        return rows

    def around_rollout(self) -> contextlib.AbstractContextManager[Any]:
        """Inside it a rollout is sampled."""
        return contextlib.nullcontext()

    def weights_synced(self, policy: PreTrainedModel, position: Position) -> None:
        """The sampler has the weights of this step; sharded ones are gathered."""

    def replay(self, requests: Sequence[Any], limits: RolloutLimits, position: Position) -> Any:
        """A rollout of this rank's requests in place of one that is sampled; None to sample it."""
        return None

    def record(
        self,
        requests: Sequence[Any],
        limits: RolloutLimits,
        params: SamplingParams,
        position: Position,
        synced_step: int,
    ) -> Any:
        """A `RolloutLog` that hears of every turn while trajectories are sampled; None for none.

        The first callback that returns something counts, here and in `replay`. The sampler's weights are those of
        `synced_step` optimizer steps.
        """
        return None

    def after_rollout(self, batch: RolloutBatch) -> bool | None:
        """The trajectories have ended, nothing is scored; in training and evaluation.

        True, in training: nothing may be trained on them, and they are sampled anew.
        """
        return False

    def void(self, position: Position) -> None:
        """The rollout at this place must not be used, now or by a resumed run. Called by whoever voids it."""

    def after_scores(self, batch: ScoredBatch) -> None:
        """Rewards are placed, and it is known who counts; in training. Trajectories may be replaced (`batch.put`)."""

    def keep(self, batch: ScoredBatch) -> torch.Tensor | None:
        """(B,) bool, which trajectories are trained on; None for all. In training."""
        return None

    def rollout_end(self, batch: UpdateBatch, output: Inputs) -> None:
        """The rollout of a training step is whole: advantages are known, metrics are logged.

        `output` is TRL's batch of the rows. Scalars that are put into it stand in each of its micro-batches.
        """

    # ---------------------------------------------------------------- the update

    def on_values(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Results of a forward pass of the loss: `log_probs`, `entropies`, the critic's `values`; each rank by itself.

        Both are (B, T); the mask says what enters the loss.
        """

    def on_term(self, source: str, value: torch.Tensor) -> None:
        """A loss term of the user's, summed over its tokens of a micro-batch; each rank by itself.

        `source` is the function that computed it, as messages name it.
        """

    def check_loss(self, loss: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """The loss of a micro-batch, to be given back, perhaps weighed; each rank by itself."""
        return loss

    def before_step(self, step: OptimizerStep) -> None:
        """Gradients are accumulated and their norm is known."""

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> Any:
        """This rank's state, in values that `torch.load` reads with `weights_only`; None for none."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Go on with what `state_dict` gave."""

    def save(self, folder: Path) -> None:
        """Write files of one's own into a checkpoint; each rank by itself."""

    def load(self, folder: Path) -> None:
        """The run goes on from a checkpoint; after `load_state_dict`, if that has anything to load."""

    def saved(self, micro_step: int) -> None:
        """A checkpoint, after `micro_step` micro-batches, is whole."""

    def go_back(self, step: int, micro_step: int) -> None:
        """The run goes back to the checkpoint of these optimizer steps and micro-batches; others follow it."""

    def before_save(self, folder: str) -> None:
        """The model is about to be saved; what this raises keeps it from that."""

    def kept_checkpoints(self) -> Sequence[Path]:
        """Checkpoints that `save_total_limit` must not delete; on the main process."""
        return ()


class NamedEvents(CallbackHandler):
    """transformers' list of callbacks; an exception of a user's callback names its class, the event and the line."""

    def call_event(self, event: str, *args: object, **kwargs: object) -> Any:
        """Call an event of all of them."""
        with named_events(event):
            return super().call_event(event, *args, **kwargs)


_NOT_USERS = ("transformers", "trl", "peft", "accelerate", "agent_r1_trl")
"""Packages whose callbacks raise as they do."""


@contextlib.contextmanager
def named_events(event: str = "on_init_end") -> Iterator[None]:
    """Around transformers' calls of an event; what a user's callback raises there is reported as of other hooks.

    Exceptions of a class that is not Python's own are left alone: a script may catch them, as Optuna does with
    `TrialPruned`.
    """
    try:
        yield
    except Exception as error:  # whatever the user's code does
        callback = _callback_in(error)
        is_pythons = type(error).__module__ == "builtins"
        if not is_pythons or callback is None or type(callback).__module__.partition(".")[0] in _NOT_USERS:
            raise
        with users_code(f"callbacks: {type(callback).__name__}.{event}"):
            raise


def _callback_in(error: Exception) -> Any:
    """The callback whose event transformers called when this was raised; None outside an event."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is CallbackHandler.call_event.__code__:
            return frame.f_locals.get("callback")
    return None


def _warn_of_misspelt_events(kind: type[RolloutCallback]) -> None:
    events = dir(RolloutCallback)
    for name in {*dir(kind)} - {*events}:
        near = closest(name, events, is_sure=True)
        if near and callable(getattr(kind, name)) and is_main_process():
            logger.warning("%s.%s is no event. Did you mean %r?", kind.__name__, name, near)


class Callbacks:
    """The rollout callbacks of a trainer: features first, in the order of their table, then the user's.

    Args:
        config: training arguments; a feature that they do not ask for is not in the list.
        train_dataset: as the user gave it; None where the environment makes the prompts.

    Raises:
        ValueError: a feature cannot do what is asked of it; names the option and the fix.
    """

    def __init__(self, config: MultiTurnConfig, train_dataset: TrainRows = None) -> None:
        self._trainer: Any = None
        self._own: list[RolloutCallback] = []
        self._num_void = 0
        """Rollouts in a row that were thrown away."""
        self.leave_out: list[str] = []
        """Whose `keep` has excluded trajectories of this rank from the last rollout."""
        for name, row in FEATURES.items():
            if row.settings is not None and has_feature(name):
                package = importlib.import_module(f"agent_r1_trl.features.{name}")
                self._own += package.make_callbacks(config, train_dataset)

    def attach(self, trainer: MultiTurnTrainer) -> None:
        """The trainer is made: from now on the callbacks are its own."""
        self._trainer = trainer
        trainer.callback_handler.__class__ = NamedEvents
        for callback in self._own:
            trainer.add_callback(callback)
        for callback in self._own:
            callback.attach(trainer)
        names = [item.name for item in self if item.name]  # attaches the user's
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"callbacks: two are named {twice[0]!r}, and a checkpoint has one state for each name. Give one of "
                "them another name."
            )

    def __iter__(self) -> Iterator[RolloutCallback]:
        yield from self._own
        for item in self._trainer.callback_handler.callbacks:
            if isinstance(item, RolloutCallback) and item not in self._own:
                if item.trainer is not self._trainer:  # it may have been added at any time, or to another one before
                    self._tell(item, "attach", self._trainer)
                    _warn_of_misspelt_events(type(item))
                yield item

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __getitem__(self, name: str) -> Any:
        found = self.get(name)
        if found is None:
            raise KeyError(f"{name!r} is none of this run's features: {[item.name for item in self if item.name]}")
        return found

    def get(self, name: str) -> Any:
        """The callback of this name; None if it is off."""
        return next((item for item in self if item.name == name), None)

    def call(self, event: str, *arguments: object) -> list[Any]:
        """Call an event of all, and return what they returned."""
        return [self._tell(item, event, *arguments) for item in self]

    def _tell(self, item: RolloutCallback, event: str, *arguments: object) -> Any:
        """Call an event of one; an exception of a user's callback names the event and the line."""
        if item in self._own:
            return getattr(item, event)(*arguments)
        with users_code(f"callbacks: {type(item).__name__}.{event}"):
            return getattr(item, event)(*arguments)

    def run(self, train: Callable[[], Any]) -> Any:
        """The Trainer's loop inside everybody's `around_run`, the first one's outermost."""
        for item in reversed([*self]):
            if type(item).around_run is not RolloutCallback.around_run:
                train = partial(item.around_run, train)
        return train()

    @contextlib.contextmanager
    def around_rollout(self) -> Iterator[None]:
        """Everybody's."""
        with contextlib.ExitStack() as stack:
            for item in self:
                stack.enter_context(self._tell(item, "around_rollout"))
            yield

    def fold(self, event: str, value: object, *arguments: object) -> Any:
        """Everybody's, one after another: each gets what the one before it returned."""
        for item in self:
            value = self._tell(item, event, value, *arguments)
        return value

    def first(self, event: str, *arguments: object) -> Any:
        """The first result that is not None."""
        return next((found for item in self if (found := self._tell(item, event, *arguments)) is not None), None)

    def voids(self, batch: RolloutBatch) -> bool:
        """Whether anybody says that nothing may be trained on this rollout of a training."""
        for item in self:
            answer = self._tell(item, "after_rollout", batch)
            if not isinstance(answer, bool | None):
                raise ValueError(
                    f"{type(item).__name__}.after_rollout returned {answer!r:.200}. Return True to throw the rollout "
                    "away and sample it again, False or None to go on."
                )
            if answer and batch.position.is_training:
                self._num_void += 1
                if self._num_void > 3 and self._num_void.bit_count() == 1 and is_main_process():  # 4, 8, 16, ...
                    logger.warning(
                        "%d rollouts in a row were thrown away, this one because %s.after_rollout returned True. "
                        "Nothing is trained on until it returns False.",
                        self._num_void,
                        type(item).__name__,
                    )
                return True
        self._num_void = 0
        return False

    def keep(self, batch: ScoredBatch) -> torch.Tensor | None:
        """(B,) bool, the trajectories that all keep; None for all."""
        kept: torch.Tensor | None = None
        self.leave_out = []
        for item in self:
            mask = self._tell(item, "keep", batch)
            if mask is None:
                continue
            if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape != batch.in_loss.shape:
                raise ValueError(
                    f"{type(item).__name__}.keep returned {mask!r:.200}. Return a bool tensor of shape "
                    f"({len(batch.trajectories)},), an entry for each trajectory of this rank, or None to keep all."
                )
            self.leave_out += [] if mask.all() else [f"{type(item).__name__}.keep"]
            mask = mask.to(batch.in_loss.device)
            kept = mask if kept is None else kept & mask
        return kept

    @property
    def samples_more(self) -> bool:
        """Whether anybody's `after_scores` may sample."""
        return any(item.samples_more for item in self)

    @property
    def replaces_sampling(self) -> bool:
        """Whether all rollouts are replayed."""
        return any(item.replaces_sampling for item in self)

    @property
    def learning_rate_factor(self) -> float:
        """Everybody's, multiplied."""
        return math.prod((item.learning_rate_factor for item in self), start=1.0)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Name -> state, of those that have one."""
        states = {item.name: item.state_dict() for item in self if item.name}
        states = {name: state for name, state in states.items() if state is not None}
        for name in states.keys() - {item.name for item in self._own}:  # else a resumed run would find out
            torch.save(states[name], stream := io.BytesIO())
            stream.seek(0)
            try:
                torch.load(stream, weights_only=True)
            except pickle.UnpicklingError as error:
                raise ValueError(
                    f"{type(self[name]).__name__}.state_dict: torch.load cannot read such a value with weights_only. "
                    "Return numbers, texts, tensors, lists and dicts."
                ) from error
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give each its state; what is not in the checkpoint begins anew."""
        for item in self:
            if item.name in states:
                item.load_state_dict(states[item.name])
