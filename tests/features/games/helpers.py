"""Playing games by hand: what is said, and what comes back."""

import asyncio

from tests.environments.helpers import message

CLASSIC = "SFFF\nFHFH\nFFFH\nHFFG"
"""gymnasium's 4x4 map; Down Down Right Right Down Right leads to its goal."""
ROOM = "######\n#-@--#\n#-$--#\n#----#\n#-.--#\n######"
"""The box is two places above the target: Down Down solves it."""


def written(*actions):
    """A turn of text."""
    return message(content=f"<answer>{' || '.join(actions)}</answer>")


def called(*actions):
    """A turn with one call of the tool `play`."""
    return message(("play", {"actions": list(actions)}))


def begun(cls, row=None, reset_seed=1, dynamics_seed=1, **settings):
    env = cls(**settings)
    env.seed(reset_seed=reset_seed, dynamics_seed=dynamics_seed)
    env.reset(row or {})
    return env


def step(env, said):
    return asyncio.run(env.step(said))


def text_of(result):
    """What the model reads after a turn."""
    return "\n".join(item["content"] for item in result.observations)
