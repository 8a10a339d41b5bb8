"""Evaluation: the training rollout, greedy or sampled, with metrics and 95% bootstrap intervals.

prompt -> [environment reset] -> [rollout (policy <-> tools)] -> Trajectory -> [rewards on tokens] -> filter
       -> batch -> advantages -> loss -> step -> sync weights -> next rollout

    result = evaluate_model("outputs/my-agent", MyEnv, dataset, limits=RolloutLimits(max_turns=4))
    result.metrics["exact_match"], result.intervals["exact_match"]

Every metric is a ratio of two sums over examples (score and number of scored attempts; failed calls and calls), and the
examples are what the bootstrap draws again, so attempts at one question never count as independent evidence.
Trajectories lost to an infrastructure failure count in `infrastructure_failure_rate` and nowhere else.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.generation.base import Generator, SamplingParams
from agent_r1_trl.rollout import ChatFormat, RolloutLimits, RolloutRequest, RolloutRunner, derive_seed, example_key
from agent_r1_trl.trajectory import Trajectory

if TYPE_CHECKING:
    import numpy as np

GREEDY = SamplingParams(temperature=0.0)
NAMES = {"em": "exact_match", "valid_answer": "valid_answer_rate"}
"""Metric names of the `info` keys that `SearchQAEnv` sets; other numeric keys keep their own."""
NUM_RESAMPLES = 10_000
"""Of the bootstrap; fewer, never below 1,000, for more than 1,000 examples."""

Row = dict[str, tuple[float, float]]
"""Metric -> (numerator, denominator) of one trajectory or example."""


@dataclass(kw_only=True)
class EvaluationResult:
    """What an evaluation found.

    Example:
        >>> result = EvaluationResult.from_rows([{"f1": (1.0, 1.0)}, {"f1": (0.0, 1.0)}], example_ids=["a", "b"])
        >>> result.metrics, result.intervals["f1"]
        ({'f1': 0.5}, (0.0, 1.0))
    """

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    """95% percentile bootstrap over examples."""
    num_examples: int
    num_generations: int = 1
    example_ids: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    """Per example: what each metric's two sums are made of."""
    trajectories: list[Trajectory] = field(default_factory=list)
    duration_s: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: list[Row], *, example_ids: list[str], seed: int = 0, **values: Any) -> EvaluationResult:
        """Metrics and intervals from the sums of each example."""
        sums = _sums(rows)
        metrics = {name: _ratio(*pair.sum(axis=0)) for name, pair in sums.items()}
        return cls(
            metrics=metrics,
            intervals=bootstrap_intervals(sums, seed=seed),
            num_examples=len(rows),
            example_ids=example_ids,
            rows=rows,
            **values,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable, without trajectories and rows: the metrics, `num_examples`, `intervals`, `settings`."""
        return {
            **{name: _finite(value) for name, value in self.metrics.items()},
            "num_examples": self.num_examples,
            "num_generations": self.num_generations,
            "intervals": {name: [_finite(low), _finite(high)] for name, (low, high) in self.intervals.items()},
            "duration_s": round(self.duration_s, 3),
            "settings": self.settings,
        }

    def to_json(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, default=repr) + "\n"


def evaluate(
    generator: Generator,
    env_factory: Callable[[], Any],
    chat: ChatFormat,
    examples: Iterable[Mapping[str, Any]],
    *,
    limits: RolloutLimits | None = None,
    params: SamplingParams = GREEDY,
    num_generations: int = 1,
    seed: int = 0,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> EvaluationResult:
    """Play every example and score what happened.

    Args:
        generator: samples turns.
        env_factory: makes a fresh environment per trajectory. Every number it leaves in `trajectory.info` is a metric.
        chat: the model's chat format.
        examples: rows of the data set.
        limits: the same as in training, for figures that can be compared.
        params: greedy by default.
        num_generations: attempts per example; a metric is averaged over them first.
        seed: of sampling, environments and bootstrap.
        on_trajectory: called with each trajectory as it ends, from another thread.

    Raises:
        ValueError: no examples, or `num_generations` below 1.
        RuntimeError: not one trajectory could be played; says what the first one said.
    """
    rows = [dict(example) for example in examples]
    if not rows:
        raise ValueError("examples is empty: there is nothing to evaluate. Pass at least one row.")
    if isinstance(num_generations, bool) or not isinstance(num_generations, int) or num_generations < 1:
        raise ValueError(f"num_generations={num_generations!r}: must be a whole number >= 1.")
    limits = limits or RolloutLimits()
    ids = [example_key(row) for row in rows]
    requests = [
        RolloutRequest(
            example=row,
            example_id=example_id,
            generation=generation,
            seed=derive_seed(seed, -1, example_id, generation),
            reset_seed=derive_seed(seed, -1, example_id),
        )
        for row, example_id in zip(rows, ids, strict=True)
        for generation in range(num_generations)
    ]
    start = time.perf_counter()
    runner = RolloutRunner(env_factory, generator, chat, limits, params, on_trajectory=on_trajectory)
    try:
        trajectories = runner.run(requests)
    finally:
        runner.close()
    _check_some_played(trajectories)
    groups = [trajectories[i : i + num_generations] for i in range(0, len(trajectories), num_generations)]
    return EvaluationResult.from_rows(
        [example_sums(group) for group in groups],
        example_ids=ids,
        seed=seed,
        num_generations=num_generations,
        trajectories=trajectories,
        duration_s=time.perf_counter() - start,
        settings={"temperature": params.temperature, "seed": seed, "limits": vars(limits).copy()},
    )


def evaluate_model(
    model: Any,
    env_factory: Callable[[], Any],
    examples: Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    use_vllm: bool = False,
    limits: RolloutLimits | None = None,
    dtype: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    thinking: str = "keep",
    max_batch_size: int = 64,
    trust_remote_code: bool = False,
    **settings: Any,
) -> EvaluationResult:
    """Load a model and evaluate it; on a GPU where there is one.

    Args:
        model: directory or Hub id of a model or of a PEFT adapter; or a loaded model (then pass `tokenizer`).
        env_factory: as for `evaluate`.
        examples: as for `evaluate`.
        tokenizer: None loads the one saved with the model.
        use_vllm: sample with vLLM in this process instead of transformers.
        limits: as for `evaluate`; the model's context is respected as well.
        dtype: "float32", "bfloat16", ... None: the checkpoint's own on a GPU, float32 on a CPU.
        chat_template_kwargs: handed to the chat template.
        thinking: see `ChatFormat`.
        max_batch_size: rows per forward (transformers).
        trust_remote_code: run code that comes with the model.
        **settings: `params`, `num_generations`, `seed`, `on_trajectory` of `evaluate`.

    Raises:
        ValueError: there is no such model; as for `evaluate`.
    """
    name = None if hasattr(model, "parameters") else str(model)
    if name is not None:
        # vLLM reads a plain checkpoint itself; an adapter is merged into its base on the way in.
        model, tokenizer = load_agent(
            name, dtype=dtype, tokenizer=tokenizer, trust_remote_code=trust_remote_code, to_device=not use_vllm
        )
    if tokenizer is None:
        raise ValueError("tokenizer=None: a loaded model comes without its tokenizer. Pass tokenizer= as well.")
    eos = getattr(model.generation_config, "eos_token_id", None)
    chat = ChatFormat(
        tokenizer,
        chat_template_kwargs=chat_template_kwargs,
        thinking=thinking,
        extra_stop_token_ids=[eos] if isinstance(eos, int) else list(eos or []),
    )
    limits = _within_context(limits or RolloutLimits(), model)
    generator = _make_generator(model, chat, tokenizer, use_vllm, limits, max_batch_size)
    try:
        result = evaluate(generator, env_factory, chat, examples, limits=limits, **settings)
    finally:
        generator.close()
    result.settings = {"model": name, "use_vllm": use_vllm, **result.settings}
    return result


# ---------------------------------------------------------------- loading


def load_agent(
    path: str,
    *,
    dtype: str | None = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    to_device: bool = True,
) -> tuple[Any, Any]:
    """Model (in eval mode) and tokenizer of a directory or Hub id; PEFT adapters are loaded onto their base model.

    Raises:
        ValueError: a local directory that holds neither; names the checkpoints inside it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_adapter = _check_model_folder(path)
    has_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "dtype": dtype or ("auto" if has_gpu else torch.float32),
        "trust_remote_code": trust_remote_code,
    }
    if is_adapter:
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(path, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, **options)
    if tokenizer is None:
        source = path
        if is_adapter and not (Path(path) / "tokenizer_config.json").exists():
            source = model.peft_config["default"].base_model_name_or_path
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if to_device and has_gpu:
        model = model.to("cuda")
    return model.eval(), tokenizer


