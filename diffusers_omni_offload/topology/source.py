"""What the source of a module's `forward` says: the order in which it uses its attributes, and what it reads of blocks.

Nothing is run or changed. A class without readable source says nothing.
"""

from __future__ import annotations

import ast
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Chain = tuple[str, ...]
"""Attribute names, one of the other: `self.block.layers` is ("block", "layers")."""


@dataclass(frozen=True)
class ElementRead:
    """A use of an element of a container: `self.blocks[0].norm.emb(...)`.

    Attributes:
        container: the container, from `self` on.
        index: which element; None if it may be any.
        chain: what of the element.
        is_call: whether that is called.
    """

    container: Chain
    index: int | None
    chain: Chain
    is_call: bool


@dataclass(frozen=True)
class ForwardSource:
    """In the order of the source: the attributes of `self` that are mentioned, and the elements that are read."""

    mentions: tuple[Chain, ...] = ()
    reads: tuple[ElementRead, ...] = ()

    def position(self, container: Chain) -> int:
        """Where a container, or something on the way to it or in it, is first mentioned; past the end if it isn't."""
        for position, mention in enumerate(self.mentions):
            if mention == container[: len(mention)] or container == mention[: len(container)]:
                return position
        return len(self.mentions)


def forward_source(cls: type) -> ForwardSource:
    """What the source of `cls.forward` says, with that of the methods and properties of its own that it uses."""
    if cls not in _read:
        reader = _Reader(cls)
        reader.read(getattr(cls, "forward", None))
        _read[cls] = ForwardSource(tuple(reader.mentions), tuple(reader.reads))
    return _read[cls]


_read: weakref.WeakKeyDictionary[type, ForwardSource] = weakref.WeakKeyDictionary()

_Element = tuple[Chain, int | None]


class _Reader:
    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.mentions: list[Chain] = []
        self.reads: list[ElementRead] = []
        self._seen: set[Any] = set()

    def read(self, function: Any) -> None:
        tree = _parse(function)
        if tree is None or function in self._seen:
            return
        self._seen.add(function)
        owner = tree.args.args[0].arg if tree.args.args else "self"
        _Body(self, owner).visit(tree)

    def mention(self, chain: Chain) -> None:
        """`self.<chain>`. A method or a property of the class stands for what it does itself."""
        member = inspect.getattr_static(self.cls, chain[0], None)
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and not function.__module__.startswith("torch."):
            self.read(function)
        self.mentions.append(chain)


class _Body(ast.NodeVisitor):
    """Goes through a function in the order of its source, and knows which names stand for elements of containers."""

    def __init__(self, reader: _Reader, owner: str) -> None:
        self.reader, self.owner = reader, owner
        self.elements: dict[str, _Element] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, self._element(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind_each(node.target, node.iter)
        for statement in [*node.body, *node.orelse]:
            self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        self._use(node.func, is_call=True)
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node, is_call=False)

    def _use(self, node: ast.expr, is_call: bool) -> None:
        chain, root = _unwind(node)
        if isinstance(root, ast.Name) and root.id == self.owner and chain:
            self.reader.mention(chain)
            return
        element = self._element(root)
        if element is not None and chain:
            self.reader.reads.append(ElementRead(*element, chain, is_call))
        self.visit(root)

    def _element(self, node: ast.expr) -> _Element | None:
        """The element of a container of `self` that an expression stands for."""
        if isinstance(node, ast.Name):
            return self.elements.get(node.id)
        if not isinstance(node, ast.Subscript) or isinstance(node.slice, ast.Slice):
            return None
        chain, root = _unwind(node.value)
        if not chain or not isinstance(root, ast.Name) or root.id != self.owner:
            return None
        return chain, _constant(node.slice)

    def _bind(self, target: ast.expr, element: _Element | None) -> None:
        for part in target.elts if isinstance(target, ast.Tuple) else ():
            self._bind(part, None)
        if isinstance(target, ast.Name):
            self.elements.pop(target.id, None)
            if element is not None:
                self.elements[target.id] = element

    def _bind_each(self, target: ast.expr, iterated: ast.expr) -> None:
        """The names of a loop: over a container itself, or over what `enumerate`, `zip` and the like make of some."""
        self._bind(target, None)
        function = iterated.func if isinstance(iterated, ast.Call) else None
        name = function.id if isinstance(function, ast.Name) else None
        targets = target.elts if isinstance(target, ast.Tuple) else []
        if isinstance(iterated, ast.Call):
            if name == "enumerate" and len(targets) == 2:
                targets = targets[1:]
            elif name in ("reversed", "list", "tuple"):
                targets = [target]
            elif name != "zip":
                return
            for each, argument in zip(targets, iterated.args, strict=False):
                self._bind_each(each, argument)
            return
        while isinstance(iterated, ast.Subscript) and isinstance(iterated.slice, ast.Slice):
            iterated = iterated.value
        chain, root = _unwind(iterated)
        of_self = isinstance(root, ast.Name) and root.id == self.owner and chain
        self._bind(target, (chain, None) if of_self else None)


def _unwind(node: ast.expr) -> tuple[Chain, ast.expr]:
    """`a.b.c` as (("b", "c"), a)."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return tuple(reversed(names)), node


def _constant(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
    return value if isinstance(value, int) else None


def _parse(function: Any) -> ast.FunctionDef | None:
    try:
        source = inspect.getsource(function)
        # A method is indented; so it gets something to be indented in.
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, TypeError, SyntaxError):
        return None
    return next(_functions(tree), None)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
