"""Mistakes of a user and failures of the infrastructure, reported without a traceback; exit codes, plain options.

Every message names the flag, its value, the rule and the fix. AGENT_R1_TRL_DEBUG=1 shows the traceback as well.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from safetensors import SafetensorError

from agent_r1_trl.errors import RunError
from agent_r1_trl.objects import did_you_mean
from agent_r1_trl.safe_text import shown

EXIT_USAGE = 2
"""A mistake in the recipe, on the command line or in a file that one of them names; do not try again."""
EXIT_INFRASTRUCTURE = 3
"""A server, a tool, an environment or another rank failed; the same command may succeed later, or resumed."""
EXIT_INTERRUPTED = 130
"""Ctrl-C; 128 + the signal's number for any other signal. 1 is what nobody foresaw, with a traceback."""

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


class UsageError(RunError, ValueError):
    """A mistake in a recipe, on the command line, or in a file that one of them names."""

    exit_code = EXIT_USAGE


class DependencyError(RunError):
    """Something that the run depends on has failed, which no change of the recipe need fix."""


@contextlib.contextmanager
def users_mistakes(*more: type[Exception]) -> Iterator[None]:
    """A `ValueError` raised inside, or an error of one more kind, is a mistake of the user, unless it says more."""
    kinds: tuple[type[Exception], ...] = (ValueError, *more)
    try:
        yield
    except RunError:
        raise
    except kinds as error:
        raise UsageError(with_fix(str(error))) from error


def run_command(function: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a command on arguments (None: those of the process) and report what it ends with; returns the exit code."""
    try:
        return function(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        if is_main_process():
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `agent-r1-trl view ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RunError as error:
        if os.environ.get("AGENT_R1_TRL_DEBUG"):
            traceback.print_exc()
        if is_main_process():  # a launcher starts several processes, which all find the same mistake
            print(shown(f"error: {error}"), file=sys.stderr)
        return error.exit_code


@contextlib.contextmanager
def loading(name: str | None, *more: type[Exception]) -> Iterator[None]:
    """As `users_mistakes`; what a loader says of the model `name` becomes an error with the flag and the fix, too."""
    try:
        with users_mistakes(*more):
            yield
    except OSError as error:
        raise UsageError(model_problem(name, error)) from error
    except SafetensorError as error:
        raise UsageError(
            f"model_name_or_path={name!r}: a file of weights is damaged ({' '.join(str(error).split())}): a "
            "download or copy may have been cut off. Delete the *.safetensors there and fetch them again, or choose "
            "another model."
        ) from error


def model_problem(name: str | None, error: Exception) -> str:
    """A loader's error about a model, with the flag and the fix."""
    reason = " ".join(str(error).splitlines()[:1]).rstrip(".")
    return (
        f"model_name_or_path={name!r}: cannot be loaded. {reason}. Pass the directory of a saved model and tokenizer, "
        "or the id of a model on the Hub that you may read."
    )


def with_fix(message: str) -> str:
    """An error message of transformers, PEFT or TRL, with a fix where `_CURES` has one."""
    fix = next((fix for words, fix in _CURES.items() if re.search(words, message)), None)
    return message if fix is None else f"{message.rstrip('. ')}. Fix: {fix}"


class PlainParser(argparse.ArgumentParser):
    """A parser of a command without recipes, whose mistakes are `UsageError`s."""

    def __init__(self, command: str, about: str = "", **settings: Any) -> None:
        style = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=command, description=about, allow_abbrev=False, formatter_class=style, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as a `UsageError`."""
        raise UsageError(f"{message}. {self.prog} --help lists the options.")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments."""
        check_dashes(argv)
        arguments, unknown = self.parse_known_args(argv)
        if unknown and not unknown[0].startswith("-"):
            raise UsageError(f"{unknown[0]!r} is one argument too many: it belongs to no option. Remove it.")
        if unknown:
            flags = [option for action in self._actions for option in action.option_strings]
            suggestion = did_you_mean(unknown[0], flags)
            raise UsageError(no_such_option(self.prog, unknown[0].partition("=")[0], suggestion))
        self._check_once(argv)
        return arguments

    def _check_once(self, argv: Sequence[str]) -> None:
        """Refuse an option that is given twice, also under two names; argparse would take the last."""
        seen: dict[str, str] = {}
        for word in argv:
            flag = word.partition("=")[0]
            action = self._option_string_actions.get(flag)
            if action is None:
                continue
            if action.dest in seen:
                raise UsageError(f"{flag} is given twice, and one of the two would be dropped. Pass it once.")
            seen[action.dest] = flag


def no_such_option(command: str, flag: str, suggestion: str) -> str:
    """The message about a flag that a command does not have; `suggestion` as from `did_you_mean`."""
    return f"{flag}: there is no such option.{suggestion} {command} --help lists all options."


_TYPOGRAPHIC_DASH = re.compile(
    r"[-\u2010-\u2015\u2212]*[\u2010-\u2015\u2212][-\u2010-\u2015\u2212]*(?=[A-Za-z][\w.-]*(=|$))"
)
"""Before a name, in a word of its own: what a word processor makes of `--`. `\u22125` may be a number."""


def check_dashes(argv: Sequence[str]) -> None:
    """Refuse an option that begins with a dash of a word processor, which would be taken for a value."""
    for word in argv:
        if found := _TYPOGRAPHIC_DASH.match(word):
            plain = f"--{word[found.end() :].partition('=')[0]}"
            raise UsageError(
                f"{word!r} begins with a typographic dash (U+{ord(found[0].strip('-')[0]):04X}), as word processors "
                f"write it. Write two hyphens: {plain}."
            )


def is_main_process() -> bool:
    """Whether this process reports to the user; usable before a process group exists."""
    return int(os.environ.get("RANK") or 0) == 0
