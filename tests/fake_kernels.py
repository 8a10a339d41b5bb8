"""PyTorch's two variable-length attention kernels for CUDA, in plain torch on a CPU.

Registered are CPU kernels of the operators that `update/one_call.py` calls. The arguments are checked by the installed
PyTorch's own schema, and the gradient of FlashAttention comes from its own autograd formula. What the CUDA kernels
refuse is refused here: offsets of another dtype, wrong maxima, head dimensions, and last dimensions with gaps.
"""

import contextlib
from itertools import pairwise

import torch

from agent_r1_trl.update import one_call

KERNELS = {"flash": one_call.flash_call, "efficient": one_call.efficient_call}
CALLED = []
"""Names of the operators called so far."""


@contextlib.contextmanager
def in_one_call(monkeypatch, kind):
    """Packed rows of a CPU are computed as on a GPU, by this kernel; `kind` None: by a call for each segment."""
    with monkeypatch.context() as patch:
        if kind is not None:
            patch.setattr(one_call, "has_one_call", lambda device: True)
            patch.setattr(one_call, "choose_kernel", lambda query, key, value: KERNELS[kind])
        yield


def check(queries, keys, values, query_ends, key_ends, longest_queries, longest_keys):
    assert queries.dtype == keys.dtype == values.dtype
    for states in (queries, keys, values):
        assert states.stride(-1) == 1
        assert states.shape[2] % one_call.HEAD_DIM_MULTIPLE == 0
    for ends, states, longest in ((query_ends, queries, longest_queries), (key_ends, keys, longest_keys)):
        assert ends.dtype == torch.int32 and ends.is_contiguous()
        assert ends[0] == 0 and ends[-1] == len(states)
        assert ends.diff().max() == longest and ends.diff().min() > 0
    assert len(keys) == len(values)
    assert (key_ends.diff() >= query_ends.diff()).all(), "every segment sees itself"


def ranges(ends):
    return [slice(start, end) for start, end in pairwise(ends.tolist())]


def probabilities(queries, keys, scale, window):
    """(heads, n, m) weights of the keys, and (heads, n) the logarithm of their sum before they were divided by it."""
    groups = queries.shape[1] // keys.shape[1]
    precision = torch.promote_types(queries.dtype, torch.float32)
    queries, keys = queries.to(precision), keys.to(precision).repeat_interleave(groups, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", queries, keys) * scale
    own = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
    place = torch.arange(len(keys))
    is_seen = place <= own
    if window is not None:
        is_seen &= place > own - window
    scores = scores.masked_fill(~is_seen, -torch.inf)
    return scores.softmax(dim=2), scores.logsumexp(dim=2)


def forward(queries, keys, values, query_ends, key_ends, scale, window):
    groups = queries.shape[1] // keys.shape[1]
    outputs, sums = [], []
    for one, other in zip(ranges(query_ends), ranges(key_ends), strict=True):
        weights, log_sums = probabilities(queries[one], keys[other], scale, window)
        seen = values[other].to(weights.dtype).repeat_interleave(groups, dim=1)
        outputs.append(torch.einsum("hnm,mhd->nhd", weights, seen).to(queries.dtype))
        sums.append(log_sums)
    return torch.cat(outputs), torch.cat(sums, dim=1)


def backward(gradient, queries, keys, values, outputs, query_ends, key_ends, scale, window):
    groups = queries.shape[1] // keys.shape[1]
    of_queries, of_keys, of_values = (torch.zeros_like(states) for states in (queries, keys, values))
    for one, other in zip(ranges(query_ends), ranges(key_ends), strict=True):
        weights, _ = probabilities(queries[one], keys[other], scale, window)
        above, output = gradient[one].to(weights.dtype), outputs[one].to(weights.dtype)
        wide_keys, wide_values = (
            states[other].to(weights.dtype).repeat_interleave(groups, dim=1) for states in (keys, values)
        )
        of_weights = torch.einsum("nhd,mhd->hnm", above, wide_values)
        of_scores = weights * (of_weights - (above * output).sum(dim=2).T[..., None]) * scale
        of_queries[one] = torch.einsum("hnm,mhd->nhd", of_scores, wide_keys).to(queries.dtype)
        of_wide_keys = torch.einsum("hnm,nhd->mhd", of_scores, queries[one].to(weights.dtype))
        of_wide_values = torch.einsum("hnm,nhd->mhd", weights, above)
        of_keys[other] = of_wide_keys.unflatten(1, (-1, groups)).sum(dim=2).to(keys.dtype)
        of_values[other] = of_wide_values.unflatten(1, (-1, groups)).sum(dim=2).to(values.dtype)
    return of_queries, of_keys, of_values


# -------------------------------------------------------------------- FlashAttention


def flash_window(left, right, is_causal):
    """The operator's sides of a window as a number of keys, the query's own included."""
    if left is None:
        assert is_causal and right is None
        return None
    assert not is_causal and right == 0
    return left + 1


def flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, **newer,
):  # fmt: skip
    CALLED.append("flash forward")
    check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    assert query.shape[2] == value.shape[2] <= one_call.FLASH_MAX_HEAD_DIM and not dropout_p
    window = flash_window(window_size_left, window_size_right, is_causal)
    output, log_sums = forward(query, key, value, cum_seq_q, cum_seq_k, scale, window)
    return output, log_sums, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    CALLED.append("flash backward")
    window = flash_window(window_size_left, window_size_right, is_causal)
    return backward(grad_out, query, key, value, out, cum_seq_q, cum_seq_k, scale, window)


# -------------------------------------------------------------------- the memory-efficient kernel


def efficient_forward(
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, custom_mask_type,
    compute_log_sumexp=False, *, scale=None, seqlen_k=None, window_size=None,
):  # fmt: skip
    CALLED.append("efficient forward")
    assert bias is None and custom_mask_type == 2 and len(query) == 1 and not dropout_p
    assert query.shape[2] == key.shape[2], "it knows no shared key heads"
    check(query[0], key[0], value[0], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    output, log_sums = forward(query[0], key[0], value[0], cu_seqlens_q, cu_seqlens_k, scale, window_size)
    seed = torch.zeros((), dtype=torch.int64)
    return output[None], log_sums[None], seed, seed.clone(), max_seqlen_q, max_seqlen_k


def efficient_backward(
    grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, logsumexp,
    dropout_p, philox_seed, philox_offset, custom_mask_type, bias_requires_grad, *,
    scale=None, num_splits_key=None, window_size=None, shared_storage_dqdkdv=False,
):  # fmt: skip
    CALLED.append("efficient backward")
    found = backward(grad_out_[0], query[0], key[0], value[0], out[0], cu_seqlens_q, cu_seqlens_k, scale, window_size)
    return *(states[None] for states in found), torch.empty(0)


LIBRARY = torch.library.Library("aten", "IMPL", "CPU")
for name, kernel in {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_efficient_attention_forward": efficient_forward,
    "_efficient_attention_backward": efficient_backward,
}.items():
    LIBRARY.impl(name, kernel)
