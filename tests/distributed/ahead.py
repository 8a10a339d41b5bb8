"""A run ahead over a LoRA server: `python -m tests.distributed.ahead OUTPUT_DIR`, in two processes.

Trajectories of rank 1 take longer than rank 0's and than an update, so that rank 0 wants to send new weights while
rank 1 still samples with the old ones. Rank r writes to `OUTPUT_DIR/rank_r.json`; rank 0 also what the server saw.
"""

import asyncio
import json
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from peft import LoraConfig
from transformers import TrainerCallback

from agent_r1_trl.environments import ToolEnv
from tests.fake_vllm import FakeServer
from tests.trainers.helpers import make_trainer, questions

SLOW_S = 0.8
"""What rank 1 waits before each turn; an update here takes a tenth of it."""
NUM_STEPS = 3


class SlowEnv(ToolEnv):
    """Its trajectories begin late on rank 1."""

    async def reset(self, example):
        await asyncio.sleep(SLOW_S * PartialState().process_index)
        return super().reset(example)

    def outcome_reward(self, trajectory):
        return float(trajectory.generation % 2)


class WatchedServer(FakeServer):
    """Notes which adapters come and go, and which were asked for."""

    def __init__(self):
        super().__init__(adapters=True)
        self.events = []

    async def _complete(self, request):
        body = await request.json()
        name = body["model"]
        self.events.append(["asked" if name in self.loaded else "refused", name])
        answer = await super()._complete(request)
        self.events.append(["answered", name])
        return answer

    async def _load_adapter(self, request):
        name = (await request.json())["lora_name"]
        answer = await super()._load_adapter(request)
        self.loaded[name] = 7  # a token that the tiny model knows
        self.events.append(["loaded", name])
        return answer

    async def _unload_adapter(self, request):
        self.events.append(["unloaded", (await request.json())["lora_name"]])
        return await super()._unload_adapter(request)


class Watch(TrainerCallback):
    """Keeps how the trajectories of each update ended."""

    def __init__(self):
        self.trainer = None
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append([item.stop_reason.value for item in self.trainer.last_trajectories])


def train(output_dir, url):
    """How this rank's trajectories ended, and what was logged."""
    watch = Watch()
    watch.trainer = trainer = make_trainer(
        output_dir,
        script=None,
        env=SlowEnv,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        train_dataset=questions(16),
        eval_dataset=questions(2),
        callbacks=[watch],
        use_vllm=True,
        vllm_mode="server",
        rollouts_ahead=1,
        eval_strategy="steps",
        eval_steps=2,  # while the rollout of the third step is in flight
        max_steps=NUM_STEPS,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        num_generations=2,
        max_completion_length=8,
        max_turns=1,
        **{
            "servers.urls": [url],
            "servers.retry_window": 1,
            "servers.max_logprob_gap": 1e9,
            "failures.min_effective_share": 0.0,
        },
    )
    try:
        trainer.train()
    finally:
        trainer.rollouts.close()
    return {"ends": watch.ends, "steps": [entry for entry in trainer.state.log_history if "loss" in entry]}


def main(output_dir):
    rank = PartialState(cpu=True).process_index
    server = WatchedServer().__enter__() if rank == 0 else None
    (url,) = broadcast_object_list([None if server is None else server.url])
    result = train(output_dir, url)
    result["events"] = [] if server is None else server.events
    (output_dir / f"rank_{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
