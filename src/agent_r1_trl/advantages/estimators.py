"""The table of advantage estimators: what each computes, what it needs, and where it comes from.

An estimator is a function from `CreditInputs` to `Credit`. Everything else that the package knows about one (which
trainer offers it, which settings it reads, its papers) stands in its row of `ESTIMATORS`, so that a new one is a
function and a row. A user's estimator has the same signature, and `lookup.find_estimator` makes a row of it.

The mathematics stands in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from agent_r1_trl.advantages.credit import Credit, CreditInputs
from agent_r1_trl.advantages.gae import compute_bilevel_gae, compute_gae, compute_step_gae, extend_turn_ids
from agent_r1_trl.advantages.gigpo import compute_gigpo_advantages
from agent_r1_trl.advantages.group import compute_group_advantages, compute_rloo_advantages
from agent_r1_trl.advantages.reinforce_pp import (
    compute_reinforce_pp_advantages,
    compute_reinforce_pp_baseline_advantages,
)
from agent_r1_trl.advantages.turn_group import compute_turn_group_advantages
from agent_r1_trl.objects import OwnObject, OwnObjectError


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One row of the table: a function, and what the package has to know about it."""

    name: str
    compute: Callable[[CreditInputs], Credit]
    """A pure function. It is called on the rewards, and on the process and the outcome part of them alone."""
    baseline: str = ""
    """What a trajectory is compared with, for the documentation and the model card."""
    credit: str = ""
    """What shares one number, for the documentation and the model card."""
    options: tuple[str, ...] = ()
    """The training arguments that it reads."""
    papers: tuple[tuple[str, str], ...] = ()
    """(title, arXiv id) of each."""
    needs_group: bool = False
    """Whether it compares the trajectories of one prompt, so that `num_generations` must be at least 2."""
    needs_critic: bool = False
    """Whether it reads `values` and returns the critic's targets (PPO trainer)."""
    reads_token_rewards: bool = False
    """Whether it reads `token_rewards` or `kl_rewards`, so that a KL penalty can stand in the rewards."""
    weighs_parts: bool = False
    """Whether process and outcome advantages are estimated apart and weighted afterwards, not their rewards."""
    logs_parts: bool = True
    """Whether `credit/process_advantage_abs` and `credit/outcome_advantage_abs` are logged. Switch it off for a
    function that keeps a state: it is then called once per rollout."""
    weighs_turns: bool = False
    """Whether all tokens of a turn have one advantage, so that whitening counts turns, not tokens."""
    default_gamma_turn: float = 0.99
    """What `gamma_turn=None` stands for."""
    loss_type: str | None = None
    """TRL's `loss_type` that belongs to it (the loss normaliser); None if any does."""
    ignores: tuple[str, ...] = ()
    """Training arguments that would have no effect: any value but the default and 'none' is refused. For the rows of
    the table below, these are the ones that `options` does not name."""

    def estimate(self, inputs: CreditInputs) -> Credit:
        """Call `compute`, check what it returns and set what stands outside the mask to 0.

        Returns:
            (N, T) advantages and, with a critic, (N, T) returns.

        Raises:
            ValueError: for another type or shape, missing returns, and numbers at mask 1 that are not finite.
        """
        with torch.no_grad():
            is_own = self.name not in ESTIMATORS
            compute = OwnObject.of("advantage_estimator", self.compute, self.name) if is_own else self.compute
            credit = compute(inputs)
        if not isinstance(credit, Credit):
            raise self._refusal(f"a {type(credit).__name__}", "Return Credit(advantages=...)")
        advantages = self._checked("advantages", credit.advantages, inputs.mask)
        if not self.needs_critic:
            return Credit(advantages=advantages)
        if credit.returns is None:
            raise self._refusal(
                "no returns, which the critic is trained on", "Return Credit(advantages=..., returns=...)"
            )
        return Credit(advantages=advantages, returns=self._checked("returns", credit.returns, inputs.mask))

    def _checked(self, name: str, tensor: Any, mask: torch.Tensor) -> torch.Tensor:
        rows, length = mask.shape
        if not isinstance(tensor, torch.Tensor):
            raise self._refusal(
                f"{name} that are a {type(tensor).__name__}", f"Return a tensor of shape {(rows, length)}"
            )
        if tensor.shape == (rows,) and name == "advantages":
            tensor = tensor.unsqueeze(1)
        elif tensor.shape != (rows, length):
            per_row = f", or {(rows,)} for one number per trajectory" if name == "advantages" else ""
            raise self._refusal(
                f"{name} of shape {tuple(tensor.shape)}",
                f"Return shape {(rows, length)}, that of inputs.mask{per_row}",
            )
        tensor = torch.where(mask, tensor, 0.0)  # (N, T)
        num_wrong = int((~tensor.isfinite()).sum())
        if num_wrong:
            critic = ", or critic values that are not finite (lower critic_learning_rate)" if self.needs_critic else ""
            raise self._refusal(
                f"{name} of which {num_wrong} at mask 1 are not finite",
                "Look for a mean that counts rows outside the baseline (inputs.in_baseline), a division by 0, or "
                f"rewards that are not finite{critic}",
            )
        return tensor

    def _refusal(self, found: str, cure: str) -> OwnObjectError:
        function = getattr(self.compute, "__qualname__", type(self.compute).__name__)
        return OwnObjectError(f"advantage_estimator={self.name!r}: {function} returned {found}. {cure}.")


