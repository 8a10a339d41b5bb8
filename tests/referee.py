"""The same tiny trainings on two trees, and where their weights, logs and advantages differ: `make same BASE=commit`.

Each tree states its trainings in its own spelling (`VARIANTS` below), so that a setting may be renamed; they are
compared by name. Every estimator, context policy, loss type, critic, layout and feature stands in at least one of
them. Two ranks are run as well. Not covered: vLLM itself, DeepSpeed, GPUs.

    python -m tests.referee BASE [names...]        # compare with a commit
    python -m tests.referee --run-into OUT [names...]   # what it does in each of the trees
"""

import argparse
import logging
import math
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch

TREE = Path(__file__).resolve().parents[1]
CLOSE = 2e-7
"""Weights that differ by more than rounding, with SGD. Adam multiplies what differs where gradients are near 0."""
CLOSE_METRIC = 5e-4
CLOCKS = ("time", "_s", "runtime", "per_second", "seconds")
"""Words in names of metrics that a clock decides."""


# ---------------------------------------------------------------- trainings


def three_turns(rng, turn):
    """Calls, and an answer in the third turn at the latest."""
    from agent_r1_trl.testing import call, say

    ends = turn == 2 or rng.random() < 0.25
    return say("x" * rng.randrange(1, 9)) if ends else call(a=rng.randrange(9), b=rng.randrange(9))


def long_turns(rng, turn):
    """Calls with long observations and reasoning; a script does not know the turn where contexts are rewritten."""
    from agent_r1_trl.testing import call, say

    if rng.random() < 0.35:
        return say("x" * rng.randrange(1, 9))
    return call("echo", text="word " * rng.randrange(8, 12)) | {"reasoning_content": "hm"}


def hard(rng, turn):
    """One turn that is mostly wrong, so that some groups are all the same."""
    from agent_r1_trl.testing import say

    return say("x" * rng.choice((1, 3, 3, 3, 5, 2)))


def odd(completions, **_):
    """A reward function for rollouts without environment."""
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


def lengths(completions, **_):
    return [0.1 * len(completion) for completion in completions]


