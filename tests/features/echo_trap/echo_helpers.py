"""A guarded run whose verdicts are written in a script."""

import torch
from transformers import TrainerCallback

from agent_r1_trl.features.echo_trap import Signal, Verdict
from tests.trainers.helpers import make_trainer


class ScriptedJudge(TrainerCallback):
    """The verdict, or its state, after the n-th optimizer step, rollbacks included, is `script[n]`, or healthy."""

    def __init__(self, script):
        self.script, self.num_all = script, 0

    def on_step_end(self, *args, **kwargs):
        self.num_all += 1

    @property
    def verdict(self):
        state = self.script.get(self.num_all, "healthy")
        if isinstance(state, Verdict):
            return state
        if state in ("healthy", "converged"):
            return Verdict(state=state, step=self.num_all)
        signal = Signal(name="entropy", level="critical", value=0.05, threshold=0.1, reason="entropy fell to 0.05")
        return Verdict(state=state, step=self.num_all, signals={"entropy": signal}, reason="entropy is gone.")


def judged_by(trainer, script):
    """The trainer, whose guard believes a script."""
    judge = ScriptedJudge(script)
    trainer.features["echo_guard"]._judge = judge
    trainer.callback_handler.callbacks.insert(0, judge)  # the guard looks at the verdict in the same event
    return trainer


def guarded(tmp_path, verdicts, *actions, **options):
    """A trainer whose guard takes the actions; it saves every second of six steps and has a patience of two."""
    defaults = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "echo.patience": 2}
    defaults["per_device_train_batch_size"] = 4
    return judged_by(make_trainer(tmp_path, **(defaults | {"echo.actions": [*actions]} | options)), verdicts)


class Watch(TrainerCallback):
    """Calls `look(trainer)` when a step begins, with the number of steps made."""

    def __init__(self, trainer, look):
        self.trainer = trainer
        self.look = look
        self.seen = []
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, **kwargs):
        self.seen.append((state.global_step, self.look(self.trainer)))


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def guard_of(trainer):
    return trainer.features["echo_guard"]
