"""What is wrong with a recipe, or with the files it names, ends `train` before a model is loaded.

Every message names the setting, its value, the rule and the cure; none is a traceback. Covered: recipes, data sets,
tools, environments, rewards, models, checkpoints, folders. Not covered: ranges of settings (tests/test_bad_input.py).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from agent_r1_trl.cli.commands import main
from agent_r1_trl.generation import TransformersGenerator
from agent_r1_trl.generation.sync import SyncError


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Whoever asks the Hub for a name that is no path fails at once instead of waiting for an answer."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def refuses(refusal):
    """`refuses(path, parts)`: `train` ends before it starts, and its message holds all parts."""

    def check(path, parts):
        message = refusal("train", "--config", path)
        assert [part for part in parts if part not in message] == [], message

    return check


# ---------------------------------------------------------------- recipes

RECIPES = {
    "no mapping": ("- a\n- b\n", ["bad.yaml", "must hold a mapping", "'learning_rate: 1.0e-6'"]),
    "a lone word": ("hello", ["bad.yaml", "must hold a mapping", "such as"]),
    "a number for a name": ("1: 2\n", ["bad.yaml", "must hold a mapping of setting names", "such as"]),
    "nothing": ("", ["env: not set", "Set env", "search_qa"]),
    "broken": ("env: [1\n", ["bad.yaml", "not valid YAML", "line 2", "Mend the file"]),
    "a key twice": ("seed: 1\nseed: 2\n", ["bad.yaml", "'seed' is written twice", "line 2", "Mend the file"]),
    "latin-1": (b"env: caf\xe9\n", ["bad.yaml", "not valid YAML", "utf-8", "Mend the file"]),
    "a misspelt setting": (
        "learning_rat: 1\nnum_generation: 2\n",
        ["bad.yaml", "'learning_rat' is no setting. Did you mean 'learning_rate'?", "'num_generations'", "remove it"],
    ),
    "a misspelt algorithm": ("trainer: gpro\n", ["trainer='gpro'", "'grpo', 'ppo'", "Did you mean 'grpo'?", "Set"]),
    "a word for a number": ("env: a.B\nmax_turns: many\n", ["max_turns='many'", "whole number", "Set max_turns"]),
    "a list for a number": ("env: a.B\nseed: [1]\n", ["seed=[1]", "must be a whole number", "Set seed"]),
    "a number for a word": ("env: 5\n", ["env=5", "must be null or text", "Set env"]),
    "a word for a switch": ("env: a.B\nbf16: maybe\n", ["bf16='maybe'", "true or false", "Set bf16"]),
    "a number for a switch": ("env: a.B\nuse_vllm: 1\n", ["use_vllm=1", "true or false", "Set use_vllm"]),
    "a fraction for a count": ("env: a.B\nmax_steps: 1.5\n", ["max_steps=1.5", "whole number", "Set max_steps"]),
    "a choice that is none": (
        "env: a.B\nlr_scheduler_type: cosin\n",
        ["lr_scheduler_type='cosin'", "'cosine'", "Did you mean 'cosine'?", "Set lr_scheduler_type"],
    ),
    "a critic for GRPO": ("env: a.B\ncritic: head\n", ["bad.yaml", "'critic' is no setting", "remove it"]),
    "a module that is not there": (
        "env: nowhere.MyEnv\nmodel_name_or_path: m\n",
        ["env='nowhere.MyEnv'", "no module 'nowhere'", "Correct the path"],
    ),
    "a file that is not there": (
        "env: envs/my.py:MyEnv\nmodel_name_or_path: m\n",
        ["env='envs/my.py:MyEnv'", "no file envs/my.py", "Correct the path"],
    ),
    "a word that is no path": (
        "env: MyEnv\nmodel_name_or_path: m\n",
        ["env='MyEnv'", "no built-in environment", "import path such as my_module.MyEnv"],
    ),
    "no model": ("env: search_qa\n", ["model_name_or_path: not set", "Set it to a directory or a Hub id"]),
}


@pytest.mark.parametrize(("text", "parts"), RECIPES.values(), ids=RECIPES.keys())
def test_a_recipe_with_a_mistake_is_refused(refuses, text, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    refuses("bad.yaml", parts)


def test_a_recipe_that_is_a_folder_or_not_there_is_refused(refuses, recipe, tmp_path):
    recipe()
    for path, parts in {
        str(tmp_path): ["no such file", "Pass the path of a recipe"],
        "recipee.yaml": ["--config recipee.yaml", "no such file", "Did you mean 'recipe.yaml'?"],
    }.items():
        refuses(path, parts)


# ---------------------------------------------------------------- through `train`

TASKS = '''
from agent_r1_trl import ToolEnv
from task import AddEnv, add


class WrongReset(AddEnv):
    def reset(self, example):
        return 5


class RaisingReset(AddEnv):
    def reset(self, example):
        return example["missing"]


class NoReset:
    def step(self, message):
        return None


class NoHints(ToolEnv):
    def look(self, where):
        "Look."

    tools = (look,)


def make_none():
    return None


def no_hints(where):
    """Look."""


number = 3
'''
ROW = '{"prompt": "Who?"}\n'
TRAIN = {
    "no data file": ({"dataset_name": "trian.jsonl"}, ["'trian.jsonl'", "no such file", "'train.jsonl'", "Pass"]),
    "no data folder": ({"dataset_name": "./data"}, ["dataset_name='./data'", "no such directory", "Pass a data file"]),
    "data of another kind": ({"dataset_name": "rows.txt"}, ["'rows.txt'", ".jsonl, .json, .csv", "Convert it"]),
    "no rows": ({"dataset_name": "none.jsonl"}, ["dataset_name='none.jsonl'", "no rows", "at least one"]),
    "fewer rows than a rollout takes": (
        {"dataset_name": "rows.jsonl"},
        ["train_dataset has 1 rows", "takes 2", "num_generations=2", "Pass more rows, or set per_device"],
    ),
    "no JSON": ({"dataset_name": "broken.jsonl"}, ["'broken.jsonl', line 2", "not valid JSON", "Mend the line"]),
    "no UTF-8": ({"dataset_name": "latin.jsonl"}, ["'latin.jsonl', line 1", "UTF-8", "Mend the line"]),
    "lists for rows": ({"dataset_name": "lists.jsonl"}, ["'lists.jsonl', line 1", "must be an object", "Mend"]),
    "columns of two types": (
        {"dataset_name": "mixed.jsonl"},
        ["dataset_name='mixed.jsonl'", "'prompt' holds int and str", "Give each column one type"],
    ),
    "broken parquet": ({"dataset_name": "rows.parquet"}, ["'rows.parquet'", "Parquet", "Pass a data file"]),
    "an empty CSV": ({"dataset_name": "rows.csv"}, ["dataset_name='rows.csv'", "No columns", "Pass a data file"]),
    "no prompt": (
        {"dataset_name": "text.jsonl"},
        ["dataset_name='text.jsonl'", "columns ['text']", "neither 'prompt' nor 'question'", "Rename a column"],
    ),
    "a number for a prompt": (
        {"dataset_name": "numbers.jsonl"},
        ["dataset_name='numbers.jsonl'", "prompt=5", "a string or a non-empty list of messages", "Mend"],
    ),
    "no prompt to evaluate on": (
        {"eval_dataset_name": "text.jsonl"},
        ["eval_dataset_name='text.jsonl'", "neither 'prompt' nor 'question'", "Rename a column"],
    ),
    "no gold answer": (
        {"env": "search_qa", "env_kwargs": {"index": "corpus.jsonl"}},
        ["env='search_qa'", "dataset_name='train.jsonl'", "no gold answer", "name its column 'answer'"],
    ),
    "no corpus": (
        {"env": "search_qa", "env_kwargs": {"index": "corpse.jsonl"}},
        ["env_kwargs={'index': 'corpse.jsonl'}", "no such file", "Set env_kwargs"],
    ),
    "no data at all": (
        {"dataset_name": None, "max_steps": -1},
        ["dataset_name: not set", "max_steps=-1", "Set dataset_name, or max_steps"],
    ),
    "no data to evaluate on": (
        {"eval_dataset_name": None, "eval_strategy": "steps"},
        ["eval_strategy='steps'", "eval_dataset_name is not set", "Set eval_dataset_name"],
    ),
    "an environment without reset": ({"env": "tasks.py:NoReset"}, ["env='tasks.py:NoReset'", "no reset", "Subclass"]),
    "a function that makes nothing": ({"env": "tasks.py:make_none"}, ["env=", "NoneType", "no reset", "Subclass"]),
    "a number for an environment": ({"env": "tasks.py:number"}, ["'tasks.py:number'", "is a int", "Name the class"]),
    "a prompt of another form": (
        {"env": "tasks.py:WrongReset"},
        ["env='tasks.py:WrongReset'", "returned int", "must return the prompt as a list of messages", "Return"],
    ),
    "an environment that raises": (
        {"env": "tasks.py:RaisingReset"},
        ["env='tasks.py:RaisingReset'", "dataset_name='train.jsonl'", "KeyError: 'missing'", "doctor"],
    ),
    "a tool without hints": ({"env": "tasks.py:NoHints"}, ["tasks.py:NoHints", "no type hint", "write 'where"]),
    "a function without hints": (
        {"env": None, "tools": ["tasks.py:no_hints"], "reward_funcs": ["task.py:word_count_reward"]},
        ["tools=['tasks.py:no_hints']", "no type hint", "write 'where: str'"],
    ),
    "a number for a tool": (
        {"env": None, "tools": ["tasks.py:number"], "reward_funcs": ["task.py:word_count_reward"]},
        ["tools='tasks.py:number'", "cannot be called", "Name a function"],
    ),
    "a number for a reward": ({"reward_funcs": ["tasks.py:number"]}, ["reward_funcs=", "cannot be called", "Name"]),
    "a reward that is not there": (
        {"reward_funcs": ["task.py:word_reward"]},
        ["reward_funcs='task.py:word_reward'", "Did you mean 'word_count_reward'?"],
    ),
    "no model folder": ({"model_name_or_path": "./nowhere"}, ["'./nowhere'", "no such directory", "Pass"]),
    "no model on the Hub": ({"model_name_or_path": "no/where"}, ["'no/where'", "cannot be loaded", "Pass"]),
    "a folder without a model": ({"model_name_or_path": "empty"}, ["'empty'", "neither config.json", "Pass"]),
    "a broken model": ({"model_name_or_path": "broken"}, ["'broken'", "not a valid JSON file", "Pass the directory"]),
    "a model without weights": ({"model_name_or_path": "light"}, ["'light'", "no file named", "Pass"]),
    "no checkpoint": ({"resume_from_checkpoint": "./none"}, ["'./none'", "no such directory", "Pass a checkpoint-"]),
    "a folder without a checkpoint": (
        {"resume_from_checkpoint": "runs"},
        ["resume_from_checkpoint='runs'", "no trainer_state.json", "Did you mean 'runs/checkpoint-3'?"],
    ),
    "a file for a folder": ({"output_dir": "task.py"}, ["output_dir='task.py'", "is a file", "Pass another"]),
    "a folder under a file": ({"output_dir": "task.py/out"}, ["'task.py/out'", "task.py is a file", "Pass another"]),
    "a folder nobody may make": ({"output_dir": "/proc/out"}, ["output_dir='/proc/out'", "cannot be made", "Pass"]),
    "groups that do not fill a batch": ({"num_generations": 3}, ["num_generations (3)", "divisible", "Cure: choose"]),
    "layers that are not there": (
        {"use_peft": True, "lora_target_modules": ["nope"]},
        ["nope", "not found", "set lora_target_modules"],
    ),
    "attention that is not installed": (
        {"attn_implementation": "flash_attention_2"},
        ["FlashAttention2", "installed", "set attn_implementation: sdpa"],
    ),
    "a tracker that does not exist": ({"report_to": "wandbb"}, ["wandbb", "is not supported", "set report_to"]),
    "no DeepSpeed configuration": ({"deepspeed": "none.json"}, ["none.json", "deepspeed config", "set deepspeed"]),
}  # fmt: skip


def write_files(folder: Path, model: Path) -> None:
    """Everything that a row of `TRAIN` refers to."""
    (folder / "tasks.py").write_text(TASKS)
    contents = {
        "rows.txt": ROW, "rows.jsonl": ROW, "none.jsonl": "", "broken.jsonl": ROW + "{nonsense\n",
        "lists.jsonl": "[1]\n",
        "mixed.jsonl": ROW + '{"prompt": 5}\n', "rows.parquet": "hello", "rows.csv": "",
        "text.jsonl": '{"text": "a"}\n',
        "numbers.jsonl": '{"prompt": 5}\n', "corpus.jsonl": '{"id": "1", "title": "Oslo", "text": "A city."}\n',
    }  # fmt: skip
    for name, text in contents.items():
        (folder / name).write_text(text)
    (folder / "latin.jsonl").write_bytes('{"prompt": "café"}\n'.encode("latin-1"))
    for name in ("empty", "runs/checkpoint-3"):
        (folder / name).mkdir(parents=True)
    for name in ("broken", "light"):
        shutil.copytree(model, folder / name)
        (folder / name / "model.safetensors").unlink()
    (folder / "broken" / "config.json").write_text("{nonsense")


@pytest.mark.parametrize(("settings", "parts"), TRAIN.values(), ids=TRAIN.keys())
def test_a_mistake_ends_train_before_it_starts(recipe, refuses, model_folder, settings, parts):
    path = recipe(**settings)
    write_files(Path(path).parent, model_folder)
    refuses(path, parts)


def test_prompts_that_leave_no_room_end_train_with_the_cure(recipe, refuses):
    path = recipe(dataset_name="long.jsonl", eval_dataset_name=None)
    Path("long.jsonl").write_text((json.dumps({"prompt": "Who? " * 1000}) + "\n") * 2)
    refuses(path, ["All 4 trajectories", "prompt_too_long", "agent-r1-trl doctor"])


def test_the_place_of_a_mistake_can_be_seen(recipe, monkeypatch, capsys):
    monkeypatch.setenv("AGENT_R1_TRL_DEBUG", "1")
    assert main(["train", "--config", recipe(env="search_qq")]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_sampler_with_other_weights_is_no_traceback(recipe, refusal, monkeypatch):
    def stale(self, model):
        raise SyncError("the log-probabilities differ")

    monkeypatch.setattr(TransformersGenerator, "sync", stale, raising=False)
    assert refusal("train", "--config", recipe()) == "the log-probabilities differ"


def test_vllm_that_is_not_installed_is_told_before_training(recipe, refuses, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    refuses(recipe(use_vllm=True), ["use_vllm=True", "not installed", "pip install 'agent-r1-trl[vllm]'"])
