"""A user's estimator trains like ours, also with a critic; how it is given, and what its row declares."""

import functools
import json
import sys

import pytest
import torch

from agent_r1_trl.advantages import compute_gae
from agent_r1_trl.advantages.estimators import Credit, Estimator
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig, MultiTurnPPOTrainer
from tests.test_docs import ROOT, code_blocks
from tests.trainers.helpers import make_trainer, scored_batch


def my_grpo(inputs):
    """GRPO, written down from its formula, group by group; what stands outside the mask is left to the package."""
    returns = inputs.returns.double()
    advantages = torch.zeros_like(returns)
    for group in inputs.group_ids.unique():
        rows = (inputs.group_ids == group) & inputs.in_baseline
        centred = returns[rows] - returns[rows].mean()
        std = (centred.square().sum() / max(1, len(centred) - 1)).sqrt()
        advantages[rows] = centred / (std + 1e-4) if std > 1e-6 * returns[rows].abs().max() else 0.0
    advantages[~inputs.in_baseline] = float("nan")
    return Credit(advantages=advantages.float())


def my_gae(inputs):
    """GAE by the package's function, as an estimator of the PPO trainer."""
    advantages, returns = compute_gae(
        inputs.token_rewards, inputs.values, inputs.mask, gamma=inputs.settings.gamma, lam=inputs.settings.lam
    )
    return Credit(advantages=advantages.masked_fill(~inputs.mask, 9.0), returns=returns)


def scaled(inputs, factor):
    return Credit(advantages=factor * inputs.returns)


CPU = {"output_dir": "unused", "bf16": False, "use_cpu": True}


@pytest.mark.parametrize("has_critic", [False, True])
def test_it_is_bit_for_bit_the_estimator_that_it_copies(tmp_path, has_critic):
    """On several ranks a user's estimator runs in `tests/distributed/agreement.py`."""
    critic = {"trainer": MultiTurnPPOTrainer, "critic": "head", "gamma": 0.9, "num_generations": 1}
    ours, own = ("gae", my_gae) if has_critic else ("grpo", my_grpo)
    batches = [
        scored_batch(make_trainer(tmp_path, advantage_estimator=given, **critic if has_critic else {}))
        for given in (ours, own)
    ]
    assert torch.equal(*(batch["advantages"] for batch in batches)) and batches[0]["advantages"].any()


# -------------------------------------------------------------------- how it is given


def test_it_survives_files_and_checkpoints_under_its_name(tmp_path):
    row = Estimator(name="my_row", compute=my_grpo, needs_group=True)
    for given, name in (
        (my_grpo, f"{__name__}:my_grpo"),
        (f"{__name__}.my_grpo", f"{__name__}.my_grpo"),
        (row, "my_row"),
        (functools.partial(scaled, factor=2.0), f"{__name__}:scaled(factor=2.0)"),
    ):
        trainer = make_trainer(tmp_path, advantage_estimator=given)
        scored_batch(trainer)
        assert trainer.args.to_dict()["advantage_estimator"] == name
        assert json.loads(trainer.args.to_json_string())["advantage_estimator"] == name
        trainer.save_model(tmp_path)
        stored = torch.load(tmp_path / "training_args.bin", weights_only=False).advantage_estimator
        assert (type(stored), stored) == (str, name)
        trainer.create_model_card()
        assert f"Advantages: `{name}`" in (tmp_path / "README.md").read_text()


def test_a_lambda_trains_and_is_stored_under_a_name_that_cannot_be_loaded(tmp_path):
    trainer = make_trainer(tmp_path, advantage_estimator=lambda inputs: Credit(advantages=inputs.mask.float()))
    batch = scored_batch(trainer)
    assert batch["advantages"].equal((batch["tool_mask"] * batch["completion_mask"]).float())
    trainer.save_model(tmp_path)
    stored = torch.load(tmp_path / "training_args.bin", weights_only=False).advantage_estimator
    with pytest.raises(ValueError, match=r"advantage_estimator='.*<lambda>'"):
        MultiTurnGRPOConfig(**CPU, advantage_estimator=stored)


def test_it_is_called_once_unless_parts_are_weighed_apart(tmp_path):
    calls = []

    def counted(inputs):
        calls.append(inputs)
        return my_grpo(inputs)

    for options, num_calls in (({}, 1), ({"separate_process_advantages": True}, 2)):
        calls.clear()
        trainer = make_trainer(tmp_path, advantage_estimator=counted, **options)
        scored_batch(trainer)
        assert len(calls) == num_calls
        assert ("credit/outcome_advantage_abs" in trainer._metrics["train"]) == (num_calls == 2)


