"""Self-distillation: who the teacher is, what the term is, and what it is good for."""

import functools

import pytest
import torch
from datasets import Dataset
from transformers import Qwen2ForCausalLM

from agent_r1_trl.features.distillation import SelfDistillation
from agent_r1_trl.testing import AddEnv, call, make_tokenizer, say
from agent_r1_trl.trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.update.layout import UPDATE_LAYOUTS
from tests.effort import nightly
from tests.learning.tasks import LockedKeyDoorEnv, Progress, _config, tiny_tokenizer
from tests.trainers.helpers import loss_and_gradients, make_trainer, questions, scored_batch, step_gradients
from tests.trainers.versions import SAMPLED, Weights


class PaidEnv(AddEnv):
    """Earns the number of the letters of its last word."""

    async def outcome_reward(self, trajectory):
        return float(len(trajectory.final_text))


def talk(rng, turn):
    return call(a=rng.randrange(9), b=rng.randrange(9)) if turn == 0 else say("x" * rng.randrange(1, 9))


def with_hints(count=8):
    """Every second question has one, that of the first group among them."""

    def add(row, index):
        return {"hint": f"say {index}" if index % 2 else None}

    return questions(count).map(add, with_indices=True)


def make(tmp_path, distillation, **options):
    options = {"script": talk, "env": PaidEnv, "train_dataset": with_hints(), **options}
    return make_trainer(tmp_path, callbacks=[distillation], **options)


def test_two_of_them_need_two_names_and_each_is_logged_under_its_own(tmp_path):
    first, second = SelfDistillation("hint"), SelfDistillation()
    with pytest.raises(ValueError, match=r"two are named 'distillation'.*Give one of them another name"):
        make_trainer(tmp_path, callbacks=[first, second], train_dataset=with_hints())
    second.name = "siblings"
    trainer = make_trainer(tmp_path, callbacks=[first, second], train_dataset=with_hints(), env=PaidEnv, script=talk)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert (entry["distillation/hinted_share"], entry["siblings/hinted_share"]) == (0.5, 0.75)
    assert entry["distillation"] != entry["siblings"] and entry["siblings/gap"] != 0


def test_a_hint_may_be_a_number_also_zero(tmp_path):
    numbers = questions().map(lambda row: {"hint": 0})
    batch = scored_batch(make(tmp_path, SelfDistillation("hint"), train_dataset=numbers))
    assert batch["distillation/has_teacher"].all()


def test_a_prompt_of_text_blocks_is_hinted_as_one_of_text_is(tmp_path):
    def in_blocks(row):
        return {"prompt": [{"role": "user", "content": [{"type": "text", "text": row["prompt"][0]["content"]}]}]}

    teachers = []
    for name, rows in {"text": with_hints(), "blocks": with_hints().map(in_blocks)}.items():
        batch = scored_batch(make(tmp_path / name, SelfDistillation("hint"), train_dataset=rows))
        teachers.append(batch["distillation/teacher"])
    assert teachers[0].any() and torch.equal(*teachers)


def test_without_a_loss_mask_the_term_is_still_over_action_tokens(tmp_path):
    taught = {}
    for loss_mask in (True, False):
        trainer = make(tmp_path / str(loss_mask), distillation := SelfDistillation("hint"), loss_mask=loss_mask)
        batch = scored_batch(trainer)
        taught[loss_mask] = distillation.extra_tokens(batch)
    assert taught[True].any() and torch.equal(*taught.values())
    assert batch["tool_mask"].sum() > sum(item.num_action_tokens for item in trainer.last_trajectories)


def test_a_hint_that_leaves_the_completion_no_room_in_the_model_is_none(tmp_path):
    hints = questions(2).map(lambda row, index: {"hint": "x " * (900 if index else 1)}, with_indices=True)
    trainer = make(tmp_path, SelfDistillation("hint"), train_dataset=hints)
    batch = scored_batch(trainer)
    assert batch["distillation/has_teacher"].tolist() == [
        item.example_id == "q0" for item in trainer.last_trajectories
    ]


def teacher_of(trainer, item, content):
    """Log-probs of a completion after the prompt with this content."""
    tools = [tool.schema for tool in AddEnv.tools]
    prompt = trainer.chat.encode_prompt([{"role": "user", "content": content}], tools)
    ids = torch.tensor([[*prompt, *item.completion_ids]])
    logits = trainer.model(input_ids=ids).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]


