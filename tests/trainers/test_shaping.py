"""The shape of a rollout: its formulas on one process and on two, and what is derived from them."""

import re
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
import yaml
from transformers import TrainingArguments
from trl import GRPOConfig

from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnPPOConfig, config_checks
from tests.trainers.helpers import make_args, make_trainer

CPU = {"output_dir": "unused", "bf16": False, "use_cpu": True}
EIGHT = {"num_generations": 8}


@pytest.fixture(params=[1, 2])
def processes(request, monkeypatch):
    """The number of processes that the launcher announced and that train together."""
    run_on(monkeypatch, request.param)
    return request.param


def run_on(monkeypatch, announced, training=None):
    monkeypatch.setattr(config_checks, "num_processes", lambda: announced)
    world_size = mock.PropertyMock(return_value=training or announced)
    monkeypatch.setattr(TrainingArguments, "world_size", world_size)


def shape_of(config_class=MultiTurnGRPOConfig, **options):
    shape = config_class(**CPU, **options).rollout_shape
    return (
        shape.prompts_per_rollout,
        shape.responses_per_prompt,
        shape.updates_per_rollout,
        shape.trajectories_per_update,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # TRL's own settings: prompts = 4 * processes * 6 / 8; updates = 6 / 3 * 2; trajectories = 4 * processes * 3
        (
            {"per_device_train_batch_size": 4, "steps_per_generation": 6, "gradient_accumulation_steps": 3, **EIGHT}
            | {"num_iterations": 2},
            {1: (3, 8, 4, 12), 2: (6, 8, 4, 24)},
        ),
        # by default a rollout is one update; a step may take its rows from two rollouts
        ({"gradient_accumulation_steps": 4, **EIGHT}, {1: (4, 8, 1, 32), 2: (8, 8, 1, 64)}),
        ({"gradient_accumulation_steps": 4, **EIGHT, "num_iterations": 3}, {1: (4, 8, 3, 32), 2: (8, 8, 3, 64)}),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2, **EIGHT},
            {1: (3, 8, 1.5, 16), 2: (6, 8, 1.5, 32)},
        ),
        # prompts alone: one update per accumulated batch
        ({"prompts_per_rollout": 8}, {1: (8, 4, 4, 8), 2: (8, 4, 2, 16)}),
        ({"prompts_per_rollout": 8, "gradient_accumulation_steps": 2}, {1: (8, 4, 2, 16), 2: (8, 4, 1, 32)}),
        # updates alone: so many batches of the given size
        ({"updates_per_rollout": 4}, {1: (8, 4, 4, 8), 2: (16, 4, 4, 16)}),
        ({"updates_per_rollout": 4, "gradient_accumulation_steps": 2}, {1: (16, 4, 4, 16), 2: (32, 4, 4, 32)}),
        ({"updates_per_rollout": 4, "num_iterations": 2}, {1: (4, 4, 4, 8), 2: (8, 4, 4, 16)}),
        ({"updates_per_rollout": 2, "steps_per_generation": 4}, {1: (8, 4, 2, 16), 2: (16, 4, 2, 32)}),
        ({"updates_per_rollout": 2, "generation_batch_size": 32}, {1: (8, 4, 2, 16), 2: (8, 4, 2, 16)}),
        # both, and what follows from them written beside them
        ({"prompts_per_rollout": 8, "updates_per_rollout": 2}, {1: (8, 4, 2, 16), 2: (8, 4, 2, 16)}),
        (
            {"prompts_per_rollout": 8, "updates_per_rollout": 2, "generation_batch_size": 32},
            {1: (8, 4, 2, 16), 2: (8, 4, 2, 16)},
        ),
        (
            {"prompts_per_rollout": 8, "updates_per_rollout": 4, "num_iterations": 2},
            {1: (8, 4, 4, 16), 2: (8, 4, 4, 16)},
        ),
    ],
)
def test_a_rollout_has_the_shape_that_was_asked_for(processes, options, expected):
    options = {"per_device_train_batch_size": 8, "num_generations": 4} | options
    assert shape_of(**options) == expected[processes]


