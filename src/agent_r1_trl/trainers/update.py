"""TRL's GRPO trainer on the update side: micro-batches, log-probs, loss, and checkpoints between two rollouts.

prompt -> environment reset -> rollout (policy <-> tools) -> Trajectory -> rewards on tokens -> filter
       -> [batch] -> advantages -> [loss] -> [step] -> sync weights -> next rollout

TRL 1.16 names this file touches (`tests/trainers/test_trl_contract.py` checks each):

- overridden: `_prepare_inputs`, `_compute_loss`, `_get_per_token_logps_and_entropies`, `training_step`,
  `_save_checkpoint`, `_load_optimizer_and_scheduler`
- read: `_metrics`, `ref_model`, `aux_loss_enabled`, `num_iterations`, `accelerator`, `state`
- read and set: `_step`, `_buffered_inputs`, `beta`
- of the batch: `prompt_ids`, `prompt_mask`, `completion_ids`, `completion_mask`, `tool_mask`, `*per_token_logps`
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

from agent_r1_trl.critic import base_causal_lm
from agent_r1_trl.environments.factory import EnvFactory
from agent_r1_trl.trainers.config_checks import PACKED_LAYOUTS
from agent_r1_trl.trainers.rollout_state import accept_numbered_cpus, load_rollout_state, save_rollout_state
from agent_r1_trl.update.micro_batches import regroup, trim_padding
from agent_r1_trl.update.packing import pack, packed_log_probs, use_packed_attention


class UpdateTrainer(GRPOTrainer):
    """How a scored batch is trained on. TRL's methods do the work; rows are laid out for them as the arguments say."""

    env_factory: EnvFactory | None
    """Makes the environments; with None everything here is as TRL does it."""
    _rollout_seconds = 0.0
    """What this step has spent on its rollout."""
    _loss_mask: torch.Tensor | None = None
    """(B, T) while a loss with a packed layout is computed."""

    @property
    def _is_packed(self) -> bool:
        return self.env_factory is not None and self.args.update_layout in PACKED_LAYOUTS

    def _prepare_layout(self) -> None:
        """Once the models are loaded.

        Raises:
            ValueError: for a model that cannot be trained in this layout.
        """
        if not self._is_packed:
            return
        if self.aux_loss_enabled:
            raise ValueError(
                f"update_layout={self.args.update_layout!r}: the router's auxiliary loss is an average over padded "
                "rows. Set router_aux_loss_coef=0.0, or update_layout='grouped'."
            )
        use_packed_attention(base_causal_lm(self.model))
        if self.ref_model is not None:
            use_packed_attention(self.accelerator.unwrap_model(self.ref_model))

    # ---------------------------------------------------------------- micro-batches

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's next micro-batch, its rows chosen and its padding cut as `update_layout` says."""
        before = vars(self)["_buffered_inputs"]
        inputs = super()._prepare_inputs(generation_batch)
        layout, buffer = self.args.update_layout, vars(self)["_buffered_inputs"]
        if self.env_factory is None or layout in ("padded", "packed") or not self.model.training:
            return inputs
        per_generation, per_update = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        stays_in_update = per_generation % per_update == 0 or per_update % per_generation == 0
        if buffer is not before and stays_in_update:
            by_prompt = layout == "shared"
            self._buffered_inputs = regroup(buffer, steps_per_update=per_update, by_prompt=by_prompt)
            inputs = self._buffered_inputs[self._step % per_generation]
        return trim_padding(inputs) if layout == "grouped" else inputs

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """TRL's step; what it takes without the rollout is logged as `time/update_s`."""
        self._rollout_seconds = 0.0
        start = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._metrics["train"]["time/update_s"].append(time.perf_counter() - start - self._rollout_seconds)
        return loss

    # ---------------------------------------------------------------- log-probs and loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss; a KL term that already stands in the rewards does not enter it a second time."""
        beta: float = vars(self)["beta"]
        if self.env_factory is not None and self.args.kl_placement == "reward":
            self.beta = 0.0
        if self._is_packed:
            self._loss_mask = inputs["completion_mask"] * inputs["tool_mask"]  # (B, T)
            # A token that the loss leaves out gets log-prob 0: so must what it is compared with.
            inputs = {
                name: value * self._loss_mask if name.endswith("per_token_logps") and value is not None else value
                for name, value in inputs.items()
            }
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta, self._loss_mask = beta, None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple:
        """TRL's log-probs and entropies, (B, T) each; with a packed layout from a forward without padding.

        In the loss, tokens outside its mask get 0.
        """
        if not self._is_packed:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        scored = attention_mask[:, -logits_to_keep:] if self._loss_mask is None else self._loss_mask
        backbone = base_causal_lm(self.accelerator.unwrap_model(model)).base_model
        size = kwargs.get("batch_size") or len(input_ids)
        parts = []
        for chunk in zip(*(tensor.split(size) for tensor in (input_ids, attention_mask, scored)), strict=True):
            batch = pack(*chunk, share_prompts=self.args.update_layout == "shared")
            with self.accelerator.autocast():
                parts.append(packed_log_probs(model, backbone, batch))
        log_probs, entropies = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropies) if entropies[0] is not None else None, None

    def _old_logps(self, batch: dict[str, Any]) -> torch.Tensor:
        """(B, T) log-probs of the completion tokens under the policy that sampled them."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        size = self.args.per_device_train_batch_size
        with torch.no_grad():
            return self._get_per_token_logps_and_entropies(
                self.model, ids, mask, batch["completion_ids"].shape[1], batch_size=size
            )[0]

    # ---------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.env_factory is None:
            return
        is_between = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        save_rollout_state(
            Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}",
            self.accelerator.process_index,
            step=self._step,
            buffered_inputs=self._buffered_inputs if is_between else None,
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        accept_numbered_cpus()
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.env_factory is None:
            return
        state = load_rollout_state(Path(checkpoint), self.accelerator.process_index, self.accelerator.device)
        if state is not None:
            self._step, self._buffered_inputs = state["step"], state["buffered_inputs"]