def _check_model_folder(path: str) -> bool:
    """Whether it is an adapter; a name that is no local directory is taken for a Hub id."""
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
            raise ValueError(f"model={path!r}: no such directory. Pass the directory of a saved model, or a Hub id.")
        return False
    if (folder / "adapter_config.json").exists():
        return True
    if not (folder / "config.json").exists():
        inside = sorted(str(item.parent) for item in folder.glob("checkpoint-*/*config.json"))
        hint = f" Did you mean {inside[-1]}?" if inside else ""
        raise ValueError(
            f"model={path!r}: the directory holds neither config.json (a model) nor adapter_config.json (a PEFT "
            f"adapter). Pass the directory that save_model or a checkpoint wrote.{hint}"
        )
    return False


def _within_context(limits: RolloutLimits, model: Any) -> RolloutLimits:
    from dataclasses import replace

    context = getattr(model.config, "max_position_embeddings", None)
    if limits.max_model_length is None and isinstance(context, int) and context > 1:
        return replace(limits, max_model_length=context)
    return limits


def _make_generator(
    model: Any, chat: ChatFormat, tokenizer: Any, use_vllm: bool, limits: RolloutLimits, max_batch_size: int
) -> Any:
    if use_vllm:
        from agent_r1_trl.generation import VLLMGenerator

        return VLLMGenerator(model, stop_token_ids=chat.stop_token_ids, max_model_len=limits.max_model_length)
    from agent_r1_trl.generation import TransformersGenerator

    return TransformersGenerator(
        model,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=chat.stop_token_ids,
        max_batch_size=max_batch_size,
    )


