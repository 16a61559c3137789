"""Enabling and disabling offload on a pipeline."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from diffusers_omni_offload import hooks
from diffusers_omni_offload.backends import LayerwiseBackend, get_offload_backend
from diffusers_omni_offload.backends.preflight import DeviceNeed, device_need, require_memory
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.handle import OffloadHandle
from diffusers_omni_offload.messages import logger
from diffusers_omni_offload.platform import platform_for, resolve_device
from diffusers_omni_offload.registry import adapter_for
from diffusers_omni_offload.topology.discovery import iterate_modules
from diffusers_omni_offload.topology.plan import ResolvedPlan, format_bytes
from diffusers_omni_offload.topology.resolver import resolve_offload_plan

_HANDLE = "_omni_offload_handle"


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
    plan = _resolve(pipe, config)
    shared = _backend_of_sibling(pipe, handle)
    if shared is not None:
        _require_same(shared, config, where, plan)
        return _attach(pipe, config, plan, shared)
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
    needed = {id(module) for other in others for module in other.modules()}
    for module in handle.modules():
        if id(module) not in needed and module in handle.backend.components:
            handle.backend.remove_resident(module)


def omni_offload(pipe: Any) -> OffloadHandle | None:
    """The handle of an offloaded pipeline, or None."""
    return vars(pipe).get(_HANDLE)


class OffloadedPipeline:
    """What an offloaded pipeline's class is composed with: a call scope, the execution device, and refusals."""

    @property
    def _execution_device(self) -> torch.device:
        return _require_handle(self).backend.device

    @property
    def device(self) -> torch.device:
        """The execution device: inputs and generators belong there, whatever the weights are."""
        return _require_handle(self).backend.device

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Casts pass; the pipeline itself isn't moved while it is offloaded."""
        device = kwargs.get("device")
        others = [value for value in args if isinstance(value, torch.dtype)]
        for value in args:
            if value is not None and not isinstance(value, torch.dtype):
                device = value
        if device is not None:
            if torch.device(device) != torch.device("cpu") or self._execution_device.type == "cpu":
                raise ValueError(
                    f"This pipeline is offloaded and runs on {str(self._execution_device)!r} as it is; "
                    f".to({str(device)!r}) would move every weight. Leave it out, or call disable_omni_offload() first."
                )
            logger.warning(
                "The pipeline is offloaded and stays so; disable_omni_offload() moves every weight to the CPU."
            )
        dtype = kwargs.get("dtype", others[0] if others else None)
        if dtype is None:
            return self
        return super().to(dtype=dtype)  # type: ignore[misc]

    def enable_model_cpu_offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused while offloaded."""
        _refuse("enable_model_cpu_offload()")

    def enable_sequential_cpu_offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused while offloaded."""
        _refuse("enable_sequential_cpu_offload()")

    def enable_group_offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused while offloaded."""
        _refuse("enable_group_offload()")

    def remove_all_hooks(self) -> NoReturn:
        """Refused while offloaded."""
        _refuse("remove_all_hooks()")

    def reset_device_map(self) -> NoReturn:
        """Refused while offloaded."""
        _refuse("reset_device_map()")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("A deep copy", "Use from_pipe() for another pipeline with the same components")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("Pickling", "Use save_pretrained(), which works as it is")


def _refuse(what: str, instead: str = "") -> NoReturn:
    raise RuntimeError(
        f"{what} isn't possible while the pipeline is offloaded by omni offload, which owns its weights. "
        f"{instead + ', or call' if instead else 'Call'} disable_omni_offload() first."
    )


def _require_handle(pipe: Any) -> OffloadHandle:
    handle = omni_offload(pipe)
    assert handle is not None
    return handle


# ---------------------------------------------------------------------- enabling


def _resolve(pipe: Any, config: OffloadConfig) -> ResolvedPlan:
    cls = _stock_class(type(pipe))
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
    backend.enable(pipe, plan)
    try:
        return _attach(pipe, config, plan, backend)
    except BaseException:
        backend.disable()
        raise


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


# ---------------------------------------------------------------------- the composed class


def _attach(pipe: Any, config: OffloadConfig, plan: ResolvedPlan, backend: LayerwiseBackend) -> OffloadHandle:
    handle = OffloadHandle(pipe, config, plan, backend)
    for path, module in handle._modules.items():
        if module not in backend.components:
            backend.add_resident(path, module)
    vars(pipe)[_HANDLE] = handle
    pipe.__class__ = _composed(type(pipe))  # type: ignore[arg-type]
    _handles(backend).add(handle)
    return handle


def _detach(pipe: Any) -> None:
    pipe.__class__ = _stock_class(type(pipe))
    vars(pipe).pop(_HANDLE, None)


@functools.cache
def _composed(cls: type) -> type:
    """`cls` with `OffloadedPipeline` before and its adapter behind it, under the same name, so that saving works."""
    adapter = adapter_for(cls)
    declared_by_itself = adapter is None or issubclass(cls, adapter)
    bases: tuple[Any, ...] = (OffloadedPipeline, cls) if declared_by_itself else (OffloadedPipeline, cls, adapter)

    @functools.wraps(cls.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _require_handle(self).call():
            return cls.__call__(self, *args, **kwargs)

    copied = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, bases, {"__call__": __call__, **copied})


def _stock_class(cls: type) -> type:
    return cls.__bases__[1] if OffloadedPipeline in cls.__bases__ else cls


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
