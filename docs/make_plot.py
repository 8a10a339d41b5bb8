"""The plot of the README: exact match of the quickstart's rollouts while it trains, one line for each run.

    for seed in 0 1; do for algo in grpo ppo; do
        agent-r1-trl train --config quickstart/$algo/cpu --seed $seed --output_dir outputs/plot/$algo-$seed
    done; done
    agent-r1-trl train --config quickstart/grpo/cpu --learning_rate 0 --output_dir outputs/plot/control-0
    python docs/make_plot.py outputs/plot docs/pictures/quickstart.svg

Reads `metrics.jsonl` of each run. A point is the rollout before an update: training questions, at temperature 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

COLOURS = {"GRPO": "#006ac2", "PPO": "#d55e00", "control": "#76808a"}
LABELS = {"control": "learning rate 0"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 46, 110, 34, 40


def curves(folder: Path) -> dict[str, list[list[float]]]:
    """Name -> for each of its runs, exact match by step."""
    found: dict[str, list[list[float]]] = {name: [] for name in COLOURS}
    for path in sorted(folder.glob("*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        name = path.parent.name.partition("-")[0]
        values = [line["env/em"] for line in lines if "env/em" in line]
        found[name if name == "control" else name.upper()].append(values)
    return found


def draw(found: dict[str, list[list[float]]]) -> str:
    """The plot as SVG."""
    num_steps = max(len(run) for runs in found.values() for run in runs)

    def place(step: float, share: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / (num_steps - 1)
        return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    title = "Exact match of the rollouts while the quickstart trains, two seeds each"
    parts.append(f'<text x="{LEFT}" y="18" font-weight="600" fill="#1a1d21">{title}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        (x, y), (end, _) = place(1, share), place(num_steps, share)
        parts.append(f'<path d="M{x} {y}H{end}" stroke="#d9dde2"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{share:g}</text>')
    for step in range(1, num_steps + 1):
        x, y = place(step, 0)
        parts.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{step}</text>')
    x, y = place((num_steps + 1) / 2, 0)
    parts.append(f'<text x="{x}" y="{y + 33}" text-anchor="middle">step of 128 trajectories</text>')
    ends: list[float] = []
    for name, runs in sorted(found.items(), key=lambda item: -max(run[-1] for run in item[1])):
        for run in runs:
            line = " ".join(f"{x},{y}" for x, y in (place(step, value) for step, value in enumerate(run, 1)))
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{COLOURS[name]}" stroke-width="2" opacity=".8"/>'
            )
        x, y = place(num_steps, sum(run[-1] for run in runs) / len(runs))
        y = max(y, ends[-1] + 15) if ends else y  # labels stand apart
        ends.append(y)
        label = LABELS.get(name, name)
        parts.append(f'<text x="{x + 8}" y="{y + 4}" font-weight="600" fill="{COLOURS[name]}">{label}</text>')
    font = 'font-family="system-ui, sans-serif" font-size="12" fill="#5b6570"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(curves(Path(sys.argv[1]))), encoding="utf-8")
