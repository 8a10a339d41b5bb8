"""Small functions that show what a training argument does.

Each is called as `effect(folder, config_class, **options)` and returns something to compare. Two calls with the same
options give equal results, so a difference comes from the option alone.
"""

from unittest import mock

import torch
from peft import LoraConfig

from agent_r1_trl.generation.vllm import generator as in_process
from agent_r1_trl.generation.vllm import server as servers
from agent_r1_trl.generation.vllm.build import build_vllm
from agent_r1_trl.testing import AddEnv
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer, rollouts
from tests.trainers.helpers import make_trainer, questions, scored_batch, unfold

CPU = {"output_dir": "unused", "bf16": False, "use_cpu": True}
MESSAGES = [{"role": "user", "content": "How much is 2 + 3?"}]


class EarningEnv(AddEnv):
    """Turns earn what their call returned."""

    def process_reward(self, call, result):
        return float(result.content) / 10


def make(folder, config_class, **options):
    """A trainer in the middle of its run, whose adapter and critic do something already."""
    trainer = make_trainer(
        folder,
        trainer=MultiTurnPPOTrainer if config_class.has_critic else MultiTurnGRPOTrainer,
        env=EarningEnv,
        eval_dataset=questions(4),
        **{"peft_config": LoraConfig(r=2, task_type="CAUSAL_LM"), "per_device_eval_batch_size": 4} | options,
    )
    disturb(trainer, seed=3)
    trainer.state.max_steps, trainer.state.global_step = 4, 1
    return trainer


def disturb(trainer, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def plain(value):
    """Something that `==` compares."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


# -------------------------------------------------------------------- rollout


def limits(folder, config_class, **options):
    return config_class(**unfold(CPU | options)).rollout_limits(4096)


def shape(folder, config_class, **options):
    return config_class(**unfold(CPU | options)).rollout_shape


def chat(folder, config_class, **options):
    return make(folder, config_class, **options).chat.encode_prompt(MESSAGES)


def ahead(folder, config_class, **options):
    """What is in flight behind a rollout, and how its sampler is reached."""
    trainer = make(folder, config_class, **{"max_steps": 4, **options})
    trainer.rollouts.ahead.window.over(iter([[{"prompt": MESSAGES}] * 4] * 4), 0)
    scored_batch(trainer)
    sampler = trainer.rollouts.runner.generator
    return len(trainer.rollouts.ahead), getattr(sampler, "cuts_turns", None)


def least_share(folder, config_class, **options):
    """The effective share below which nothing begins ahead."""
    return make(folder, config_class, **options).features["age"]._min_share


def requests(folder, config_class, **options):
    """What the generator is asked in training: prompts, seeds, sampling."""
    trainer = make(folder, config_class, **options)
    scored_batch(trainer)
    return asked_of(trainer)


def evaluation(folder, config_class, **options):
    """The same in evaluation, and the number of its batches."""
    trainer = make(folder, config_class, **options)
    trainer.evaluate()
    return asked_of(trainer), len(trainer.get_eval_dataloader())


def asked_of(trainer):
    asked = trainer.rollouts.runner.generator.requests
    return sorted((item.prompt_ids, item.turn, item.seed, item.max_tokens, str(item.params)) for item in asked)


def local_generator(folder, config_class, **options):
    trainer = make(folder, config_class, script=None, **options)
    return trainer.rollouts._build(trainer.model)._max_batch_size


def engine(folder, config_class, **options):
    """What the engine in this process, or the client of the servers, is made with."""
    config = config_class(**unfold(CPU | {"use_vllm": True} | options))
    config.check_supported()
    with (
        mock.patch.object(in_process, "VLLMGenerator") as colocated,
        mock.patch.object(servers, "VLLMServerGenerator") as served,
    ):
        build_vllm("model", config, stop_token_ids=[], is_on_gpu=True)
    return str([colocated.call_args, served.call_args])


def sync_call(folder, config_class, **options):
    with mock.patch.object(rollouts, "sync_weights", return_value={}) as call:
        scored_batch(make(folder, config_class, **options))
    return call.call_args.kwargs


def gather_call(folder, config_class, **options):
    name = "unwrap_model_for_generation"
    with mock.patch.object(rollouts, name, wraps=getattr(rollouts, name)) as call:
        scored_batch(make(folder, config_class, **options))
    return call.call_args.kwargs


# -------------------------------------------------------------------- rewards, advantages, loss


def batch(folder, config_class, **options):
    """TRL's batch of one rollout, and what the trajectories earned."""
    trainer = make(folder, config_class, **options)
    tensors = {name: plain(value) for name, value in scored_batch(trainer).items()}
    return str(tensors), [item.total_reward for item in trainer.last_trajectories]


def filtered(folder, config_class, **options):
    """What the filter is set to, once it has seen that it may."""
    return str(make(folder, config_class, **options).features["group_filter"].settings)


def loss(folder, config_class, **options):
    """Two losses, off policy, in a row; the second one knows the entropy of the first."""
    trainer = make(folder, config_class, num_iterations=2, **options)
    inputs = scored_batch(trainer)
    disturb(trainer, seed=5)
    return *(trainer.compute_loss(trainer.model, inputs).item() for _ in range(2)), trainer.entropy_coef


# -------------------------------------------------------------------- the trainer


def layout(folder, config_class, **options):
    return make(folder, config_class, **options).layout.name


def store(folder, config_class, **options):
    found = make(folder, config_class, **{"record_trajectories": "jsonl"} | options).store
    return None if found is None else str(vars(found))


def shown_by(folder, config_class, **options):
    """The callbacks that print something of the run, and how."""
    trainer = make(folder, config_class, disable_tqdm=False, **options)
    kinds = {type(item).__name__: getattr(item, "_is_plain", None) for item in trainer.callback_handler.callbacks}
    return {name: is_plain for name, is_plain in kinds.items() if "Progress" in name}


def watched(folder, config_class, **options):
    return "parts" in make(folder, config_class, **options).features


def critic(folder, config_class, **options):
    trainer = make(folder, config_class, **options)
    rates = [group["lr"] for group in trainer.create_optimizer().param_groups]
    return trainer.critic_kind, trainer.is_warming_up, rates
