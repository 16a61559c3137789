"""The pipeline classes of the installed diffusers that aren't deprecated, and the transformer classes that they use."""

from __future__ import annotations

import functools
import inspect
import typing
import warnings
from collections.abc import Iterator
from typing import Any

import diffusers
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


def _members() -> Iterator[type]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the imports of all pipelines say
        members = [getattr(diffusers, name) for name in dir(diffusers) if name.endswith(("Pipeline", "Blocks"))]
    return (member for member in members if isinstance(member, type))


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
