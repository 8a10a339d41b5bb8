"""Loss terms over tokens of their own, columns of a user's own, and log-probs of rows with other prompts."""

import pytest
import torch

from agent_r1_trl.advantages import Credit
from agent_r1_trl.objects import OwnObjectError
from agent_r1_trl.testing import AddEnv, call, say
from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer, policy_loss
from agent_r1_trl.trainers.callbacks import RolloutCallback
from agent_r1_trl.update.batches import whole_rows
from tests.effort import nightly
from tests.trainers.helpers import loss_and_gradients, make_trainer, questions, scored_batch, step_gradients


def observed(inputs):
    """(R, T) the tokens of observations, those that are not trained on included."""
    return inputs["completion_mask"].bool() & ~inputs["action"].bool()


class WorldModel(RolloutCallback):
    """Cross-entropy on what the environment said."""

    name = "world"

    def extra_columns(self, output, trajectories, rows):
        action = torch.zeros_like(output["completion_mask"])
        for mask, row in zip(action, rows.rows, strict=True):
            mask[: len(row.action_mask)] = torch.tensor(row.action_mask, dtype=mask.dtype)
        return {"action": action, "wished": torch.full((len(action),), 0.5)}

    def extra_tokens(self, inputs):
        return observed(inputs)

    def extra_loss(self, inputs, log_probs, mask):
        assert not log_probs[~mask].any() and not (mask & ~observed(inputs)).any()  # a row that fills up has none
        return -(log_probs * inputs["wished"].unsqueeze(1)).sum()


class OddTrainer(MultiTurnGRPOTrainer):
    """The same over every second observation token, as methods of a trainer."""

    extra_columns = WorldModel.extra_columns

    def extra_tokens(self, inputs):
        return observed(inputs) & (torch.arange(inputs["completion_ids"].shape[1]) % 2 == 1)

    def extra_loss(self, inputs, log_probs, mask):
        return -log_probs.sum()


def three_turns(rng, turn):
    return call(a=rng.randrange(9), b=10 ** rng.randrange(9)) if turn < 2 else say("x" * rng.randrange(1, 9))


def again(view):
    """The second turn goes on, the third begins anew."""
    return view.messages if len(view.turns) == 1 else [*view.prompt_messages, {"role": "user", "content": "again"}]


def half(returns):
    """A filter rule that keeps the second group alone."""
    return torch.arange(len(returns)) == 1


LAYOUTS = [
    {"update_layout": "packed"},
    {"update_layout": "shared", "max_tokens_per_micro_batch": 300},
    *nightly({"update_layout": "grouped"}, {"update_layout": "shared"}),
]
CASES = {
    "one row": {},
    "several rows": {"context.policy": again},
    "filter": {"sampling.filter_groups": half},
    "filter, several rows": {"sampling.filter_groups": half, "context.policy": again},
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_layout_gives_the_gradients_of_the_padded_one(tmp_path, case, layout):
    def gradients(name, **options):
        trainer = make_trainer(
            tmp_path / name, callbacks=[WorldModel()], gradient_accumulation_steps=2, per_device_train_batch_size=4,
            script=three_turns, **CASES[case], **options,
        )  # fmt: skip
        return step_gradients(trainer)

    want, batches = gradients("padded")
    found, _ = gradients("other", **layout)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6)
    if "filter" in case:
        rows = torch.cat([batch["tool_mask"].any(dim=1) for batch in batches])
        extra = torch.cat([batch["extra_tokens/world"].any(dim=1) for batch in batches])
        assert (extra & ~rows).any(), "rows that the filter left out come back for the term"
        assert (extra & rows).any()


@pytest.mark.parametrize("kind", ["callback", "method"])
def test_the_term_is_a_mean_over_its_own_tokens(tmp_path, kind):
    given = {"callbacks": [WorldModel()]} if kind == "callback" else {"trainer": OddTrainer}
    trainer, plain = make_trainer(tmp_path, **given), make_trainer(tmp_path)
    inputs = [scored_batch(item) for item in (plain, trainer)][1]
    ids, attention = whole_rows(inputs)
    logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    log_probs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0][:, -inputs["action"].shape[1] :]
    mask = observed(inputs)
    if kind == "method":
        mask = mask & (torch.arange(mask.shape[1]) % 2 == 1)
    assert mask.any(dim=1).all(), "every trajectory calls a tool"
    (-(0.5 if kind == "callback" else 1.0) * log_probs[mask].mean()).backward()
    want = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
    loss, found = loss_and_gradients(trainer, inputs)
    without, rest = loss_and_gradients(plain, inputs)
    for name, value in want.items():
        torch.testing.assert_close(found[name] - rest[name], value, rtol=1e-4, atol=1e-6)
    metric = trainer._metrics["train"]["world" if kind == "callback" else "extra_loss"]
    assert metric == [pytest.approx((loss - without).item(), abs=1e-6)]


