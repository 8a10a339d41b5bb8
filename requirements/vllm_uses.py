"""Everything of vLLM that the package touches, read from its source: names, arguments, options, routes, variables.

The list is collected anew from the syntax trees each time, so that a new use is checked without being written down.
What a syntax tree cannot say, which class an object of vLLM's has, stands in `RECEIVERS`; an entry that nothing uses
is an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "agent_r1_trl"
PAGE = SOURCE.parents[1] / "docs" / "serving.md"

RECEIVERS = {
    "generation/vllm/generator.py": {
        "self._engine": "vllm.v1.engine.llm_engine:LLMEngine",
        "self._engine.vllm_config": "vllm.config:VllmConfig",
        "self._engine.vllm_config.model_config": "vllm.config:ModelConfig",
        "self._engine.model_executor": "vllm.v1.executor.uniproc_executor:UniProcExecutor",
        "output": "vllm.outputs:RequestOutput",
        "completion": "vllm.outputs:CompletionOutput",
        "entry[token_id]": "vllm.logprobs:Logprob",
    },
    "generation/vllm/engine.py": {
        "engine": "vllm.v1.engine.llm_engine:LLMEngine",
        "engine.engine_core": "vllm.v1.engine.core_client:EngineCoreClient",
    },
    "generation/vllm/weight_transfer.py": {
        "communicator": "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator",
        "nccl": "vllm.distributed.device_communicators.pynccl_wrapper:NCCLLibrary",
        "NCCLLibrary()": "vllm.distributed.device_communicators.pynccl_wrapper:NCCLLibrary",
    },
    "generation/vllm/worker_extension.py": {
        "current_platform": "vllm.platforms.interface:Platform",
        "self.model_runner": "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
    },
}
"""File -> expression in it -> the class of vLLM that it has."""
WORKER = "vllm.v1.worker.worker_base:WorkerBase"
"""What `PolicyWorker` is mixed into; its annotations without a value are attributes of this class."""
FIELDS_OF = {
    "/v1/completions": "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
    "/v1/load_lora_adapter": "vllm.entrypoints.serve.lora.protocol:LoadLoRAAdapterRequest",
    "/v1/unload_lora_adapter": "vllm.entrypoints.serve.lora.protocol:UnloadLoRAAdapterRequest",
}
"""Route -> the class whose fields its body has; the body of any other is looked for in the route's file."""
_ENGINE_MAKERS = ("EngineArgs", "build_engine", "VLLMGenerator")
_VARIABLE = re.compile(r"\bVLLM_[A-Z0-9_]+\b")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_OURS = {"--config", "--servers"}  # --servers.urls, --servers.weight_transfer ... in docs/serving.md


@dataclass(frozen=True, order=True)
class Use:
    """One thing that a release must have.

    Attributes:
        kind: 'name', 'member', 'call', 'program', 'variable', 'option', 'route', 'field' or 'message'.
        where: "module:name" of vLLM, or "" where the thing itself says all.
        what: the member, variable, option, route (with its method), field or text.
        arguments: of a call: keywords, and `*2` for two arguments by position.
    """

    kind: str
    where: str
    what: str = ""
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = self.where if self.kind == "name" else self.where.rpartition(":")[2]
        name = ".".join(filter(None, (where.strip(":").replace(":", "."), self.what)))
        return f"{self.kind} {name}" + (f"({', '.join(self.arguments)})" if self.kind == "call" else "")


def collect_uses(source: Path = SOURCE, page: Path = PAGE) -> list[Use]:
    """Every use, sorted.

    Raises:
        ValueError: an entry of `RECEIVERS` fits nothing in its file, or has none.
    """
    if missing := [name for name in RECEIVERS if not (source / name).is_file()]:
        raise ValueError(f"RECEIVERS: {source} has no {', '.join(missing)}; correct it.")
    uses: set[Use] = set()
    for path in sorted(source.rglob("*.py")):
        if "recipes" in path.relative_to(source).parts:
            continue
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(source).as_posix()
        if "vllm" in text.lower():
            uses.update(_uses_of_file(name, ast.parse(text)))
    if page.is_file():
        text = page.read_text(encoding="utf-8")
        uses.update(Use("option", "", option) for option in _OPTION.findall(text) if _is_vllms(option))
        uses.update(Use("variable", "", variable) for variable in _VARIABLE.findall(text))
        uses.update(Use("program", "", program) for program in re.findall(r"-m (vllm(?:\.\w+){2,})", text))
    return sorted(uses)


def _uses_of_file(name: str, tree: ast.Module) -> Iterator[Use]:
    bound = dict(_imports(tree))
    yield from (Use("name", where) for where in bound.values())
    yield from _attributes(name, tree, bound)
    yield from _overrides(tree, bound)
    yield from _engine_options(tree)
    is_server = name.startswith("generation/vllm/")
    for text in _strings(tree):
        yield from (Use("variable", "", variable) for variable in _VARIABLE.findall(text))
        if is_server:
            yield from (Use("option", "", option) for option in _OPTION.findall(text) if _is_vllms(option))
    if is_server:
        yield from _routes(tree)
        yield from _tables(tree)
    if name == "generation/vllm/worker_extension.py":
        worker = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "PolicyWorker")
        declared = [node.target.id for node in worker.body if isinstance(node, ast.AnnAssign) and node.value is None]  # type: ignore[union-attr]
        yield from (Use("member", WORKER, attribute) for attribute in declared)


