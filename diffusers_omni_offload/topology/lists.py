"""Where the blocks of a model are that declares none: its lists of modules that hold a good part of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.topology.paths import MissingPathError, lookup
from diffusers_omni_offload.topology.sizes import module_nbytes
from diffusers_omni_offload.topology.source import ElementRead, forward_source

WORTHWHILE = 0.01
"""The least share of a model's bytes that a list of its own has to hold."""
WORTHWHILE_WITHIN = 0.1
"""The same for a list within one of its parts (a refiner of the text): a small one stays on the device."""
ENOUGH = 0.5
"""Where the lists of its own hold less than this, those within its parts are worth as much, and other containers count
too."""


@dataclass(frozen=True)
class _List:
    path: str
    elements: tuple[nn.Module, ...]
    nbytes: int

    @property
    def is_own(self) -> bool:
        """True if the model holds it itself, not one of its parts."""
        return "." not in self.path


_ATTEMPTS: tuple[tuple[tuple[type[nn.Module], ...], float], ...] = (
    ((nn.ModuleList,), WORTHWHILE_WITHIN),
    ((nn.ModuleList,), WORTHWHILE),
    ((nn.ModuleList, nn.Sequential, nn.ModuleDict), WORTHWHILE),
)
"""Kinds of containers, and the least share of one within a part: the next is tried where one doesn't find enough."""

_HARMLESS = (("dtype",), ("shape",), ("ndim",))
"""What may be asked of a weight wherever it is."""


def find_lists(model: nn.Module, *, is_encoder: bool = False) -> tuple[str, ...]:
    """Paths of the lists that hold the blocks of `model`, in the order in which they run; () if there are none.

    A list is a `ModuleList` of modules that consist of others, the outermost of its kind. The order is that of the
    source of `forward`, where it can be read, else of registration.

    Args:
        model: a DiT or an encoder.
        is_encoder: the lists of an encoder lie in its parts; those of a DiT that do stay out if they are small.
    """
    total = module_nbytes(model)
    chosen: list[_List] = []
    for kinds, within in _ATTEMPTS[1 if is_encoder else 0 :]:
        found = [
            each
            for each in _outermost(model, kinds)
            if each.nbytes >= total * (WORTHWHILE if each.is_own else within) > 0
        ]
        if _nbytes(found) > _nbytes(chosen):
            chosen = found
        if _nbytes(chosen) >= total * ENOUGH:
            break
    if sum(len(each.elements) for each in chosen) < 2:
        return ()
    source = forward_source(type(model))
    order = {each.path: source.position(tuple(each.path.split("."))) for each in chosen}
    return tuple(sorted(order, key=order.__getitem__))


def blocks_read_outside(model: nn.Module, paths: Iterable[str]) -> dict[int, str]:
    """The blocks of which a part is used outside of the block's own forward, which needs them on the device.

    As the sources of `forward` of the model, and of what holds the lists, tell: `self.blocks[0].norm.emb(...)`.

    Args:
        model: the model.
        paths: paths of its blocks.

    Returns:
        `id` of the block -> what is used of it ("norm.emb").
    """
    found: dict[int, str] = {}
    for holder in _holders(paths):
        try:
            module = lookup(model, holder) if holder else model
        except MissingPathError:
            continue
        if not isinstance(module, nn.Module):
            continue
        for read in forward_source(type(module)).reads:
            for block in _elements_read(module, read):
                part = _part_used(block, read)
                if part is not None:
                    found.setdefault(id(block), part)
    return found


def _holders(paths: Iterable[str]) -> list[str]:
    """The model itself (""), and whatever lies on the way to blocks."""
    prefixes = {path[:end] for path in paths for end, character in enumerate(path) if character == "."}
    return ["", *sorted(prefixes)]


def _elements_read(module: nn.Module, read: ElementRead) -> list[nn.Module]:
    container: Any = module
    for name in read.container:
        container = _attribute(container, name)
    if isinstance(container, nn.ModuleDict):
        container = list(container.values())
    if not isinstance(container, (nn.ModuleList, nn.Sequential, list, tuple)):
        return []
    elements = list(container)
    if read.index is not None:
        elements = elements[read.index :][:1]
    return [element for element in elements if isinstance(element, nn.Module)]


def _attribute(owner: Any, name: str) -> Any:
    """An attribute, or None. It may be a property of anybody's, which may fail in any way."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def _part_used(block: nn.Module, read: ElementRead) -> str | None:
    """What of `block` a read needs on the device, or None.

    What can't be told counts as a use where one block is named, and as none where it may be any of them: then nothing
    could be streamed.
    """
    if read.chain == ("forward",):
        return None
    is_any = read.index is None
    value: Any = block
    for position, name in enumerate(read.chain, start=1):
        value = _attribute(value, name)
        part = ".".join(read.chain[:position])
        if isinstance(value, torch.Tensor):
            return None if read.chain[position : position + 1] in _HARMLESS else part
        if not isinstance(value, nn.Module):
            return part if read.is_call and callable(value) and not is_any else None
    assert isinstance(value, nn.Module)
    return part if (read.is_call or not is_any) and module_nbytes(value) > 0 else None


def _nbytes(lists: Iterable[_List]) -> int:
    return sum(each.nbytes for each in lists)


def _outermost(model: nn.Module, kinds: tuple[type[nn.Module], ...], prefix: str = "") -> Iterator[_List]:
    for name, child in model.named_children():
        path = prefix + name
        elements = _blocks_of(child, kinds) if isinstance(child, kinds) else ()
        if elements and (len(elements) > 1 or not prefix):
            yield _List(path, elements, module_nbytes(nn.ModuleList(elements)))
        else:
            yield from _outermost(child, kinds, f"{path}.")


def _blocks_of(container: nn.Module, kinds: tuple[type[nn.Module], ...]) -> tuple[nn.Module, ...]:
    """The elements that hold weights, if all of them are blocks; of a list of lists, those of the inner ones."""
    elements: list[nn.Module] = []
    for child in container.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            inner = _blocks_of(child, kinds)
            if not inner and module_nbytes(child):
                return ()
            elements.extend(inner)
        elif module_nbytes(child):
            elements.append(child)
    if isinstance(container, nn.ModuleDict) and len({type(element) for element in elements}) > 1:
        return ()  # parts with names of their own, not a stack
    return tuple(elements) if all(map(_is_block, elements)) else ()


def _is_block(module: nn.Module) -> bool:
    """True unless it is a single layer of torch's own, such as a `Linear`."""
    return any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")
