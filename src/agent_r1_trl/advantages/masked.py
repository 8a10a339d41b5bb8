"""Statistics and recurrences over action tokens, without a loop over tokens.

What stands at mask 0, NaN and infinity included, changes nothing, bitwise.
"""

from __future__ import annotations

import torch


def check_shapes(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors of unequal shape: broadcasting would count the mask wrongly (None is passed over)."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"These must have one shape: {found}. Expand or pad them to the same shape.")


def check_one_per_row(rows: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors that do not hold one number for each row of `rows` (None is passed over)."""
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

    A scalar of `x`'s dtype, accumulated in float64; the mask has the shape of `x` and is bool, int or float.

    >>> masked_mean(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([1, 0, 1])).item()
    2.0
    """
    check_shapes(x=x, mask=mask)
    count = mask.bool().sum().clamp(min=1)
    mean = masked_values(x, mask).sum() / count
    return mean.to(float_dtype(x))


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
    return whiten_by(x, mask, *whitening(x, mask, counted))


def whiten_by(
    x: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor | float, std: torch.Tensor | float
) -> torch.Tensor:
    """(x - mean) / std at the masked entries, 0 elsewhere."""
    centred = masked_values(masked_values(x, mask) - mean, mask)
    return (centred / std).to(float_dtype(x))


def whitening(
    x: torch.Tensor, mask: torch.Tensor, counted: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and sqrt(var + 1e-8) that `masked_whiten` takes; the latter is infinite for fewer than two entries."""
    check_shapes(x=x, mask=mask)
    check_shapes(x=x, counted=counted)
    in_statistics = mask.bool()
    if counted is not None:
        in_statistics = in_statistics & counted.bool()
    count = in_statistics.sum()
    values = masked_values(x, in_statistics)
    mean = values.sum() / count.clamp(min=1)
    centred = masked_values(values - mean, in_statistics)
    variance = (centred**2).sum() / (count - 1).clamp(min=1)
    return mean, torch.where(count >= 2, (variance + 1e-8).sqrt(), torch.inf)


# -------------------------------------------------------------------- recurrences along the tokens


def reverse_scan(offset: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x[t] = offset[t] + factor[t] * x[t + 1], with x = 0 after the last position.

    Each round doubles the number of positions that one entry has absorbed: log2(T) rounds of (B, T) operations. A
    position with offset 0 and factor 1 is invisible to the recurrence, which is how masked tokens are skipped.

    All are (B, T). Padding on the right does not change a bit of it.

    >>> reverse_scan(torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[0.5, 1.0, 0.5]])).tolist()
    [[1.5, 1.0, 1.0]]
    """
    reach, length = 1, offset.shape[1]
    while reach < length:
        near, far = slice(None, -reach), slice(reach, None)
        ahead = offset[:, near] + factor[:, near] * offset[:, far]
        product = factor[:, near] * factor[:, far]
        offset = torch.cat([ahead, offset[:, -reach:]], dim=1)
        factor = torch.cat([product, factor[:, -reach:]], dim=1)
        reach *= 2
    return offset


def next_marked(marked: torch.Tensor) -> torch.Tensor:
    """For every position the first marked one strictly after it, T if there is none: (B, T) bool -> (B, T) int64.

    >>> next_marked(torch.tensor([[True, False, True, False]])).tolist()
    [[2, 2, 4, 4]]
    """
    length = marked.shape[1]
    positions = torch.arange(length, device=marked.device).expand_as(marked)
    places = torch.where(marked, positions, length)
    found = places.flip(1).cummin(dim=1).values.flip(1)  # (B, T) at or after t
    return torch.nn.functional.pad(found[:, 1:], (0, 1), value=length)


def take_next(x: torch.Tensor, marked: torch.Tensor, after_last: torch.Tensor | None = None) -> torch.Tensor:
    """(B, T) `x` at the next marked position, and behind the last one `after_last`, (B,), or 0."""
    last = x.new_zeros(x.shape[0]) if after_last is None else after_last.to(x)
    extended = torch.cat([x, last.unsqueeze(1)], dim=1)  # (B, T + 1)
    return extended.gather(1, next_marked(marked))


def carry_forward(x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """(B, T) `x` at the last marked position at or before each one; before the first marked position, `x` there.

    Rows without a marked position are 0.

    >>> carry_forward(torch.tensor([[7.0, 1.0, 7.0, 2.0, 7.0]]), torch.tensor([[0, 1, 0, 1, 0]]).bool()).tolist()
    [[1.0, 1.0, 1.0, 2.0, 2.0]]
    """
    positions = torch.arange(marked.shape[1], device=marked.device).expand_as(marked)
    last = torch.where(marked, positions, -1).cummax(dim=1).values  # (B, T)
    first = marked.long().argmax(dim=1, keepdim=True)  # (B, 1)
    source = torch.where(last >= 0, last, first)
    return torch.where(marked.any(dim=1, keepdim=True), x.gather(1, source), 0.0)


def scan_marked(
    offset: torch.Tensor, marked: torch.Tensor, factor: float, *, restart: torch.Tensor | None = None
) -> torch.Tensor:
    """X = offset + factor * (x of the next marked position) at marked positions, 0 elsewhere.

    Args:
        offset: (B, T) float64; what stands at unmarked positions does not matter.
        marked: (B, T) bool.
        factor: weight of what comes after.
        restart: (B, T) bool, marked positions that take nothing from what comes after.

    Returns:
        (B, T) float64.
    """
    # `torch.where(marked, factor, 1.0)` would round the factor to float32, and 8,192 powers of it with it.
    factors = torch.ones_like(offset).masked_fill(marked, factor)
    if restart is not None:
        factors = factors.masked_fill(restart, 0.0)
    offsets = torch.where(marked, offset, 0.0)
    return torch.where(marked, reverse_scan(offsets, factors), 0.0)
