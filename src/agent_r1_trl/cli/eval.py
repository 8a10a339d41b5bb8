"""`agent-r1-trl eval`: run a model on data sets and score it, within the limits of a recipe, beside baselines.

agent-r1-trl eval --config recipe.yaml --model outputs/my-agent
agent-r1-trl eval --config recipe.yaml --model outputs/grpo outputs/ppo --baselines base naive_rag closed_book
agent-r1-trl eval --config recipe.yaml --endpoint https://api.openai.com/v1 --model gpt-4.1-mini
agent-r1-trl eval compare scores-before scores-after

An evaluation that was killed goes on: while it runs, its output directory holds the file `unfinished`, and a start
that finds it samples nothing again that the journals of the rows hold. The file stays if something failed for no fault
of a model, which the next start samples again. What an evaluation depends on stands in the journals, and a start that
differs is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_r1_trl.cli.arguments import BASELINES, HELP, KEY, EvalArguments
from agent_r1_trl.cli.errors import DependencyError, UsageError, loading, users_mistakes
from agent_r1_trl.cli.parser import OF_RECIPES, RecipeParser
from agent_r1_trl.cli.progress import trajectory_progress
from agent_r1_trl.cli.recipe import without_package_paths, words_of
from agent_r1_trl.cli.resolve import check_first_row, make_folder, resolve_env
from agent_r1_trl.cli.tables import new_table, result_table
from agent_r1_trl.display.console import PlainConsole, table_console
from agent_r1_trl.environments.data_files import FILE_FORMATS, load_rows, tags_of
from agent_r1_trl.evaluation import EvaluationResult, EvaluationTable, TableRow, evaluate, open_agent
from agent_r1_trl.evaluation.agent import Agent, check_model_folder
from agent_r1_trl.evaluation.baselines import KEEP_ALL, OneAnswerEnv, check_baseline, one_answer_limits
from agent_r1_trl.evaluation.evaluator import replay_evaluation
from agent_r1_trl.evaluation.table import RESULT_FILE, STEP, short_names, split_by
from agent_r1_trl.features import feature, has_feature
from agent_r1_trl.generation import SamplingParams
from agent_r1_trl.generation.endpoint import Endpoint
from agent_r1_trl.recording.lines import EVALUATION
from agent_r1_trl.rollout import NothingRolledOutError, RolloutLimits, check_some_rolled_out
from agent_r1_trl.rollout.failures import may_pass
from agent_r1_trl.safe_text import rules, set_rules
from agent_r1_trl.settings import refuse
from agent_r1_trl.trainers.checkpoints import EVALUATION_LOCK_FILE, find_run, output_lock

if TYPE_CHECKING:
    from rich.console import Console

COMMAND = "agent-r1-trl eval"
MODEL = "model"
"""Method: the evaluated model, with its tools. Of several models, each is a method with a name of its own."""
MARK = "unfinished"
_NO_FILTERS: dict[str, Any] = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""OpenAI's protocol has no such settings."""
_OF_LOADED = ("dtype", "use_vllm", "chat_template_kwargs", "chat_template", "response_template")
"""Settings of models that are loaded here, on which trajectories depend."""


def run(argv: Sequence[str]) -> int:
    """Evaluate a model; returns the exit code."""
    arguments = read_arguments(argv)
    console = PlainConsole(soft_wrap=True)
    table = run_table(arguments, console)
    _show(table, arguments)
    if arguments.output_dir:
        with _stopped_by_the_disk(arguments.output_dir):
            places = table.write(arguments.output_dir)
        for place in places:
            view = f"agent-r1-trl view {shlex.quote(str(place))} --terminal --split eval --step {STEP}"
            console.print(f"{place / RESULT_FILE}; trajectories: {view}")
    if lost := [f"{row.dataset}, {row.method}" for row in table.rows if row.result.is_lost]:
        raise DependencyError(f"nothing could be sampled of: {'; '.join(lost)}. The causes stand below the table.")
    return 0


def read_arguments(argv: Sequence[str]) -> EvalArguments:
    """Parse the arguments."""
    parser = RecipeParser(
        (EvalArguments,),
        command=COMMAND,
        about=HELP["eval"].about,
        elsewhere=OF_RECIPES,
    )
    (arguments,) = parser.parse(argv)
    if arguments.output_dir and find_run(Path(arguments.output_dir)):  # which is not to be mixed with it
        arguments.output_dir = str(Path(arguments.output_dir) / EVALUATION)
    if arguments.endpoint:
        _check_flags(arguments, {flag.replace("-", "_") for flag, _ in words_of(argv)})
    trained = parser.recipe.get("model_name_or_path")
    if arguments.base_model is None and [trained] != arguments.model_name_or_path:
        arguments.base_model = trained
    return arguments


