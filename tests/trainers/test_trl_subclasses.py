"""What a user's subclass overrides, written for TRL's trainer, counts in ours."""

import ast
import inspect
import textwrap

import pytest
import torch
from trl import GRPOTrainer

from agent_r1_trl.testing import say
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers.construction import NEVER_CALLED
from tests.effort import nightly
from tests.trainers.helpers import make_trainer, scored_batch, two_turns


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
    "options",
    [{"sampling.resample_rounds": 1}, *nightly({}, {"trainer": MultiTurnPPOTrainer, "critic": "head"})],
    ids=str,
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


# ---------------------------------------------------------------- methods that our rollout never calls


def trl_methods():
    """TRL's methods by name, with the names of its methods that each calls on `self`."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer))).body
    methods = {item.name: item for item in tree.body if isinstance(item, ast.FunctionDef)}
    return {
        name: {
            node.attr
            for node in ast.walk(item)
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "self" and node.attr in methods
        }
        for name, item in methods.items()
    }


def test_the_methods_that_are_refused_are_those_that_only_trls_own_generation_reaches():
    calls = trl_methods()
    of_generation, todo = {"_generate"}, ["_generate"]
    while todo:
        todo += calls[todo.pop()] - of_generation
        of_generation.update(todo)
    outside = set().union(*(calls[name] for name in calls if name not in of_generation))
    assert outside & of_generation == {"_generate"}  # which TRL's own scoring calls, and ours does not
    assert set(NEVER_CALLED) == of_generation


def ignored(self, *args, **kwargs):
    raise AssertionError("never called")


@pytest.mark.parametrize("name", NEVER_CALLED)
@pytest.mark.parametrize("base", [MultiTurnGRPOTrainer, *nightly(MultiTurnPPOTrainer)])
def test_a_method_that_our_rollout_never_calls_is_refused_by_name_at_construction(tmp_path, base, name):
    kind = type("Mine", (base,), {name: ignored})
    with pytest.raises(ValueError, match=rf"^{name} of TRL's trainer is replaced \(Mine\).*Remove it and "):
        make_trainer(tmp_path, trainer=kind, reward_funcs=[length])


@pytest.mark.parametrize("is_in_front", [True, False])
def test_a_mix_in_that_replaces_such_a_method_is_refused_on_either_side(tmp_path, is_in_front):
    mix_in = type("Sampler", (GRPOTrainer,), {"_generate_single_turn": ignored})
    bases = (mix_in, MultiTurnGRPOTrainer) if is_in_front else (MultiTurnGRPOTrainer, mix_in)
    with pytest.raises(ValueError, match=r"_generate_single_turn .*\(Sampler\).*pass generator="):
        make_trainer(tmp_path, trainer=type("Mine", bases, {}), reward_funcs=[length])


def test_a_patch_of_trls_class_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_tool_call_loop", ignored)
    with pytest.raises(ValueError, match=r"_tool_call_loop .*\(GRPOTrainer, patched\).*pass env="):
        make_trainer(tmp_path, reward_funcs=[length])


def test_one_that_is_set_on_the_trainer_is_refused_at_the_next_rollout(tmp_path):
    trainer = make_trainer(tmp_path, reward_funcs=[length])
    trainer._generate = ignored
    with pytest.raises(ValueError, match=r"^_generate .*\(an attribute of the trainer\)"):
        trainer.train()


# ---------------------------------------------------------------- entries of one's own


def answers_and_calls(rng, turn):
    """Up to three turns, so that a window of one turn makes several rows."""
    return say("x" * rng.randrange(1, 9)) if turn == 2 or rng.random() < 0.3 else two_turns(rng, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"context.policy": "window", "context.turns": 1, "max_turns": 4, "update_layout": "grouped"},
        {"update_layout": "shared", "max_tokens_per_micro_batch": 400},
        *nightly(
            {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4},
            {"context.policy": "window", "context.turns": 1, "max_turns": 4},
            {"sampling.filter_groups": "min_p", "sampling.filter_value": 0.01},
        ),
    ],
    ids=str,
)
def test_an_entry_that_a_subclass_adds_to_the_batch_reaches_the_loss_beside_its_row(tmp_path, options):
    class Tagging(MultiTurnGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["tag"] = (output["completion_ids"] * output["completion_mask"]).sum(dim=1)
            output["names"] = [str(tag) for tag in output["tag"].tolist()]
            return output

        def _compute_loss(self, model, inputs):
            in_loss = (inputs["completion_mask"] * inputs["tool_mask"]).any(dim=1)  # others fill up
            sums = (inputs["completion_ids"] * inputs["completion_mask"]).sum(dim=1)
            assert torch.equal(inputs["tag"][in_loss], sums[in_loss])
            names = zip(inputs["names"], inputs["tag"].tolist(), in_loss.tolist(), strict=True)
            assert all(name == str(tag) for name, tag, is_one in names if is_one)
            seen.append(int(in_loss.sum()))
            return super()._compute_loss(model, inputs)

    seen = []
    make_trainer(tmp_path, trainer=Tagging, script=answers_and_calls, **options).train()
    assert sum(seen) >= 4