def _variants(folder):
    """Name -> options of `make_trainer`; `resume` and `lost` are ours."""
    from peft import LoraConfig

    from agent_r1_trl.testing import AddEchoEnv, make_policy, make_tokenizer
    from agent_r1_trl.trainers import MultiTurnPPOTrainer
    from tests.trainers.helpers import PlainEnv, questions

    make_policy(make_tokenizer("qwen3")).save_pretrained(folder / "policy")
    reference = {"model": str(folder / "policy"), "beta": 0.1}
    sgd = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant"}
    turns = {"max_turns": 4, "script": three_turns}
    window = {"context.policy": "window", "context.turns": 1, **turns}
    filtered = {
        "sampling.filter_groups": "min_p",
        "sampling.filter_value": 0.01,
        "sampling.filter_loss_scaling": True,
        "script": hard,
    }
    many = {"train_dataset": questions(32)}
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
    ppo = {"trainer": MultiTurnPPOTrainer, "num_generations": 2, **turns}
    four = {"per_device_train_batch_size": 4, "max_steps": 4}
    two_updates = {**four, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    resumed = {**two_updates, "max_steps": 5, "save_strategy": "steps", "save_steps": 3, "resume": 3}
    sampled = {"script": None, "max_completion_length": 12}
    variants = {
        "plain": {},
        "sampled": {"env": PlainEnv, **sampled},
        "neutral": {"env": None, "reward_funcs": odd, **sampled},
        "single": {"env": None, "script": hard, "reward_funcs": odd},
        "evaluated": {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_dataset": questions(3),
            "per_device_eval_batch_size": 4,
            "record_trajectories": "jsonl",
        },
        "reward_functions": {"script": hard, "reward_funcs": [odd_of_turns, lengths], "reward_weights": [1.0, 0.5]},
        # schedules
        "two_updates": two_updates,
        "accumulated": {**four, "gradient_accumulation_steps": 2},
        "accumulated_over_two": {**four, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
        "two_iterations": {"num_iterations": 2, "max_steps": 4},
        # layouts
        "grouped": {**four, "update_layout": "grouped", "gradient_accumulation_steps": 2},
        "packed": {**turns, "update_layout": "packed"},
        "shared": {**turns, "update_layout": "shared"},
        "by_tokens": {**four, **turns, "update_layout": "shared", "max_tokens_per_micro_batch": 300},
        # KL
        "beta": {**reference, "loss_type": "grpo"},
        "beta_reward": {**reference, "kl_placement": "reward", "advantage_estimator": "reinforce_pp", **turns},
        # several rows per trajectory
        "window_beta": {**window, **reference, "loss_type": "grpo", "num_iterations": 2},
        "window_two_updates": {**window, **two_updates},
        "window_shared": {**window, "update_layout": "shared"},
        "window_filter": {**filtered, **window, "sampling.filter_value": 0.4},
        "window_ppo": {**window, "trainer": MultiTurnPPOTrainer, "critic": "head", "num_generations": 2},
        # groups
        "filter": filtered,
        "filter_shared": {**filtered, "update_layout": "shared"},
        "filter_beta": {**filtered, **two_updates, **reference, "num_iterations": 2},
        "resampling": {"script": hard, "sampling.resample_rounds": 2, **many},
        "resampling_curriculum": {**filtered, "sampling.resample_rounds": 1, "sampling.curriculum": True, **many},
        "lost": {"lost": True, "loss_type": "grpo"},
        "lost_filter": {"lost": True, **filtered, "loss_type": "dr_grpo"},
        "shape": {"prompts_per_rollout": 4, "updates_per_rollout": 2, "max_steps": 4, **many},
        # rewards
        "truncated_masked": {**turns, "max_completion_length": 60, "truncated_trajectories": "mask"},
        "truncated_penalised": {**turns, "max_completion_length": 60, "truncated_trajectories": "penalise"},
        "process": {
            **turns,
            "process_reward_weight": 0.5,
            "process_reward_schedule": "linear",
            "turn_reward_funcs": [turn_lengths],
        },
        "process_separate": {**turns, "separate_process_advantages": True, "turn_reward_funcs": [turn_lengths]},
        "process_normalised": {**turns, "normalize_process_rewards": True, "turn_reward_funcs": [turn_lengths]},
        # the loss
        "unit_turn": {**window, "loss_unit": "turn"},
        "unit_trajectory": {**turns, "loss_unit": "trajectory"},
        "open_masks": {**turns, "loss_mask": False, "advantage_mask": False},
        "entropy": {**turns, "entropy_coef": 0.01, "top_entropy_quantile": 0.5},
        "extra_loss": {**turns, "trainer": likelihood_trainer()},
        "clipped": {**turns, "num_iterations": 2, "epsilon": 0.01, "epsilon_high": 0.02, "max_steps": 4},
        # the sampler
        "ratio_token": {**turns, "use_vllm": True, "num_iterations": 2},
        "ratio_turn": {**turns, "use_vllm": True, "importance_sampling_unit": "turn"},
        "ratio_sequence": {**turns, "use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"},
        "ahead": {"use_vllm": True, "rollouts_ahead": 1, "script": hard},
        # LoRA
        "lora": {**lora, **turns},
        "lora_window": {**lora, **window, "beta": 0.1},
        # PPO
        "ppo_adapter": {**ppo, "critic": "adapter", **lora},
        "ppo_model": {**ppo, "critic": "model", "num_iterations": 2, "max_steps": 4},
        "ppo_filter": {**ppo, **filtered, "critic": "head", "num_generations": 4},
        "ppo_bootstrap": {**ppo, "critic": "head", "bootstrap_truncated": True, "max_completion_length": 60},
        "ppo_bilevel": {**ppo, "critic": "head", "advantage_estimator": "bilevel_gae", "gamma_turn": 0.9},
        "ppo_steps": {**ppo, "critic": "head", "advantage_estimator": "step_gae", "gamma_turn": 0.9},
        # features
        "echo_trap": {**filtered, "echo": True, "sampling.resample_rounds": 1, **many, "max_steps": 6},
        "without_journal": {**turns, "journal": False},
        "nonfinite": {**turns, "trainer": unlucky_trainer()},
        "resumed": {**window, **resumed},
        "resumed_filter": {**filtered, **resumed, "sampling.resample_rounds": 1, "sampling.curriculum": True, **many},
        "resumed_ppo": {**resumed, **ppo, "critic": "model"},
    }
    for name in ("dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "turn_grpo", "gigpo"):
        variants[f"estimator_{name}"] = {**turns, "advantage_estimator": name, "turn_reward_funcs": [turn_lengths]}
    long = {"script": long_turns, "env": AddEchoEnv, "max_turns": 4}
    summaries = {"context.tokens": 360, "context.summary_tokens": 12}
    policies = {"drop_observations": {"context.turns": 1}, "strip_thinking": {}, "step": {}, "summarise": summaries}
    for name, options in policies.items():
        variants[f"context_{name}"] = {**long, "context.policy": name, "max_completion_length": 600, **options}
    for name in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"):
        level = {"importance_sampling_level": "sequence"} if name == "luspo" else {}
        variants[f"loss_{name}"] = {**turns, "loss_type": name, "num_iterations": 2, "max_steps": 4, **level}
    return {name: {**sgd, **options} for name, options in variants.items()} | {"adam": turns}


def turn_lengths(trajectory, **_):
    return [[0.1 * len(turn.message.get("content") or "x") for turn in item.turns] for item in trajectory]


def odd_of_turns(completions, **_):
    return [float(len(completion) % 2) for completion in completions]


def likelihood_trainer():
    from tests.trainers.helpers import LikelihoodTrainer

    return LikelihoodTrainer


def unlucky_trainer():
    """Its second step has a loss that is not finite."""
    from agent_r1_trl.trainers import MultiTurnGRPOTrainer

    class Unlucky(MultiTurnGRPOTrainer):
        def extra_loss(self, inputs, log_probs, mask):
            return log_probs.sum() * (math.nan if self.state.global_step == 1 else 0.0)

    return Unlucky


RANKS = ("plain", "filter", "window_beta", "resampling", "window_ppo", "nonfinite")
"""Run on two ranks as well."""


def train(folder, name, options):
    """Weights, logs, TRL's table of completions and the names of files of one training."""
    from transformers import PrinterCallback

    from tests.trainers.helpers import make_trainer

    options = {"num_generations": 4, "max_steps": 3, **options}
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        options |= {"ddp_backend": "gloo"}
    step, is_lost = options.pop("resume", None), options.pop("lost", False)
    torch.manual_seed(3)
    trainer = make_trainer(folder / name, **options)
    if is_lost:
        lose_one_in_six(trainer)
    trainer.pop_callback(PrinterCallback)
    trainer.train()
    assert any(row.get("grad_norm") for row in trainer.state.log_history), "no step had a gradient"
    whole = weights_of(trainer)
    if step:
        torch.manual_seed(3)
        trainer = make_trainer(folder / name, **options)
        trainer.pop_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=str(folder / name / f"checkpoint-{step}"))
        resumed = weights_of(trainer)
        assert all(torch.equal(whole[key], resumed[key]) for key in whole), "a resumed run ended elsewhere"
    table = {key: list(trainer._logs[key]) for key in ("prompt", "completion", "advantages") if key in trainer._logs}
    files = sorted(path.name for path in (folder / name).rglob("trajectories/**/*") if path.is_file())
    return {"weights": whole, "logs": trainer.state.log_history, "table": table, "files": files}


def weights_of(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def lose_one_in_six(trainer):
    """Some trajectories are lost to an engine that fails."""
    generator = trainer.rollouts._generator
    answer = generator._script
    generator._script = lambda request: answer(request) if request.seed % 6 else RuntimeError("gone")


def run(out, names):
    """Run the trainings of this tree."""
    import agent_r1_trl

    assert Path(agent_r1_trl.__file__).is_relative_to(TREE), f"{agent_r1_trl.__file__} is not of {TREE}"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    done = {}
    with tempfile.TemporaryDirectory() as folder:
        variants = _variants(Path(folder))
        is_several = "RANK" in os.environ
        for name in names or (RANKS if is_several else variants):
            try:
                done[name] = train(Path(folder), name, dict(variants[name]))
            except Exception:
                done[name] = {"error": traceback.format_exc()}
    if not is_several or os.environ["RANK"] == "0":
        torch.save(done, out)


# ---------------------------------------------------------------- comparing


def difference(old, new):
    """What differs between two trainings of one name, in words; "" for nothing."""
    if "error" in new:
        return "FAILED\n" + "".join(new["error"].splitlines(keepends=True)[-6:])
    if "error" in old:
        return "failed in the base alone"
    if old["weights"].keys() != new["weights"].keys():
        return f"other weights: {sorted(old['weights'].keys() ^ new['weights'].keys())[:4]}"
    found = []
    gaps = [(new["weights"][name].double() - value.double()).abs().max() for name, value in old["weights"].items()]
    if max(gaps) > CLOSE:
        found.append(f"weights differ by {max(gaps):.1e}")
    if len(old["logs"]) != len(new["logs"]):
        found.append(f"{len(new['logs'])} rows of logs, not {len(old['logs'])}")
    found += other_metrics(old["logs"], new["logs"])[:6]
    gone = {key for row in old["logs"] for key in row} - {key for row in new["logs"] for key in row}
    if gone:
        found.append(f"gone: {', '.join(sorted(gone))}")
    for key, rows in old["table"].items():
        if not all_same(rows, new["table"][key]):
            found.append(f"another column {key!r}")
    if old["files"] != new["files"]:
        found.append(f"files {new['files']}, not {old['files']}")
    return "; ".join(found)


def other_metrics(old, new):
    """Each logged metric that has another value, where it has one first, clocks excepted."""
    metrics = {}
    for before, after in zip(old, new, strict=False):
        for key in before.keys() & after.keys():
            is_clock = any(word in key for word in CLOCKS)
            if not is_clock and not same(before[key], after[key]):
                metrics.setdefault(key, f"{key} {before[key]} -> {after[key]}")
    return sorted(metrics.values())


def same(one, other):
    if not (isinstance(one, float) and isinstance(other, float | int)):
        return one == other
    if math.isnan(one) and math.isnan(other):
        return True
    return math.isclose(one, other, rel_tol=CLOSE_METRIC, abs_tol=2e-6)


def all_same(rows, others):
    return len(rows) == len(others) and all(map(same, rows, others))


def rolled_out(tree, folder, names, ranks):
    out = folder / f"{tree.name}-{ranks}.pt"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{tree}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *launch, "-m", "tests.referee", "--run-into", str(out), *names],
        cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return torch.load(out, weights_only=False)


def compare(base, names):
    """Print a line for every training; how many differ."""
    num_different = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree = folder / "base"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(tree), base], cwd=TREE, check=True)
        try:
            for ranks in (1, 2):
                chosen = [item for item in names if ranks == 1 or item in RANKS]
                if names and not chosen:
                    continue
                old, new = (rolled_out(one, folder, chosen, ranks) for one in (tree, TREE))
                for variant, result in new.items():
                    found = difference(old[variant], result) if variant in old else "new here"
                    num_different += bool(found)
                    where = f" ({ranks} ranks)" if ranks > 1 else ""
                    print(
                        f"{variant + where:32} {found or ('bits' if is_equal(old[variant], result) else 'rounding')}"
                    )
                for variant in old.keys() - new.keys():
                    num_different += 1
                    print(f"{variant:32} is not run here")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=TREE, check=True)
    return num_different


def is_equal(old, new):
    return all(torch.equal(value, new["weights"][name]) for name, value in old["weights"].items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", nargs="?", help="a commit")
    parser.add_argument("--run-into", metavar="OUT")
    args, names = parser.parse_known_args()
    if args.run_into:
        run(args.run_into, [args.base, *names] if args.base else names)
    elif not args.base:
        parser.error("which commit? For example: python -m tests.referee main")
    else:
        num_different = compare(args.base, names)
        print(f"{num_different} trainings differ." if num_different else "Nothing differs.")
        sys.exit(bool(num_different))


if __name__ == "__main__":
    main()
