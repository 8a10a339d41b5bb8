"""What does the output head cost with a sampling mask: the kept rows alone, against the fused whole vocabulary.

    OMP_NUM_THREADS=1 python benchmarks/kept_head.py [--json]

Both get the same hidden states and the same head, in the shape of Qwen2.5-0.5B (V 151,936, H 896), run forward and
backward, and give log-probs and entropies. The head is trained (`full`) or held, as with LoRA (`held`). Seconds are
medians of wall time; memory is what the largest resident set grows by, each in a process of its own.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from argparse import Namespace

import torch
from _common import check_at_least, make_parser, print_table, report, run_alone

SIZES = ("tokens", "top_k", "vocabulary", "hidden", "repeats")


def measure(args: Namespace) -> dict[str, float]:
    """Seconds and MB of one kind, in this process."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    from agent_r1_trl.update.kept_head import KeptLogProbs

    torch.manual_seed(0)
    weight = torch.randn(args.vocabulary, args.hidden).mul_(0.02).requires_grad_(args.head == "full")
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    kept = torch.stack([torch.randperm(args.vocabulary)[: args.top_k] for _ in range(args.tokens)]).int()
    targets = kept[:, 0].long()
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(args.repeats):
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        if args.only == "kept":
            log_probs, entropies = KeptLogProbs.apply(hidden, weight, None, targets, kept, 1.0, None, 1.0)
        else:
            outputs = ("log_probs", "entropy")
            given = (hidden, weight, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs)
            log_probs, entropies, *_ = _ChunkedLogProbFunction.apply(*given)
        log_probs.sum().backward()
        seconds.append(time.perf_counter() - start)
    assert entropies.shape == log_probs.shape
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": statistics.median(seconds), "mb": grown / 1024}


def show(found: dict[str, dict[str, float]], args: Namespace) -> None:
    """Print a table."""
    rows = [[*name.split("_"), f"{one['seconds']:.2f}", f"{one['mb']:.0f}"] for name, one in found.items()]
    title = f"{args.tokens} tokens, top_k {args.top_k}, {args.vocabulary} ids"
    print_table(title, ["head", "computed", "seconds", "MB"], rows, num_names=2)


def ratios(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """The kept rows' figures over the whole vocabulary's."""
    return {
        f"{head}_{name}_ratio": round(found[f"{head}_kept"][name] / found[f"{head}_whole"][name], 4)
        for head in ("full", "held")
        for name in ("seconds", "mb")
    }


def main() -> None:
    """Measure both for each head."""
    parser = make_parser(__doc__)
    for name, default in zip(SIZES, (1024, 20, 151_936, 896, 3), strict=True):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--head", choices=("full", "held"), default="full")
    parser.add_argument("--only", choices=("whole", "kept"), help="measure one in this process")
    args = parser.parse_args()
    check_at_least(parser, args, 1, *SIZES)
    if args.only:
        print(json.dumps(measure(args)))
        return
    sizes = [text for name in SIZES for text in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    found = {
        f"{head}_{kind}": run_alone(__file__, [*sizes, "--head", head, "--only", kind])
        for head in ("full", "held")
        for kind in ("whole", "kept")
    }
    report(found, args, show, figures=ratios)


if __name__ == "__main__":
    main()
