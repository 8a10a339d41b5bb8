"""The table of advantage estimators: what each computes, what it needs, and where it comes from.

An estimator is a function from `CreditInputs` to `Credit`, tensors of the trajectories of all ranks
(`update/credit_inputs.py` makes them). All else that the package knows about one stands in its row of `ESTIMATORS`, so
that a new one is a function and a row. `find_estimator` makes a row of a user's function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from agent_r1_trl.advantages import explanations
from agent_r1_trl.advantages.gae import compute_bilevel_gae, compute_gae, compute_step_gae, extend_turn_ids
from agent_r1_trl.advantages.group import (
    batch_scale,
    compute_gigpo_advantages,
    compute_group_advantages,
    compute_reinforce_pp_baseline_advantages,
    compute_returns_to_go,
    compute_rloo_advantages,
    compute_turn_group_advantages,
    outcome_on_last_turn,
)
from agent_r1_trl.advantages.masked import float_dtype, whiten_by, whitening
from agent_r1_trl.objects import OwnObject, OwnObjectError, check_call, own_object


@dataclass(frozen=True, kw_only=True)
class CreditSettings:
    """The training arguments that estimators read, under the names that they have there."""

    gamma: float = 1.0
    """Discount per action token."""
    gamma_turn: float = 0.99
    """Discount per turn."""
    lam: float = 0.95
    """GAE's lambda per action token (PPO trainer)."""
    lam_turn: float = 0.95
    """GAE's lambda per turn (PPO trainer)."""
    step_weight: float = 1.0
    """Weight of GiGPO's step advantages."""
    scale_rewards: str = "group"
    """GRPO's divisor: the std of the `group`, of the `batch`, or nothing (`none`)."""
    whiten_advantages: bool = False
    """Whether the trainer whitens what the estimator returned (PPO trainer). Estimators need not do it."""


@dataclass(kw_only=True)
class CreditInputs:
    """The inputs of an estimator: N trajectories of T completion tokens and K turns, the rows of all ranks.

    A trajectory outside the baseline (an infrastructure failure, or one that no reward function scored) stays a row:
    its `outcome_rewards` and `returns` are NaN and its mask is empty. One that is in the baseline but not in the loss
    (truncated, with `truncated_trajectories="mask"`) has rewards and an empty mask: it counts in means and standard
    deviations of returns, not in those of tokens (whitening).
    """

    mask: torch.Tensor
    """(N, T) bool: the positions that get an advantage, which are the action tokens of rows in the loss (with
    `advantage_mask=False` all their completion tokens)."""
    turn_ids: torch.Tensor
    """(N, T) int64: the turn of each action token, counted from 0; -1 elsewhere."""
    group_ids: torch.Tensor
    """(N,) int64: which prompt; the trajectories of one prompt share the number."""
    process_token_rewards: torch.Tensor
    """(N, T) turn rewards, each on the last token of its turn."""
    outcome_token_rewards: torch.Tensor
    """(N, T) outcome rewards, each on the last action token of its trajectory."""
    turn_rewards: torch.Tensor
    """(N, K) turn rewards; 0 after a row's last turn."""
    outcome_rewards: torch.Tensor
    """(N,) outcome rewards; NaN for rows outside the baseline."""
    anchor_ids: torch.Tensor
    """(N, K) int64: a number for what each turn read (the context that the environment gave for it, else the
    observation before it); -1 after a row's last turn."""
    turn_seats: torch.Tensor | None = None
    """(N, K) int64: a number for the seat that had each turn, 0 without seats; -1 after a row's last turn. None to
    estimators, to which each seat is a row of its own (`seats.py`)."""
    seat_outcomes: torch.Tensor | None = None
    """(N, K) the outcome reward of that seat."""
    kl_rewards: torch.Tensor | None = None
    """(N, T) the KL penalty as a reward; None unless `kl_placement="reward"`."""
    values: torch.Tensor | None = None
    """(N, T) the critic's values of action tokens; None without a critic."""
    bootstrap_values: torch.Tensor | None = None
    """(N,) the critic's value after the last token of truncated rows, 0 for the others; None for 0 everywhere."""
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """(N, T) each: what `extra_columns` has given for the tokens, under its names; 0 where no token is."""
    is_kept: torch.Tensor | None = None
    """(N,) bool: whether the trajectory is in a group that `sampling.filter_groups` trains on; None for all."""
    whitening: tuple[Any, Any] | None = None
    """Mean and standard deviation of a whole step, where these are some of its rows as they were recorded; None: those
    of the rows themselves."""
    settings: CreditSettings = field(default_factory=CreditSettings)

    @property
    def in_baseline(self) -> torch.Tensor:
        """(N,) bool: whether a trajectory's return counts in means and standard deviations."""
        return ~self.outcome_rewards.isnan()

    @property
    def kept_mask(self) -> torch.Tensor | None:
        """(N, T) bool: the positions over which whitening takes mean and variance; None for all of `mask`.

        They are those that are trained on: RAGEN (arXiv 2504.20073) filters before it whitens.
        """
        return None if self.is_kept is None else self.mask & self.is_kept.unsqueeze(1)

    @property
    def returns(self) -> torch.Tensor:
        """(N,) turn rewards + outcome; NaN for rows outside the baseline."""
        return self.turn_rewards.sum(dim=1) + self.outcome_rewards

    @property
    def token_rewards(self) -> torch.Tensor:
        """(N, T) all rewards that stand on tokens, the KL penalty included."""
        rewards = self.process_token_rewards + self.outcome_token_rewards
        return rewards if self.kl_rewards is None else rewards + self.kl_rewards

    def only(self, part: str) -> CreditInputs:
        """A copy with the `process` or the `outcome` rewards alone; the KL penalty stays with the outcome."""
        if part == "outcome":
            return dataclasses.replace(
                self,
                process_token_rewards=torch.zeros_like(self.process_token_rewards),
                turn_rewards=torch.zeros_like(self.turn_rewards),
            )
        return dataclasses.replace(
            self,
            outcome_token_rewards=torch.zeros_like(self.outcome_token_rewards),
            outcome_rewards=torch.zeros_like(self.outcome_rewards) + 0 * self.outcome_rewards,  # NaN stays
            kl_rewards=None,
        )


