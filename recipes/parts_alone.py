"""A training loop on accelerate, made of the package's parts, without a trainer.

Rollout, rows, advantages and update need no trainer. Missing here: vLLM, checkpoints, failures, packed micro-batches,
records.

    python recipes/parts_alone.py                                        # or, with two processes:
    accelerate launch --num_processes 2 --cpu recipes/parts_alone.py
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1_trl.advantages import ESTIMATORS
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.environments import SearchQAEnv
from agent_r1_trl.generation import TransformersGenerator
from agent_r1_trl.rollout import RolloutLimits, RolloutRunner, rollout_requests
from agent_r1_trl.tools import SearchIndex
from agent_r1_trl.trainers.credit import gather_credit_inputs
from agent_r1_trl.update.batches import whole_rows
from agent_r1_trl.update.credit_inputs import read_credit_inputs
from agent_r1_trl.update.rows import TrainingRows, pad_tokens, row_tensors

GROUP = 4
START = Path(__file__).parent / "quickstart" / "model"
PASSAGE = {"id": "1", "title": "Vanuatu", "text": "The aircraft prefix is YJ. The capital is Port-Vila."}
QUESTION = {"question": "Which capital has the aircraft prefix YJ?", "answer": "Port-Vila"}


def main(num_steps: int = 2) -> list[float]:
    """Train; the gradient norm of each step."""
    accelerator = Accelerator(cpu=True)
    tokenizer = AutoTokenizer.from_pretrained(START)
    model = AutoModelForCausalLM.from_pretrained(START)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    chat, rank = ChatFormat(tokenizer), accelerator.process_index
    generator = TransformersGenerator(model, pad_token_id=tokenizer.pad_token_id, stop_token_ids=chat.stop_token_ids)
    corpus = SearchIndex([PASSAGE])
    limits = RolloutLimits(max_turns=3, max_completion_length=160)
    runner = RolloutRunner(lambda: SearchQAEnv(corpus), generator, chat, limits)

    norms = []
    for step in range(num_steps):
        requests = rollout_requests([QUESTION] * GROUP, first_row=rank * GROUP, group_size=GROUP, seed=0, step=step)
        trajectories = runner.run(requests)  # B of them, rewards included
        assert all(item.in_baseline for item in trajectories), trajectories[0].error
        accelerator.backward(policy_loss(accelerator, model, trajectories))
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        generator.sync(model)  # forgets keys and values of the old weights
    return norms


def policy_loss(accelerator, model, trajectories):
    """The loss of this rank's trajectories, with GRPO's advantages over those of all ranks."""
    rank = accelerator.process_index
    rows = TrainingRows(trajectories)  # one for each trajectory, or several where contexts were rewritten
    batch = row_tensors(rows.rows, pad_token_id=0, multiple_of=None, has_logprobs=False, device=accelerator.device)
    counts = torch.tensor([item.in_baseline for item in trajectories])  # not those whose sampler or tools failed
    inputs = read_credit_inputs(
        trajectories,
        mask=pad_tokens(trajectories, "action_mask", 0, rows.length),
        in_baseline=counts,
        group_ids=(torch.arange(len(trajectories)) + rank * GROUP) // GROUP,
        turn_rewards=[[turn.reward for turn in item.turns] for item in trajectories],
        outcome_weight=1.0,
    )
    credit = ESTIMATORS["grpo"].estimate(gather_credit_inputs(inputs, accelerator))  # over the rows of all ranks
    own = slice(rank * GROUP, (rank + 1) * GROUP)
    advantages = rows.to_rows(credit.advantages[own], batch["completion_ids"])  # (R, T)
    mask = pad_tokens(rows.rows, "action_mask", 0, advantages.shape[1]) * rows.expand(counts).unsqueeze(1)
    ids, attention = whole_rows(batch)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -advantages.shape[1] - 1 : -1]
    log_probs = torch.log_softmax(logits, dim=-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    count = accelerator.reduce(mask.sum().float()).clamp(min=1) / accelerator.num_processes
    return -(advantages * log_probs * mask).sum() / count


if __name__ == "__main__":
    main()
