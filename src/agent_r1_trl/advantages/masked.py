"""Statistics over action tokens. What stands at mask 0, NaN and infinity included, changes nothing, bitwise."""

from __future__ import annotations

import torch


def masked_values(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`x` in float64 with zeros at mask 0 (selected, not multiplied: NaN * 0 is NaN)."""
    return torch.where(mask.bool(), x.double(), torch.zeros((), dtype=torch.float64, device=x.device))


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of `x` where `mask` is set; 0 if it is set nowhere.

    Args:
        x: any shape.
        mask: the same shape; bool, int or float.

    Returns:
        A scalar of `x`'s dtype.
    """
    return (masked_values(x, mask).sum() / mask.bool().sum().clamp(min=1)).to(x.dtype)


def masked_whiten(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the masked entries, 0 elsewhere; the variance is Bessel-corrected.

    Fewer than two masked entries have no spread: they come back centred, that is, 0.

    Args:
        x: any shape.
        mask: the same shape; bool, int or float.

    >>> masked_whiten(torch.tensor([1.0, 99.0, 3.0]), torch.tensor([1, 0, 1])).tolist()
    [-0.7071067690849304, 0.0, 0.7071067690849304]
    """
    keep = mask.bool()
    values = masked_values(x, keep)
    count = keep.sum()
    mean = values.sum() / count.clamp(min=1)
    centred = masked_values(values - mean, keep)
    variance = (centred**2).sum() / (count - 1).clamp(min=1)
    whitened = centred / (variance + 1e-8).sqrt()
    return torch.where(count >= 2, whitened, torch.zeros_like(whitened)).to(x.dtype)
