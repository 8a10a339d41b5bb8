"""`MultiTurnPPOTrainer`: a critic, and credit for every turn by generalised advantage estimation.

The policy loss stays TRL's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import DistributedType, gather_object
from peft import PeftModel
from torch import nn
from trl.trainer.callbacks import SyncRefModelCallback

from agent_r1_trl.critic.attach import (
    attach_critic,
    base_causal_lm,
    critic_parameters,
    enable_critic_gradients,
    is_critic_name,
    load_critic,
    save_critic,
    set_detached,
)
from agent_r1_trl.trainers.config import AGENT_R1, MultiTurnPPOConfig
from agent_r1_trl.trainers.dropout import disable_noise
from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer
from agent_r1_trl.trainers.rollout_batch import UpdateBatch
from agent_r1_trl.trajectory import Trajectory
from agent_r1_trl.update.batches import whole_rows, with_one_more
from agent_r1_trl.update.entries import Entries, Inputs
from agent_r1_trl.update.losses import explained_variance, value_loss
from agent_r1_trl.update.rows import TrainingRows, pad_lists

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.nn.modules.module import _IncompatibleKeys
    from transformers import PreTrainedModel

# -------------------------------------------------------------------- what cannot be combined


def check_optimizer_setup(args: MultiTurnPPOConfig, accelerator: Accelerator) -> None:
    """Refuse what would train the critic otherwise than the arguments say.

    Raises:
        ValueError: names the argument, the rule and the fix.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None:
        check_deepspeed_config(plugin.deepspeed_config, args)
    if clips_apart(accelerator):
        return
    if args.critic_max_grad_norm is not None:
        raise ValueError(
            f"critic_max_grad_norm={args.critic_max_grad_norm} with DeepSpeed, which clips one norm over all "
            "parameters. Remove critic_max_grad_norm; max_grad_norm then limits policy and critic together."
        )
    if args.max_grad_norm > 0:
        warnings.warn(
            f"DeepSpeed clips one gradient norm over policy and critic together (max_grad_norm={args.max_grad_norm}), "
            "so a large gradient of the critic makes the policy's step smaller. max_grad_norm=0 switches it off.",
            stacklevel=2,
        )


def check_deepspeed_config(config: dict[str, Any], args: MultiTurnPPOConfig) -> None:
    """Refuse a DeepSpeed file that makes an optimizer or schedule of its own, where the critic's would differ.

    Raises:
        ValueError: the critic has a learning rate or a warm-up, which DeepSpeed's optimizer or schedule would not see.
    """
    settings = {name: getattr(args, name) for name in ("critic_learning_rate", "critic_warmup_steps")}
    asked = [f"{name}={value}" for name, value in settings.items() if value]
    section = next((name for name in ("optimizer", "scheduler") if name in config), None)
    if section and asked:
        raise ValueError(
            f"{asked[0]} with a DeepSpeed configuration that has {section!r}: DeepSpeed's own {section} treats all "
            f"parameters alike. Remove {section!r} from the DeepSpeed configuration and set learning_rate, "
            "weight_decay, optim and lr_scheduler_type in the training arguments."
        )


# -------------------------------------------------------------------- groups


def split_by_role(
    optimizer: torch.optim.Optimizer, critic: Iterable[nn.Parameter], rate: float | None, *, has_schedule: bool
) -> None:
    """Split every parameter group by `role`, and add the critic's parameters that a user's optimizer does not know.

    The critic's learning rate is `rate`, or that of the groups. With `has_schedule` a scheduler holds a rate for each
    of the present groups.

    Raises:
        ValueError: the groups must change, and a scheduler came along.
    """
    own = {id(parameter): parameter for parameter in critic if parameter.requires_grad}
    before, groups = list(optimizer.param_groups), []
    for group in before:
        members = {"policy": [p for p in group["params"] if id(p) not in own], "critic": []}
        members["critic"] = [own.pop(id(p)) for p in group["params"] if id(p) in own]
        parts = [(role, parameters) for role, parameters in members.items() if parameters]
        groups += [{**group, "params": parameters, "role": role} for role, parameters in parts]
    if has_schedule and (own or len(groups) != len(before) or rate is not None):
        raise ValueError(
            "A scheduler of your own (optimizers=(..., scheduler), or trainer.lr_scheduler) has no rate for the "
            "critic. Set only trainer.optimizer (or optimizers=(optimizer, None)) and lr_scheduler_type."
        )
    optimizer.param_groups[:] = groups
    if own:
        optimizer.add_param_group({"params": list(own.values()), "role": "critic", "lr": before[0]["lr"]})
    for group in optimizer.param_groups:
        if group["role"] == "critic" and rate is not None:
            group["lr"] = rate


