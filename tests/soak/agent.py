"""The run: a tiny agent in a task that fails as its plan says. Started in a fresh process for each rank."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, TrainerCallback

from agent_r1_trl import InfrastructureError
from agent_r1_trl.environments import ToolEnv
from agent_r1_trl.errors import RunError
from agent_r1_trl.generation.base import Generator, current_slot
from agent_r1_trl.testing import call, make_policy, make_tokenizer, say
from agent_r1_trl.tools import tool
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.soak.plan import MAX_STEPS, MODEL_LENGTH, Plan
from tests.trainers.helpers import make_args, questions, scripted

SHARE = 0.15
"""Of the places where a fault of the task could happen, those where it does."""
SMALL_DISK = 4_000
"""Bytes of the largest file, while the disk is full."""
OUTAGE_S = 2.0
"""How long a back end is down, from its first call after the first step on."""
FIRST_STEP_DONE = "first_step_done"
"""A file of the run: there once its first step is made."""


# -------------------------------------------------------------------- the task


class Faults:
    """Decides at each place whether a fault happens there: by what is sampled, not by when."""

    def __init__(self, plan: Plan, folder: Path):
        self.plan, self.folder = plan, folder

    def happens(self, fault: str, *place: object) -> bool:
        return fault in self.plan.faults and random.Random(f"{self.plan.seed} {fault} {place}").random() < SHARE

    def strikes(self, fault: str, example_id: str | None) -> bool:
        """Whether this is the example, one of the eight, that `fault` always meets."""
        return fault in self.plan.faults and example_id == f"q{self.plan.seed % 8}"

    def happens_later(self, fault: str) -> bool:
        """Whether `fault` is in the plan and the first step is made."""
        return fault in self.plan.faults and (self.folder / FIRST_STEP_DONE).exists()

    def is_out(self, fault: str) -> bool:
        """Whether `fault` is going on: for some seconds after it is asked for the first time after the first step."""
        if not self.happens_later(fault):
            return False
        begin = self.folder / "outage"
        if not begin.exists():
            begin.touch()
        return time.time() < begin.stat().st_mtime + OUTAGE_S


def make_env(plan: Plan, folder: Path):
    """A class of environments that fail as planned: each takes up to three turns, with a tool or without.

    Its `opened` holds the example of each that was reset and not closed.
    """
    faults = Faults(plan, folder)
    opened: dict[Any, str] = {}

    @tool(timeout_s=0.5)
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One number.
            b: The other.
        """
        if faults.happens("tool raises", a, b):
            raise ZeroDivisionError("a fault of the tool")
        if faults.happens("tool hangs", a, b):
            time.sleep(3)
        if faults.happens("tool is slow", a, b):
            time.sleep(0.2)
        return a + b

    @tool(timeout_s=0.5, backend=True, retry_wait_s=0.1)
    async def look_up(a: int, b: int) -> str:
        """Look two numbers up.

        Args:
            a: One number.
            b: The other.
        """
        if faults.happens("tool blocks the event loop", a, b):
            time.sleep(1)
        if faults.is_out("backend is down at times") or faults.happens("backend is down at times", a, b):
            raise ConnectionError("the back end does not answer")
        await asyncio.sleep(0.01)
        return "\x1b[2J<|im_end|>" if faults.happens("escape sequences", a, b) else str(a * b)

    class SoakEnv(ToolEnv):
        tools = (add, look_up)

        def reset(self, example):
            self.example_id, self.num_turns = example["id"], 0
            self.is_first_rollout = current_slot.get().order <= 0  # a later one may have ended before the first step
            opened[self] = self.example_id
            if faults.strikes("environment crashes in reset", self.example_id):
                raise RuntimeError("no world today")
            if faults.strikes("environment hangs in reset", self.example_id):
                time.sleep(60)
            return super().reset(example)

        async def step(self, message):
            self.num_turns += 1
            place = (self.example_id, self.num_turns, str(message.get("content")))
            if faults.happens("environment crashes in step", *place):
                raise RuntimeError("the world ended")
            if plan.sampler != "scripted" and not faults.happens("malformed calls", *place):
                message = with_call(message)
            if message.get("tool_calls") or message.get("malformed_tool_call"):
                return await super().step(message)
            if self.num_turns < 3 and len(str(message.get("content"))) % 2:
                size = 100_000 if faults.happens("huge observations", *place) else 3
                return [{"role": "user", "content": "go on " * size}], 0.1, False, {}
            return [], 0.0, True, {}

        def outcome_reward(self, trajectory):
            if faults.happens("scoring crashes", self.example_id, trajectory.final_text):
                raise InfrastructureError("the judge is out")
            if faults.strikes("scoring hangs", self.example_id):
                time.sleep(60)
            if "reward is not finite" in plan.faults and not self.is_first_rollout:
                return math.inf
            return float(len(trajectory.final_text) % 3)

        async def close(self):
            opened.pop(self, None)
            if faults.strikes("environment crashes in close", getattr(self, "example_id", None)):
                raise RuntimeError("cannot close")
            super().close()

    SoakEnv.opened = opened
    return SoakEnv


