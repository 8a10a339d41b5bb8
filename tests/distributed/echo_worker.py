"""Many rollouts, each with its update, on ranks that take very different numbers of turns.

`python -m tests.distributed.echo_worker OUTPUT_DIR`: each rank writes `OUTPUT_DIR/echo_RANK.json`, one entry per
trajectory: what was said and heard in it, by its environment and by its tokens.
"""

import json
import os
import re
import secrets
import sys
from dataclasses import replace
from pathlib import Path

from accelerate import PartialState

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.generation import TransformersGenerator
from agent_r1_trl.testing import AddEnv, call, make_tokenizer, say
from agent_r1_trl.tools import tool
from agent_r1_trl.trainers import MultiTurnGRPOTrainer
from tests.distributed.critics import POLICY_FOLDER
from tests.trainers.helpers import make_args, questions, scripted

NUM_ROLLOUTS = {"ddp": 50, "zero3": 20}
"""By launch; a rollout under ZeRO-3 takes twice as long."""
NUM_ROWS = 4
"""Per rank and rollout."""
NUM_CALLS = (0, 6)
"""Tool turns of each trajectory, by rank."""


class EchoEnv(AddEnv):
    """Repeats what it is told, and adds a word that no other environment knows."""

    tools = ()

    def __init__(self):
        super().__init__()
        self.word = f"own-{secrets.token_hex(6)}"
        self.heard = []

    @tool
    def echo(self, text: str) -> str:
        """Repeat a text.

        Args:
            text: what to repeat.
        """
        self.heard.append(text)
        return f"{text} {self.word}"


class Sampling:
    """A generator that lets the policy sample two tokens, and then says what the script says."""

    def __init__(self, script):
        self.script = script
        self.policy = None

    async def generate(self, request):
        await self.policy.generate(replace(request, max_tokens=2))
        return await self.script.generate(request)


def turns_of(num_calls):
    """A script with that many calls, each with a text of its own, before the last turn."""

    def answer(rng, turn):
        text = f"said-{rng.getrandbits(48):012x}"
        if turn == num_calls:
            return say(text + "." * rng.randrange(2))
        return call("echo", text=text)

    return answer


class Witness:
    """A reward function that writes down what every trajectory and its environment have to say."""

    __name__ = "witness"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.entries = []

    def __call__(self, trajectory, environments, **kwargs):
        for item, env in zip(trajectory, environments, strict=True):
            policy_text, environment_text = (self.text(item, mask) for mask in (1, 0))
            self.entries.append(
                {
                    "id": f"{item.example_id}/{item.generation}",
                    "stop": item.stop_reason.value,
                    "word": env.word,
                    "heard": env.heard,
                    "said": re.findall(r"said-[0-9a-f]{12}", policy_text),
                    "answers": re.findall(r"said-[0-9a-f]{12} own-[0-9a-f]{12}", environment_text),
                    "words": re.findall(r"own-[0-9a-f]{12}", policy_text + environment_text),
                }
            )
        return [0.0] * len(trajectory)

    def text(self, trajectory, mask):
        """What the tokens say whose mask is 1 (the policy's) or 0 (the others)."""
        pairs = zip(trajectory.completion_ids, trajectory.action_mask, strict=True)
        return self.tokenizer.decode([token_id for token_id, is_action in pairs if is_action == mask])


def main(output_dir):
    rank = PartialState(cpu=True).process_index
    tokenizer = make_tokenizer("qwen3")
    generator = Sampling(scripted(tokenizer, turns_of(NUM_CALLS[rank])))
    witness = Witness(tokenizer)
    trainer = MultiTurnGRPOTrainer(
        model=str(output_dir / POLICY_FOLDER),
        args=make_args(
            output_dir,
            per_device_train_batch_size=NUM_ROWS,
            max_steps=NUM_ROLLOUTS["zero3" if "ACCELERATE_USE_DEEPSPEED" in os.environ else "ddp"],
            max_turns=8,
            max_completion_length=1200,
        ),
        env=EchoEnv,
        generator=generator,
        reward_funcs=[witness],
        train_dataset=questions(),
        processing_class=tokenizer,
    )
    generator.policy = TransformersGenerator(
        trainer.model, pad_token_id=tokenizer.pad_token_id, stop_token_ids=ChatFormat(tokenizer).stop_token_ids
    )
    trainer.train()
    generator.policy.close()
    (output_dir / f"echo_{rank}.json").write_text(json.dumps(witness.entries), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