# ---------------------------------------------------------------- metrics


def trajectory_sums(trajectory: Trajectory) -> Row:
    """What one trajectory adds to each metric: (numerator, denominator)."""
    is_lost = trajectory.stop_reason.is_infrastructure_failure
    lost = {"infrastructure_failure_rate": (float(is_lost), 1.0)}
    if is_lost:
        return lost
    results = trajectory.tool_results
    sums: Row = {
        "reward": (trajectory.total_reward, 1.0),
        "turns": (float(len(trajectory.turns)), 1.0),
        "tool_calls": (float(len(results)), 1.0),
        "tool_error_rate": (float(sum(result.is_error for result in results)), float(len(results))),
        "truncated_rate": (float(trajectory.stop_reason.is_truncated), 1.0),
        "completion_tokens": (float(len(trajectory.completion_ids)), 1.0),
        **lost,
    }
    scores: Row = {}
    for key, value in trajectory.info.items():
        if isinstance(value, bool | int | float) and math.isfinite(value):
            name = NAMES.get(str(key), str(key))
            scores[f"info_{name}" if name in sums else name] = (float(value), 1.0)
    return {**scores, **sums}


def example_sums(trajectories: Sequence[Trajectory]) -> Row:
    """The attempts at one example, added up."""
    total: dict[str, tuple[float, float]] = {}
    for trajectory in trajectories:
        for name, (numerator, denominator) in trajectory_sums(trajectory).items():
            before = total.get(name, (0.0, 0.0))
            total[name] = (before[0] + numerator, before[1] + denominator)
    return total