@pytest.mark.parametrize(
    ("options", "named", "fix"),
    [
        ({"prompts_per_rollout": 3}, "prompts_per_rollout", {"prompts_per_rollout": 4}),
        ({"prompts_per_rollout": 0}, "prompts_per_rollout", {"prompts_per_rollout": 2}),
        ({"prompts_per_rollout": 8, "num_generations": None}, "num_generations", {"num_generations": 4}),
        ({"prompts_per_rollout": True}, "prompts_per_rollout", {"prompts_per_rollout": None}),
        ({"updates_per_rollout": 1.5}, "updates_per_rollout", {"updates_per_rollout": 1}),
        (
            {"prompts_per_rollout": 8, "updates_per_rollout": 3},
            "updates_per_rollout=3: .*one of 1, 2, 4,",
            {"updates_per_rollout": 4},
        ),
        (
            {"updates_per_rollout": 3, "num_iterations": 2},
            r"updates_per_rollout=3: .*passed over 2 times \(num_iterations\).* to one of 2\b",
            {"updates_per_rollout": 2},
        ),
        (
            {"prompts_per_rollout": 8, "steps_per_generation": 2},
            "steps_per_generation=2 beside prompts_per_rollout=8.*follows as 4",
            {"steps_per_generation": 4},
        ),
        (
            {"prompts_per_rollout": 8, "generation_batch_size": 16},
            "generation_batch_size=16 beside prompts_per_rollout=8.*follows as 32",
            {"generation_batch_size": None},
        ),
        (
            {"prompts_per_rollout": 8, "updates_per_rollout": 1, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2 beside updates_per_rollout=1.*follows as 4",
            {"gradient_accumulation_steps": 4},
        ),
    ],
)
def test_what_does_not_divide_or_contradicts_is_refused_by_name_and_the_fix_works(options, named, fix):
    options = {"per_device_train_batch_size": 8, "num_generations": 4, **options}
    with pytest.raises(ValueError, match=rf"\b{named}"):
        shape_of(**options)
    shape_of(**(options | fix))


def test_prompts_that_fill_one_process_but_not_two_name_a_number_that_fills_both(monkeypatch):
    options = {"per_device_train_batch_size": 8, "num_generations": 4}
    assert shape_of(**options, prompts_per_rollout=6)[0] == 6
    run_on(monkeypatch, 2)
    with pytest.raises(ValueError, match=r"prompts_per_rollout=6 .*2 process\(es\).* multiple of 4"):
        shape_of(**options, prompts_per_rollout=6)
    assert shape_of(**options, prompts_per_rollout=4)[0] == 4


def test_another_number_of_processes_than_was_announced_is_refused(monkeypatch):
    run_on(monkeypatch, 1, training=2)
    with pytest.raises(ValueError, match=r"prompts_per_rollout=4: 2 process\(es\) train together"):
        shape_of(per_device_train_batch_size=8, num_generations=4, prompts_per_rollout=4)


def test_the_number_of_processes_is_the_launchers_before_torch_knows_it(monkeypatch):
    monkeypatch.setattr(config_checks.PartialState, "_shared_state", {})
    for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert config_checks.num_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert config_checks.num_processes() == 4


def test_neither_option_is_set_by_default():
    assert MultiTurnGRPOConfig.from_grpo_config(GRPOConfig(**CPU)).prompts_per_rollout is None


def test_the_trainer_samples_and_updates_in_this_shape(tmp_path):
    trainer = make_trainer(
        tmp_path, per_device_train_batch_size=4, prompts_per_rollout=4, updates_per_rollout=2, max_steps=4
    )
    batches = []
    trainer.rollouts.generate = mock.Mock(side_effect=trainer.rollouts.generate)
    trainer.train()
    batches = [len(call.args[0]) for call in trainer.rollouts.generate.call_args_list]
    assert batches == [16, 16]  # 4 prompts x 4 responses, sampled for 2 updates each
    assert trainer.state.global_step == 4
    assert make_args(tmp_path).rollout_shape.updates_per_rollout == 1


def test_the_recipes_of_the_page_have_the_shape_that_it_says(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "filtering.md").read_text(encoding="utf-8")
    page = page.split("\n## The shape of a rollout\n")[1].split("\n## ")[0]
    ragen, better = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    known = {item.name for item in fields(MultiTurnPPOConfig)}
    ragen = {name: value for name, value in ragen.items() if name not in ("trainer", "turn_reward_funcs")}
    assert set(ragen) <= known
    table = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(table) == 4
    for count, steps, accumulated, trajectories in (map(int, row) for row in table):
        run_on(monkeypatch, count)
        args = MultiTurnPPOConfig(**CPU, **ragen)
        assert str(args.rollout_shape).startswith("8 prompts x 16 responses per rollout, 4 update(s) of ")
        assert (args.steps_per_generation, args.gradient_accumulation_steps) == (steps, accumulated)
        assert shape_of(MultiTurnPPOConfig, **ragen) == (8, 16, 4, trajectories)
        assert shape_of(**better) == (32, 4, 1, 128)
