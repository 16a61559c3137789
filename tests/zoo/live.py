"""The pipeline classes of the installed diffusers that aren't deprecated, and the transformer classes that they use."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import typing
import warnings
from collections.abc import Iterator
from typing import Any

import diffusers.modular_pipelines
import diffusers.pipelines
from diffusers import DiffusionPipeline
from diffusers.modular_pipelines import ModularPipelineBlocks
from torch import nn

TRANSFORMERS_PACKAGE = "diffusers.models.transformers"


@functools.cache
def live_pipelines() -> tuple[type, ...]:
    """Every stock pipeline class that isn't deprecated."""
    return tuple(
        member
        for member in _members()
        if issubclass(member, DiffusionPipeline) and member is not DiffusionPipeline and not _is_deprecated(member)
    )


@functools.cache
def live_transformers() -> dict[str, tuple[str, ...]]:
    """Name of each class of `diffusers.models.transformers` that they use -> the names of the pipelines that do.

    Of the modular pipelines, whose components are those of their blocks, the blocks are named.
    """
    users: dict[str, list[str]] = {}
    for pipeline in live_pipelines():
        for _, cls in constructor_modules(pipeline):
            _note(users, cls, pipeline.__name__)
    for blocks in _members():
        if issubclass(blocks, ModularPipelineBlocks) and not inspect.isabstract(blocks):
            for spec in _component_specs(blocks):
                if isinstance(spec.type_hint, type):
                    _note(users, spec.type_hint, blocks.__name__)
    return {name: tuple(dict.fromkeys(users[name])) for name in sorted(users)}


def constructor_modules(pipeline: type) -> Iterator[tuple[str, type[nn.Module]]]:
    """(name, class) of the modules that a pipeline class's constructor takes, one for each class that may be given."""
    init: Any = pipeline.__init__  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(init)
    except (NameError, TypeError):
        hints = {}
    for name, parameter in inspect.signature(init).parameters.items():
        for cls in _classes(hints.get(name, parameter.annotation)):
            if issubclass(cls, nn.Module):
                yield name, cls


@functools.cache
def _members() -> tuple[type, ...]:
    """The classes that the modules below `diffusers.pipelines` and `diffusers.modular_pipelines` define.

    A module's own import is asked, as diffusers itself offers a stand-in for a class if one of its optional
    dependencies isn't there.
    """
    members: dict[str, type] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package in (diffusers.pipelines, diffusers.modular_pipelines):
            for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                if ".deprecated" in found.name:
                    continue
                try:
                    module = importlib.import_module(found.name)
                except (ImportError, RuntimeError):
                    continue  # utilities that need what isn't installed; they define no pipelines
                members.update({name: member for name, member in vars(module).items() if isinstance(member, type)})
    return tuple(members[name] for name in sorted(members) if members[name].__module__.startswith("diffusers."))


def _is_deprecated(pipeline: type) -> bool:
    return ".deprecated." in pipeline.__module__ or hasattr(pipeline, "_last_supported_version")


def _component_specs(blocks: type) -> list[Any]:
    try:
        return list(blocks().expected_components)
    except (NotImplementedError, ValueError, AttributeError):
        return []  # the base classes, which hold no blocks yet


def _note(users: dict[str, list[str]], cls: type, user: str) -> None:
    if cls.__module__.startswith(TRANSFORMERS_PACKAGE):
        users.setdefault(cls.__name__, []).append(user)


def _classes(annotation: Any) -> Iterator[type]:
    """The classes within an annotation: of a union, or of a list's elements."""
    arguments = typing.get_args(annotation)
    for argument in arguments:
        yield from _classes(argument)
    if isinstance(annotation, type) and not arguments:
        yield annotation
