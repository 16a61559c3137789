"""Where the builders of `tests/zoo` register themselves, by the name of the class that they build."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

Arguments = Callable[[], dict[str, Any]]
BuildPipeline = Callable[[], tuple[Any, Arguments]]
BuildTransformer = Callable[[], tuple[nn.Module, Arguments]]
B = TypeVar("B", bound=Callable[..., Any])

PIPELINES: dict[str, BuildPipeline] = {}
"""Pipeline class name -> builder: a new pipeline on the CPU, and what makes fresh arguments for one call."""
TRANSFORMERS: dict[str, BuildTransformer] = {}
"""Transformer class name -> builder: a new module on the CPU, and what makes fresh arguments (on the CPU) for one
forward."""


def pipeline(class_name: str) -> Callable[[B], B]:
    """Decorator: the function builds a pipeline of this class."""
    return _register(PIPELINES, class_name)


def transformer(class_name: str) -> Callable[[B], B]:
    """Decorator: the function builds a transformer of this class."""
    return _register(TRANSFORMERS, class_name)


def _register(table: dict[str, Any], class_name: str) -> Callable[[B], B]:
    def decorate(build: B) -> B:
        if class_name in table:
            raise ValueError(f"{class_name} is built by {table[class_name].__module__} already.")
        table[class_name] = build
        return build

    return decorate


def load_families() -> None:
    """Import every module of `tests.zoo.families`."""
    from tests.zoo import families

    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")
