"""`agent-r1-trl train`: train an agent according to a recipe.

agent-r1-trl train --config recipe.yaml --learning_rate 1e-6
accelerate launch --config_file recipes/accelerate_configs/ddp.yaml -m agent_r1_trl.cli.train --config recipe.yaml
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import agent_r1_trl.trainers as trainers
from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.cli.arguments import TrainArguments
from agent_r1_trl.cli.errors import (
    UsageError,
    is_main_process,
    loading,
    run_command,
    users_mistakes,
    with_fix,
)
from agent_r1_trl.cli.parser import OVER_RECIPE, RecipeParser
from agent_r1_trl.cli.recipe import (
    FILE,
    config_of,
    facts_of_run,
    found_paths,
    read_recipe,
    recipe_list,
    words_of,
    write_resolved_recipe,
)
from agent_r1_trl.cli.resolve import (
    check_first_row,
    check_start_without_data,
    make_folder,
    reading_folder,
    resolve_callback,
    resolve_env,
    resolve_function,
    resolve_generator,
    resolve_object,
    with_reward_options,
)
from agent_r1_trl.display.console import PlainConsole
from agent_r1_trl.environments.data_files import FILE_FORMATS, load_rows
from agent_r1_trl.environments.factory import made_and_closed, resolve_env_factory
from agent_r1_trl.errors import RunError
from agent_r1_trl.evaluation.agent import check_model_folder
from agent_r1_trl.generation.adapter_folders import check_whole_model
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.recording.lines import EVALUATION
from agent_r1_trl.safe_text import shown
from agent_r1_trl.settings import Clash, find_clashes, plain_value, refuse
from agent_r1_trl.trainers.checkpoints import choose_checkpoint, find_run, saving, set_aside
from agent_r1_trl.trainers.config import RATIO_SETTINGS, ModelConfig, get_peft_config, get_quantization_config
from agent_r1_trl.trainers.plan import NO_ROWS, plan_text

if TYPE_CHECKING:
    from agent_r1_trl.trainers.config import MultiTurnConfig
    from agent_r1_trl.trainers.construction import TrainRows
    from agent_r1_trl.trainers.multi_turn import MultiTurnTrainer

COMMAND = "agent-r1-trl train"
TRAINERS = {"grpo": "MultiTurnGRPOTrainer", "ppo": "MultiTurnPPOTrainer"}
"""Value of `trainer` -> class in `agent_r1_trl.trainers`, whose `config_class` defines the settings."""
CLASHES = (
    Clash(
        "model_name_or_path",
        lambda c: not c.model_name_or_path,
        "there is no model to train. Set it to a directory or a Hub id, such as Qwen/Qwen2.5-1.5B-Instruct.",
    ),
    Clash(
        "dataset_name max_steps",
        lambda c: not c.dataset_name and c.max_steps <= 0,
        "it is not said for how many steps the environment makes tasks. Set dataset_name, or set max_steps to a "
        "number > 0.",
    ),
    Clash(
        "eval_strategy eval_dataset_name",
        lambda c: c.eval_dataset_name is None and getattr(c.eval_strategy, "value", c.eval_strategy) != "no",
        "there is nothing to evaluate on. Set eval_dataset_name, or set eval_strategy to 'no'.",
    ),
    Clash(
        "overwrite resume_from_checkpoint",
        lambda c: c.overwrite and wants_resume(c),
        "the one starts a new run and the other goes on with the old one. Remove one of them.",
    ),
)
"""Checks across the settings of the command, the trainer and the model."""


def run(argv: Sequence[str]) -> int:
    """Train an agent; returns the exit code."""
    if "--list-recipes" in argv:
        print(recipe_list(), end="")
        return 0
    use_one_gpu()

    script_args, args, model_args = read_arguments(argv)
    check_num_processes(os.environ, args.world_size, script_args.num_processes_expected)
    with users_mistakes():
        check_whole_model(model_args.model_name_or_path, flag="model_name_or_path")
    console = PlainConsole(quiet=not is_main_process(), soft_wrap=True)
    task = make_task(script_args)
    train_dataset, eval_dataset = load_data(script_args)
    with reading_folder("output_dir", args.output_dir):
        checkpoint = _checkpoint(args)
    if not plain_value(args, "journal.replay"):  # something is sampled
        _check_task(script_args, args, model_args, task, train_dataset, eval_dataset)
    with reading_folder("output_dir", args.output_dir):
        _prepare_folder(script_args, args, model_args, checkpoint, console)
    folder = args.output_dir  # as it was given: the trainer makes the path absolute
    make_folder("output_dir", folder)
    console.print(_plan(script_args, args, model_args, train_dataset, eval_dataset))
    check_target_modules(model_args)
    datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    trainer = make_trainer(script_args, args, model_args, **task, **datasets)
    if trainer.is_world_process_zero():
        data = {"dataset_name": train_dataset, "eval_dataset_name": eval_dataset}
        facts = facts_of_run(processes=args.world_size, device=str(args.device), data=data)
        given = script_args.settings | {"overwrite": False}
        write_resolved_recipe(given, (TrainArguments, type(args), ModelConfig), task["env"], facts, folder)
    if (progress := trainer.features.get("progress")) is not None:
        progress.is_verbose = script_args.verbose
        progress.has_plan = True  # it was printed before the model was loaded
    _train(trainer, checkpoint)
    with saving(Path(args.output_dir)):  # absolute by now, wherever a tool has gone
        trainer.save_model(args.output_dir, _internal_call=True)  # True: nothing is uploaded yet
    if trainer.is_world_process_zero():
        trainer.save_state()
    if args.push_to_hub:
        try:
            trainer.push_to_hub(dataset_name=script_args.dataset_name)
        except RunError as error:  # secrets
            raise UsageError(f"{error}\nThe model is in {folder}; agent-r1-trl push sends it.") from error
    # Trackers and the process group: a thread of gloo that outlives the interpreter can abort the process.
    getattr(trainer, "end", trainer.accelerator.end_training)()  # transformers >= 5.18 has `end`
    console.print(_farewell(script_args, args, folder))
    return 0


def read_arguments(argv: Sequence[str]) -> tuple[Any, Any, Any]:
    """Parse the arguments of the script, of the trainer and of the model.

    The first has all settings as they were given, defaults included, in its attribute `settings`.
    """
    config_class = config_class_of(find_trainer(argv))
    about = "Train an agent (--trainer ppo --help lists the settings of PPO)."
    kinds = (TrainArguments, config_class, ModelConfig)
    others = {name: config_class_of(name) for name in ("grpo", "ppo")}
    parser = RecipeParser(kinds, command=COMMAND, about=about, others=others)
    script_args, args, model_args = parser.parse(argv, defaults=device_defaults())
    with users_mistakes():
        refuse(find_clashes(SimpleNamespace(**parser.settings), CLASHES))
        args.check_supported(has_generator=script_args.generator is not None)
    script_args.settings = parser.settings | {name: getattr(script_args, name) for name in OVER_RECIPE[:2]}
    script_args.settings |= {name: getattr(args, name) for name in RATIO_SETTINGS}  # their defaults follow from others
    return script_args, args, model_args


def find_trainer(argv: Sequence[str]) -> str:
    """Find the algorithm in the recipe or on the command line; it decides which settings exist."""
    path = config_of(argv)
    recipe = {} if path is None else read_recipe(path)
    given = [texts[0] for flag, texts in words_of(argv) if flag in ("trainer", "algo") and texts]
    if given:
        return str(given[-1])
    return str(recipe.get("trainer", TrainArguments.trainer))


def config_class_of(name: str) -> Any:
    """The class of the settings for a value of `trainer`; ours come without TRL's trainer, which imports vLLM."""
    if name in TRAINERS:
        return getattr(trainers, TRAINERS[name].replace("Trainer", "Config"))
    return trainer_class(name).config_class


