"""What a resumed run needs besides transformers' checkpoint: the rollout under way, and the order of the data."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch.utils.data import Sampler

from agent_r1_trl.trainers.checkpoints import CheckpointError
from agent_r1_trl.trainers.construction import is_placeholder

ROLLOUT_STATE = "rollout_state_rank{rank}.pt"
"""File of each rank in a checkpoint."""
VERSION = 3
"""Version of its format."""


SHAPE = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
)
"""Arguments that a run's place in the data is counted in."""
ROLLOUT = ("update_layout", "max_tokens_per_micro_batch", "loss_unit", "use_vllm", "beta", "has_critic")
"""Arguments that decide which tensors a rollout under way holds, and how they lie."""


class RolloutCheckpoint:
    """The place of a run in the data and its rollout under way, a file of each rank in every checkpoint."""

    def __init__(self, args: Any, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._gradient_accumulation_steps = args.gradient_accumulation_steps
        self._steps_per_rollout = args.steps_per_generation * args.num_iterations
        self._settings = {"processes": accelerator.num_processes}
        self._settings |= {name: getattr(args, name) for name in (*SHAPE, *ROLLOUT)}

    def save(self, folder: Path, step: int, buffered_inputs: Any, features: Mapping[str, Any] | None = None) -> None:
        """Write this rank's file.

        Args:
            folder: of the checkpoint.
            step: number of micro-batches trained on.
            buffered_inputs: micro-batches of the last rollout; left out if they are all used up.
            features: name -> state of this rank.
        """
        if step % self._steps_per_rollout == 0:
            buffered_inputs = None
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "version": VERSION,
            "step": step,
            "buffered_inputs": buffered_inputs,
            "settings": self._settings,
            "features": dict(features or {}),
        }
        torch.save(state, folder / ROLLOUT_STATE.format(rank=self._accelerator.process_index))

    def load(
        self, folder: Path, global_step: int, *, features: Any = None, with_new_rollout: bool = False
    ) -> tuple[int, Any]:
        """`step` and `buffered_inputs` as they were saved. All ranks must call it.

        A checkpoint of another trainer has no such file: then there is no rollout, and the next step begins with one.

        Args:
            folder: of the checkpoint.
            global_step: optimizer steps that the run has made.
            features: `Callbacks`, which get their states.
            with_new_rollout: read no file.

        Raises:
            CheckpointError: on all ranks alike: a file is missing or damaged, or the run has other settings.
        """
        if with_new_rollout:
            return global_step * self._gradient_accumulation_steps, None
        accept_numbered_cpus()
        state, problem = None, None
        try:
            state = self._read(folder)
        except ValueError as error:
            problem = str(error)
        problems = [text for text in gather_object([problem]) if text is not None]
        if problems:
            raise CheckpointError(
                f"resume_from_checkpoint={str(folder)!r}: {problems[0]}. Or set resume_without: [rollout]: the run "
                "then goes on from its weights and its optimizer with a new rollout."
            )
        if state is None:
            return global_step * self._gradient_accumulation_steps, None
        if features is not None:
            features.load_state_dict(state["features"])
        return state["step"], state["buffered_inputs"]

    def _read(self, folder: Path) -> dict[str, Any] | None:
        own = folder / ROLLOUT_STATE.format(rank=self._accelerator.process_index)
        others = sorted(folder.glob(ROLLOUT_STATE.format(rank="*")))
        if not others:
            return None
        path = own if own in others else others[0]
        try:
            state = torch.load(path, map_location=self._accelerator.device, weights_only=True)
            saved, version = state["settings"], state.get("version")
        except Exception as error:  # whatever torch finds in half a file
            raise ValueError(
                f"{path.name} is damaged ({type(error).__name__}). Resume from an earlier checkpoint"
            ) from error
        if version != VERSION:
            raise ValueError(
                f"{path.name} has format {version or 1}, and this version of agent-r1-trl reads {VERSION}. Resume "
                "with the version that wrote it"
            )
        has_rollout = state["buffered_inputs"] is not None
        names = ("processes", *SHAPE, *(ROLLOUT if has_rollout else ()))
        changed = [name for name in names if saved.get(name) != self._settings[name]]
        if changed:
            before = ", ".join(f"{name}={saved.get(name)}" for name in changed)
            now = ", ".join(f"{name}={self._settings[name]}" for name in changed)
            raise ValueError(
                f"the run was saved with {before} and cannot go on with {now}, which its place in the data "
                f"{'and the rollout under way do' if has_rollout else 'does'} not fit. Start it with {before}"
            )
        if path != own:
            raise ValueError(f"{own.name} is missing. Resume from an earlier checkpoint")
        return state


# -------------------------------------------------------------------- data


def describe_run(trainer: Any, base: str | None) -> dict[str, Any]:
    """What decides which rows a place in the data stands for, and the model; a checkpoint's manifest holds it."""
    args, config = trainer.args, getattr(trainer.accelerator.unwrap_model(trainer.model), "config", None)
    return {
        "seed": args.seed,
        "shuffle_dataset": args.shuffle_dataset,
        "train_dataset": _describe(trainer.train_dataset),
        "model": getattr(config, "_name_or_path", ""),
        "base": base,
    }


def check_same_base(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to put an adapter on other frozen weights than those that it was trained on.

    Raises:
        CheckpointError: they differ.
    """
    before, present = saved.get("base"), now["base"]
    if before is None or present is None or before == present:
        return
    raise CheckpointError(
        f"resume_from_checkpoint={str(folder)!r}: its adapter was trained on the model {saved.get('model')!r} and "
        f"cannot go on with {now['model']!r}, whose frozen weights are others ({present} instead of {before}). Start "
        f"it with model_name_or_path={saved.get('model')!r}, as it was then, in the same dtype and quantization."
    )


def check_same_data(folder: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on where the place of the checkpoint would fall on other rows.

    Raises:
        CheckpointError: the seed or the data differ.
    """
    for name in ("seed", "shuffle_dataset", "train_dataset"):
        before, present = saved.get(name), now[name]
        if before is None or present is None or before == present:
            continue
        if name == "train_dataset":
            was, given, cure = f"{before['rows']} rows", f"{present['rows']} rows", "Pass the same rows in their order"
            given += " with other contents or in another order" if was == given else ""
        else:
            was, given, cure = f"{before}", f"{present}", f"Start it with {name}={before}"
        raise CheckpointError(
            f"resume_from_checkpoint={str(folder)!r}: the run was saved with {name}={was} and cannot go on with "
            f"{name}={given}, where its place in the data falls on other rows. {cure}, or set resume_without: [data] "
            "to go on at that place in the new order."
        )


def _describe(dataset: Any) -> dict[str, int] | None:
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
    priority = 5  # asked before any other
    torch.serialization.register_package(priority, lambda storage: None, _stay)


def _stay(storage: Any, location: str) -> Any:
    return storage if location.startswith("cpu:") else None


class EpochOrder(Sampler[int]):
    """A sampler whose permutation depends on seed and epoch alone.

    TRL draws the permutation of every epoch from one generator, which a resumed run starts anew: from the second epoch
    on it would see other rows than the run that it continues.

    Args:
        sampler: TRL's `RepeatSampler`.
        epoch: returns the number of the epoch that begins.
    """

    def __init__(self, sampler: Any, epoch: Callable[[], int]) -> None:
        self._sampler = sampler
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self._sampler.seed + self._epoch())
        yield from self._sampler

    def __len__(self) -> int:
        return len(self._sampler)