# -------------------------------------------------------------------- the functions


def _grpo(inputs: CreditInputs) -> Credit:
    scale = inputs.settings.scale_rewards
    return Credit(advantages=compute_group_advantages(inputs.returns, inputs.group_ids, scale=scale))


def _dr_grpo(inputs: CreditInputs) -> Credit:
    return Credit(advantages=compute_group_advantages(inputs.returns, inputs.group_ids, scale="none"))


def _rloo(inputs: CreditInputs) -> Credit:
    return Credit(advantages=compute_rloo_advantages(inputs.returns, inputs.group_ids))


def _reinforce_pp(inputs: CreditInputs) -> Credit:
    advantages = compute_reinforce_pp_advantages(
        inputs.token_rewards, inputs.mask, gamma=inputs.settings.gamma, counted=inputs.kept_mask
    )
    return Credit(advantages=advantages)


def _reinforce_pp_baseline(inputs: CreditInputs) -> Credit:
    advantages = compute_reinforce_pp_baseline_advantages(
        inputs.returns,
        inputs.group_ids,
        inputs.mask,
        kl_rewards=inputs.kl_rewards,
        gamma=inputs.settings.gamma,
        counted=inputs.kept_mask,
    )
    return Credit(advantages=advantages)


def _turn_grpo(inputs: CreditInputs) -> Credit:
    advantages = compute_turn_group_advantages(
        inputs.turn_rewards,
        inputs.outcome_rewards,
        extend_turn_ids(inputs.turn_ids, inputs.mask),
        inputs.group_ids,
        gamma_turn=inputs.settings.gamma_turn,
        process_weight=1.0,  # its row says that the parts are weighted afterwards
    )
    return Credit(advantages=advantages)


def _gigpo(inputs: CreditInputs) -> Credit:
    turn_rewards = inputs.turn_rewards.clone()
    last = (inputs.anchor_ids >= 0).sum(dim=1, keepdim=True).clamp(min=1) - 1  # (N, 1)
    turn_rewards.scatter_add_(1, last, inputs.outcome_rewards.unsqueeze(1))
    advantages = compute_gigpo_advantages(
        turn_rewards,
        inputs.anchor_ids,
        extend_turn_ids(inputs.turn_ids, inputs.mask),
        inputs.group_ids,
        gamma_turn=inputs.settings.gamma_turn,
        step_weight=inputs.settings.step_weight,
    )
    return Credit(advantages=advantages)


def _gae(inputs: CreditInputs) -> Credit:
    assert inputs.values is not None
    advantages, returns = compute_gae(
        inputs.token_rewards,
        inputs.values,
        inputs.mask,
        gamma=inputs.settings.gamma,
        lam=inputs.settings.lam,
        bootstrap_values=inputs.bootstrap_values,
    )
    return Credit(advantages=advantages, returns=returns)


def _bilevel_gae(inputs: CreditInputs) -> Credit:
    assert inputs.values is not None
    advantages, returns = compute_bilevel_gae(
        inputs.token_rewards,
        inputs.values,
        inputs.mask,
        inputs.turn_ids,
        gamma_turn=inputs.settings.gamma_turn,
        lam_turn=inputs.settings.lam_turn,
        gamma=inputs.settings.gamma,
        lam=inputs.settings.lam,
        bootstrap_values=inputs.bootstrap_values,
    )
    return Credit(advantages=advantages, returns=returns)