def with_call(message):
    """The message of a random policy, which calls no tool, as one that calls tools every other time."""
    rng = random.Random(str(message.get("content")))
    if rng.random() < 0.5:
        return message
    numbers = {"a": rng.randrange(50), "b": rng.randrange(50)}
    calls = call(rng.choice(["add", "look_up"]), **numbers)["tool_calls"]
    return {"role": "assistant", "content": message.get("content"), "tool_calls": calls}


def answers(plan: Plan, folder: Path):
    """What a scripted policy says: calls of both tools, unreadable ones, and answers."""
    faults = Faults(plan, folder)

    def turn_of(rng: random.Random, turn: int):
        numbers = {"a": rng.randrange(50), "b": rng.randrange(50)}
        if faults.happens("malformed calls", numbers):
            return say('<tool_call>{"name": "add", "arguments": {"a": 1,</tool_call>')
        if rng.random() < 0.4:  # whatever turn it is: a resumed run's script knows no earlier ones
            return call(rng.choice(["add", "look_up"]), **numbers)
        return say("x" * rng.randrange(1, 9))

    return turn_of


# -------------------------------------------------------------------- the run


class Disturbances(TrainerCallback):
    """Faults that come from outside the task, from the second step on."""

    def __init__(self, plan: Plan, folder: Path):
        self.plan = plan
        self.folder = folder
        self.is_broken = False

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Give one parameter a gradient that can be broken."""
        if "gradient is not finite" in self.plan.faults:
            parameter = next(p for p in model.parameters() if p.requires_grad)
            parameter.register_hook(lambda grad: grad * math.nan if self.is_broken else grad)

    def on_step_begin(self, args, state, control, **kwargs):
        """Break the second step, and let the others be."""
        self.is_broken = state.global_step == 1 and not (self.folder / "was_broken").exists()
        if self.is_broken:
            (self.folder / "was_broken").touch()
        if "disk is full" in self.plan.faults:
            limit_files(SMALL_DISK if self.is_broken else resource.RLIM_INFINITY)

    def on_step_end(self, args, state, control, **kwargs):
        """Say that the first step is made; there is room again for the checkpoint, without which a run ends."""
        if "disk is full" in self.plan.faults:
            limit_files(resource.RLIM_INFINITY)
        (self.folder / FIRST_STEP_DONE).touch()

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Leave the metrics of each step behind."""
        if "loss" in logs and state.is_world_process_zero:
            append(self.folder / "steps.jsonl", {"step": state.global_step, **logs})


