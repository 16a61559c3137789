"""The package's imports keep to the order that CONTRIBUTING.md gives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "diffusers_omni_offload"
ADAPTERS = ROOT / "adapters"
DEFERRED = {("config", "legacy_flags")}
"""Imports of what comes later, which only run when a function is called."""


def order() -> list[str]:
    """The parts of the package, from the lowest to the highest."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(r"\*\*Imports point down\.\*\*(.*?)None imports what comes after it", text, re.DOTALL)
    assert found is not None
    return list(dict.fromkeys(re.findall(r"`(\w+)`", found[1])))


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """(part of the package, whether only a function imports it) for every import in a file."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    deferred = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, *steps = name.split(".")
            if package == PACKAGE.name:
                is_part = bool(steps) and steps[0] in order()
                yield (steps[0] if is_part else "__init__"), node in deferred


def test_every_module_has_a_place_in_the_order() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert modules | packages == set(order())


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    places = order()
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name, is_deferred in imported(path):
        if not is_deferred or (here, name) not in DEFERRED:
            assert places.index(name) <= places.index(here), f"{here} imports {name}, which comes after it"


@pytest.mark.parametrize("path", sorted(ADAPTERS.glob("[!_]*.py")), ids=lambda path: path.name)
def test_adapters_import_declarations_and_the_registry_only(path: Path) -> None:
    assert {name for name, _ in imported(path)} <= {"declarations", "registry"}


def test_what_is_deferred_is_needed() -> None:
    for here, name in DEFERRED:
        assert (name, True) in imported(PACKAGE / f"{here}.py"), f"{here} imports {name} no longer"