@dataclass(kw_only=True)
class Credit:
    """The result of an estimator. The package sets everything outside the mask to 0."""

    advantages: torch.Tensor
    """(N, T), or (N,) for one number per trajectory, which all its tokens get."""
    returns: torch.Tensor | None = None
    """(N, T) the critic's targets; None without a critic."""
    whitening: tuple[Any, Any] | None = None
    """Mean and standard deviation that the advantages were whitened with, for the record; None where they were not."""


# -------------------------------------------------------------------- a row of the table


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One row of the table: a function, and what the package has to know about it."""

    name: str
    compute: Callable[[CreditInputs], Credit]
    """A pure function. It is called on the rewards, with `weighs_parts` on the process and the outcome part."""
    baseline: str = ""
    """The baseline in words, for the documentation and the model card."""
    credit: str = ""
    """The unit that shares one advantage, for the documentation and the model card."""
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
    weighs_turns: bool = False
    """Whether all tokens of a turn have one advantage, so that whitening counts turns, not tokens."""
    default_gamma_turn: float = 0.99
    """The value of `gamma_turn=None`."""
    loss_type: str | None = None
    """TRL's `loss_type` that belongs to it (the loss normaliser); None if any does."""
    explain: Callable[[CreditInputs, int], Iterable[tuple[str, Any]]] | None = None
    """The sums behind a row's advantages, for readers of a recorded one; see `explanations.py`.
    None: they are shown without explanation."""
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
        form = "Return Credit(advantages=..., returns=...)" if self.needs_critic else "Return Credit(advantages=...)"
        if not isinstance(credit, Credit):
            raise self._refusal(f"a {type(credit).__name__}", form)
        if self.needs_critic and credit.returns is None:
            raise self._refusal("no returns, which the critic is trained on", form)
        advantages = self._checked("advantages", credit.advantages, inputs.mask)
        returns = self._checked("returns", credit.returns, inputs.mask) if self.needs_critic else None
        return Credit(advantages=advantages, returns=returns, whitening=credit.whitening)

    def _checked(self, name: str, tensor: object, mask: torch.Tensor) -> torch.Tensor:
        rows, length = mask.shape
        fix = f"Return shape {(rows, length)}, that of inputs.mask"
        may_be_per_row = name == "advantages"
        if may_be_per_row:
            fix += f", or {(rows,)} for one number per trajectory"
        if not isinstance(tensor, torch.Tensor):
            raise self._refusal(f"{name} that are a {type(tensor).__name__}", fix)
        shape = tuple(tensor.shape)
        if may_be_per_row and shape == (rows,):
            tensor = tensor.unsqueeze(1)
        elif shape != (rows, length):
            raise self._refusal(f"{name} of shape {shape}", fix)
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

    def _refusal(self, found: str, fix: str) -> OwnObjectError:
        function = getattr(self.compute, "__qualname__", type(self.compute).__name__)
        return OwnObjectError(f"advantage_estimator={self.name!r}: {function} returned {found}. {fix}.")


