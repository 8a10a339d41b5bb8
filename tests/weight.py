"""Says what the package weighs: `python -m tests.weight [FOLDER]`, a table to read, with no limit in it.

Weight is the number of expressions and statements that a reader has to take in. Per line of code it tells dense
writing from plain: TRL has about 4.3, torchtitan 3.3.
"""

import ast
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from tests.test_layering import any_parameters

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Weight:
    """What one file or folder weighs."""

    files: int = 0
    lines: int = 0
    """With code: neither blank, nor a comment, nor a docstring."""
    nodes: int = 0
    """Expressions and statements, without docstrings."""
    any_parameters: int = 0

    def __add__(self, other: "Weight") -> "Weight":
        return Weight(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


def docstrings(tree: ast.AST) -> list[ast.Expr]:
    """Texts that stand alone: docstrings of modules, classes, functions and attributes."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def weigh(source: str) -> Weight:
    """Weigh the source of one file.

    >>> weigh('\"\"\"A module.\"\"\"\\n\\nx = 1  # one\\n')
    Weight(files=1, lines=1, nodes=3, any_parameters=0)
    """
    tree = ast.parse(source)
    texts = docstrings(tree)
    lines_of_text = set()
    for node in texts:
        lines_of_text.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    num_lines = 0
    for number, line in enumerate(source.splitlines(), 1):
        is_code = line.strip() and not line.strip().startswith("#")
        if is_code and number not in lines_of_text:
            num_lines += 1
    nodes = sum(isinstance(node, ast.expr | ast.stmt) for node in ast.walk(tree)) - 2 * len(texts)
    return Weight(files=1, lines=num_lines, nodes=nodes, any_parameters=len(any_parameters(tree)))


def weigh_folder(folder: Path) -> Weight:
    """Weigh all files below a folder."""
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    return sum((weigh(path.read_text(encoding="utf-8")) for path in files), Weight())


def main(folder: Path) -> None:
    """Print a line for each package of the folder, and one for the tests beside it."""
    parts = sorted(path for path in folder.iterdir() if path.name != "__pycache__" and path.suffix in ("", ".py"))
    print(f"{'':28}{'files':>7}{'lines':>8}{'weight':>9}{'a line':>8}{'Any':>6}")
    for name, weight in [
        *((path.name, weigh_folder(path)) for path in parts),
        (folder.name, weigh_folder(folder)),
        ("tests", weigh_folder(ROOT / "tests")),
    ]:
        per_line = weight.nodes / max(1, weight.lines)
        print(f"{name:28}{weight.files:7}{weight.lines:8,}{weight.nodes:9,}{per_line:8.2f}{weight.any_parameters:6}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src" / "agent_r1_trl")
