"""`Entries` names what stands in a micro-batch: the source uses nothing else, and a real one holds it."""

import ast
import functools
import inspect
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from trl import GRPOTrainer

from agent_r1_trl.trainers import MultiTurnGRPOTrainer, MultiTurnPPOTrainer
from agent_r1_trl.update import entries
from agent_r1_trl.update.entries import EXTRA_TOKENS, MICRO_BATCHES, OPEN_NAMES, RESERVED, STANDS_FOR, Entries
from agent_r1_trl.update.sampling_masks import SamplingMasks
from tests.test_layering import FILES
from tests.trainers.helpers import make_trainer, questions, scored_batch, step_gradients

ROOT = Path(__file__).resolve().parents[2]
NAMES = set(Entries.__annotations__)
CONSTANTS = {name: value for name, value in vars(entries).items() if name.isupper() and isinstance(value, str)}
HOLDERS = {"inputs", "output"}
"""Parameters of these names hold micro-batches where they are dicts, so they must say so."""

# -------------------------------------------------------------------- reading the source


@dataclass
class Use:
    """Where the source names an entry."""

    entry: str
    function: str
    kind: str
    """`write` or `read`."""


@dataclass
class Reader:
    """Finds the entries that a function names, in what its annotations call `Inputs`, one or a list of them."""

    function: str
    makers: set[str]
    """Names of functions that return `Inputs`, perhaps first of several things."""
    list_makers: set[str] = field(default_factory=set)
    """Those that return a list of them."""
    single: set[str] = field(default_factory=set)
    several: set[str] = field(default_factory=set)
    uses: list[Use] = field(default_factory=list)

    def is_one(self, node: ast.AST | None) -> bool:
        """Whether an expression is a micro-batch."""
        match node:
            case ast.Name(id=name):
                return name in self.single
            case ast.Call(func=ast.Name(id="dict"), args=[inner]):
                return self.is_one(inner)
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
                return name in self.makers
            case ast.Dict(keys=keys, values=values):
                return any(key is None and self.is_one(value) for key, value in zip(keys, values, strict=True))
            case ast.DictComp(
                generators=[ast.comprehension(iter=ast.Call(func=ast.Attribute(value=inner, attr="items")))]
            ):
                return self.is_one(inner)
            case ast.Subscript(value=inner):
                return self.is_list(inner)
            case ast.IfExp(body=body, orelse=orelse):
                return self.is_one(body) or self.is_one(orelse)
        return False

    def is_list(self, node: ast.AST) -> bool:
        """Whether an expression is a list of micro-batches."""
        match node:
            case ast.Name(id=name):
                return name in self.several
            case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[key, *_]):
                return self.is_one(inner) and self.key(key) == MICRO_BATCHES
            case ast.Subscript(value=inner, slice=ast.Slice()):
                return self.is_list(inner)
            case ast.Subscript(value=inner, slice=key):
                return self.is_one(inner) and self.key(key) == MICRO_BATCHES
            case ast.ListComp(elt=element):
                return self.is_one(element)
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
                return name in self.list_makers
            case ast.BoolOp(values=[first, *_]):
                return self.is_list(first)
            case ast.Attribute(attr="_buffered_inputs"):
                return True
        return False

    @staticmethod
    def key(node: ast.AST) -> str | None:
        """The entry that an expression names; None where it stands in a variable, or begins like a made name."""
        match node:
            case ast.Constant(value=str(name)):
                return name
            case ast.Name(id=name) if name in CONSTANTS:
                return CONSTANTS[name]
        return None

    def note(self, key: ast.AST | None, kind: str) -> None:
        if key is not None and (entry := self.key(key)) is not None:
            self.uses.append(Use(entry, self.function, kind))

    def learn(self, target: ast.AST, value: ast.AST | None, *, items: bool) -> None:
        """A variable holds what it is set to, or with `items` each of what it is drawn from."""
        match target, value:
            case ast.Name(id=name), _:
                if self.is_list(value) if items else self.is_one(value):
                    self.single.add(name)
                if not items and value is not None and self.is_list(value):
                    self.several.add(name)
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=values) if items:
                for one, drawn in zip(targets, values, strict=False):
                    self.learn(one, drawn, items=True)
            case ast.Tuple(elts=targets), ast.Tuple(elts=values) if not items:
                for one, given in zip(targets, values, strict=False):
                    self.learn(one, given, items=False)
            case ast.Tuple(elts=[first, *_]), ast.Call() if not items:
                self.learn(first, value, items=False)

    def declare(self, name: str, annotation: ast.AST | None) -> None:
        text = "" if annotation is None else ast.unparse(annotation)
        if text in ("Inputs", "Inputs | None"):
            self.single.add(name)
        if text == "list[Inputs]":
            self.several.add(name)

    def read(self, function: ast.FunctionDef) -> list[Use]:
        """Everything in the order of the source; twice, for variables that are set below their first use."""
        for argument in [*function.args.args, *function.args.kwonlyargs]:
            self.declare(argument.arg, argument.annotation)
        for _ in range(2):
            self.uses = []
            for node in ast.walk(function):
                self.visit(node, returned=ast.unparse(function.returns) if function.returns else "")
        return self.uses

    def visit(self, node: ast.AST, returned: str) -> None:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                self.declare(name, annotation)
                if isinstance(value, ast.Dict) and name in self.single:
                    self.note_all(value)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self.learn(target, value, items=False)
            case ast.For(target=target, iter=drawn) | ast.comprehension(target=target, iter=drawn):
                self.learn(target, drawn, items=True)
            case ast.Subscript(value=inner, slice=key, ctx=context) if self.is_one(inner):
                self.note(key, "read" if isinstance(context, ast.Load) else "write")
            case ast.Call(func=ast.Attribute(value=inner, attr="get" | "pop"), args=[key, *_]) if self.is_one(inner):
                self.note(key, "read")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="dict"), attr="get"), args=[inner, key]):
                if self.is_one(inner):
                    self.note(key, "read")
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[inner]) if self.is_one(inner):
                self.note(key, "read")
            case ast.AugAssign(target=target, value=ast.Dict() as given) if self.is_one(target):
                self.note_all(given)
            case ast.Dict() if self.is_one(node):
                self.note_all(node)
            case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Dict() as given) if self.is_one(left):
                self.note_all(given)
            case ast.Return(value=ast.Dict() as given) if returned in ("Inputs", "Entries"):
                self.note_all(given)
            case ast.ListComp(elt=ast.Dict() as given) if "list[Inputs]" in returned:
                self.note_all(given)

    def note_all(self, given: ast.Dict) -> None:
        for key in given.keys:
            self.note(key, "write")


