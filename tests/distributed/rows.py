"""Runs whose trajectories have 1 to 10 rows, in any number of processes: one rank has many rows, the other few.

Both optimizer steps train on one rollout of three groups, of which the second is on both ranks.
"""

import functools
import itertools
import random
from unittest import mock

import torch
from accelerate.utils import gather_object
from peft import LoraConfig

from agent_r1_trl.features.doors import AgentEnv
from agent_r1_trl.generation import GenerationError
from agent_r1_trl.testing import say
from agent_r1_trl.trainers import MultiTurnPPOTrainer, multi_turn
from tests.distributed import fsdp2
from tests.distributed.critics import POLICY_FOLDER, CatchGradients, fill, num_processes
from tests.features.doors.agents import post
from tests.trainers.helpers import make_trainer
from tests.trainers.test_rows import MANY, split

MAX_TURNS = 10
HALF = {"sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.7}
"""Two of three groups are kept."""
BY_TOKENS = {"max_tokens_per_micro_batch": 600}
CUT_OFF = {"truncated_trajectories": "mask", "max_turns": 7}
TWO_UPDATES = {"gradient_accumulation_steps": 1, "steps_per_generation": 2}
"""A half of the rollout in each step; otherwise all of it in both, in two micro-batches."""
PPO = {"trainer": MultiTurnPPOTrainer, "gamma": 0.95, "bootstrap_truncated": True}
CASES = {
    "padded": {"loss_type": "grpo"},
    "grouped": {"loss_type": "dr_grpo", "update_layout": "grouped", **HALF},
    "packed": {"loss_type": "dapo", "update_layout": "packed", "beta": 0.05, **CUT_OFF},
    "packed by tokens": {"loss_type": "grpo", "update_layout": "packed", **BY_TOKENS, **CUT_OFF, **TWO_UPDATES},
    "shared by tokens": {"loss_type": "dr_grpo", "update_layout": "shared", "beta": 0.05, **BY_TOKENS, **HALF},
    "turns": {"loss_type": "grpo", "update_layout": "shared", "loss_unit": "turn", **BY_TOKENS, **TWO_UPDATES},
    "adapter": {**PPO, "critic": "adapter", "beta": 0.05, "update_layout": "shared", **BY_TOKENS},
    "head": {**PPO, "critic": "head", "bootstrap_truncated": False, **HALF, **CUT_OFF},
    "head by tokens": {**PPO, "critic": "head", "update_layout": "packed", **HALF},
    "model": {**PPO, "critic": "model", "advantage_estimator": "bilevel_gae", "update_layout": "packed", **BY_TOKENS},
}
"""Rows of the tokens that stand in one row of the `whole` run."""
REWRITTEN = {
    "window": {"context.policy": "window", "context.turns": 1, "update_layout": "shared", **BY_TOKENS},
    "summarise": {
        **PPO,
        "critic": "head",
        "context.policy": "summarise",
        "context.turns": 2,
        "context.summary_tokens": 8,
    }
    | {"context.summary_prompt": "Sum up.", "update_layout": "packed", **BY_TOKENS},
    "agent": {"context": "agent", "update_layout": "shared", **BY_TOKENS},
    "agent with a critic": {**PPO, "critic": "head", "context": "agent", "update_layout": "packed", **BY_TOKENS},
}
"""Sampled from the policy, in contexts that are rewritten."""


class Talk:
    """Answers until it hears an end; an answer depends on what it heard."""

    tools = ()

    def reset(self, example):
        return example["prompt"]

    def step(self, message):
        text = str(message["content"])
        return [{"role": "user", "content": text[:3]}], 0.1 * (len(text) % 3), text.endswith("!"), {}

    def outcome_reward(self, trajectory):
        return float(len(trajectory.completion_ids) % 3)


class Chance(Talk):
    """Ends after some of the texts that a policy may sample."""

    def step(self, message):
        observations, reward, _, info = super().step(message)
        return observations, reward, random.Random(str(message["content"])).random() < 0.15, info


async def forgetful(door, example):
    """An agent that ends as `Chance` does, and keeps no more than two messages of every three turns."""
    messages = start = list(example["prompt"])
    for turn in itertools.count(1):
        status, answer, _ = await post(door, {"messages": messages})
        if status != 200:  # its budget is spent
            return 0.5
        said = answer["choices"][0]["message"]
        text = str(said["content"])
        if random.Random(text).random() < 0.15:
            return float(len(text) % 3)
        messages = [*messages, said, {"role": "user", "content": text[:3]}]
        messages = messages if turn % 3 else [*start, *messages[-2:]]


def talk(rng, turn):
    """A text of some length; few of them are the last one, and fewer never come."""
    if rng.random() < 0.02:
        raise GenerationError("gone")
    return say("x" * rng.randrange(1, 12) + "!" * (rng.random() < 0.12))


def unevenly(trajectory):
    """Each turn of the first question gets a row of its own, half of the second one's, none of the third one's."""
    share, rng = (1.0, 0.5, 0.0)[int(trajectory.example_id[1:]) % 3], random.Random(trajectory.seed)
    return split(trajectory, [turn for turn in range(1, MAX_TURNS) if rng.random() < share])


def whole(case, output_dir):
    """What `_train` returns for one row a trajectory."""
    return _train(output_dir, lambda trajectory: trajectory, **MANY, **CASES[case])


def rows(case, output_dir):
    """What `_train` returns for the same tokens in rows."""
    return _train(output_dir, unevenly, **MANY, **CASES[case])


def rewritten(case, output_dir):
    """What `_train` returns for contexts that a policy rewrites."""
    env = functools.partial(AgentEnv, forgetful) if case.startswith("agent") else Chance
    sampled = {"script": None, "env": env, "max_tokens_per_turn": 5, "generation_batch_rows": 1}
    return _train(output_dir, lambda trajectory: trajectory, **sampled, **REWRITTEN[case])


def _train(output_dir, cut, **options):
    """Per rank: losses of its micro-steps by optimizer step, rows of its micro-batches, and its trajectories.

    A trajectory is what identifies it, how many rows it has, whether it was lost, and its advantages over time. The
    same for all ranks: the gradients of the second step, and the weights after it.
    """
    catcher = CatchGradients()
    losses = []
    sizes = []
    trajectories = []
    is_ppo, lora = options.get("trainer") is MultiTurnPPOTrainer, options.get("critic") == "adapter"
    trainer = make_trainer(
        output_dir,
        model=str(output_dir / POLICY_FOLDER),
        per_device_train_batch_size=6 // num_processes(),
        num_generations=4,
        shuffle_dataset=False,
        max_steps=2,
        max_completion_length=800,
        max_grad_norm=0.0,
        optim="sgd",
        learning_rate=0.01,
        lr_scheduler_type="constant",
        callbacks=[catcher],
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
        **{"script": talk, "env": Talk, "max_turns": MAX_TURNS, "gradient_accumulation_steps": 2}
        | ({"critic_learning_rate": 0.01} if is_ppo else {})
        | ({} if "steps_per_generation" in options else {"num_iterations": 2})
        | options,
    )  # fmt: skip
    catcher.trainer = trainer
    if is_ppo:
        fill(trainer.model)
    roll_out = trainer.rollouts.generate
    prepare = trainer._prepare_inputs
    step = trainer.training_step
    record = trainer._record

    def rolled_out(*args, **kwargs):
        batch = roll_out(*args, **kwargs)
        batch.trajectories = [cut(item) for item in batch.trajectories]
        return batch

    def prepared(generation_batch):
        inputs = prepare(generation_batch)
        sizes.append([len(one["completion_ids"]) for one in inputs.get("micro_batches", [inputs])])
        return inputs

    def stepped(*args, **kwargs):
        loss = step(*args, **kwargs)
        losses.append(float(loss))
        return loss

    def recorded(batch, output):
        over_time = batch.training_rows.to_time(output["advantages"]).tolist()
        for item, credit in zip(batch.trajectories, over_time, strict=True):
            key, is_lost = (item.example_id, item.generation), item.stop_reason == "generation_error"
            trajectories.append((key, len(item.rows), is_lost, credit[: len(item.completion_ids)]))
        record(batch, output)

    trainer.rollouts.generate = rolled_out
    trainer._prepare_inputs = prepared
    trainer.training_step = stepped
    trainer._record = recorded
    with mock.patch.object(multi_turn, "training_order", _alternate):
        trainer.train()
    half = len(losses) // 2
    found = {"losses": [sum(losses[:half]), sum(losses[half:])], "sizes": sizes, "trajectories": trajectories}
    return {"ranks": gather_object([found]), "gradients": catcher.gradients, "weights": trained_weights(trainer)}


def _alternate(num_rows, **_):
    """Every second trajectory of a rank, then the others: a draw of each rank's would mix the optimizer steps."""
    return torch.arange(num_rows).view(-1, 2).T.flatten()


def trained_weights(trainer):
    """What was trained, by its name."""
    read = lambda parameter: fsdp2.whole(parameter.detach()).clone()  # noqa: E731
    if trainer.is_deepspeed_enabled:
        from deepspeed.utils import safe_get_full_fp32_param as read
    named = trainer.model.named_parameters()
    return {name: read(parameter) for name, parameter in named if parameter.requires_grad}


def trajectories_of(result):
    """Those of all ranks."""
    return list(itertools.chain.from_iterable(rank["trajectories"] for rank in result["ranks"]))
