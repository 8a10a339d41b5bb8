"""Statistics over action tokens. What stands at mask 0, NaN and infinity included, changes nothing, bitwise."""

from __future__ import annotations

import torch


def check_shapes(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors of unequal shape: broadcasting would count the mask wrongly (None is passed over).

    Raises:
        ValueError: names the tensors and their shapes.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"These must have one shape: {found}. Expand or pad them to the same shape.")


def check_one_per_row(rows: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors that do not hold one number for each row of `rows` (None is passed over).

    Raises:
        ValueError: names the tensor and its shape.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != (rows.shape[0],):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but there are {rows.shape[0]} rows. Give it one number for "
                f"each row: shape ({rows.shape[0]},)."
            )


def float_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype of results: the widest of the floating inputs, torch's default for integers."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def masked_values(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`x` in float64 with zeros at mask 0 (selected, not multiplied: NaN * 0 is NaN)."""
    return torch.where(mask.bool(), x.double(), 0.0)


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of `x` where `mask` is set; 0 if it is set nowhere.

    Args:
        x: any shape.
        mask: the same shape; bool, int or float.

    Returns:
        A scalar of `x`'s dtype, accumulated in float64.

    >>> masked_mean(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([1, 0, 1])).item()
    2.0
    """
    check_shapes(x=x, mask=mask)
    return (masked_values(x, mask).sum() / mask.bool().sum().clamp(min=1)).to(float_dtype(x))


@torch.no_grad()
def masked_whiten(x: torch.Tensor, mask: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """(x - mean) / sqrt(var + 1e-8) at the masked entries, 0 elsewhere; the variance is Bessel-corrected.

    Fewer than two counted entries have no spread: all come back as 0.

    Args:
        x: any shape. Whitening is global: give it the rows of all ranks.
        mask: the same shape; bool, int or float.
        counted: the same shape; mean and variance are those of the masked entries that it sets too; None: of all.

    Returns:
        The shape and dtype of `x`.

    >>> masked_whiten(torch.tensor([1.0, 99.0, 3.0]), torch.tensor([1, 0, 1])).tolist()
    [-0.7071067690849304, 0.0, 0.7071067690849304]
    """
    check_shapes(x=x, mask=mask)
    check_shapes(x=x, counted=counted)
    keep = mask.bool()
    in_statistics = keep if counted is None else keep & counted.bool()
    values = masked_values(x, keep)
    count = in_statistics.sum()
    mean = masked_values(values, in_statistics).sum() / count.clamp(min=1)
    centred = masked_values(values - mean, keep)
    variance = (masked_values(centred, in_statistics) ** 2).sum() / (count - 1).clamp(min=1)
    whitened = centred / (variance + 1e-8).sqrt()
    return torch.where(count >= 2, whitened, 0.0).to(float_dtype(x))
