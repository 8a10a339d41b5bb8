"""`agent-r1-trl train`: train an agent according to a recipe.

agent-r1-trl train --config recipe.yaml --learning_rate 1e-6
accelerate launch --config_file recipes/accelerate_configs/ddp.yaml -m agent_r1_trl.cli.train --config recipe.yaml
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.cli.errors import (
    CollapseError,
    InfrastructureError,
    UsageError,
    infrastructure_errors,
    is_main_process,
    model_problem,
    run_command,
    with_cure,
)
from agent_r1_trl.cli.launch import check_launcher, check_num_processes, device_defaults, use_one_gpu
from agent_r1_trl.cli.options import read_options, show_help
from agent_r1_trl.cli.recipe import read_recipe, split_config
from agent_r1_trl.cli.resolved_recipe import FILE, facts_of_run, write_resolved_recipe
from agent_r1_trl.cli.shipped_recipes import recipe_list
from agent_r1_trl.safe_text import shown

if TYPE_CHECKING:
    from rich.console import Console

    from agent_r1_trl.cli.arguments import TrainArguments

COMMAND = "agent-r1-trl train"


def run(argv: Sequence[str]) -> int:
    """Train an agent; returns the exit code."""
    if show_help(COMMAND, argv, "Train an agent.", read_options):
        return 0
    if "--list-recipes" in argv:
        print(recipe_list(), end="")
        return 0
    check_launcher(os.environ)
    find_trainer(argv)  # shows a mistake in the file before seconds of imports
    use_one_gpu()
    from agent_r1_trl.cli.resolve import make_folder

    settings, script_args, args, model_args = _read(argv)
    check_num_processes(os.environ, args.world_size, script_args.num_processes_expected)
    console = _console()
    task = make_task(script_args)
    train_dataset, eval_dataset = load_data(script_args, args)
    checkpoint = _checkpoint(args)
    _check_start(script_args, args, task, train_dataset, eval_dataset)
    _check_template(args, model_args, task)
    _prepare_folder(script_args, args, model_args, console)
    folder = args.output_dir  # as it was given: the trainer makes the path absolute
    make_folder("output_dir", folder)
    console.print(_plan(script_args, args, model_args, train_dataset, eval_dataset))
    trainer = make_trainer(
        script_args,
        args,
        model_args,
        **task,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
    )
    if trainer.is_world_process_zero():
        data = {"dataset_name": train_dataset, "eval_dataset_name": eval_dataset}
        facts = facts_of_run(processes=args.world_size, device=str(args.device), data=data)
        given = (
            settings
            | {"overwrite": False}
            | {name: getattr(script_args, name) for name in ("env_kwargs", "reward_options")}
        )
        write_resolved_recipe(given, task["env"], facts, folder)
    _train(trainer, checkpoint, _show_progress(trainer, args, console))
    _save(trainer, args.output_dir)  # wherever a tool has gone
    if trainer.is_world_process_zero():
        trainer.save_state()
    if args.push_to_hub:
        _push(trainer, script_args.dataset_name)
    if hasattr(trainer, "end"):  # transformers >= 5.18: closes trackers and the process group
        trainer.end()
    console.print(_farewell(script_args, args, folder))
    return 0


def read_arguments(argv: Sequence[str]) -> tuple[TrainArguments, Any, Any]:
    """Parse the arguments of the script, of the trainer and of the model.

    Raises:
        UsageError: there is a mistake in the recipe or on the command line.
    """
    return _read(argv)[1:]


def _read(argv: Sequence[str]) -> tuple[dict[str, Any], TrainArguments, Any, Any]:
    """The settings as they were given, defaults included, and the three objects made of them."""
    from agent_r1_trl.cli.arguments import TrainArguments
    from agent_r1_trl.cli.parser import RecipeParser
    from agent_r1_trl.trainers.trl_arguments import ModelConfig

    config_class = trainer_class(find_trainer(argv)).config_class
    parser = RecipeParser((TrainArguments, config_class, ModelConfig), command=COMMAND)
    script_args, args, model_args = parser.parse(argv, defaults=device_defaults())
    if not model_args.model_name_or_path:
        raise UsageError(
            "model_name_or_path: not set, so there is no model to train. Set it to a directory or a Hub id, such as "
            "Qwen/Qwen2.5-1.5B-Instruct."
        )
    is_agent = script_args.env or script_args.tools or script_args.turn_reward_funcs or config_class.has_critic
    if is_agent or args.asked_features():  # our rollout plays
        try:
            args.check_supported()
        except ValueError as error:
            raise UsageError(with_cure(str(error))) from error
    return parser.settings, script_args, args, model_args


def find_trainer(argv: Sequence[str]) -> str:
    """Find the algorithm in the recipe or on the command line; it decides which settings exist.

    Raises:
        UsageError: the recipe cannot be read, or the algorithm does not exist.
    """
    from agent_r1_trl.cli.arguments import TrainArguments, check_trainer

    path, arguments = split_config(argv)
    name = TrainArguments.trainer if path is None else read_recipe(path).get("trainer", TrainArguments.trainer)
    for position, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag in ("--trainer", "--algo"):
            name = value or (arguments[position + 1] if position + 1 < len(arguments) else "")
    check_trainer(str(name))
    return str(name)


def trainer_class(name: str) -> Any:
    """The trainer class for a value of `trainer`."""
    import agent_r1_trl.trainers as trainers
    from agent_r1_trl.cli.arguments import TRAINERS

    return getattr(trainers, TRAINERS[name])


def _console() -> Console:
    from agent_r1_trl.cli.console import PlainConsole

    return PlainConsole(quiet=not is_main_process(), soft_wrap=True)


def make_task(script_args: TrainArguments) -> dict[str, Any]:
    """The environment, tools and reward functions that a recipe names.

    Raises:
        UsageError: one of them cannot be had.
    """
    from agent_r1_trl.cli.resolve import resolve_env, resolve_function, with_reward_options

    env = resolve_env(script_args.env, script_args.env_kwargs) if script_args.env else None  # type: ignore[arg-type]
    task: dict[str, Any] = {"env": env}
    for name in ("tools", "reward_funcs", "turn_reward_funcs"):
        task[name] = [resolve_function(name, path) for path in getattr(script_args, name) or []] or None
    return task | with_reward_options(task, script_args.reward_options)  # type: ignore[arg-type]


def _check_start(script_args: TrainArguments, args: Any, task: dict[str, Any], train: Any, evaluation: Any) -> None:
    """Find mistakes that would end the run in its first step before the model is loaded."""
    from agent_r1_trl.cli.resolve import check_first_row
    from agent_r1_trl.environments.factory import resolve_env_factory

    if args.replay:  # nothing is played
        return
    factory = resolve_env_factory(task["env"], task["tools"])
    env = f"env={script_args.env!r}" if script_args.env else f"tools={script_args.tools}"
    for flag, rows in {"dataset_name": train, "eval_dataset_name": evaluation}.items():
        if factory is not None and rows is not None:
            check_first_row(env, factory, f"{flag}={getattr(script_args, flag)!r}", rows)


def _check_template(args: Any, model_args: Any, task: dict[str, Any]) -> None:
    """Refuse tools that the chat template cannot show, before the model is loaded and anything is sampled.

    Raises:
        UsageError: every rollout would fail.
    """
    from transformers import AutoTokenizer

    from agent_r1_trl.chat import ChatFormat
    from agent_r1_trl.environments.factory import made_and_closed, resolve_env_factory

    factory = resolve_env_factory(task["env"], task["tools"])
    if factory is None or args.replay:
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_args.model_name_or_path,
            revision=model_args.model_revision,
        )
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


def _prepare_folder(script_args: TrainArguments, args: Any, model_args: Any, console: Console) -> None:
    """Refuse an `output_dir` that holds a run, or move that run (`overwrite`); a resume goes on with it.

    Raises:
        UsageError: the folder holds a run, or cannot be moved.
    """
    from agent_r1_trl.trainers.output_lock import OutputInUseError, find_run, set_aside

    folder, checkpoint = Path(args.output_dir), _checkpoint(args)
    flag = f"output_dir={args.output_dir!r}"
    if wants_resume(args) and script_args.overwrite:
        raise UsageError(
            f"overwrite: true with resume_from_checkpoint={args.resume_from_checkpoint!r}: the one starts a new run "
            "and the other goes on with the old one. Remove one of them."
        )
    found = find_run(folder)
    if wants_resume(args) and checkpoint is None and not (found and (folder / "trainer_state.json").exists()):
        state = f"holds a run without a checkpoint (save_strategy={args.save_strategy!s})" if found else "holds none"
        console.print(f"resume_from_checkpoint: true: {flag} {state}, so the run starts at step 0.")
        return
    is_replay = args.replay and Path(args.replay).resolve() == folder.resolve()  # refused for itself
    if found is None or checkpoint is not None or is_replay:
        return
    if not script_args.overwrite:
        again = " and no checkpoint to resume from" if wants_resume(args) else ""
        raise UsageError(
            f"{flag} holds a run already ({found}){again}; a second one would replace its model and mix with its "
            "trajectories. Set another output_dir, or overwrite: true, which moves the old run to "
            f"{args.output_dir.rstrip('/')}.1 and deletes nothing (resume_from_checkpoint: true goes on with a run "
            "from its last checkpoint)."
        )
    inside = [str(path) for path in (Path.cwd(), Path(model_args.model_name_or_path)) if _lies_in(path, folder)]
    if inside:
        raise UsageError(
            f"overwrite: true would move {flag}, where {inside[0]} lies, which this run needs. Set another output_dir."
        )
    if is_main_process():
        try:
            console.print(f"The old run of {args.output_dir} is now in {set_aside(folder)}.")
        except OutputInUseError as error:
            raise InfrastructureError(str(error)) from error
        except OSError as error:
            raise UsageError(f"overwrite: true: {flag} cannot be moved ({error}). Set another output_dir.") from error


def _lies_in(path: Path, folder: Path) -> bool:
    return path.exists() and path.resolve().is_relative_to(folder.resolve())


def load_data(script_args: TrainArguments, args: Any) -> tuple[Any, Any]:
    """The data sets to train and to evaluate on; None where the environment makes its own rows.

    Raises:
        UsageError: one of them cannot be read, or is missing.
    """
    from agent_r1_trl.cli.resolve import load_rows

    config = script_args.dataset_config
    train = evaluation = None
    if script_args.dataset_name:
        train = load_rows(
            "dataset_name", script_args.dataset_name, config=config, split=script_args.dataset_train_split
        )
    name = script_args.eval_dataset_name
    if name is not None:
        evaluation = load_rows(
            "eval_dataset_name",
            name,
            config=config,
            split=script_args.dataset_test_split,
            limit=script_args.num_eval_examples,
        )
    if train is None and args.max_steps <= 0:
        raise UsageError(
            f"dataset_name: not set, and max_steps={args.max_steps} does not say for how many steps the environment "
            "makes tasks. Set dataset_name, or set max_steps to a number > 0."
        )
    if evaluation is None and args.eval_strategy != "no":
        strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
        raise UsageError(
            f"eval_strategy={strategy!r} needs an evaluation data set, and eval_dataset_name is not set. Set "
            "eval_dataset_name, or set eval_strategy to 'no'."
        )
    return train, evaluation


def make_trainer(script_args: TrainArguments, args: Any, model_args: Any, **parts: Any) -> Any:
    """The trainer of a recipe, with its model loaded.

    Raises:
        UsageError: a setting does not go with the model, or a package is missing.
        InfrastructureError: a server cannot be reached.
    """
    from agent_r1_trl.evaluation.loading import check_model_folder
    from agent_r1_trl.trainers.trl_arguments import get_peft_config, get_quantization_config

    options = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
    }
    args.model_init_kwargs = {
        **{name: value for name, value in options.items() if value is not None},
        **(args.model_init_kwargs or {}),
    }
    try:
        check_model_folder(model_args.model_name_or_path, flag="model_name_or_path")
        return trainer_class(script_args.trainer)(
            model=model_args.model_name_or_path,
            args=args,
            peft_config=get_peft_config(model_args),
            quantization_config=get_quantization_config(model_args),
            **parts,
        )
    except OSError as error:
        raise UsageError(model_problem(model_args.model_name_or_path, error)) from error
    except infrastructure_errors() as error:  # no server
        raise InfrastructureError(str(error)) from error
    except (ValueError, ImportError) as error:  # wrong settings, missing packages
        raise UsageError(with_cure(str(error))) from error
    except RuntimeError as error:  # from a tracker that is not installed; any other is not the recipe's fault
        message = with_cure(str(error))
        if message == str(error):
            raise
        raise UsageError(message) from error


def _train(trainer: Any, checkpoint: str | bool | None, progress: Any) -> None:
    from agent_r1_trl.environments import RewardError
    from agent_r1_trl.journal import ReplayError
    from agent_r1_trl.tools import ToolSchemaError
    from agent_r1_trl.trainers.checkpoints import CheckpointError
    from agent_r1_trl.trainers.echo_guard import CollapsedError

    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except CollapsedError as error:
        raise CollapseError(str(error)) from error
    except infrastructure_errors() as error:
        if not is_main_process():  # its message would not be printed, and the error may be its alone
            print(shown(f"error on rank {os.environ.get('RANK')}: {error}"), file=sys.stderr)
        raise InfrastructureError(str(error)) from error
    except (CheckpointError, ReplayError, RewardError, ToolSchemaError) as error:  # a second try would end alike
        raise UsageError(str(error)) from error
    finally:
        progress.stop()
        if trainer.env_factory is not None:
            _close(trainer)


def _close(trainer: Any) -> None:
    """Close engine and event loop; a failure to do so hides neither how the run ended nor its model."""
    try:
        trainer.rollouts.close()
    except Exception as error:
        print(shown(f"warning: the rollouts could not be closed: {type(error).__name__}: {error}"), file=sys.stderr)


def _save(trainer: Any, output_dir: str) -> None:
    from agent_r1_trl.trainers.final_model import save_final_model
    from agent_r1_trl.trainers.nonfinite import NonFiniteError

    try:
        problem = save_final_model(trainer, output_dir)
    except NonFiniteError as error:
        raise InfrastructureError(str(error)) from error
    if problem is not None:
        raise InfrastructureError(
            f"output_dir={output_dir!r}: the trained model cannot be written ({problem}). Free space there, and "
            "resume from the last checkpoint (resume_from_checkpoint: true); the model is then written again."
        )


def _push(trainer: Any, dataset_name: str | None) -> None:
    from agent_r1_trl.secret_scan import SecretFoundError

    try:
        trainer.push_to_hub(dataset_name=dataset_name)
    except SecretFoundError as error:
        raise UsageError(f"{error}\nThe model is in {trainer.args.output_dir}; agent-r1-trl push sends it.") from error


def _show_progress(trainer: Any, args: Any, console: Console) -> Any:
    from transformers import PrinterCallback, ProgressCallback

    from agent_r1_trl.cli.progress import TrainingProgress

    callback = TrainingProgress(console)
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(callback)
    return callback


def wants_resume(args: Any) -> bool:
    """Whether `resume_from_checkpoint` asks for something."""
    return str(args.resume_from_checkpoint).lower() not in ("false", "none", "")


def _checkpoint(args: Any) -> str | bool | None:
    """The value of `resume_from_checkpoint`: a path, or True for the last checkpoint if there is one."""
    from agent_r1_trl.trainers.checkpoints import MANIFEST, UNFINISHED, CheckpointError, choose_checkpoint

    value = args.resume_from_checkpoint
    if not wants_resume(args):
        return None
    folder = Path(args.output_dir)
    if str(value).lower() in ("true", "last"):
        saved = [*folder.glob("checkpoint-*"), *folder.glob(f"{UNFINISHED}/*/{MANIFEST}")]
        return True if saved else None
    if not (Path(value) / "trainer_state.json").is_file():
        inside = [str(path) for path in Path(value).glob("checkpoint-*") if path.name[11:].isdecimal()]
        problem = "not a checkpoint (it has no trainer_state.json)" if Path(value).is_dir() else "no such directory"
        newest = max(inside, key=lambda path: int(path.rpartition("-")[2]), default=None)
        hint = f" Did you mean {newest!r}?" if newest else ""
        raise UsageError(
            f"resume_from_checkpoint={value!r}: {problem}. Pass a checkpoint-... directory, or true for the last one "
            f"of output_dir.{hint}"
        )
    try:
        without = args.resume_without or ()
        choose_checkpoint(value, folder, without=without, num_processes=args.world_size)
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    return str(value)


def _plan(script_args: TrainArguments, args: Any, model_args: Any, train: Any, evaluation: Any) -> str:
    device = str(args.device)
    if device.startswith("cuda"):
        import torch

        device = f"{device} ({torch.cuda.get_device_name(args.device)})"
    rows = f"{len(train)} rows of {script_args.dataset_name}" if train is not None else "made by the environment"
    if evaluation is not None:
        rows += f"; evaluation on {len(evaluation)} of {script_args.eval_dataset_name}"
    estimator = "" if args.advantage_estimator == script_args.trainer else f" ({args.advantage_estimator})"
    method = f"{script_args.trainer}{estimator}, learning rate {args.learning_rate:g}"
    adapter = f", LoRA r={model_args.lora_r}" if model_args.use_peft else ""
    shape = args.rollout_shape
    lines = {
        "model": f"{model_args.model_name_or_path}{adapter} on {device}, {args.world_size} process(es)",
        "environment": script_args.env or ", ".join(script_args.tools or []) or "none",
        "data": rows,
        "method": method,
        "rollout": f"{shape.prompts_per_rollout} prompts x {shape.responses_per_prompt} trajectories, at most "
        f"{args.max_turns} turns and {args.max_completion_length} tokens each, by "
        f"{'vLLM' if args.use_vllm else 'transformers'}",
        "updates": f"{shape.updates_per_rollout:g} per rollout, of {shape.trajectories_per_update} trajectories each",
        "output": args.output_dir,
    }
    return "\n".join(f"{name:12} {value}" for name, value in lines.items())


def _farewell(script_args: TrainArguments, args: Any, folder: str) -> str:
    """Where everything is, and the commands that go on from there."""
    lines = [f"\nDone. The model is in {folder}"]
    if args.record_trajectories != "none":
        lines[0] += f", every trajectory in {folder}/trajectories"
        lines.append(f"  agent-r1-trl view {folder} --terminal")
    if script_args.env and (script_args.eval_dataset_name or script_args.dataset_name):  # what eval needs
        lines.append(f"  agent-r1-trl eval --config {folder}/{FILE} --model {folder} --output_dir {folder}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m agent_r1_trl.cli.train`, which launchers start."""
    return run_command(run, argv)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    sys.exit(main())