def test_ppo_and_evaluation_have_the_term(tmp_path):
    trainer = make_trainer(
        tmp_path, trainer=MultiTurnPPOTrainer, critic="head", num_generations=1, callbacks=[WorldModel()],
        update_layout="packed", eval_dataset=questions(4), eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.train()
    logs = trainer.state.log_history
    assert any(entry.get("world", 0) > 0 for entry in logs) and any(entry.get("eval_world", 0) > 0 for entry in logs)


def test_estimators_read_columns_over_time(tmp_path):
    """Each token's place in its row, over the rows of a trajectory in the order of time."""
    seen = []

    class Places(RolloutCallback):
        def extra_columns(self, output, trajectories, rows):
            mask = output["completion_mask"]
            return {"place": (torch.arange(mask.shape[1]) + 1.0).expand(mask.shape) + 1000 * rows.index.unsqueeze(1)}

    def look(inputs):
        seen.append(inputs)
        return Credit(advantages=inputs.columns["place"])

    options = {"advantage_estimator": look, "context.policy": again, "script": three_turns}
    trainer = make_trainer(tmp_path, callbacks=[Places()], **options)
    batch = scored_batch(trainer)
    [inputs] = seen
    for index, item in enumerate(trainer.last_trajectories):
        places = [place + 1.0 + 1000 * index for row in item.rows for place in range(len(row.completion_ids))]
        assert len(item.rows) > 1
        assert inputs.columns["place"][index].tolist()[: len(places)] == places
        assert not inputs.columns["place"][index, len(places) :].any()
    mask = batch["tool_mask"].bool() & batch["completion_mask"].bool()
    torch.testing.assert_close(batch["advantages"][mask], batch["place"][mask])


@pytest.mark.parametrize(
    "options", [{}, {"update_layout": "shared"}, {"update_layout": "packed", "max_tokens_per_micro_batch": 9}], ids=str
)
def test_rows_with_other_prompts_are_scored(tmp_path, options):
    trainer = make_trainer(tmp_path, env=AddEnv, **options)
    trainer.model.train()
    prompts, completions = [[5, 6, 7], [9], [], [11, 12]], [[1, 2], [3, 4, 5, 6], [7, 8], []]
    found = trainer.score_tokens(prompts, completions)
    assert found.shape == (4, 4) and not found.requires_grad
    for row, prompt, completion in zip(found, prompts, completions, strict=True):
        ids = torch.tensor([[*(prompt or [trainer._tokenizer.pad_token_id]), *completion]])
        logits = trainer.model(input_ids=ids).logits[0, :-1]
        want = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0][ids.shape[1] - 1 - len(completion) :]
        torch.testing.assert_close(row[: len(completion)], want.detach(), rtol=1e-4, atol=1e-5)
        assert not row[len(completion) :].any()
    assert trainer.score_tokens([], []).shape == (0, 1)


class Silent(RolloutCallback):
    def extra_tokens(self, inputs):
        return torch.zeros_like(inputs["completion_mask"]).bool()


class Wrong(RolloutCallback):
    def __init__(self, tokens):
        self.tokens = tokens

    def extra_tokens(self, inputs):
        return self.tokens

    def extra_loss(self, inputs, log_probs, mask):
        return log_probs.sum()


class Clash(RolloutCallback):
    def __init__(self, **columns):
        self.columns = columns

    def extra_columns(self, output, trajectories, rows):
        return self.columns


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Silent(), "Silent.extra_tokens names tokens that no loss reads"),
        (Wrong(torch.ones(2, 3)), r"Wrong.extra_tokens returned a torch.float32 of shape \(2, 3\)"),
        (Wrong(7), "Wrong.extra_tokens returned 7. Return a bool tensor of shape"),
        (Clash(prompt_ids=torch.zeros(8)), "'prompt_ids' is an entry of TRL's batch already"),
        (Clash(advantages=torch.zeros(8)), "'advantages' is an entry of TRL's batch already. Choose another name"),
        (Clash(**{"extra_tokens/cols": torch.zeros(8)}), "'extra_tokens/cols' is an entry of TRL's batch already"),
        (Clash(mine=torch.zeros(3)), r"'mine' is \(3,\). Return tensors of shape \(8, "),
        (Clash(mine=[1.0]), "'mine' is list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, callback, message):
    trainer = make_trainer(tmp_path, callbacks=[callback])
    with pytest.raises(ValueError, match=message):
        scored_batch(trainer)


class Bare(RolloutCallback):
    def extra_columns(self, output, trajectories, rows):
        return [1.0]


def test_what_is_no_mapping_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"Bare.extra_columns returned \[1.0\]. Return a dict of names and tensors"):
        scored_batch(make_trainer(tmp_path, callbacks=[Bare()]))


