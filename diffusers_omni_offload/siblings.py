"""Pipelines that share components: whose backend offloads a module, and who uses a backend."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from diffusers_omni_offload import hooks
from diffusers_omni_offload.backends import PlanBackend
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.handle import OffloadHandle
from diffusers_omni_offload.topology.plan import ResolvedPlan

_handles: weakref.WeakKeyDictionary[PlanBackend, weakref.WeakSet[OffloadHandle]] = weakref.WeakKeyDictionary()


def register(handle: OffloadHandle) -> None:
    """Note that a pipeline uses its handle's backend."""
    _handles.setdefault(handle.backend, weakref.WeakSet()).add(handle)


def users(backend: PlanBackend, besides: OffloadHandle | None = None) -> list[OffloadHandle]:
    """The handles of the pipelines that are offloaded through `backend`, without `besides`."""
    return [handle for handle in _handles.get(backend, ()) if handle is not besides and handle.is_enabled()]


def owners(modules: Iterable[nn.Module], besides: PlanBackend | None = None) -> set[PlanBackend]:
    """The backends that offload any of these components, without `besides`."""
    found = (hooks.owned_hook(module, hooks.COMPONENT_HOOK) for module in modules)
    backends = {hook.owner for hook in found if hook is not None and hook.owner is not besides}
    # A backend that isn't enabled has left its hook when it was interrupted.
    return {backend for backend in backends if backend.is_shared and backend.is_enabled()}


def disable_orphans(modules: Iterable[nn.Module], besides: PlanBackend | None = None) -> bool:
    """Disable backends of these components that no pipeline is left to disable. Whether there were any."""
    orphans = [backend for backend in owners(modules, besides) if not users(backend)]
    for backend in orphans:
        backend.disable()
    return bool(orphans)


def offloading_owner(plan: ResolvedPlan, besides: PlanBackend | None = None) -> PlanBackend | None:
    """The backend, of another pipeline, that looks after a component which `plan` streams or swaps; None if there is
    none."""
    found = owners((plan.component(path).module for path in plan.offloaded_paths), besides)
    return next(iter(found), None)


def require_same(backend: PlanBackend, config: OffloadConfig, device: torch.device, plan: ResolvedPlan) -> None:
    """Refuse to use another pipeline's backend for something else than it does.

    Raises:
        ValueError: the options differ, or the plan has blocks that the backend doesn't.
    """
    held = set() if backend.plan is None else _offloaded(backend.plan)
    if backend.config != config or backend.device != device or not _offloaded(plan) <= held:
        theirs = [path for path in plan.offloaded_paths if owners([plan.component(path).module]) == {backend}]
        raise ValueError(
            f"{', '.join(theirs)}: another pipeline that shares these components has offloaded them already, with "
            "other options or together with other components. To enable this pipeline too, use the same options for "
            "the same components, or call disable_omni_offload() on the other one first."
        )


def _offloaded(plan: ResolvedPlan) -> set[nn.Module]:
    blocks = {block for stack in plan.stacks for block in stack.blocks}
    return blocks | {plan.component(path).module for path in plan.swapped}
