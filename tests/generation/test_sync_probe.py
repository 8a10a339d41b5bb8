"""A sampler that does not have the trainer's weights is stopped."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from agent_r1_trl.generation.sync_probe import SyncError, default_max_gap, policy_scores, probe_sync
from tests.generation.helpers import tiny_model

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
    with pytest.raises(SyncError, match=r"of second and of the trainer differ") as caught:
        probe_sync(Sampler(first=tiny_model(), second=stale), model, IDS)
    for cause in (f"{gap:.3g}", "stale adapter", "dtype", "template", "max_sync_logprob_gap allows 0.001"):
        assert cause in str(caught.value)
    assert probe_sync(Sampler(a=stale), model, IDS, max_gap=2 * gap) == pytest.approx(gap)


def test_numbers_that_are_none_never_pass():
    class Broken:
        def scores(self, token_ids):
            return {"fine": policy_scores(tiny_model(), token_ids), "broken": [math.nan] * (len(token_ids) - 1)}

    with pytest.raises(SyncError, match="of broken"):
        probe_sync(Broken(), tiny_model(), IDS)


def test_a_stale_adapter_is_found():
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5))
    assert probe_sync(Sampler(base=tiny_model()), model, IDS) == 0.0, "a fresh adapter adds nothing"
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    with pytest.raises(SyncError, match="stale adapter"):
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


def test_quantised_weights_make_it_a_warning():
    model = tiny_model()
    model.quantised = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    with pytest.warns(UserWarning, match="stale adapter"):
        assert probe_sync(Sampler(here=moved(tiny_model())), model, IDS, max_gap=1e-3) > 1e-3