@pytest.mark.parametrize("gate", ["sigmoid", "signed", "raise"])
def test_the_teacher_reads_the_hint_and_the_term_is_the_one_of_the_docstring(tmp_path, gate):
    trainer = make(tmp_path, SelfDistillation("hint", gate=gate, weight=0.5))
    batch = scored_batch(trainer)
    trainer.compute_loss(trainer.model, batch)
    assert batch["distillation/has_teacher"].tolist() == [True] * 4 + [False] * 4
    terms, num = 0.0, 0
    for index, item in enumerate(trainer.last_trajectories[:4]):
        question = item.prompt_messages[0]["content"]
        teacher, student = (
            teacher_of(trainer, item, text) for text in (f"{question}\n\nHint: say {question.split()[1]}", question)
        )
        torch.testing.assert_close(batch["distillation/teacher"][index, : len(teacher)], teacher, rtol=1e-4, atol=1e-5)
        mask = torch.tensor(item.action_mask).bool()
        d = (teacher - student).clamp(-2, 2)[mask]
        factor = {"sigmoid": d * torch.sigmoid(5 * d), "signed": d, "raise": torch.sigmoid(5 * d)}[gate]
        terms, num = terms - 0.5 * (factor * student[mask]).sum().item(), num + int(mask.sum())
    assert trainer._metrics["train"]["distillation"] == [pytest.approx(terms / num, rel=1e-3, abs=1e-6)]
    assert trainer._metrics["train"]["distillation/gap"][0] != 0
    assert trainer._metrics["train"]["distillation/hinted_share"] == [0.5]


def test_the_hinted_share_is_one_of_trajectories_whatever_their_rows(tmp_path):
    batch = scored_batch(trainer := make(tmp_path, SelfDistillation("hint"), **{"context.policy": again}))
    assert len(batch["tool_mask"]) > 8 and trainer._metrics["train"]["distillation/hinted_share"] == [0.5]


def test_siblings_learn_from_the_best_of_their_group(tmp_path):
    distillation = SelfDistillation(text=" Like {hint}!")
    trainer = make(tmp_path, distillation)
    scored_batch(trainer)
    items, hints = trainer.last_trajectories, distillation.hints(trainer.last_trajectories)
    for start in (0, 4):
        group = items[start : start + 4]
        best = max(item.total_reward for item in group)
        assert any(item.total_reward < best for item in group)
        for item, hint in zip(group, hints[start : start + 4], strict=True):
            assert (hint is None) == (item.total_reward == best)
            assert hint is None or (hint.endswith("x" * int(best)) and '"name": "add"' in hint)


def test_a_function_may_give_hints(tmp_path):
    trainer = make(tmp_path, SelfDistillation(lambda item, row: row["id"] if item.generation else ""))
    assert scored_batch(trainer)["distillation/has_teacher"].tolist() == [False, True, True, True] * 2


def test_the_function_may_be_async(tmp_path):
    async def hint(item, row):
        return row["id"]

    distillation = SelfDistillation(hint)
    trainer = make(tmp_path, distillation)
    scored_batch(trainer)
    assert distillation.hints(trainer.last_trajectories) == [row["id"] for row in trainer.last_batch.rows]


def second(returns):
    return torch.arange(len(returns)) == 1


def again(view):
    return [*view.prompt_messages, {"role": "user", "content": "again"}]


def test_a_rewritten_row_has_no_teacher_though_the_row_before_it_has_no_token_to_train(tmp_path):
    def mute_at_first(generator):
        script, decode = generator._script, make_tokenizer("qwen3").decode
        generator._script = lambda request: script(request) if "again" in decode(request.prompt_ids) else []
        return generator

    options = {"context.policy": again, "wrap_generator": mute_at_first}
    batch = scored_batch(trainer := make(tmp_path, SelfDistillation("hint"), **options))
    rows = trainer.last_batch.training_rows
    assert all(
        row.prompt_ids != trainer.last_trajectories[i].prompt_ids for i, row in zip(rows.index, rows.rows, strict=True)
    )
    assert not batch["distillation/has_teacher"].any()


