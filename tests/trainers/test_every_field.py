"""Every field of every configuration has a line here: a check that it acts, or that it is refused and the fix works.

A new field, TRL's or ours, fails until somebody writes its line, and so does a new value of a field of ours that takes
one of some names. A field of `TrainingArguments` needs none as long as the Trainer's loop, which the trainers inherit,
reads it.
"""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import ClassVar, get_args, get_type_hints

import pytest
import transformers
from accelerate import ParallelismConfig
from transformers import Trainer, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from agent_r1_trl.features import keys_of, mappings
from agent_r1_trl.settings import OneOf
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, MultiTurnPPOConfig
from agent_r1_trl.trainers.config_checks import NEEDS, TRL_NEEDS, UNSUPPORTED_OPTIONS
from tests.test_bad_input import FIX
from tests.trainers import effects
from tests.trainers.effects import CPU
from tests.trainers.helpers import unfold

GRPO, PPO = MultiTurnGRPOConfig, MultiTurnPPOConfig


class Acts:
    """With the value, `effect` gives something else than without."""

    _without: ClassVar[dict] = {}

    def __init__(self, effect, value, config_class=GRPO, **others):
        self.effect, self.value, self.config_class, self.others = effect, value, config_class, others

    def check(self, name, folder):
        assert "." in name or self.value != self.config_class.default_of(name), "the default shows nothing"
        key = (self.effect, self.config_class, str(self.others))
        if key not in self._without:
            self._without[key] = self.effect(folder, self.config_class, **self.others)
        assert self.effect(folder, self.config_class, **self.others, **{name: self.value}) != self._without[key]


class Refused:
    """The value is refused by the field's name; without it, and with each of the fixes, it is not."""

    def __init__(self, value, *fixes, config_class=GRPO, **others):
        self.value, self.fixes, self.config_class, self.others = value, fixes, config_class, others

    def check(self, name, folder):
        with pytest.raises(ValueError, match=rf"\b{name}\b") as caught:
            self.accept({**self.others, name: self.value})
        assert FIX.search(str(caught.value)), f"no fix in: {caught.value}"
        self.accept(self.others)
        for fix in self.fixes:
            self.accept({**self.others, name: self.value, **fix})

    def accept(self, options):
        self.config_class(**unfold(CPU | options)).check_supported()


class ReadByTRL:
    """TRL's trainer, which is constructed with it, reads it."""

    def __init__(self, value, **others):
        self.value, self.others = value, others

    def check(self, name, folder):
        trainer = effects.make(folder, GRPO, **self.others, **{name: self.value})
        assert getattr(trainer.args, name) == self.value
        assert re.search(rf"args\.{name}\b", inspect.getsource(GRPOTrainer))


class SetByLaunchers:
    """The field is there so that a launcher's argument does no harm."""

    def check(self, name, folder):
        assert "Deprecated" in TrainingArguments.__dataclass_fields__[name].metadata["help"]


