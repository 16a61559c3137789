"""Enabling and disabling offload on a pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from diffusers_omni_offload import hooks
from diffusers_omni_offload.backends import LayerwiseBackend, get_offload_backend
from diffusers_omni_offload.backends.preflight import DeviceNeed, device_need, require_memory
from diffusers_omni_offload.composition import composed_class, stock_class
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.handle import HANDLE_ATTRIBUTE, OffloadHandle, omni_offload
from diffusers_omni_offload.platform import platform_for, resolve_device
from diffusers_omni_offload.registry import adapter_for
from diffusers_omni_offload.topology.discovery import iterate_modules
from diffusers_omni_offload.topology.plan import ResolvedPlan, format_bytes
from diffusers_omni_offload.topology.resolver import resolve_offload_plan


def enable_omni_offload(
    pipe: Any,
    mode: str = "layer",
    *,
    components: Sequence[str] | None = None,
    layer_options: Mapping[str, Mapping[str, Any]] | None = None,
    pin_memory: bool | int = True,
    device: torch.device | str | int | None = None,
    slots: int = 2,
    resident_policy: str = "spread",
) -> OffloadHandle:
    """Offload a pipeline's weights to host memory; its outputs stay the same, bit for bit.

    Enabling again with the same arguments returns the same handle; with others, the pipeline is set up anew.

    Args:
        pipe: a diffusers pipeline, on the CPU or on the device already.
        mode: "layer" streams blocks through a few device buffers.
        components: what is streamed: "dit", "text_encoder", "image_encoder". None means ["dit"]. The rest lives on the
            device.
        layer_options: by component, `{"dit": {"resident_layers": 8}}` keeps 8 blocks of each DiT on the device.
        pin_memory: True page-locks the streamed weights as far as host memory allows, an int is a budget in bytes.
        device: where to run; None takes the current accelerator. "cpu" has to be asked for.
        slots: device buffers of the size of the largest block, 2 or more to overlap copies with compute.
        resident_policy: "spread" keeps resident blocks evenly through the stack, "leading" the first ones.

    Returns:
        The handle, which is `pipe.omni_offload` too.

    Raises:
        ValueError, TypeError: an argument or a declaration is wrong, or a weight can't be streamed.
        RuntimeError: too little device memory, or another offload owns the weights.
        NotImplementedError: a mode or option that isn't there yet. In each case the pipeline is untouched.
    """
    config = OffloadConfig.from_options(
        mode,
        components=components,
        layer_options=layer_options,
        pin_memory=pin_memory,
        slots=slots,
        resident_policy=resident_policy,
    )
    return enable_from_config(pipe, config, device=device)


def enable_from_config(
    pipe: Any, config: OffloadConfig, *, device: torch.device | str | int | None = None
) -> OffloadHandle:
    """`enable_omni_offload` for a configuration that was parsed before; see there."""
    config.require_supported()
    where = resolve_device(device)
    handle = omni_offload(pipe)
    if handle is not None and handle.config == config and handle.backend.device == where:
        return handle
    if handle is not None and handle.backend.scope.is_open:
        raise RuntimeError("Offload can't be changed while a call of this pipeline is running.")
    if getattr(pipe, "hf_device_map", None):
        raise RuntimeError(
            "This pipeline was loaded with a device_map, which places its components for good. "
            "Call pipe.reset_device_map() first, or load it without device_map."
        )
    plan = _resolve(pipe, config)
    shared = _backend_of_sibling(pipe, handle)
    if shared is not None:
        _require_same(shared, config, where, plan)
        return _join(pipe, config, plan, shared)
    if handle is None:
        _require_memory(pipe, config, plan, where, spare=0)
        return _enable(pipe, config, plan, where)
    return _reconfigure(pipe, handle, config, plan, where)


def disable_omni_offload(pipe: Any) -> None:
    """Turn offload off: our hooks go, and every weight is an ordinary CPU tensor again. Nothing happens if it is off.

    Components that another offloaded pipeline uses stay offloaded for that one.

    Raises:
        RuntimeError: a call of the pipeline is running.
    """
    handle = omni_offload(pipe)
    if handle is None:
        return
    if handle.backend.scope.is_open:
        raise RuntimeError("Offload can't be disabled while a call of this pipeline is running.")
    others = [other for other in _handles(handle.backend) if other is not handle and other.is_enabled()]
    _detach(pipe)
    if not others:
        handle.backend.disable()
        return
    needed = {id(module) for other in others for module in other.modules().values()}
    for module in handle.modules().values():
        if id(module) not in needed and module in handle.backend.components:
            handle.backend.remove_resident(module)


# ---------------------------------------------------------------------- enabling


def _resolve(pipe: Any, config: OffloadConfig) -> ResolvedPlan:
    cls = stock_class(type(pipe))
    plan = resolve_offload_plan(pipe, config, declarations=adapter_for(cls))
    if plan.skip_reason is not None:
        raise ValueError(f"Nothing of this {cls.__name__} can be streamed: {plan.skip_reason}")
    wanted_residents = any(options.resident_layers for options in config.layer_options.values())
    if not any(stack.streamed for stack in plan.stacks) and not (plan.stacks and wanted_residents):
        raise ValueError(
            f"No block of this {cls.__name__} would be streamed. Declare its blocks with an OffloadPlan "
            "(`block_attrs`), or register an adapter for it."
        )
    return plan


def _enable(pipe: Any, config: OffloadConfig, plan: ResolvedPlan, device: torch.device) -> OffloadHandle:
    backend = get_offload_backend(config, device)
    if not isinstance(backend, LayerwiseBackend):
        raise ValueError(f"The configuration selects no strategy that can run on {str(device)!r}.")
    backend.enable(pipe, plan, lambda undo: _attach(pipe, config, plan, backend, undo))
    handle = omni_offload(pipe)
    assert handle is not None
    return handle


def _join(pipe: Any, config: OffloadConfig, plan: ResolvedPlan, backend: LayerwiseBackend) -> OffloadHandle:
    """Let the pipeline use the backend of another one that shares its components."""
    with ExitStack() as undo:
        _attach(pipe, config, plan, backend, undo)
        undo.pop_all()
    handle = omni_offload(pipe)
    assert handle is not None
    return handle


def _reconfigure(
    pipe: Any, handle: OffloadHandle, config: OffloadConfig, plan: ResolvedPlan, device: torch.device
) -> OffloadHandle:
    """Change the configuration of an offloaded pipeline; if that fails, the old one is put back."""
    _require_memory(pipe, config, plan, device, spare=handle.device_bytes)
    disable_omni_offload(pipe)
    try:
        return _enable(pipe, config, plan, device)
    except BaseException:
        _enable(pipe, handle.config, handle.plan, handle.backend.device)
        raise


def _require_memory(pipe: Any, config: OffloadConfig, plan: ResolvedPlan, device: torch.device, *, spare: int) -> None:
    def advise(available: int) -> str:
        return _what_fits(pipe, config, device, available)

    require_memory(plan, platform_for(device), config.slots, spare=spare, advise=advise)


def _what_fits(pipe: Any, config: OffloadConfig, device: torch.device, available: int) -> str:
    """A sentence with the smallest larger selection of components whose need fits."""
    smallest: DeviceNeed | None = None
    for extra in (("text_encoder",), ("text_encoder", "image_encoder")):
        components = (*(config.components or ("dit",)), *extra)
        components = tuple(dict.fromkeys(components))
        try:
            bigger = OffloadConfig.from_options("layer", components=components, slots=config.slots)
            need = device_need(_resolve(pipe, bigger), device, config.slots)
        except ValueError:
            continue
        if need.total <= available:
            return f"enable_omni_offload(pipe, components={list(components)}) needs {format_bytes(need.total)}."
        smallest = need if smallest is None or need.total < smallest.total else smallest
    if smallest is None:
        return "Free some of the device's memory, or use fewer slots or resident layers."
    return f"Even with its encoders streamed it needs {format_bytes(smallest.total)}: free some of the device's memory."


def _attach(pipe: Any, config: OffloadConfig, plan: ResolvedPlan, backend: LayerwiseBackend, undo: ExitStack) -> None:
    """Give the pipeline its handle and its composed class; `undo` gets the way back first."""
    composed = composed_class(type(pipe))
    handle = OffloadHandle(pipe, config, plan, backend, disable_omni_offload)
    for path, module in handle.modules().items():
        if module not in backend.components:
            backend.add_resident(path, module, undo)
    undo.callback(_detach, pipe)
    _handles(backend).add(handle)
    vars(pipe)[HANDLE_ATTRIBUTE] = handle
    pipe.__class__ = composed  # type: ignore[assignment]


def _detach(pipe: Any) -> None:
    pipe.__class__ = stock_class(type(pipe))
    vars(pipe).pop(HANDLE_ATTRIBUTE, None)


# ---------------------------------------------------------------------- pipelines that share components

_attached: weakref.WeakKeyDictionary[LayerwiseBackend, weakref.WeakSet[OffloadHandle]] = weakref.WeakKeyDictionary()


def _handles(backend: LayerwiseBackend) -> weakref.WeakSet[OffloadHandle]:
    return _attached.setdefault(backend, weakref.WeakSet())


def _backend_of_sibling(pipe: Any, handle: OffloadHandle | None) -> LayerwiseBackend | None:
    """The backend that offloads some of `pipe`'s components on behalf of another pipeline."""
    for _, module in iterate_modules(pipe):
        hook = hooks.owned_hook(module, hooks.COMPONENT_HOOK)
        if hook is not None and (handle is None or hook.owner is not handle.backend):
            return hook.owner
    if handle is not None and any(h is not handle and h.is_enabled() for h in _handles(handle.backend)):
        return handle.backend
    return None


def _require_same(backend: LayerwiseBackend, config: OffloadConfig, device: torch.device, plan: ResolvedPlan) -> None:
    held: set[nn.Module] = {block for stack in (backend.plan.stacks if backend.plan else ()) for block in stack.blocks}
    wanted = {block for stack in plan.stacks for block in stack.blocks}
    if backend.config != config or backend.device != device or not wanted <= held:
        names = ", ".join(stack.component for stack in plan.stacks)
        raise ValueError(
            f"{names}: another pipeline that shares these components has offloaded them already, with other options. "
            "This pipeline runs as it is; to enable it too, use the same options, or call disable_omni_offload() there."
        )