@pytest.mark.parametrize(
    "options",
    [{}, {"context.policy": again}, {"sampling.filter_groups": second}],
    ids=["one row", "several rows", "filter"],
)
def test_layouts_agree_with_several_iterations_rows_and_a_filter(tmp_path, options):
    def gradients(layout):
        trainer = make(
            tmp_path / layout, SelfDistillation(weight=1.0), update_layout=layout, gradient_accumulation_steps=2,
            per_device_train_batch_size=4, num_iterations=2, **options,
        )  # fmt: skip
        return step_gradients(trainer)

    want, batches = gradients("padded")
    assert any(batch["extra_tokens/distillation"].any() for batch in batches)
    for layout in set(UPDATE_LAYOUTS) - {"padded"}:
        for name, value in gradients(layout)[0].items():
            torch.testing.assert_close(value, want[name], rtol=2e-5, atol=2e-6)


def test_the_weight_of_what_has_become_likely_is_capped(tmp_path):
    """Also in groups that a filter has left out, whose old log-probs no other loss reads."""
    distillation = SelfDistillation("hint", weight=1.0, ratio_cap=1.0)
    trainer = make(tmp_path, distillation, num_iterations=2, **{"sampling.filter_groups": second})
    [batch] = step_gradients(trainer)[1]
    rows = batch["extra_tokens/distillation"].any(dim=1)
    assert rows.any() and not batch["tool_mask"][rows].any(), "the filter has kept the group without hints"
    old = batch["old_per_token_logps"]
    seen = {}

    class Spy(SelfDistillation):
        def extra_loss(self, inputs, log_probs, mask):
            seen["old"] = inputs["old_per_token_logps"]
            return super().extra_loss(inputs, log_probs, mask)

    trainer.features.get("distillation").__class__ = Spy
    loss_and_gradients(trainer, batch)
    mask = batch["extra_tokens/distillation"]
    assert torch.equal(seen["old"][mask], old[mask]) and (old[mask] < 0).all()


@pytest.mark.parametrize("cut", [False, True])
def test_a_rollout_that_ran_ahead_is_weighed_by_how_likely_its_tokens_have_become_since(tmp_path, cut):
    """The policy that sampled them is not the one of the update, and the row keeps its hint."""
    batches = []

    class Spy(SelfDistillation):
        def extra_loss(self, inputs, log_probs, mask):
            term = super().extra_loss(inputs, log_probs, mask)
            batches.append((dict(inputs), log_probs.detach(), mask, term.detach()))
            return term

    hints = questions().map(lambda row, index: {"hint": f"say {index}"}, with_indices=True)
    options = {"rollouts_ahead": 2, "cut_turns": cut, "num_generations": 8, "learning_rate": 3e-3, "max_steps": 4}
    options["failures.min_effective_share"] = 0.0
    kept = Weights()
    callbacks = [kept, Spy("hint", weight=1.0)]
    kept.trainer = make_trainer(tmp_path, callbacks=callbacks, train_dataset=hints, **{**SAMPLED, **options})
    kept.trainer.train()
    assert max(kept.trainer.state.log_history[2]["sampling/versions"], 1) > 1
    ages = []
    for (inputs, student, mask, term), batch in zip(batches, kept.batches, strict=True):
        pairs = [pair for item in batch for pair in zip(item.logprobs, item.action_mask, strict=True)]
        told = torch.tensor(sorted(log_prob for log_prob, is_action in pairs if is_action))
        then = inputs["sampling_per_token_logps"]
        torch.testing.assert_close(then[mask].sort().values, told, rtol=0, atol=1e-6)
        gap = (inputs["distillation/teacher"] - student).clamp(-2, 2)
        weight = gap * torch.sigmoid(5 * gap) * (student - then).exp().clamp(max=2.0)
        expected = -(weight * student)[mask].sum()
        torch.testing.assert_close(term, expected, rtol=1e-4, atol=1e-6)
        ages.append((student - then)[mask].abs().max().item())
    assert ages[0] < 1e-4 and max(ages) > 1e-2, "the weights have moved"
    assert all(entry["distillation/hinted_share"] == 1 for entry in kept.trainer.state.log_history[:4])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gate": "tanh"}, "gate='tanh' is not one of 'sigmoid', 'signed', 'raise'"),
        ({"weight": float("nan")}, "SelfDistillation.weight=nan must be a finite number >= 0. Set "),
        ({"clip": -1}, "SelfDistillation.clip=-1 must be a finite number > 0. Set "),
        ({"ratio_cap": "2"}, "SelfDistillation.ratio_cap='2' must be a finite number > 0. Set "),
        ({"text": "psst"}, r"text='psst' has no \{hint\}"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SelfDistillation(**given)


def test_siblings_need_a_group(tmp_path):
    with pytest.raises(ValueError, match="num_generations=1: a trajectory has no siblings"):
        make(tmp_path, SelfDistillation(), trainer=MultiTurnPPOTrainer, critic="head", num_generations=1)


def test_a_column_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"context='solution'\): the data set has no such column, only hint, id, "):
        make(tmp_path, SelfDistillation("solution"))
    with pytest.raises(ValueError, match=r"context='hint'\): the data set has no such column, only id, prompt. Name"):
        make(tmp_path, SelfDistillation("hint"), eval_dataset=questions(4))


