"""A run in which nothing would be trained is refused, by its model, its optimizer or its folder."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_r1_trl.cli import main
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.trainers.callbacks import RolloutCallback
from tests.trainers.helpers import make_trainer

LORA = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
BOTH = pytest.mark.parametrize("trainer", [MultiTurnGRPOTrainer, MultiTurnPPOTrainer])


@pytest.fixture
def folders(tmp_path):
    """A base model and an adapter of it on disk, both with the tokenizer."""
    tokenizer = make_tokenizer("qwen3")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_policy(tokenizer).save_pretrained(base)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**LORA))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    model.save_pretrained(adapter)
    for folder in (base, adapter):
        tokenizer.save_pretrained(folder)
    return base, adapter


def loaded(folders, **options):
    base, adapter = folders
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, **options)


@BOTH
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_that_peft_has_frozen_is_refused(folders, tmp_path, trainer, beta):
    """With a KL term TRL adds a copy of the adapter, whose parameters would count; nothing trains that one either."""
    with pytest.raises(ValueError, match=r"none of its \d+ parameters is trained.*is_trainable=True"):
        make_trainer(tmp_path, trainer=trainer, model=loaded(folders), beta=beta)


@BOTH
def test_an_adapter_that_is_loaded_to_be_trained_is_trained(folders, tmp_path, trainer):
    made = make_trainer(tmp_path, trainer=trainer, model=loaded(folders, is_trainable=True), beta=0.1)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters() if ".default." in name}
    made.train()
    after = dict(made.model.named_parameters())
    assert before and not all(torch.equal(after[name], value) for name, value in before.items())


@BOTH
def test_a_model_that_is_frozen_as_a_whole_is_refused_whatever_its_critic_does(tmp_path, trainer):
    model = make_policy(make_tokenizer("qwen3")).requires_grad_(False)
    with pytest.raises(ValueError, match=r"model=Qwen2ForCausalLM: none.*requires_grad_\(True\)"):
        make_trainer(tmp_path, trainer=trainer, model=model)


def small_lora(**options):
    return peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)


@BOTH
def test_an_adapter_that_is_merged_into_its_base_is_refused(tmp_path, trainer):
    """It requires gradients, is in the optimizer, and none comes: the layer computes with the base alone."""
    model = peft.get_peft_model(make_policy(make_tokenizer("qwen3")), small_lora())
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into its base.*model\.unmerge_adapter\(\)"):
        make_trainer(tmp_path, trainer=trainer, model=model)
    model.unmerge_adapter()
    make_trainer(tmp_path, trainer=trainer, model=model)


def test_adapters_that_are_frozen_in_other_ways_are_told_the_way_back(tmp_path):
    model = peft.get_peft_model(make_policy(make_tokenizer("qwen3")), small_lora())
    model.disable_adapter_layers()
    with pytest.raises(ValueError, match=r"model\.enable_adapter_layers\(\)"):
        make_trainer(tmp_path, model=model)
    with pytest.raises(ValueError, match="inference_mode=True"):
        make_trainer(tmp_path, model=make_policy(make_tokenizer("qwen3")), peft_config=small_lora(inference_mode=True))


@BOTH
def test_trained_weights_that_no_gradient_reaches_end_the_run_at_its_first_step(tmp_path, trainer):
    model = make_policy(make_tokenizer("qwen3")).requires_grad_(False)
    model.unused = torch.nn.Linear(2, 2)
    made = make_trainer(tmp_path, trainer=trainer, model=model)
    with pytest.raises(ValueError, match=r"no gradient reaches .*unused\.weight.*requires_grad_\(True\)"):
        made.train()
    assert made.state.global_step == 0


def test_one_weight_that_is_trained_is_enough(tmp_path):
    model = make_policy(make_tokenizer("qwen3")).requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    made = make_trainer(tmp_path, model=model)
    before = model.model.norm.weight.detach().clone()
    made.train()
    assert not torch.equal(model.model.norm.weight, before)


@BOTH
def test_an_optimizer_from_before_the_adapter_is_refused(tmp_path, trainer):
    """Its parameters are those of the base, which peft freezes."""
    model = make_policy(make_tokenizer("qwen3"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizers=\(SGD.*trainer\.optimizer = "):
        make_trainer(
            tmp_path, trainer=trainer, model=model, optimizers=(optimizer, None), peft_config=peft.LoraConfig(**LORA)
        )


@BOTH
def test_an_optimizer_that_is_set_later_is_looked_at_when_training_begins(tmp_path, trainer):
    made = make_trainer(tmp_path, trainer=trainer)
    other = make_policy(make_tokenizer("qwen3"))
    made.optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the run would change nothing"):
        made.train()


def test_a_class_of_optimizers_with_parameters_of_its_own_is_looked_at_when_training_begins(tmp_path):
    own = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1}
    made = make_trainer(tmp_path)
    made.optimizer_cls_and_kwargs = (torch.optim.SGD, own)
    with pytest.raises(ValueError, match="the run would change nothing"):
        made.train()


def test_an_optimizer_of_a_part_of_the_policy_is_the_users_choice(tmp_path):
    model = make_policy(make_tokenizer("qwen3"))
    optimizer = torch.optim.SGD([model.model.norm.weight], lr=0.1)
    before = model.model.norm.weight.detach().clone()
    make_trainer(tmp_path, model=model, optimizers=(optimizer, None)).train()
    assert not torch.equal(model.model.norm.weight, before)


# -------------------------------------------------------------------- an adapter's folder


def test_an_adapters_folder_says_what_it_is_and_both_ways_on_work(folders, tmp_path):
    base, adapter = folders
    ways = (
        rf"is an adapter \(LORA\) of the model '{base}'.*agent-r1-trl merge {adapter} --output_dir.*is_trainable=True"
    )
    with pytest.raises(ValueError, match=f"model='{adapter}' {ways}"):
        make_trainer(tmp_path, model=str(adapter))
    assert main(["merge", str(adapter), "--output_dir", f"{adapter}-merged"]) == 0
    make_trainer(tmp_path / "one", model=f"{adapter}-merged").train()
    make_trainer(tmp_path / "two", model=loaded(folders, is_trainable=True)).train()


# -------------------------------------------------------------------- single tokens of tied embeddings


class EachRowAlone(RolloutCallback):
    """Scores every trajectory alone, unpadded and through the model's own logits."""

    def __init__(self):
        self.rows = []

    @torch.no_grad()
    def rollout_end(self, batch, output):
        for trajectory, scores in zip(batch.trajectories, output["old_per_token_logps"], strict=True):
            ids = torch.tensor([trajectory.prompt_ids + trajectory.completion_ids])
            logits = self.trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1]
            alone = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[len(trajectory.prompt_ids) - 1 :, 0]
            is_sampled = torch.tensor(trajectory.action_mask, dtype=torch.bool)
            sampled = torch.tensor(trajectory.logprobs)
            self.rows.append((alone[is_sampled], sampled[is_sampled], scores[: len(alone)][is_sampled]))


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_single_tokens_of_tied_embeddings_are_trained_as_they_are_sampled(tmp_path, layout):
    """peft puts a wrapper around the output layer as well, which hides the bias from TRL's loss."""
    model = make_policy(make_tokenizer("qwen3"))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    rows, tokens = EachRowAlone(), list(range(40, 120))
    trainer = make_trainer(
        tmp_path, script=None, model=model, peft_config=peft.LoraConfig(**LORA, trainable_token_indices=tokens),
        update_layout=layout, max_steps=4, steps_per_generation=2, max_completion_length=24, learning_rate=0.1,
        callbacks=[rows],
    )  # fmt: skip
    before = model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    moved = (model.get_input_embeddings().weight - before).abs().amax(dim=1) > 1e-3
    assert moved[tokens].any() and not moved[: tokens[0]].any()
    assert len(rows.rows) == 32
    for alone, sampled, scores in rows.rows:
        assert len(alone)
        torch.testing.assert_close(sampled, alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)
