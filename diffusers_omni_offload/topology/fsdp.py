"""What FSDP divides among processes. It moves and gathers that itself, so it is left to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

#: By name: what would have to be imported for them isn't part of every build of torch.
_FSDP_CLASSES = frozenset({"FSDPModule", "FullyShardedDataParallel"})


def is_left_to_fsdp(component: nn.Module) -> bool:
    """Whether FSDP, of either version, has taken a component or a part of one."""
    return any(map(_is_fsdp, {type(module) for module in component.modules()}))


def left_to_fsdp(component: nn.Module) -> set[int]:
    """`id` of the parameters and buffers that are in what FSDP has taken of a component."""
    return {id(tensor) for part in _parts(component.modules()) for tensor in (*part.parameters(), *part.buffers())}


def without_fsdp(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Those of these modules that FSDP hasn't taken, nor one that they are in, if that is among them, too."""
    found = list(modules)
    taken = {module for part in _parts(found) for module in part.modules()}
    return (module for module in found if module not in taken)


def fsdp_parts(component: nn.Module) -> list[nn.Module]:
    """The modules that FSDP has taken."""
    return list(_parts(component.modules()))


def _parts(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    return (module for module in modules if _is_fsdp(type(module)))


def _is_fsdp(module_class: type) -> bool:
    return any(base.__name__ in _FSDP_CLASSES for base in module_class.__mro__)
