"""The logged values of a training as an image, where matplotlib is installed (the extra `plots`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agent_r1_trl.publishing.sections import is_headline
from agent_r1_trl.safe_text import shown

IMAGE = "training_curves.png"
MAX_PANELS = 9
_MORE = ("loss", "entropy", "grad_norm", "kl")
"""Shown after the headline metrics."""


def draw_curves(history: Iterable[Mapping[str, Any]], path: Path) -> bool:
    """Draw a panel per metric, training and evaluation in one.

    Args:
        history: entries of `trainer_state.json`, with `step`.
        path: of the image.

    Returns:
        Whether there is an image: there is none without matplotlib, or with fewer than two points.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for entry in history:
        for name, value in entry.items():
            plain = name.removeprefix("eval_")
            wanted = is_headline(name) or plain in _MORE
            if wanted and isinstance(value, int | float) and math.isfinite(value) and "step" in entry:
                panels.setdefault(plain, {}).setdefault(name, []).append((entry["step"], float(value)))
    panels = {name: lines for name, lines in panels.items() if any(len(points) > 1 for points in lines.values())}
    if not panels:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = sorted(panels, key=lambda name: (name in _MORE, name != "reward", name))[:MAX_PANELS]
    columns = min(3, len(names))
    num_rows = -(-len(names) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.6 * num_rows), layout="constrained")
    for place, name in enumerate(names, start=1):
        axes = figure.add_subplot(num_rows, columns, place)
        for line, points in sorted(panels[name].items()):
            axes.plot(*zip(*points, strict=True), label="evaluation" if line != name else "training", linewidth=1.2)
        axes.set_title(shown(name).replace("$", r"\$"), fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=7)
        if len(panels[name]) > 1:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True
