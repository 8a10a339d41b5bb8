"""The Trainer's saving and resuming: whole checkpoints or none, on all ranks alike, and one run per `output_dir`.

A resumed run needs more than transformers' checkpoint: the rollout in flight, the order of the data, the reference.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Sampler
from trl import GRPOTrainer

from agent_r1_trl.critic.attach import gathered
from agent_r1_trl.errors import RunError
from agent_r1_trl.features import feature, has_feature
from agent_r1_trl.generation import fsdp2
from agent_r1_trl.trainers.checkpoints import (
    MANIFEST,
    STATE,
    UNFINISHED,
    CheckpointError,
    base_fingerprint,
    choose_checkpoint,
    clear_unfinished,
    find_run,
    finish,
    goes_on,
    has_part,
    output_lock,
    read_manifest,
    rotate_around,
    saving,
)
from agent_r1_trl.trainers.construction import is_placeholder
from agent_r1_trl.trainers.data_workers import outlive_signals
from agent_r1_trl.trainers.metrics import write_as_text
from agent_r1_trl.trainers.policy_loss import loss_terms
from agent_r1_trl.trainers.sharding import keep_log_probs_exact
from agent_r1_trl.update.entries import KEPT_IDS, MICRO_BATCHES
from agent_r1_trl.update.layout import AUTO
from agent_r1_trl.update.sampling_masks import SamplingMasks

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.modules.module import _IncompatibleKeys
    from trl.trainer.utils import RepeatSampler

    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

logger = logging.getLogger(__name__)

ROLLOUT_STATE = "rollout_state_rank{rank}.pt"
"""File of each rank in a checkpoint: its place in the data and its rollout in flight."""
VERSION = 3
"""Version of its format."""

PLACE = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
)
"""Arguments that a run's place in the data is counted in."""
IN_FLIGHT = (
    "update_layout", "max_tokens_per_micro_batch", "loss_unit", "use_vllm", "vllm_importance_sampling_correction",
    "beta", "kl_placement", "temperature", "top_k", "top_p", "min_p", "has_critic",
)  # fmt: skip
"""Arguments that decide which tensors a rollout in flight holds, what they mean, and how they lie."""


# -------------------------------------------------------------------- the rollout in flight


