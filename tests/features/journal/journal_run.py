"""A run that is killed and resumed again and again, for processes of its own (`test_journal_kills.py`)."""

import hashlib
import json
import os
import random
import time
from pathlib import Path

import torch

from agent_r1_trl.critic.attach import critic_parameters
from agent_r1_trl.generation import TransformersGenerator
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers.saving import ROLLOUT_STATE
from tests.trainers.helpers import make_trainer

WEIGHTS_FILE = "weights.pt"
SAMPLED_FILE = "sampled_rank{rank}.jsonl"
NUM_TURNS = 4


class SlowTalk:
    """Answers every message with words that depend on all messages so far, after a while."""

    tools = ()

    def reset(self, example):
        self.heard = hashlib.blake2b(example["id"].encode(), digest_size=4)
        self.num_turns = 0
        return example["prompt"]

    def step(self, message):
        self.heard.update(str(message.get("content")).encode())
        self.num_turns += 1
        time.sleep(0.004 * (int(self.heard.hexdigest(), 16) % 8))
        answer = [{"role": "user", "content": f"go on {self.heard.hexdigest()[:3]}"}]
        return answer, 0.1 * (int(self.heard.hexdigest(), 16) % 3), self.num_turns == NUM_TURNS, {}

    def outcome_reward(self, trajectory):
        return float(sum(trajectory.completion_ids) % 5)


class Deterministic(SlowTalk):
    """Its calls are replayed."""

    on_resume = "replay"


class Coin(Deterministic):
    """Half of the groups of two teach nothing."""

    def step(self, message):
        observations, _, is_done, info = super().step(message)
        return observations, 0.0, is_done, info

    def outcome_reward(self, trajectory):
        return float(sum(trajectory.completion_ids) % 2)


RESAMPLED = {"env": Coin, "sampling.resample_rounds": 3, "sampling.curriculum": True}
"""Options of the algorithm "resampled": GRPO with dynamic sampling."""
ROWS = {"context.policy": "window", "context.turns": 1}
"""Options of the algorithm "rows": PPO on trajectories of several rows."""
AHEAD = {"rollouts_ahead": 2}
"""Options of the algorithm "ahead": GRPO that samples two rollouts ahead of the update."""


class NotedGenerator(TransformersGenerator):
    """One row at a time; notes which turns were asked for and which were sampled."""

    path = None

    async def generate(self, request):
        self.note("asked", request.seed)
        generation = await super().generate(request)
        self.note("sampled", request.seed)
        return generation

    def note(self, what, seed):
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([os.getpid(), what, seed]) + "\n")


def newest_checkpoint(folder, world):
    """The newest one whose files are all there: those of the rollout are written last."""
    found = [
        path
        for path in folder.glob("checkpoint-*")
        if all((path / ROLLOUT_STATE.format(rank=rank)).exists() for rank in range(world))
        and (path / "trainer_state.json").exists()
    ]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)


def run(folder, algorithm="grpo", num_steps=6, rank=0, world=1, port=0, **options):
    """Train up to `num_steps` steps, from the newest checkpoint if there is one; leaves the weights behind."""
    folder = Path(folder)
    if world > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    torch.set_num_threads(1)
    checkpoint = newest_checkpoint(folder, world)
    options |= {"resampled": RESAMPLED, "rows": ROWS, "ahead": AHEAD}.get(algorithm, {})
    is_ppo = algorithm in ("ppo", "rows")
    trainer = make_trainer(
        folder,
        script=None,
        env=options.pop("env", Deterministic),
        trainer=MultiTurnPPOTrainer if is_ppo else MultiTurnGRPOTrainer,
        max_steps=num_steps,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=2,
        num_generations=1 if is_ppo else 2,
        per_device_train_batch_size=4 // world,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        max_turns=NUM_TURNS,
        max_tokens_per_turn=4,
        max_completion_length=120,
        # Which weights a turn ahead comes from depends on the moment; where they do not move, nothing else may differ.
        learning_rate=0.0 if algorithm == "ahead" else 1e-2,
        generation_batch_rows=1,
        resume_from_checkpoint="true",
        **({"critic": "head"} if is_ppo else {}),
        **options,
    )
    NotedGenerator.path = folder / SAMPLED_FILE.format(rank=rank)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    trainer.rollouts._generator = NotedGenerator(
        policy,
        pad_token_id=trainer.processing_class.pad_token_id,
        stop_token_ids=trainer.chat.stop_token_ids,
        max_batch_size=1,
    )
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    if rank == 0:
        weights = {name: value.detach().clone() for name, value in policy.state_dict().items()}
        critic = dict(critic_parameters(policy)) if is_ppo else {}
        torch.save(weights | critic, folder / "weights.tmp")
        os.replace(folder / "weights.tmp", folder / WEIGHTS_FILE)
    if world > 1:
        torch.distributed.destroy_process_group()


def sleep_before_kill(rng: random.Random, longest_s):
    """Seconds, more often short than long: much of a kill's harm is done in the first moments."""
    return longest_s * rng.random() ** 1.5
