"""Two tasks a policy of 60,000 weights learns within seconds, and trainers on them.

- `BanditEnv`: one turn, two words, one of them pays.
- `KeyDoorEnv`: three turns, two words. The right word of each state leads on, the other leaves things as they are, so
  only three right words in a row solve it: one random player in 8 does, and nobody who says the same word always.

The policy starts out as one that can read and that answers every state with either word: it was taught to repeat what
it sees, then to say any of the two. Without that it would not stumble on a success.
"""

import functools

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.tokenizers import make_tokenizer

WORDS = ("t", "o")
STATES = {"k": "t", "d": "o", "x": "t"}
"""What the observation says (key, door, exit) -> the word that leads on."""
SOLVED = 0.9
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""The shortest that tells where a turn starts and ends."""


class WordEnv:
    """What both tasks share: single words, no tools."""

    tools = ()
    process_reward = 0.0
    """Reward of a turn that leads on."""

    def __init__(self):
        self.num_turns = self.num_right = 0

    async def reset(self, example):
        return [{"role": "user", "content": self.states[0]}]

    async def step(self, message):
        is_right = message["content"].strip() == self.right_words[self.num_right]
        self.num_right += is_right
        self.num_turns += 1
        done = self.num_turns == len(self.right_words)
        observations = [] if done else [{"role": "user", "content": self.states[self.num_right]}]
        return observations, self.process_reward * is_right, done, {}

    async def outcome_reward(self, trajectory):
        return float(self.num_right == len(self.right_words))

    async def close(self):
        pass


class BanditEnv(WordEnv):
    """Of the two words, the second one pays."""

    states = ("k",)
    right_words = ("o",)


class KeyDoorEnv(WordEnv):
    """Take the key, open the door, leave."""

    states = tuple(STATES)
    right_words = tuple(STATES.values())


class GuidedKeyDoorEnv(KeyDoorEnv):
    """The same, with a process reward for every turn that leads on."""

    process_reward = 0.5


def tiny_tokenizer():
    return make_tokenizer("qwen2_5", chat_template=TEMPLATE)


def tiny_policy():
    """A model that answers whatever it sees with one of `WORDS`, each about equally often."""
    tokenizer = tiny_tokenizer()
    model = Qwen2ForCausalLM(_config(tokenizer))
    model.load_state_dict(_taught())
    return model


def _config(tokenizer):
    return Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip


@functools.lru_cache
def _taught(num_reading_steps=100, num_steps=160):
    """Weights after supervised learning: to repeat what is seen, then to say any word."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    model = Qwen2ForCausalLM(_config(tokenizer))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=num_steps)
    words = torch.tensor(tokenizer.convert_tokens_to_ids(list(WORDS)))
    states = torch.tensor(tokenizer.convert_tokens_to_ids(list(STATES)))
    all_words = torch.cat([words, states])
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    for step in range(num_steps):
        seen = all_words[torch.randint(len(all_words), (32, 3))]  # (rows, turns)
        said = seen if step < num_reading_steps else words[torch.randint(len(words), (32, 3))]
        starts, ends = torch.full_like(seen, start), torch.full_like(seen, end)
        ids = torch.stack([starts, seen, ends, starts, said, ends], dim=2)  # (rows, turns, tokens)
        labels = ids.clone()
        labels[:, :, :4] = -100
        loss = model(ids.flatten(1), labels=labels.flatten(1)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


# -------------------------------------------------------------------- trainers


class Shuffled:
    """A trainer whose rows get the advantages of other rows: all that learning is about is gone."""

    def _credit(self, output, trajectories):
        credit = super()._credit(output, trajectories)
        order = torch.randperm(len(trajectories), generator=torch.Generator().manual_seed(self._step))
        return {**credit, "advantages": credit["advantages"][order]}


class ShuffledGRPO(Shuffled, MultiTurnGRPOTrainer):
    pass


class ShuffledPPO(Shuffled, MultiTurnPPOTrainer):
    pass


class Progress(TrainerCallback):
    """Success of every rollout; ends the run once two in a row are solved."""

    def __init__(self):
        self.rates = []
        self._seen = None

    def on_step_end(self, args, state, control, **kwargs):
        trajectories = self.trainer.last_trajectories
        if trajectories is not self._seen:  # several optimizer steps train on one rollout
            self._seen = trajectories
            self.rates.append(sum(item.outcome_reward > 0.5 for item in trajectories) / len(trajectories))
            control.should_training_stop |= self.is_solved

    @property
    def is_solved(self):
        return len(self.rates) > 1 and min(self.rates[-2:]) >= SOLVED


def learn(output_dir, env, *, estimator=None, critic=None, seed=0, max_rollouts=40, shuffled=False, **options):
    """Train until solved or `max_rollouts`; returns the success of every rollout.

    Args:
        estimator: of `MultiTurnGRPOTrainer`; or
        critic: kind of critic of `MultiTurnPPOTrainer`.
    """
    defaults = {
        "output_dir": str(output_dir), "bf16": False, "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "record_trajectories": "none", "logging_strategy": "no", "seed": seed, "beta": 0.0,
        "per_device_train_batch_size": 32, "num_iterations": 3, "max_steps": 3 * max_rollouts, "epsilon": 0.1,
        "learning_rate": 3e-3, "lr_scheduler_type": "constant", "gradient_checkpointing": False,
        "max_completion_length": 64, "max_turns": 3, "max_tokens_per_turn": 2,
    }  # fmt: skip
    peft_config = None
    if critic is None:
        trainer_class = ShuffledGRPO if shuffled else MultiTurnGRPOTrainer
        own = {"advantage_estimator": estimator, "num_generations": 16, "learning_rate": 2e-3}
    else:
        trainer_class = ShuffledPPO if shuffled else MultiTurnPPOTrainer
        own = {"critic": critic, "critic_learning_rate": 3e-3}
    if critic == "adapter":
        # The frozen head tells words apart only so well; a lower temperature lets it be sure.
        own |= {"learning_rate": 5e-3, "temperature": 0.5}
        peft_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    progress = Progress()
    progress.trainer = trainer = trainer_class(
        model=tiny_policy(),
        args=trainer_class.config_class(**(defaults | own | options)),
        env=env,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "k"}]}] * 64),
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
        callbacks=[progress],
    )
    trainer.train()
    return progress
