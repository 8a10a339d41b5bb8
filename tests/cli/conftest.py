"""A tiny model, a task and a recipe on disk, as a new user has them; and one finished run."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from agent_r1_trl.cli import main


def pytest_configure(config):
    """Where only tests of this folder run, TRL does not import vLLM, which takes seconds and nothing here uses."""
    folders = [Path(item.partition("::")[0]).resolve() for item in config.args]
    if all(folder.is_relative_to(Path(__file__).parent) for folder in folders):
        sys.modules.setdefault("vllm", None)


CURE = re.compile(
    r"\b([Ss]et|[Pp]ass|Put|Correct|[Rr]emove|Name|[Gg]ive|Convert|Rename|Subclass|Return|[Ww]rite|[Cc]hoose|[Ii]nstall|"
    r"Start|Restart|Unset|Launch|Raise|or None|are written|There are)\b|--list|--help"
)

TASK = '''
from agent_r1_trl import ToolEnv, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


class AddEnv(ToolEnv):
    tools = (add,)

    def __init__(self, bonus: float = 1.0):
        super().__init__()
        self.bonus = bonus

    def outcome_reward(self, trajectory):
        return self.bonus * (len(trajectory.final_text) % 2)


def word_count_reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]
'''


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """An untrained two-layer Qwen2 with a small tokenizer of the Qwen family."""
    from agent_r1_trl.testing import make_policy, make_tokenizer

    folder = tmp_path_factory.mktemp("cli") / "tiny-model"
    tokenizer = make_tokenizer("qwen2_5")
    make_policy(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_task(folder, model_folder, **settings):
    """`task.py`, `train.jsonl`, `test.jsonl` and `recipe.yaml` in a folder; a setting of None is left out."""
    (folder / "task.py").write_text(TASK)
    for name, count in {"train": 4, "test": 2}.items():
        rows = [{"id": f"{name}{i}", "prompt": f"What is {i} + {i}?"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model_name_or_path": str(model_folder), "dtype": "float32", "env": "task.py:AddEnv",
        "dataset_name": "train.jsonl", "eval_dataset_name": "test.jsonl", "max_turns": 2, "max_tokens_per_turn": 6,
        "max_completion_length": 48, "max_observation_tokens": 16, "num_generations": 2,
        "per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 2, "bf16": False, "use_cpu": True,
        "gradient_checkpointing": False, "output_dir": "out", "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "seed": 3,
    } | settings  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in recipe.items() if value is not None}))
    return path


@pytest.fixture
def recipe(tmp_path, monkeypatch, model_folder):
    """`recipe(setting=value)` writes the files and the recipe to the current directory, an empty one."""
    monkeypatch.chdir(tmp_path)

    def write(**settings):
        return str(write_task(tmp_path, model_folder, **settings))

    return write


@pytest.fixture
def refusal(capsys):
    """`refusal("train", "--config", ...)` is the one message of a command that must end with exit code 2, or `code`.

    The law for all of them: no traceback, one line, and a fix.
    """

    def run(*arguments, code=2):
        capsys.readouterr()
        assert main(list(map(str, arguments))) == code
        errors = capsys.readouterr().err
        assert "Traceback" not in errors
        (message,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert CURE.search(message), f"no fix in: {message}"
        return message.removeprefix("error: ")

    return run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, model_folder):
    """The folder of a run of two steps that `train` made, with an output directory `out`."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        path = write_task(folder, model_folder, save_strategy="steps", save_steps=1)
        assert main(["train", "--config", str(path), "--num_eval_examples", "1"]) == 0
    return folder


SEARCH_ENV = """

class Shelf:
    def search(self, query, top_k):
        SEARCHED.append(query)
        return [Passage(id="p", title="Sums", text="Four is the sum.", score=1.0)]


SEARCHED = []


class ShelfEnv(SearchQAEnv):
    def __init__(self):
        super().__init__(Shelf(), answer_tag=False)
"""


@pytest.fixture
def write_search_task():
    """`write_search_task(test=2)` adds `ShelfEnv` to `task.py`, and questions for it."""

    def write(**counts):
        task = Path("task.py")
        imports = "from agent_r1_trl import SearchQAEnv\nfrom agent_r1_trl.tools import Passage\n"
        task.write_text(imports + task.read_text() + SEARCH_ENV)
        for name, count in counts.items():
            rows = [
                {"id": f"{name}{i}", "question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(count)
            ]
            Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write