def bootstrap_intervals(
    sums: Mapping[str, np.ndarray], *, seed: int = 0, level: float = 0.95
) -> dict[str, tuple[float, float]]:
    """Percentile intervals of ratios of sums.

    Args:
        sums: metric -> (N, 2) numerators and denominators per example, the same N for all.
        seed: of the draws.
        level: of the interval.
    """
    import numpy as np

    if not sums:
        return {}
    stacked = np.concatenate(list(sums.values()), axis=1)  # (N, 2M)
    drawn = np.concatenate([counts @ stacked for counts in _resamples(len(stacked), seed)])  # (R, 2M)
    tail = (1 - level) / 2
    intervals = {}
    for index, name in enumerate(sums):
        numerator, denominator = drawn[:, 2 * index], drawn[:, 2 * index + 1]
        ratios = numerator[denominator > 0] / denominator[denominator > 0]
        low, high = np.quantile(ratios, [tail, 1 - tail]) if len(ratios) else (math.nan, math.nan)
        intervals[name] = (float(low), float(high))
    return intervals


def difference(before: EvaluationResult, after: EvaluationResult, *, seed: int = 0) -> dict[str, tuple[float, ...]]:
    """(after - before, low, high) per metric, with a paired bootstrap: both are evaluated on the same draw of examples.

    Raises:
        ValueError: the two results are about different examples.
    """
    import numpy as np

    if before.example_ids != after.example_ids:
        raise ValueError("The two results are about different examples; a paired difference needs the same ones.")
    first, second = _sums(before.rows), _sums(after.rows)
    names = [name for name in first if name in second]
    stacked = np.concatenate([pairs[name] for name in names for pairs in (first, second)], axis=1)  # (N, 4M)
    drawn = np.concatenate([counts @ stacked for counts in _resamples(len(stacked), seed)])  # (R, 4M)
    changes = {}
    for index, name in enumerate(names):
        one, two = drawn[:, 4 * index : 4 * index + 2], drawn[:, 4 * index + 2 : 4 * index + 4]  # (R, 2)
        usable = (one[:, 1] > 0) & (two[:, 1] > 0)
        draws = two[usable, 0] / two[usable, 1] - one[usable, 0] / one[usable, 1]
        low, high = np.quantile(draws, [0.025, 0.975]) if len(draws) else (math.nan, math.nan)
        changes[name] = (after.metrics[name] - before.metrics[name], float(low), float(high))
    return changes


def _resamples(num: int, seed: int) -> Iterator[np.ndarray]:
    """How often each of `num` examples is drawn, (chunk, num), in chunks that bound the memory."""
    import numpy as np

    rng = np.random.default_rng(seed)
    left = min(NUM_RESAMPLES, max(1_000, NUM_RESAMPLES * 1_000 // num))
    while left > 0:
        size = min(left, max(1, 2_000_000 // num))
        yield rng.multinomial(num, np.full(num, 1.0 / num), size=size)
        left -= size


def _sums(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Metric -> (N, 2); an example without the metric adds nothing."""
    import numpy as np

    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: np.array([row.get(name, (0.0, 0.0)) for row in rows], dtype=float) for name in names}


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator) / float(denominator) if denominator else math.nan


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _check_some_played(trajectories: Sequence[Trajectory]) -> None:
    if all(trajectory.stop_reason.is_infrastructure_failure for trajectory in trajectories):
        first = trajectories[0]
        raise RuntimeError(
            f"All {len(trajectories)} trajectories failed before the policy could act; the first one with "
            f"{first.stop_reason.value}: {first.error or 'the prompt leaves no room for a completion'}. Run "
            "`agent-r1-trl doctor` on this environment and data set."
        )
