"""The shape of a rollout: how many prompts, how many responses to each, how many updates.

TRL's settings say it in batches:

    prompts per rollout = per_device_train_batch_size * processes * steps_per_generation / num_generations
    updates per rollout = steps_per_generation / gradient_accumulation_steps * num_iterations
    trajectories per update = per_device_train_batch_size * processes * gradient_accumulation_steps

`prompts_per_rollout` and `updates_per_rollout` say it in the terms of RAGEN (arXiv 2504.20073, section 4), and
`steps_per_generation` and `gradient_accumulation_steps` follow from them, whatever the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from accelerate.utils.environment import get_int_from_env


@dataclass(frozen=True, kw_only=True)
class RolloutShape:
    """What one rollout consists of, over all processes, and what is made of it."""

    prompts_per_rollout: int
    responses_per_prompt: int
    """TRL's `num_generations`."""
    updates_per_rollout: float
    """Optimizer steps; not a whole number where a step takes its rows from two rollouts."""
    trajectories_per_update: int

    @classmethod
    def of(cls, args: Any) -> RolloutShape:
        """The shape that a configuration has, once it is constructed."""
        return cls(
            prompts_per_rollout=args.generation_batch_size // args.num_generations,
            responses_per_prompt=args.num_generations,
            updates_per_rollout=args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps,
            trajectories_per_update=args.per_device_train_batch_size
            * args.world_size
            * args.gradient_accumulation_steps,
        )

    def __str__(self) -> str:
        """For a reader."""
        return (
            f"{self.prompts_per_rollout} prompts x {self.responses_per_prompt} responses per rollout, "
            f"{self.updates_per_rollout:g} update(s) of {self.trajectories_per_update} trajectories"
        )


def num_processes() -> int:
    """Number of processes that train together, also before `TrainingArguments` has set them up."""
    if PartialState._shared_state:
        return PartialState().num_processes
    return get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1)


def settle_shape(args: Any) -> None:
    """Derive TRL's settings from `prompts_per_rollout` and `updates_per_rollout`, before TRL reads them.

    Raises:
        ValueError: the numbers do not divide, or an option beside them says something else; names the options, their
            values and the cure.
    """
    if args.prompts_per_rollout is None and args.updates_per_rollout is None:
        return
    rows = args.per_device_train_batch_size * num_processes()
    steps = _steps_of_prompts(args, rows) if args.prompts_per_rollout is not None else _given_steps(args, rows)
    if args.updates_per_rollout is not None:
        _settle_accumulation(args, steps)
    if args.generation_batch_size is None:  # else TRL derives the same number of steps from it
        args.steps_per_generation = steps


def find_other_shape(args: Any) -> Iterator[str]:
    """Where the shape is not the one that was asked for, once TRL has read its settings."""
    for name in ("prompts_per_rollout", "updates_per_rollout"):
        asked = getattr(args, name)
        if asked is not None and asked != getattr(shape := RolloutShape.of(args), name):
            yield (
                f"{name}={asked}: {args.world_size} process(es) train together, another number than the launcher "
                f"announced, so the rollout has another shape ({shape}). Start through accelerate launch or torchrun, "
                f"or remove {name} and set steps_per_generation and gradient_accumulation_steps."
            )


def _steps_of_prompts(args: Any, rows: int) -> int:
    """Micro-batches per rollout, of `rows` trajectories on all processes."""
    prompts, responses = args.prompts_per_rollout, args.num_generations
    steps, rest = divmod(prompts * responses, rows)
    if rest:
        unit = rows // math.gcd(rows, responses)
        raise ValueError(
            f"prompts_per_rollout={prompts} with num_generations={responses} are {prompts * responses} trajectories, "
            f"which do not fill micro-batches of {rows} (per_device_train_batch_size="
            f"{args.per_device_train_batch_size} on {rows // args.per_device_train_batch_size} process(es)). Set "
            f"prompts_per_rollout to a multiple of {unit}, or change per_device_train_batch_size."
        )
    _refuse_another(args, "generation_batch_size", prompts * responses, because="prompts_per_rollout")
    _refuse_another(args, "steps_per_generation", steps, because="prompts_per_rollout")
    return steps


def _given_steps(args: Any, rows: int) -> int:
    """Without `prompts_per_rollout`: as TRL's settings say, else as many as the updates take."""
    if args.steps_per_generation is not None:
        return args.steps_per_generation
    if args.generation_batch_size is not None:
        return max(1, args.generation_batch_size // rows)  # TRL refuses a rest
    return args.gradient_accumulation_steps * max(1, args.updates_per_rollout // args.num_iterations)


def _settle_accumulation(args: Any, steps: int) -> None:
    """Set how many of the `steps` micro-batches make one update."""
    updates, passes = args.updates_per_rollout, args.num_iterations
    if updates % passes:
        raise ValueError(
            f"updates_per_rollout={updates} with num_iterations={passes}: each of the {passes} passes over a rollout "
            f"makes the same number of updates. Set updates_per_rollout to a multiple of {passes}."
        )
    accumulated, rest = divmod(steps, updates // passes)
    if rest:
        possible = [str(count * passes) for count in range(1, steps + 1) if steps % count == 0]
        raise ValueError(
            f"updates_per_rollout={updates}: a rollout of {steps} micro-batches (per_device_train_batch_size="
            f"{args.per_device_train_batch_size}) does not divide into so many updates. Set updates_per_rollout to "
            f"one of {', '.join(possible)}, or lower per_device_train_batch_size."
        )
    if args.gradient_accumulation_steps != 1:  # 1 is the default, and cannot be told from not set
        _refuse_another(args, "gradient_accumulation_steps", accumulated, because="updates_per_rollout")
    args.gradient_accumulation_steps = accumulated


def _refuse_another(args: Any, name: str, derived: int, *, because: str) -> None:
    given = getattr(args, name)
    if given is not None and given != derived:
        raise ValueError(
            f"{name}={given} beside {because}={getattr(args, because)}, from which {name} follows as {derived}. "
            f"Remove {name}, or remove {because}."
        )