ENGINE = {"use_vllm": True}
SERVER = {"vllm_mode": "server"}
SERVERS = {"use_vllm": True, **SERVER}
BY_TOKEN = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
BY_SEQUENCE = {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"}
UNCORRECTED = {"use_vllm": True, "vllm_importance_sampling_correction": False}
VESPO = {"loss_type": "vespo"}
TOP_P = {"sampling.filter_groups": "top_p"}
ADAPTIVE = {"use_adaptive_entropy": True}
ONE_TURN = {"max_turns": 1}  # of two, so that every trajectory is truncated


def count(completions, **kwargs):
    return [float(len(completion[-1]["content"])) for completion in completions]


def count_by_turn(trajectory, **kwargs):
    return [[float(turn.end - turn.start) for turn in item.turns] for item in trajectory]


ELSEWHERE = """
    sampling.curriculum loss_term push.allow_secrets secrets.names secrets.patterns chat_template
    response_template failures.max_share failures.window journal journal.replay failures.save_on_signal
    resume_without outages.max_failure_rise outages.min_calls
    outages.max_wait failures.max_nonfinite_steps retry_failed echo critic_max_grad_norm use_vllm sync_ref_model
    output_dir max_steps score_check
"""
"""Fields that tests beside their features show."""

VALUES_ELSEWHERE = {
    ("critic", "adapter"): "test_critic_adapters",
    ("score_check", "warn"): "trainers/test_score_check",
    ("score_check", "off"): "trainers/test_score_check",
    ("update_layout", "padded"): "update/test_auto_layout",
}
"""Values that another file of tests shows."""

TABLE = {
    # ---- ours: rollout
    "max_turns": Acts(effects.limits, 3),
    "max_tokens_per_turn": Acts(effects.limits, 5),
    "max_observation_tokens": Acts(effects.limits, 7),
    "max_invalid_calls": Acts(effects.limits, 0),
    "context": (
        Refused("window", {"context": {"policy": "window", "turns": 2}}),
        Refused({"turn": 2}, {"context": {"policy": "step", "turns": 2}}),
    ),
    "context.policy": (
        Refused("window", {"context.turns": 2}),
        Refused("summarise", {"context.turns": 2, "context.summary_tokens": 100}),
        Refused("widow", {"context.policy": "keep"}),
    ),
    "context.turns": Refused(
        2, {"context.policy": "window"}, {"context.policy": "drop_observations"}, {"context.policy": "step"}
    ),
    "context.tokens": (
        Acts(effects.limits, 100, context={"policy": "window", "turns": 2}),
        Refused(100, {"context.policy": "window", "context.turns": 2}),
    ),
    "context.summary_tokens": Refused(100, {"context.policy": "summarise", "context.turns": 2}),
    "context.summary_prompt": (
        Acts(effects.limits, "Why?", context={"policy": "summarise", "turns": 2, "summary_tokens": 100}),
        Refused("Why?", {"context.policy": "summarise", "context.turns": 2, "context.summary_tokens": 100}),
    ),
    "max_concurrency": (Acts(effects.limits, 9), Acts(effects.engine, 9)),
    "rollout_timeout": Acts(effects.limits, 1.5),
    "reset_timeout": Acts(effects.limits, 1.5),
    "scoring_timeout": Acts(effects.limits, 1.5),
    "watchdog_interval": Acts(effects.limits, 1.5),
    "stall_timeout": Acts(effects.limits, 1.5),
    "eval_temperature": Acts(effects.evaluation, 0.5),
    "generation_batch_rows": Acts(effects.local_generator, 3),
    "servers": Refused(3, {"servers": {"urls": ["http://a:1"]}}, **SERVERS),
    "servers.urls": (Acts(effects.engine, ["http://a:1"], **SERVER), Refused(["http://a:1"], SERVERS)),
    "servers.urls_file": (
        Acts(effects.engine, "servers.txt", **SERVER),
        Refused("servers.txt", SERVERS),
        Refused("servers.txt", {"servers.urls_file": None}, **SERVERS, servers={"urls": ["http://b:1"]}),
    ),
    "servers.max_logprob_gap": (Acts(effects.sync_call, 0.3, **ENGINE), Refused(0.3, ENGINE)),
    "rollouts_ahead": Acts(effects.ahead, 2),
    "failures.min_effective_share": (
        Acts(effects.least_share, 0.5, rollouts_ahead=2),
        Refused(0.5, {"rollouts_ahead": 2}),
    ),
    "cut_turns": (Acts(effects.ahead, True, rollouts_ahead=2), Refused(True, {"rollouts_ahead": 2})),
    # ---- ours: the shape of a rollout
    "prompts_per_rollout": (Acts(effects.shape, 4), Refused(4, {"steps_per_generation": 4}, steps_per_generation=3)),
    "updates_per_rollout": (Acts(effects.shape, 4), Refused(4, {"num_iterations": 2}, num_iterations=3)),
    # ---- ours: dynamic sampling and curriculum
    "sampling": (Refused(True, {"sampling": {"curriculum": True}}), Refused({"rounds": 1}, {"sampling": {}})),
    "sampling.resample_rounds": (
        Refused(2, {"num_generations": 2}, config_class=PPO, num_generations=1),
        Refused(-1, {"sampling.resample_rounds": 0}),
    ),
    "sampling.pass_reward": (
        Refused(1.0, {"sampling.resample_rounds": 2}, {"sampling.curriculum": True}),
        Refused(float("nan"), {"sampling.pass_reward": 1.0}, sampling={"curriculum": True}),
    ),
    "sampling.curriculum_floor": (
        Refused(0.5, {"sampling.curriculum": True}),
        Refused(0.0, {"sampling.curriculum_floor": 0.1}, sampling={"curriculum": True}),
    ),
    "sampling.curriculum_rate": (
        Refused(0.3, {"sampling.curriculum": True}),
        Refused(1.5, {"sampling.curriculum_rate": 1.0}, sampling={"curriculum": True}),
    ),
    # ---- ours: rewards, advantages, loss
    "truncated_trajectories": (
        Acts(effects.batch, "mask", **ONE_TURN),
        Acts(effects.batch, "penalise", **ONE_TURN),
    ),
    "truncation_penalty": (
        Acts(effects.batch, -3.0, truncated_trajectories="penalise", **ONE_TURN),
        Refused(-3.0, {"truncated_trajectories": "penalise"}),
        Refused(-3.0, {"truncated_trajectories": "penalise"}, truncated_trajectories="mask"),
    ),
    "process_reward_weight": Acts(effects.batch, 0.5),
    "outcome_reward_weight": Acts(effects.batch, 0.5),
    "process_reward_schedule": (Acts(effects.batch, "linear"), Acts(effects.batch, "cosine")),
    "normalize_process_rewards": Acts(effects.batch, True),
    "turn_reward_weights": Acts(effects.batch, [0.5], turn_reward_funcs=[count_by_turn]),
    "advantage_estimator": Acts(effects.batch, "rloo"),
    "separate_process_advantages": Acts(effects.batch, True),
    "gamma": (
        Acts(effects.batch, 0.5, advantage_estimator="reinforce_pp"),
        Refused(0.5, {"advantage_estimator": "reinforce_pp"}),
    ),
    "gamma_turn": (
        Acts(effects.batch, 0.5, advantage_estimator="gigpo"),
        Refused(0.5, {"advantage_estimator": "gigpo"}, advantage_estimator="rloo"),
        Refused(0.5, {"advantage_estimator": "bilevel_gae"}, config_class=PPO),
    ),
    "step_weight": (
        Acts(effects.batch, 0.5, advantage_estimator="gigpo"),
        Refused(0.5, {"advantage_estimator": "gigpo"}),
    ),
    "kl_placement": (
        Acts(effects.batch, "reward", advantage_estimator="reinforce_pp", beta=0.1),
        Refused("reward", {"beta": 0.1}, advantage_estimator="reinforce_pp"),
        Refused("reward", {"advantage_estimator": "reinforce_pp"}, beta=0.1),
    ),
    "loss_mask": (Acts(effects.batch, False), Refused(False, {"advantage_mask": False}, config_class=PPO)),
    "advantage_mask": Acts(effects.batch, False, advantage_estimator="reinforce_pp"),
    "loss_unit": (
        Refused("row", {"loss_unit": "token"}, {"loss_unit": "turn"}),
        Acts(effects.loss, "token", loss_type="grpo"),
        Acts(effects.loss, "turn"),
        Acts(effects.loss, "trajectory"),
    ),
    "importance_sampling_unit": (
        Acts(effects.batch, "turn", **BY_TOKEN),
        Acts(effects.batch, "sequence", **BY_TOKEN),
        Acts(effects.batch, "token", **BY_SEQUENCE),
        Refused("turn", ENGINE),
        Refused("turn", {"vllm_importance_sampling_correction": True}, **UNCORRECTED),
        Refused("turn", {"loss_type": "dapo"}, **BY_TOKEN, **VESPO),
    ),
    "update_layout": (
        Acts(effects.layout, "grouped"),
        Acts(effects.layout, "packed"),
        Acts(effects.layout, "shared"),
    ),
    "max_tokens_per_micro_batch": (
        Refused(100, {"update_layout": "packed"}, {"update_layout": "shared"}, update_layout="padded"),
        Refused(100, {"max_tokens_per_micro_batch": None}, update_layout="packed", loss_type="bnpo"),
        Refused(0, {"max_tokens_per_micro_batch": 1}, update_layout="packed"),
        Refused(100, {"optim": "adamw_torch"}, update_layout="packed", optim="lomo"),
        Refused(
            100,
            {"steps_per_generation": 4},
            update_layout="packed",
            steps_per_generation=3,
            gradient_accumulation_steps=2,
        ),
    ),
    "progress": tuple(Acts(effects.shown_by, value) for value in ("lines", "transformers", "none")),
    "record_trajectories": Acts(effects.store, "none"),
    "watch_by": Acts(effects.watched, "id"),
    "push.trajectories": Refused(True, {"record_trajectories": "jsonl"}, record_trajectories="none"),
    "push": Refused(True, {"push": {"trajectories": True}}),
    "push.critic": Refused(True, {"push.critic": False}),
    "secrets": Refused(3, {"secrets": {"names": "^pin$"}}),
    "failures": Refused({"share": 0.5}, {"failures": {"max_share": 0.4}}),
    "outages": Refused(3, {"outages": {"max_wait": 3}}),
    "echo.actions": Refused(["rollback"], {"save_strategy": "steps"}, {"echo.actions": ["stop"]}, save_strategy="no"),
    "echo.dry_run": Refused(True, {"echo.actions": ["all"]}),
    "echo.patience": Refused(5, {"echo.actions": ["all"]}),
    "echo.max_rollbacks": Refused(5, {"echo.actions": ["all"]}),
    "echo.rate_factor": Refused(0.1, {"echo.actions": ["learning_rate"]}),
    "echo.rate_steps": Refused(5, {"echo.actions": ["learning_rate"]}),
    "journal.keep": Refused(-1, {"journal.keep": 0}),
    "min_group_size": Refused(9, {"num_generations": 10, "per_device_train_batch_size": 10}),
    # ---- ours: signals of collapse
    "echo.thresholds": Refused({"windows": 20}, {"echo.thresholds": {"window": 20}}),
    # ---- ours: which groups are trained on
    "sampling.filter_groups": (
        Acts(effects.batch, "top_p"),
        Refused("top_p", {"num_generations": 2}, config_class=PPO, num_generations=1),
        Refused("best", {"sampling.filter_groups": "top_p"}),
    ),
    "sampling.filter_value": (Acts(effects.filtered, 0.1, **TOP_P), Refused(0.1, TOP_P)),
    "sampling.filter_when": (Acts(effects.filtered, 50.0, **TOP_P), Refused(0.5, TOP_P)),
    "sampling.filter_loss_scaling": Refused(True, TOP_P),
    # ---- ours: the critic
    "lam": Acts(effects.batch, 0.5, PPO),
    "lam_turn": (
        Acts(effects.batch, 0.5, PPO, advantage_estimator="bilevel_gae"),
        Refused(0.5, {"advantage_estimator": "bilevel_gae"}, config_class=PPO),
    ),
    "whiten_advantages": Acts(effects.batch, False, PPO),
    "bootstrap_truncated": (
        Acts(effects.batch, True, PPO, **ONE_TURN),
        Refused(True, {"truncated_trajectories": "keep"}, config_class=PPO, truncated_trajectories="mask"),
    ),
    "critic": (Acts(effects.critic, "head", PPO), Acts(effects.critic, "model", PPO)),
    "critic_learning_rate": Acts(effects.critic, 0.5, PPO),
    "critic_warmup_steps": Acts(effects.critic, 3, PPO),
    "value_loss_coef": Acts(effects.loss, 5.0, PPO),
    "cliprange_value": Acts(effects.loss, 1e-4, PPO),
    # ---- TRL's: model and data
    "model_init_kwargs": ReadByTRL({"dtype": "float32"}),
    "trust_remote_code": (ReadByTRL(True), Acts(effects.engine, True)),
    "router_aux_loss_coef": ReadByTRL(0.0),
    "disable_dropout": ReadByTRL(False),
    "cast_lm_head_to_fp32": ReadByTRL(True),
    "num_generations": (Acts(effects.requests, 2), Refused(1, {"advantage_estimator": "reinforce_pp"})),
    "num_generations_eval": Acts(effects.evaluation, 2),
    "max_completion_length": (Acts(effects.limits, 99), Refused(None, {"max_completion_length": 512})),
    "ds3_gather_for_generation": Acts(effects.gather_call, False),
    "shuffle_dataset": Acts(effects.requests, False),
    "pad_to_multiple_of": (
        Acts(effects.batch, 256),
        Refused(8, {"update_layout": "padded"}, update_layout="grouped"),
        Refused(8, {"update_layout": "padded"}, update_layout="shared"),
    ),
    "generation_batch_size": Acts(effects.requests, 16),
    "steps_per_generation": Acts(effects.requests, 2),
    # ---- TRL's: sampling
    "temperature": (Acts(effects.requests, 0.5), Acts(effects.loss, 0.5), Refused(0.0, {"temperature": 1.0})),
    "top_p": (
        Acts(effects.requests, 0.5),
        Acts(effects.evaluation, 0.5, eval_temperature=0.7),
        Refused(0.5, {"top_k": 20}, **ENGINE),
        Refused(0.0, {"top_p": 1.0}),
    ),
    "top_k": (
        Acts(effects.requests, 5),
        Acts(effects.evaluation, 5, eval_temperature=0.7),
        Refused(-2, {"top_k": 0}),
    ),
    "min_p": (
        Acts(effects.requests, 0.1),
        Acts(effects.evaluation, 0.1, eval_temperature=0.7),
        Refused(0.1, {"top_k": 20}, **ENGINE),
        Refused(1.5, {"min_p": None}),
    ),
    "repetition_penalty": (
        Acts(effects.requests, 1.2),
        Acts(effects.evaluation, 1.2, eval_temperature=0.7),
        Refused(1.2, {"vllm_importance_sampling_correction": False}, **ENGINE),
        Refused(0.0, {"repetition_penalty": 1.0}),
    ),
    "generation_kwargs": Refused({"num_beams": 2}, {"generation_kwargs": {}}),
    "chat_template_kwargs": Acts(effects.chat, {"enable_thinking": False}),
    "cache_implementation": Refused("static"),
    "use_transformers_continuous_batching": Refused(True),
    "transformers_continuous_batching_config": Refused({"max_memory_percent": 0.4}),
    "use_transformers_paged": Refused(True),
    "max_tool_calling_iterations": (Acts(effects.limits, 2), Refused(-1, {"max_tool_calling_iterations": 0})),
    # ---- TRL's: vLLM
    "vllm_mode": (Acts(effects.engine, "server"), Refused("serve", SERVER, **ENGINE)),
    "vllm_model_impl": (
        Acts(effects.engine, "transformers"),
        Refused("transformers", {"vllm_mode": "colocate"}, **SERVERS),
    ),
    "vllm_dtype": (
        Acts(effects.engine, "float16"),
        Acts(effects.engine, "bfloat16"),
        Acts(effects.engine, "float32"),
        Refused("int8", {"vllm_dtype": "bfloat16"}, **ENGINE),
        Refused("float16", {"vllm_mode": "colocate"}, **SERVERS),
    ),
    "vllm_enable_sleep_mode": Acts(effects.engine, True),
    "vllm_structured_outputs_regex": Refused("[0-9]+", {"use_vllm": False}, **ENGINE),
    "vllm_server_base_url": (
        Acts(effects.engine, "http://a:1", **SERVER),
        Refused("http://a:1", SERVER, **ENGINE),
        Refused("http://a:1", {"servers.urls": None}, **SERVERS, servers={"urls": ["http://b:1"]}),
    ),
    "vllm_server_host": (
        Acts(effects.engine, "a", **SERVER),
        Refused("a", SERVER, **ENGINE),
        Refused("a", {"vllm_server_base_url": None}, **SERVERS, vllm_server_base_url="http://b:1"),
    ),
    "vllm_server_port": (
        Acts(effects.engine, 81, **SERVER),
        Refused(81, SERVER, **ENGINE),
        Refused(81, {"vllm_server_base_url": None}, **SERVERS, vllm_server_base_url="http://b:1"),
    ),
    "vllm_server_timeout": (Acts(effects.engine, 9.0, **SERVER), Refused(9.0, SERVER, **ENGINE)),
    "vllm_group_port": Refused(9, {"vllm_group_port": 51216}, **SERVERS),
    **{
        name: (Acts(effects.engine, 9.0, **SERVER), Refused(9.0, SERVER, **ENGINE))
        for name in ("servers.health_timeout", "servers.retry_window", "servers.sync_timeout")
    },
    "servers.weight_transfer": (
        Acts(effects.engine, "folder", **SERVER),
        Acts(effects.engine, "nccl", **SERVER),
        Refused("ib", {"servers.weight_transfer": "nccl"}, **SERVERS),
        Refused("nccl", SERVER, **ENGINE),
    ),
    "servers.request_timeout": (Acts(effects.engine, 9.0, **SERVER), Acts(effects.engine, 9.0)),
    "vllm_gpu_memory_utilization": (Acts(effects.engine, 0.5), Refused(0.5, {"vllm_mode": "colocate"}, **SERVERS)),
    "vllm_max_model_length": (Acts(effects.engine, 99), Acts(effects.limits, 99, **SERVERS)),
    "vllm_tensor_parallel_size": Refused(
        2, {"use_vllm": False}, {"vllm_tensor_parallel_size": 1}, {"vllm_tensor_parallel_size": 1, **SERVER}, **ENGINE
    ),
    "vllm_importance_sampling_correction": Acts(effects.batch, False, **ENGINE),
    "vllm_importance_sampling_mode": (
        Acts(effects.batch, "token_truncate", **ENGINE),
        Refused("token_mask", {"vllm_importance_sampling_correction": True}, **UNCORRECTED),
    ),
    "vllm_importance_sampling_clip_max": (
        Acts(effects.batch, 1e-3, **BY_TOKEN),
        Refused(2.0, {"vllm_importance_sampling_correction": True}, **UNCORRECTED),
    ),
    "vllm_importance_sampling_clip_min": (
        Acts(effects.batch, 0.5, **BY_TOKEN),
        Refused(0.5, {"vllm_importance_sampling_correction": True}, **UNCORRECTED),
    ),
    "vllm_importance_sampling_cap": Acts(effects.batch, 1e-3, **BY_TOKEN),
    # ---- TRL's: loss
    "beta": Acts(effects.loss, 0.1),
    "num_iterations": Acts(effects.batch, 2),
    "epsilon": (Acts(effects.loss, 1e-3), Refused(0.1, {"loss_type": "dapo"}, loss_type="sapo")),
    "epsilon_high": (Acts(effects.loss, 1e-3), Refused(0.3, {"loss_type": "cispo"}, **VESPO)),
    "delta": (Acts(effects.loss, 1.001), Refused(1.5, {"loss_type": "grpo"}, loss_type="cispo")),
    "sapo_temperature_neg": (Acts(effects.loss, 9.0, loss_type="sapo"), Refused(2.0, {"loss_type": "sapo"})),
    "sapo_temperature_pos": (Acts(effects.loss, 9.0, loss_type="sapo"), Refused(2.0, {"loss_type": "sapo"})),
    "vespo_k_pos": (Acts(effects.loss, 1.0, **VESPO), Refused(1.0, VESPO)),
    "vespo_lambda_pos": (Acts(effects.loss, 1.0, **VESPO), Refused(1.0, VESPO)),
    "vespo_k_neg": (Acts(effects.loss, 1.0, **VESPO), Refused(1.0, VESPO)),
    "vespo_lambda_neg": (Acts(effects.loss, 1.0, **VESPO), Refused(1.0, VESPO)),
    "importance_sampling_level": Acts(effects.loss, "sequence"),
    "reward_weights": Acts(effects.batch, [3.0], reward_funcs=[count]),
    "multi_objective_aggregation": Refused("normalize_then_sum"),
    "scale_rewards": (
        Acts(effects.batch, "none"),
        Refused("batch", {"advantage_estimator": "grpo"}, advantage_estimator="dr_grpo"),
        Refused("batch", config_class=PPO),
    ),
    "loss_type": (
        Acts(effects.loss, "grpo"),
        Refused("bnpo", {"loss_type": "dr_grpo"}, advantage_estimator="dr_grpo"),
        Refused("vespo", {"vllm_importance_sampling_mode": "token_mask"}, **ENGINE),
    ),
    "mask_truncated_completions": (
        Acts(effects.batch, True, **ONE_TURN),
        Refused(True, {"truncated_trajectories": "mask"}, truncated_trajectories="penalise"),
    ),
    "ref_model_mixup_alpha": Refused(0.9, {"sync_ref_model": True, "beta": 0.1}),
    "ref_model_sync_steps": Refused(9, {"sync_ref_model": True, "beta": 0.1}),
    "top_entropy_quantile": (Acts(effects.loss, 0.2), Acts(effects.loss, 0.2, update_layout="packed")),
    "entropy_coef": (Acts(effects.loss, 0.5), Acts(effects.loss, 0.5, update_layout="packed")),
    "use_adaptive_entropy": Acts(effects.loss, True, entropy_coef=0.1),
    "entropy_coef_min": (Acts(effects.loss, 0.05, **ADAPTIVE), Refused(0.1, ADAPTIVE)),
    "entropy_coef_max": (Acts(effects.loss, 1e-3, **ADAPTIVE, entropy_target=99.0), Refused(0.1, ADAPTIVE)),
    "entropy_coef_delta": (Acts(effects.loss, 0.1, **ADAPTIVE, entropy_target=99.0), Refused(0.1, ADAPTIVE)),
    "entropy_target": (Acts(effects.loss, 99.0, **ADAPTIVE), Refused(0.1, ADAPTIVE)),
    "off_policy_mask_threshold": (
        Acts(effects.loss, 1.0, **UNCORRECTED),
        Refused(0.5, {"loss_mask": True}, {"use_vllm": False}, loss_mask=False, **ENGINE),
    ),
    "use_bias_correction_kl": (
        Acts(effects.loss, False, beta=0.1),
        Refused(False, {"beta": 0.1}),
        Refused(False, {"kl_placement": "loss"}, beta=0.1, kl_placement="reward", advantage_estimator="reinforce_pp"),
    ),
    # ---- TRL's: logging
    "log_completions": ReadByTRL(True),
    "log_multimodal": ReadByTRL(False),
    "num_completions_to_print": (ReadByTRL(2, log_completions=True), Refused(2, {"log_completions": True})),
    "log_unique_prompts": (ReadByTRL(True, log_completions=True), Refused(True, {"log_completions": True})),
    "log_completions_hub_repo": Refused("me/repo", {"log_completions": True}),
    # ---- transformers': what our methods touch, or TRL's loop does not read
    "seed": Acts(effects.requests, 8),
    "per_device_train_batch_size": Acts(effects.requests, 4),
    "per_device_eval_batch_size": Acts(effects.evaluation, 2, num_generations_eval=1),
    "gradient_accumulation_steps": Acts(effects.requests, 2),
    "remove_unused_columns": Refused(True, {"remove_unused_columns": False}),
    "auto_find_batch_size": Refused(True, {"auto_find_batch_size": False}),
    "use_liger_kernel": (ReadByTRL(False), Refused(True, config_class=PPO)),
    "fsdp": Refused("full_shard"),  # on a CPU
    "parallelism_config": Refused(ParallelismConfig(dp_replicate_size=1)),
    "train_sampling_strategy": Refused("group_by_length"),
    "length_column_name": Refused("num_words"),
    "local_rank": SetByLaunchers(),
    "label_smoothing_factor": Refused(0.1),
    "label_names": Refused(["labels"]),
    "include_for_metrics": Refused(["inputs"]),
    "batch_eval_metrics": Refused(True),
}


FIELDS = {*TABLE, *ELSEWHERE.split()}


@pytest.mark.parametrize("name", TABLE)
def test_a_field_acts_or_is_refused_with_a_fix_that_works(tmp_path, name):
    lines = TABLE[name] if isinstance(TABLE[name], tuple) else (TABLE[name],)
    for line in lines:
        line.check(name, tmp_path)


def test_every_field_of_trl_and_of_ours_has_a_line():
    inherited = {item.name for item in fields(TrainingArguments)}
    found = {item.name for kind in (GRPOConfig, GRPO, PPO) for item in fields(kind)} | set(keys_of(PPO))
    assert found - inherited - FIELDS == set(), "write a line for each: what honours it, or what refuses it"
    assert FIELDS - found == set(), "no field has this name"


def choices_of(config_class):
    """(field, value) of each field that takes one of some names, and each of these but its default."""
    groups = [("", config_class), *((f"{name}.", kind) for name, kind in mappings(config_class).items())]
    for prefix, kind in groups:
        hints = get_type_hints(kind, include_extras=True)
        for item in fields(kind):
            pending, rules = [hints[item.name]], []
            while pending:
                hint = pending.pop()
                rules += [rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, OneOf)]
                pending += get_args(hint)
            for rule in rules:
                yield from ((f"{prefix}{item.name}", value) for value in rule.choices if value != item.default)


