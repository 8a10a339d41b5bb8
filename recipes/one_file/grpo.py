"""GRPO for an agent that searches, in one file to be read from top to bottom.

    python recipes/one_file/grpo.py --steps 20

The trainers of this package do the same on top of TRL, with vLLM, several processes, checkpoints and an answer to
every kind of failure. This file keeps only the steps without which nothing is learned, on the task of the quickstart
(recipes/quickstart/README.md). Three things come from the package because they are not the algorithm: the chat
template, the search index, and the comparison of an answer with the gold answers.

A trajectory is one list of token ids that only grows. The model samples the tokens in brackets (mask 1); the chat
template and the search tool write all the others (mask 0):

    <|im_start|>system
    Tools: search(query)<|im_end|>
    <|im_start|>user
    What is the capital of the country whose aircraft prefix is YJ?<|im_end|>
    <|im_start|>assistant
    [<tool_call>{"name": "search", "arguments": {"query": "aircraft prefix YJ"}}</tool_call><|im_end|>]
    <|im_start|>user
    <tool_response>[1] Vanuatu: The aircraft prefix is YJ.</tool_response><|im_end|>
    <|im_start|>assistant
    [<answer> Port-Vila</answer><|im_end|>]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.rewards import exact_match, extract_answer
from agent_r1_trl.tools import SearchIndex, Tool, make_search_tool

TASK = Path(__file__).resolve().parents[1] / "quickstart"
MAX_TURNS = 5
MAX_TURN_TOKENS = 48
CLIP = 0.2


@dataclass
class Trajectory:
    """One conversation. `ids`, `mask` and `logprobs` have one entry per token."""

    question: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 where the model sampled the token, else 0."""
    logprobs: list[float] = field(default_factory=list)
    """Of each sampled token, under the model that sampled it; 0.0 where the mask is 0."""
    turn_start: int = 0
    num_turns: int = 0
    answer: str = ""
    is_done: bool = False

    def add(self, ids: list[int], mask: int, logprobs: list[float] | None = None) -> None:
        """Append tokens. The mask is made here, where the token is made, so nobody has to search for it later."""
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)


# ---------------------------------------------------------------- rollout


@torch.no_grad()
def roll_out(
    model: Any, chat: ChatFormat, search: Tool, questions: list[dict[str, Any]], temperature: float = 1.0
) -> list[Trajectory]:
    """Sample one trajectory per question, all of them at the same time. Temperature 0 is greedy.

    Each pass through the loop feeds one token of every trajectory to the model. Where the next token is already known
    (it belongs to the prompt or to an observation), the trajectory only reads. Where it is not, the next token is
    sampled. This way all trajectories share one KV cache without padding, although each is in a turn of its own.
    """
    trajectories = [Trajectory(question) for question in questions]
    for trajectory in trajectories:
        prompt = [{"role": "user", "content": trajectory.question["question"]}]
        trajectory.add(chat.encode_prompt(prompt, [search.schema]), mask=0)
        trajectory.turn_start = len(trajectory.ids)
    cache, column = None, 0
    while not all(trajectory.is_done for trajectory in trajectories):
        # A finished trajectory is fed any token while the others go on; what the model says to it is ignored.
        column_ids = [t.ids[column] if column < len(t.ids) else chat.stop_token_ids[0] for t in trajectories]
        output = model(input_ids=torch.tensor(column_ids)[:, None], past_key_values=cache, use_cache=True)
        cache, column = output.past_key_values, column + 1
        logprobs = torch.log_softmax(output.logits[:, -1].float() / (temperature or 1.0), dim=-1)  # (N, V)
        next_ids = torch.multinomial(logprobs.exp(), 1) if temperature else logprobs.argmax(-1, keepdim=True)  # (N, 1)
        next_logprobs = logprobs.gather(1, next_ids)  # (N, 1)
        for trajectory, [token], [logprob] in zip(
            trajectories, next_ids.tolist(), next_logprobs.tolist(), strict=True
        ):
            if trajectory.is_done or column < len(trajectory.ids):
                continue
            trajectory.add([token], mask=1, logprobs=[logprob])
            if token in chat.stop_token_ids:
                end_turn(trajectory, chat, search)
            elif len(trajectory.ids) - trajectory.turn_start == MAX_TURN_TOKENS:
                trajectory.is_done = True  # cut in the middle: neither a call nor an answer
    return trajectories


