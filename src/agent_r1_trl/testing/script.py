"""Rollouts of a policy that says what is written down, through the real chat format, loop and environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from agent_r1_trl.chat.format import ChatFormat
from agent_r1_trl.environments.factory import resolve_env_factory
from agent_r1_trl.generation.base import Generator, TrajectorySlot, as_generator, current_slot
from agent_r1_trl.generation.scripted import Answer, ScriptedGenerator, ScriptedRequest, ScriptedTurn
from agent_r1_trl.rollout.limits import RolloutLimits
from agent_r1_trl.rollout.requests import RolloutRequest
from agent_r1_trl.rollout.runner import RolloutRunner
from agent_r1_trl.testing.messages import say
from agent_r1_trl.trajectory import Message, Trajectory

Said: TypeAlias = Message | str | Sequence[int] | ScriptedTurn | Exception
"""One turn: a message (`say`, `call`, `calls`); a text, as the model itself would write it, which may be a malformed
call; token ids, with or without the token that ends a turn; or an exception, which the sampler raises."""
EXAMPLE = {"prompt": [{"role": "user", "content": "What is 2 + 3?"}]}


class ScriptedPolicy(ScriptedGenerator):
    """A generator that says turns in the tokens of a chat format.

    Every trajectory has a count of its own, so a script also works where contexts are rewritten; the summary that
    a context policy asks for is a turn of the script too.

    Args:
        turns: what each trajectory says, one item per turn; or a function of the `ScriptedRequest`, which has the
            turn, the prompt's ids and the trajectory's seed.
        chat: the format in which the turns are written; None for that of Qwen3.
        delay_s: seconds that every turn takes.

    Raises:
        ValueError: `turns` is a single turn, or the chat template cannot write a message of the list, such as two
            calls in one turn with Llama's.
    """

    def __init__(
        self,
        turns: Sequence[Said] | Callable[[ScriptedRequest], Said],
        chat: ChatFormat | None = None,
        *,
        delay_s: float = 0.0,
    ) -> None:
        if isinstance(turns, (dict, str)):
            raise ValueError(f"turns={turns!r:.200} is one turn. Pass a list of turns: [{turns!r:.40}].")
        self.chat = chat or _default_chat()
        self.num_missing = 0
        """Number of requests for a turn after the last one of the script; each ends its trajectory."""
        self._said = turns if callable(turns) else [self._encode(turn) for turn in turns]
        self.turn_ids = [] if callable(self._said) else [_ids_of(turn) for turn in self._said]
        """(N,) ids of each turn of the list, as they are sampled if no limit cuts them; empty for a function."""
        self._counts: dict[int, tuple[TrajectorySlot, int]] = {}  # by identity; holding the slot keeps its id
        super().__init__(self._find_answer, stop_token_ids=self.chat.stop_token_ids, delay_s=delay_s)

    def _find_answer(self, request: ScriptedRequest) -> Answer:
        if callable(self._said):
            return self._encode(self._said(request))
        if request.turn < len(self._said):
            return self._said[request.turn]
        self.num_missing += 1
        return LookupError(f"the script has {len(self._said)} turns, and turn {request.turn} (from 0) was asked for")

    def _find_turn(self, prompt_ids: tuple[int, ...]) -> int:
        slot = current_slot.get()
        if slot is None:  # not from a rollout: the prompt must tell
            return super()._find_turn(prompt_ids)
        _, turn = self._counts.get(id(slot), (slot, 0))
        self._counts[id(slot)] = (slot, turn + 1)
        return turn

    def _encode(self, turn: Said) -> Answer:
        if isinstance(turn, dict):
            try:
                return self.chat.encode_reply(turn)
            except Exception as error:  # a template raises what it likes
                raise ValueError(
                    f"turns: the chat template cannot write {turn!r:.300}: {error} Say it in another way, or as text."
                ) from error
        if isinstance(turn, str):
            ids = self.chat.tokenizer(turn, add_special_tokens=False)["input_ids"]
            return [*ids, self.chat.encode_reply(say())[-1]]
        return turn


def _ids_of(answer: Answer) -> list[int]:
    """What is sampled; nothing where the sampler raises."""
    if isinstance(answer, Exception):
        return []
    return list(answer.token_ids if isinstance(answer, ScriptedTurn) else answer)


def roll_out(
    env: object,
    turns: Sequence[Said] | Callable[[ScriptedRequest], Said] | Generator,
    examples: Sequence[Mapping[str, Any]] = (EXAMPLE,),
    *,
    chat: ChatFormat | None = None,
    retry_failed: int = 0,
    reset_seed: int = 0,
    on_trajectory: Callable[[Trajectory], None] | None = None,
    **limits: object,
) -> list[Trajectory]:
    """Roll out one trajectory per example, all of which say the same turns unless a function tells them apart.

    As in training, faults of tools, environments and generators are states: look at `stop_reason` and `error`.

    Args:
        env: an environment class or a function that makes one, as the trainers take it.
        turns: what the policy says, see `ScriptedPolicy`; or a generator of your own, an object with `generate`.
        examples: B rows of a data set. Trajectory i has seed i, and the row's `id`, else i, as `example_id`.
        chat: the chat format (`ChatFormat(tokenizer)` for your model's); None: that of a scripted policy, else a tiny
            tokenizer with Qwen3's template.
        retry_failed: how often a trajectory that was lost for no fault of the policy is tried again.
        reset_seed: the seed of the initial state, the same for all.
        on_trajectory: called with each trajectory as it ends, from another thread.
        **limits: fields of `RolloutLimits`, such as `max_turns=2`.

    Returns:
        B trajectories, in the order of the examples.

    Raises:
        ValueError: the script is too short, no list, or cannot be written in the chat format; a limit is out of
            range; or `env` makes no environments.
        Exception: what the environment's author got wrong in a reward, as in training.

    Examples:
        >>> from agent_r1_trl.testing import AddEnv, call
        >>> (trajectory,) = roll_out(AddEnv, [call("add", a=2, b=3), "Five"])
        >>> trajectory.turns[0].observations[0]["content"], trajectory.final_text, trajectory.outcome_reward
        ('5', 'Five', 1.0)
    """
    if isinstance(turns, ScriptedPolicy):
        chat = chat or turns.chat
    chat = chat or _default_chat()
    generator = as_generator(turns) if hasattr(turns, "generate") else ScriptedPolicy(turns, chat)
    factory = resolve_env_factory(env)
    if factory is None:
        raise ValueError("env=None makes no environments. Pass the class, or a function that makes one.")
    if isinstance(examples, (dict, str)):
        raise ValueError(f"examples={examples!r:.200} is one row. Pass a list of rows, one for each trajectory.")
    requests = [
        RolloutRequest(example=dict(row), example_id=str(row.get("id", index)), seed=index, reset_seed=reset_seed)
        for index, row in enumerate(examples)
    ]
    runner = RolloutRunner(
        factory,
        generator,
        chat,
        RolloutLimits(**limits),  # type: ignore[arg-type]
        retry_failed=retry_failed,
        on_trajectory=on_trajectory,
    )
    try:
        trajectories = runner.run(requests)
    finally:
        runner.close()
    _check_script(generator, trajectories)
    return trajectories


def _check_script(generator: Generator, trajectories: Sequence[Trajectory]) -> None:
    """Refuse a script that ended before the environment did: the trajectory would look like an outage."""
    if not isinstance(generator, ScriptedPolicy) or not generator.num_missing:
        return
    longest = max(trajectories, key=lambda item: len(item.turns))
    num_turns, told = len(longest.turns), longest.messages[-1].get("content")
    raise ValueError(
        f"turns: the script ends after {num_turns} turn(s), and the environment goes on with {told!r:.300}. "
        f"Say one more turn, let the environment end there, or set max_turns={max(1, num_turns)}."
    )


def _default_chat() -> ChatFormat:
    from agent_r1_trl.testing.tokenizers import chat_of

    return chat_of()
