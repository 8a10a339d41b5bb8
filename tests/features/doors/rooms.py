"""An environment as somebody else would write it: registered when this module is imported, in text."""

import string

import gymnasium


class Rooms(gymnasium.Env):
    """A number is to be said; the hints are drawn as the episode goes on."""

    observation_space = gymnasium.spaces.Text(200, charset=string.printable)
    action_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = (options or {}).get("secret", int(self.np_random.integers(1000)))
        return f"The number ends with {self.secret % 10}.", {}

    def step(self, action):
        is_right = action == str(self.secret)
        return f"No. Hint {self.np_random.integers(10**9)}", float(is_right), is_right, False, {"is_success": is_right}


gymnasium.register("Rooms-v0", entry_point=Rooms, max_episode_steps=3)