# -------------------------------------------------------------------- the functions


def _grpo(inputs: CreditInputs) -> Credit:
    scale = inputs.settings.scale_rewards
    if scale != "batch":
        return Credit(advantages=compute_group_advantages(inputs.returns, inputs.group_ids, scale=scale))
    raw = compute_group_advantages(inputs.returns.double(), inputs.group_ids, scale="none")
    mean, std = inputs.whitening or (torch.zeros(()), batch_scale(inputs.returns))
    advantages = (raw / std).to(float_dtype(inputs.returns))
    return Credit(advantages=advantages, whitening=(mean, std))


def _dr_grpo(inputs: CreditInputs) -> Credit:
    return Credit(advantages=compute_group_advantages(inputs.returns, inputs.group_ids, scale="none"))


def _rloo(inputs: CreditInputs) -> Credit:
    return Credit(advantages=compute_rloo_advantages(inputs.returns, inputs.group_ids))


def _reinforce_pp(inputs: CreditInputs) -> Credit:
    rewards = inputs.token_rewards.double()
    raw = compute_returns_to_go(rewards, inputs.mask, gamma=inputs.settings.gamma)
    return _whitened(raw, inputs)


def _reinforce_pp_baseline(inputs: CreditInputs) -> Credit:
    raw = compute_reinforce_pp_baseline_advantages(
        inputs.returns,
        inputs.group_ids,
        inputs.mask,
        kl_rewards=inputs.kl_rewards,
        gamma=inputs.settings.gamma,
    )
    return _whitened(raw, inputs)


def _whitened(raw: torch.Tensor, inputs: CreditInputs) -> Credit:
    """Raw advantages, (N, T) in float64, whitened, with what they were whitened with."""
    mean, std = inputs.whitening or whitening(raw, inputs.mask, inputs.kept_mask)
    advantages = whiten_by(raw, inputs.mask, mean, std).to(float_dtype(inputs.outcome_rewards))
    return Credit(advantages=advantages, whitening=(mean, std))


def _turn_grpo(inputs: CreditInputs) -> Credit:
    advantages = compute_turn_group_advantages(
        inputs.turn_rewards,
        inputs.outcome_rewards,
        extend_turn_ids(inputs.turn_ids, inputs.mask),
        inputs.group_ids,
        gamma_turn=inputs.settings.gamma_turn,
    )
    return Credit(advantages=advantages)


def _gigpo(inputs: CreditInputs) -> Credit:
    advantages = compute_gigpo_advantages(
        outcome_on_last_turn(inputs.turn_rewards, inputs.outcome_rewards, inputs.anchor_ids),
        inputs.anchor_ids,
        extend_turn_ids(inputs.turn_ids, inputs.mask),
        inputs.group_ids,
        gamma_turn=inputs.settings.gamma_turn,
        step_weight=inputs.settings.step_weight,
    )
    return Credit(advantages=advantages)


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


def _critic_row(name: str, compute: Callable[..., Any], *options: str, **facts: Any) -> Estimator:
    """The row of one of the functions of GAE, which reads these settings."""

    def estimate(inputs: CreditInputs) -> Credit:
        tensors = [inputs.token_rewards, inputs.values, inputs.mask]
        if "gamma_turn" in options:
            tensors.append(inputs.turn_ids)
        discounts = {option: getattr(inputs.settings, option) for option in options}
        advantages, returns = compute(*tensors, bootstrap_values=inputs.bootstrap_values, **discounts)
        return Credit(advantages=advantages, returns=returns)

    facts |= {"options": options, "baseline": "a critic", "needs_critic": True, "reads_token_rewards": True}
    return Estimator(name=name, compute=estimate, **facts)


