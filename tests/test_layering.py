"""Six laws about src/, read from the source without importing it; each lists every violation.

1. Every module has a place in the data flow, and imports nothing from a later place. The step imports no feature:
   trainers load them by name from the table in `features/__init__.py`.
2. There are no circles of imports: between files, and between packages, imports inside functions included.
3. Only `trainers` (and `chat`, inside functions) imports TRL; light packages load nothing heavy; optional packages
   are imported inside functions.
4. No file is longer than 700 lines (files are split by collaborator, never by length), and no function longer than a
   screen.
5. Types say something: the number of parameters annotated as `Any` only goes down.
6. One word per thing: no two classes have one name. Refusals are declared, so that few lines raise.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src" / "agent_r1_trl"

# From the first step of the data flow to the last. A module may import from its own set and from those before it.
ORDER = [
    {
        "trajectory",
        "tool_results",
        "kept_ids",
        "objects",
        "closeness",
        "patterns",
        "settings",
        "safe_text",
        "errors",
        "features",
        "display",
    },
    {"tools", "display"},
    {"environments", "rewards"},
    {"chat"},
    {"generation"},
    {"rollout"},
    {"advantages"},
    {"update", "critic"},
    {"trainers", "recording"},
    {
        "features.sampling",
        "features.echo_trap",
        "features.reliability",
        "features.journal",
        "features.progress",
        "features.sandbox",
        "features.games",
        "features.search",
        "features.hub",
        "features.doors",
        "features.inspector",
        "features.distillation",
    },
    {"evaluation"},
    {"features.doctor", "features.serve"},
    {"cli"},
    {"testing"},  # for users' tests: nothing imports it
]
PLACE_OF = {module: place for place, modules in enumerate(ORDER) for module in modules}

# `Trajectory.show` and the trainers' store reach up to the recorder, inside functions. That closes no circle, because
# the recorder reads nothing but trajectories (`recording/explain.py` stands by itself).
ALLOWED_UPWARDS = {("trajectory", "recording")}

LIGHT = {
    "trajectory",
    "tool_results",
    "closeness",
    "kept_ids",
    "objects",
    "patterns",
    "safe_text",
    "features",
    "features.sandbox",
    "features.games",
    "features.search",
    "tools",
    "environments",
    "rewards",
}
HEAVY = {"torch", "transformers", "trl", "vllm", "accelerate", "datasets", "peft", "deepspeed", "numpy", "pandas"}
OPTIONAL = {
    "vllm",
    "deepspeed",
    "pyarrow",
    "gguf",
    "sandlock",
    "pydantic_monty",
    "gymnasium",
    "textarena",
    "reasoning_gym",
    "openai",
    "mcp",
    "verifiers",
}

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 50
"""Without signature and docstring."""


# -------------------------------------------------------------------- reading


def dotted_name(path: Path) -> str:
    """agent_r1_trl.tools.search for tools/search.py, agent_r1_trl.tools for tools/__init__.py."""
    return ".".join(("agent_r1_trl", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")


FILES = {dotted_name(path): path for path in sorted(SRC.rglob("*.py"))}


def top_module(name: str) -> str:
    """`tools` for agent_r1_trl.tools.search, `features.games` for each of its modules; "" for the root.

    The commands that a feature brings belong to `cli`.
    """
    _, *parts = [*name.split("."), ""]
    if is_command(name):
        return "cli"
    return ".".join(parts[: 2 if parts[0] == "features" else 1]).removesuffix(".")


def is_command(name: str) -> bool:
    """`features/serve/chat_command.py`, and what such files share: `command_arguments.py`."""
    _, *parts = [*name.split("."), ""]
    is_one = any(part.endswith("_command") or part.startswith("command_") for part in parts)
    return parts[0] == "features" and is_one


def imported_names(tree: ast.AST, *, package: str, lazy: bool) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports, and the lines; with `lazy=False` only those that importing the file runs.

    `from a import b` gives `a.b` if that is a module of ours or if `a` is the root, else `a`.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            for name in (f"{base}.{alias.name}" for alias in node.names):
                yield (name if name in FILES or base == "agent_r1_trl" else base), node.lineno
        yield from imported_names(node, package=package, lazy=lazy)


@functools.cache
def imports_of(path: Path, *, lazy: bool) -> list[tuple[str, int]]:
    package = dotted_name(path.parent / "__init__.py")
    return list(imported_names(ast.parse(path.read_text(encoding="utf-8")), package=package, lazy=lazy))


def list_of(violations: Iterable[tuple[Path, int, str]]) -> str:
    lines = sorted({f"{path.relative_to(SRC)}:{line} imports {name}" for path, line, name in violations})
    return "\n".join(["", *lines])


# -------------------------------------------------------------------- 1. the data flow


def test_every_module_has_a_place_and_every_place_its_module():
    modules = {top_module(name) for name in FILES} - {""}
    assert modules == set(PLACE_OF), "ORDER names what src/ does not hold, or leaves out what it holds"


def test_nothing_imports_against_the_data_flow():
    wrong = []
    for importer, path in FILES.items():
        module, eager = top_module(importer), imports_of(path, lazy=False)
        for name, line in imports_of(path, lazy=True) if module else []:
            target = top_module(name) if name in FILES else ""
            is_upwards = bool(target) and PLACE_OF.get(target, 99) > PLACE_OF.get(module, 99)
            if is_upwards and ((module, target) not in ALLOWED_UPWARDS or (name, line) in eager):
                wrong.append((path, line, name))
    assert not wrong, list_of(wrong)


def test_nothing_inside_imports_from_the_packages_front_page():
    """`from agent_r1_trl import tool` would hide who depends on whom."""
    shown = {"agent_r1_trl", *(f"agent_r1_trl.{name}" for name in exported_names())}
    wrong = [
        (path, line, name) for path in FILES.values() for name, line in imports_of(path, lazy=True) if name in shown
    ]
    assert not wrong, list_of(wrong)


def exported_names() -> set[str]:
    for node in ast.parse((SRC / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value)) - {"__version__"}
    raise AssertionError("agent_r1_trl/__init__.py has no __all__")


def test_the_recorder_reads_nothing_but_trajectories():
    """Nor does it know what explains the advantages in a record, by the estimators that gave them."""
    explain = "agent_r1_trl.recording.explain"
    wrong = [
        (path, line, name)
        for importer, path in FILES.items()
        for name, line in imports_of(path, lazy=True)
        if top_module(importer) == "recording" and importer != explain
        if name in FILES and (name == explain or top_module(name) not in ("recording", "trajectory", "safe_text"))
    ]
    assert not wrong, list_of(wrong)


# -------------------------------------------------------------------- 2. circles


def is_inside(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def file_graph() -> dict[str, set[str]]:
    """Module -> the modules that it imports, at its top or inside functions, by statement or by their whole name."""
    return {
        name: {other for other, _ in [*imports_of(path, lazy=True), *named_modules(path)] if other in FILES} - {name}
        for name, path in FILES.items()
    }


def named_modules(path: Path) -> list[tuple[str, int]]:
    """The modules that a file gives to `import_module`, and the lines."""
    return [
        (node.args[0].value, node.lineno)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module"
        if node.args and isinstance(node.args[0], ast.Constant)
    ]


def package_graph() -> dict[str, set[str]]:
    """The same between folders. A package and the packages inside it may know each other."""
    folder_of = {name: dotted_name(path.parent / "__init__.py") for name, path in FILES.items()}
    folder_of |= {name: "agent_r1_trl.cli" for name in FILES if is_command(name)}
    graph: dict[str, set[str]] = {folder: set() for folder in folder_of.values()}
    for name, imported in file_graph().items():
        own = folder_of[name]
        graph[own] |= {
            other
            for other in map(folder_of.__getitem__, imported)
            if not is_inside(own, other) and not is_inside(other, own)
        }
    return graph


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Every set of nodes that can all reach each other."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            waiting += (new := graph.get(waiting.pop(), set()) - seen)
            seen |= new
        reach[start] = seen
    found = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in graph if a in reach[a]}
    return [" <-> ".join(sorted(nodes)) for nodes in found]


ALLOWED_CIRCLES = {
    # `Trajectory.show()` prints itself: a line in a notebook, which should not need the printer's name. The printer
    # reads trajectories and nothing else (`ALLOWED_UPWARDS`).
    "agent_r1_trl.recording.terminal <-> agent_r1_trl.trajectory",
}


def test_no_files_import_each_other_in_a_circle():
    """Nor does a function import what imports its file: what two files share is a file that both import."""
    found = set(circles(file_graph()))
    assert found == ALLOWED_CIRCLES, "\n".join(["", *sorted(found ^ ALLOWED_CIRCLES)])


def test_no_packages_import_each_other_in_a_circle():
    found = circles(package_graph())
    assert not found, "\n".join(found)


def test_a_circle_is_found_and_a_diamond_is_none():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == ["a <-> b <-> c"]
    assert circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}}) == []


# -------------------------------------------------------------------- 3. TRL and what is heavy


def test_only_the_trainers_know_trl_and_the_chat_format_when_it_needs_a_template():
    wrong = []
    for importer, path in FILES.items():
        if top_module(importer) != "trainers":
            found = imports_of(path, lazy=top_module(importer) != "chat")
            wrong += [(path, line, name) for name, line in found if name.split(".")[0] == "trl"]
    wrong = [item for item in wrong if item[0].name != "kept_head.py"]  # stands in for a function of TRL's head
    assert not wrong, list_of(wrong)


def test_light_packages_import_nothing_heavy_and_optional_packages_wait_for_their_class():
    wrong = []
    for importer, path in FILES.items():
        forbidden = OPTIONAL | (HEAVY if top_module(importer) in {*LIGHT, ""} else set())
        found = imports_of(path, lazy=False)
        wrong += [(path, line, name) for name, line in found if name.split(".")[0] in forbidden]
    assert not wrong, list_of(wrong)


# -------------------------------------------------------------------- 4. sizes


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines after signature and docstring."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (function.end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def test_no_file_is_too_long_to_read_and_no_function_longer_than_a_screen():
    wrong = []
    for path in FILES.values():
        source, place = path.read_text(encoding="utf-8"), path.relative_to(SRC)
        if (length := len(source.splitlines())) > MAX_FILE_LINES:
            wrong.append(f"{place} has {length} lines, {MAX_FILE_LINES} are allowed")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > MAX_FUNCTION_LINES:
                wrong.append(
                    f"{place}:{node.lineno} {node.name}: {body_lines(node)} lines, {MAX_FUNCTION_LINES} allowed"
                )
    assert not wrong, "\n".join(["", *wrong])


# -------------------------------------------------------------------- 5. types

MAX_ANY_PARAMETERS = 144
"""Parameters whose annotation is `Any`, which says nothing: lower this when there are fewer."""


def any_parameters(tree: ast.AST) -> list[str]:
    """Names of the parameters in a file that are annotated as `Any`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id == "Any":
            found.append(node.arg)
    return found