def save_rollout(folder: Path, trainer: MultiTurnTrainer) -> None:
    """Write this rank's place in the data, its rollout unless it is used up, and the states of the features."""
    state = {
        "step": trainer._step,
        "buffered_inputs": trainer._buffered_inputs if _is_in_flight(trainer) else None,
        "features": trainer.features.state_dict(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / ROLLOUT_STATE.format(rank=trainer.accelerator.process_index))


def load_rollout(folder: Path, trainer: MultiTurnTrainer) -> None:
    """Go on with what `save_rollout` wrote. All ranks must call it.

    Without any file, as in a checkpoint of TRL's, or with `resume_without: [rollout]`, the place follows from the
    optimizer steps, and the next one begins with a new rollout.
    """
    args = trainer.args
    path = folder / ROLLOUT_STATE.format(rank=trainer.accelerator.process_index)
    if "rollout" in (args.resume_without or ()) or not any(gather_object([path.exists()])):
        trainer._step = trainer.state.global_step * args.gradient_accumulation_steps
        trainer._buffered_inputs = None
        return
    state = torch.load(path, map_location=trainer.accelerator.device, weights_only=True)
    trainer._step, trainer._buffered_inputs = state["step"], state["buffered_inputs"]
    for inputs in trainer._buffered_inputs or ():
        for one in inputs.get(MICRO_BATCHES, [inputs]):
            if one.get(KEPT_IDS) is not None:  # a checkpoint from before holds a padded tensor
                one[KEPT_IDS] = SamplingMasks.of(one[KEPT_IDS])
    trainer.features.load_state_dict(state["features"])


def _is_in_flight(trainer: MultiTurnTrainer) -> bool:
    return bool(trainer._step % (trainer.args.steps_per_generation * trainer.args.num_iterations))


# -------------------------------------------------------------------- data


def describe_run(trainer: MultiTurnTrainer) -> dict[str, Any]:
    """The facts that a resumed run has to share with this one; a checkpoint's manifest holds them."""
    config = getattr(trainer.accelerator.unwrap_model(trainer.model), "config", None)
    settings = {name: getattr(trainer.args, name) for name in ("seed", "shuffle_dataset", *PLACE, *IN_FLIGHT)}
    if settings["max_tokens_per_micro_batch"] == AUTO:  # as None: a rollout in flight says itself how it lies
        settings["max_tokens_per_micro_batch"] = None
    return {
        "checkpoint_format": VERSION,
        "processes": trainer.accelerator.num_processes,
        "is_in_flight": _is_in_flight(trainer),
        "train_dataset": describe_rows(trainer.train_dataset),
        "model": getattr(config, "_name_or_path", ""),
        "base": trainer.base,
        "run_id": trainer.run_id,
        "extra_tokens": [term.name for term in loss_terms(trainer) if term.tokens],
        **settings,
    }


_NEW_ROLLOUT = "resume_without: [rollout]: the run then goes on from its weights and its optimizer with a new rollout."


def check_same_run(folder: Path, saved: dict[str, Any], trainer: MultiTurnTrainer) -> None:
    """Refuse to put an adapter on other frozen weights, or to go on where place or rollout would not fit.

    What `describe_run` has `saved` must be what it says now, where both are known.

    Raises:
        CheckpointError: something differs; names it, both values and the fix.
    """
    without = trainer.args.resume_without or ()
    now = describe_run(trainer)
    lead = f"resume_from_checkpoint={str(folder)!r}: the run was saved with"
    if None not in (saved["base"], now["base"]) and saved["base"] != now["base"]:
        raise CheckpointError(
            f"{lead} an adapter on the model {saved['model']!r} and cannot go on with {now['model']!r}, whose "
            f"frozen weights differ ({now['base']} instead of {saved['base']}). Start it with "
            f"model_name_or_path={saved['model']!r}, as it was then, in the same dtype and quantization."
        )
    if "data" not in without and not trainer.args.ignore_data_skip:
        _check_data(lead, saved, now)
    if "rollout" in without or not has_part(folder, "rollout"):
        return
    if (version := saved.get("checkpoint_format")) != VERSION:  # None: of a time when each rank's file told it
        raise CheckpointError(
            f"resume_from_checkpoint={str(folder)!r}: its {ROLLOUT_STATE.format(rank='*')} have the format of another "
            f"version of agent-r1-trl ({version} instead of {VERSION}). Resume with the version that wrote them, or "
            f"set {_NEW_ROLLOUT}"
        )
    is_in_flight = saved["is_in_flight"]
    names = ("processes", *PLACE, *((*IN_FLIGHT, "extra_tokens") if is_in_flight else ()))
    if changed := [name for name in names if name in saved and saved[name] != now[name]]:
        before, given = (", ".join(f"{name}={of.get(name)}" for name in changed) for of in (saved, now))
        raise CheckpointError(
            f"{lead} {before} and cannot go on with {given}, which its place in the data "
            f"{'and the rollout in flight do' if is_in_flight else 'does'} not fit. Start it with {before}, "
            f"or set {_NEW_ROLLOUT}"
        )


def _check_data(lead: str, saved: dict[str, Any], now: dict[str, Any]) -> None:
    for name in ("seed", "shuffle_dataset", "train_dataset"):
        before, given = saved[name], now[name]
        if before is None or given is None or before == given:
            continue
        fix = f"Start it with {name}={before}"
        if name == "train_dataset":
            is_equal = before["rows"] == given["rows"]
            fix = "Pass the same rows in their order"
            before, given = f"{before['rows']} rows", f"{given['rows']} rows"
            given += " with other contents or in another order" if is_equal else ""
        raise CheckpointError(
            f"{lead} {name}={before} and cannot go on with {name}={given}, where its place in the data falls on other "
            f"rows. {fix}, or set resume_without: [data] to go on at that place in the new order."
        )


def describe_rows(dataset: object) -> dict[str, int] | None:
    """Number of rows, and a checksum of up to 64 of them with their places; None where rows cannot be counted."""
    if not hasattr(dataset, "__len__") or is_placeholder(dataset):
        return None
    count = len(dataset)
    if not isinstance(dataset, Dataset):
        return {"rows": count}
    places = sorted({index * (count - 1) // 63 for index in range(64)})
    rows = dataset.with_format("arrow")[places].to_pylist()  # no transform runs, no image is decoded
    return {"rows": count, "crc32": zlib.crc32(repr([sorted(row.items()) for row in rows]).encode())}


@functools.cache
def accept_numbered_cpus() -> None:
    """Let `torch.load` accept the device `cpu:0` of each of several ranks on a CPU, as it accepts `cuda:0`.

    transformers maps the optimizer to that device when such a run is resumed.
    """

    def stay(storage: object, location: str) -> Any:
        return storage if location.startswith("cpu:") else None

    torch.serialization.register_package(5, lambda storage: None, stay)  # 5: asked before any other


class EpochOrder(Sampler[int]):
    """TRL's `RepeatSampler` with a permutation that depends on seed and epoch alone.

    TRL draws the permutation of every epoch from one generator, which a resumed run starts anew: from the second epoch
    on it would see other rows than the run that it continues.
    """

    def __init__(self, sampler: RepeatSampler, epoch: Callable[[], int]) -> None:
        self._sampler = sampler
        self._epoch = epoch
        self.num_ahead = 0
        """How many epochs after the present one the next order is that of."""

    def __iter__(self) -> Iterator[int]:
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self._sampler.seed + self._epoch() + self.num_ahead)
        yield from self._sampler

    def __len__(self) -> int:
        return len(self._sampler)


def following_batches(dataloader: object, order: EpochOrder | None) -> Iterator[Any]:
    """This rank's batches of the next epochs, one after another, before the Trainer comes to them.

    Empty where the Trainer's order is not the one that is known here: a sampler of the user's own, streamed data, or
    rows that one rank reads for all.
    """
    if order is None or not isinstance(dataloader, DataLoaderShard):
        return
    batches = dataloader.base_dataloader  # without accelerate's account of where an epoch ends
    whole: Any = getattr(batches.batch_sampler, "batch_sampler", batches.batch_sampler)  # of several ranks
    is_known = getattr(whole, "sampler", None) is order
    if not is_known:
        return
    for num_ahead in itertools.count(1):
        order.num_ahead = num_ahead
        try:
            with torch.random.fork_rng(devices=[]):  # a data loader draws a seed for its workers
                epoch = iter(batches)
                first = next(epoch, None)
        finally:
            order.num_ahead = 0
        if first is None:
            return
        yield first
        yield from epoch


# -------------------------------------------------------------------- the reference


REFERENCE = "reference/model.safetensors"


def save_reference(folder: Path, trainer: MultiTurnTrainer) -> None:
    """Write the reference, if it moves. All ranks must call it."""
    if trainer.ref_model is None or not trainer.args.sync_ref_model:
        return
    tensors = {}
    for name, parameter in trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters():
        with gathered([parameter], modifier_rank=None):
            whole = fsdp2.full(parameter.detach())
            if trainer.args.should_save:
                tensors[name] = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
    if trainer.args.should_save:
        (folder / REFERENCE).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / REFERENCE)


def load_reference(folder: Path, trainer: MultiTurnTrainer) -> None:
    """Put the reference back to where it was, in place. All ranks must call it."""
    path, moves = folder / REFERENCE, trainer.args.sync_ref_model
    if trainer.ref_model is None or not (moves or path.is_file()):
        return
    if not (moves and path.is_file()):
        if trainer.accelerator.is_main_process:
            logger.warning(
                "The reference of the KL term begins anew as the model that the run is started with: sync_ref_model "
                "is %s, and %s is %s.",
                str(moves).lower(),
                path,
                "missing" if moves else "of a run that had moved it",
            )
        return
    with safe_open(path, "pt") as file:
        for name, parameter in trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters():
            with torch.no_grad(), gathered([parameter]):
                fsdp2.write(parameter, file.get_tensor(name))


class SavingTrainer(GRPOTrainer):
    """TRL's trainer; saves and resumes whole checkpoints (`docs/when-things-fail.md`), and uploads nothing private.

    A checkpoint is written below `UNFINISHED`, and gets its place when every rank has written its part. Old ones are
    deleted, and the new one is uploaded, after that.
    """

    env_factory: Any
    rollouts: Any
    features: Any
    base: str | None = None
    """Fingerprint of the frozen weights; None where all are trained."""
    run_id: str | None = None
    """The id of this run, or of the last one, the same on all ranks; a resumed run keeps that of its checkpoint."""
    _is_saving = False
    """Whether the Trainer writes below `UNFINISHED`."""
    # TRL's own.
    _buffered_inputs: list[dict[str, Any]] | None
    _step: int

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's; under FSDP2 log-probabilities are not rounded."""
        super().create_accelerator_and_postprocess()
        keep_log_probs_exact(self.accelerator)

    def _issue_warnings_after_load(self, load_result: _IncompatibleKeys) -> None:
        """Not of weights that are tied to others, which a checkpoint holds once."""
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", None) or ()
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object) -> Any:
        """The Trainer's loop, from the newest whole checkpoint (True), from that of a path, or from the start (None).

        Raises:
            CheckpointError: the checkpoint cannot be used.
            OutputInUseError: another run trains in `output_dir`.
            SaveError: a checkpoint could not be written.
        """
        self.base = base_fingerprint(self.accelerator.unwrap_model(self.model), self.accelerator)
        self._step, self._buffered_inputs = 0, None  # an earlier run may have ended in the middle of a rollout
        self.forget_metrics()
        with contextlib.ExitStack() as stack:
            checkpoint, self.run_id = self._on_main_process(lambda: self._prepare_run(stack, resume_from_checkpoint))
            return self._run(functools.partial(super().train, checkpoint, *args, **kwargs))

    def _run(self, train: Callable[[], Any]) -> Any:
        """Call the Trainer's loop; inside the lock of `output_dir`, whatever else this saves."""
        return train()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """TRL's, with workers that outlive signals."""
        return outlive_signals(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader[Any]:
        """The Trainer's, with workers that outlive signals."""
        return outlive_signals(super().get_eval_dataloader(eval_dataset))

    def forget_metrics(self) -> None:
        """Drop what would go into the next log, and what reward functions gave for it."""
        pending = (self._pending_metrics, self._pending_extra_logs)
        for values in (*self._metrics.values(), *self._logs.values(), *pending):
            values.clear()

    def _on_main_process(self, function: Callable[[], Any]) -> Any:
        """The function's result on the main process, on every rank; an exception is raised on every rank as well."""
        result, error = None, None
        if self.accelerator.is_main_process:
            try:
                result = function()
            except Exception as caught:
                error = caught
        result, error = broadcast_object_list([result, error])
        if error is not None:
            raise error
        return result

    def _prepare_run(self, stack: contextlib.ExitStack, value: Any) -> tuple[str | None, str]:
        """Lock `output_dir`, tidy it up, choose the checkpoint and the run's id; on the main process alone."""
        output_dir = Path(self.args.output_dir)
        stack.enter_context(output_lock(output_dir))
        clear_unfinished(output_dir)
        if value is None or value is False:
            if not self.state.global_step and (found := find_run(output_dir)):
                logger.warning(
                    "output_dir=%r holds a run already (%s): this one will replace its model and mix with its "
                    "records. Set another output_dir, or go on with it: trainer.train(resume_from_checkpoint=True).",
                    str(output_dir),
                    found,
                )
            return None, uuid.uuid4().hex
        folder = choose_checkpoint(value, output_dir)
        manifest = read_manifest(folder)
        if manifest is None:
            has_rollout = has_part(folder, "rollout")
            logger.warning(
                "%s has no %s: it was written by TRL. Neither its files nor seed, data and model were compared.%s",
                folder,
                MANIFEST,
                "" if has_rollout else " It holds no rollout in flight: the next step begins with a new one.",
            )
        else:
            check_same_run(folder, manifest["run"], self)
        return str(folder), goes_on(folder) or uuid.uuid4().hex

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log, whose table of `log_completions` holds nothing but text and numbers."""
        if self.args.log_completions:
            for column in (self._logs["prompt"], self._logs["completion"], *self._logs["extra"].values()):
                write_as_text(column)
        super().log(logs, start_time)

    # ---------------------------------------------------------------- resuming

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: object
    ) -> tuple[int, int]:
        """The Trainer's place in the data; behind the last epoch where the checkpoint is that of a finished run."""
        place = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args)
        if not self.state.global_step or self.state.global_step < max_steps:
            return place
        if self.accelerator.is_main_process:
            logger.warning(
                "The run is finished: its checkpoint stands at step %d of %d, so that no step is trained. To go on, "
                "raise max_steps=%s, or num_train_epochs=%g where max_steps is not set.",
                self.state.global_step,
                max_steps,
                self.args.max_steps,
                self.args.num_train_epochs,
            )
        return num_train_epochs, 0

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        accept_numbered_cpus()
        if checkpoint is not None:
            load_rollout(Path(checkpoint), self)
            self.features.call("load", Path(checkpoint))
            batches = [
                batch for inputs in self._buffered_inputs or () for batch in inputs.get(MICRO_BATCHES, [inputs])
            ]
            has_reference = not batches or "ref_per_token_logps" in batches[0]
            if self.beta != 0 and self.args.kl_placement == "loss" and not has_reference:
                raise CheckpointError(
                    f"resume_from_checkpoint={checkpoint!r}: its rollout in flight was scored without the reference, "
                    f"and this run has beta={self.beta}. Start it with the echo.actions that it had, or set "
                    "resume_without: [rollout]."
                )
            load_reference(Path(checkpoint), self)
        super()._load_optimizer_and_scheduler(checkpoint)

    # ---------------------------------------------------------------- saving

    def _get_output_dir(self, trial: object) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / UNFINISHED) if self._is_saving else folder

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's, unless a feature refuses it, as for weights that are not finite."""
        self.features.call("before_save", output_dir or self.args.output_dir)
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """The Trainer's checkpoint with the rollout in flight, whole or not at all.

        Raises:
            SaveError: it could not be written.
        """
        run_dir = Path(self._get_output_dir(trial))
        target = run_dir / f"checkpoint-{self.state.global_step}"
        folder = run_dir / UNFINISHED / target.name
        with saving(target):
            self._is_saving = True
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._is_saving = False
            save_reference(folder, self)
            save_rollout(folder, self)
            self.features.call("save", folder)
            if self.state.best_model_checkpoint == str(folder):
                self.state.best_model_checkpoint = str(target)
            self.accelerator.wait_for_everyone()
            with self.accelerator.main_process_first():
                self._finish(folder, target)
        self.features.call("saved", self._step)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))
        if self.args.should_save:
            best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
            kept = self.features.call("kept_checkpoints")
            rotate_around(run_dir, limit, (best, *itertools.chain(*kept)))

    def _finish(self, folder: Path, target: Path) -> None:
        """Give the checkpoint its place; where nodes share no disk, each does that with its own files."""
        if self.accelerator.is_local_main_process and folder.is_dir():
            if self.args.should_save:
                self.state.save_to_json(str(folder / STATE))  # with the place of the best checkpoint
            finish(folder, target, describe_run(self))

    # ---------------------------------------------------------------- publishing

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """TRL's card, finished by the feature `hub`."""
        super().create_model_card(model_name or Path(self.args.output_dir).name, dataset_name, tags)
        if self.is_world_process_zero() and has_feature("hub"):
            feature("hub", "create_model_card").finish_card(self, Path(self.args.output_dir) / "README.md")

    def push_to_hub(self, *args: object, **kwargs: object) -> Any:
        """The Trainer's upload, without recorded trajectories unless `push.trajectories` is set.

        Raises:
            RunError: something in a file looks like a secret; nothing was sent.
        """
        with feature("hub", "push_to_hub").uploads_checked(self.args):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._is_saving:
            return  # it is pushed when it has its place
        try:
            with feature("hub", "push_to_hub").uploads_checked(self.args):
                super()._push_from_checkpoint(checkpoint_folder)
        except RunError as error:  # a secret: not worth the training
            logger.error("The checkpoint was not uploaded, and training goes on. %s", error)