# -------------------------------------------------------------------- the step


def parameters_by_role(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Policy's and critic's parameters that have a gradient."""
    policy, critic = [], []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if is_critic_name(name):
            critic.append(parameter)
        else:
            policy.append(parameter)
    return policy, critic


def clips_apart(accelerator: Accelerator) -> bool:
    """Whether gradients are ours to clip, and not DeepSpeed's."""
    return accelerator.distributed_type != DistributedType.DEEPSPEED


def clip_by_role(
    model: nn.Module, args: MultiTurnPPOConfig, accelerator: Accelerator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip policy and critic, each by its own norm; returns both norms before clipping. A limit of 0 does not clip."""
    policy, critic = parameters_by_role(model)
    limit = args.max_grad_norm if args.critic_max_grad_norm is None else args.critic_max_grad_norm
    # The accelerator takes mixed precision's scale off the gradients, once for all of them.
    policy_norm = accelerator.clip_grad_norm_(policy, args.max_grad_norm or float("inf"))
    return policy_norm, nn.utils.clip_grad_norm_(critic, limit or float("inf"))


@contextlib.contextmanager
def policy_rate_at_zero(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """For DeepSpeed, which makes the optimizer step inside the backward pass, from gradients of its own."""
    groups = [group for group in optimizer.param_groups if group.get("role") == "policy"]
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


class SyncPolicyCallback(SyncRefModelCallback):
    """TRL's `sync_ref_model`, for a model that also holds a critic: the reference follows the policy alone."""

    @staticmethod
    def sync_target_model(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        """Move the reference towards the policy."""
        policy = [parameter for name, parameter in model.named_parameters() if not is_critic_name(name)]
        SyncRefModelCallback.sync_target_model(SimpleNamespace(parameters=lambda: policy), target_model, alpha)


# -------------------------------------------------------------------- the trainer


class MultiTurnPPOTrainer(MultiTurnTrainer):
    """PPO for agents (Agent-R1, arXiv 2511.14460; PPO, arXiv 1707.06347; GAE, arXiv 1506.02438).

    Advantages come from a critic instead of a group, so one trajectory per prompt is enough and every turn can earn
    its own credit. With no `env`, `tools` or `environment_factory`, prompts are answered in one turn.

    Args:
        critic_model: for `critic="model"`: a backbone (`AutoModel`) that shares the policy's tokenizer.
        model: as for `MultiTurnTrainer`, like every argument not named here.

    For example:

        trainer = MultiTurnPPOTrainer(
            model="Qwen/Qwen2.5-1.5B-Instruct", args=MultiTurnPPOConfig(output_dir="out"), env=MyEnv,
            train_dataset=dataset, peft_config=LoraConfig(),
        )
        trainer.train()
    """

    config_class = MultiTurnPPOConfig
    _name = "MultiTurnPPO"
    _paper: ClassVar[dict[str, str]] = AGENT_R1

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        *args: Any,
        critic_model: PreTrainedModel | None = None,
        **kwargs: Any,
    ):
        super().__init__(model, *args, **kwargs)
        check_optimizer_setup(self.args, self.accelerator)
        self._value_sums: dict[str, Any] = {}
        """Mode -> sums of the value loss, of its clipped tokens and of all its tokens since the last log."""
        self.critic_kind = self.args.critic or ("adapter" if isinstance(self.model, PeftModel) else "model")
        attach_critic(self.model, self.critic_kind, critic_model=critic_model)
        if self.critic_kind == "model":
            backbone = base_causal_lm(self.model).critic_backbone
            self.rollouts.fix_rotary_embeddings_of(backbone)
            self.layout.prepare(backbone, name="critic_model", autocast=self.accelerator.autocast)
        if self.args.disable_dropout:  # TRL did so before there was a critic
            disable_noise(self.model)
        if (callback := self.pop_callback(SyncRefModelCallback)) is not None:
            self.add_callback(SyncPolicyCallback(callback.ref_model, callback.accelerator))
        self._refresh_critic()

    @property
    def is_warming_up(self) -> bool:
        """Whether the policy is still held fixed while the critic learns."""
        return self.state.global_step < self.args.critic_warmup_steps

    def _refresh_critic(self) -> None:
        enable_critic_gradients(self.model)
        set_detached(self.model, self.is_warming_up)

    # ---------------------------------------------------------------- values and advantages

    def _advantages(self, output: Inputs, batch: UpdateBatch, columns: Inputs) -> Entries:
        self._refresh_critic()  # TRL's reference pass froze the critic's adapter
        rows, places = batch.training_rows, output["completion_mask"]
        values, bootstrap = self._old_values(output, batch.trajectories, rows)
        in_time = rows.to_time(values)
        credit, mask = self._estimate(output, batch, columns, values=in_time, bootstrap_values=bootstrap)
        assert credit.returns is not None
        self._log_values(in_time, credit.returns, mask)
        return {
            "advantages": rows.to_rows(credit.advantages, places),
            "returns": rows.to_rows(credit.returns, places),
            "value_mask": rows.to_rows(mask, places),
            "old_values": values,
            "num_value_items": self.accelerator.gather(mask.sum()).sum(),
        }

    def _old_values(
        self, inputs: Inputs, trajectories: list[Trajectory], rows: TrainingRows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(R, T) values of completion tokens, and (B,) of what truncated trajectories would have gone on from."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        columns: Inputs = {name: inputs[name] for name in names}
        is_truncated = torch.tensor([t.stop_reason.is_truncated for t in trajectories])
        has_more = torch.zeros(len(rows), dtype=torch.bool)
        has_more[rows.last] = is_truncated
        values = self._score_values(columns, has_more)  # (R, T + 1)
        if not self.args.bootstrap_truncated:
            return values[:, :-1], None
        ends = columns["completion_mask"].sum(dim=1, keepdim=True)  # (R, 1) the column behind the last valid token
        behind = values.gather(1, ends).squeeze(1)[rows.last]  # (B,)
        self._read_open_contexts(behind, trajectories)
        return values[:, :-1], torch.where(is_truncated.to(behind.device), behind, torch.zeros_like(behind))

    def _score_values(self, columns: Inputs, has_more: torch.Tensor) -> torch.Tensor:
        """(R, T + 1) values of completion tokens, and behind the last one of the rows that `has_more`, (R,)."""
        size = self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
        with torch.no_grad(), self.accelerator.autocast():  # as in the loss
            if self.layout.is_packed:  # V of a token after the last one is that of the state behind it
                longer = with_one_more(columns, has_more)
                chosen = self.layout.scoring_size(size)
                return self.layout.values(self.model, *whole_rows(longer), longer["completion_mask"], chosen)
            chunks = []
            for start in range(0, len(has_more), size):
                ids, mask = whole_rows({name: column[start : start + size] for name, column in columns.items()})
                chunks.append(self.model(input_ids=ids, attention_mask=mask, values_only=True).state_values)
            # V of a token is read one position before it.
            return torch.cat(chunks)[:, -columns["completion_mask"].shape[1] - 1 :]

    def _read_open_contexts(self, behind: torch.Tensor, trajectories: list[Trajectory]) -> None:
        """Put into `behind`, (B,), the value at the end of contexts that a limit ended after they were rewritten.

        With contexts that are rewritten all ranks must call it, and make equally many forward passes.
        """
        if self.args.context.policy == "keep":
            return
        opened_ids = [item.open_context for item in trajectories]
        contexts = {index: ids for index, ids in enumerate(opened_ids) if ids is not None}
        num = max(gather_object([len(contexts)]))
        if num == 0:
            return
        filled = [*contexts.values(), *[[self._tokenizer.pad_token_id]] * (num - len(contexts))]
        width = max(map(len, filled))
        ids = pad_lists(filled, 0, length=width, dtype=torch.long, side="left").to(behind.device)
        ones = [[1] * len(context) for context in filled]
        mask = pad_lists(ones, 0, length=width, dtype=torch.long, side="left").to(behind.device)
        opened: Inputs = {
            "prompt_ids": ids,
            "prompt_mask": mask,
            "completion_ids": ids[:, :0],
            "completion_mask": mask[:, :0],
        }
        values = self._score_values(opened, torch.ones(num, dtype=torch.bool))[:, 0]
        behind[list(contexts)] = values[: len(contexts)].to(behind)

    def _log_values(self, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """`critic/*` over the action tokens of all ranks."""
        kept = torch.stack([values[mask].double(), returns[mask].double()], dim=1)  # (n, 2), n differs between ranks
        kept = torch.cat([kept, torch.ones_like(kept[:, :1])], dim=1)
        kept = self.accelerator.gather(self.accelerator.pad_across_processes(kept, dim=0))
        values, returns, count = kept.unbind(dim=1)
        if not count.any():
            return
        is_kept = count > 0
        metrics = {
            "value_mean": values[is_kept].mean(),
            "return_mean": returns[is_kept].mean(),
            "return_std": returns[is_kept].std(correction=0),
            "explained_variance": explained_variance(values, returns, is_kept),
        }
        self.add_metrics({f"critic/{name}": value.item() for name, value in metrics.items()})

    # ---------------------------------------------------------------- loss

    def _compute_loss(self, model: Callable[..., Any], inputs: Inputs) -> torch.Tensor:
        collector = _ValueCollector(model, inputs["completion_ids"].shape[1])
        policy_loss = super()._compute_loss(collector, inputs)
        values, mask = collector.values, inputs["value_mask"]
        self._watch_values("values", values, mask)
        total, num_clipped = value_loss(
            values, inputs["old_values"], inputs["returns"], mask, cliprange_value=self.args.cliprange_value
        )
        loss = total / self._normaliser(inputs["num_value_items"])
        sums = torch.stack([total.detach().double(), num_clipped.double(), mask.sum().double()])
        sums = torch.where(total.detach().isfinite(), sums, 0.0)  # else nothing is trained on it
        self._value_sums[self._mode] = self._value_sums.get(self._mode, 0.0) + sums
        # During warm-up the policy's part stays in the graph (DDP wants every parameter) with weight 0.
        weight = 0.0 if self.is_warming_up and self.model.training else 1.0
        return weight * policy_loss + self.args.value_loss_coef * loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's; nothing of an evaluation that was cancelled, or not logged, is in this one's value loss."""
        self._value_sums.pop("eval", None)
        return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Also logs the value loss since the last time, over the tokens of all ranks and micro-batches."""
        self.add_metrics(self._take_value_metrics())
        super().log(logs, start_time)

    def _take_value_metrics(self) -> dict[str, float]:
        sums = self._value_sums.pop(self._mode, None)
        if sums is None:
            return {}
        loss, clipped, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        if count == 0:  # every row is out of the loss
            return {}
        return {"critic/value_loss": loss / count, "critic/value_clip_ratio": clipped / count}

    # ---------------------------------------------------------------- optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """HF's optimizer or the user's own, its groups split by role: the critic has its own learning rate."""
        optimizer = super().create_optimizer(model)
        critic = critic_parameters(self.model if model is None else model).values()
        split_by_role(optimizer, critic, self.args.critic_learning_rate, has_schedule=self.lr_scheduler is not None)
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's step, with the critic's gradients switched on again."""
        self._refresh_critic()
        is_held = self.is_warming_up and self.is_deepspeed_enabled
        with policy_rate_at_zero(self.optimizer) if is_held else contextlib.nullcontext():
            return super().training_step(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Left to `_get_grad_norm`, which the Trainer calls next, whatever `max_grad_norm` says."""
        return None if clips_apart(self.accelerator) else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> Any:
        """Clip policy and critic apart; the policy's norm is returned, the critic's logged beside it."""
        if not clips_apart(self.accelerator):
            return super()._get_grad_norm(model, grad_norm)
        policy_norm, critic_norm = clip_by_role(model, self.args, self.accelerator)
        if self._lacks_gradient(model, policy_norm, critic_norm):
            return None
        self.add_metrics({"critic/grad_norm": critic_norm.item()})
        if self.is_warming_up:  # neither weight decay nor momentum moves what has no gradient
            for parameter in parameters_by_role(model)[0]:
                parameter.grad = None
        return policy_norm

    def _get_learning_rate(self) -> float:
        """The policy's; 0 while it is held."""
        return 0.0 if self.is_warming_up else super()._get_learning_rate()

    # ---------------------------------------------------------------- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The policy as a plain model, the critic beside it in `critic/critic.safetensors`."""
        super().save_model(output_dir, _internal_call)
        save_critic(self.model, output_dir or self.args.output_dir, is_main_process=self.args.should_save)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_critic(self.model if model is None else model, Path(resume_from_checkpoint))
        self._refresh_critic()

    def _issue_warnings_after_load(self, load_result: _IncompatibleKeys) -> None:
        """Not of the critic's weights, which stand in a file of their own."""
        missing = [name for name in load_result.missing_keys if not is_critic_name(name)]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if not self.is_deepspeed_enabled:  # whose checkpoint holds the critic as well
            load_critic(self.model, Path(self.state.best_model_checkpoint))


class _ValueCollector:
    """The model as TRL's loss calls it, asked for values on the way: one outer forward holds policy and critic."""

    def __init__(self, model: Callable[..., Any], num_tokens: int):
        self.inner_model, self._num_tokens = model, num_tokens
        self.values: torch.Tensor
        """(B, T) after the call; in packed rows 0 outside both losses."""

    def __call__(self, **kwargs: Any) -> Any:
        output = self.inner_model(**kwargs, compute_values=True)
        packed = kwargs.get("packed_layout")
        if packed is None:
            self.values = output.state_values[:, -self._num_tokens - 1 : -1]
        else:
            self.values = packed.spread(output.state_values)
        return output
