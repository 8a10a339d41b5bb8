"""IGPO (arXiv 2510.14967): a turn earns by how much it makes the gold answer more likely.

The gain of a turn is p(gold | context after it) - p(gold | context before it), with p the geometric mean over the
answer's tokens; the last turn, which answers, has the outcome alone. Gains are compared as process rewards are by
`turn_grpo`, whose normalisation does not pay for extra turns. In a recipe whose trajectories have `info["gold"]`, as
SearchQAEnv's do:

    callbacks: [recipes/gallery/igpo.py:GoldGain]
    advantage_estimator: recipes/gallery/igpo.py:IGPO
"""

import torch

from agent_r1_trl import RolloutCallback
from agent_r1_trl.advantages import Credit, Estimator, compute_turn_group_advantages


class GoldGain(RolloutCallback):
    """Puts the gain of each turn on its last token, as the column `gold_gain`."""

    template = "<answer>{}</answer>"

    def extra_columns(self, output, trajectories, rows):
        """(R, T) `gold_gain`: 0 but at the ends of turns."""
        contexts, golds, places = [], [], []
        for number, (row, index) in enumerate(zip(rows.rows, rows.index.tolist(), strict=True)):
            gold = None if index < 0 else trajectories[index].info.get("gold")
            given = gold if isinstance(gold, list | tuple) else [gold]
            answer = next((item for item in given if item not in (None, "")), None)
            if answer is None:
                continue
            ids = self.trainer.processing_class(self.template.format(answer), add_special_tokens=False)["input_ids"]
            for turn in sorted({turn for turn in row.turn_ids if turn >= 0}):
                start = row.turn_ids.index(turn)
                contexts.append([*row.prompt_ids, *row.completion_ids[:start]])
                golds.append(ids)
                places.append((index, turn, number, start + row.turn_ids.count(turn) - 1))
        log_probs = self.trainer.score_tokens(contexts, golds)
        likely = [row[: len(ids)].mean().exp() for row, ids in zip(log_probs, golds, strict=True)]
        before = {(index, turn): p for (index, turn, *_), p in zip(places, likely, strict=True)}
        gains = torch.zeros(output["completion_mask"].shape, device=log_probs.device)
        for index, turn, number, end in places:
            if (index, turn + 1) in before:
                gains[number, end] = before[index, turn + 1] - before[index, turn]
        return {"gold_gain": gains}


def igpo(inputs):
    """(N, T) advantages of `turn_grpo`, and those of the gains, each compared with their own spread."""
    gains = torch.zeros_like(inputs.turn_rewards)
    gains.scatter_add_(1, inputs.turn_ids.clamp(min=0), inputs.columns["gold_gain"].to(gains) * (inputs.turn_ids >= 0))
    lost, gamma = 0 * inputs.outcome_rewards, inputs.settings.gamma_turn  # NaN stays
    parts = [(inputs.turn_rewards, inputs.outcome_rewards), (gains, lost)]  # one spread for both would blow up either
    places = (inputs.turn_ids, inputs.group_ids)
    return Credit(advantages=sum(compute_turn_group_advantages(*part, *places, gamma_turn=gamma) for part in parts))


IGNORES = ("process_reward_weight", "outcome_reward_weight", "separate_process_advantages")  # all parts are normalised
IGPO = Estimator(name="igpo", compute=igpo, needs_group=True, options=("gamma_turn",), ignores=IGNORES)