def _check_flags(arguments: EvalArguments, flags: set[str]) -> None:
    """Refuse flags that have no effect on a hosted model. In a recipe they are those of the trained model."""
    given = {flag.partition(".")[0] for flag in flags}
    of_loaded = (*_OF_LOADED, "trust_remote_code", "generation_batch_rows", "max_concurrency")
    names = (*KEEP_ALL, *_NO_FILTERS, *(() if "base" in (arguments.baselines or ()) else of_loaded))
    problems = [
        f"--{name} has no effect on a hosted model. Remove it; --endpoint_options takes what a server understands "
        "beyond OpenAI's protocol, and --endpoint_concurrency limits trajectories at once."
        for name in names
        if name in given
    ]
    if "endpoint" in flags and not {"model", "models", "model_name_or_path"} & flags:
        problems = ["--model: not set. Pass the name that the model has at the endpoint."]
    with users_mistakes():
        refuse(problems)


# ---------------------------------------------------------------- what is sampled


@dataclass(kw_only=True)
class PlannedRow:
    """One row of the table, before it is evaluated."""

    method: str
    dataset: str
    """Its short name."""
    source: dict[str, str | None]
    """The meaning of the short name, for the settings of the result: a path or an id, and which part of it."""
    data: str
    """The setting that names it, for errors."""
    model: str | None
    """None where nothing is sampled (`replay`)."""
    rows: Any
    env_factory: Callable[[], Any]
    is_hosted: bool
    """The model is behind the endpoint."""
    folder: str
    """Below output_dir; "" if this is the only row."""

    def limits(self, limits: RolloutLimits) -> RolloutLimits:
        """The limits of the run, with one turn for a baseline of one answer."""
        return one_answer_limits(limits) if self.method in BASELINES[1:] else limits


def make_plan(arguments: EvalArguments, env_factory: Callable[[], Any]) -> list[PlannedRow]:
    """A row for each method on each data set, by data set, baselines first."""
    names = arguments.eval_dataset_name or [str(arguments.dataset_name)]
    _check_twice("eval_dataset_name", names)
    models = planned_models(arguments)
    factories = {method: _factory(arguments, method, env_factory) for method in models}
    loaded = [_load(arguments, name) for name in names]
    ends = [end if (end := Path(name).suffix) in FILE_FORMATS else "" for name in names]
    labels = short_names([name.removesuffix(end) for name, end in zip(names, ends, strict=True)])
    is_alone = len(names) * len(models) == 1
    return [
        PlannedRow(
            method=method,
            dataset=label,
            model=None if arguments.replay else model,
            env_factory=factories[method],
            is_hosted=bool(arguments.endpoint) and method != "base",
            folder="" if is_alone else f"{label}/{method}",
            **found,
        )
        for label, found in zip(labels, loaded, strict=True)
        for method, model in models.items()
    ]


def _load(arguments: EvalArguments, name: str) -> dict[str, Any]:
    """`rows`, `source` and `data` of a planned row."""
    flag, split = "eval_dataset_name", arguments.dataset_test_split
    if arguments.eval_dataset_name is None:
        flag, split = "dataset_name", arguments.dataset_train_split
    config = arguments.dataset_config
    rows = load_rows(flag, name, config=config, split=split, limit=arguments.num_examples)
    if arguments.by:
        with users_mistakes():
            tags_of(rows, arguments.by)
    part = {} if Path(name).suffix in FILE_FORMATS else {"dataset_config": config, "dataset_split": split}
    return {"rows": rows, "source": {"dataset_name": without_package_paths(name), **part}, "data": f"{flag}={name!r}"}


def _check_twice(flag: str, names: Sequence[str]) -> None:
    if len({Path(name).resolve() if Path(name).exists() else name for name in names}) < len(names):
        raise UsageError(f"{flag}={names}: one is given twice. Remove it.")


def planned_models(arguments: EvalArguments) -> dict[str, str | None]:
    """Method -> what answers for it, baselines first."""
    given = arguments.model_name_or_path or []
    _check_twice("model_name_or_path", given)
    models = {method: _baseline_model(arguments, method, given) for method in arguments.baselines or ()}
    labels = [MODEL] if len(given) <= 1 else short_names(given, taken=(*BASELINES, MODEL))
    evaluated: list[Any] = given or [None]
    return models | dict(zip(labels, evaluated, strict=True))


def _baseline_model(arguments: EvalArguments, method: str, given: list[str]) -> str | None:
    """The model of a baseline; None where nothing is sampled."""
    if arguments.replay:
        return None
    base = arguments.base_model
    is_hosted = bool(arguments.endpoint) and method != "base"
    if is_hosted or base is None:
        base = given[0] if len(given) == 1 and (is_hosted or method != "base") else None
    elif base in given and method == "base" and not arguments.endpoint:
        base = None
    if base is None:
        which = f"{'which of the hosted models' if is_hosted else 'which model beside'} {', '.join(given)}"
        raise UsageError(
            f"baselines={method!r}: {which} is to answer? Pass --base_model, the model before training, or --model "
            "together with a recipe that names that model; of hosted models pass one, or remove the baseline."
        )
    return base


