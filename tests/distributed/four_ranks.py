"""Runs in which everything uneven comes together: `python -m tests.distributed.four_ranks OUTPUT_DIR`, in any number
of processes.

Trajectories have 1 to 5 turns, of which a context holds one or two; the environments of one question in six, all of
them on the last of four ranks, cannot start; a part of the groups is kept; the next rollout begins during the update;
each run is resumed from a checkpoint in its middle. Rank 0 writes what all ranks found to `OUTPUT_DIR/found.pt`.
"""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from agent_r1_trl.features.journal.training import fingerprint
from agent_r1_trl.testing import AddEnv, call, say
from agent_r1_trl.trainers import MultiTurnPPOTrainer
from tests.distributed.critics import POLICY_FOLDER, num_processes
from tests.distributed.rows import trained_weights
from tests.trainers.helpers import make_trainer, questions

FOUND_FILE = "found.pt"
NUM_RANKS = 4
GROUPS, GROUP_SIZE = 6, 4
SAVED_STEP, NUM_STEPS = 2, 4
LOST_GROUP = GROUPS - 1
"""Of each step; its rows are on the last of four ranks."""
CASES = {
    "grpo": {
        "sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.7,
        "context.policy": "window", "context.turns": 2,
        "update_layout": "shared", "max_tokens_per_micro_batch": 500, "loss_type": "grpo",
    },
    "ppo": {
        "trainer": MultiTurnPPOTrainer, "critic": "head", "advantage_estimator": "bilevel_gae",
        "bootstrap_truncated": True, "loss_type": "dapo",
    },
}  # fmt: skip


class Env(AddEnv):
    """Rewards differ within and between groups; the last group of a step is lost."""

    def reset(self, example):
        if int(example["id"].removeprefix("q")) % GROUPS == LOST_GROUP:
            raise OSError("the server is down")
        return super().reset(example)

    def outcome_reward(self, trajectory):
        return float(len(trajectory.completion_ids) % 3)


def ragged(rng, turn):
    """Up to four calls, then a text; some trajectories reach the limit of turns."""
    if rng.random() < 0.6:
        return call(a=rng.choice([1, 10**6, 10**12]), b=rng.randrange(3))
    return say("x" * rng.randrange(1, 30))


def train(case, output_dir, checkpoint=None):
    """What each rank saw of a run with that case, from its start or from a checkpoint, and the weights in the end."""
    rows = []
    under_way = []
    lost = []
    trainer = make_trainer(
        output_dir / case / ("straight" if checkpoint is None else "resumed"),
        model=str(output_dir / POLICY_FOLDER),
        env=Env,
        script=ragged,
        train_dataset=questions(GROUPS * NUM_STEPS),
        shuffle_dataset=False,
        use_vllm=True,  # whose place the script takes
        script_logprob=-6.2,  # that of the policy, nearly
        vllm_importance_sampling_mode="token_truncate",
        rollouts_ahead=1,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=GROUPS * GROUP_SIZE // 2 // num_processes(),
        gradient_accumulation_steps=2,
        max_turns=5,
        max_completion_length=400,
        max_steps=NUM_STEPS,
        save_strategy="steps",
        save_steps=SAVED_STEP,
        max_grad_norm=1e6,  # of the policy and the critic together under DeepSpeed, else apart: nothing is clipped
        adam_epsilon=1e-2,  # else rounding decides on the sign of a step where the gradient is nearly 0
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        **CASES[case],
    )
    prepare, score = trainer._prepare_inputs, trainer._generate_and_score_completions

    def prepared(generation_batch):
        inputs = prepare(generation_batch)
        rows.append([len(one["completion_ids"]) for one in inputs.get("micro_batches", [inputs])])
        under_way.append(len(trainer.rollouts.ahead) > 0)
        return inputs

    def scored(inputs):
        output = score(inputs)
        lost.append(sum(item.stop_reason == "environment_error" for item in trainer.last_trajectories))
        return output

    trainer._prepare_inputs, trainer._generate_and_score_completions = prepared, scored
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    trainer.rollouts.close()
    weights = trained_weights(trainer)
    names = ("loss", "grad_norm", "reward", "critic/value_loss", "rollout/lost_share")
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    own = {
        "logged": [{name: step[name] for name in names if name in step} for step in steps],
        "rows": rows,
        "under_way": under_way,
        "lost": lost,
        "digest": fingerprint((name, value.requires_grad_()) for name, value in weights.items()),
    }
    return {"ranks": gather_object([own]), "weights": {name: value.detach() for name, value in weights.items()}}


def compute(folder, *, is_resumed=True):
    """For each case what all ranks saw, and the weights in the end; straight on and (if so) resumed in the middle."""
    found = {}
    for case in CASES:
        found[case] = {"straight": train(case, folder)}
        if is_resumed:
            checkpoint = folder / case / "straight" / f"checkpoint-{SAVED_STEP}"
            found[case]["resumed"] = train(case, folder, checkpoint)
    return found


if __name__ == "__main__":
    results = compute(Path(sys.argv[1]))
    if PartialState().is_main_process:
        torch.save(results, Path(sys.argv[1]) / FOUND_FILE)
