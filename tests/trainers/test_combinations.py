"""Options against each other, drawn at random: no run depends on its layout, and a resumed run is the run itself."""

import pytest
import torch
from peft import LoraConfig

from agent_r1_trl.testing import AddEchoEnv, call, calls, say
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.effort import random_rounds
from tests.trainers.helpers import make_trainer, moving_reference, questions

MAX_STEPS = 3
ROUNDING = {"sgd": 3e-6, "adafactor": 3e-5, "adamw_torch": 3e-4}
"""How far weights of two layouts may be apart: what is scaled by its own size enlarges what is left of a small sum."""
LAYOUTS = ("padded", "grouped", "packed", "shared")
BOTH = {
    "average_tokens_across_devices": [False], "advantage_mask": [False], "cast_lm_head_to_fp32": [True],
    "chat_template_kwargs": [{"enable_thinking": False}], "dataloader_num_workers": [1], "delta": [2.0],
    "echo": [True, {"actions": ["all"], "patience": 1}], "entropy_coef": [0.01], "epsilon_high": [0.3],
    "eval_strategy": ["steps"], "family": ["llama3", "gemma4", "gptoss"], "gradient_accumulation_steps": [2],
    "gradient_checkpointing": [True, False], "importance_sampling_level": ["sequence"], "journal": [False],
    "kl_placement": ["reward"], "loss_mask": [False], "loss_unit": ["token", "turn", "trajectory"],
    "loss_type": ["grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"], "lr_scheduler_type": ["cosine"],
    "context": [{"policy": "window", "turns": 1}, "drop_observations", "step", "strip_thinking"],
    "mask_truncated_completions": [True], "max_completion_length": [60, 100], "max_concurrency": [1],
    "max_grad_norm": [0.0, 0.1], "max_invalid_calls": [0], "max_observation_tokens": [8],
    "max_tokens_per_turn": [12], "max_turns": [1, 2, 3], "min_group_size": [3], "moving_reference": [True],
    "normalize_process_rewards": [True], "num_iterations": [2], "off_policy_mask_threshold": [0.5],
    "optim": ["adamw_torch", "adafactor"], "outcome_reward_weight": [0.5], "pad_to_multiple_of": [8],
    "peft": [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}],
    "process_reward_schedule": ["linear", "cosine"], "process_reward_weight": [0.5, 0.0], "retry_failed": [1],
    "reward_funcs": [True], "rollouts_ahead": [1, 2], "scale_rewards": ["batch", "none"],
    "separate_process_advantages": [True],
    "sampling": [
        {"filter_groups": "top_p"}, {"filter_groups": "top_fraction", "filter_value": 0.5, "resample_rounds": 1},
        {"curriculum": True}, {"filter_groups": "mixed", "filter_loss_scaling": True}, {"resample_rounds": 2},
    ],
    "shuffle_dataset": [False], "steps_per_generation": [2, 4], "temperature": [0.7], "top_entropy_quantile": [0.5],
    "truncated_trajectories": ["mask", "penalise"], "turn_reward_funcs": [True], "use_bias_correction_kl": [True],
    "weight_decay": [0.1],
}  # fmt: skip
ESTIMATORS = ["dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "turn_grpo", "gigpo"]
GRPO = {"advantage_estimator": ESTIMATORS, "gamma": [0.9], "gamma_turn": [0.5], "num_generations": [2]}
PPO = {
    "advantage_estimator": ["bilevel_gae", "step_gae"], "bootstrap_truncated": [True], "cliprange_value": [0.05],
    "critic": ["adapter", "head", "model"], "critic_learning_rate": [1e-2], "critic_max_grad_norm": [0.5],
    "critic_warmup_steps": [1, 2], "gamma": [0.9], "lam": [0.5], "num_generations": [1, 2],
    "value_loss_coef": [1.0], "whiten_advantages": [False],
}  # fmt: skip


class ThirdsEnv(AddEchoEnv):
    def outcome_reward(self, trajectory):
        return len(trajectory.final_text) % 3 / 2


def talk(rng, turn):
    """Good calls, several at once, unknown and malformed ones, and answers of any length."""
    choices = [
        lambda: call(a=rng.randrange(9), b=rng.randrange(9)),
        lambda: calls(("echo", {"text": "z" * rng.randrange(1, 40)}), ("add", {"a": rng.randrange(9), "b": 1})),
        lambda: call("nothing", x=1),
        lambda: say("<tool_call>{bad</tool_call>"),
        lambda: say("x" * rng.randrange(1, 30)),
    ]
    return rng.choices(choices, [5, 2, 1, 1, 6 if turn else 2])[0]()


def by_calls(trajectory, **columns):
    return [[0.2 * len(turn.tool_results) - 0.1 * (k % 2) for k, turn in enumerate(one.turns)] for one in trajectory]


def by_length(completions, **columns):
    return [len(str(completion)) % 7 / 7 for completion in completions]


def trainer_of(folder, trainer, drawn, layout):
    options = {
        "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_steps": MAX_STEPS,
        "num_generations": 4, "save_strategy": "steps", "save_steps": 1, "update_layout": layout, **drawn,
    }  # fmt: skip
    if "peft" in options:
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], **options.pop("peft"))
        options["peft_config"] = adapter
    if options.pop("moving_reference", False):
        options |= {**moving_reference(folder.with_name("policy")), "family": "qwen3"}
    if "eval_strategy" in options:
        options |= {"eval_dataset": questions(4), "eval_steps": 1, "per_device_eval_batch_size": 4}
    functions = {"reward_funcs": by_length, "turn_reward_funcs": by_calls}
    options |= {name: [function] for name, function in functions.items() if name in options}
    return make_trainer(folder, script=talk, env=ThirdsEnv, trainer=trainer, **options)


