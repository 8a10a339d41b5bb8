"""The gallery of recipes/gallery: an estimator, and callbacks with a loss term and with columns."""

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch

from agent_r1_trl.advantages import CreditInputs
from agent_r1_trl.testing import AddEnv, call, say
from agent_r1_trl.trajectory import Author
from tests.learning.tasks import BanditEnv, learn
from tests.trainers.helpers import make_trainer, scored_batch

GALLERY = Path(__file__).parents[1] / "recipes" / "gallery"
MAX_LINES = 60


def load(name):
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", GALLERY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs_of(outcomes, groups, **changes):
    num = len(outcomes)
    given = {
        "mask": torch.ones(num, 3).bool(), "turn_ids": torch.tensor([[0, 0, 1]] * num),
        "group_ids": torch.tensor(groups),
        "process_token_rewards": torch.zeros(num, 3), "outcome_token_rewards": torch.zeros(num, 3),
        "turn_rewards": torch.zeros(num, 2), "outcome_rewards": torch.tensor(outcomes),
        "anchor_ids": torch.zeros(num, 2).long(),
    }  # fmt: skip
    return CreditInputs(**given | changes)


def test_every_file_is_short_and_says_how_a_recipe_names_it():
    files = sorted(GALLERY.glob("*.py"))
    assert [file.stem for file in files] == ["echo", "igpo", "maxrl"]
    for file in files:
        text = file.read_text()
        assert len(text.splitlines()) <= MAX_LINES and f"recipes/gallery/{file.name}:" in text


def test_maxrl_divides_by_the_groups_mean():
    lost = float("nan")
    inputs = inputs_of([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, lost], [0, 0, 0, 0, 1, 1, 2, 2])
    found = load("maxrl").MAXRL.estimate(inputs).advantages[:, 0]
    assert found.tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="one is -2"):
        load("maxrl").maxrl(inputs_of([1.0, -2.0], [0, 0]))


@pytest.mark.slow
def test_maxrl_solves_the_bandit(tmp_path):
    assert learn(tmp_path, BanditEnv, seed=0, max_rollouts=30, estimator=load("maxrl").MAXRL).is_solved


def test_igpo_adds_the_gains_to_the_turns():
    gains = torch.tensor([[0.0, 0.4, 0.0], [0.0, -0.2, 0.0]])
    igpo = load("igpo")
    inputs = inputs_of([1.0, 1.0], [0, 0], columns={"gold_gain": gains})
    found = igpo.IGPO.estimate(inputs).advantages
    want = 0.3 / (torch.tensor([0.4, -0.2]).std().item() + 1e-4)  # P_1 is the gain; the last turn has P_2 = 0
    assert found[:, 0].tolist() == pytest.approx([want, -want], rel=1e-4)
    rest = (0.0 - 0.1) / (torch.tensor([0.4, -0.2]).std().item() + 1e-4)
    assert found[:, 2].tolist() == pytest.approx([rest, rest], rel=1e-4)


def test_small_gains_do_not_blow_up_what_turns_earn_alike(tmp_path):
    columns = {"gold_gain": torch.tensor([[0.0, 4e-5, 0.0], [0.0, -2e-5, 0.0]])}
    alike = torch.tensor([[0.5, 0.0]] * 2)
    found = load("igpo").IGPO.estimate(inputs_of([1.0, 1.0], [0, 0], turn_rewards=alike, columns=columns)).advantages
    assert found.abs().max() < 1  # and not 0.5 in units of the gains
    with pytest.raises(ValueError, match=r"process_reward_weight=0\.3 has no effect with advantage_estimator='igpo'"):
        make_trainer(tmp_path, advantage_estimator=load("igpo").IGPO, process_reward_weight=0.3)


class GoldEnv(AddEnv):
    gold = ("7",)

    def outcome_reward(self, trajectory):
        trajectory.info["gold"] = self.gold
        return 1.0


def test_a_gain_is_what_the_model_says_of_the_answer_before_and_after_a_turn(tmp_path):
    igpo, options = load("igpo"), {"advantage_estimator": load("igpo").IGPO}
    trainer = make_trainer(tmp_path, env=GoldEnv, callbacks=[igpo.GoldGain()], update_layout="packed", **options)
    batch = scored_batch(trainer)
    gold = trainer.processing_class("<answer>7</answer>", add_special_tokens=False)["input_ids"]

    def likely(context):
        logits = trainer.model(input_ids=torch.tensor([[*context, *gold]])).logits[0, len(context) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(gold)[:, None]).mean().exp().item()

    item = trainer.last_trajectories[0]
    first, second = item.turns
    gain = likely([*item.prompt_ids, *item.completion_ids[: second.start]]) - likely(item.prompt_ids)
    column = batch["gold_gain"][0]
    assert column[first.end - 1].item() == pytest.approx(gain, abs=1e-6) and column.count_nonzero() == 1
    assert batch["advantages"].any(), "outcomes are alike: the gains alone compare"


def test_a_gold_answer_may_be_a_number_and_stand_behind_empty_ones(tmp_path, monkeypatch):
    gains = []
    for gold in ("0", 0, [0], [None, "", "0"], ("0", "1"), None, "", []):
        monkeypatch.setattr(GoldEnv, "gold", gold)
        trainer = make_trainer(tmp_path, env=GoldEnv, callbacks=[load("igpo").GoldGain()])
        gains.append(scored_batch(trainer)["gold_gain"])
    assert gains[0].any() and all(torch.equal(other, gains[0]) for other in gains[1:5])
    assert not any(other.any() for other in gains[5:])


def calls(rng, turn):
    return call(a=rng.randrange(9), b=10 ** rng.randrange(9)) if turn == 0 else say("x")


def test_echo_is_the_cross_entropy_of_what_tools_answered(tmp_path):
    trainer = make_trainer(tmp_path, script=calls, callbacks=[load("echo").Echo()], update_layout="shared")
    batch = scored_batch(trainer)
    trainer.compute_loss(trainer.model, batch)
    sums = []
    for item in trainer.last_trajectories:
        ids = torch.tensor([[*item.prompt_ids, *item.completion_ids]])
        log_probs = torch.log_softmax(trainer.model(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[
            :, 0
        ]
        mask = [author is Author.ENVIRONMENT for author in item.authors]
        assert any(mask)
        sums += log_probs[-len(mask) :][torch.tensor(mask)].tolist()
    assert trainer._metrics["train"]["echo_loss"] == [pytest.approx(-0.1 * sum(sums) / len(sums), rel=1e-4)]


def test_echo_learns_what_tools_answer(tmp_path):
    """With no reward at all, the observations become likely."""
    echo = load("echo").Echo()
    echo.coefficient = 1.0
    trainer = make_trainer(tmp_path, script=calls, callbacks=[echo], max_steps=12, learning_rate=1e-2)
    trainer.train()
    losses = [entry["echo_loss"] for entry in trainer.state.log_history if "echo_loss" in entry]
    assert losses[-1] < 0.7 * losses[0]


def test_the_parts_alone_train_without_a_trainer():
    namespace = runpy.run_path(str(GALLERY.parent / "parts_alone.py"))
    norms = namespace["main"](num_steps=1)
    assert len(norms) == 1 and 0 < norms[0] < 1000