def functions_of(tree: ast.AST, inside: str = "") -> list[tuple[str, ast.FunctionDef]]:
    """Functions with their names behind those of their classes; one inside another belongs to it."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((inside + node.name, node))
        elif isinstance(node, ast.ClassDef):
            found += functions_of(node, f"{node.name}.")
    return found


@functools.cache
def source_trees() -> dict[str, ast.Module]:
    paths = {name: path for name, path in FILES.items() if not name.startswith("agent_r1_trl.cli")}
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items()}


@functools.cache
def uses() -> list[Use]:
    """Every place in src/ that names an entry."""
    trees = [tree for name, tree in source_trees().items() if "_trl.update" in FILES[name].read_text(encoding="utf-8")]
    functions = [pair for tree in trees for pair in functions_of(tree)]
    returned = {function.name: ast.unparse(function.returns) for _, function in functions if function.returns}
    makers = {name for name, text in returned.items() if re.match(r"(tuple\[)?(Inputs|Entries)\b", text)}
    list_makers = {name for name, text in returned.items() if text == "list[Inputs]"}
    return [use for name, function in functions for use in Reader(name, makers, list_makers).read(function)]


def places(entry: str, kind: str) -> set[str]:
    return {use.function for use in uses() if use.entry == entry and use.kind == kind}


@functools.cache
def texts() -> dict[str, str]:
    """What `Entries` says of each entry, in one line."""
    (tree,) = [node for node in ast.parse(inspect.getsource(Entries)).body if isinstance(node, ast.ClassDef)]
    found = {}
    for before, node in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign):
            found[before.target.id] = " ".join(node.value.value.split())
    return found


def said(entry: str, word: str) -> set[str]:
    """The functions behind `Written by` or `Read by`."""
    (part,) = re.findall(rf"\b{word} by ([^.]*(?:\.\w+[^.]*)*)\.(?: |$)", texts()[entry])
    return set(re.findall(r"`([\w.]+)`", part)) | ({"TRL"} if "TRL" in part else set())


# -------------------------------------------------------------------- the source and the list


def test_nothing_but_the_entries_is_written_to_a_micro_batch_or_read_from_one():
    unknown = {f"{use.function} {use.kind}s {use.entry!r}" for use in uses() if use.entry not in NAMES}
    assert not unknown, "\n".join(["put these into update/entries.py:", *sorted(unknown)])


@pytest.mark.parametrize("entry", sorted(NAMES))
def test_an_entry_names_its_writers_and_some_of_its_readers(entry):
    written, read = places(entry, "write"), places(entry, "read")
    assert said(entry, "Written") == written, "all that write it"
    assert said(entry, "Read") - {"TRL"} <= read
    if "TRL" in said(entry, "Read"):
        assert f'"{entry}"' in inspect.getsource(GRPOTrainer._compute_loss)
    if not said(entry, "Read"):
        docs = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
        assert f'inputs["{entry}"]' in docs, "read by nobody, and no page shows how to"


def test_a_dict_of_a_batch_says_that_it_is_one():
    """Else what a function writes and reads would not be found."""
    wrong = []
    for module, tree in source_trees().items():
        for name, function in functions_of(tree):
            for argument in [*function.args.args, *function.args.kwonlyargs]:
                text = ast.unparse(argument.annotation) if argument.annotation else ""
                if argument.arg in HOLDERS and re.match(r"(dict|Mapping|Any)\b", text) and is_of_the_step(module):
                    wrong.append(f"{module}.{name}: {argument.arg}: {text}")
    assert not wrong, "\n".join(["annotate these as Inputs:", *wrong])


def is_of_the_step(module: str) -> bool:
    return module.split(".")[1] in ("advantages", "update", "trainers")


def test_constants_of_entries_are_their_names():
    made = {entries.EXTRA_TOKENS, entries.HAS_TERM, entries.COUNT_OF}
    assert set(CONSTANTS.values()) - made <= NAMES
    assert all(name.endswith(EXTRA_TOKENS) for name in OPEN_NAMES)
    assert NAMES < RESERVED


SOURCE = """
def deal(rows: Inputs, buffer: list[Inputs]) -> list[Inputs]:
    copied = dict(rows)
    copied["a"] = rows["b"] + rows.get(KEPT_IDS, 0)
    if "c" in copied:
        copied |= {"d": 1, **rows}
    for one, other in zip(buffer, rows["micro_batches"]):
        one["e"], x = other.pop("f"), {"never": 1}["never"]
    found, rest = exchange({**one, "g": 2})
    return [{"h": found["i"]} for number in range(2)]