def accepted(folder, trainer, drawn, layouts):
    """What is left of the options without those that are refused, each by its name."""
    for layout in (*layouts, *layouts):
        while True:
            try:
                trainer_of(folder, trainer, drawn, layout)
                break
            except (ValueError, NotImplementedError) as refusal:
                named = [name for name in drawn if name.replace("moving_reference", "sync_ref_model") in str(refusal)]
                assert named, refusal
                drawn = {name: value for name, value in drawn.items() if name != named[0]}
    return drawn


def weights_after(trainer, **options):
    trainer.train(**options)
    return {name: item.detach().clone() for name, item in trainer.model.named_parameters()}


@pytest.mark.fuzz
@pytest.mark.slow
def test_no_run_depends_on_its_layout_and_a_resumed_run_is_the_run(tmp_path):
    for rng in random_rounds(6):
        trainer, own = rng.choice([(MultiTurnGRPOTrainer, GRPO), (MultiTurnPPOTrainer, PPO)])
        space, folder = {**BOTH, **own}, tmp_path / str(rng.random())
        drawn = {name: rng.choice(space[name]) for name in rng.sample(sorted(space), rng.randrange(2, 9))}
        layouts = rng.sample(LAYOUTS, 2)
        drawn = accepted(folder / "none", trainer, drawn, layouts)
        print(f": {trainer.__name__}, {layouts}, {drawn}")
        whole, other = [weights_after(trainer_of(folder / layout, trainer, drawn, layout)) for layout in layouts]
        atol = ROUNDING[drawn.get("optim", "sgd")]
        torch.testing.assert_close(other, whole, rtol=0, atol=atol)
        checkpoint = folder / layouts[0] / f"checkpoint-{rng.randrange(1, MAX_STEPS)}"
        resumed = trainer_of(folder / layouts[0], trainer, drawn, layouts[0])
        torch.testing.assert_close(
            weights_after(resumed, resume_from_checkpoint=str(checkpoint)), whole, rtol=0, atol=0
        )
