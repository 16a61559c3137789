"""Components that FSDP divides among processes. It moves and gathers them itself, so they are left to it."""

from __future__ import annotations

from torch import nn

#: By name: what would have to be imported for them isn't part of every build of torch.
_FSDP_CLASSES = frozenset({"FSDPModule", "FullyShardedDataParallel"})


def is_left_to_fsdp(component: nn.Module) -> bool:
    """Whether FSDP, of either version, has taken a component or a part of one."""
    classes = {type(module) for module in component.modules()}
    return any(base.__name__ in _FSDP_CLASSES for module_class in classes for base in module_class.__mro__)