def trainer_class(name: str) -> Any:
    """The trainer class for a value of `trainer`."""
    if name in TRAINERS:
        return getattr(trainers, TRAINERS[name])
    is_path = any(mark in name for mark in ".:")
    found = resolve_object("trainer", found_paths(name)) if is_path else None
    if not isinstance(found, type) or not issubclass(found, tuple(map(trainer_class, TRAINERS))):
        raise UsageError(
            f"trainer={name!r} is {f'{found!r:.100}, no trainer of ours' if is_path else 'no algorithm'}."
            f"{did_you_mean(name, TRAINERS)} Name a subclass of {' or '.join(TRAINERS.values())} by its path, or set "
            f"trainer to one of {', '.join(map(repr, TRAINERS))}."
        )
    return found


# ---------------------------------------------------------------- processes and devices


def check_num_processes(environment: Mapping[str, str], running: int, expected: int | None) -> None:
    """Refuse a run with another number of processes than the recipe expects, or than the launcher announced."""
    announced = int(environment.get("WORLD_SIZE") or running)
    for flag, number in {"WORLD_SIZE": announced, "num_processes_expected": expected}.items():
        if number not in (None, running):
            raise UsageError(
                f"{flag}={number}: {running} process(es) train together, so a step would train on another number "
                f"of trajectories. Launch with torchrun --nproc_per_node {number} (on GPUs also accelerate launch "
                f"--num_processes {number}; on a CPU that starts one process), or change {flag}."
            )


