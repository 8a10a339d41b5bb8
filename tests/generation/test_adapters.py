"""Kinds of PEFT adapters: the sampler is the policy that the trainer scores, or the kind is refused by name."""

import peft
import pytest
import torch
from transformers import LlamaConfig

from agent_r1_trl.generation import TransformersGenerator
from agent_r1_trl.generation.weights import check_adapters, policy_weights, served_adapter
from agent_r1_trl.testing import make_policy, make_tokenizer
from tests.generation.helpers import PROMPTS, make_generator, run, tiny_model
from tests.trainers.helpers import PlainEnv, make_trainer

Q = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
FOLLOWED = {
    "LoRA": lambda: peft.LoraConfig(**Q),
    "DoRA": lambda: peft.LoraConfig(**Q, use_dora=True),
    "AdaLoRA": lambda: peft.AdaLoraConfig(**Q, total_step=10),
    "LoHa": lambda: peft.LoHaConfig(**Q),
    "LoKr": lambda: peft.LoKrConfig(**Q),
    "IA3": lambda: peft.IA3Config(**Q, feedforward_modules=[]),
    "OFT": lambda: peft.OFTConfig(**Q, oft_block_size=4),
    "VeRA": lambda: peft.VeraConfig(target_modules=["q_proj"], r=4, task_type="CAUSAL_LM"),
    "FourierFT": lambda: peft.FourierFTConfig(**Q, n_frequency=8),
    "LayerNorm": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM"),
}
VIRTUAL = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
REFUSED = {
    "PrefixTuningConfig": lambda: peft.PrefixTuningConfig(**VIRTUAL),
    "PromptTuningConfig": lambda: peft.PromptTuningConfig(**VIRTUAL),
    "PromptEncoderConfig": lambda: peft.PromptEncoderConfig(**VIRTUAL, encoder_hidden_size=8),
    "MultitaskPromptTuningConfig": lambda: peft.MultitaskPromptTuningConfig(**VIRTUAL, num_tasks=2),
    "CPTConfig": lambda: peft.CPTConfig(
        cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2], task_type="CAUSAL_LM"
    ),
    "activated LoRA": lambda: peft.LoraConfig(**Q, alora_invocation_tokens=[5]),
}
if hasattr(peft, "LilyConfig"):  # the oldest peft that we declare has none
    REFUSED["LilyConfig"] = lambda: peft.LilyConfig(r=4, **Q)


def adapted(config, **options):
    """A tiny Llama whose adapter has been trained a little: far enough from doing nothing."""
    model = peft.get_peft_model(tiny_model(LlamaConfig, **options), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def scores(model, prompt, ids):
    model.eval()
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.8
    return logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1).tolist()


@pytest.mark.parametrize("kind", FOLLOWED)
def test_the_sampler_is_the_policy_that_is_scored(kind):
    model = adapted(FOLLOWED[kind]())
    prompts = PROMPTS[:3]
    generator = make_generator(model)
    first = run(generator, prompts, max_tokens=5)
    longer = [prompt + item.token_ids + [3, 4] for prompt, item in zip(prompts, first, strict=True)]
    second = run(generator, longer, max_tokens=5)  # continues from the cache
    generator.close()
    plain = scores(tiny_model(LlamaConfig), prompts[0], first[0].token_ids)
    assert scores(model, prompts[0], first[0].token_ids) != pytest.approx(plain, abs=1e-3), "it does something"
    for prompt, item in [*zip(prompts, first, strict=True), *zip(longer, second, strict=True)]:
        assert scores(model, prompt, item.token_ids) == pytest.approx(item.logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in FOLLOWED if kind != "adaption prompt"])
def test_what_a_sampler_with_weights_of_its_own_receives_is_the_policy(kind):
    model, plain = adapted(FOLLOWED[kind]()), tiny_model(LlamaConfig)
    check_adapters(model, is_merged=True)
    plain.load_state_dict(dict(policy_weights(model)))
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(ids).logits, model.eval()(ids).logits, rtol=0, atol=1e-4)


def test_an_adapter_that_cannot_be_merged_is_refused_for_vllm_alone():
    model = adapted(FOLLOWED["adaption prompt"]())
    check_adapters(model)
    with pytest.raises(ValueError, match="peft_config=AdaptionPromptConfig"):
        check_adapters(model, is_merged=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_an_adapter_that_a_sampler_cannot_follow_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=f"peft_config=.*{kind}.*peft_config=LoraConfig\\(\\)"):
        TransformersGenerator(adapted(REFUSED[kind]()), pad_token_id=0, stop_token_ids=[])


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["peft_config", "wrapped"])
def test_the_trainer_refuses_it_too(tmp_path, is_wrapped):
    config = REFUSED["PrefixTuningConfig"]()
    given = {"model": make_policy(make_tokenizer("qwen3")), "peft_config": config}
    if is_wrapped:
        given = {"model": peft.get_peft_model(given["model"], config)}
    with pytest.raises(ValueError, match="peft_config=PrefixTuningConfig"):
        make_trainer(tmp_path, script=None, env=PlainEnv, **given)


def test_a_variant_of_lora_is_merged_and_not_served_as_plain_lora():
    assert served_adapter(adapted(peft.LoraConfig(**Q))) == "default"
    assert served_adapter(adapted(peft.LoraConfig(**Q, alora_invocation_tokens=[5]))) is None
