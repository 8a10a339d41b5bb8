"""Settings of a training run that meets faults: failing environments, tools and servers, broken numbers, signals.

Each belongs to the collaborator that its comment names. All have defaults under which a run survives what passes and
ends, with the cause, at what does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1_trl.rollout.limits import check_share, check_whole_number

MIN_RANK_TIMEOUT_S = 5.0

RESUME_PARTS = ("optimizer", "rng", "rollout", "data")


@dataclass(kw_only=True)
class FaultSettings:
    """What a run does about faults that are not the policy's; `MultiTurnConfig` inherits it."""

    # ---- trajectories that fail (`failures.py`)
    max_failure_share: float = field(
        default=0.5,
        metadata={
            "help": "End the run when a larger share of the last trajectories failed for no fault of the policy "
            "(environment_error, generation_error, tool_failure, prompt_too_long). 1.0: only if nothing can be played "
            "at all."
        },
    )
    failure_window: int = field(
        default=32,
        metadata={"help": "Number of prompts over which `max_failure_share` is judged; fewer are not judged."},
    )

    # ---- trajectories that fail (`rollouts.py`, `rewards.py`)
    retry_failed: int = field(
        default=0,
        metadata={
            "help": "How often a trajectory that failed for no fault of the policy (not prompt_too_long) is played "
            "again in the same rollout, with the same row and the same seeds."
        },
    )
    min_group_size: int | None = field(
        default=None,
        metadata={
            "help": "A prompt's trajectories count only if at least this many of them were played and scored; of a "
            "smaller group none is in the baseline. None: 2 where the estimator compares them, else 1."
        },
    )

    # ---- numbers that are not finite (`nonfinite.py`)
    max_nonfinite_steps: int = field(
        default=3,
        metadata={
            "help": "End the run after this many optimizer steps in a row whose loss or gradients are not finite. "
            "Such steps are skipped: they change neither weights nor optimizer."
        },
    )

    # ---- vLLM servers (`generation/vllm/fleet.py`)
    vllm_request_timeout: float = field(
        default=600.0,
        metadata={
            "help": "Seconds that one turn may take on a vLLM server; the request then goes to another server. In "
            "process: seconds that one step of the engine may take; its requests then fail."
        },
    )
    vllm_health_timeout: float = field(
        default=30.0,
        metadata={
            "help": "Seconds that a vLLM server may be silent to health checks while requests wait for it. A slow "
            "server answers them; a frozen one is left out, and its requests go to other servers."
        },
    )
    vllm_retry_window: float = field(
        default=300.0,
        metadata={
            "help": "Seconds for which a request, or a weight sync, waits while no vLLM server can serve it. Set it "
            "longer than a restart of your servers takes."
        },
    )
    vllm_sync_timeout: float = field(
        default=120.0,
        metadata={
            "help": "Seconds that a vLLM server may take over one part (16 MiB) of a weight sync. One that takes "
            "longer is left out."
        },
    )
    vllm_allow_public_servers: bool = field(
        default=False,
        metadata={
            "help": "Use vLLM servers whose development routes, which have no password, are open at a public address."
        },
    )

    # ---- tools that are down (`tool_watch.py`)
    max_tool_failure_rise: float = field(
        default=0.3,
        metadata={
            "help": "How much the share of a tool's calls that fail may rise above that of its past, before the tool "
            "is asked whether it is down. The model's own mistakes do not count. 1.0: as much as it likes."
        },
    )
    min_tool_calls: int = field(
        default=8, metadata={"help": "Number of calls, on all processes, over which a tool is judged at least."}
    )
    max_outage_wait: float = field(
        default=1800.0,
        metadata={
            "help": "Seconds that the run waits for a tool that is down, before it ends. What was played in the "
            "meantime is not trained on. 0: it ends at once."
        },
    )

    # ---- checkpoints that fail (`saving.py`)
    max_failed_saves: int = field(
        default=3,
        metadata={"help": "End the run when this many checkpoints in a row could not be written (disk full)."},
    )
    resume_without: list[str] | None = field(
        default=None,
        metadata={
            "help": "What a resumed run does without: 'optimizer' (with its learning-rate schedule), 'rng', 'rollout' "
            "(under way) begin anew, 'data' goes on at the same place in other rows or another order."
        },
    )

    # ---- the end of a run from outside (`signals.py`, `ranks.py`)
    save_on_signal: bool = field(
        default=True,
        metadata={
            "help": "Write a checkpoint when SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1 ends the run. Environments "
            "and engines are closed either way."
        },
    )
    rank_timeout: float = field(
        default=120.0,
        metadata={
            "help": "Seconds without a sign of life from a rank after which the others end the run with a message "
            "that names it. A killed rank of the same machine is noticed within 2 seconds."
        },
    )

    # ---- the journal (`journal.py`)
    journal: bool = field(
        default=True,
        metadata={
            "help": "Write every turn of a rollout to output_dir/journal as it happens. A run that is killed and "
            "resumed then repeats nothing but the turn that was under way."
        },
    )
    journal_keep: int = field(
        default=4,
        metadata={
            "help": "Number of rollouts whose journal is kept, per process, although a checkpoint has made it "
            "unnecessary. What lies behind the last checkpoint is always kept (nothing, with save_strategy='no')."
        },
    )
    replay: str | None = field(
        default=None,
        metadata={
            "help": "Take the rollouts from the journal of another run (its output_dir, or the folder `journal`) "
            "instead of playing them: no sampler, no tools, no environment. For debugging reward functions and losses."
        },
    )

    def check_faults(self) -> None:
        """Check these settings.

        Raises:
            ValueError: names the option, its value, the rule and the cure.
        """
        check_whole_number("failure_window", self.failure_window)
        check_share("max_failure_share", self.max_failure_share)
        check_whole_number("max_nonfinite_steps", self.max_nonfinite_steps)
        check_whole_number("retry_failed", self.retry_failed, minimum=0)
        check_whole_number("min_group_size", self.min_group_size, is_optional=True)
        for name in ("vllm_request_timeout", "vllm_health_timeout", "vllm_retry_window", "vllm_sync_timeout"):
            check_seconds(name, getattr(self, name))
        check_share("max_tool_failure_rise", self.max_tool_failure_rise)
        check_whole_number("min_tool_calls", self.min_tool_calls)
        wait = self.max_outage_wait
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < math.inf:
            raise ValueError(
                f"max_outage_wait={wait!r} must be a number of seconds >= 0. Set max_outage_wait to such a value."
            )
        self.check_saving()
        is_number = isinstance(self.rank_timeout, int | float) and not isinstance(self.rank_timeout, bool)
        if not is_number or not self.rank_timeout >= MIN_RANK_TIMEOUT_S:
            raise ValueError(
                f"rank_timeout={self.rank_timeout!r}: must be a number >= {MIN_RANK_TIMEOUT_S:g} (seconds), because "
                "signs of life are a second apart. Set it to 120, say."
            )
        check_whole_number("journal_keep", self.journal_keep, minimum=0)
        check_replay(self)

    def check_saving(self) -> None:
        """Check the settings that TRL's own rollout has as well.

        Raises:
            ValueError: names the option, its value, the rule and the cure.
        """
        check_whole_number("max_failed_saves", self.max_failed_saves)
        unknown = set(self.resume_without or []) - set(RESUME_PARTS)
        if unknown:
            raise ValueError(
                f"resume_without={self.resume_without}: {sorted(unknown)} are not among {', '.join(RESUME_PARTS)}. "
                "Name some of these, or remove resume_without."
            )


def check_seconds(name: str, value: Any) -> None:
    """Refuse what is no positive number of seconds.

    Raises:
        ValueError: names the value, the rule and the cure.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r} must be a number of seconds > 0. Set {name} to such a value.")


def check_replay(config: Any) -> None:
    """Check what stands beside `replay`.

    Raises:
        ValueError: names the option, its value, the rule and the cure.
    """
    if config.replay is None:
        return
    if Path(config.replay).absolute().is_relative_to(Path(config.output_dir).absolute()):
        raise ValueError(
            f"replay={config.replay!r} lies in output_dir={config.output_dir!r}, whose checkpoints the replay would "
            "overwrite. Set output_dir to another folder."
        )
    if config.eval_strategy != "no":
        raise ValueError(
            f"replay={config.replay!r} with eval_strategy={str(config.eval_strategy)!r}: the journal of a training "
            "run holds no evaluations. Set eval_strategy to 'no'."
        )
