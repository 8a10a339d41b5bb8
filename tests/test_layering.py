"""The direction of dependencies between modules, read from the source (no module is imported).

Covered: who may import whom inside the package, lazily or not; who may import trl; what must not load at import time.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "agent_r1_trl"

# Low to high. Modules of one level may import each other (without a cycle between files, see below); nothing may
# import upwards.
LEVELS = [
    {"trajectory", "objects"},
    {"tools"},
    {"environments", "rewards"},
    {"chat"},
    {"generation"},
    {"rollout"},
    {"filtering", "advantages"},
    {"update", "critic"},
    {"echo_trap"},
    {"trainers"},
    {"evaluation", "recording", "publishing", "doctor", "memory"},
    {"cli"},
]
LEVEL_OF = {module: level for level, modules in enumerate(LEVELS) for module in modules}

# Who may reach up to the recorder, in the function that needs it: `Trajectory.show`, and the trainer's store. That is
# safe because the recorder itself reads nothing but trajectories (tested below).
CONVENIENCES = {("trajectory", "recording"), ("trainers", "recording")}

LIGHT = ("trajectory", "objects", "tools", "environments", "rewards")
HEAVY = {"torch", "transformers", "trl", "vllm", "accelerate", "datasets", "peft", "deepspeed", "numpy", "pandas"}
OPTIONAL = {"vllm", "deepspeed", "pyarrow", "gguf"}
# The chat format asks TRL for its training templates and response parsers, inside functions.
TRL_READERS = {"trainers", "chat/format.py"}


def module_files() -> list[Path]:
    return sorted(path for path in SRC.rglob("*.py") if path != SRC / "__init__.py")


def module_of(path: Path) -> str:
    """`tools` for tools/search.py, `losses` for losses.py."""
    return path.relative_to(SRC).with_suffix("").parts[0]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_names(tree: ast.AST, *, path: Path, lazy: bool) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports; with `lazy=False` only those that run when the file itself is imported."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ("agent_r1_trl", *path.relative_to(SRC).parts[: -node.level])
                base = ".".join([*parents, base]).rstrip(".")
            if base == "agent_r1_trl":
                yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield base, node.lineno
        yield from imported_names(node, path=path, lazy=lazy)


def imports_of(path: Path, *, lazy: bool) -> list[tuple[str, int]]:
    return list(imported_names(ast.parse(path.read_text(encoding="utf-8")), path=path, lazy=lazy))


def test_every_module_has_a_place_in_the_order():
    unplaced = sorted({module_of(path) for path in module_files()} - set(LEVEL_OF))
    assert not unplaced, f"{unplaced} stand in no level: add them to LEVELS where the data flow puts them."


@pytest.mark.parametrize("path", module_files(), ids=lambda path: str(path.relative_to(SRC)))
def test_nothing_imports_against_the_data_flow(path):
    importer = module_of(path)
    eager = {name for name, _ in imports_of(path, lazy=False)}
    wrong = []
    for name, line in imports_of(path, lazy=True):
        parts = name.split(".")
        if parts[0] != "agent_r1_trl" or len(parts) == 1 or parts[1] == "__version__":
            continue
        if (importer, parts[1]) in CONVENIENCES and name not in eager:
            continue
        if LEVEL_OF.get(parts[1], len(LEVELS)) > LEVEL_OF[importer]:
            wrong.append(f"line {line}: {name}")
    assert not wrong, f"{path.relative_to(SRC)} imports from a later step of the data flow: {wrong}"


def test_the_recorder_reads_nothing_but_trajectories():
    own = {"agent_r1_trl.recording", "agent_r1_trl.trajectory"}
    for path in (SRC / "recording").rglob("*.py"):
        names = [name for name, _ in imports_of(path, lazy=True) if name.startswith("agent_r1_trl.")]
        assert {".".join(name.split(".")[:2]) for name in names} <= own, f"{path.name} imports {names}"


@pytest.mark.parametrize("path", module_files(), ids=lambda path: str(path.relative_to(SRC)))
def test_no_module_imports_the_lazy_package_root(path):
    """`from agent_r1_trl import tool` inside the package hides who depends on whom."""
    exported = {"agent_r1_trl", *(f"agent_r1_trl.{name}" for name in root_exports())}
    found = [f"line {line}: {name}" for name, line in imports_of(path, lazy=True) if name in exported]
    assert not found, f"{path.relative_to(SRC)}: import from the defining module instead: {found}"


def root_exports() -> set[str]:
    tree = ast.parse((SRC / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value)) - {"__version__"}
    raise AssertionError("agent_r1_trl/__init__.py has no __all__")


@pytest.mark.parametrize("path", module_files(), ids=lambda path: str(path.relative_to(SRC)))
def test_only_the_trainers_know_trl(path):
    place = str(path.relative_to(SRC))
    eager = {name.split(".")[0] for name, _ in imports_of(path, lazy=False)}
    anywhere = {name.split(".")[0] for name, _ in imports_of(path, lazy=True)}
    if module_of(path) == "trainers":
        return
    assert "trl" not in eager, f"{place} imports trl when it is imported."
    assert "trl" not in anywhere or place in TRL_READERS, f"{place} imports trl; only trainers/ may."


@pytest.mark.parametrize("path", module_files(), ids=lambda path: str(path.relative_to(SRC)))
def test_light_modules_import_nothing_heavy_and_optional_packages_wait_for_their_class(path):
    eager = {name.split(".")[0] for name, _ in imports_of(path, lazy=False)}
    forbidden = OPTIONAL | (HEAVY if module_of(path) in LIGHT else set())
    assert not eager & forbidden, f"{path.relative_to(SRC)} imports {sorted(eager & forbidden)} at import time."


def test_no_two_files_import_each_other_at_import_time():
    graph: dict[str, set[str]] = {}
    for path in module_files():
        dotted = ".".join(("agent_r1_trl", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")
        graph[dotted] = {name for name, _ in imports_of(path, lazy=False) if name.startswith("agent_r1_trl.")} - {
            dotted
        }
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name in done:
            return
        for imported in graph.get(name, ()):
            visit(imported, [*trail, name])
        done.add(name)

    for name in graph:
        visit(name, [])


def test_the_reader_of_imports_sees_eager_lazy_relative_and_type_checking_ones(tmp_path):
    source = (
        "import torch.nn\nfrom . import base\nfrom ..tools import search\n"
        "if TYPE_CHECKING:\n    import vllm\n"
        "try:\n    import numpy\nexcept ImportError:\n    pass\n"
        "class A:\n    import pandas\n    def f(self):\n        import trl\n"
    )
    path = SRC / "environments" / "example.py"
    eager = [name for name, _ in imported_names(ast.parse(source), path=path, lazy=False)]
    lazy = [name for name, _ in imported_names(ast.parse(source), path=path, lazy=True)]
    assert eager == ["torch.nn", "agent_r1_trl.environments", "agent_r1_trl.tools", "numpy", "pandas"]
    assert lazy == [*eager, "trl"]
