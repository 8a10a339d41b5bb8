"""Small tasks that a policy of 60,000 weights learns within seconds, and trainers on them.

- `BanditEnv`: one turn, two words, one of them pays.
- `KeyDoorEnv`: three turns, two words. The right word of each state leads on, the other leaves things as they are, so
  only three right words in a row solve it: one random player in 8 does, and nobody who says the same word always.
- `LockedKeyDoorEnv`: the same with eight words for each state, so that one random player in 512 solves it.

The policy starts out as one that can read and that answers every state with any of its words: it was taught to repeat
what it sees, then to say one of the words. Without that it would not stumble on a success.
"""

import functools

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from agent_r1_trl.testing import make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer

KEY_DOOR = {"k": "to", "d": "ot", "x": "to"}
"""What the observation says (key, door, exit) -> the words that can be said, the one that leads on first."""
LOCKED_KEY_DOOR = {"k": "tocsuwAB", "d": "aebrpvEF", "x": "inmgfhIJ"}
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

    words = KEY_DOOR
    states = ("k",)
    right_words = ("o",)


class KeyDoorEnv(WordEnv):
    """Take the key, open the door, leave."""

    words = KEY_DOOR
    states = tuple(KEY_DOOR)
    right_words = tuple(words[0] for words in KEY_DOOR.values())


class LockedKeyDoorEnv(WordEnv):
    """The same with many words of which one is right."""

    words = LOCKED_KEY_DOOR
    states = tuple(LOCKED_KEY_DOOR)
    right_words = tuple(words[0] for words in LOCKED_KEY_DOOR.values())


class GuidedKeyDoorEnv(LockedKeyDoorEnv):
    """The locked one, with a process reward for every turn that leads on."""

    process_reward = 0.5


def tiny_tokenizer():
    return make_tokenizer("qwen2_5", chat_template=TEMPLATE)


def tiny_policy(words):
    """A model that answers every state with any of its words, each about equally often.

    Args:
        words: state -> what can be said.
    """
    tokenizer = tiny_tokenizer()
    model = Qwen2ForCausalLM(_config(tokenizer))
    model.load_state_dict(_taught(tuple(words.items())))
    return model


def _config(tokenizer):
    return Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip


@functools.lru_cache
def _taught(words, num_reading_steps=150, num_steps=300):
    """Weights after supervised learning: to repeat what is seen, then to say any word of the state."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    model = Qwen2ForCausalLM(_config(tokenizer))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=num_steps)
    states = torch.tensor(tokenizer.convert_tokens_to_ids([state for state, _ in words]))
    answers = torch.tensor([tokenizer.convert_tokens_to_ids(list(said)) for _, said in words])  # (states, words)
    everything = torch.cat([states, answers.unique()])
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    for step in range(num_steps):
        if step < num_reading_steps:
            said = seen = everything[torch.randint(len(everything), (32, 3))]  # (rows, turns)
        else:
            state = torch.randint(len(states), (32, 3))
            seen, said = states[state], answers[state, torch.randint(answers.shape[1], (32, 3))]
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

    def _advantages(self, output, rolled_out, columns):
        tensors = super()._advantages(output, rolled_out, columns)
        order = torch.randperm(len(rolled_out.trajectories), generator=torch.Generator().manual_seed(self._step))
        return {**tensors, "advantages": tensors["advantages"][order]}


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
        estimator: of the advantages.
        critic: kind of critic; `MultiTurnPPOTrainer` trains where one is given, else `MultiTurnGRPOTrainer`.
    """
    defaults = {
        "output_dir": str(output_dir), "bf16": False, "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "record_trajectories": "none", "logging_strategy": "no", "seed": seed, "beta": 0.0,
        "per_device_train_batch_size": 32, "num_iterations": 3, "max_steps": 3 * max_rollouts, "epsilon": 0.1,
        "learning_rate": 2e-3, "lr_scheduler_type": "constant", "gradient_checkpointing": False,
        "max_completion_length": 64, "max_turns": 3, "max_tokens_per_turn": 2,
    }  # fmt: skip
    peft_config = None
    if critic is None:
        trainer_class = ShuffledGRPO if shuffled else MultiTurnGRPOTrainer
        own = {"advantage_estimator": estimator, "num_generations": 16}
    else:
        trainer_class = ShuffledPPO if shuffled else MultiTurnPPOTrainer
        own = {"critic": critic, "advantage_estimator": estimator or "gae", "critic_learning_rate": 3e-3}
    if critic == "adapter":
        own["learning_rate"] = 3e-3
        peft_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    progress = Progress()
    progress.trainer = trainer = trainer_class(
        model=tiny_policy(env.words),
        args=trainer_class.config_class(**(defaults | own | options)),
        env=env,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "k"}]}] * 64),
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
        callbacks=[progress],
    )
    trainer.train()
    return progress