def _factory(arguments: EvalArguments, method: str, env_factory: Callable[[], Any]) -> Callable[[], Any]:
    if method not in BASELINES[1:] or arguments.replay:
        return env_factory
    with users_mistakes():
        check_baseline(method, env_factory, f"env={arguments.env!r}")
    limit = arguments.max_observation_tokens
    return lambda: OneAnswerEnv(env_factory(), searches=method == "naive_rag", max_passage_tokens=limit)


# ---------------------------------------------------------------- evaluation


def run_table(arguments: EvalArguments, console: Console) -> EvaluationTable:
    """Load data, environment and models, and evaluate each row of the table with a progress bar."""
    set_rules(arguments.secrets.names, arguments.secrets.patterns)
    results: list[EvaluationResult] = []
    if arguments.replay:
        plan = make_plan(arguments, lambda: None)
        with users_mistakes(NothingRolledOutError):
            results += [
                replay_evaluation(
                    Path(arguments.replay) / row.folder,
                    row.rows,
                    num_generations=arguments.num_generations_eval,
                    seed=arguments.seed,
                    keep_going=True,
                    limits=row.limits(_limits(arguments, row.is_hosted)),
                )
                for row in plan
            ]
    else:
        env_factory = resolve_env(arguments.env, arguments.env_kwargs)  # type: ignore[arg-type]
        plan = make_plan(arguments, env_factory)
        for row in plan:
            check_first_row(f"env={arguments.env!r}", row.env_factory, row.data, row.rows)
        if arguments.output_dir:
            make_folder("output_dir", arguments.output_dir)
        with users_mistakes():  # limits, template, environment
            for row in plan:
                flag = "base_model" if row.model == arguments.base_model else "model_name_or_path"
                if not row.is_hosted:
                    check_model_folder(str(row.model), flag=flag)
            with _unfinished(arguments, results, console) as goes_on, _stopped_by_the_disk(arguments.output_dir):
                results += _evaluate_all(arguments, plan, console, goes_on)
                check_some_rolled_out([item for result in results for item in result.trajectories])
    table = EvaluationTable()
    for row, result in zip(plan, results, strict=True):
        result.settings = {**result.settings, **row.source}
        parts = {arguments.by: split_by(result, row.rows, arguments.by, seed=arguments.seed)} if arguments.by else {}
        model = result.settings["model"] if row.is_hosted and row.model is not None else row.model
        table.rows.append(TableRow(method=row.method, dataset=row.dataset, model=model, result=result, by=parts))
    return table


def _evaluate_all(
    arguments: EvalArguments, plan: Sequence[PlannedRow], console: Console, goes_on: bool
) -> list[EvaluationResult]:
    """The results in the order of the plan; each model is loaded once."""
    raising: Any = (
        feature("reliability", "eval").signals_raise if has_feature("reliability") else contextlib.nullcontext
    )
    results: dict[int, EvaluationResult] = {}
    for loaded in dict.fromkeys((row.model, row.is_hosted) for row in plan):
        rows = {index: row for index, row in enumerate(plan) if (row.model, row.is_hosted) == loaded}
        with contextlib.ExitStack() as stack:
            stack.enter_context(raising())
            with loading(loaded[0]):  # an OSError of what follows says nothing about the model
                agent = stack.enter_context(_opened(arguments, *loaded))
            for index, row in rows.items():
                title = f"{row.dataset}, {row.method}" if row.folder else "evaluation"
                with contextlib.chdir("."):  # wherever a tool goes, what is read and written next stays here
                    results[index] = _evaluate_row(arguments, row, agent, console, title, goes_on)
        del agent  # before the next one is loaded
    return [results[index] for index in range(len(plan))]


@contextlib.contextmanager
def _stopped_by_the_disk(folder: str | None) -> Iterator[None]:
    """An OSError of an evaluation that writes, with the folder and the fix; loading models has its own."""
    try:
        yield
    except OSError as error:
        if folder is None:
            raise
        raise DependencyError(
            f"output_dir={folder!r}: the evaluation stopped ({type(error).__name__}: {error}). Free space there, or "
            "set another output_dir."
        ) from error