def device_defaults() -> dict[str, Any]:
    """Change TRL's defaults for a recent GPU: no bf16 on an older one, and no pinned memory without any."""
    if not torch.cuda.is_available():
        return {"bf16": False, "dataloader_pin_memory": False}
    return {} if torch.cuda.is_bf16_supported() else {"bf16": False}


def use_one_gpu() -> None:
    """Hide all GPUs but the first from a plain `python -m` process, for which transformers would use DataParallel."""
    if "WORLD_SIZE" in os.environ or "CUDA_VISIBLE_DEVICES" in os.environ:
        return
    if (count := torch.cuda.device_count()) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        print(
            f"This process uses the first of {count} GPUs. To use all of them: accelerate launch --config_file "
            "recipes/accelerate_configs/ddp.yaml -m agent_r1_trl.cli.train ..."
        )


# ---------------------------------------------------------------- before the model is loaded


def make_task(script_args: TrainArguments) -> dict[str, Any]:
    """The environment, tools, reward functions, callbacks and generator that a recipe names."""
    env = resolve_env(script_args.env, script_args.env_kwargs) if script_args.env else None  # type: ignore[arg-type]
    task: dict[str, Any] = {"env": env}
    for name in ("tools", "reward_funcs", "turn_reward_funcs"):
        task[name] = [resolve_function(name, path) for path in getattr(script_args, name) or []] or None
    task["callbacks"] = [resolve_callback(path) for path in script_args.callbacks or []] or None
    task["generator"] = None if script_args.generator is None else resolve_generator(script_args.generator)
    return task | with_reward_options(task, script_args.reward_options)  # type: ignore[arg-type]


