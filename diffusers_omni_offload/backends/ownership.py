"""Whose components and blocks are: one backend's, whichever pipelines use them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusers_omni_offload import hooks
from diffusers_omni_offload.backends.masters import Unit
from diffusers_omni_offload.topology.plan import ResolvedComponent, ResolvedPlan


def not_borrowed(plan: ResolvedPlan, device: torch.device) -> list[ResolvedComponent]:
    """The components that no other backend looks after: those that this one places and hooks for both.

    Raises:
        ValueError: another one runs a component on another device.
    """
    ours = []
    for component in plan.components:
        hook = hooks.owned_hook(component.module, hooks.COMPONENT_HOOK)
        if hook is not None and not hook.owner.is_enabled():
            hooks.remove_leftovers(component.module)
            hook = None
        if hook is None:
            ours.append(component)
        elif hook.owner.device != device:
            raise ValueError(
                f"{component.path} is offloaded by another pipeline, which runs it on {str(hook.owner.device)!r}, "
                f"not {str(device)!r}. Use the same device, or call disable_omni_offload() there."
            )
    return ours


def require_unowned(units: Sequence[Unit]) -> None:
    """Raise RuntimeError if a part of what is to be offloaded is offloaded already."""
    for unit in units:
        for name, module in unit.module.named_modules(prefix=unit.path):
            if any(hooks.owned_hook(module, hook) is not None for hook in hooks.OWN_HOOKS):
                raise RuntimeError(
                    f"{name} is offloaded by omni offload already, by another pipeline or a PhaseOffload. "
                    "Call disable_omni_offload() there, or disable() on the PhaseOffload, first."
                )
