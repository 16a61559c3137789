"""Enabling and disabling offload on a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diffusers_omni_offload.advice import what_fits
from diffusers_omni_offload.automatic import Automatic
from diffusers_omni_offload.backends import DelegatedBackend, PlanBackend, get_offload_backend, is_delegated, preflight
from diffusers_omni_offload.backends.distributed import tell_other_ranks
from diffusers_omni_offload.checks import one_of
from diffusers_omni_offload.composition import composed_class, stock_class
from diffusers_omni_offload.config import MODES, OffloadConfig, OffloadStrategy
from diffusers_omni_offload.handle import HANDLE_ATTRIBUTE, OffloadHandle, omni_offload
from diffusers_omni_offload.hooks import COMPONENT_HOOK, owned_hook
from diffusers_omni_offload.messages import logger
from diffusers_omni_offload.parallel import with_parallel_facts
from diffusers_omni_offload.planning.request import Request
from diffusers_omni_offload.platform import platform_for, resolve_device
from diffusers_omni_offload.prospect import look_at
from diffusers_omni_offload.registry import adapter_for
from diffusers_omni_offload.siblings import (
    disable_orphans,
    offloading_owner,
    owners,
    register,
    require_same,
    users,
)
from diffusers_omni_offload.topology.discovery import iterate_modules
from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.topology.resolver import resolve_offload_plan


def enable_omni_offload(
    pipe: Any,
    mode: str | None = None,
    *,
    components: Sequence[str] | Mapping[str, str] | None = None,
    layer_options: Mapping[str, Mapping[str, Any]] | None = None,
    pin_memory: bool | int = True,
    device: torch.device | str | int | None = None,
    slots: int = 2,
    resident_policy: str = "spread",
    memory_budget: int | str | None = None,
    host_memory_budget: int | str | None = None,
    activation_memory: int | str | None = None,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    num_inference_steps: int | None = None,
    profile: bool = True,
) -> OffloadHandle:
    """Offload a pipeline's weights to host memory; its outputs stay the same, bit for bit.

    Enabling again with the same arguments returns the same handle; with others, the pipeline is set up anew.

    Args:
        pipe: a diffusers pipeline, on the CPU or on the device already.
        mode: "layer" (the default) streams blocks through a few device buffers; "module" swaps whole components, so
            that encoders and DiTs take turns on the device; "auto" chooses for each component, measures the first
            call, and chooses anew.
        components: what is offloaded: "dit", "text_encoder", "image_encoder". None means ["dit"] in layer mode and all
            of them in module mode. The rest lives on the device. Or a choice for each, by one of these names, "vae" or
            the component's path: `{"dit": "layer", "text_encoder": "module", "vae": "resident"}`.
        layer_options: by component, `{"dit": {"resident_layers": 8}}` keeps 8 blocks of each DiT on the device.
        pin_memory: True page-locks the offloaded weights as far as host memory allows, an int is a budget in bytes.
        device: where to run; None takes the current accelerator. "cpu" has to be asked for.
        slots: device buffers of the size of the largest block, 2 or more to overlap copies with compute.
        resident_policy: "spread" keeps resident blocks evenly through the stack, "leading" the first ones.
        memory_budget: in mode "auto", device bytes that weights and activations may take together, as an int or as
            text such as "12GiB"; None takes what is free, less 5 %.
        host_memory_budget: in mode "auto", host bytes that offloaded weights may take; None for no limit.
        activation_memory: in mode "auto", device bytes of activations, if you know them; else they are assumed at first
            and measured in the first call.
        height, width, num_frames, num_inference_steps: in mode "auto", what calls will be like.
        profile: in mode "auto", whether what was measured on this machine before counts, and is kept for the next time.

    Returns:
        The handle, which is `pipe.omni_offload` too.

    Raises:
        ValueError, TypeError: an argument or a declaration is wrong, or a weight can't be offloaded.
        RuntimeError: too little device memory (in mode "auto" a `DoesNotFit`, which says how much is missing), or
            another offload owns the weights. In each case the pipeline is untouched.
    """
    if isinstance(pipe, (type, str)) or not hasattr(pipe, "__dict__"):
        raise TypeError(f"enable_omni_offload takes a pipeline, as from_pretrained returns it; it was given {pipe!r}.")
    workload = {
        "height": height,
        "width": width,
        "num_frames": num_frames,
        "num_inference_steps": num_inference_steps,
    }
    budgets = {
        "memory_budget": memory_budget,
        "host_memory_budget": host_memory_budget,
        "activation_memory": activation_memory,
    }
    if mode is not None:
        mode = one_of("mode", mode, (*MODES, "auto"))
    if mode == "auto":
        _require_defaults(
            'the mode is "auto", which chooses it',
            components=components,
            layer_options=layer_options,
            slots=None if slots == 2 else slots,
            resident_policy=None if resident_policy == "spread" else resident_policy,
        )
        request = Request.parse(budgets, workload, profile=profile, pin_memory=pin_memory)
        return _enable_automatically(pipe, request, resolve_device(device))
    _require_defaults('it belongs to the mode "auto"', **budgets, **workload, profile=None if profile else profile)
    config = OffloadConfig.from_options(
        mode,
        components=components,
        layer_options=layer_options,
        pin_memory=pin_memory,
        slots=slots,
        resident_policy=resident_policy,
    )
    return enable_from_config(pipe, config, device=device)


def _require_defaults(why: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} was given, but {why}; leave it out.")


def _enable_automatically(pipe: Any, request: Request, device: torch.device) -> OffloadHandle:
    handle = omni_offload(pipe)
    own = None if handle is None else handle.backend
    if handle is not None and handle.automatic is not None:
        if handle.automatic.request == request and handle.backend.device == device:
            return handle
    modules = [module for _, module in iterate_modules(pipe)]
    for other in owners(modules, besides=own):
        for sibling in users(other):
            if sibling.automatic is not None and sibling.automatic.request == request:
                return _join_automatically(pipe, sibling, device)
    declarations = adapter_for(stock_class(type(pipe)))
    spare = 0 if handle is None else handle.device_bytes
    automatic = Automatic(request, look_at(pipe, request, device, declarations=declarations, spare=spare))
    handle = _enable_as(pipe, automatic.config, device, residents_may_leave=True)
    automatic.attach(handle)
    automatic.renew = partial(_renew, handle, automatic)
    automatic.announce()
    return handle


def _join_automatically(pipe: Any, sibling: OffloadHandle, device: torch.device) -> OffloadHandle:
    """Let the pipeline use what "auto" has chosen for another one; it may have fewer components."""
    backend, own = sibling.backend, dict(iterate_modules(pipe))
    config = replace(
        backend.config,
        choices={path: choice for path, choice in backend.config.choices.items() if path in own},
        layer_options={path: options for path, options in backend.config.layer_options.items() if path in own},
    )
    plan = _resolve(pipe, config)
    require_same(backend, backend.config, device, plan)
    joined = _join(pipe, backend.config, plan, backend)
    joined.automatic = sibling.automatic
    return joined


def _with_moving_residents(plan: ResolvedPlan) -> ResolvedPlan:
    return replace(plan, stacks=tuple(replace(stack, residents_may_leave=True) for stack in plan.stacks))


def _renew(handle: OffloadHandle, automatic: Automatic) -> None:
    """Before a call: change the kinds of components, if "auto" has found that others are faster."""
    pipe = handle.pipeline()
    if automatic.better is None or pipe is None or not handle.is_enabled():
        return
    backend = handle.backend
    if backend.scope.is_open or users(backend, besides=handle):
        return
    former, config, device = automatic.prediction, automatic.take_better(), backend.device
    try:
        plan = _with_moving_residents(_resolve(pipe, config))
        _reconfigure(pipe, handle, config, plan, device)
    except BaseException as error:
        automatic.return_to(former)
        _keep_handle(pipe, handle, automatic, handle.config, handle.plan)
        if not isinstance(error, Exception) or omni_offload(pipe) is None:
            raise
        logger.warning("Other kinds would be better, but can't be enabled, so all stays as it is: %s", str(error))
        return
    _keep_handle(pipe, handle, automatic, config, plan)
    automatic.announce()


def _keep_handle(
    pipe: Any, handle: OffloadHandle, automatic: Automatic, config: OffloadConfig, plan: ResolvedPlan
) -> None:
    """A pipeline that was offloaded anew keeps the handle that the caller has."""
    now = omni_offload(pipe)
    if now is None or now is handle:
        return
    handle.bind(pipe, config, plan, now.backend)
    vars(pipe)[HANDLE_ATTRIBUTE] = handle
    register(handle)
    automatic.attach(handle)


def enable_from_config(
    pipe: Any, config: OffloadConfig, *, device: torch.device | str | int | None = None
) -> OffloadHandle:
    """`enable_omni_offload` for a configuration that was parsed before.

    Args:
        pipe: a diffusers pipeline, on the CPU or on the device already.
        config: the configuration.
        device: where to run; None takes the current accelerator.

    Returns:
        The handle, which is `pipe.omni_offload` too.

    Raises:
        ValueError, TypeError, RuntimeError: as of `enable_omni_offload`. The pipeline is untouched then.
    """
    return _enable_as(pipe, config, resolve_device(device))


def _enable_as(
    pipe: Any, config: OffloadConfig, where: torch.device, *, residents_may_leave: bool = False
) -> OffloadHandle:
    if config.strategy is OffloadStrategy.DISTRIBUTED_LAYERWISE:
        config = with_parallel_facts(config, dict(iterate_modules(pipe)))
    handle = omni_offload(pipe)
    if handle is not None and handle.config == config and handle.backend.device == where:
        if handle.automatic is not None:
            handle.automatic.detach()
        return handle
    try:
        plan, other = _checked(pipe, config, where, handle)
        if residents_may_leave:
            plan = _with_moving_residents(plan)
    except BaseException as error:
        tell_other_ranks(config, dict(iterate_modules(pipe)), error)
        raise
    if other is not None:
        return _join(pipe, config, plan, other)
    if handle is None:
        return _enable(pipe, config, plan, where)
    return _reconfigure(pipe, handle, config, plan, where)


def disable_omni_offload(pipe: Any) -> None:
    """Turn offload off: our hooks go, and every weight is an ordinary CPU tensor again. Nothing happens if it is off.

    Components that another offloaded pipeline uses stay offloaded for that one. A pipeline made from an offloaded one
    that is gone turns that one's offload off.

    Raises:
        RuntimeError: a call of the pipeline is running.
    """
    handle = omni_offload(pipe)
    if handle is None:
        modules = [module for _, module in iterate_modules(pipe)]
        if not disable_orphans(modules) and owners(modules):
            logger.warning("This pipeline shares components with one that is offloaded: disable it on that one.")
        return
    backend = handle.backend
    others = users(backend, besides=handle)
    with backend.scope.exclusive("disabled"):
        if not others:
            backend.bring_home()
        _detach(pipe)
        if not others:
            backend.tear_down()
            return
        needed = {id(module) for other in others for module in other.modules().values()}
        for module in handle.modules().values():
            if id(module) not in needed and module in backend.components:
                backend.remove_component(module)


# ---------------------------------------------------------------------- enabling


def _checked(
    pipe: Any, config: OffloadConfig, device: torch.device, handle: OffloadHandle | None
) -> tuple[ResolvedPlan, PlanBackend | None]:
    """The plan, and the backend of another pipeline that carries it out already, if there is one. What can't be done
    raises here, with nothing touched."""
    if getattr(pipe, "hf_device_map", None):
        raise RuntimeError(
            "This pipeline was loaded with a device_map, which places its components for good. "
            "Call pipe.reset_device_map() first, or load it without device_map."
        )
    plan = _resolve(pipe, config)
    own = None if handle is None else handle.backend
    disable_orphans((module for _, module in iterate_modules(pipe)), besides=own)
    other = offloading_owner(plan, besides=own)
    if other is None and own is not None and users(own, besides=handle):
        other = own
    if other is not None:
        require_same(other, config, device, plan)
    else:
        _require_fit(pipe, config, plan, device, handle)
    return plan, other


def _resolve(pipe: Any, config: OffloadConfig) -> ResolvedPlan:
    cls = stock_class(type(pipe))
    if is_delegated(pipe, config):
        return DelegatedBackend.plan_for(config, pipe)
    plan = resolve_offload_plan(pipe, config, declarations=adapter_for(cls))
    if plan.skip_reason is not None:
        raise ValueError(f"Nothing of this {cls.__name__} can be streamed: {plan.skip_reason}")
    wanted_residents = any(options.resident_layers for options in config.layer_options.values())
    if not plan.swapped and not any(stack.streamed for stack in plan.stacks) and not (plan.stacks and wanted_residents):
        if "layer" in (*config.choices.values(), "" if config.choices else "layer"):
            raise ValueError(
                f"No block of this {cls.__name__} would be streamed. Declare its blocks with an OffloadPlan "
                "(`block_attrs`), or register an adapter for it."
            )
        raise ValueError(f"Nothing of this {cls.__name__} would be swapped: {' '.join(plan.notes)}")
    return plan


def _enable(pipe: Any, config: OffloadConfig, plan: ResolvedPlan, device: torch.device) -> OffloadHandle:
    backend = get_offload_backend(config, device, pipe)
    if not isinstance(backend, PlanBackend):
        raise ValueError(f"The configuration selects no strategy that can run on {str(device)!r}.")
    with ExitStack() as undo:
        backend.install(plan, undo)
        handle = _attach(pipe, config, plan, backend, undo)
        undo.pop_all()
    return handle


def _join(pipe: Any, config: OffloadConfig, plan: ResolvedPlan, backend: PlanBackend) -> OffloadHandle:
    """Let the pipeline use the backend of another one that shares its components."""
    with backend.scope.exclusive("changed"), ExitStack() as undo:
        handle = _attach(pipe, config, plan, backend, undo)
        undo.pop_all()
    return handle


def _reconfigure(
    pipe: Any, handle: OffloadHandle, config: OffloadConfig, plan: ResolvedPlan, device: torch.device
) -> OffloadHandle:
    """Change the configuration of an offloaded pipeline; if that fails, the old one is put back."""
    handle.backend.scope.require_closed("changed")
    old_plan, old_device = handle.plan, handle.backend.device
    try:
        disable_omni_offload(pipe)
        return _enable(pipe, config, plan, device)
    except BaseException:
        if omni_offload(pipe) is None:
            restored = _enable(pipe, handle.config, old_plan, old_device)
            if handle.automatic is not None:
                handle.automatic.attach(restored)
        raise


def _require_fit(
    pipe: Any, config: OffloadConfig, plan: ResolvedPlan, device: torch.device, handle: OffloadHandle | None
) -> None:
    def advise(available: int) -> str:
        return what_fits(lambda other: _resolve(pipe, other), config, device, available)

    spare, given_back = (0, frozenset()) if handle is None else (handle.device_bytes, handle.backend.masters.held())
    preflight.check(plan, platform_for(device), config.slots, spare=spare, given_back=given_back, advise=advise)


def _attach(
    pipe: Any, config: OffloadConfig, plan: ResolvedPlan, backend: PlanBackend, undo: ExitStack
) -> OffloadHandle:
    """Give the pipeline its handle and its composed class; `undo` gets the way back first."""
    composed = composed_class(type(pipe))  # type: ignore[arg-type]
    handle = OffloadHandle(pipe, config, plan, backend, disable_omni_offload)
    for path, module in handle.modules().items():
        if owned_hook(module, COMPONENT_HOOK) is None:
            backend.add_resident(path, module, undo)
    undo.callback(_detach, pipe)
    register(handle)
    vars(pipe)[HANDLE_ATTRIBUTE] = handle
    pipe.__class__ = composed
    return handle


def _detach(pipe: Any) -> None:
    pipe.__class__ = stock_class(type(pipe))
    vars(pipe).pop(HANDLE_ATTRIBUTE, None)
