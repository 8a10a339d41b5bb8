"""Another meaning of TRL's loss is found at the first training step, whatever its names and arguments are."""

import dataclasses
import inspect
import logging
import textwrap

import pytest
import torch
import trl
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers import trl_canary as canary
from agent_r1_trl.trainers import trl_release as release
from agent_r1_trl.trainers.inherited_settings import LOSS_TYPES
from tests.trainers.helpers import make_trainer


def change(monkeypatch, method, *replacements):
    """Put a method of TRL's with other text in its place, as another release would have it."""
    text = textwrap.dedent(inspect.getsource(getattr(GRPOTrainer, method)))
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    scope = dict(vars(grpo_trainer))
    exec(compile(text, f"<{method} of another release>", "exec"), scope)
    monkeypatch.setattr(GRPOTrainer, method, scope[method])


def with_reference(folder, options):
    """With a KL term TRL loads the reference from the policy's folder."""
    if "beta" not in options:
        return options
    make_policy(make_tokenizer("qwen3")).save_pretrained(folder / "model")
    return {"model": str(folder / "model"), **options}


TOKENS = "loss = (per_token_loss * mask).sum() / normalizer"
CHANGES = {
    "the loss is a mean over rows": (
        "_compute_loss",
        {},
        "a mean over rows",
        (TOKENS, "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"),
    ),
    "old log-probs have another key": (
        "_compute_loss",
        {"num_iterations": 2},
        r"does not read inputs\['old_per_token_logps'\]",
        ('inputs.get("old_per_token_logps")', 'inputs.get("old_logps")'),
    ),
    "old log-probs have another key, and must be there": (
        "_compute_loss",
        {"num_iterations": 2},
        r"reads 'old_logps', which the micro-batch does not hold",
        ('inputs.get("old_per_token_logps")', 'inputs["old_logps"]'),
    ),
    "the divisor is that of one process": (
        "_compute_loss",
        {},
        r"gradient is 0\.5 times as large",
        ('.clamp(min=1.0) / self.accelerator.num_processes', ".clamp(min=1.0)"),
    ),
    "the divisor is the micro-batch's number of tokens": (
        "_compute_loss",
        {},
        "times as large",
        (TOKENS, "loss = (per_token_loss * mask).sum() / mask.sum()"),
    ),
    "accumulation is scaled elsewhere": (
        "_compute_loss",
        {},
        r"gradient is 3 times as large",
        ("normalizer * self.current_gradient_accumulation_steps / self", "normalizer / self"),
    ),
    "the temperature is applied to the log-probs of the loss": (
        "_compute_loss",
        {"temperature": 0.7},
        "gradient",
        ("if self.top_entropy_quantile < 1.0",
         "per_token_logps = per_token_logps / self.temperature\n    if self.top_entropy_quantile < 1.0"),
    ),
    "the temperature is applied twice": (
        "_get_per_token_logps_and_entropies",
        {"temperature": 0.7},
        r"divides the logits by temperature=0\.7 twice",
        ("outputs = model(**model_inputs, labels=labels, fused_lm_head=True)",
         "logits = model(**model_inputs).logits[:, :-1] / self.temperature**2\n"
         "            from types import SimpleNamespace\n"
         "            picked = logits.log_softmax(-1).gather(2, input_ids_batch[:, 1:].unsqueeze(2)).squeeze(2)\n"
         "            outputs = SimpleNamespace(log_probs=picked, entropy=picked)"),
    ),
    "the log-probs are divided by the temperature": (
        "_get_per_token_logps_and_entropies",
        {"temperature": 0.7},
        r"divides the logits by temperature=0\.7",
        ("logps = torch.cat(all_logps, dim=0)", "logps = torch.cat(all_logps, dim=0) / self.temperature"),
    ),
    "the KL term is left out": (
        "_compute_loss",
        {"beta": 0.1},
        "leaves the KL term out",
        ("per_token_loss = per_token_loss + self.beta * per_token_kl", "pass"),
    ),
    "observations are in the loss": (
        "_compute_loss",
        {},
        "does not leave out",
        ('completion_mask * inputs["tool_mask"]', "completion_mask"),
    ),
    "clipping has gone": (
        "_compute_loss",
        {},
        "gradient",
        ("per_token_loss = -torch.min(per_token_loss1, per_token_loss2)", "per_token_loss = -per_token_loss1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_meaning_ends_the_run_before_its_first_update(tmp_path, monkeypatch, name):
    method, options, said, *replacements = CHANGES[name]
    change(monkeypatch, method, *replacements)
    monkeypatch.setattr(trl, "__version__", "1.19.0")
    trainer = make_trainer(tmp_path / "run", loss_type="dapo", **with_reference(tmp_path, options))
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with pytest.raises(ValueError, match=f"{said}|Cause: probably TRL") as caught:
        trainer.train()
    for text in ("1.19.0", release.TESTED, f"pip install trl=={release.TESTED}"):
        assert text in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("name", [name for name in CHANGES if CHANGES[name][0] != "_compute_loss"])
def test_the_temperature_is_measured_without_the_score_check_too(tmp_path, monkeypatch, name):
    method, options, said, *replacements = CHANGES[name]
    change(monkeypatch, method, *replacements)
    with pytest.raises(canary.TRLChangedError, match=said):
        make_trainer(tmp_path, score_check="off", **options).train()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trls_loss_is_the_objective_by_hand(tmp_path, loss_type, level):
    trainer = make_trainer(tmp_path, loss_type=loss_type, importance_sampling_level=level)
    trainer.model.train()
    trainer.beta = 0.3
    canary.check_loss(trainer)
    trainer.beta = 0.0
    trainer.args.delta = 1.5
    canary.check_loss(trainer)
    trainer.args.use_bias_correction_kl, trainer.beta = True, 0.2
    trainer.use_vllm = trainer.args.vllm_importance_sampling_correction = True
    canary.check_loss(trainer)


def test_the_two_rows_tell_all_settings_apart(tmp_path):
    """Each line of the objective moves the number; a line that moved nothing would be checked by nothing."""
    trainer = make_trainer(tmp_path, loss_type="dapo")
    rows = canary.TwoRows()

    def value(**changes):
        settings = dataclasses.replace(canary.LossSettings.of(trainer), **changes)
        return round(canary.objective(rows, rows.log_probs, settings).item(), 9)

    other = [value(loss_type=kind) for kind in LOSS_TYPES]
    assert len(set(other)) == len(LOSS_TYPES)
    assert len({value(), value(beta=0.1), value(epsilon_low=0.01), value(epsilon_high=0.9)}) == 4


def test_the_check_leaves_the_run_as_it_was(tmp_path):
    trainer = make_trainer(tmp_path, loss_type="dapo", temperature=0.7)
    trainer.model.train()
    trainer.model.model.layers[0].eval()  # a module that someone holds still
    modes = [module.training for module in trainer.model.modules()]
    kept = {name: repr(value) for name, value in vars(trainer).items() if name not in ("model", "model_wrapped")}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    canary.check_loss(trainer)
    canary.check_temperature(trainer)
    assert torch.equal(torch.rand(1), expected)
    assert modes == [module.training for module in trainer.model.modules()]
    assert kept == {name: repr(value) for name, value in vars(trainer).items() if name in kept}
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("trainer_class", [MultiTurnGRPOTrainer, MultiTurnPPOTrainer])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_a_run_is_checked_once(tmp_path, monkeypatch, trainer_class, layout):
    calls = []
    check = canary.check_loss
    monkeypatch.setattr(canary, "check_loss", lambda trainer: calls.append(1) or check(trainer))
    options = {"advantage_estimator": "gae"} if trainer_class is MultiTurnPPOTrainer else {}
    trainer = make_trainer(
        tmp_path, trainer=trainer_class, update_layout=layout, temperature=0.8, max_steps=2, **options
    )
    trainer.train()
    assert calls == [1]


def test_a_loss_of_the_users_own_is_not_compared(tmp_path):
    class Own(MultiTurnGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return 7 * super()._compute_loss(model, inputs)

    make_trainer(tmp_path, trainer=Own).train()


def test_a_key_error_of_a_users_own_is_left_alone(tmp_path):
    class Own(MultiTurnGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return {}["mine"]

    with pytest.raises(KeyError, match="mine"):
        make_trainer(tmp_path, trainer=Own).train()


def test_an_entry_that_a_subclass_has_removed_is_named(tmp_path):
    class Own(MultiTurnGRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            batch = dict(super()._prepare_inputs(generation_batch))
            del batch["ref_per_token_logps"]
            return batch

    with pytest.raises(canary.TRLChangedError, match="something has removed the entry") as caught:
        make_trainer(tmp_path / "run", trainer=Own, **with_reference(tmp_path, {"beta": 0.1})).train()
    assert "'ref_per_token_logps'" in str(caught.value)


# ---------------------------------------------------------------- code that is not the tested one


@pytest.mark.parametrize("name", release.BODIES)
def test_other_code_of_a_method_is_a_warning_with_both_releases(monkeypatch, caplog, name):
    monkeypatch.setitem(release.BODIES, name, "0" * 16)
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    monkeypatch.delenv("RANK", raising=False)
    with caplog.at_level(logging.WARNING, logger=release.logger.name):
        release.check_trl.__wrapped__()
    (record,) = [item for item in caplog.records if item.name == release.logger.name]
    for text in ("trl 1.17.0", release.TESTED, name, f"pip install trl=={release.TESTED}"):
        assert text in record.getMessage()


def test_a_hash_is_that_of_the_code_alone(tmp_path):
    plain = "def f(a, b=0):\n    return a + b\n"
    said = 'def f(\n    a, b: int = 0  # words\n) -> int:\n    """Words."""\n    return (\n        a + b)\n'
    other = plain.replace("+", "-")
    hashes = []
    for name, text in (("plain", plain), ("said", said), ("other", other)):
        file = tmp_path / f"{name}.py"
        file.write_text(text, encoding="utf-8")
        scope = {}
        exec(compile(text, str(file), "exec"), scope)
        hashes.append(release.hash_of_code(scope["f"]))
    assert hashes[0] == hashes[1] != hashes[2]
    assert None not in hashes
    assert release.hash_of_code(None) is None