def _check_task(
    script_args: TrainArguments,
    args: MultiTurnConfig,
    model_args: ModelConfig,
    task: dict[str, Any],
    train: TrainRows,
    test: TrainRows,
) -> None:
    """Find mistakes of task and template that would spoil every rollout, before the model is loaded."""
    factory = resolve_env_factory(task["env"], task["tools"])
    if factory is None:
        return
    env = f"env={script_args.env!r}" if script_args.env else f"tools={script_args.tools}"
    for flag, rows in {"dataset_name": train, "eval_dataset_name": test}.items():
        if rows is not None:
            check_first_row(env, factory, f"{flag}={getattr(script_args, flag)!r}", rows)
    if train is None:
        check_start_without_data(env, factory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
        chat = ChatFormat(tokenizer, chat_template=args.chat_template, response_template=args.response_template)
    except (OSError, ValueError, ImportError):  # said in full when the model is loaded
        return
    with made_and_closed(factory) as env:
        names = [getattr(item, "name", str(item)) for item in getattr(env, "tools", None) or ()]
    if names and not chat.supports_tools:
        raise UsageError(
            f"model_name_or_path={model_args.model_name_or_path!r}: its chat template cannot render tool "
            f"conversations, so the model would never see the tools {names}. Set chat_template to one that can "
            "(such as qwen3_training), or choose a model that was trained with tools."
        )


def check_target_modules(model_args: ModelConfig) -> None:
    """Refuse a name in `lora_target_modules` or `lora_modules_to_save` that no module has, before weights are loaded.

    peft refuses targets when none of all is found, and trains fewer layers in silence where only some are. It never
    says that a module to save does not exist.
    """
    peft_config = get_peft_config(model_args)
    targets = getattr(peft_config, "target_modules", None)
    targets = None if targets == "all-linear" else targets
    saved = getattr(peft_config, "modules_to_save", None)
    if targets is None and saved is None:
        return
    try:
        config = AutoConfig.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # whatever it is, it is said in full when the model is loaded
        return
    if config.architectures != [type(model).__name__]:  # the trainer loads another class, with other paths
        return
    modules = dict(model.named_modules())
    if isinstance(targets, str):  # a regular expression for whole paths
        wrong = [] if any(re.fullmatch(targets, path) for path in modules) else [targets]
    else:
        wrong = _unknown_modules(targets or (), modules)
    layers = {path.rpartition(".")[2]: None for path, module in modules.items() if hasattr(module, "weight")}
    known = [name for name in layers if "norm" not in name and not name.isdecimal()]
    for flag, names in (
        ("lora_target_modules", wrong),
        ("lora_modules_to_save", _unknown_modules(saved or (), modules)),
    ):
        if names:
            all_linear = ", or to 'all-linear'" if flag == "lora_target_modules" else ", or remove it"
            raise UsageError(
                f"{flag}={getattr(model_args, flag)!r}: {names[0]!r} is no module of "
                f"{model_args.model_name_or_path}.{did_you_mean(names[0], known)} Set {flag} to some of "
                f"{', '.join(map(repr, known[:12]))}{all_linear}."
            )


def _unknown_modules(names: Iterable[str], modules: Iterable[str]) -> list[str]:
    """The names with which no path of a module ends."""
    paths = [f".{path}" for path in modules]
    return [name for name in names if not any(path.endswith(f".{name}") for path in paths)]


def _prepare_folder(
    script_args: TrainArguments,
    args: MultiTurnConfig,
    model_args: ModelConfig,
    checkpoint: str | bool | None,
    console: Console,
) -> None:
    """Refuse an `output_dir` that holds a run, or move that run (`overwrite`); a resume goes on with it."""
    folder = Path(args.output_dir)
    flag = f"output_dir={args.output_dir!r}"
    found = find_run(folder)
    if wants_resume(args) and checkpoint is None and not (found and (folder / "trainer_state.json").exists()):
        state = f"holds a run without a checkpoint (save_strategy={args.save_strategy!s})" if found else "holds none"
        console.print(f"resume_from_checkpoint: true: {flag} {state}, so the run starts at step 0.")
        return
    replay = plain_value(args, "journal.replay")
    is_replay = replay and Path(replay).resolve() == folder.resolve()  # refused for itself
    if found is None or checkpoint is not None or is_replay:
        return
    if not script_args.overwrite:
        again = " and no checkpoint to resume from" if wants_resume(args) else ""
        way_out = "Set"
        if not wants_resume(args) and any(folder.glob("checkpoint-*/*")):
            way_out = "To go on with it, pass --resume_from_checkpoint true; for a new run, set"
        raise UsageError(
            f"{flag} holds a run already ({found}){again}; a second one would replace its model and mix with its "
            f"trajectories. {way_out} another output_dir, or overwrite: true, which moves the old run to "
            f"{args.output_dir.rstrip('/')}.1 and deletes nothing."
        )
    needed = [path for path in (Path.cwd(), Path(model_args.model_name_or_path)) if path.exists()]
    if inside := [str(path) for path in needed if path.resolve().is_relative_to(folder.resolve())]:
        raise UsageError(
            f"overwrite: true would move {flag}, but this run needs {inside[0]} in it. Set another output_dir."
        )
    if is_main_process():
        try:
            console.print(f"The old run of {args.output_dir} is now in {set_aside(folder)}.")
        except OSError as error:
            raise UsageError(f"overwrite: true: {flag} cannot be moved ({error}). Set another output_dir.") from error


def load_data(script_args: TrainArguments) -> tuple[Any, Any]:
    """The data sets to train and to evaluate on; None where the environment makes its own rows."""
    train = evaluation = None
    config = script_args.dataset_config
    _check_split(script_args, "dataset_name", "dataset_train_split")
    _check_split(script_args, "eval_dataset_name", "dataset_test_split")
    if name := script_args.dataset_name:
        train = load_rows("dataset_name", name, config=config, split=script_args.dataset_train_split)
    if (name := script_args.eval_dataset_name) is not None:
        limit = script_args.num_eval_examples
        split = script_args.dataset_test_split
        evaluation = load_rows("eval_dataset_name", name, config=config, split=split, limit=limit)
    return train, evaluation


def _check_split(script_args: TrainArguments, flag: str, split_flag: str) -> None:
    """Refuse a split of a file, which has none."""
    name, split = getattr(script_args, flag), getattr(script_args, split_flag)
    if name and split != getattr(TrainArguments, split_flag) and Path(name).suffix.lower() in FILE_FORMATS:
        raise UsageError(
            f"{split_flag}={split!r} has no effect: {flag}={name!r} is a file, which has no splits. Remove "
            f"{split_flag}, or name the file of the split."
        )


def make_trainer(script_args: TrainArguments, args: MultiTurnConfig, model_args: ModelConfig, **parts: object) -> Any:
    """The trainer of a recipe, with its model loaded."""
    names = {"revision": "model_revision", "dtype": "dtype", "attn_implementation": "attn_implementation"}
    given = {name: value for name, setting in names.items() if (value := getattr(model_args, setting)) is not None}
    args.model_init_kwargs = given | (args.model_init_kwargs or {})
    try:
        with loading(model_args.model_name_or_path, ImportError):  # wrong settings, missing packages
            check_model_folder(model_args.model_name_or_path, flag="model_name_or_path")
            return trainer_class(script_args.trainer)(
                model=model_args.model_name_or_path,
                args=args,
                peft_config=get_peft_config(model_args),
                quantization_config=get_quantization_config(model_args),
                **parts,
            )
    except RunError:
        raise
    except RuntimeError as error:  # from a tracker that is not installed; any other is not the recipe's fault
        message = with_fix(str(error))
        if message == str(error):
            raise
        raise UsageError(message) from error


def _train(trainer: MultiTurnTrainer, checkpoint: str | bool | None) -> None:
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except RunError as error:
        if not is_main_process():  # its message would not be printed, and the error may be its alone
            print(shown(f"error on rank {os.environ.get('RANK')}: {error}"), file=sys.stderr)
        raise
    finally:
        try:
            trainer.rollouts.close()
        except Exception as error:  # hides neither how the run ended nor its model
            problem = f"{type(error).__name__}: {error}"
            print(shown(f"warning: the rollouts could not be closed: {problem}"), file=sys.stderr)


def wants_resume(args: MultiTurnConfig) -> bool:
    """Whether `resume_from_checkpoint` asks for something."""
    return str(args.resume_from_checkpoint).lower() not in ("false", "none", "")


def _checkpoint(args: MultiTurnConfig) -> str | bool | None:
    """The value of `resume_from_checkpoint`: a path, or True for the last checkpoint if there is one."""
    value, folder = str(args.resume_from_checkpoint), Path(args.output_dir)
    if not wants_resume(args):
        return None
    if value.lower() in ("true", "last"):
        return True if any(folder.glob("checkpoint-*")) else None
    choose_checkpoint(value, folder)
    return value


def _plan(
    script_args: TrainArguments,
    args: MultiTurnConfig,
    model_args: ModelConfig,
    train: TrainRows,
    evaluation: TrainRows,
) -> str:
    rows = f"{len(train)} rows of {script_args.dataset_name}" if train is not None else NO_ROWS
    tested = f"; evaluation on {len(evaluation)} of {script_args.eval_dataset_name}" if evaluation is not None else ""
    adapter = f", LoRA r={model_args.lora_r}" if model_args.use_peft else ""
    return plan_text(
        args,
        model=f"{model_args.model_name_or_path}{adapter}",
        environment=script_args.env or ", ".join(script_args.tools or []) or "none",
        data=rows + tested,
        method=script_args.trainer,
        num_steps=args.max_steps,
    )


def _farewell(script_args: TrainArguments, args: MultiTurnConfig, folder: str) -> str:
    """Where everything is, and the commands that go on from there."""
    name, evaluation = shlex.quote(folder), shlex.quote(f"{folder}/{EVALUATION}")
    text = f"\nDone. The model is in {folder}"
    if args.record_trajectories != "none":
        text += f", every trajectory in {folder}/trajectories\n  agent-r1-trl view {name} --terminal"
    if script_args.env and (script_args.eval_dataset_name or script_args.dataset_name):  # what eval needs
        recipe = shlex.quote(f"{folder}/{FILE}")
        text += f"\n  agent-r1-trl eval --config {recipe} --model {name} --output_dir {evaluation}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.train`, which launchers start."""
    return run_command(run, argv)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    sys.exit(main())
