"""What asks for a summary (`context_policy="summarise"`), and what must hold between its settings and other limits.

Not covered: when a summary is asked for and what comes of it (`rollout/summaries.py`).
"""

from __future__ import annotations

from typing import Any

SUMMARISE = "summarise"
"""The value of `context_policy` that reads these settings."""

DEFAULT_PROMPT = (
    "Your context is almost full. Before you go on, write a summary of your work so far, in at most {summary_tokens} "
    "tokens. From then on you will see only the task, this summary and your last turn. Say what you have found out "
    "(keep names, numbers and results exactly), what you have tried and what came of it, and what is to be done next. "
    "Write plain text, and call no tool now."
)
"""What asks for a summary where `summary_prompt` is None; `{summary_tokens}` stands for the number."""


def summary_request(settings: Any) -> dict[str, str]:
    """The user message that asks for a summary."""
    prompt = settings.summary_prompt or DEFAULT_PROMPT
    return {"role": "user", "content": prompt.replace("{summary_tokens}", str(settings.summary_tokens))}


def check_summaries(settings: Any) -> None:
    """Refuse summaries that could never be written, and settings that nothing reads.

    Args:
        settings: limits whose own values were checked, of a model where `max_model_length` is known.

    Raises:
        ValueError: names the option, its value, the rule and the cure.
    """
    num_tokens, prompt = settings.summary_tokens, settings.summary_prompt
    if settings.context_policy != SUMMARISE:
        for name, value in (("summary_tokens", num_tokens), ("summary_prompt", prompt)):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} has no effect with context_policy={settings.context_policy!r}. Remove {name}, "
                    f"or set context_policy={SUMMARISE!r}."
                )
        return
    if num_tokens is None:
        raise ValueError(
            "context_policy='summarise' does not say how long a summary may be. Set summary_tokens (256, for example)."
        )
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise ValueError(
            f"summary_prompt={prompt!r} asks for nothing. Set summary_prompt to a text, or to None for the default."
        )
    if settings.context_tokens is None and settings.context_turns is None:
        raise ValueError(
            "context_policy='summarise' does not say when a summary is written. Set context_tokens (3000, for "
            "example), or context_turns (10, for example)."
        )
    for name in ("context_tokens", "max_completion_length"):
        limit = getattr(settings, name)
        if limit is not None and num_tokens >= limit:
            raise ValueError(
                f"summary_tokens={num_tokens} with {name}={limit}: a summary alone would reach that limit. Set {name} "
                f"above {num_tokens}, or lower summary_tokens."
            )
    length = getattr(settings, "max_model_length", None)
    if length is not None and (settings.context_tokens or 0) + num_tokens >= length:
        raise ValueError(
            f"summary_tokens={num_tokens} with context_tokens={settings.context_tokens} and a model or engine that "
            f"holds {length} tokens: a context that has reached its limit would leave no room for its summary. Set "
            f"them to at most summary_tokens={length // 4} and context_tokens={length // 2}, for example."
        )
