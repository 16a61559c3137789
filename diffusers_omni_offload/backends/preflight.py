"""What has to hold before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from diffusers_omni_offload import hooks
from diffusers_omni_offload.backends.compiling import require_continuable
from diffusers_omni_offload.backends.entry_points import require_methods
from diffusers_omni_offload.backends.masters import Unit, units_of
from diffusers_omni_offload.backends.origins import readable
from diffusers_omni_offload.backends.residency import require_placeable
from diffusers_omni_offload.backends.sharing import shared_leaves
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.streaming.stages import largest_together
from diffusers_omni_offload.topology.fsdp import left_to_fsdp
from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.weights.kinds import wrappers_of
from diffusers_omni_offload.weights.leaves import (
    Leaf,
    distinct_leaves,
    find_leaves,
    packed_nbytes,
    require_plain,
)
from diffusers_omni_offload.weights.withheld import is_withheld
from diffusers_omni_offload.weights.wrappers import form_of


@dataclass(frozen=True)
class DeviceNeed:
    """Device bytes that a plan takes on top of what is there already.

    Attributes:
        state: non-block state and components that aren't streamed, as far as they aren't on the device.
        residents: resident blocks, likewise.
        slots: the slots, and the buffer of leaves that several blocks share.
        swapped: the swapped components that are on the device together, in the moment when that is most.
        freed: streamed blocks and swapped components that are on the device now and will leave it.
    """

    state: int
    residents: int
    slots: int
    swapped: int
    freed: int

    @property
    def total(self) -> int:
        """Bytes that must be free."""
        return max(0, self.state + self.residents + self.slots + self.swapped - self.freed)

    def __str__(self) -> str:
        parts = [
            f"{format_bytes(self.state)} for what isn't offloaded",
            f"{format_bytes(self.residents)} for resident blocks",
            f"{format_bytes(self.slots)} for slots",
        ]
        if self.swapped:
            parts.append(f"{format_bytes(self.swapped)} for swapped components")
        return ", ".join(parts)


def device_need(plan: ResolvedPlan, device: torch.device, slots: int) -> DeviceNeed:
    """What `plan` takes on `device` with `slots` slots, from shapes and dtypes."""
    residents = largest = 0
    units = units_of(plan)
    shared = _shared(plan, units)
    counted = {id(leaf.tensor) for leaf in shared}
    apart = packed_nbytes(shared)
    freed = sum(leaf.nbytes for leaf in shared if leaf.tensor.device == device)
    for stack in plan.stacks:
        kept = set(stack.resident)
        for index, block in enumerate(stack.blocks):
            leaves = find_leaves(block, "", counted)
            counted.update(id(leaf.tensor) for leaf in leaves)
            on_device = sum(leaf.nbytes for leaf in leaves if leaf.tensor.device == device)
            total = sum(leaf.nbytes for leaf in leaves)
            if index in kept:
                residents += total - on_device
            else:
                largest = max(largest, packed_nbytes(leaves))
                freed += on_device
    groups = {plan.component(path).module: plan.group(plan.component(path)) for path in plan.swapped}
    stages: list[tuple[str, int]] = []
    for unit in units:
        if unit.module in groups:
            leaves = unit.leaves(counted)
            counted.update(id(leaf.tensor) for leaf in leaves)
            freed += sum(leaf.nbytes for leaf in leaves if leaf.tensor.device == device)
            stages.append((groups[unit.module], packed_nbytes(leaves)))
    for path in plan.on_demand:
        counted.update(id(leaf.tensor) for leaf in find_leaves(plan.module(path), path))
    state = 0
    for component in plan.components:
        counted.update(left_to_fsdp(component.module))
        leaves = find_leaves(component.module, "", counted)
        counted.update(id(leaf.tensor) for leaf in leaves)
        state += sum(leaf.nbytes for leaf in leaves if leaf.tensor.device != device)
    return DeviceNeed(state, residents, slots * largest + apart, largest_together(stages), freed)


def _shared(plan: ResolvedPlan, units: Sequence[Unit]) -> list[Leaf]:
    inside = {module for unit in units for module in unit.module.modules()}
    elsewhere = distinct_leaves(
        ("", module) for component in plan.components for module in component.module.modules() if module not in inside
    )
    return shared_leaves([unit.leaves() for unit in units], elsewhere)


def check(
    plan: ResolvedPlan,
    platform: Platform,
    slots: int,
    *,
    spare: int = 0,
    given_back: AbstractSet[int] = frozenset(),
    advise: Callable[[int], str] = lambda available: "Free some of it, or use fewer slots or resident layers.",
) -> None:
    """All of the preflight: `require_ready`, then `require_memory`; see there."""
    require_ready(plan, platform.device, given_back)
    require_memory(plan, platform, slots, spare=spare, advise=advise)


def require_memory(
    plan: ResolvedPlan,
    platform: Platform,
    slots: int,
    *,
    spare: int,
    advise: Callable[[int], str],
) -> None:
    """Refuse a plan whose weights and slots don't fit in the free device memory; the host's isn't looked at.

    Args:
        plan: the plan.
        platform: the device.
        slots: the number of slots.
        spare: bytes in use now that will be free by then.
        advise: given the free bytes, a sentence that says what to do.

    Raises:
        RuntimeError: with the sizes, and that sentence.
    """
    if not platform.is_asynchronous:
        return
    available = platform.free_bytes() + spare
    need = device_need(plan, platform.device, slots)
    if need.total > available:
        raise RuntimeError(
            f"{str(platform.device)!r} has {format_bytes(available)} free, and this needs {format_bytes(need.total)} "
            f"before any activations: {need}. {advise(available)}"
        )


def require_ready(plan: ResolvedPlan, device: torch.device, given_back: AbstractSet[int] = frozenset()) -> None:
    """Refuse a pipeline whose weights belong to somebody else, or can't be offloaded or placed.

    Args:
        plan: the plan.
        device: the execution device.
        given_back: `id` of weights that may be withheld now, but won't be when the plan is carried out.

    Raises:
        RuntimeError: another offload is on, or the pipeline is spread over devices.
        TypeError: a component is wrapped by torch.compile, or a weight is of a kind that isn't known, or that another
            device keeps in another form.
        ValueError: a weight is on the meta device, or a declared entry point isn't there.
    """
    for component in plan.components:
        require_unwrapped(component.path, component.module)
        owner = hooks.foreign_offload(list(component.module.modules()))
        if owner is not None:
            raise RuntimeError(
                f"{component.path}'s weights are moved by {owner} already. Turn that off first: "
                "pipe.remove_all_hooks() for accelerate's offload; for group offload, load the pipeline anew."
            )
        if getattr(component.module, "hf_device_map", None) and not _is_quantized_on_one_device(component.module):
            raise RuntimeError(
                f"{component.path} was loaded with a device_map, which places it for good. "
                "Call pipe.reset_device_map() first, or load the pipeline without device_map."
            )
    require_continuable(plan)
    for component in plan.components:
        require_methods(component.module, component.path, plan.entry_points.get(component.path, ()))
    offloaded = {id(leaf.tensor) for path in plan.on_demand for leaf in find_leaves(plan.module(path), path)}
    known: set[tuple[object, ...]] = set()
    readable_ones = frozenset(given_back).union(*(readable(component.module) for component in plan.components))
    for unit in units_of(plan):
        for leaf in unit.leaves():
            if not (is_withheld(leaf.tensor) and id(leaf.tensor) in readable_ones):
                require_plain(leaf)
            offloaded.add(id(leaf.tensor))
        require_same_form(unit, device, known)
    for component in plan.components:
        offloaded.update(left_to_fsdp(component.module))
        leaves = find_leaves(component.module, component.path, offloaded)
        require_placeable([leaf for leaf in leaves if id(leaf.tensor) not in readable_ones], device)


def require_unwrapped(path: str, module: nn.Module) -> None:
    """Refuse a component that `torch.compile(component)` has wrapped.

    Raises:
        TypeError: it says how to compile it in place.
    """
    if isinstance(module, OptimizedModule):
        raise TypeError(
            f"{path} is wrapped by torch.compile, and offload works on the component itself. Compile it in place: "
            f"pipe.{path} = pipe.{path}._orig_mod, then pipe.{path}.compile()."
        )


def require_same_form(unit: Unit, device: torch.device, known: set[tuple[object, ...]]) -> None:
    """Refuse quantized weights that their library keeps in another form on the device, where it has other kernels.

    Args:
        unit: whose weights to look at.
        device: the device.
        known: forms that were found to be the same there; gets those of this unit.

    Raises:
        TypeError: it names the weight and its type there.
    """
    for path, module in unit.module.named_modules(prefix=unit.path):
        for name, weight in wrappers_of(module).items():
            form = form_of(weight.detach())
            if form in known:
                continue
            known.add(form)
            moved = weight.detach().to(device)
            if form_of(moved) != form:
                raise TypeError(
                    f"{path}.{name} is a {type(weight).__name__}, which {str(device)!r} keeps in another form "
                    f"({type(moved).__name__}), so it can't be copied there byte by byte. Quantize the component on "
                    "that device, before enabling, or leave it out of `components`."
                )


def _is_quantized_on_one_device(module: nn.Module) -> bool:
    """Loaders of quantized weights give a device map to components that they put on a single device."""
    devices: dict[str, object] = module.hf_device_map  # type: ignore[assignment]
    is_quantized = getattr(module, "hf_quantizer", None) or getattr(module, "quantization_method", None)
    return bool(is_quantized) and len(set(devices.values())) == 1
