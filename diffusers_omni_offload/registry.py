"""Finds the adapter (declarations) of a pipeline class by its name: the built-in ones, and those of third parties."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

C = TypeVar("C", bound=type)

ENTRY_POINT_GROUP = "diffusers_omni_offload.adapters"
"""Entry points of this group are loaded once, at the first look-up. Each names a module that registers adapters when it
is imported, or a function without arguments that registers them."""

_BUILTIN_PACKAGE = "diffusers_omni_offload.adapters"

_lock = threading.RLock()
_builtin: dict[str, type] = {}
_third_party: dict[str, type] = {}
_loaded = False


def register_adapter(*pipeline_class_names: str) -> Callable[[C], C]:
    """Class decorator: the class declares the components of the pipelines with these class names.

    A third party's adapter takes the place of a built-in one. Subclasses of a pipeline class use its adapter.

    Args:
        pipeline_class_names: names of pipeline classes.

    Returns:
        The decorator, which gives the class back.

    Raises:
        TypeError: a name isn't one, or what is decorated is no class.
        ValueError: there are no names, or another third-party (or another built-in) class holds one already.
    """
    if not pipeline_class_names:
        raise ValueError("register_adapter needs the name of at least one pipeline class, such as 'WanPipeline'.")
    for name in pipeline_class_names:
        if not isinstance(name, str) or not name.isidentifier():
            raise TypeError(f"register_adapter takes class names (strings such as 'WanPipeline'); {name!r} isn't one.")

    def decorate(adapter: C) -> C:
        if not isinstance(adapter, type):
            raise TypeError(f"register_adapter decorates classes; it was given {adapter!r}.")
        is_builtin = adapter.__module__ == _BUILTIN_PACKAGE or adapter.__module__.startswith(_BUILTIN_PACKAGE + ".")
        table = _builtin if is_builtin else _third_party
        with _lock:
            for name in pipeline_class_names:
                held = table.get(name)
                if held is not None and not _is_same_definition(held, adapter):
                    raise ValueError(
                        f"The pipeline class {name!r} has the adapter {_describe(held)}, so {_describe(adapter)} "
                        "can't be registered for it; keep one of the two."
                    )
            for name in pipeline_class_names:
                table[name] = adapter
        return adapter

    return decorate


def adapter_for(pipeline_class: type) -> type | None:
    """The adapter of `pipeline_class` or of the nearest class that it inherits from; None if there is none. Raises
    TypeError for what is no class."""
    if not isinstance(pipeline_class, type):
        raise TypeError(f"adapter_for takes a pipeline class; it was given {pipeline_class!r}. Use type(pipeline).")
    _load()
    for base in pipeline_class.__mro__:
        adapter = _third_party.get(base.__name__) or _builtin.get(base.__name__)
        if adapter is not None:
            return adapter
    return None


def registered_pipelines() -> dict[str, type]:
    """Pipeline class name -> adapter, sorted by name; third parties' adapters in place of built-in ones."""
    _load()
    return dict(sorted({**_builtin, **_third_party}.items()))


def _load() -> None:
    global _loaded
    if _loaded:
        return
    with _lock:
        if _loaded:
            return
        importlib.import_module(_BUILTIN_PACKAGE)
        # Set before the entry points run: one that calls adapter_for itself must not start this again.
        _loaded = True
        for entry_point in entry_points(group=ENTRY_POINT_GROUP):
            try:
                loaded = entry_point.load()
                if callable(loaded) and not isinstance(loaded, type):
                    loaded()
            except Exception as error:  # a third party's fault must not stop the pipelines of others
                warnings.warn(
                    f"The entry point {entry_point.name!r} ({entry_point.value}) of the group {ENTRY_POINT_GROUP!r} "
                    f"failed with {type(error).__name__}: {error}. Its adapters are missing; the others work.",
                    stacklevel=3,
                )


def _is_same_definition(held: type, adapter: type) -> bool:
    # A module that is reloaded, or a notebook cell that is run again, defines the same class anew.
    return held is adapter or (held.__module__, held.__qualname__) == (adapter.__module__, adapter.__qualname__)


def _describe(adapter: type) -> str:
    return f"{adapter.__module__}.{adapter.__qualname__}"
