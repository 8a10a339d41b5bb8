"""TRL's own trainer beside ours, both with the same script for a policy: what a user's script sees must be equal."""

import threading

from trl import GRPOConfig, GRPOTrainer

from agent_r1_trl.chat import ChatFormat
from agent_r1_trl.generation import ScriptedGenerator
from agent_r1_trl.testing import make_policy, make_tokenizer
from agent_r1_trl.trainers import MultiTurnGRPOTrainer
from tests.trainers.helpers import questions, scored_batch


class ScriptedTRL(GRPOTrainer):
    """TRL's trainer whose policy says `script(row, turn)`, a message."""

    script = None
    turn = 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        chat = ChatFormat(make_tokenizer("qwen3"))
        ids = [chat.encode_reply(self.script(row, self.turn)) for row in range(len(prompt_ids))]
        self.turn += 1
        return [row[: self.max_completion_length] for row in ids], None


def scripted_rows(tokenizer, script):
    """A generator that says `script(row, turn)`; rows are numbered as their first turns are asked for."""
    chat = ChatFormat(tokenizer)
    lock = threading.Lock()
    row_of = {}

    def answer(request):
        with lock:
            known = [ids for ids in row_of if request.turn and request.prompt_ids[: len(ids)] == ids]
            row = row_of[max(known, key=len)] if known else len(row_of)
            ids = chat.encode_reply(script(row, request.turn))
            if not known:
                row_of[request.prompt_ids + tuple(ids)] = row
            return ids

    return ScriptedGenerator(answer, stop_token_ids=chat.stop_token_ids)


def plain_config(tmp_path, **options):
    defaults = {
        "output_dir": str(tmp_path), "bf16": False, "use_cpu": True, "report_to": [], "num_generations": 4,
        "per_device_train_batch_size": 4, "max_steps": 1, "max_completion_length": 300, "save_strategy": "no",
        "disable_tqdm": True, "logging_steps": 1, "shuffle_dataset": False,
    }  # fmt: skip
    return GRPOConfig(**(defaults | options))


def build_pair(tmp_path, script, *, options=None, **arguments):
    """(TRL's trainer, ours), given equal arguments. Every row must take the same number of turns."""
    pair = []
    for trainer_class in (ScriptedTRL, MultiTurnGRPOTrainer):
        tokenizer = make_tokenizer("qwen3")
        is_ours = trainer_class is MultiTurnGRPOTrainer
        given = {"train_dataset": questions(), **arguments}
        # TRL puts the environments' columns into the user's own list.
        given = {name: list(value) if isinstance(value, list) else value for name, value in given.items()}
        trainer = trainer_class(
            model=make_policy(tokenizer), args=plain_config(tmp_path, **(options or {})), processing_class=tokenizer,
            **given, **({"generator": scripted_rows(tokenizer, script)} if is_ours else {}),
        )  # fmt: skip
        trainer.script = script
        pair.append(trainer)
    return tuple(pair)


def roll_out_pair(tmp_path, script, **arguments):
    """(TRL's, ours): trainers after one generation batch each, which is kept as `trainer.batch`."""
    pair = build_pair(tmp_path, script, **arguments)
    for trainer in pair:
        trainer.batch = scored_batch(trainer)
    return pair