def test_what_the_page_on_extending_shows_trains(tmp_path):
    page = {"__name__": "page"}
    for _, source in code_blocks(ROOT / "docs" / "extending.md", "python"):
        exec(source, page)
    rewards = {"reward_funcs": [page["short_answer"]], "turn_reward_funcs": [page["one_call_per_turn"]]}
    trainer = make_trainer(tmp_path, advantage_estimator=page["BEST_OF_GROUP"], trainer=page["LessCertain"], **rewards)
    assert (scored_batch(trainer)["advantages"] <= 0).all()
    assert all(name in trainer._metrics["train"] for name in ("reward_parts/short_answer", "reward/process"))
    names = {"loss_term": "imitate", "sampling.filter_groups": "within_reach", "context.policy": "last_turn"}
    trainer = make_trainer(
        tmp_path, callbacks=[page["CallsOnly"]()], **{flag: page[name] for flag, name in names.items()}
    )
    trainer.rollouts._generator = page["Longer"](trainer.rollouts._generator)
    trainer.train()
    assert all(name in trainer.state.log_history[0] for name in ("loss_term", "my/call_share"))
    assert all(len(item.rows) > 1 for item in trainer.last_trajectories)
    options = {"advantage_estimator": page["monte_carlo"], "num_generations": 1, "critic": "head"}
    batch = scored_batch(make_trainer(tmp_path, trainer=MultiTurnPPOTrainer, **options))
    assert (batch["returns"] != 0).any()


def test_a_file_is_read_once(tmp_path):
    source = "import sys\nsys.own_reads = getattr(sys, 'own_reads', 0) + 1\n"
    (tmp_path / "own.py").write_text(source + "def mine(inputs):\n    raise RuntimeError\n")
    sys.own_reads = 0
    config = MultiTurnGRPOConfig(**CPU, advantage_estimator=f"{tmp_path}/own.py:mine")
    assert config.estimator is config.estimator
    assert sys.own_reads == 1
    assert config.advantage_estimator == f"{tmp_path}/own.py:mine"


# -------------------------------------------------------------------- what its row declares


def test_the_checks_read_its_row():
    grouped = Estimator(name="own", compute=my_grpo, needs_group=True, default_gamma_turn=0.5, loss_type="dr_grpo")
    config = MultiTurnGRPOConfig(**CPU, advantage_estimator=grouped)
    assert (config.gamma_turn, config.loss_type) == (0.5, "dr_grpo")
    reads_kl = Estimator(name="own", compute=my_grpo, reads_token_rewards=True)
    MultiTurnGRPOConfig(**CPU, advantage_estimator=reads_kl, kl_placement="reward", beta=0.1)
    MultiTurnGRPOConfig(**CPU, advantage_estimator=my_grpo, num_generations=1)
    assert MultiTurnPPOConfig(**CPU, advantage_estimator=my_gae).estimator.needs_critic
    critic = Estimator(name="own", compute=my_gae, needs_critic=True)
    ignoring = Estimator(name="own", compute=my_grpo, ignores=("scale_rewards",))
    for config_class, options, flag in (
        (MultiTurnGRPOConfig, {"advantage_estimator": grouped, "num_generations": 1}, "num_generations"),
        (MultiTurnGRPOConfig, {"advantage_estimator": grouped, "loss_type": "bnpo"}, "loss_type"),
        (MultiTurnGRPOConfig, {"advantage_estimator": my_grpo, "kl_placement": "reward", "beta": 0.1}, "kl_placement"),
        (MultiTurnGRPOConfig, {"advantage_estimator": critic}, "advantage_estimator='own' is made with a critic"),
        (MultiTurnGRPOConfig, {"advantage_estimator": ignoring, "scale_rewards": "batch"}, "scale_rewards"),
        (MultiTurnPPOConfig, {"advantage_estimator": grouped}, "advantage_estimator='own' is made without a critic"),
        (MultiTurnPPOConfig, {"advantage_estimator": critic, "separate_process_advantages": True}, "separate_process"),
    ):
        with pytest.raises(ValueError, match=flag):
            config_class(**CPU, **options)


def test_a_result_that_does_not_fit_ends_the_run_with_its_name_and_the_fix(tmp_path):
    def counts_everybody(inputs):
        return Credit(advantages=inputs.returns - inputs.returns.mean() * float("nan"))

    trainer = make_trainer(tmp_path, advantage_estimator=counts_everybody)
    with pytest.raises(ValueError, match=r"advantage_estimator=.*counts_everybody returned .* not finite\. Look for"):
        scored_batch(trainer)
