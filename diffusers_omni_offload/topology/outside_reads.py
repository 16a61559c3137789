"""What of a block is used outside of its own forward, as sources tell: `self.blocks[0].norm.emb(...)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.topology.paths import MissingPathError, lookup, prefixes
from diffusers_omni_offload.topology.sizes import module_nbytes
from diffusers_omni_offload.topology.source import ElementRead, forward_source

_HARMLESS = (("dtype",), ("shape",), ("ndim",))
"""What may be asked of a weight wherever it is."""


def blocks_read_outside(model: nn.Module, paths: Iterable[str]) -> dict[int, str]:
    """The blocks of which a part is used outside of the block's own forward, which needs them on the device.

    As the sources of `forward` of the model, and of what holds the lists, tell.

    Args:
        model: the model.
        paths: paths of its blocks.

    Returns:
        `id` of the block -> what is used of it ("norm.emb").
    """
    found: dict[int, str] = {}
    for holder in ("", *prefixes(paths)):
        try:
            module = lookup(model, holder)
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
