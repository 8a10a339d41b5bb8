"""Losses of GRPO steps and the credit of every estimator, in any number of processes, on rows of any length."""

import torch
from accelerate.utils import gather_object
from peft import LoraConfig

from agent_r1_trl.advantages.estimators import ESTIMATORS, Credit
from agent_r1_trl.generation import GenerationError
from agent_r1_trl.kept_ids import KeptIds
from agent_r1_trl.testing import call, say
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.distributed.critics import POLICY_FOLDER, fill, num_processes
from tests.trainers.helpers import LikelihoodTrainer, make_trainer, questions, scored_batch
from tests.trainers.test_hooks import WorldModel

NUM_STEPS = 3
POLICIES = ("full", "lora", "extra_loss", "rows", "tokens", "hooks")
BY_TOKENS = {"update_layout": "shared", "max_tokens_per_micro_batch": 500}
CRITIC_ESTIMATORS = ("gae", "bilevel_gae", "step_gae")
CREDIT_CASES = {name: {"advantage_estimator": name} for name in ESTIMATORS} | {
    "parts": {"separate_process_advantages": True, "normalize_process_rewards": True},
    "batch_scale": {"scale_rewards": "batch"},
    "kl_in_rewards": {"advantage_estimator": "reinforce_pp", "kl_placement": "reward", "beta": 0.1},
}


def ragged(rng, turn):
    """Up to three calls, then a text; some answers never come."""
    if rng.random() < 0.05:
        raise GenerationError("gone")
    if rng.random() < 0.6:
        return call(a=rng.choice([1, 10**6, 10**12]), b=rng.randrange(3))
    return say("x" * rng.randrange(1, 30))


class Hooks(WorldModel):
    """Also log-probs of the trajectories that called a tool after another prompt: more of them on one rank."""

    def extra_columns(self, output, trajectories, rows):
        columns = super().extra_columns(output, trajectories, rows)
        columns["again"] = torch.zeros(output["completion_mask"].shape)
        chosen = [place for place, row in enumerate(rows.rows) if max(row.turn_ids, default=0) > 0]
        completions = [rows.rows[place].completion_ids for place in chosen]
        log_probs = self.trainer.score_tokens([[5, 6]] * len(chosen), completions)
        columns["again"][chosen, : log_probs.shape[1]] = log_probs
        return columns


class Masked:
    """Says that every token was drawn from two or three ids."""

    def __init__(self, inner):
        self.inner = inner

    async def generate(self, request):
        generation = await self.inner.generate(request)
        generation.kept_ids = KeptIds.of(
            [[token, (token + 1) % 200, (token + 77) % 200][: 2 + token % 2] for token in generation.token_ids]
        )
        return generation


def likely(inputs):
    """Advantages out of a column."""
    return Credit(advantages=inputs.columns["again"] + inputs.returns.nan_to_num().unsqueeze(1))


def second(returns):
    """Keeps the group that is on both ranks."""
    return torch.arange(len(returns)) == 1


HOOKS = {"advantage_estimator": likely, "sampling.filter_groups": second, "top_k": 3, "wrap_generator": Masked}


def _lora():
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def losses_and_signals(policy, output_dir):
    """Per step (loss, gradient norm) and, of one policy, `echo/*`.

    Two micro-batches make a step; one of its three groups is on both ranks.
    """
    trainer = make_trainer(
        output_dir,
        model=str(output_dir / POLICY_FOLDER),
        script=ragged,
        trainer=LikelihoodTrainer if policy in ("extra_loss", "rows", "tokens") else MultiTurnGRPOTrainer,
        peft_config=_lora() if policy == "lora" else None,
        num_generations=8,
        per_device_train_batch_size=12 // num_processes(),
        gradient_accumulation_steps=2,
        max_turns=4,
        max_steps=NUM_STEPS,
        beta=0.04,
        loss_type="grpo" if policy in ("rows", "tokens") else "dapo",  # a mean over rows, of which some are lost
        loss_unit="turn" if policy == "lora" else None,
        echo=True,
        callbacks=[Hooks()] if policy == "hooks" else [],
        **(BY_TOKENS if policy in ("tokens", "hooks") else {}),
        **(HOOKS if policy == "hooks" else {}),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    signals = [{name: step[name] for name in step if name.startswith("echo/")} for step in steps]
    return [(step["loss"], step["grad_norm"]) for step in steps], signals


def credit(case, output_dir):
    """Per row of all ranks: what identifies it, its rank and padded width, its advantages and (with a critic) returns.

    The middle one of three groups is on both ranks.
    """
    options = CREDIT_CASES[case]
    has_critic = options.get("advantage_estimator") in CRITIC_ESTIMATORS
    of_critic = {"critic": "head", "bootstrap_truncated": True, "gamma": 0.9}
    if options.get("advantage_estimator") == "step_gae":
        of_critic["gamma_turn"] = of_critic.pop("gamma")
    trainer = make_trainer(
        output_dir,
        model=str(output_dir / POLICY_FOLDER),
        script=ragged,
        trainer=MultiTurnPPOTrainer if has_critic else MultiTurnGRPOTrainer,
        train_dataset=questions(12),
        num_generations=1 if has_critic else 4,
        per_device_train_batch_size=12 // num_processes(),
        max_completion_length=400,
        max_turns=4,
        peft_config=_lora() if "beta" in options else None,
        **(of_critic if has_critic else {}),
        **options,
    )
    fill(trainer.model)
    batch = scored_batch(trainer)
    rows = []
    for index, trajectory in enumerate(trainer.last_trajectories):
        length = len(trajectory.completion_ids)
        row = {
            "key": (trajectory.example_id, trajectory.generation),
            "rank": trainer.accelerator.process_index,
            "width": batch["completion_ids"].shape[1],
            "stop": trajectory.stop_reason.value,
            "advantages": batch["advantages"][index, :length].tolist(),
        }
        if has_critic:
            row["returns"] = batch["returns"][index, :length].tolist()
        rows.append(row)
    return gather_object(rows)
