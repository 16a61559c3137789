"""Tensors inside of what models take and return: tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def any_tensor(value: Any, test: Callable[[torch.Tensor], bool]) -> bool:
    """Whether `test` holds for any tensor in `value`."""
    if isinstance(value, torch.Tensor):
        return test(value)
    if isinstance(value, (tuple, list)):
        return any(any_tensor(item, test) for item in value)
    if isinstance(value, Mapping):
        return any(any_tensor(item, test) for item in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(any_tensor(getattr(value, field.name, None), test) for field in dataclasses.fields(value))
    return False


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in it changed; anything else as it is.

    A container whose tensors all come back as they were is returned as the same object.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (str, bytes, int, float, bool, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        changed = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(changed, value, strict=True)):
            return value
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, change) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        return items if type(value) is dict else _rebuilt(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed_fields = {name: map_tensors(item, change) for name, item in fields.items()}
        if all(changed_fields[name] is fields[name] for name in fields):
            return value
        return dataclasses.replace(value, **changed_fields)
    return value


def _rebuilt(value: Mapping[str, Any], items: dict[str, Any]) -> Any:
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return type(value)(**items)
