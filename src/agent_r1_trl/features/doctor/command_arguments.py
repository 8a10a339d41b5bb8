"""The settings of `doctor` and `memory`. Nothing heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent_r1_trl.cli.arguments import ENV_OR_TOOLS, CommandArguments, TaskArguments, TemplateArguments
from agent_r1_trl.cli.options import HelpPage
from agent_r1_trl.rollout.context_policies import STRIP_POLICY
from agent_r1_trl.rollout.limits import ContextMapping
from agent_r1_trl.settings import Count, Flag, setting


@dataclass
class DoctorArguments(TaskArguments, TemplateArguments):
    """Settings of `doctor`."""

    CLASHES = (ENV_OR_TOOLS,)

    model_name_or_path: str | None = setting(None, "Model: a directory or a Hub id.", aliases=["--model"])
    dataset_name: str | None = setting(None, "Data set; episodes are tried on its first rows.", aliases=["--dataset"])
    tools: list[str] | None = setting(None, "Instead of env: import paths of functions.")
    max_completion_length: Count | None = setting(
        None, "Tokens of the whole trajectory; prompts must leave room for them."
    )
    load_weights: Flag = setting(
        False,
        "Load the weights as well, sample short answers and compare their log-probs with those of an update (minutes "
        "for a large model).",
    )
    num_prompts: Count | None = setting(
        None,
        "Also sample this many rows of the recipe's data set as its training does (the weights are loaded): shares of "
        "valid calls and of success, and whether the rewards in a group differ.",
    )
    context: ContextMapping = setting(None, "Context policy of the recipe: 'strip_thinking' decides the chat format.")

    def chat_options(self) -> dict[str, Any]:
        """See `TemplateArguments`; the context policy has a say as well."""
        return super().chat_options() | {"strips_reasoning": self.context.policy == STRIP_POLICY}


@dataclass
class MemoryArguments(CommandArguments):
    """Settings of `memory` beside those of `train`."""

    accelerate_config: str | None = setting(None, "A file of recipes/accelerate_configs. None: one process.")
    num_processes: Count | None = setting(None, "GPUs that train together. None: as in accelerate_config, else 1.")
    gpu_memory_gb: float | None = setting(
        None, "Memory of one GPU in GiB. None: that of the GPU in this machine, else 80."
    )
    prompt_tokens: Count = setting(512, "Length of the longest prompt in tokens.")


HELP = {
    "doctor": HelpPage("Check a run before it starts.", (DoctorArguments,)),
    "memory": HelpPage(
        "Estimate the memory that a recipe needs on each GPU. It also reads every setting of training "
        "(agent-r1-trl train --help).",
        (MemoryArguments,),
    ),
}
"""Command -> its `--help`."""