_ROWS = (
    Estimator(
        name="grpo",
        compute=_grpo,
        baseline="mean of the group, divided by its std",
        credit="one number per trajectory",
        options=("scale_rewards",),
        explain=explanations.explain_grpo,
        papers=(_GRPO,),
        needs_group=True,
    ),
    Estimator(
        name="dr_grpo",
        compute=_dr_grpo,
        explain=explanations.explain_centred,
        baseline="mean of the group",
        credit="one number per trajectory",
        papers=(_DR_GRPO,),
        needs_group=True,
        loss_type="dr_grpo",
    ),
    Estimator(
        name="rloo",
        compute=_rloo,
        explain=explanations.explain_rloo,
        baseline="mean of the *other* members",
        credit="one number per trajectory",
        papers=(_RLOO,),
        needs_group=True,
    ),
    Estimator(
        name="reinforce_pp",
        compute=_reinforce_pp,
        explain=explanations.explain_reinforce_pp,
        baseline="mean of the batch, divided by its std",
        credit="per token, by discount and KL",
        options=("gamma",),
        papers=(_REINFORCE_PP,),
        reads_token_rewards=True,
    ),
    Estimator(
        name="reinforce_pp_baseline",
        compute=_reinforce_pp_baseline,
        explain=explanations.explain_reinforce_pp_baseline,
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
        explain=explanations.explain_turn_grpo,
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
        explain=explanations.explain_gigpo,
        baseline="mean over turns that began in the same state",
        credit="per turn, where states recur",
        options=("gamma_turn", "step_weight"),
        papers=(_GIGPO,),
        needs_group=True,
        default_gamma_turn=0.95,
    ),
    _critic_row(
        "gae",
        compute_gae,
        "gamma",
        "lam",
        credit="per token",
        papers=(_PPO, _GAE),
        explain=explanations.explain_gae,
    ),
    _critic_row(
        "bilevel_gae",
        compute_bilevel_gae,
        "gamma",
        "gamma_turn",
        "lam",
        "lam_turn",
        credit="per turn, then per token",
        papers=(_PPO, _VAGEN),
    ),
    _critic_row(
        "step_gae",
        compute_step_gae,
        "gamma_turn",
        "lam_turn",
        credit="one number per turn",
        papers=(_PPO, _STEPPO),
        weighs_turns=True,
    ),
)
ESTIMATORS: dict[str, Estimator] = {row.name: row for row in _ROWS}


# -------------------------------------------------------------------- from `advantage_estimator` to a row


_FORM = "a function from CreditInputs to Credit, or an Estimator"


def estimator_names(*, needs_critic: bool) -> tuple[str, ...]:
    """The estimators of the table that read a critic, or those that do without."""
    return tuple(row.name for row in ESTIMATORS.values() if row.needs_critic is needs_critic)


def find_estimator(given: str | Estimator | Callable[[CreditInputs], Credit], *, has_critic: bool) -> Estimator:
    """The row that `advantage_estimator` stands for.

    Args:
        given: a name in `ESTIMATORS`; the path of a function or of an `Estimator`, `package.module.name` or
            `package.module:name`, found in the current directory or among the installed packages; or such an object.
        has_critic: whether the trainer has a critic, and a plain function so reads its values.

    Raises:
        ValueError: there is none, or it is no estimator.

    >>> find_estimator("gigpo", has_critic=False).default_gamma_turn
    0.95
    """
    if isinstance(given, OwnObject):
        return given.target  # type: ignore[no-any-return]
    if isinstance(given, str) and given in ESTIMATORS:
        return ESTIMATORS[given]
    own = own_object("advantage_estimator", given, ESTIMATORS, _FORM, row=Estimator)
    row = own.target
    if not isinstance(row, Estimator):
        row = Estimator(name=str(own), compute=row, needs_critic=has_critic)
    _check_own(row)
    return row


def _check_own(row: Estimator) -> None:
    """Refuse a user's row that takes one of our names, more than one argument, or weighted parts with a critic."""
    if row is not ESTIMATORS.get(row.name, row):
        raise ValueError(
            f"advantage_estimator: the name {row.name!r} of this Estimator belongs to one of the package's. Give it "
            "another name."
        )
    if row.needs_critic and row.weighs_parts:
        raise ValueError(
            f"advantage_estimator={row.name!r} has needs_critic=True and weighs_parts=True: the critic's values "
            "belong to the sum of both parts. Set one of them to False."
        )
    check_call(f"advantage_estimator={row.name!r}", row.compute, _FORM, None)
