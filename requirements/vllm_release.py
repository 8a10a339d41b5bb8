"""A release of vLLM as sources: says what it lacks of what we use, without importing anything of it.

Modules are parsed, names are followed through imports and lazy tables, members through base classes. What cannot be
followed to its end (a class that is computed, say) counts as missing, so that a person looks.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_uses import Use

_HTTP = ("get", "post")


@dataclass(frozen=True)
class Found:
    """A definition and the module that holds it."""

    node: ast.AST
    module: str


class Release:
    """The sources of one release.

    Args:
        folder: holds the package `vllm`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lacks(self, uses: list[Use]) -> list[Use]:
        """Those uses for which there is nothing here."""
        return [use for use in uses if not self._has(use)]

    def _has(self, use: Use) -> bool:
        module, _, name = use.where.partition(":")
        match use.kind:
            case "name":
                return self.module(module) is not None if not name else self.find(module, name) is not None
            case "program":
                return '__name__ == "__main__"' in self.text(use.what)
            case "member":
                return use.what in self.members(self.find(module, name))
            case "call":
                return self._can_be_called(self.find(module, name), use)
            case "field":
                return use.what in self._fields(use.where)
            case "variable":
                return f'"{use.what}"' in self.text("vllm.envs")
            case "option":
                return self._has_option(use.what)
            case "route":
                method, route = use.what.split()
                return (method.lower(), route) in {found[:2] for found in self._routes}
            case "message":
                return any(words in self._server_text for words in use.what.split(" | "))
        raise ValueError(f"{use.kind!r}: unknown kind of use.")

    # ---------------------------------------------------------------- modules and names

    def path(self, module: str) -> Path | None:
        """The file of a module; None if there is none."""
        base = self.folder.joinpath(*module.split("."))
        return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)

    @functools.cache  # noqa: B019 - one release for the life of the program
    def module(self, module: str) -> ast.Module | None:
        """The syntax tree of a module."""
        path = self.path(module)
        return None if path is None else ast.parse(path.read_text(encoding="utf-8"))

    def text(self, module: str) -> str:
        """The source of a module; "" if there is none."""
        path = self.path(module)
        return "" if path is None else path.read_text(encoding="utf-8")

    @functools.cache  # noqa: B019
    def find(self, module: str, name: str) -> Found | None:
        """The definition of a name, wherever it is imported from."""
        tree = self.module(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
                return Found(node, module)
            if isinstance(node, ast.Assign) and any(_is_name(target, name) for target in node.targets):
                return Found(node, module)
            if isinstance(node, ast.AnnAssign) and _is_name(node.target, name):
                return Found(node, module)
            if isinstance(node, ast.ImportFrom) and (alias := _imported(node, name)):
                origin = self._absolute(module, node)
                if alias == "*":
                    if found := self.find(origin, name):
                        return found
                    continue
                submodule = f"{origin}.{alias}"
                return self.find(origin, alias) or (Found(ast.Pass(), submodule) if self.path(submodule) else None)
            if isinstance(node, ast.Assign) and isinstance(
                node.value, ast.Dict
            ):  # names that are loaded when asked for
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    if _is_text(key, name) and isinstance(value, ast.Constant) and ":" in str(value.value):
                        origin, _, real = str(value.value).partition(":")
                        return self.find(f"{module}{origin}" if origin.startswith(".") else origin, real)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        path = self.path(module)
        parts = module.split(".")
        is_package = path is not None and path.name == "__init__.py"
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *filter(None, [node.module])])

    # ---------------------------------------------------------------- classes and calls

    def members(self, found: Found | None) -> dict[str, ast.AST]:
        """Methods, fields and attributes of a class and its bases, the nearest definition of each."""
        result: dict[str, ast.AST] = {}
        for owner in self._with_bases(found):
            assert isinstance(owner.node, ast.ClassDef)
            for node in owner.node.body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    result.setdefault(node.name, node)
                    for inner in ast.walk(node):
                        for target in _targets(inner):
                            if isinstance(target, ast.Attribute) and _is_name(target.value, "self"):
                                result.setdefault(target.attr, inner)
                for target in _targets(node):
                    if isinstance(target, ast.Name):
                        result.setdefault(target.id, node)
        return result

    def _with_bases(self, found: Found | None) -> Iterator[Found]:
        if found is None or not isinstance(found.node, ast.ClassDef):
            if found is not None and isinstance(found.node, ast.Assign) and isinstance(found.node.value, ast.Name):
                yield from self._with_bases(self.find(found.module, found.node.value.id))
            return
        yield found
        for base in found.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name):
                yield from self._with_bases(self.find(found.module, base.id))

    def _can_be_called(self, found: Found | None, use: Use) -> bool:
        if found is None:
            return False
        node: ast.AST | None = found.node
        if use.what:
            node = self.members(found).get(use.what)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            return self._can_be_called(self.find(found.module, node.value.id), use)
        elif isinstance(node, ast.ClassDef):
            members = self.members(found)
            if "__init__" not in members:  # a dataclass, or one of pydantic or msgspec: its fields
                fields = {name for name, member in members.items() if isinstance(member, ast.AnnAssign)}
                return {name for name in use.arguments if not name.startswith("*")} <= fields
            node = members["__init__"]
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        return _takes(node, use.arguments, is_method=bool(use.what) or isinstance(found.node, ast.ClassDef))

    # ---------------------------------------------------------------- the server

    @functools.cached_property
    def _server_files(self) -> dict[Path, str]:
        folders = ("entrypoints", "renderers", "config", "v1/engine", "lora")
        paths = (path for name in folders for path in (self.folder / "vllm" / name).rglob("*.py"))
        return {path: path.read_text(encoding="utf-8") for path in paths}

    @functools.cached_property
    def _server_text(self) -> str:
        return "\n".join(re.sub(r'"\s*\n\s*f?"', "", text) for text in self._server_files.values())

    @functools.cached_property
    def _routes(self) -> list[tuple[str, str, Path]]:
        """Method, route and file."""
        result = []
        for path, text in self._server_files.items():
            if "router" not in text and "app." not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _HTTP:
                    first = node.args[0] if node.args else None
                    if isinstance(first, ast.Constant) and str(first.value).startswith("/"):
                        result.append((node.func.attr, str(first.value), path))
        return result

    def _fields(self, where: str) -> set[str]:
        if not where.startswith("route:"):
            return set(self.members(self.find(*where.split(":"))))
        route = where.removeprefix("route:")
        trees = [ast.parse(self._server_files[path]) for _, found, path in self._routes if found == route]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
        return texts | {node.arg for node in nodes if isinstance(node, ast.arg)}

    def _has_option(self, option: str) -> bool:
        if f'"{option}"' in self.text("vllm.engine.arg_utils") + self._server_text:
            return True
        name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
        return name in self._option_fields

    @functools.cached_property
    def _option_fields(self) -> set[str]:
        fields = set(self.members(self.find("vllm.engine.arg_utils", "AsyncEngineArgs")))
        for path in self._server_files:
            if path.name == "cli_args.py":
                module = ".".join(path.relative_to(self.folder).with_suffix("").parts)
                for name in ("FrontendArgs", "BaseFrontendArgs"):
                    fields |= set(self.members(self.find(module, name)))
        return fields


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module, those under `if` and `try` included; a real definition before an import for type checkers."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _statements(node.body)
            yield from _statements(node.orelse)


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            item for target in node.targets for item in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_text(node: ast.expr | None, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def _imported(node: ast.ImportFrom, name: str) -> str | None:
    """What the imported thing is called at home; "*" for all that is there."""
    return next((alias.name for alias in node.names if (alias.asname or alias.name) in (name, "*")), None)


def _takes(function: ast.FunctionDef | ast.AsyncFunctionDef, arguments: tuple[str, ...], *, is_method: bool) -> bool:
    """Whether a call with these arguments fits the signature."""
    spec = function.args
    is_static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in function.decorator_list)
    positional = [item.arg for item in (*spec.posonlyargs, *spec.args)][1 if is_method and not is_static else 0 :]
    given = next((int(item[1:]) for item in arguments if item.startswith("*")), 0)
    keywords = {item for item in arguments if not item.startswith("*")}
    if given > len(positional) and spec.vararg is None:
        return False
    known = {*positional[given:], *(item.arg for item in spec.kwonlyargs)}
    if keywords - known and spec.kwarg is None:
        return False
    without_default = positional[: len(positional) - len(spec.defaults)] if spec.defaults else positional
    needed = {
        *without_default[given:],
        *(a.arg for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is None),
    }
    return needed <= keywords
