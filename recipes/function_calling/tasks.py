"""Tasks for `HomeEnv`, and how to solve them: what `make_data.py` and `make_model.py` share."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

SCHEMAS = json.loads(Path(__file__).with_name("functions.json").read_text(encoding="utf-8"))
ROOMS = SCHEMAS[0]["parameters"]["properties"]["room"]["enum"]
DEGREES = range(15, 25)

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""


def draw_task(rng: random.Random) -> tuple[dict[str, Any], list[list[Call]]]:
    """A row, and the calls that solve it, turn by turn.

    Half of the tasks name every change. In the others it depends on the lights, which are to be read first.
    """
    state = {room: {"light": rng.random() < 0.5, "heating": rng.choice(DEGREES)} for room in ROOMS}
    rooms = rng.sample(ROOMS, rng.randint(2, 3))
    goal = copy.deepcopy(state)
    if rng.random() < 0.5:
        changes, parts = [], []
        for room in rooms:
            if rng.random() < 0.5:
                on = not state[room]["light"]
                changes.append(("set_light", {"room": room, "on": on}))
                parts.append(f"turn the light {'on' if on else 'off'} in the {room}")
            else:
                degrees = rng.choice([value for value in DEGREES if value != state[room]["heating"]])
                changes.append(("set_heating", {"room": room, "degrees": degrees}))
                parts.append(f"heat the {room} to {degrees}")
        question, turns = f"Please {', '.join(parts)}.", [changes]
        kind = "direct"
    else:
        degrees = rng.choice(DEGREES)
        question = f"Heat to {degrees} where the light is on: {', '.join(rooms)}."
        lit = [room for room in rooms if state[room]["light"]]
        changes = [("set_heating", {"room": room, "degrees": degrees}) for room in lit]
        turns = [[("read_room", {"room": room}) for room in rooms], *([changes] if changes else [])]
        kind = "look first"
    for name, arguments in changes:
        if name == "set_light":
            goal[arguments["room"]]["light"] = arguments["on"]
        else:
            goal[arguments["room"]]["heating"] = arguments["degrees"]
    return {"question": question, "state": state, "goal": goal, "kind": kind}, turns