"""


def test_the_reader_finds_what_is_written_and_read():
    (function,) = ast.parse(SOURCE).body
    found = Reader("deal", {"exchange"}).read(function)
    assert {use.entry for use in found if use.kind == "write"} == set("adegh")
    assert {use.entry for use in found if use.kind == "read"} == {*"bcfi", "kept_ids", "micro_batches"}


# -------------------------------------------------------------------- a real batch


class Term(MultiTurnGRPOTrainer):
    """A loss term over all tokens, and a column of rows."""

    def extra_columns(self, output, trajectories, rows):
        return {"mine": torch.zeros(len(rows))}

    def extra_tokens(self, inputs):
        return inputs["completion_mask"].bool()

    def extra_loss(self, inputs, log_probs, mask):
        return log_probs.sum()


SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_iterations": 2}
RUNS = {
    "grpo": {},
    "grpo, everything": {
        "trainer": Term, "loss_unit": "turn", "update_layout": "packed", "max_tokens_per_micro_batch": 600,
        "sampling.filter_groups": "top_fraction", "sampling.filter_value": 0.5, "sampling.filter_loss_scaling": True,
        "beta": 0.1, "top_k": 5,
    },
    "ppo": {"trainer": MultiTurnPPOTrainer, "critic": "head", "num_generations": 1},
}  # fmt: skip
ALWAYS = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "trajectory_row", "training_row",
    "is_first_row", "in_baseline", "trajectory_rewards", "tokens_in_other_rows", "old_per_token_logps", "advantages",
    "num_items_in_batch", "row_scale", "micro_batch_scale",
}  # fmt: skip
HELD = {
    "grpo": ALWAYS,
    "grpo, everything": ALWAYS | {
        "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio", "kept_ids", "turn_shares",
        "turn_scale", "has_signal", "kept_share", STANDS_FOR,
    },
    "ppo": ALWAYS | {"returns", "old_values", "value_mask", "num_value_items"},
}  # fmt: skip
EARLIER = {"is_kept"}
"""In the batch, and used up when it is dealt out."""
READ_AT_ONCE = {"effective_share"}
"""Taken out of the batch by the first who reads it (tests/features/reliability/test_age.py)."""
ELSEWHERE = {"token_advantages"}
"""In what a loss of the user's own is given (tests/trainers/test_own_loss.py)."""


