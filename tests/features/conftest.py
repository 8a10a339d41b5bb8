"""The fixtures of the commands: a tiny model, a task, a recipe, a finished run."""

from tests.cli.conftest import finished_run, model_folder, recipe, refusal  # noqa: F401
