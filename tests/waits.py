"""Lists every wait of the package from its syntax trees, and takes one of them out for a test."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import unwrap
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

#: Methods of streams, events and tensors that order work between streams, or between a stream and the host.
NAMES = frozenset({"record", "record_stream", "set_stream", "synchronize", "wait", "wait_event", "wait_stream"})

#: The last part of a bare name that may be entered (`with self._lock:`) although it is no stream.
NOT_STREAMS = ("scope", "shared", "lock")

#: Wraps the device's own methods, and so holds their definitions and nothing that decides when to wait.
_PLATFORM = "diffusers_omni_offload/platform.py"

#: Mutants are compiled as the package is, with annotations left unread.
_COMPILER_FLAGS = annotations.compiler_flag

_PACKAGES = ("diffusers_omni_offload", "diffusers_omni_offload.adapters")


@dataclass(frozen=True)
class Site:
    """One place that orders work.

    Attributes:
        file: path of the file, as it is imported.
        function: qualified name.
        nth: which such place of the function.
        source: the statement; of a `with` its first line.
    """

    file: str
    function: str
    nth: int
    source: str

    def __str__(self) -> str:
        return f"{self.file.removeprefix('diffusers_omni_offload/')}:{self.function}#{self.nth} `{self.source}`"


class CannotBeRemoved(Exception):
    """A wait that isn't a statement of its own, so that no mutant without it can be made."""


def list_sites() -> list[Site]:
    """Every wait of the package, `platform.py` aside.

    Raises:
        CannotBeRemoved: there is one that is part of a larger statement, or outside of any function.
    """
    return [site for file, tree in _trees() if file != _PLATFORM for site in sites_of(file, tree)]


def sites_of(file: str, tree: ast.Module) -> list[Site]:
    """The waits of one parsed file."""
    found = []
    for qualified_name, function in _functions(tree):
        statements = [node for node in _own_nodes(function) if isinstance(node, ast.stmt) and _is_site(node)]
        found += [Site(file, qualified_name, n, _source(node)) for n, node in enumerate(statements)]
    covered = sum(isinstance(node, ast.Attribute) and node.attr in NAMES for node in ast.walk(tree))
    removable = sum(not site.source.startswith("with ") for site in found)
    if covered != removable:
        texts = Counter(ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in NAMES)
        raise CannotBeRemoved(
            f"{file} names {', '.join(texts)} {covered} times, and only {removable} of them are statements of their "
            "own in a function. Write each wait as a statement, so that a test can take it out."
        )
    return found


def without(site: Site | None, patch: pytest.MonkeyPatch, *, function: tuple[str, str] | None = None) -> None:
    """Recompile the site's function without the wait and put it in the real one's place.

    Args:
        site: the wait to remove; None recompiles `function` (its file and qualified name) as it is.
        patch: undoes it.
        function: see `site`.
    """
    file, name = (site.file, site.function) if site is not None else function or ("", "")
    tree = dict(_trees())[file]
    definition = dict(_functions(tree))[name]
    if site is not None:
        target = [n for n in _own_nodes(definition) if isinstance(n, ast.stmt) and _is_site(n)][site.nth]
        assert _source(target) == site.source
        definition = _Remover(target).visit(definition)
    module = importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    owner: Any = module
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part)
    patch.setattr(owner, definition.name, _compile(definition, module))


def _compile(definition: ast.FunctionDef, module: ModuleType) -> Callable[..., Any]:
    body = ast.fix_missing_locations(ast.Module([definition], []))
    namespace: dict[str, Any] = {}
    exec(compile(body, f"<mutant of {module.__name__}>", "exec", flags=_COMPILER_FLAGS), vars(module), namespace)
    function = namespace[definition.name]
    assert not isinstance(function, FunctionType) or unwrap(function).__globals__ is vars(module)
    return function


class _Remover(ast.NodeTransformer):
    def __init__(self, target: ast.stmt) -> None:
        self._target = target

    def visit(self, node: ast.AST) -> Any:
        if node is not self._target:
            return self.generic_visit(node)
        return node.body if isinstance(node, ast.With) else ast.copy_location(ast.Pass(), node)


def _trees() -> Iterator[tuple[str, ast.Module]]:
    seen: set[Path] = set()
    for package in _PACKAGES:
        root = Path(str(importlib.import_module(package).__file__)).parent
        for path in sorted(root.rglob("*.py")):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield f"{package.replace('.', '/')}/{path.relative_to(root).as_posix()}", ast.parse(path.read_text())


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}{getattr(node, 'name', '')}"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{name}.")
        else:
            yield from _functions(node, prefix)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function in the order of the source, nested functions included."""
    for child in ast.iter_child_nodes(function):
        yield child
        yield from _own_nodes(child)


def _is_site(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return isinstance(node.value.func, ast.Attribute) and node.value.func.attr in NAMES
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return any(_enters_stream(item.context_expr) for item in node.items)
    return False


def _enters_stream(entered: ast.expr) -> bool:
    if isinstance(entered, ast.Call):
        name = entered.func.attr if isinstance(entered.func, ast.Attribute) else ast.unparse(entered.func)
        return name in {"stream", "Stream", "StreamContext"}
    return isinstance(entered, (ast.Name, ast.Attribute)) and not ast.unparse(entered).endswith(NOT_STREAMS)


def _source(node: ast.stmt) -> str:
    text = ast.unparse(node)
    return text.splitlines()[0] if isinstance(node, (ast.With, ast.AsyncWith)) else text