def test_every_value_of_our_fields_that_take_one_of_some_names_has_a_line():
    shown = {
        (name, line.value)
        for name, lines in TABLE.items()
        for line in (lines if isinstance(lines, tuple) else (lines,))
        if isinstance(line, Acts) and isinstance(line.value, str)
    }
    found = {item for kind in (GRPO, PPO) for item in choices_of(kind)}
    assert {("truncated_trajectories", "penalise"), ("servers.weight_transfer", "nccl")} <= found
    missing = sorted(found - shown - VALUES_ELSEWHERE.keys())
    assert not missing, "write a line for each: what it does that the default does not"
    assert VALUES_ELSEWHERE.keys() <= found - shown, "no field has this value, or the table shows it"
    for (name, value), file in VALUES_ELSEWHERE.items():
        text = (Path(__file__).parents[1] / f"{file}.py").read_text(encoding="utf-8")
        assert name in text and f'"{value}"' in text


def test_every_other_field_of_transformers_is_read_by_the_loop_that_is_inherited():
    folder = Path(transformers.__file__).parent
    files = [*folder.glob("trainer*.py"), *folder.glob("integrations/*.py"), folder / "training_args.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in files) + inspect.getsource(GRPOTrainer)
    text = text.replace(inspect.getsource(inspect.getmodule(Trainer)), _inherited_source())
    names = {item.name for item in fields(TrainingArguments)} - FIELDS
    names = {name.replace("activation_", "gradient_") for name in names}  # of transformers 5.23, which sets both alike
    assert {name for name in names if not re.search(rf"\b(args|self)\.{name}\b", text)} == set()


def _inherited_source():
    """The Trainer's methods that run in our trainer: those that nothing overrides without calling them."""
    mro = MultiTurnGRPOTrainer.__mro__
    below = mro[: mro.index(Trainer)]
    texts = []
    for name, method in vars(Trainer).items():
        overrides = [vars(kind)[name] for kind in below if name in vars(kind)]
        if inspect.isfunction(method) and all(f"super().{name}(" in inspect.getsource(item) for item in overrides):
            texts.append(inspect.getsource(method))
    return "".join(texts)


def test_whatever_the_checks_know_has_a_refusal_in_the_table():
    refused = {
        name
        for name, lines in TABLE.items()
        if any(isinstance(line, Refused) for line in (lines if isinstance(lines, tuple) else (lines,)))
    }
    waiting = {name for need in (*NEEDS, *TRL_NEEDS) for name in need.names.split()}
    assert {*UNSUPPORTED_OPTIONS, *waiting} - refused == set()


def test_a_reference_that_follows_needs_a_weight(tmp_path):
    with pytest.raises(ValueError, match="sync_ref_model=True"):
        effects.make(tmp_path, GRPO, sync_ref_model=True)
