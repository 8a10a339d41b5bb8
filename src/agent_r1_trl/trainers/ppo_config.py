"""Training arguments of `MultiTurnPPOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from agent_r1_trl.critic import CRITIC_KINDS
from agent_r1_trl.settings import CountOrZero, Flag, NotNegative, Number, OneOf, Share, Whole, setting
from agent_r1_trl.trainers.config import MultiTurnConfig


@dataclass
class MultiTurnPPOConfig(MultiTurnConfig):
    """Arguments of `MultiTurnPPOTrainer`.

    Epochs over one rollout are `num_iterations`; its optimizer steps per epoch are `steps_per_generation` divided by
    `gradient_accumulation_steps`.

    Example:
        >>> MultiTurnPPOConfig(output_dir="out", lam=1.5, bf16=False, use_cpu=True)
        Traceback (most recent call last):
        ...
        ValueError: lam=1.5 must be a finite number >= 0 and <= 1. Set lam to such a value.
    """

    has_critic: ClassVar[bool] = True

    num_generations: Annotated[int | None, Whole(1)] = setting(
        1, "Trajectories per prompt. The critic is the baseline: 1 is enough."
    )
    advantage_estimator: str = setting(
        "gae",
        "'gae' over action tokens, 'bilevel_gae' over turns, then tokens, 'step_gae' over turns, or the path of your "
        "own.",
    )
    lam: Share = setting(0.95, "GAE's lambda per action token.")
    lam_turn: Share = setting(0.95, "GAE's lambda per turn (bilevel_gae, step_gae).")
    whiten_advantages: Flag = setting(
        True,
        "Normalise the advantages to mean 0 and variance 1 over the action tokens of the whole batch (step_gae: over "
        "its turns).",
    )
    bootstrap_truncated: Flag = setting(
        False,
        "Use the critic's value of what it would have gone on from, instead of 0, at the end of a trajectory that a "
        "limit ended.",
    )

    # ---- critic
    critic: Annotated[str, OneOf(*CRITIC_KINDS)] | None = setting(
        None,
        "'adapter' (a second LoRA adapter with a value head), 'head' (a value head on the policy) or 'model' (a "
        "backbone of its own). None: 'adapter' with LoRA, else 'model'.",
    )
    critic_learning_rate: NotNegative | None = setting(
        None, "Peak learning rate of the critic. None: that of the policy."
    )
    critic_warmup_steps: CountOrZero = setting(
        0, "Optimizer steps at the start in which only the critic learns and the policy stays as it is."
    )
    critic_max_grad_norm: NotNegative | None = setting(
        None,
        "Limit of the critic's gradient norm, which is clipped apart from the policy's. 0: not clipped. None: "
        "max_grad_norm. DeepSpeed and FSDP clip one norm over both, and refuse a number here.",
    )
    value_loss_coef: NotNegative = setting(0.5, "Weight of the value loss.")
    cliprange_value: Annotated[float, Number(above=0, may_be_infinite=True)] = setting(
        0.2, "Clip range of the value loss: a value that moves further from the old one gains nothing more."
    )
    critic_context: str | None = setting(
        None,
        "Column of the data set, such as the gold answer, that the critic reads before the prompt and the policy does "
        "not see. None: the critic sees what the policy sees.",
    )

    critic_uses_filtered: Flag = setting(
        False,
        "Train the critic on the rows that `filter_groups` takes out of the policy's loss, too. They then cost "
        "a forward and backward pass like the others. False: the critic trains on what the policy trains on.",
    )
