"""The value loss, the KL penalty, and how well a critic explains its returns.

The policy's loss is TRL's own. As for the estimators, any value at mask 0 (NaN and infinity included) changes no bit
of any result or gradient.
"""

from __future__ import annotations

import torch

from agent_r1_trl.advantages.masked import check_shapes, float_dtype, masked_mean, masked_values


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    cliprange_value: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped squared error, 0.5 * max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2), summed over the mask.

    A sum, because the normaliser is the policy's: the action tokens of the accumulation window on all ranks.

    Args:
        values: (B, T) values now; the only input that gradients reach.
        old_values: (B, T) values when the batch was scored.
        returns: (B, T) the critic's targets.
        mask: (B, T) bool, int or float.
        cliprange_value: c, how far a value may move before its gain stops counting; infinity switches clipping off.

    Returns:
        (loss, num_clipped), scalars: at least float32 with gradient, and int64, the masked positions where the
        clipped error is the larger. A row without masked positions adds 0 and has zero gradient.

    Raises:
        ValueError: if the shapes differ.

    >>> one = torch.ones(1, 1)
    >>> value_loss(one, one * 0, one * 2, one, cliprange_value=0.5)
    (tensor(1.1250), tensor(1))
    """
    check_shapes(values=values, old_values=old_values, returns=returns, mask=mask)
    new = masked_values(values, mask)  # float64
    old = masked_values(old_values.detach(), mask)
    target = masked_values(returns.detach(), mask)
    clipped = new.clamp(old - cliprange_value, old + cliprange_value)
    free_error = (new - target) ** 2
    clipped_error = (clipped - target) ** 2
    loss = 0.5 * torch.maximum(free_error, clipped_error).sum()
    num_clipped = (clipped_error > free_error).sum()
    return loss.to(torch.promote_types(values.dtype, torch.float32)), num_clipped


@torch.no_grad()
def kl_in_reward(
    rewards: torch.Tensor, logps: torch.Tensor, ref_logps: torch.Tensor, mask: torch.Tensor, *, beta: float
) -> torch.Tensor:
    """Token rewards with the KL penalty in them: r_t - beta * k1_t on action tokens.

    k1 = logps - ref_logps is an unbiased estimate of KL(policy || reference) for every sampled token, of either sign
    (Schulman, "Approximating KL divergence", 2020). TRL's loss has its own, k3.

    Args:
        rewards: (B, T) token rewards.
        logps: (B, T) log-probabilities under the policy that sampled.
        ref_logps: (B, T) the same under the reference.
        mask: (B, T) action tokens; bool, int or float.
        beta: weight of the penalty.

    Returns:
        (B, T), 0 at mask 0.

    Raises:
        ValueError: if the shapes differ.
    """
    check_shapes(rewards=rewards, logps=logps, ref_logps=ref_logps, mask=mask)
    k1 = masked_values(logps, mask) - masked_values(ref_logps, mask)
    penalised = masked_values(rewards, mask) - beta * k1
    return penalised.to(float_dtype(rewards, logps, ref_logps))


@torch.no_grad()
def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """1 - Var(R - V) / Var(R) over the mask: 1 for a perfect critic, 0 for a constant one, negative for a worse one.

    All are (B, T). The result is a scalar, 0 where the returns do not vary, so that there is nothing to explain.
    """
    check_shapes(values=values, returns=returns, mask=mask)
    target = masked_values(returns, mask)
    error = target - masked_values(values, mask)
    variance = _variance(target, mask)
    unexplained = _variance(error, mask)
    # Returns that differ in their last float32 digits do not vary: their std is at most 1e-6 of their size.
    is_constant = variance <= 1e-12 * masked_mean(target**2, mask)
    explained = torch.where(is_constant, 0.0, 1 - unexplained / variance)
    return explained.to(float_dtype(values, returns))


def _variance(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """() variance of (B, T) values over the mask."""
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask)