def test_ranks_that_return_other_columns_are_told(tmp_path, monkeypatch):
    """They would wait for each other where columns are gathered."""
    trainer = make_trainer(tmp_path, callbacks=[WorldModel()])
    monkeypatch.setattr(policy_loss, "gather_object", lambda items: [*items, {}])
    with pytest.raises(ValueError, match=r"WorldModel.extra_columns returned different columns on different ranks"):
        scored_batch(trainer)


def test_columns_are_plain_numbers_that_are_0_behind_a_row(tmp_path):
    class Odd(RolloutCallback):
        def extra_columns(self, output, trajectories, rows):
            mask = output["completion_mask"]
            return {"flag": mask == mask, "nan": torch.full(mask.shape, torch.nan).requires_grad_()}

    batch = scored_batch(make_trainer(tmp_path, callbacks=[Odd()]))
    valid = batch["completion_mask"].bool()
    assert torch.equal(batch["flag"], valid) and not batch["nan"].requires_grad
    assert not valid.all() and torch.equal(batch["nan"].isnan(), valid)


def test_two_terms_of_one_name_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[Wrong(None), Wrong(None)])
    with pytest.raises(ValueError, match="two have a loss term of the name 'Wrong'"):
        scored_batch(trainer)


def test_a_loss_term_may_bring_its_tokens(tmp_path):
    class Odd:
        def extra_tokens(self, inputs):
            return inputs["completion_mask"].bool() & (torch.arange(inputs["completion_ids"].shape[1]) % 2 == 1)

        def __call__(self, inputs, log_probs, mask):
            assert not log_probs[:, ::2].any() and mask[:, 1].all()
            return -log_probs.sum()

    trainer = make_trainer(tmp_path, loss_term=Odd())
    trainer.train()
    assert trainer.state.log_history[0]["loss_term"] > 0


def test_no_tokens_at_all_is_a_term_of_nothing(tmp_path):
    trainer, plain = make_trainer(tmp_path, callbacks=[Wrong(None)]), make_trainer(tmp_path)
    batch = [scored_batch(item) for item in (plain, trainer)][1]
    torch.testing.assert_close(loss_and_gradients(trainer, batch)[1], loss_and_gradients(plain, batch)[1])


class Asking(WorldModel):
    """Has other rows scored, in the middle of the loss."""

    def extra_loss(self, inputs, log_probs, mask):
        self.trainer.score_tokens([[5, 6]] * len(mask), inputs["completion_ids"][:, :3].tolist())
        return super().extra_loss(inputs, log_probs, mask)


class Later(WorldModel):
    name = "later"
    extra_columns = RolloutCallback.extra_columns


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_term_may_have_rows_scored(tmp_path, layout):
    def gradients(first):
        trainer = make_trainer(tmp_path, callbacks=[first, Later()], update_layout=layout)
        found = step_gradients(trainer)[0]
        return found, trainer._metrics["train"]["later"]

    (found, later), (want, expected) = gradients(Asking()), gradients(WorldModel())
    assert later == expected
    torch.testing.assert_close(found, want)


class Faulty(RolloutCallback):
    """One of its methods has a bug."""

    name = "faulty"
    fails_in = ""

    def _run(self, event, answer):
        if event == self.fails_in:
            raise KeyError("city")
        return answer

    def attach(self, trainer):
        super().attach(trainer)
        self._run("attach", None)

    def after_rollout(self, batch):
        return self._run("after_rollout", False)

    def after_scores(self, batch):
        self._run("after_scores", None)

    def keep(self, batch):
        return self._run("keep", None)

    def choose_rows(self, rows, micro_step):
        return self._run("choose_rows", rows)

    def extra_columns(self, output, trajectories, rows):
        return self._run("extra_columns", None)

    def extra_tokens(self, inputs):
        return self._run("extra_tokens", None)

    def extra_loss(self, inputs, log_probs, mask):
        return self._run("extra_loss", None)

    def before_step(self, step):
        self._run("before_step", None)


EVENTS = [name for name in vars(Faulty) if name not in ("name", "fails_in", "_run") and not name.startswith("__")]


@pytest.mark.parametrize("event", EVENTS)
def test_a_bug_in_a_callback_is_named_with_its_event_and_line(event, tmp_path):
    callback = Faulty()
    callback.fails_in = event
    with pytest.raises(OwnObjectError, match=rf"Faulty.{event} raised KeyError: 'city' \(.*test_hooks.py, line \d+\)"):
        make_trainer(tmp_path, callbacks=[callback]).train()