def test_no_more_parameters_than_before_are_annotated_as_any():
    counts = {}
    for path in FILES.values():
        counts[path.relative_to(SRC)] = len(any_parameters(ast.parse(path.read_text(encoding="utf-8"))))
    most = sorted(counts.items(), key=lambda item: -item[1])[:10]
    total = sum(counts.values())
    assert total <= MAX_ANY_PARAMETERS, "\n".join([f"{total} parameters", *(f"{name}: {num}" for name, num in most)])


def test_a_parameter_annotated_as_any_is_counted():
    assert any_parameters(ast.parse("def f(a: Any, b: int, *c: Any, d: list[Any]) -> Any: ...")) == ["a", "c"]


# -------------------------------------------------------------------- 6. words, refusals

AVOIDED = re.compile(
    r'"""(Of|The same)\b|\bcures?\b|_cure\b|\bunder way\b|\bsigns? of life\b|'
    r"\bsettle(_\w+)?\b|\bcassette\b|\bsaid once\b|\broll[ _-]?back(?<!rollback)|\b\w*_passes(_of)?\b|"
    r"\brollout is cut\b|\brollouts\.cut\b|\brollouts?(\.| is | was | that )?play(s|ed)?\b|nothing_?played|"
    r"\b(trajector\w+|rows?|groups?|examples?) (is|are|was|were|be) played\b|servers?( .{,20}| %s is |_)left[ _]out\b|"
    r"\b(an?|the|its|earlier|no|empty) thoughts?\b",
    re.IGNORECASE,
)
"""Docstrings that begin without a subject, and words for which CONTRIBUTING.md has another one."""
MAX_RAISES = 12.8
"""`raise` per 1,000 lines of the files as they are."""