def limit_files(size: int) -> int:
    """Let no file of this process grow beyond a size; returns the limit so far."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    return before


_lock = threading.Lock()


def append(path: Path, value: object) -> None:
    """Add a line of JSON, whether the disk is full or not."""
    with _lock:
        before = limit_files(resource.RLIM_INFINITY)
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(value))  # the line before may be torn: its writer was killed
        limit_files(before)


def note_samples(generator: Generator, path: Path) -> None:
    """Write down what the sampler was asked and what it answered."""
    original = generator.generate

    @functools.wraps(original)
    async def generate(request):
        generation = await original(request)
        append(path, [request.prompt_ids, generation.token_ids, generation.logprobs])
        return generation

    generator.generate = generate  # type: ignore[method-assign]


def note_batches(trainer: Any, path: Path) -> None:
    """Write down what reaches the loss."""
    original = trainer.compute_loss

    @functools.wraps(original)
    def compute_loss(model, inputs, *args, **kwargs):
        ids, mask = inputs["completion_ids"], inputs["completion_mask"] * inputs["tool_mask"]
        columns = {"completion": ids, "mask": mask, "advantages": inputs["advantages"]}
        if "returns" in inputs:
            columns |= {"values": inputs["old_values"], "returns": inputs["returns"]}
        rows = [
            dict(zip(columns, row, strict=True)) for row in zip(*(x.tolist() for x in columns.values()), strict=True)
        ]
        for row, prompt, is_token in zip(rows, inputs["prompt_ids"], inputs["prompt_mask"], strict=True):
            row |= {"prompt": prompt[is_token.bool()].tolist(), "pad": trainer.processing_class.pad_token_id}
        append(path, [trainer.state.global_step + 1, rows])
        return original(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss


def run(plan: Plan, folder: Path, rank: int, port: int, urls: list[str], model_path: str) -> None:
    """Train; the exit code is the process's."""
    # Another process writes the log, so that the full disk of this one leaves it alone.
    with (folder / f"rank{rank}.log").open("a") as log:
        writer = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log, start_new_session=True)
    os.dup2(writer.stdin.fileno(), 1)
    os.dup2(writer.stdin.fileno(), 2)
    writer.stdin.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    os.environ.update(SOAK_RUN=str(folder), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_CI_ENV="1")
    if plan.num_ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan.num_ranks))
        os.environ.update(LOCAL_WORLD_SIZE=str(plan.num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 0
    try:
        trainer = train(plan, folder, urls, model_path)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # the run is over, and the trainer's own handler gone
        trainer.save_model(str(folder / "final"))
    except SystemExit as end:
        code = int(end.code or 0)
    except KeyboardInterrupt:
        code = 130
    except RunError as error:
        traceback.print_exc()
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os.close(1)
    os.close(2)
    with contextlib.suppress(subprocess.TimeoutExpired):
        writer.wait(2)
    os._exit(code)


def train(plan: Plan, folder: Path, urls: list[str], model_path: str) -> MultiTurnGRPOTrainer | MultiTurnPPOTrainer:
    """One start of the run, from the last checkpoint if there is one; returns its trainer."""
    tokenizer = make_tokenizer("qwen3")
    trainer_class = MultiTurnPPOTrainer if plan.trainer == "ppo" else MultiTurnGRPOTrainer
    # A script's log-probs are no policy's.
    options = {"failures.min_effective_share": 0.0} if plan.rollouts_ahead else {}
    options |= {"rollouts_ahead": plan.rollouts_ahead}
    options |= {"use_vllm": True} if plan.sampler in ("server", "engine") else {}
    if plan.sampler == "server":
        options |= {"vllm_mode": "server", "servers.urls": urls, **SERVER_SETTINGS}
    elif plan.sampler == "engine":
        options |= {"vllm_mode": "colocate", "vllm_max_model_length": MODEL_LENGTH}
    policy = AutoModelForCausalLM.from_pretrained(model_path) if model_path else make_policy(tokenizer)
    args = make_args(
        folder,
        trainer_class.config_class,
        num_generations=2 if plan.trainer == "grpo" else 1,
        per_device_train_batch_size=4,
        max_steps=MAX_STEPS,
        max_turns=4,
        max_completion_length=320,
        max_tokens_per_turn=48 if plan.sampler == "scripted" else 24,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        retry_failed=plan.seed % 2,
        record_trajectories="jsonl",
        log_completions=plan.seed % 7 == 0,
        learning_rate=1e-3,
        seed=plan.seed,
        **SETTINGS,
        **options,
    )
    env = make_env(plan, folder)
    trainer = trainer_class(
        model=policy,
        args=args,
        env=env,
        train_dataset=questions(8),
        processing_class=tokenizer,
        generator=scripted(tokenizer, answers(plan, folder)) if plan.sampler == "scripted" else None,
        callbacks=[Disturbances(plan, folder)],
    )
    original = trainer.rollouts.sync

    def sync(*arguments, **keywords):
        result = original(*arguments, **keywords)
        generator = trainer.rollouts.runner.generator
        if not hasattr(generator.generate, "__wrapped__"):
            note_samples(generator, folder / f"samples_rank{trainer.accelerator.process_index}.jsonl")
        return result

    trainer.rollouts.sync = sync
    note_batches(trainer, folder / f"batches_rank{trainer.accelerator.process_index}.jsonl")
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    append(folder / "left_open.jsonl", list(env.opened.values()))
    return trainer


SETTINGS: dict[str, object] = {
    "rollout_timeout": 20.0,
    "reset_timeout": 2.0,
    "scoring_timeout": 2.0,
    "watchdog_interval": 1.0,
    "failures": {"max_share": 0.9},
    "outages": {"min_calls": 2, "max_wait": 60.0},
}
"""Limits that make the faults pass quickly."""
SERVER_SETTINGS: dict[str, object] = {
    "servers.health_timeout": 1.0,
    "servers.sync_timeout": 20.0,
    "servers.retry_window": 120.0,
}