def end_turn(trajectory: Trajectory, chat: ChatFormat, search: Tool) -> None:
    """Read the turn that has just ended: run its calls and append what they return, or keep its answer."""
    turn_ids, context_ids = trajectory.ids[trajectory.turn_start :], trajectory.ids[: trajectory.turn_start]
    message = chat.parse(turn_ids, context_ids, [search.schema])
    trajectory.num_turns += 1
    calls = message.get("tool_calls", [])
    if not calls or trajectory.num_turns == MAX_TURNS:
        trajectory.is_done = True
        trajectory.answer = "" if calls else extract_answer(message["content"]) or ""
        return
    observations = []
    for call in calls:
        # The model may make up tools and arguments; it then reads what was wrong instead of a result.
        arguments, problems = search.check_arguments(call["function"]["arguments"])
        if call["function"]["name"] != search.name:
            problems = [f"there is no tool called {call['function']['name']!r}"]
        content = f"Error: {'; '.join(problems)}" if problems else search(**arguments)
        observations.append({"role": "tool", "name": search.name, "content": content})
    # Only the observation is encoded. Decoding the sampled tokens and encoding them again could give other tokens, and
    # the loss would then be taken on tokens that the model never chose.
    observation_ids, _ = chat.encode_observations(message, observations, [search.schema])
    trajectory.add(chat.encode_turn_end(turn_ids, stopped=True) + observation_ids, mask=0)
    trajectory.turn_start = len(trajectory.ids)


# ---------------------------------------------------------------- reward, advantage, loss


def compute_reward(trajectory: Trajectory) -> float:
    """1.0 for the right answer, else 0.0. That a search helps is left for the model to find out."""
    return exact_match(trajectory.answer, trajectory.question["answers"])


def compute_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """How much better each trajectory is than the others of its question, in standard deviations.

    Args:
        rewards: (N,), with the trajectories of a question next to each other.
        group_size: trajectories per question.

    Returns:
        (N,). If all trajectories of a question earned the same, there is nothing to compare and the advantage is 0.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def compute_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """PPO's clipped objective, averaged over all sampled tokens of the batch.

    Args:
        logprobs: (N, T) under the model as it is now; the only input with a gradient.
        old_logprobs: (N, T) under the model that sampled.
        mask: (N, T), 1 where the model sampled the token.
        advantages: (N,): all tokens of a trajectory share its credit.
    """
    ratio = torch.exp(logprobs - old_logprobs)  # (N, T), 1 everywhere until the first update on this rollout
    # Taking the minimum ends the gradient of a token whose probability has already moved by CLIP in the direction of
    # its advantage: several updates on one rollout then cannot run away from the model that sampled it.
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    return -(gain * mask).sum() / mask.sum()


def make_batch(trajectories: list[Trajectory]) -> list[torch.Tensor]:
    """The ids, masks and log-probabilities of sampling as three (N, T) tensors, padded on the right with 0."""
    columns = zip(*((t.ids, t.mask, t.logprobs) for t in trajectories), strict=True)
    return [pad_sequence([torch.tensor(row) for row in rows], batch_first=True) for rows in columns]


def compute_logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(N, T) log-probability of each token given the tokens before it; 0 for the first token."""
    # No attention mask is needed: padding stands on the right, and causal attention never looks to the right.
    logits = model(input_ids=ids).logits[:, :-1].float()  # (N, T - 1, V)
    logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[:, :, 0]  # (N, T - 1)
    return torch.nn.functional.pad(logprobs, (1, 0))


# ---------------------------------------------------------------- training


def read_questions(name: str) -> list[dict[str, Any]]:
    """The rows of one of the quickstart's files."""
    return [json.loads(line) for line in (TASK / "data" / name).open(encoding="utf-8")]


def train(args: argparse.Namespace) -> list[float]:
    """Train, and return the mean reward of every step."""
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    # eval(): with dropout, the model that is trained would not be the model that sampled.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    chat = ChatFormat(AutoTokenizer.from_pretrained(args.model))
    search = make_search_tool(SearchIndex(TASK / "data" / "corpus.jsonl"), top_k=1)
    questions = read_questions("train.jsonl")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    history = []
    for step in range(args.steps):
        began = time.perf_counter()
        drawn = random.sample(questions, args.questions)
        trajectories = roll_out(model, chat, search, [question for question in drawn for _ in range(args.group_size)])
        rewards = torch.tensor([compute_reward(trajectory) for trajectory in trajectories])  # (N,)
        advantages = compute_advantages(rewards, args.group_size)  # (N,)
        ids, mask, old_logprobs = make_batch(trajectories)  # (N, T)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / args.steps)  # linear decay
        for _ in range(args.updates):
            loss = compute_loss(compute_logprobs(model, ids), old_logprobs, mask, advantages)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
        history.append(rewards.mean().item())
        turns = sum(trajectory.num_turns for trajectory in trajectories) / len(trajectories)
        seconds = time.perf_counter() - began
        print(f"step {step + 1:3d}  reward {history[-1]:.3f}  turns {turns:.2f}  {seconds:.1f} s", flush=True)
    if args.evaluate:
        heldout = roll_out(model, chat, search, read_questions("test.jsonl"), temperature=0.0)
        print(
            f"{len(heldout)} held-out questions, greedy: {sum(map(compute_reward, heldout)) / len(heldout):.3f} right"
        )
    return history


def read_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="GRPO for an agent that searches, in one file.")
    parser.add_argument("--model", default=str(TASK / "model"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--questions", type=int, default=8, help="questions per step")
    parser.add_argument("--group_size", type=int, default=8, help="trajectories per question, at least 2")
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps per rollout")
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--evaluate", action="store_true", help="answer the held-out questions at the end, greedily")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(read_options())
