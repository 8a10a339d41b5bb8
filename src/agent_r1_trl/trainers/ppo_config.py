"""Training arguments of `MultiTurnPPOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from agent_r1_trl.critic import CRITIC_KINDS
from agent_r1_trl.filtering import RULES
from agent_r1_trl.rollout.limits import check_share
from agent_r1_trl.trainers.config import MultiTurnConfig
from agent_r1_trl.trainers.config_checks import check_bool, check_choice, check_finite, optimizer_in_backward
from agent_r1_trl.trainers.echo_checks import refusal
from agent_r1_trl.trainers.echo_ladder import ALL
from agent_r1_trl.trainers.rollout_checks import Need, check_needs


@dataclass
class MultiTurnPPOConfig(MultiTurnConfig):
    """Arguments of `MultiTurnPPOTrainer`.

    Epochs over one rollout are `num_iterations`; its optimizer steps per epoch are `steps_per_generation` divided by
    `gradient_accumulation_steps`.

    Example:
        >>> MultiTurnPPOConfig(output_dir="out", lam=1.5, bf16=False, use_cpu=True)
        Traceback (most recent call last):
        ...
        ValueError: lam=1.5 must be between 0 and 1. Set lam to a value in that range.
    """

    has_critic: ClassVar[bool] = True

    num_generations: int | None = field(
        default=1, metadata={"help": "Trajectories per prompt. The critic is the baseline: 1 is enough."}
    )
    advantage_estimator: str = field(
        default="gae",
        metadata={
            "help": "'gae' over action tokens, 'bilevel_gae' over turns, then tokens, 'step_gae' over turns, or the "
            "path of your own."
        },
    )
    lam: float = field(default=0.95, metadata={"help": "GAE's lambda per action token."})
    lam_turn: float = field(default=0.95, metadata={"help": "GAE's lambda per turn (bilevel_gae, step_gae)."})
    whiten_advantages: bool = field(
        default=True,
        metadata={
            "help": "Normalise the advantages to mean 0 and variance 1 over the action tokens of the whole batch "
            "(step_gae: over its turns)."
        },
    )
    bootstrap_truncated: bool = field(
        default=False,
        metadata={
            "help": "Use the critic's value of what it would have gone on from, instead of 0, at the end of a "
            "trajectory that a limit ended."
        },
    )

    push_critic: bool = field(
        default=False, metadata={"help": "Upload the critic with the model (`push_to_hub`), in `critic/`."}
    )

    # ---- critic
    critic: str | None = field(
        default=None,
        metadata={
            "help": "'adapter' (a second LoRA adapter with a value head), 'head' (a value head on the policy) or "
            "'model' (a backbone of its own). None: 'adapter' with LoRA, else 'model'."
        },
    )
    critic_learning_rate: float | None = field(
        default=None, metadata={"help": "Peak learning rate of the critic. None: that of the policy."}
    )
    critic_warmup_steps: int = field(
        default=0,
        metadata={
            "help": "Optimizer steps at the start in which only the critic learns and the policy stays as it is."
        },
    )
    critic_max_grad_norm: float | None = field(
        default=None,
        metadata={
            "help": "Limit of the critic's gradient norm, which is clipped apart from the policy's. 0: not clipped. "
            "None: max_grad_norm. DeepSpeed and FSDP clip one norm over both, and refuse a number here."
        },
    )
    value_loss_coef: float = field(default=0.5, metadata={"help": "Weight of the value loss."})
    cliprange_value: float = field(
        default=0.2,
        metadata={
            "help": "Clip range of the value loss: a value that moves further from the old one gains nothing more."
        },
    )
    critic_context: str | None = field(
        default=None,
        metadata={
            "help": "Column of the data set, such as the gold answer, that the critic reads before the prompt and the "
            "policy does not see. None: the critic sees what the policy sees."
        },
    )

    critic_uses_filtered: bool = field(
        default=False,
        metadata={
            "help": "Train the critic on the rows that `filter_groups` takes out of the policy's loss, too. They then "
            "cost a forward and backward pass like the others. False: the critic trains on what the policy trains on."
        },
    )

    def check_multi_turn(self) -> None:
        """Check our own fields.

        Raises:
            ValueError: names the flag, its value, the rule and the cure.
        """
        super().check_multi_turn()
        for name in ("lam", "lam_turn"):
            check_share(name, getattr(self, name))
        if self.critic is not None:
            check_choice(self, "critic", CRITIC_KINDS)
        for name in ("value_loss_coef", "critic_warmup_steps"):
            check_finite(self, name)
        for name in ("critic_learning_rate", "critic_max_grad_norm"):
            if getattr(self, name) is not None:
                check_finite(self, name)
        self._check_optimizer()
        check_needs(self, (Need(("bootstrap_truncated",), "truncated_trajectories", ("keep", "penalise")),))
        self._check_filtered_critic()
        if not self.cliprange_value > 0:
            raise ValueError(
                f"cliprange_value={self.cliprange_value} leaves the critic no room to move. Set a positive number "
                "(0.2 is usual)."
            )
        if not self.loss_mask and self.advantage_mask:
            raise ValueError(
                "loss_mask=False with advantage_mask=True: observation tokens would enter the loss without an "
                "advantage. Set advantage_mask=False as well, or keep loss_mask=True."
            )
        if self.critic_context is not None and self.critic == "head":
            raise ValueError(
                f"critic_context={self.critic_context!r} with critic='head': that critic reads the policy's own "
                "hidden states, so it cannot see more than the policy. Set critic='adapter' or critic='model'."
            )
        if self.use_liger_kernel:
            raise ValueError(
                "use_liger_kernel=True: its fused loss hides the forward that the critic reads. Set "
                "use_liger_kernel=False."
            )

    def _check_filtered_critic(self) -> None:
        check_bool(self, "critic_uses_filtered")
        names = self.echo_actions or []
        may_filter = "filter" in names or (ALL in names and refusal("filter", self) is None)
        if self.critic_uses_filtered and self.filter_groups is None and not may_filter:
            raise ValueError(
                "critic_uses_filtered=True with filter_groups=None has no effect, because no row is filtered. Set "
                f"filter_groups to one of {', '.join(map(repr, RULES))} and num_generations to 2 or more, or remove "
                "critic_uses_filtered."
            )

    def _check_optimizer(self) -> None:
        if self.max_grad_norm is None:
            raise ValueError(
                "max_grad_norm=None: the Trainer compares it with 0. Set max_grad_norm=0 for no clipping."
            )
        if name := optimizer_in_backward(self):
            raise ValueError(
                f"optim={name!r} updates each weight inside the backward pass, where policy and critic can have "
                "neither rates nor gradient norms of their own. Set another optim, such as 'adamw_torch'."
            )