def test_no_two_classes_have_one_name():
    places: dict[str, list[str]] = {}
    for path in FILES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(SRC)))
    wrong = [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    assert not wrong, "\n".join(["", *wrong])


def test_words_of_the_glossary_are_used():
    wrong = [
        f"{path.relative_to(SRC)}:{number} says {found[0]!r}"
        for path in FILES.values()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (found := AVOIDED.search(line))
    ]
    assert not wrong, "\n".join(["", *wrong])


def test_refusals_are_declared_more_often_than_raised():
    sources = [path.read_text(encoding="utf-8") for path in FILES.values()]
    num = sum(isinstance(node, ast.Raise) for source in sources for node in ast.walk(ast.parse(source)))
    per_1000 = 1000 * num / sum(len(source.splitlines()) for source in sources)
    assert per_1000 <= MAX_RAISES, f"{per_1000:.2f} raises per 1,000 lines"


# -------------------------------------------------------------------- the reader itself


def test_the_reader_tells_eager_lazy_relative_and_type_checking_imports_apart():
    source = (
        "import torch.nn\nfrom . import base\nfrom ..tools import search, tool\n"
        "if TYPE_CHECKING:\n    import vllm\n"
        "try:\n    import numpy\nexcept ImportError:\n    pass\n"
        "class A:\n    import pandas\n    def f(self):\n        import trl\n"
    )
    names = {
        lazy: [name for name, _ in imported_names(ast.parse(source), package="agent_r1_trl.environments", lazy=lazy)]
        for lazy in (False, True)
    }
    environments, tools = "agent_r1_trl.environments", "agent_r1_trl.tools"
    assert names[False] == ["torch.nn", f"{environments}.base", f"{tools}.search", tools, "numpy", "pandas"]
    assert names[True] == [*names[False], "trl"]


def test_the_lines_of_a_function_are_counted_without_signature_and_docstring():
    source = 'def f(\n    x,\n):\n    """Two\n\n    lines."""\n    y = x\n\n    return y\n'
    assert body_lines(ast.parse(source).body[0]) == 3
