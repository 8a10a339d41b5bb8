"""What commands refuse, in one table: a recipe, settings or flags -> what the message names.

The law of every row is the fixture `refusal` (conftest.py): exit code 2, one line, no traceback, a fix; before a
model is loaded. Not covered: single values (tests/test_settings.py, tests/test_bad_input.py), files of data
(tests/environments/test_data_files.py), `view` (test_view.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from transformers.trainer_utils import IntervalStrategy

from agent_r1_trl.cli import main, train
from agent_r1_trl.cli.errors import EXIT_INFRASTRUCTURE
from agent_r1_trl.cli.parser import RecipeParser
from agent_r1_trl.cli.recipe import read_value
from agent_r1_trl.generation import TransformersGenerator
from agent_r1_trl.generation.sync import SyncError
from agent_r1_trl.trainers.config import ModelConfig


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Whoever asks the Hub for a name that is no path fails at once instead of waiting for an answer."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


# ---------------------------------------------------------------- recipes

REST = "model_name_or_path: m\nmax_steps: 1\n"
RECIPES = {
    "no mapping": ("- a\n- b\n", "bad.yaml"),
    "a lone word": ("hello", "bad.yaml"),
    "a number for a name": ("1: 2\n", "bad.yaml"),
    "nothing": ("", "env=None"),
    "broken": ("env: [1\n", "bad.yaml .*line 2"),
    "a key twice": ("seed: 1\nseed: 2\n", "bad.yaml .*'seed' .*line 2"),
    "a day that does not exist": ("env_kwargs: {day: 2024-13-45}\n", "bad.yaml .*month"),
    "UTF-16": ("env: a.B\n".encode("utf-16"), "bad.yaml .*in UTF-16.*Write it in UTF-8"),
    "UTF-16 without its mark": ("env: a.B\n".encode("utf-16-le"), "bad.yaml .*in UTF-16.*Write it in UTF-8"),
    "a tab": ("env: a.B\necho:\n\tpatience: 3\n", "bad.yaml .*Line 3 is indented with a tab.*Put blanks"),
    "latin-1": (b"env: caf\xe9\n", "bad.yaml .*utf-8"),
    "misspelt settings": (
        "learning_rat: 1\nnum_generation: 2\n",
        "'learning_rat' .*Did you mean 'learning_rate'\\? .*'num_generation' .*'num_generations'",
    ),
    "a setting that is a key now": ("echo_patience: 3\n", "'echo_patience' .*Did you mean 'echo.patience'\\?"),
    "a rule misspelt": (
        "env: a.B\nsampling: {filter_groups: top_k}\n",
        "sampling.filter_groups='top_k'.*mean 'top_p'",
    ),
    "a policy misspelt": ("env: a.B\ncontext: widow\n", "context.policy='widow'.*mean 'window'"),
    "an estimator misspelt": ("env: a.B\nadvantage_estimator: grop\n", "advantage_estimator='grop'.*mean 'grpo'"),
    "a misspelt key": ("env: a.B\necho: {patiense: 3}\n", "echo: 'patiense' .*Did you mean 'patience'\\?"),
    "a misspelt key alone": ("env: a.B\necho.patiense: 3\n", "echo: 'patiense' .*Did you mean 'patience'\\?"),
    "a key twice over": ("echo: {patience: 3}\necho.patience: 4\n", "echo and echo.patience contradict"),
    "a key of what is off": ("echo: false\necho.patience: 4\n", "echo and echo.patience contradict"),
    "a misspelt algorithm": ("trainer: gpro\n", "trainer='gpro' .*'grpo'"),
    "a word for a number": ("env: a.B\nmax_turns: many\n", "bad.yaml: max_turns='many'"),
    "a list for a number": ("env: a.B\nseed: [1]\n", "bad.yaml: seed=\\[1\\]"),
    "a switch for a number": ("env: a.B\nseed: true\n", "bad.yaml: seed=True"),
    "a switch for a rate": ("env: a.B\nlearning_rate: true\n", "bad.yaml: learning_rate=True"),
    "null for a number": ("env: a.B\nseed: null\n", "bad.yaml: seed=None"),
    "a number for a word": ("env: 5\n", "bad.yaml: env=5"),
    "a number for a list of words": ("env: a.B\nreward_funcs: [1]\n", "bad.yaml: reward_funcs=\\[1\\]"),
    "a word for a switch": ("env: a.B\nbf16: maybe\n", "bad.yaml: bf16='maybe'"),
    "a number for a switch": ("env: a.B\nuse_vllm: 1\n", "bad.yaml: use_vllm=1"),
    "a fraction for a count": ("env: a.B\nmax_steps: 1.5\n", "bad.yaml: max_steps=1.5"),
    "a choice that is none": ("env: a.B\nlr_scheduler_type: cosin\n", "lr_scheduler_type='cosin' .*mean 'cosine'"),
    "a critic for GRPO": ("env: a.B\ncritic: head\n", "bad.yaml: 'critic' .*trainer='ppo' has it: set that"),
    "a binary file": (b"\x7fELF\x00\x00\xf0\x01\x00", "bad.yaml is a binary file. Pass the path of a YAML"),
    "a module that is not there": (
        f"env: nowhere.MyEnv\n{REST}",
        "env='nowhere.MyEnv'.*'nowhere'",
    ),
    "a file that is not there": (
        f"env: envs/my.py:MyEnv\n{REST}",
        "env='envs/my.py:MyEnv'",
    ),
    "a word that is no path": (f"env: MyEnv\n{REST}", "env='MyEnv'"),
    "no model": ("env: search_qa\n", "model_name_or_path=None"),
    # ---- adapters: without use_peft all weights would be trained, in silence
    "a rank without an adapter": ("env: a.B\nlora_r: 8\n", "bad.yaml: lora_r=8: .*Set use_peft: true"),
    "the default rank without one": ("env: a.B\nlora_r: 16\n", "bad.yaml: lora_r=16: .*Set use_peft: true"),
    "layers without one": (
        "env: a.B\nlora_target_modules: all-linear\nlora_modules_to_save: [lm_head]\n",
        "lora_target_modules=\\['all-linear'\\] lora_modules_to_save=.*Set use_peft: true",
    ),
    "DoRA without one": ("env: a.B\nuse_dora: true\n", "use_dora=True: .*Set use_peft: true"),
    "rsLoRA without one": ("env: a.B\nuse_rslora: true\n", "use_rslora=True: .*Set use_peft: true"),
    "a rank with adapters off": ("env: a.B\nuse_peft: false\nlora_r: 8\n", "lora_r=8: .*Set use_peft: true"),
    "4 bits without one": (
        "env: a.B\nload_in_4bit: true\n",
        "load_in_4bit=True.*use_peft=False: .*nothing would be trained. Set use_peft=True",
    ),
    "a switch for LoRA": ("env: a.B\nlora: true\n", "'lora' .*Did you mean 'use_peft'\\?"),
    "a mapping for LoRA": ("env: a.B\nlora: {r: 8}\n", "'lora' .*Did you mean 'use_peft'\\?"),
    "LoRA with a verb": ("env: a.B\nuse_lora: true\n", "'use_lora' .*Did you mean 'use_peft'\\?"),
    "a switch for PEFT": ("env: a.B\npeft: true\n", "'peft' .*Did you mean 'use_peft'\\?"),
    "PEFT's own name": ("env: a.B\npeft_config: {r: 8}\n", "'peft_config' .*Did you mean 'use_peft'\\?"),
    "a switch for QLoRA": ("env: a.B\nqlora: true\n", "'qlora' .*mean 'use_peft' with 'load_in_4bit'\\?"),
    "a rank misspelt": ("env: a.B\nuse_peft: true\nlora_rank: 8\n", "'lora_rank' .*Did you mean 'lora_r'\\?"),
    # ---- how long
    "a negative number of steps": ("env: a.B\nmodel_name_or_path: m\nmax_steps: -3\n", "max_steps=-3 must be -1"),
    "no steps at all": ("env: a.B\nmodel_name_or_path: m\nmax_steps: 0\n", "max_steps=0 must be -1"),
    "epochs below zero": (f"env: a.B\nnum_train_epochs: -1\n{REST}", "num_train_epochs=-1 must be"),
    "no epochs": (f"env: a.B\nnum_train_epochs: 0\n{REST}", "num_train_epochs=0.* must be a finite number > 0"),
    "an adapter times zero": ("env: a.B\nuse_peft: true\nlora_alpha: 0\n", "lora_alpha=0 must be a whole number >= 1"),
    "a task of another kind": ("env: a.B\nuse_peft: true\nlora_task_type: CAUSL\n", "lora_task_type='CAUSL' must be"),
    "float16 on a CPU": (f"env: a.B\nfp16: true\nuse_cpu: true\n{REST}", "fp16=True: a CPU .*Set fp16=False"),
}
FLAGS = {
    "LoRA": (["--lora"], "--lora: .*Did you mean 'use_peft'\\?"),
    "a key of LoRA": (["--lora.r", "8"], "--lora.r: .*Did you mean 'use_peft'\\?"),
    "a rank": (["--lora_r", "8"], "The command line: lora_r=8: .*Set use_peft: true"),
    "the default rank": (["--lora_r", "16"], "The command line: lora_r=16: .*Set use_peft: true"),
    "a rank, adapters off": (["--lora_r", "16", "--use_peft", "false"], "The command line: lora_r=16: .*use_peft"),
    "a flag twice": (["--seed", "3", "--seed=4"], "--seed 3 and --seed 4 .*Pass it once"),
    "the same twice": (["--bf16", "--bf16"], "--bf16 and --bf16 .*Pass it once"),
    "two names of one": (
        ["--dataset", "a.jsonl", "--dataset_name", "b.jsonl"],
        "--dataset a.jsonl and --dataset_name",
    ),
    "with a dash": (["--max-steps", "3", "--max_steps", "4"], "--max-steps 3 and --max_steps 4"),
    "on and off": (["--shuffle_dataset", "--no_shuffle_dataset"], "--shuffle_dataset and --no_shuffle_dataset"),
    "an en dash": (["\u2013beta", "0.1"], r"'\u2013beta' begins with a typographic dash \(U\+2013\).*hyphens: --beta"),
    "an em dash": (["\u2014beta=0.1"], r"U\+2014.*hyphens: --beta\."),
    "one of two hyphens": (["-\u2010seed", "3"], r"U\+2010.*hyphens: --seed"),
    "a dash behind a value": (["--seed", "3", "\u2212\u2212beta", "0.1"], r"U\+2212.*hyphens: --beta"),
    "a key twice": (["--echo.patience", "3", "--echo.patience", "4"], "--echo.patience 3 and --echo.patience 4"),
}


@pytest.mark.parametrize(("text", "names"), RECIPES.values(), ids=RECIPES.keys())
def test_a_recipe_with_a_mistake_is_refused(refusal, text, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert re.search(names, message := refusal("train", "--config", "bad.yaml")), message


@pytest.mark.parametrize(("flags", "names"), FLAGS.values(), ids=FLAGS.keys())
def test_a_command_line_with_a_mistake_is_refused(refusal, flags, names):
    assert re.search(names, message := refusal("train", "--env", "a.B", *flags)), message


def test_an_option_given_twice_is_refused_by_the_commands_without_recipes_too(refusal, tmp_path):
    assert "--num is given twice" in refusal("view", tmp_path, "--num", "3", "--num=4")
    assert "two hyphens: --num" in refusal("view", tmp_path, "\u2013num", "3")
    assert "--output_dir is given twice" in refusal("merge", "m", "--output_dir", "a", "--output_dir", "b")


def test_a_recipe_that_says_use_peft_false_may_hold_the_defaults_of_adapters(tmp_path):
    parser = RecipeParser((ModelConfig,), command="train")
    path = tmp_path / "recipe.yaml"
    path.write_text("use_peft: false\nlora_r: 16\nlora_dropout: 0.0\nuse_dora: false\n")
    (config,) = parser.parse(["--config", str(path)])
    assert not config.use_peft
    (config,) = parser.parse(["--config", str(path), "--use_peft", "--lora_r", "8"])
    assert (config.use_peft, config.lora_r) == (True, 8)


def test_a_script_that_describes_an_adapter_without_use_peft_is_refused():
    with pytest.raises(ValueError, match=r"lora_alpha=64 use_dora=True: .*Set use_peft: true"):
        ModelConfig(lora_alpha=64, use_dora=True)
    assert ModelConfig(lora_alpha=64, use_dora=True, use_peft=True).lora_alpha == 64


def test_what_yaml_takes_for_text_or_for_a_switch_is_read_as_the_field_has_it():
    for hint, value, expected in [
        (float, "1e-5", 1e-5),
        (int | None, "3", 3),
        (bool | None, "true", True),
        (list[str] | None, "a.b", ["a.b"]),
        (list[float] | None, ["1e-5", 2], [1e-5, 2]),
        (IntervalStrategy | str, False, "no"),
        (IntervalStrategy | str, "steps", "steps"),
        (dict[str, int] | str | None, "{a: 1}", "{a: 1}"),
    ]:
        assert read_value("recipe.yaml", "some_setting", value, hint) == expected, (hint, value)


# ---------------------------------------------------------------- settings and flags

TASKS = '''
from agent_r1_trl import SearchQAEnv, ToolEnv, tool
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


class Twins(ToolEnv):
    def look(self, where: str) -> str:
        """Look."""
        return where

    tools = (add, tool(look, name="add"))


class NoHints(ToolEnv):
    def look(self, where):
        "Look."

    tools = (look,)


def make_none():
    return None


def no_hints(where):
    """Look."""


number = 3


class ShelfEnv(SearchQAEnv):
    def __init__(self):
        super().__init__(type("Shelf", (), {"search": lambda self, query, top_k: []})(), answer_tag=False)
'''
ROW = '{"prompt": "Who?"}\n'
TRAIN = {
    "an option that the rollout cannot honour": (
        {"generation_kwargs": {"num_beams": 2}, "dataset_name": "trian.jsonl"},  # before the data are read
        "generation_kwargs=",
    ),
    "no data file": ({"dataset_name": "trian.jsonl"}, "dataset_name='trian.jsonl'.*'train.jsonl'"),
    "a split of a file": (
        {"dataset_train_split": "test"},
        "dataset_train_split='test' has no effect: dataset_name='train.jsonl' is a file.*Remove",
    ),
    "nothing to evaluate on": ({"num_eval_examples": 0}, "num_eval_examples=0"),
    "fewer rows than a rollout takes": ({"dataset_name": "rows.jsonl"}, "train_dataset.* 1 .*num_generations=2"),
    "no gold answer": (
        {"env": "search_qa", "env_kwargs": {"retriever": "corpus.jsonl"}},
        "env='search_qa'.*dataset_name='train.jsonl'.*'answer'",
    ),
    "no corpus": ({"env": "search_qa", "env_kwargs": {"retriever": "corpse.jsonl"}}, "env_kwargs={.*'corpse.jsonl'}"),
    "a question and answer task without data": (
        {
            "env": "search_qa", "env_kwargs": {"retriever": "corpus.jsonl"}, "max_steps": 1, "dataset_name": None,
            "eval_dataset_name": None,
        },
        "dataset_name=None: env='search_qa' cannot start without a row of data: .*no gold answer.*Set dataset_name",
    ),
    "a task of one's own without data": (
        {"dataset_name": None, "eval_dataset_name": None, "max_steps": 1},
        "dataset_name=None: env='task.py:AddEnv' cannot start without a row of data: reset returned an empty prompt",
    ),
    "no data at all": ({"dataset_name": None, "max_steps": -1}, "dataset_name=None with max_steps=-1"),
    "no data to evaluate on": (
        {"eval_dataset_name": None, "eval_strategy": "steps"},
        "eval_strategy='steps'.*eval_dataset_name",
    ),
    "an environment without reset": ({"env": "tasks.py:NoReset"}, "env='tasks.py:NoReset'.*reset"),
    "a function that makes nothing": ({"env": "tasks.py:make_none"}, "env='tasks.py:make_none'.*NoneType"),
    "a number for an environment": ({"env": "tasks.py:number"}, "env='tasks.py:number'.* int"),
    "a prompt of another form": ({"env": "tasks.py:WrongReset"}, "env='tasks.py:WrongReset'.*returned 5"),
    "an environment that raises": (
        {"env": "tasks.py:RaisingReset"},
        "env='tasks.py:RaisingReset'.*dataset_name='train.jsonl'.*KeyError: 'missing'",
    ),
    "a tool without hints": ({"env": "tasks.py:NoHints"}, "tasks.py:NoHints.*'where"),
    "two tools of one name": ({"env": "tasks.py:Twins"}, "tasks.py:Twins.*two are called 'add'"),
    "a function without hints": (
        {"env": None, "tools": ["tasks.py:no_hints"], "reward_funcs": ["task.py:word_count_reward"]},
        "tools=\\['tasks.py:no_hints'\\].*'where",
    ),
    "a number for a tool": (
        {"env": None, "tools": ["tasks.py:number"], "reward_funcs": ["task.py:word_count_reward"]},
        "tools='tasks.py:number'",
    ),
    "a number for a callback": ({"callbacks": ["tasks.py:number"]}, "callbacks='tasks.py:number'.*TrainerCallback"),
    "a number for a reward": ({"reward_funcs": ["tasks.py:number"]}, "reward_funcs='tasks.py:number'"),
    "a reward that is not there": (
        {"reward_funcs": ["task.py:word_reward"]},
        "reward_funcs='task.py:word_reward'.*mean 'word_count_reward'",
    ),
    "options of a reward that is not there": (
        {"turn_reward_funcs": ["agent_r1_trl.rewards.grounded_thinking"], "reward_options": {"grounded_thinkin": {}}},
        "reward_options=.*mean 'grounded_thinking'",
    ),
    "an option that a reward does not have": (
        {"turn_reward_funcs": ["agent_r1_trl.rewards.grounded_thinking"],
         "reward_options": {"grounded_thinking": {"total": 1}}},
        "reward_options=.*mean 'max_total'",
    ),
    "an option that a function would swallow": (
        {"reward_funcs": ["task.py:word_count_reward"], "reward_options": {"word_count_reward": {"completion": 1}}},
        "reward_options=.*mean 'completions'",
    ),
    "a number for options": (
        {"reward_funcs": ["task.py:word_count_reward"], "reward_options": {"word_count_reward": 3}},
        "reward_options=.*word_count_reward=3",
    ),
    "no model folder": ({"model_name_or_path": "./nowhere"}, "model_name_or_path='./nowhere'"),
    "no model on the Hub": ({"model_name_or_path": "no/where"}, "model_name_or_path='no/where'"),
    "a folder without a model": ({"model_name_or_path": "empty"}, "model_name_or_path='empty'.*config.json"),
    "a broken model": ({"model_name_or_path": "broken"}, "model_name_or_path='broken'.*JSON"),
    "a model without weights": ({"model_name_or_path": "light"}, "model_name_or_path='light'.*no file"),
    "no checkpoint": ({"resume_from_checkpoint": "./none"}, "resume_from_checkpoint='./none'"),
    "a folder without a checkpoint": ({"resume_from_checkpoint": "runs"}, "resume_from_checkpoint='runs'"),
    "a file for a folder": ({"output_dir": "task.py"}, "output_dir='task.py'"),
    "a folder under a file": ({"output_dir": "task.py/out"}, "output_dir='task.py/out'"),
    "weights cut off": ({"model_name_or_path": "cut"}, "model_name_or_path='cut': a file of weights is damaged"),
    "a page in place of weights": ({"model_name_or_path": "page"}, "model_name_or_path='page': a file of weights is"),
    "a folder with a null byte": ({"output_dir": "a\0b"}, "output_dir='a.x00b': cannot be created .*null byte"),
    "no name for the folder": ({"output_dir": ""}, "output_dir='' must be a text that is not empty"),
    "a folder nobody may make": ({"output_dir": "/proc/out"}, "output_dir='/proc/out'"),
    # What transformers, PEFT and TRL refuse gets a fix from us.
    "groups that do not fill a batch": ({"num_generations": 3}, "num_generations .*Fix: .*per_device_train"),
    "layers that are not there": (  # named before the model, which is damaged
        {"use_peft": True, "lora_target_modules": ["nope"], "model_name_or_path": "cut"},
        "lora_target_modules='nope': 'nope' is no module.*Set lora_target_modules to .*'q_proj', 'k_proj'",
    ),
    "one layer of two misspelt": (
        {"use_peft": True, "lora_target_modules": ["q_proj", "v_porj"], "model_name_or_path": "cut"},
        "'v_porj' is no module.*Did you mean 'v_proj'\\?",
    ),
    "a layer to save that is not there": (
        {"use_peft": True, "lora_modules_to_save": ["lm_haed"], "model_name_or_path": "cut"},
        "lora_modules_to_save='lm_haed'|lora_modules_to_save=.*'lm_haed' is no module.*Did you mean 'lm_head'\\?",
    ),
    "a pattern of layers that matches none": (
        {"use_peft": True, "lora_target_modules": ["model[.]decoder[.].*"], "model_name_or_path": "cut"},
        "'model\\[.\\]decoder.*is no module",
    ),
    "attention that is not installed": (
        {"attn_implementation": "flash_attention_2"},
        "FlashAttention2.*attn_implementation: sdpa",
    ),
    "a tracker that does not exist": (  # named before the model, which is damaged
        {"report_to": "wandbb", "model_name_or_path": "cut"},
        "report_to='wandbb': no such tracker. Did you mean 'wandb'\\? Set report_to",
    ),
    "a tracker that is not installed": (
        {"report_to": ["codecarbon"], "model_name_or_path": "cut"},
        "report_to='codecarbon': its package is not installed. Install it \\(pip install codecarbon",
    ),
    "DeepSpeed without a launcher": ({"deepspeed": "ds.json"}, "deepspeed='ds.json'.*Start .*torchrun"),
    "DeepSpeed without a batch size": (
        {"deepspeed": "ds_none.json"},
        "deepspeed='ds_none.json': train_micro_batch_size_per_gpu is not in it.*Write \"train_micro.*\": \"auto\"",
    ),
    "DeepSpeed with another batch size": (
        {"deepspeed": "ds_other.json"},
        "'ds_other.json': .*train_micro_batch_size_per_gpu=3 vs hf per_device_train_batch_size=\\d+.*gradient_accum"
        "ulation_steps=5 vs hf gradient_accumulation_steps=\\d+.*: both must be equal.*Write \"auto\"",
    ),
    "options without effect": (
        {"beta": 0.0, "ref_model_sync_steps": 9, "epsilon": 0.3, "loss_type": "sapo"},
        "epsilon=0.3 .*ref_model_sync_steps=9 ",
    ),
    "no DeepSpeed configuration": ({"deepspeed": "none.json"}, "none.json.*set deepspeed"),
}  # fmt: skip


HOSTED = ["--endpoint", "http://127.0.0.1:9", "--model", "gpt"]
OF_SHELF = ["--env", "tasks.py:ShelfEnv", "--dataset", "questions.jsonl"]
EVAL = {
    # flags; RECIPE stands for --config and the recipe, OWN for the same without its model
    "no model": (["--env", "task.py:AddEnv", "--dataset", "test.jsonl"], "model_name_or_path=None.*--model"),
    "no data": (["--env", "task.py:AddEnv", "--model", "tiny"], "eval_dataset_name=None.*--dataset"),
    "no environment": (["--model", "tiny", "--dataset", "test.jsonl"], "env=None"),
    "a misspelt option": (["--num_exmaples", "3"], "--num_exmaples.* mean 'num_examples'"),
    "an option of training": (["--learning_rate", "1"], "--learning_rate: .*another command"),
    "a word for a number": (["--max_turns", "many"], "The command line: max_turns='many'"),
    "a loose word": (["recipe.yaml"], "'recipe.yaml'"),
    "config without a file": (["--config"], "--config names nothing"),
    "two recipes": (
        ["--config", "recipe.yaml", "--config", "more.yaml"],
        "--config names recipe.yaml and more.yaml",
    ),
    "a setting without dashes": (
        ["RECIPE", "max_turns=3"],
        "'max_turns=3' belongs to no option. Write --max_turns 3.",
    ),
    "a folder for a recipe": (["--config", "empty"], "--config empty: is a directory. Pass the path of a YAML"),
    "a recipe that is not there": (["--config", "recipes.yaml"], "--config recipes.yaml.* mean 'recipe.yaml'"),
    "a shipped recipe misspelt": (["--config", "quickstart/grpo/cpuu"], "mean 'quickstart/grpo/cpu'.*--list-recipes"),
    "a list for a mapping": (["RECIPE", "--env_kwargs", "[1]"], "env_kwargs=\\[1\\]"),
    "a template that does not exist": (["RECIPE", "--chat_template", "qwen9"], "chat_template='qwen9'"),
    "a grammar that does not exist": (["RECIPE", "--response_template", "morse"], "response_template='morse'"),
    "a file for a folder": (["RECIPE", "--output_dir", "train.jsonl"], "output_dir='train.jsonl'"),
    "a tag that is no column": (["RECIPE", "--by", "lvl"], "by='lvl'"),
    "no base model": (["RECIPE", *OF_SHELF, "--baselines", "base"], "baselines='base'.*--base_model"),
    "no such baseline": (["RECIPE", "--baselines", "closed_boko"], "baselines=\\['closed_boko'\\]"),
    "a base model for nothing": (["RECIPE", "--base_model", "light"], "base_model='light' has no effect"),
    "nothing to search with": (["RECIPE", "--baselines", "naive_rag"], "baselines='naive_rag'.* only add"),
    "a model twice": (["RECIPE", "--models", "light", "./light"], "model_name_or_path=.*twice"),
    "a data set twice": (["RECIPE", "--datasets", "test.jsonl", "./test.jsonl"], "eval_dataset_name=.*twice"),
    "a base that is not there": (
        ["RECIPE", *OF_SHELF, "--baselines", "base", "--base_model", "./nowhere"],
        "base_model='./nowhere'",
    ),
    "a missing data set": (["RECIPE", "--datasets", "test.jsonl", "nor.jsonl"], "eval_dataset_name='nor.jsonl'"),
    "two models without a base": (
        ["OWN", *OF_SHELF, "--models", "light", "broken", "--baselines", "naive_rag"],
        "baselines='naive_rag'.*--base_model",
    ),
    # a hosted model
    "no name of the hosted model": (["RECIPE", *HOSTED[:2]], "--model: not set"),
    "no address": (["RECIPE", *HOSTED[2:], "--endpoint", "localhost:1"], "endpoint='localhost:1': it must"),
    "a secret in the address": (
        ["RECIPE", *HOSTED[2:], "--endpoint", "http://me:geheim@a/v1"],
        "endpoint=(?!.*geheim)",
    ),
    "no such variable": (["RECIPE", *HOSTED, "--api_key_env", "NO_SUCH_KEY"], "api_key_env='NO_SUCH_KEY'"),
    "a key without an endpoint": (["RECIPE", "--api_key_env", "HOME"], "api_key_env='HOME' has no effect"),
    "options without an endpoint": (["RECIPE", "--endpoint_options", "{a: 1}"], "endpoint_options=.*no effect"),
    "an option of ours": (["RECIPE", *HOSTED, "--endpoint_options", "{messages: []}"], "'messages' is what"),
    "options that are none": (["RECIPE", *HOSTED, "--endpoint_options", "low"], "endpoint_options='low'"),
    "vLLM": (["RECIPE", *HOSTED, "--use_vllm"], "--use_vllm has no effect"),
    "a context policy": (["RECIPE", *HOSTED, "--context.policy", "step"], "--context has no effect"),
    "a filter with a dash": (["RECIPE", *HOSTED, "--top-k", "5"], "--top_k has no effect.*--endpoint_options"),
    "another limit": (["RECIPE", *HOSTED, "--max_concurrency", "5"], "--endpoint_concurrency"),
    "no base of the hosted": (["OWN", *HOSTED, "--baselines", "base"], "baselines='base'.*--base_model"),
}


def write_files(folder: Path, model: Path) -> None:
    """Everything that a row of `TRAIN` refers to."""
    (folder / "tasks.py").write_text(TASKS)
    contents = {
        "ds_none.json": '{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto"}',
        "ds_other.json": '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 3, '
        '"gradient_accumulation_steps": 5}',
        "ds.json": '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}',
        "rows.jsonl": ROW,
        "questions.jsonl": '{"id": "a", "question": "Who?", "answer": "Ada"}\n',
        "corpus.jsonl": '{"id": "1", "title": "Oslo", "text": "A city."}\n',
    }  # fmt: skip
    for name, text in contents.items():
        (folder / name).write_text(text)
    for name in ("empty", "runs/checkpoint-3"):
        (folder / name).mkdir(parents=True)
    for name in ("broken", "light"):
        shutil.copytree(model, folder / name)
        (folder / name / "model.safetensors").unlink()
    (folder / "broken" / "config.json").write_text("{nonsense")
    weights = (model / "model.safetensors").read_bytes()
    for name, content in {"cut": weights[: len(weights) // 2], "page": b"<!DOCTYPE html>" * 9}.items():
        shutil.copytree(model, folder / name)
        (folder / name / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(("settings", "names"), TRAIN.values(), ids=TRAIN.keys())
def test_a_mistake_ends_train_before_it_starts(recipe, refusal, model_folder, settings, names):
    path = recipe(**settings)
    write_files(Path(path).parent, model_folder)
    assert re.search(names, message := refusal("train", "--config", path)), message


@pytest.mark.parametrize("resume", [False, True])
def test_an_output_folder_below_one_that_may_not_be_entered_is_named(recipe, refusal, monkeypatch, resume):
    path = recipe(output_dir="locked/out", resume_from_checkpoint=str(resume).lower())
    Path("locked").mkdir()
    uid = os.geteuid()

    def without_rights(function):
        def call(*arguments):
            os.chmod("locked", 0)
            if uid == 0:  # root may enter every folder
                os.seteuid(65534)
            try:
                return function(*arguments)
            finally:
                os.seteuid(uid)
                os.chmod("locked", 0o700)

        return call

    for name in ("_checkpoint", "_prepare_folder"):
        monkeypatch.setattr(train, name, without_rights(getattr(train, name)))
    message = refusal("train", "--config", path)
    assert message.startswith("output_dir='locked/out': cannot be read (Permission denied)"), message


@pytest.mark.parametrize(("flags", "names"), EVAL.values(), ids=EVAL.keys())
def test_a_mistake_ends_eval_before_it_starts(recipe, refusal, model_folder, flags, names):
    path = Path(recipe())
    write_files(path.parent, model_folder)
    own = path.with_name("own.yaml")
    own.write_text(re.sub("model_name_or_path:.*\n", "", path.read_text()))
    words = {"RECIPE": ["--config", path], "OWN": ["--config", own]}
    arguments = [item for flag in flags for item in words.get(flag, [flag])]
    assert re.search(names, message := refusal("eval", *arguments)), message


def test_a_limit_that_is_null_is_refused_before_the_data_are_read(recipe, refusal):
    path = Path(recipe(max_completion_length=None, eval_dataset_name="nowhere.jsonl"))
    path.write_text(path.read_text() + "max_completion_length: null\n")
    assert "max_completion_length=None" in refusal("eval", "--config", path)


def test_the_place_of_a_mistake_can_be_seen(recipe, monkeypatch, capsys):
    monkeypatch.setenv("AGENT_R1_TRL_DEBUG", "1")
    assert main(["train", "--config", recipe(env="search_qq")]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_packages_that_are_not_installed_are_told_with_their_extras(recipe, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("agent_r1_trl.trainers.config.is_deepspeed_available", lambda: False)
    assert "pip install 'agent-r1-trl[vllm]'" in refusal("train", "--config", recipe(use_vllm=True))
    assert "pip install 'agent-r1-trl[deepspeed]'" in refusal("train", "--config", recipe(deepspeed="ds.json"))


def test_what_may_go_well_another_time_has_another_code(recipe, refusal, monkeypatch):
    path = recipe(dataset_name="long.jsonl", eval_dataset_name=None)
    Path("long.jsonl").write_text((json.dumps({"prompt": "Who? " * 1000}) + "\n") * 2)
    message = refusal("train", "--config", path, code=EXIT_INFRASTRUCTURE)
    assert "prompt_too_long" in message and "agent-r1-trl doctor" in message

    def stale(self, model):
        raise SyncError("The log-probabilities differ. Restart the server.")

    monkeypatch.setattr(TransformersGenerator, "sync", stale, raising=False)
    message = refusal("train", "--config", recipe(output_dir="other"), code=EXIT_INFRASTRUCTURE)
    assert message == "The log-probabilities differ. Restart the server."