# -------------------------------------------------------------------- what it is good for


@functools.cache
def reader():
    """Weights of a policy that answers states with any of their words, and with those of a hint where there is one."""
    torch.manual_seed(0)
    tokenizer, words = tiny_tokenizer(), LockedKeyDoorEnv.words
    model = Qwen2ForCausalLM(_config(tokenizer))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=600)
    states = torch.tensor(tokenizer.convert_tokens_to_ids([*words]))
    answers = torch.tensor([tokenizer.convert_tokens_to_ids([*said]) for said in words.values()])  # (3, 8)
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    for step in range(600):
        said = answers.gather(1, torch.randint(8, (3, 48))).t()  # (48, 3)
        turns = [torch.stack([torch.full((48,), start), said[:, k], torch.full((48,), end)], 1) for k in range(3)]
        asked = [torch.tensor([start, state, end]).repeat(48, 1) for state in states.tolist()]
        if step % 2:
            asked[0] = torch.cat([asked[0][:, :2], said, asked[0][:, 2:]], dim=1)
        ids = torch.cat([part for pair in zip(asked, turns, strict=True) for part in pair], dim=1)
        labels = torch.cat(
            [part for a, t in zip(asked, turns, strict=True) for part in (torch.full_like(a, -100), t)], dim=1
        )
        optimizer.zero_grad()
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def rates(output_dir, seed, callbacks, rollouts=30):
    model = Qwen2ForCausalLM(_config(tiny_tokenizer()))
    model.load_state_dict(reader())
    progress = Progress()
    row = {"prompt": [{"role": "user", "content": "k"}], "hint": "tai"}
    args = MultiTurnGRPOConfig(
        output_dir=str(output_dir), bf16=False, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        record_trajectories="none", logging_strategy="no", seed=seed, beta=0.0, per_device_train_batch_size=32,
        num_iterations=3, max_steps=3 * rollouts, epsilon=0.1, learning_rate=2e-3, lr_scheduler_type="constant",
        gradient_checkpointing=False, max_completion_length=64, max_turns=3, max_tokens_per_turn=2, num_generations=16,
    )  # fmt: skip
    progress.trainer = trainer = MultiTurnGRPOTrainer(
        model=model, args=args, env=LockedKeyDoorEnv, train_dataset=Dataset.from_list([row] * 64),
        processing_class=tiny_tokenizer(), callbacks=[progress, *callbacks],
    )  # fmt: skip
    trainer.train()
    return progress.rates


@pytest.mark.release
@pytest.mark.parametrize("seed", [0, *nightly(1, 2)])
def test_hints_find_what_nobody_stumbles_on(tmp_path, seed):
    """One random player in 512 succeeds. The teacher alone knows the hint, the policy acts without it."""
    alone = rates(tmp_path / "alone", seed, [])
    hinted = rates(tmp_path / "hinted", seed, [SelfDistillation("hint", text="{hint}")])
    print(
        f"seed {seed}: alone {alone[-1]:.2f} after {len(alone)} rollouts, hinted {hinted[-1]:.2f} after {len(hinted)}"
    )
    assert len(hinted) < 30 and min(hinted[-2:]) >= 0.9 and len(hinted) < len(alone)
