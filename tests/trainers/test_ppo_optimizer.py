"""The optimizer step of PPO: two learning rates, two gradient norms, a policy that a warm-up does not move."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from transformers.trainer_utils import SchedulerType

from agent_r1_trl.critic.attach import critic_parameters, is_critic_name
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnPPOConfig
from agent_r1_trl.trainers.ppo import check_deepspeed_config, check_optimizer_setup, clip_by_role
from tests.effort import nightly
from tests.trainers.helpers import Remember, make_args, questions
from tests.trainers.test_ppo_trainer import make_ppo, random_head


def weights(trainer, *, of_critic):
    return {
        name: value.detach().clone()
        for name, value in trainer.model.named_parameters()
        if is_critic_name(name) is of_critic
    }


def moved(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def rates(trainer):
    groups = trainer.optimizer.param_groups
    assert all(group["params"] for group in groups)
    return {role: {group["lr"] for group in groups if group["role"] == role} for role in ("policy", "critic")}


# -------------------------------------------------------------------- a user's own optimizer


def with_own_optimizer(tmp_path, **options):
    policy = make_policy(make_tokenizer("qwen3"))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2, momentum=0.9)
    return make_ppo(tmp_path, "head", model=policy, optimizers=(optimizer, None), max_steps=2, **options)


@pytest.mark.parametrize(("own_rate", "expected"), [(None, 1e-2), (5e-2, 5e-2)])
def test_a_users_own_optimizer_trains_the_critic_too(tmp_path, own_rate, expected):
    trainer = with_own_optimizer(tmp_path, critic_learning_rate=own_rate, lr_scheduler_type="constant")
    random_head(trainer)
    before = weights(trainer, of_critic=True)
    trainer.train()
    assert moved(before, weights(trainer, of_critic=True)) == set(before)
    assert rates(trainer) == {"policy": {1e-2}, "critic": {expected}}


def test_a_scheduler_of_ones_own_is_refused_unless_it_knows_the_critic(tmp_path):
    trainer = make_ppo(tmp_path, "head", max_steps=1)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1e-2)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    with pytest.raises(ValueError, match=r"optimizers=\(\.\.\., scheduler\), or .*lr_scheduler_type"):
        trainer.create_optimizer()
    critic = list(critic_parameters(trainer.model).values())
    known = {id(parameter) for parameter in critic}
    policy = [parameter for parameter in trainer.model.parameters() if id(parameter) not in known]
    trainer.optimizer = torch.optim.SGD([{"params": policy}, {"params": critic, "lr": 0.3}], lr=1e-2)
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, factor=1.0)
    trainer.train()
    assert rates(trainer) == {"policy": {1e-2}, "critic": {0.3}}


def test_an_optimizer_class_of_the_users_own_gets_both_rates(tmp_path):
    trainer = make_ppo(tmp_path, "head", critic_learning_rate=0.3)
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 1e-2})
    trainer.create_optimizer()
    assert rates(trainer) == {"policy": {1e-2}, "critic": {0.3}}


def test_training_twice_keeps_the_critics_rate(tmp_path):
    trainer = make_ppo(tmp_path, "head", critic_learning_rate=0.3, lr_scheduler_type="constant")
    trainer.train()
    trainer.train()
    assert rates(trainer) == {"policy": {1e-3}, "critic": {0.3}}


def test_an_optimizer_inside_the_backward_pass_is_refused(tmp_path):
    for name in ("lomo", "adalomo", "galore_adamw_layerwise"):
        with pytest.raises(ValueError, match=f"optim='{name}'.*adamw_torch"):
            make_args(tmp_path, MultiTurnPPOConfig, num_generations=1, optim=name)


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
@pytest.mark.parametrize("option", [{"critic_learning_rate": 1e-4}, {"critic_warmup_steps": 3}])
def test_deepspeeds_own_optimizer_is_refused_where_the_critics_differs(tmp_path, section, option):
    args = make_args(tmp_path, MultiTurnPPOConfig, num_generations=1, **option)
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.* DeepSpeed configuration that has '{section}'"):
        check_deepspeed_config({section: {"type": "AdamW"}, "zero_optimization": {}}, args)
    check_deepspeed_config({"zero_optimization": {}}, args)
    check_deepspeed_config({section: {}}, make_args(tmp_path, MultiTurnPPOConfig, num_generations=1))


# -------------------------------------------------------------------- warm-up

SCHEDULES = {
    "reduce_lr_on_plateau": {"metric_for_best_model": "eval_loss", "eval_strategy": "steps", "eval_steps": 1},
    "greedy": {"metric_for_best_model": "eval_loss", "eval_strategy": "steps", "eval_steps": 1},
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-4}},
    "cosine_warmup_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 1e-4}},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 1}},
}
OPTIMIZERS = {
    "adamw_torch": {},
    "sgd": {"optim_args": "momentum=0.9"},
    "rmsprop": {"optim_args": "momentum=0.9"},
    "adagrad": {},
    "adafactor": {},
}


def assert_warm_up_moves_the_critic_alone(tmp_path, kind="head", **options):
    watch = Remember()
    trainer = make_ppo(
        tmp_path, kind, max_steps=2, critic_warmup_steps=1, weight_decay=0.5, per_device_train_batch_size=2,
        callbacks=[watch], eval_dataset=questions(2), per_device_eval_batch_size=2, **options,
    )  # fmt: skip
    start = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    critic = {name for name in trained if is_critic_name(name)}
    early = moved(start, watch.seen[1])
    assert early == critic if kind == "head" else early and early <= critic  # a LoRA begins with half of it at 0
    assert any(not is_critic_name(name) for name in moved(watch.seen[1], watch.seen[2]))
    assert next(row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row) == 0.0


USUAL = ("linear", "reduce_lr_on_plateau")


@pytest.mark.parametrize("schedule", [*USUAL, *nightly(*sorted({item.value for item in SchedulerType} - {*USUAL}))])
def test_no_schedule_moves_the_policy_during_warm_up(tmp_path, schedule):
    assert_warm_up_moves_the_critic_alone(tmp_path, lr_scheduler_type=schedule, **SCHEDULES.get(schedule, {}))


@pytest.mark.parametrize("kind", ["adapter", *nightly("model")])
def test_no_critic_moves_the_policy_during_warm_up(tmp_path, kind):
    assert_warm_up_moves_the_critic_alone(tmp_path, kind, with_lora=True, beta=0.04)


@pytest.mark.parametrize("optimizer", ["sgd", *nightly(*sorted(OPTIMIZERS.keys() - {"sgd"}))])
def test_no_optimizer_moves_the_policy_during_warm_up(tmp_path, optimizer):
    options = {"optim": optimizer, "lr_scheduler_type": "constant", **OPTIMIZERS[optimizer]}
    assert_warm_up_moves_the_critic_alone(tmp_path, max_grad_norm=0.0, **options)


# -------------------------------------------------------------------- clipping


def test_each_norm_is_clipped_by_its_own_limit_and_the_scale_is_taken_off_once():
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 1, bias=False)})
    model["value_head"] = torch.nn.Linear(2, 1, bias=False)
    unscaled = []

    def clip(parameters, limit):  # accelerate's, which takes the scale off and must not do so twice
        assert not unscaled
        unscaled.append(True)
        return torch.nn.utils.clip_grad_norm_(parameters, limit)

    def clipped(max_grad_norm, critic_max_grad_norm):
        unscaled.clear()
        model["layer"].weight.grad = torch.tensor([[3.0, 4.0]])  # norm 5
        model["value_head"].weight.grad = torch.tensor([[30.0, 40.0]])  # norm 50
        args = SimpleNamespace(max_grad_norm=max_grad_norm, critic_max_grad_norm=critic_max_grad_norm)
        norms = clip_by_role(model, args, SimpleNamespace(clip_grad_norm_=clip))
        assert [norm.item() for norm in norms] == [5.0, 50.0]
        return [round(model[name].weight.grad.norm().item(), 3) for name in ("layer", "value_head")]

    assert clipped(1.0, None) == [1.0, 1.0]
    assert clipped(10.0, 2.0) == [5.0, 2.0]
    assert clipped(0.0, 2.0) == [5.0, 2.0]
    assert clipped(1.0, 0.0) == [1.0, 50.0]
    assert clipped(0.0, None) == [5.0, 50.0]


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_the_critics_gradient_does_not_shrink_the_policys_step(tmp_path, kind):
    def step(coefficient):
        trainer = make_ppo(tmp_path, kind, optim="sgd", value_loss_coef=coefficient, max_grad_norm=0.01)
        random_head(trainer)
        trainer.train()
        row = next(row for row in trainer.state.log_history if "grad_norm" in row)
        return weights(trainer, of_critic=False), row["grad_norm"], row["critic/grad_norm"]

    torch.manual_seed(0)
    small, policy_norm, critic_norm = step(1.0)
    torch.manual_seed(0)
    large, other_policy_norm, other_critic_norm = step(1000.0)
    assert not moved(small, large)
    assert other_policy_norm == pytest.approx(policy_norm)
    assert other_critic_norm == pytest.approx(1000 * critic_norm, rel=1e-3)


def test_deepspeed_which_clips_one_norm_refuses_a_second_limit_and_says_so(tmp_path):
    state = SimpleNamespace(deepspeed_plugin=None)
    accelerator = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, state=state)
    args = make_args(tmp_path, MultiTurnPPOConfig, num_generations=1, critic_max_grad_norm=2.0)
    with pytest.raises(ValueError, match=r"critic_max_grad_norm=2\.0 with DeepSpeed"):
        check_optimizer_setup(args, accelerator)
    args.critic_max_grad_norm = None
    with pytest.warns(UserWarning, match="clips one gradient norm"):
        check_optimizer_setup(args, accelerator)
