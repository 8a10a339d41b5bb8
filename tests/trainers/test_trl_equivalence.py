"""One turn without tools through our own rollout is TRL's GRPO: same loss, same gradients, same advantages."""

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from agent_r1_trl.testing import make_tokenizer
from tests.effort import nightly
from tests.trainers.helpers import (
    loss_and_gradients,
    make_args,
    make_trainer,
    questions,
    scored_batch,
)

TEXTS = Dataset.from_list([{"prompt": f"The answer to question {index} is"} for index in range(8)])


def ids_reward(completion_ids, **kwargs):
    return [float(sum(ids) % 5) for ids in completion_ids]


class GivenSamples(GRPOTrainer):
    """TRL's trainer, sampling what it is told: everything after sampling is TRL's own."""

    samples: list

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return self.samples, None


def trl_trainer(model, args, samples, dataset):
    tokenizer = make_tokenizer("qwen3")
    values = {k: v for k, v in args.to_dict().items() if k in GRPOConfig.__dataclass_fields__}
    values.pop("generation_batch_size")
    plain = GRPOConfig(**{name: value for name, value in values.items() if not str(value).startswith("<")})
    trainer = GivenSamples(
        model=model, reward_funcs=ids_reward, args=plain, train_dataset=dataset, processing_class=tokenizer
    )
    trainer.samples = samples
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.04},
        {"loss_type": "bnpo", "scale_rewards": "batch"},
        {"steps_per_generation": 2, "num_iterations": 2},
        *nightly(
            {"loss_type": "grpo"},
            {"loss_type": "dr_grpo", "scale_rewards": "none"},
            {"loss_type": "cispo", "epsilon_high": 0.3},
            {"loss_type": "sapo"},
            {"importance_sampling_level": "sequence", "loss_type": "grpo"},
            {"top_entropy_quantile": 0.5},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("dataset", [questions(), TEXTS], ids=["conversations", "texts"])
def test_one_turn_without_tools_equals_trl(tmp_path, options, dataset, policy_path):
    settings = {"model": policy_path, "max_completion_length": 12, "train_dataset": dataset, **options}
    ours = make_trainer(tmp_path, script=None, env=None, reward_funcs=ids_reward, **settings)
    batch = scored_batch(ours)
    lengths = batch["completion_mask"].sum(1).tolist()
    samples = [ids[:length] for ids, length in zip(batch["completion_ids"].tolist(), lengths, strict=True)]
    assert len({tuple(ids) for ids in samples}) > 4
    theirs = trl_trainer(policy_path, make_args(tmp_path, max_completion_length=12, **options), samples, dataset)
    expected = scored_batch(theirs)
    torch.testing.assert_close(batch["prompt_ids"], expected["prompt_ids"])
    torch.testing.assert_close(batch["completion_ids"], expected["completion_ids"])
    wide = expected["advantages"].unsqueeze(1) * batch["completion_mask"]
    torch.testing.assert_close(batch["advantages"], wide, rtol=0, atol=1e-6)
    loss, gradients = loss_and_gradients(ours, batch)
    expected_loss, expected_gradients = loss_and_gradients(theirs, expected)
    assert expected_gradients.keys() == gradients.keys()
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-6)
    assert any(gradient.abs().max() > 1e-4 for gradient in expected_gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=1e-6, msg=name)
