"""Runs ahead of the update with a real sampler; each turn is scored again by the weights that it names."""

import asyncio
import copy
import itertools
import math
import random

import torch
from transformers import TrainerCallback

from agent_r1_trl.generation.base import current_slot
from agent_r1_trl.generation.sync import own_log_probs
from tests.trainers.helpers import make_trainer


class Chat:
    """Three turns."""

    def reset(self, example):
        self.rng, self.num_turns = random.Random(str(example["prompt"]) + str(current_slot.get().seed)), 0
        return example["prompt"]

    async def step(self, message):
        self.num_turns += 1
        return [{"role": "user", "content": "and?"}], 0.0, self.num_turns == 3, {}

    def outcome_reward(self, trajectory):
        return float(sum(trajectory.completion_ids) % 5)

    def close(self):
        pass


class LateChat(Chat):
    """Some first answers wait until the update does: the turn after them has later weights.

    Only for runs with `Weights`, which says what the update waits for.
    """

    awaited = math.inf
    """The micro-step whose rollout the update waits for."""

    def is_late(self):
        """Whether this answer has to wait for the update to ask for it."""
        return current_slot.get().order > LateChat.awaited

    async def step(self, message):
        waits = self.num_turns == 0 and self.rng.random() < 0.3
        while waits and self.is_late():
            await asyncio.sleep(0.01)
        return await super().step(message)


class Weights(TrainerCallback):
    """Keeps the weights of every step, and the trajectories of every rollout."""

    def __init__(self):
        self.trainer = None
        self.of_step = {}
        self.batches = []
        LateChat.awaited = math.inf

    def on_train_begin(self, args, state, control, **kwargs):
        take = self.trainer.rollouts.ahead.take

        def take_noted(rows, position):
            LateChat.awaited = position.micro_step
            return take(rows, position)

        self.trainer.rollouts.ahead.take = take_noted
        self.of_step[state.global_step] = self.weights()

    def on_step_end(self, args, state, control, **kwargs):
        self.of_step[state.global_step] = self.weights()
        self.batches.append(self.trainer.last_trajectories)

    def weights(self):
        return copy.deepcopy(self.trainer.model.state_dict())


SAMPLED = {"script": None, "env": LateChat, "max_steps": 6, "max_tokens_per_turn": 8, "num_generations": 4}


def sampled(tmp_path, **options):
    """A finished run whose turns a real policy has sampled, and what `Weights` kept of it."""
    kept = Weights()
    kept.trainer = make_trainer(tmp_path, callbacks=[kept], **{**SAMPLED, **options})
    kept.trainer.train()
    return kept


def gaps_to_named_weights(kept, model=None, temperature=1.0):
    """Of each stamp its weights, and the largest gap of its log-probs to theirs and to those of the step before."""
    model = kept.trainer.model if model is None else model
    for item in itertools.chain(*kept.batches):
        places = [place for place, is_action in enumerate(item.action_mask) if is_action]
        ids = item.prompt_ids + item.completion_ids
        stamps = [stamp for turn in item.turns for stamp in turn.versions]
        assert sum(num for _, num in stamps) == len(places)
        for version, num in stamps:
            own, places = places[:num], places[num:]
            own_in_row = [len(item.prompt_ids) + place for place in own]
            told = torch.tensor([item.logprobs[place] for place in own])
            gaps = []
            for step in (version, max(0, version - 1)):
                model.load_state_dict(kept.of_step[step])
                found = own_log_probs(model, ids, own_in_row, temperature=temperature)
                gaps.append((found - told).abs().max().item())
            yield version, *gaps
