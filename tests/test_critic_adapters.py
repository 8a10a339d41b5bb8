"""The adapter critic beside every kind of adapter: the policy stays as it was, and the critic begins as the policy."""

import copy

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.corda import preprocess_corda
from transformers import MixtralConfig, Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from agent_r1_trl.critic.attach import (
    attach_critic,
    base_causal_lm,
    critic_parameters,
    is_critic_name,
    load_critic,
    save_critic,
    use_critic_adapter,
)
from tests.effort import nightly
from tests.generation.helpers import tiny_model

IDS = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
TARGETS = ["q_proj", "v_proj"]

INITIALISATIONS = [True, False, "gaussian", "pissa", "pissa_niter_4", "olora", "orthogonal", "eva", "corda"]
if "mica" in str(peft.LoraConfig.__annotations__["init_lora_weights"]):  # the oldest peft does not know it
    INITIALISATIONS.append("mica")
ADAPTERS = {
    "LORA": ("LoraConfig", {"r": 4}),
    "LORA (DoRA)": ("LoraConfig", {"r": 4, "use_dora": True}),
    "LORA (rsLoRA)": ("LoraConfig", {"r": 4, "use_rslora": True}),
    "LOHA": ("LoHaConfig", {"r": 4}),
    "LOKR": ("LoKrConfig", {"r": 4}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "OFT": ("OFTConfig", {"oft_block_size": 4}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "HRA": ("HRAConfig", {"r": 4}),
    "VERA": ("VeraConfig", {"r": 4}),
    "RANDLORA": ("RandLoraConfig", {"r": 4}),
    "FOURIERFT": ("FourierFTConfig", {"n_frequency": 10}),
    "C3A": ("C3AConfig", {"block_size": 4}),
    "HIRA": ("HiraConfig", {"r": 4}),
    "GRALORA": ("GraloraConfig", {"r": 4}),
    "MISS": ("MissConfig", {"r": 4}),
    "ROAD": ("RoadConfig", {"group_size": 4}),
    "DELORA": ("DeloraConfig", {"r": 4}),
    "LN_TUNING": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
}
ADAPTERS = {kind: made for kind, made in ADAPTERS.items() if hasattr(peft, made[0])}  # the oldest peft has fewer


def make_base(seed=0, **options):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, **options,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def make_policy(config, **options):
    return get_peft_model(make_base(**options), config).train()


def adapter_config(kind):
    name, options = ADAPTERS[kind]
    return getattr(peft, name)(task_type="CAUSAL_LM", **{"target_modules": TARGETS, **options})


def disturb(model, seed=3):
    """An adapter that has been trained."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=MASK).logits


def hidden_states(model):
    """Of policy and critic."""
    base = base_causal_lm(model)
    with torch.no_grad():
        policy = base.base_model(input_ids=IDS, attention_mask=MASK).last_hidden_state
        with use_critic_adapter(base):
            return policy, base.base_model(input_ids=IDS, attention_mask=MASK).last_hidden_state


def value_gradients(model):
    """Of a loss on values alone: names of the parameters that it reaches."""
    torch.nn.init.normal_(base_causal_lm(model).value_head.weight)
    model.zero_grad()
    output = model(input_ids=IDS, attention_mask=MASK, labels=IDS, fused_lm_head=True, compute_values=True)
    (output.state_values**2).mean().backward()
    return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


@pytest.mark.parametrize("initialisation", INITIALISATIONS)
def test_no_initialisation_of_lora_touches_the_policy_a_second_time(initialisation):
    config = LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=initialisation)
    if initialisation == "corda":
        base = make_base()
        preprocess_corda(base, config, run_model=lambda: [base(row[None]) for row in IDS])
        model = get_peft_model(base, config)
    else:
        model = make_policy(config)
    expected = logits(model)
    weights = {name: value.clone() for name, value in model.named_parameters()}
    attach_critic(model, "adapter")
    assert torch.equal(logits(model), expected)
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters() if name in weights)
    policy, critic = hidden_states(model)
    assert torch.equal(policy, critic)


SOME = ("LORA (DoRA)", "VERA", "OFT")


@pytest.mark.parametrize("kind", [*SOME, *nightly(*(kind for kind in ADAPTERS if kind not in SOME))])
def test_every_listed_kind_of_adapter_takes_a_critic(kind, tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = get_peft_model(make_base(), adapter_config(kind)).train()
        disturb(model)
        expected = logits(model)
        attach_critic(model, "adapter")
        assert torch.equal(logits(model), expected)
        return model

    model = make(seed=0)
    policy, critic = hidden_states(model)
    assert torch.equal(policy, critic)
    own = set(critic_parameters(model))
    reached = value_gradients(model)
    assert reached <= own
    assert {name for name in reached if "value_head" not in name}
    disturb(model)  # both adapters, apart
    save_critic(model, tmp_path)
    again = make(seed=1)
    load_critic(again, tmp_path)
    torch.testing.assert_close(hidden_states(again)[1], hidden_states(model)[1])


def test_the_adapter_of_the_policy_may_have_any_name():
    model = get_peft_model(make_base(), LoraConfig(r=4, target_modules=TARGETS), adapter_name="mine").train()
    disturb(model)
    attach_critic(model, "adapter")
    policy, critic = hidden_states(model)
    assert torch.equal(policy, critic)
    assert model.active_adapters == ["mine"]


def two_at_once():
    model = make_policy(LoraConfig(r=4, target_modules=TARGETS))
    model.add_adapter("second", LoraConfig(r=4, target_modules=TARGETS))
    model.base_model.set_adapter(["default", "second"])
    return model


REFUSED = {
    "an adapter of kind ADALORA": lambda: make_policy(
        peft.AdaLoraConfig(r=4, target_modules=TARGETS, total_step=10, task_type="CAUSAL_LM")
    ),
    "bias='all'": lambda: make_policy(LoraConfig(r=4, target_modules=TARGETS, bias="all")),
    "bias='lora_only'": lambda: make_policy(LoraConfig(r=4, target_modules=TARGETS, bias="lora_only")),
    "several active adapters": two_at_once,
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_adapter_that_cannot_stand_twice_is_refused_and_the_other_critics_are_the_fix(what):
    with pytest.raises(ValueError, match=rf"critic='adapter' with {what}.*critic='head' or critic='model'"):
        attach_critic(REFUSED[what](), "adapter")
    for kind in ("head", "model"):
        attach_critic(model := REFUSED[what](), kind)
        assert value_gradients(model)


def test_a_learned_prompt_is_refused():
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    for kind in ("adapter", "head", "model"):
        with pytest.raises(ValueError, match=r"peft_config=PromptTuningConfig.* learns a prompt"):
            attach_critic(make_policy(config), kind)


def test_replicated_layers_are_not_replicated_again():
    model = make_policy(LoraConfig(r=4, target_modules=TARGETS, layer_replication=[(0, 1), (0, 2)]))
    layers = len(base_causal_lm(model).model.layers)
    base_causal_lm(model).config.layer_types = ["full_attention"] * layers
    expected = logits(model)
    attach_critic(model, "adapter")
    assert len(base_causal_lm(model).model.layers) == layers
    assert torch.equal(logits(model), expected)


def test_what_the_user_froze_stays_frozen_in_policy_and_critic():
    model = make_policy(LoraConfig(r=4, target_modules=TARGETS))
    for name, parameter in model.named_parameters():
        if "layers.0." in name:
            parameter.requires_grad_(False)
    attach_critic(model, "adapter")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any("layers.0." in name for name in trained)
    assert any(".default." in name for name in trained)
    assert any(".critic." in name for name in trained)


def test_the_critics_adapter_has_the_dtype_of_the_policys():
    model = get_peft_model(make_base().bfloat16(), LoraConfig(r=4), autocast_adapter_dtype=False)
    attach_critic(model, "adapter")
    assert {p.dtype for n, p in critic_parameters(model).items() if "lora" in n} == {torch.bfloat16}


def test_the_value_head_has_the_dtype_that_zero3_trains():
    model = make_base().bfloat16()
    attach_critic(model, "head")
    assert model.value_head.weight.dtype == torch.float32
    model = make_base().bfloat16()
    next(iter(model.parameters())).ds_id = 0  # DeepSpeed's mark
    attach_critic(model, "head")
    assert model.value_head.weight.dtype == torch.bfloat16


# -------------------------------------------------------------------- whole modules that are trained

WHOLE = {
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "norm": {"modules_to_save": ["norm"]},
    "output layer": {"modules_to_save": ["lm_head"]},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [1, 2, 3]},
}


def make_whole(case, seed=0):
    options = {"tie_word_embeddings": True} if case == "tied" else {}
    model = make_policy(LoraConfig(r=4, target_modules=TARGETS, **WHOLE[case]), **options)
    disturb(model, seed)
    return model


@pytest.mark.parametrize("use_reentrant", [False, *nightly(None, True)])
@pytest.mark.parametrize("case", WHOLE)
def test_the_critic_trains_its_own_copy_of_a_whole_module(case, use_reentrant):
    model = make_whole(case)
    expected = logits(model)
    attach_critic(model, "adapter")
    assert torch.equal(logits(model), expected)
    if use_reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert value_gradients(model) == set(critic_parameters(model)), "each of the critic's, and nothing else"


@pytest.mark.parametrize("case", WHOLE)
def test_a_policy_with_a_whole_module_is_saved_alone_and_its_critic_comes_back(case, tmp_path):
    model = make_whole(case)
    attach_critic(model, "adapter")
    disturb(model)
    model.save_pretrained(tmp_path)
    save_critic(model, tmp_path)
    again = make_whole(case, seed=4)
    attach_critic(again, "adapter")
    again.load_adapter(str(tmp_path), "default", is_trainable=True)  # as transformers resumes
    load_critic(again, tmp_path)
    torch.testing.assert_close(logits(again), logits(model))
    torch.testing.assert_close(hidden_states(again)[1], hidden_states(model)[1])
    options = {"tie_word_embeddings": True} if case == "tied" else {}
    alone = peft.PeftModel.from_pretrained(make_base(**options), tmp_path)
    assert not any(is_critic_name(name) for name, _ in alone.named_parameters())
    torch.testing.assert_close(logits(alone), logits(model))


# -------------------------------------------------------------------- a model of its own


@pytest.mark.parametrize(
    "case", ["pissa", "IA3", "tied", *nightly("plain", "LOHA", *(case for case in WHOLE if case != "tied"))]
)
def test_the_model_critic_begins_as_the_policy_with_its_adapters(case):
    if case in WHOLE:
        model = make_whole(case)
    elif case in ADAPTERS:
        model = make_policy(adapter_config(case))
    else:
        model = make_policy(LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=case == "plain" or case))
    disturb(model)
    expected = logits(model)
    attach_critic(model, "model")
    assert torch.equal(logits(model), expected)
    policy = base_causal_lm(model).base_model(input_ids=IDS, attention_mask=MASK).last_hidden_state
    critic = base_causal_lm(model).critic_backbone(input_ids=IDS, attention_mask=MASK).last_hidden_state
    torch.testing.assert_close(critic, policy, rtol=1e-4, atol=1e-4)
    reached = value_gradients(model)
    assert reached == set(critic_parameters(model)), "a parameter without a gradient stops DDP"


def test_the_model_critic_of_adapted_experts_begins_as_the_policy():
    """peft puts a wrapper around the experts for each parameter, and these around one another."""
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2}
    config = LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    model = get_peft_model(tiny_model(MixtralConfig, **sizes), config)
    disturb(model)
    attach_critic(model, "model")
    policy = base_causal_lm(model).base_model(input_ids=IDS, attention_mask=MASK).last_hidden_state
    critic = base_causal_lm(model).critic_backbone(input_ids=IDS, attention_mask=MASK).last_hidden_state
    torch.testing.assert_close(critic, policy, rtol=1e-4, atol=1e-4)
    assert not [name for name in critic_parameters(model) if "lora_" in name]
    model.train()  # no module is left inside itself


def test_a_quantised_policy_is_not_copied_and_the_fix_works():
    model = make_policy(LoraConfig(r=4, target_modules=TARGETS))
    weight = model.base_model.model.model.layers[0].mlp.up_proj
    real, weight.weight = weight.weight, torch.nn.Parameter(weight.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"critic='model' on a quantised policy"):
        attach_critic(model, "model")
    for kind in ("adapter", "head"):
        attach_critic(copy.deepcopy(model), kind)
    attach_critic(model, "model", critic_model=make_base().model)
    weight.weight = real
    assert value_gradients(model)


@pytest.mark.parametrize(
    ("kind", "critic_model", "message"),
    [
        ("head", lambda: make_base().model, "critic_model=Qwen2Model with critic='head'"),
        ("model", lambda: "Qwen/Qwen3-0.6B", "critic_model='Qwen/Qwen3-0.6B' is not a loaded model"),
        ("model", make_base, "critic_model=Qwen2ForCausalLM has an output layer"),
        ("model", lambda: make_base().model.base_model.__class__(small_vocabulary()), "knows 20 tokens"),
    ],
)
def test_a_critic_model_that_cannot_serve_is_refused(kind, critic_model, message):
    with pytest.raises(ValueError, match=message):
        attach_critic(make_base(), kind, critic_model=critic_model())


def test_the_policys_own_backbone_is_no_critic():
    model = make_policy(LoraConfig(r=4, target_modules=TARGETS))
    for policy, own in ((base := make_base(), base.model), (model, base_causal_lm(model).model)):
        with pytest.raises(ValueError, match=r"share weights that are trained\. Leave critic_model out"):
            attach_critic(policy, "model", critic_model=own)


def small_vocabulary():
    return Qwen2Config(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_a_critic_model_with_an_adapter_trains_that_alone(use_reentrant):
    critic = get_peft_model(make_base(seed=2).model, LoraConfig(r=4, target_modules=TARGETS))
    expected = {f"critic_backbone.{name}" for name, p in critic.named_parameters() if p.requires_grad}
    model = make_base().train()
    attach_critic(model, "model", critic_model=critic)
    disturb(model)
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert value_gradients(model) == {*expected, "value_head.weight", "value_head.bias"}
