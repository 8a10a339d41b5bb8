"""Settings of `eval` for a hosted model: where it is, its key, what goes along with a request."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent_r1_trl.cli.errors import UsageError
from agent_r1_trl.rollout.limits import check_seconds, check_whole_number
from agent_r1_trl.safe_text import rules

if TYPE_CHECKING:
    from agent_r1_trl.generation.endpoint import Endpoint

KEY = "OPENAI_API_KEY"


@dataclass
class EndpointSettings:
    """Settings of `eval` that have a meaning with `endpoint` alone."""

    endpoint: str | None = field(
        default=None,
        metadata={
            "help": "Evaluate a hosted model: the address of an OpenAI-compatible API, such as "
            "https://api.openai.com/v1 or http://127.0.0.1:8000/v1; --model is then the model's name there."
        },
    )
    api_key_env: str | None = field(
        default=None,
        metadata={
            "help": f"Environment variable that holds the key of the endpoint. None: {KEY}, and no key if that is not "
            "set. The key itself is written nowhere."
        },
    )
    endpoint_options: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Further settings of each request to the endpoint, such as '{reasoning_effort: low}'; null leaves "
            "out one that is sent otherwise, as in '{temperature: null}'."
        },
    )
    endpoint_concurrency: int = field(
        default=16,
        metadata={
            "help": "Maximum number of trajectories that a hosted model plays at once (in place of max_concurrency)."
        },
    )
    endpoint_timeout: float = field(
        default=600.0,
        metadata={
            "help": "Seconds that one request to the endpoint may take, and that it waits in all while the endpoint "
            "is busy."
        },
    )

    def check_endpoint(self, options: dict[str, Any]) -> None:
        """Check these settings.

        Args:
            options: `endpoint_options`, read.

        Raises:
            UsageError: names the setting, the value and the cure.
        """
        self.endpoint_options = options
        check_whole_number("endpoint_concurrency", self.endpoint_concurrency)
        check_seconds("endpoint_timeout", self.endpoint_timeout)
        if self.endpoint is None:
            given = {"api_key_env": self.api_key_env, "endpoint_options": options or None}
            name = next((name for name, value in given.items() if value is not None), None)
            if name is not None:
                raise UsageError(
                    f"{name}={given[name]!r} has no effect without an endpoint. Set endpoint, or remove {name}."
                )
            return
        from agent_r1_trl.generation.endpoint import api_url

        rules().note(options)
        self.endpoint = api_url(self.endpoint)
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise UsageError(
                f"api_key_env={self.api_key_env!r}: there is no such environment variable. Set it to the key "
                f"(export {self.api_key_env}=...), or name another one."
            )

    def make_endpoint(self, model: str) -> Endpoint:
        """The hosted model.

        Raises:
            ValueError: the address is none, or an option is the evaluation's own.
        """
        from agent_r1_trl.generation.endpoint import Endpoint

        assert self.endpoint is not None and not isinstance(self.endpoint_options, str)
        name = self.api_key_env or KEY
        return Endpoint(
            self.endpoint,
            model,
            key=os.environ.get(name) or None,
            key_name=name,
            options=self.endpoint_options,
            timeout_s=self.endpoint_timeout,
        )