@contextlib.contextmanager
def _opened(arguments: EvalArguments, model: str | None, is_hosted: bool) -> Iterator[Agent]:
    """A model that is loaded here, or a hosted one."""
    limits = _limits(arguments, is_hosted)
    if is_hosted:
        key = arguments.api_key_env or KEY
        options: Any = {"options": arguments.endpoint_options or {}, "timeout_s": arguments.endpoint_timeout}
        endpoint: Any = Endpoint(
            str(arguments.endpoint), str(model), key=os.environ.get(key) or None, key_name=key, **options
        )
        yield Agent(name=f"{endpoint.model} at {endpoint.url}", generator=endpoint, chat=None, limits=limits)
        return
    options = {**arguments.chat_options(), "use_vllm": arguments.use_vllm, "dtype": arguments.dtype}
    with open_agent(model, limits=limits, max_batch_size=arguments.generation_batch_rows, **options) as agent:
        yield agent


def _limits(arguments: EvalArguments, is_hosted: bool) -> RolloutLimits:
    limits = arguments.rollout_limits()
    return replace(limits, **KEEP_ALL, max_concurrency=arguments.endpoint_concurrency) if is_hosted else limits


def _evaluate_row(
    arguments: EvalArguments, row: PlannedRow, agent: Agent, console: Console, title: str, goes_on: bool
) -> EvaluationResult:
    journal = None
    if arguments.output_dir and arguments.journal:
        journal = feature("journal", "journal: true").eval_journal(Path(arguments.output_dir) / row.folder)
    # What the trajectories depend on besides their requests, limits and sampling settings.
    identity: dict[str, Any] = {"method": row.method, "model": row.model}
    names = ("endpoint", "endpoint_options") if row.is_hosted else _OF_LOADED
    settings = {name: getattr(arguments, name) for name in ("env", "env_kwargs", "seed", *names)}
    if row.is_hosted:
        filters, identity = _NO_FILTERS, identity | rules().mask_all(settings)
    else:
        filters = {name: getattr(arguments, name) or neutral for name, neutral in _NO_FILTERS.items()}
        identity |= {"weights": _fingerprint(row.model), **settings}
    with trajectory_progress(console, title, len(row.rows) * arguments.num_generations_eval) as on_trajectory:
        result = evaluate(
            agent.generator,
            row.env_factory,
            agent.chat,
            row.rows,
            limits=row.limits(agent.limits),
            params=SamplingParams(temperature=arguments.eval_temperature, top_p=arguments.top_p, **filters),
            num_generations=arguments.num_generations_eval,
            seed=arguments.seed,
            retry_failed=arguments.retry_failed,
            on_trajectory=on_trajectory,
            journal=journal,
            resume=goes_on,
            identity=identity,
            keep_going=True,
        )
    how: dict[str, Any] = {"use_vllm": arguments.use_vllm}
    if row.is_hosted:
        endpoint: Any = agent.generator
        options = rules().mask_all(endpoint.options)
        how = {"endpoint": endpoint.url, "endpoint_options": options, "requests": dict(endpoint.counts)}
        endpoint.counts.clear()
    result.settings = {"model": agent.name, **how, **result.settings}
    console.print(f"{title}: {result.settings['played']}")
    return result


# ---------------------------------------------------------------- going on


@contextlib.contextmanager
def _unfinished(arguments: EvalArguments, results: list[EvaluationResult], console: Console) -> Iterator[bool]:
    """Marks the output directory while rows are evaluated; yields whether to go on with what is there.

    The mark stays after an error, and where something failed for no fault of a model: the next start goes on.
    """
    if not arguments.output_dir:
        yield False
        return
    mark = Path(arguments.output_dir) / MARK
    with output_lock(Path(arguments.output_dir), EVALUATION_LOCK_FILE):
        goes_on = arguments.journal is not None and arguments.resume and mark.exists()
        if arguments.journal:
            mark.touch()
        yield goes_on
        trajectories = [item for result in results for item in result.trajectories]
        failed = sum(may_pass(item, is_refused=False) for item in trajectories)
        if failed and arguments.journal:
            console.print(
                f"{failed} of {len(trajectories)} trajectories were lost for no fault of the model. The same command "
                "samples those again, and only those (--no_resume: all)."
            )
        elif arguments.journal:
            mark.unlink(missing_ok=True)


def _fingerprint(model: str | None) -> str | None:
    """Changes when the files of a model in a directory are written anew; None for a Hub id."""
    folder = Path(str(model))
    if not folder.is_dir():
        return None
    patterns = ("*.safetensors", "*.bin", "*.json")
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)} - {folder / RESULT_FILE})
    state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------- what is shown


def _show(table: EvaluationTable, arguments: EvalArguments) -> None:
    if len(table.rows) == 1 and not arguments.by:
        result = table.rows[0].result
        model = arguments.model_name_or_path[0] if arguments.model_name_or_path else arguments.replay
        PlainConsole().print(result_table(result, title=f"{model}, {result.num_examples} examples"))
        return
    table_console().print(new_table("", *table.cells(), num_left=2))
    PlainConsole(soft_wrap=True).print("\n".join(table.notes()))
