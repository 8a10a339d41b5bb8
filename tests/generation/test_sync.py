"""A sampler that does not have the trainer's weights is stopped."""

import math

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn

from agent_r1_trl.generation.sync import SyncError, _Head, default_max_gap, policy_scores, probe_sync
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer, rollouts
from tests.generation.helpers import tiny_model
from tests.trainers.helpers import make_trainer

IDS = [3, 14, 15, 92, 65, 35, 8, 9, 79]


class Sampler:
    """Engines by name, each a model that answers exactly."""

    def __init__(self, **models):
        self.models = models

    def scores(self, token_ids):
        return {name: policy_scores(model, token_ids) for name, model in self.models.items()}


def moved(model, by=0.01):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * by)
    return model


def test_scores_are_log_probabilities_of_each_id_given_those_before():
    model = tiny_model().eval()
    scores = policy_scores(model, IDS)
    assert len(scores) == len(IDS) - 1
    for index in range(1, len(IDS)):
        with torch.no_grad():
            logits = model(torch.tensor([IDS[:index]])).logits[0, -1]
        assert scores[index - 1] == pytest.approx(torch.log_softmax(logits, -1)[IDS[index]].item(), abs=1e-5)


def test_equal_weights_pass_and_the_gap_is_returned():
    assert probe_sync(Sampler(here=tiny_model()), tiny_model(), IDS) == 0.0


def test_the_worst_engine_decides_and_is_named():
    model = tiny_model()
    stale = moved(tiny_model())
    scores = Sampler(a=stale).scores(IDS)["a"]
    gap = sum(abs(x - y) for x, y in zip(scores, policy_scores(model, IDS), strict=True)) / len(scores)
    assert gap > 1e-3
    with pytest.raises(SyncError, match="second") as caught:
        probe_sync(Sampler(first=tiny_model(), second=stale), model, IDS)
    assert f"{gap:.3g}" in str(caught.value) and "servers.max_logprob_gap" in str(caught.value)
    assert probe_sync(Sampler(a=stale), model, IDS, max_gap=2 * gap) == pytest.approx(gap)


def test_numbers_that_are_none_never_pass():
    class Broken:
        def scores(self, token_ids):
            return {"fine": policy_scores(tiny_model(), token_ids), "broken": [math.nan] * (len(token_ids) - 1)}

    with pytest.raises(SyncError, match="broken"):
        probe_sync(Broken(), tiny_model(), IDS)


def test_a_stale_adapter_is_found():
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5))
    assert probe_sync(Sampler(base=tiny_model()), model, IDS) == 0.0, "a fresh adapter adds nothing"
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    with pytest.raises(SyncError, match="of base"):
        probe_sync(Sampler(base=tiny_model()), model, IDS)


def test_the_model_stays_in_its_mode():
    model = tiny_model().train()
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    probe_sync(Sampler(here=tiny_model()), model, IDS)
    assert {name: module.training for name, module in model.named_modules()} == before


def test_the_limit_depends_on_the_precision():
    assert default_max_gap(tiny_model()) == 1e-3
    assert default_max_gap(tiny_model().to(torch.bfloat16)) == 0.05
    adapted = get_peft_model(tiny_model().to(torch.bfloat16), LoraConfig(r=4, target_modules=["q_proj"]))
    assert default_max_gap(adapted) == 0.05, "float32 adapters do not make bfloat16 weights exact"


def test_mixed_precision_may_differ_by_its_rounding():
    class Rounding(nn.Module):
        """As accelerate's wrapper: float32 weights, computed with in bfloat16."""

        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, **inputs):
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(**inputs)

    model = Rounding(tiny_model())
    with pytest.raises(SyncError, match=r"0\.001"):
        probe_sync(Sampler(here=tiny_model()), model, IDS)
    assert 1e-3 < probe_sync(Sampler(here=tiny_model()), model, IDS, is_autocast=True) < 0.05


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_trainer_says_whether_it_computes_in_mixed_precision(tmp_path, monkeypatch, precision):
    said = []
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(Accelerator, "mixed_precision", precision)
    monkeypatch.setattr(rollouts, "sync_weights", lambda *args, is_autocast, **kwargs: said.append(is_autocast) or {})
    trainer.rollouts.sync(trainer.model, 0)
    assert said == [precision == "bf16"]


def test_the_head_of_the_loss_is_the_trained_copy_in_its_own_precision():
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    head = model.get_base_model().get_output_embeddings()
    moved(head.modules_to_save["default"])
    hidden = torch.randn(2, 3, 32, dtype=torch.bfloat16)
    torch.testing.assert_close(_Head(head)(hidden), head(hidden.float()))
    assert (_Head(head)(hidden) - head.original_module(hidden.float())).abs().max() > 0.01


@pytest.mark.parametrize("trainer", [MultiTurnGRPOTrainer, MultiTurnPPOTrainer])
def test_an_adapter_on_the_output_layer_which_the_loss_would_not_see_is_refused(tmp_path, trainer):
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="lm_head"):
        make_trainer(tmp_path, trainer=trainer, peft_config=config)


def test_quantised_weights_make_it_a_warning():
    model = tiny_model()
    model.quantised = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    with pytest.warns(UserWarning, match="servers.max_logprob_gap"):
        assert probe_sync(Sampler(here=moved(tiny_model())), model, IDS, max_gap=1e-3) > 1e-3