def test_every_entry_is_held_by_one_of_the_batches_below():
    assert set().union(*HELD.values(), EARLIER, READ_AT_ONCE, ELSEWHERE, {MICRO_BATCHES}) == NAMES


def check_shape(name: str, value: object, sizes: dict[str, int]) -> None:
    """An entry has the shape and the type that `Entries` says; `sizes` are those of R, P and T."""
    if isinstance(value, float):
        assert typing.get_type_hints(Entries)[name] is float, name
        return
    shape, kind = re.match(r"\(([\w, ]*)\)(?: (\w+))?", texts()[name]).groups()
    wanted = tuple(sizes[dimension] for dimension in re.findall(r"\w", shape))
    assert tuple(value.shape) == wanted, f"{name} is {tuple(value.shape)}, and says ({shape}), {sizes}"
    if isinstance(value, SamplingMasks):
        assert typing.get_type_hints(Entries)[name] is SamplingMasks
    else:
        assert str(value.dtype) == f"torch.{kind}" or f", {str(value.dtype)[6:]}," in texts()[name], (
            name,
            value.dtype,
        )


@pytest.mark.parametrize("run", RUNS)
def test_a_micro_batch_holds_what_the_list_says_in_the_shapes_that_it_says(tmp_path, run, policy_path):
    trainer = make_trainer(tmp_path, model=policy_path, train_dataset=questions(16), **SMALL, **RUNS[run])
    if run == "grpo, everything":
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True  # what it asks of a batch
        whole = scored_batch(trainer)
        assert set(whole) >= EARLIER and "mine" in whole
        check_shape("is_kept", whole["is_kept"], {"R": len(whole["completion_ids"])})
        trainer._buffered_inputs = None
    steps = step_gradients(trainer)[1]
    has_parts = "max_tokens_per_micro_batch" in RUNS[run]
    assert all((set(step) == {MICRO_BATCHES}) == has_parts for step in steps)
    micro_batches = [one for step in steps for one in step.get(MICRO_BATCHES, [step])]
    assert micro_batches
    for inputs in micro_batches:
        made = {name for name in inputs if name.startswith(tuple(OPEN_NAMES))}
        assert {name.rpartition("/")[0] + "/" for name in made} == (set(OPEN_NAMES) if has_parts else set())
        assert set(inputs) - made - {"mine"} == HELD[run]
        num_rows, num_columns = inputs["completion_ids"].shape
        sizes = {"R": num_rows, "P": inputs["prompt_ids"].shape[1], "T": num_columns}
        for name in HELD[run]:
            check_shape(name, inputs[name], sizes)
