"""Pipelines that share components: whose backend offloads a module, and who uses a backend."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from diffusers_omni_offload import hooks
from diffusers_omni_offload.backends import LayerwiseBackend
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.handle import OffloadHandle
from diffusers_omni_offload.topology.plan import ResolvedPlan

_handles: weakref.WeakKeyDictionary[LayerwiseBackend, weakref.WeakSet[OffloadHandle]] = weakref.WeakKeyDictionary()


def register(handle: OffloadHandle) -> None:
    """Note that a pipeline uses its handle's backend."""
    _handles.setdefault(handle.backend, weakref.WeakSet()).add(handle)


def users(backend: LayerwiseBackend, besides: OffloadHandle | None = None) -> list[OffloadHandle]:
    """The handles of the pipelines that are offloaded through `backend`, without `besides`."""
    return [handle for handle in _handles.get(backend, ()) if handle is not besides and handle.is_enabled()]


def owners(modules: Iterable[nn.Module], besides: LayerwiseBackend | None = None) -> set[LayerwiseBackend]:
    """The backends that offload any of these components, without `besides`."""
    found = (hooks.owned_hook(module, hooks.COMPONENT_HOOK) for module in modules)
    return {hook.owner for hook in found if hook is not None and hook.owner is not besides}


def disable_orphans(modules: Iterable[nn.Module], besides: LayerwiseBackend | None = None) -> bool:
    """Disable backends of these components that no pipeline is left to disable. Whether there were any."""
    orphans = [backend for backend in owners(modules, besides) if not users(backend)]
    for backend in orphans:
        backend.disable()
    return bool(orphans)


def streaming_owner(plan: ResolvedPlan, besides: LayerwiseBackend | None = None) -> LayerwiseBackend | None:
    """The backend, of another pipeline, that offloads a component whose blocks `plan` wants; None if there is none."""
    found = owners((plan.component(stack.component).module for stack in plan.stacks), besides)
    return next(iter(found), None)


def require_same(backend: LayerwiseBackend, config: OffloadConfig, device: torch.device, plan: ResolvedPlan) -> None:
    """Refuse to use another pipeline's backend for something else than it does.

    Raises:
        ValueError: the options differ, or the plan has blocks that the backend doesn't.
    """
    held = {id(block) for stack in (backend.plan.stacks if backend.plan else ()) for block in stack.blocks}
    wanted = {id(block) for stack in plan.stacks for block in stack.blocks}
    if backend.config != config or backend.device != device or not wanted <= held:
        names = ", ".join(stack.component for stack in plan.stacks)
        raise ValueError(
            f"{names}: another pipeline that shares these components has offloaded them already, with other options "
            "or other components. This pipeline runs as it is; to enable it too, use the same options, or call "
            "disable_omni_offload() on the other one first."
        )
