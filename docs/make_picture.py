"""The picture of the README: two trajectories of a group and what pushed them apart, from a recorded run.

    make quickstart && python docs/make_picture.py outputs/quickstart/grpo docs/pictures/siblings.png

It takes, of the last step, the shortest group in which one trajectory alone succeeded, by one more turn. Needs
playwright, and a Chromium on PATH or CHROME naming it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from agent_r1_trl.cli import main as command
from agent_r1_trl.recording import Record, read_records
from agent_r1_trl.trajectory import Trajectory

SIZE = {"width": 1280, "height": 640}


def choose(run: Path) -> str:
    """The link to two siblings, `#step/group/generation/sibling`; the second one succeeded."""
    records = [record for record in read_records(run, split="train") if record.group is not None]
    groups: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record.step, record.group or 0), []).append(record)

    def ends(members: list[Record]) -> list[Trajectory]:
        ordered = sorted((record.trajectory for record in members), key=lambda item: item.total_reward)
        return [ordered[0], ordered[-1]]

    def merit(members: list[Record]) -> tuple[bool, int, int]:
        worst, best = ends(members)
        is_alone = sum(record.trajectory.is_solved for record in members) == 1
        size = max(len(record.trajectory.completion_ids) for record in members)
        return is_alone and len(best.turns) > len(worst.turns), members[0].step, -size

    (step, group), members = max(groups.items(), key=lambda item: merit(item[1]))
    worst, best = (item.generation for item in ends(members))
    return f"#{step}/{group}/{worst}/{best}"


def main(run: Path, picture: Path) -> None:
    """Write the picture."""
    program = os.environ.get("CHROME") or shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder, "inspector.html")
        if command(["view", str(run), "--html", str(page)]):
            sys.exit(1)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page(viewport=SIZE, color_scheme="light", device_scale_factor=1.5)
        tab.goto(f"{page.as_uri()}{choose(run)}")
        while not tab.evaluate("document.body.dataset.ready || ''"):
            time.sleep(0.05)
        time.sleep(0.5)
        picture.parent.mkdir(parents=True, exist_ok=True)
        box = tab.locator("#middle").bounding_box() or {"x": 0, "y": 0}
        clip = {"x": box["x"], "y": box["y"], "width": SIZE["width"] - box["x"], "height": SIZE["height"] - box["y"]}
        tab.screenshot(path=str(picture), clip=clip)  # without the list, so that it can be read on a page


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
