"""What a user's subclass overrides, written for TRL's trainer, counts in ours."""

import pytest
import torch

from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from tests.trainers.helpers import make_trainer, scored_batch


def length(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def plus_fifteen(kind, calls_super):
    class Changed(kind):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            if calls_super:
                return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list) + 15
            rows = [[float(len(ids)) + 15] * len(self.reward_funcs) for ids in completion_ids_list]
            return self.accelerator.gather(torch.tensor(rows))

    return Changed


@pytest.mark.parametrize("calls_super", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"resample_rounds": 1}, {"trainer": MultiTurnPPOTrainer, "critic": "head"}], ids=str
)
def test_rewards_that_a_subclass_changes_are_those_that_count(tmp_path, options, calls_super):
    options = {"trainer": MultiTurnGRPOTrainer, "reward_funcs": [length], **options}
    trainer = make_trainer(tmp_path, **options | {"trainer": plus_fifteen(options["trainer"], calls_super)})
    scored_batch(trainer)
    for item in trainer.last_trajectories:
        assert item.reward_parts["length"] == len(item.completion_ids) + 15
    logged = trainer._metrics["train"]["rewards/length/mean"][-1]
    assert logged == pytest.approx(sum(len(item.completion_ids) + 15 for item in trainer.last_trajectories) / 8)


@pytest.mark.parametrize("returned", [None, torch.zeros(3), torch.full((8, 1), float("inf"))], ids=str)
def test_rewards_of_another_form_are_refused_by_the_name_of_the_method(tmp_path, returned):
    class Wrong(MultiTurnGRPOTrainer):
        def _calculate_rewards(self, *args):
            return returned

    trainer = make_trainer(tmp_path, trainer=Wrong, reward_funcs=[length])
    with pytest.raises(ValueError, match=r"Wrong._calculate_rewards returned"):
        scored_batch(trainer)
