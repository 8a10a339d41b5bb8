"""A tiny policy, a tool, an environment and scripts for the trainer tests."""

import copy
import random

import torch
from datasets import Dataset
from transformers import TrainerCallback

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.generation.scripted import ScriptedGenerator, ScriptedTurn
from agent_r1_trl.testing import AddEnv, call, make_policy, make_tokenizer, say
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from tests.toys import unfold


def add(a: int, b: int) -> int:
    """Add two numbers: a tool as TRL's scripts have them.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


class PlainEnv(ToolEnv):
    """No tools: one turn, scored by its ids."""

    def outcome_reward(self, trajectory):
        return float(sum(trajectory.completion_ids) % 5)


def moving_reference(folder):
    """Options of a run whose reference follows the policy in every step; TRL loads it from `folder`."""
    make_policy(make_tokenizer("qwen3")).save_pretrained(folder)
    moving = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    return {"model": str(folder), "beta": 0.1, **moving}


def questions(count=8):
    return Dataset.from_list(
        [{"id": f"q{i}", "prompt": [{"role": "user", "content": f"question {i}"}]} for i in range(count)]
    )


def make_args(output_dir, config_class=MultiTurnGRPOConfig, **options):
    defaults = {
        "output_dir": str(output_dir), "bf16": False, "use_cpu": True, "report_to": [], "logging_steps": 1,
        "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1, "max_completion_length": 160,
        "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3, "seed": 7, "record_trajectories": "none",
        "beta": 0.0,
    }  # fmt: skip
    return config_class(**unfold(defaults | options))


def scripted(tokenizer, turns_of, logprob=-1.0):
    """A generator whose trajectories say `turns_of(random.Random(seed), turn)`, in tokens of that log-prob."""
    chat = ChatFormat(tokenizer)

    def answer(request):
        ids = chat.encode_reply(turns_of(random.Random(request.seed), request.turn))
        return ScriptedTurn(token_ids=ids, logprobs=[logprob] * len(ids))

    return ScriptedGenerator(answer, stop_token_ids=chat.stop_token_ids)


def two_turns(rng, turn):
    """A call, then an answer of random length."""
    return call(a=rng.randrange(9), b=rng.randrange(9)) if turn == 0 else say("x" * rng.randrange(1, 9))


def make_trainer(tmp_path, *, script=two_turns, env=AddEnv, family="qwen3", trainer=MultiTurnGRPOTrainer, **options):
    tokenizer = make_tokenizer(family)
    extra = {name: options.pop(name) for name in list(options) if name in TRAINER_ARGUMENTS}
    logprob = options.pop("script_logprob", -1.0)
    generator = scripted(tokenizer, script, logprob) if script is not None else None
    if script is not None and options.get("rollouts_ahead"):  # a script's log-probs are no policy's
        options.setdefault("failures.min_effective_share", 0.0)
    generator = options.pop("wrap_generator", lambda inner: inner)(generator)
    return trainer(
        model=extra.pop("model", None) or make_policy(tokenizer),
        args=make_args(tmp_path, trainer.config_class, **options),
        env=env,
        train_dataset=extra.pop("train_dataset", None) or questions(),
        processing_class=tokenizer,
        generator=generator,
        **extra,
    )


LOST, CUT = "lost", "cut"


def answering(tmp_path, rows, *, trainer=MultiTurnGRPOTrainer, **options):
    """A trainer whose trajectories say these texts in turns, lose their sampler, or are cut by `max_turns`."""
    tokenizer = make_tokenizer("qwen3")
    chat = ChatFormat(tokenizer)

    def answer(request):
        what = rows[request.index % len(rows)]
        if what == LOST:
            return RuntimeError("the machine is gone")
        return chat.encode_reply(call() if what == CUT else say(what))

    arguments = {"env": AddEnv, "model": make_policy(tokenizer)}
    arguments |= {name: options.pop(name) for name in ("reward_funcs", "env", "tools", "model") if name in options}
    options = {"max_concurrency": 1, "max_turns": 1} | options
    return trainer(
        args=make_args(tmp_path, trainer.config_class, **options), train_dataset=questions(),
        processing_class=tokenizer, generator=ScriptedGenerator(answer, stop_token_ids=chat.stop_token_ids),
        **arguments,
    )  # fmt: skip


class LikelihoodTrainer(MultiTurnGRPOTrainer):
    """Pulls the policy towards what it sampled, whatever that earned: a loss term of a user's own."""

    def extra_loss(self, inputs, log_probs, mask):
        return -0.5 * log_probs.sum()


TRAINER_ARGUMENTS = (
    "callbacks", "critic_model", "environment_factory", "eval_dataset", "model", "optimizers", "peft_config",
    "reward_funcs", "tools", "train_dataset", "turn_reward_funcs",
)  # fmt: skip


def scored_batch(trainer):
    """One generation batch as the loss sees it, without training."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = next(iter(trainer.get_train_dataloader()))
    return trainer._generate_and_score_completions(rows)


def step_gradients(trainer, change=lambda inputs: inputs):
    """Gradients of one optimizer step, added up over its micro-batches, and these; weights move after the scoring.

    The next call starts from the same weights and rows again.

    Args:
        trainer: which has not trained yet.
        change: what to do to each micro-batch.
    """
    trainer.model.train()
    trainer.model.zero_grad()
    per_update = trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    rows = next(iter(trainer.get_train_dataloader()))
    torch.manual_seed(2)  # TRL shuffles the rows of a rollout
    before, buffer = copy.deepcopy(trainer.model.state_dict()), []
    for trainer._step in range(per_update):
        buffer.append(trainer._prepare_inputs(rows))
        if trainer._step == 0:
            move_weights(trainer.model)
        trainer.compute_loss(trainer.model, change(buffer[-1])).backward()
    gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.load_state_dict(before)
    trainer._step = 0
    trainer._buffered_inputs = None
    trainer.rollouts.synced_step = -1
    return gradients, buffer


def move_weights(model):
    """So that ratios to old log-probs differ from 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)


def loss_and_gradients(trainer, inputs):
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def state_of(trainer):
    """Weights, the optimizer's state and the schedule's, as they are now."""
    return copy.deepcopy(
        [trainer.model.state_dict(), trainer.optimizer.state_dict()["state"], trainer.lr_scheduler.state_dict()]
    )


class Remember(TrainerCallback):
    """Keeps the weights after each optimizer step."""

    def __init__(self):
        self.seen = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen[state.global_step] = {name: value.detach().clone() for name, value in model.named_parameters()}


def watched(trainer):
    """Train; returns the states before each optimizer step and after the last."""
    states, get_norm = [], trainer._get_grad_norm

    def note(*args, **kwargs):
        states.append(state_of(trainer))
        return get_norm(*args, **kwargs)

    trainer._get_grad_norm = note
    trainer.train()
    return [*states, state_of(trainer)]