def _is_vllms(option: str) -> bool:
    """Ours are spelled with underscores."""
    return "_" not in option and option not in _OURS


def _strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local name (or dotted module) and "module:name"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "vllm":
            yield from ((alias.asname or alias.name, f"{node.module}:{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            found = (alias for alias in node.names if alias.name.split(".")[0] == "vllm")
            yield from ((alias.asname or alias.name, f"{alias.name}:") for alias in found)


# -------------------------------------------------------------------- objects


def _attributes(name: str, tree: ast.Module, bound: dict[str, str]) -> Iterator[Use]:
    """Members of imported names, of modules and of the receivers; calls with their arguments."""
    receivers = RECEIVERS.get(name, {})
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    unused = set(receivers)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in bound and id(node) in calls:
            yield Use("call", bound[node.id], "", _arguments(calls[id(node)]))
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        unused.discard(owner)
        where = receivers.get(owner) or bound.get(owner)
        if where is None or where.startswith("torch"):
            continue
        if where.endswith(":"):  # of a module
            yield Use("name", where + node.attr)
        else:
            yield Use("member", where, node.attr)
            if id(node) in calls:
                yield Use("call", where, node.attr, _arguments(calls[id(node)]))
    if unused:
        raise ValueError(f"RECEIVERS[{name!r}]: nothing there has the name {', '.join(sorted(unused))}; correct it.")


def _overrides(tree: ast.Module, bound: dict[str, str]) -> Iterator[Use]:
    """What a subclass of ours defines for the code of its base: methods, and attributes that it sets."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = (item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)))
        attributes = (item for item in ast.walk(node) if isinstance(item, ast.Attribute))
        names = {name for name in methods if not name.startswith("__")}
        names |= {a.attr for a in attributes if isinstance(a.ctx, ast.Store) and ast.unparse(a.value) == "self"}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in bound:
                yield from (Use("member", bound[base.id], name) for name in names)


def _arguments(call: ast.Call) -> tuple[str, ...]:
    positional = sum(not isinstance(argument, ast.Starred) for argument in call.args)
    keywords = sorted(keyword.arg for keyword in call.keywords if keyword.arg is not None)
    return (*([f"*{positional}"] if positional else []), *keywords)


def _engine_options(tree: ast.Module) -> Iterator[Use]:
    """Keys of the dicts, and keywords, in functions that make an engine."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        makes = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in _ENGINE_MAKERS]
        if not makes:
            continue
        keys = {keyword.arg for call in makes for keyword in call.keywords if keyword.arg is not None}
        keys |= {key for key in _dict_keys(function) if key.islower()}
        own = {"stop_token_ids", "step_timeout_s", "keeps_parts"}  # of VLLMGenerator itself
        for key in sorted(keys - own):
            yield Use("call", "vllm:EngineArgs", "", (key,))


def _dict_keys(node: ast.AST) -> Iterator[str]:
    for found in ast.walk(node):
        if isinstance(found, ast.Dict):
            for key in found.keys:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value


# -------------------------------------------------------------------- the server


def _routes(tree: ast.Module) -> Iterator[Use]:
    """`f"{url}/v1/completions"`, and what is sent there."""
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        keys = set(_dict_keys(function))
        if "max_tokens" in keys:
            yield from (Use("field", FIELDS_OF["/v1/completions"], key) for key in keys)
        for node in ast.walk(function):
            route = _route_of(node)
            if route is not None:
                yield Use("route", "", f"{_method(function, node)} {route}")
                if route != "/v1/completions":
                    yield from (Use("field", FIELDS_OF.get(route, f"route:{route}"), key) for key in keys)
    for text in _strings(tree):
        if match := re.fullmatch(r"\?(\w+)=\w+", text):
            yield Use("field", "route:/reset_prefix_cache", match[1])


def _route_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr) and len(node.values) >= 2 and isinstance(node.values[0], ast.FormattedValue):
        path = node.values[1]
        if isinstance(path, ast.Constant) and re.fullmatch(r"/[a-z_/0-9]+", str(path.value)):
            return str(path.value)
    return None


def _method(function: ast.AST, route: ast.AST) -> str:
    """What it is asked with: the argument before it; urllib's is GET."""
    for call in ast.walk(function):
        if isinstance(call, ast.Call):
            for before, argument in zip([None, *call.args], call.args, strict=False):
                if argument is route:
                    return str(before.value) if isinstance(before, ast.Constant) else "GET"
    return "POST"  # through a variable: completions


def _tables(tree: ast.Module) -> Iterator[Use]:
    """The words of error messages that we recognise."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        name = target.id if isinstance(target, ast.Name) else ""
        if name == "_TOO_LONG":
            yield Use("message", "", " | ".join(ast.literal_eval(node.value)))  # type: ignore[attr-defined]
    if any("already been loaded" in text for text in _strings(tree)):
        yield Use("message", "", "already been loaded")
