"""Mistakes of a user and failures of the infrastructure, reported without a traceback; the exit codes.

Every message names the flag, its value, the rule and the cure. AGENT_R1_TRL_DEBUG=1 shows the traceback as well.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence

from agent_r1_trl.safe_text import shown

EXIT_USAGE = 2
"""A mistake in the recipe, on the command line or in a file that one of them names; do not try again."""
EXIT_INFRASTRUCTURE = 3
"""A server, a tool, an environment or another rank failed; the same command may succeed later, or resumed."""
EXIT_COLLAPSED = 4
"""The echo guard has ended the run: the same command would collapse again, from the same checkpoint as well."""
EXIT_INTERRUPTED = 130
"""Ctrl-C; 128 + the signal's number for any other signal. 1 is what nobody foresaw, with a traceback."""

_WRONG_TYPE = re.compile(r"argument (?P<flag>--\w+)\S*: invalid (?P<kind>\S+) value: (?P<value>.*)", re.DOTALL)
_WRONG_CHOICE = re.compile(r"argument (?P<flag>--\w+)\S*: invalid choice: (?P<value>.*) \(choose from (?P<names>.*)\)")
_OTHER_PROBLEM = re.compile(r"argument (?P<flag>--\w+)\S*: (?P<problem>.*)", re.DOTALL)
_CURES = {
    "support bf16": "set bf16: false (this machine has no GPU that supports bfloat16).",
    "generation_batch_size.*divisible": "choose per_device_train_batch_size x gradient_accumulation_steps x processes "
    "as a multiple of num_generations.",
    "existing deepspeed config": "set deepspeed to the path of a DeepSpeed configuration in JSON.",
    "is not supported, only .* are supported": "set report_to to one of them, or to 'none'.",
    "[Tt]arget modules": "set lora_target_modules to names of layers (q_proj, v_proj, ...) or 'all-linear'.",
    "FlashAttention": "install it, or set attn_implementation: sdpa.",
    "Callback requires": "install it, or set report_to: none.",
}
"""Regular expression for the message of another package -> what to do about it."""
_KINDS = {"int": "a whole number", "float": "a number", "string_to_bool": "true or false"}


class UsageError(ValueError):
    """A mistake in a recipe, on the command line, or in a file that one of them names."""


class InfrastructureError(RuntimeError):
    """Something that the run depends on has failed, which no change of the recipe need cure."""


class CollapseError(RuntimeError):
    """The training has collapsed; other settings may help."""


def infrastructure_errors() -> tuple[type[Exception], ...]:
    """What ends a run through no mistake of its recipe."""
    from agent_r1_trl.generation import GenerationError
    from agent_r1_trl.generation.sync import SyncError
    from agent_r1_trl.rollout import NothingPlayedError
    from agent_r1_trl.rollout.watchdog import LoopLostError
    from agent_r1_trl.trainers.echo_guard import RestartError
    from agent_r1_trl.trainers.nonfinite import NonFiniteError
    from agent_r1_trl.trainers.output_lock import OutputInUseError
    from agent_r1_trl.trainers.ranks import RankLostError
    from agent_r1_trl.trainers.saving import SaveError

    rollout = (GenerationError, SyncError, NothingPlayedError, LoopLostError)
    return (*rollout, NonFiniteError, OutputInUseError, RankLostError, RestartError, SaveError)


def run_command(function: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a command and report what it ends with; returns the exit code.

    That is 2 for a `UsageError`, 3 for an `InfrastructureError` and 4 for a `CollapseError`.

    Args:
        function: takes the arguments and returns an exit code.
        argv: the arguments; None: those of the process.
    """
    try:
        return function(sys.argv[1:] if argv is None else argv)
    except (UsageError, InfrastructureError, CollapseError) as error:
        if os.environ.get("AGENT_R1_TRL_DEBUG"):
            traceback.print_exc()
        if is_main_process():  # a launcher starts several processes, which all find the same mistake
            print(shown(f"error: {error}"), file=sys.stderr)
        return {UsageError: EXIT_USAGE, CollapseError: EXIT_COLLAPSED}.get(type(error), EXIT_INFRASTRUCTURE)
    except KeyboardInterrupt:
        if is_main_process():
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `agent-r1-trl view ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def model_problem(name: str | None, error: Exception) -> str:
    """A loader's error about a model, with the flag and the cure."""
    reason = " ".join(str(error).splitlines()[:1]).rstrip(".")
    return (
        f"model_name_or_path={name!r}: cannot be loaded. {reason}. Pass the directory of a saved model and tokenizer, "
        "or the id of a model on the Hub that you may read."
    )


def with_cure(message: str) -> str:
    """An error message of transformers, PEFT or TRL, with a cure where `_CURES` has one."""
    cure = next((cure for words, cure in _CURES.items() if re.search(words, message)), None)
    return message if cure is None else f"{message.rstrip('. ')}. Cure: {cure}"


def explain_argparse(message: str, help_of: Callable[[str], str] = lambda flag: "") -> str:
    """Rewrite an error message of argparse so that it names flag, value and rule.

    Args:
        message: of argparse.
        help_of: returns text to add about a flag, starting with a blank.

    >>> explain_argparse("argument --step: invalid int value: 'x'")
    "--step 'x': must be a whole number. Pass such a value."
    """
    if match := _WRONG_TYPE.match(message):
        rule = _KINDS.get(match["kind"], match["kind"])
        return f"{match['flag']} {match['value']}: must be {rule}. Pass such a value.{help_of(match['flag'])}"
    if match := _WRONG_CHOICE.match(message):
        rule = f"must be one of {match['names']}. Pass one of them."
        return f"{match['flag']} {match['value']}: {rule}{help_of(match['flag'])}"
    if match := _OTHER_PROBLEM.match(message):
        return f"{match['flag']}: {match['problem']}.{help_of(match['flag'])}"
    return message if message.endswith(".") else f"{message}."


def is_main_process() -> bool:
    """Whether this process reports to the user; usable before a process group exists."""
    return int(os.environ.get("RANK") or 0) == 0