def _step_gae(inputs: CreditInputs) -> Credit:
    assert inputs.values is not None
    advantages, returns = compute_step_gae(
        inputs.token_rewards,
        inputs.values,
        inputs.mask,
        inputs.turn_ids,
        gamma_turn=inputs.settings.gamma_turn,
        lam_turn=inputs.settings.lam_turn,
        bootstrap_values=inputs.bootstrap_values,
    )
    return Credit(advantages=advantages, returns=returns)


# -------------------------------------------------------------------- the table

_GRPO = ("DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models (GRPO)", "2402.03300")
_DR_GRPO = ("Understanding R1-Zero-Like Training: A Critical Perspective (Dr. GRPO)", "2503.20783")
_RLOO = ("Back to Basics: Revisiting REINFORCE Style Optimization (RLOO)", "2402.14740")
_REINFORCE_PP = (
    "REINFORCE++: An Efficient RLHF Algorithm with Robustness to Both Prompt and Reward Models",
    "2501.03262",
)
_GIGPO = ("Group-in-Group Policy Optimization for LLM Agent Training", "2505.10978")
_PPO = ("Proximal Policy Optimization Algorithms", "1707.06347")
_GAE = ("High-Dimensional Continuous Control Using Generalized Advantage Estimation", "1506.02438")
_VAGEN = ("VAGEN: Reinforcing World Model Reasoning for Multi-Turn VLM Agents", "2510.16907")

_STEPPO = ("StepPO: Step-Aligned Policy Optimization for Agentic Reinforcement Learning", "2604.18401")

_ROWS = (
    Estimator(
        name="grpo",
        compute=_grpo,
        baseline="mean of the group, divided by its std",
        credit="one number per trajectory",
        options=("scale_rewards",),
        papers=(_GRPO,),
        needs_group=True,
    ),
    Estimator(
        name="dr_grpo",
        compute=_dr_grpo,
        baseline="mean of the group",
        credit="one number per trajectory",
        papers=(_DR_GRPO,),
        needs_group=True,
        loss_type="dr_grpo",
    ),
    Estimator(
        name="rloo",
        compute=_rloo,
        baseline="mean of the *other* members",
        credit="one number per trajectory",
        papers=(_RLOO,),
        needs_group=True,
    ),
    Estimator(
        name="reinforce_pp",
        compute=_reinforce_pp,
        baseline="mean of the batch, divided by its std",
        credit="per token, by discount and KL",
        options=("gamma",),
        papers=(_REINFORCE_PP,),
        reads_token_rewards=True,
    ),
    Estimator(
        name="reinforce_pp_baseline",
        compute=_reinforce_pp_baseline,
        baseline="mean of the group, then the batch's std",
        credit="one number per trajectory (and KL)",
        options=("gamma",),
        papers=(_REINFORCE_PP,),
        needs_group=True,
        reads_token_rewards=True,
    ),
    Estimator(
        name="turn_grpo",
        compute=_turn_grpo,
        baseline="mean of the group",
        credit="per turn, from process rewards",
        options=("gamma_turn",),
        papers=(_GRPO,),
        needs_group=True,
        weighs_parts=True,
    ),
    Estimator(
        name="gigpo",
        compute=_gigpo,
        baseline="mean over turns that began in the same state",
        credit="per turn, where states recur",
        options=("gamma_turn", "step_weight"),
        papers=(_GIGPO,),
        needs_group=True,
        default_gamma_turn=0.95,
    ),
    Estimator(
        name="gae",
        compute=_gae,
        baseline="a critic",
        credit="per token",
        options=("gamma", "lam"),
        papers=(_PPO, _GAE),
        needs_critic=True,
        reads_token_rewards=True,
    ),
    Estimator(
        name="bilevel_gae",
        compute=_bilevel_gae,
        baseline="a critic",
        credit="per turn, then per token",
        options=("gamma", "gamma_turn", "lam", "lam_turn"),
        papers=(_PPO, _VAGEN),
        needs_critic=True,
        reads_token_rewards=True,
    ),
    Estimator(
        name="step_gae",
        compute=_step_gae,
        baseline="a critic",
        credit="one number per turn",
        options=("gamma_turn", "lam_turn"),
        papers=(_PPO, _STEPPO),
        needs_critic=True,
        reads_token_rewards=True,
        weighs_turns=True,
    ),
)
ESTIMATORS: dict[str, Estimator] = {row.name: row for row in _ROWS}
