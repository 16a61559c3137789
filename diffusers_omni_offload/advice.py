"""What to ask for instead, when a plan doesn't fit on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from diffusers_omni_offload.backends import preflight
from diffusers_omni_offload.config import OffloadConfig, OffloadStrategy
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.platform import resolve_device
from diffusers_omni_offload.topology.plan import ResolvedPlan

#: Share of the free memory that a call should leave for activations.
_FOR_ACTIVATIONS = 0.1


def what_fits(
    resolve: Callable[[OffloadConfig], ResolvedPlan], config: OffloadConfig, device: torch.device, available: int
) -> str:
    """A sentence with the call that fits and changes the least.

    Args:
        resolve: makes the pipeline's plan for another configuration, or raises.
        config: what doesn't fit.
        device: the execution device.
        available: free bytes there.
    """
    smallest: int | None = None
    tight = ""
    for options in _alternatives(config):
        arguments = dict(options)
        mode = arguments.pop("mode", None)
        if config.pin_memory is not True:
            arguments["pin_memory"] = config.pin_memory
        if config.resident_policy != "spread":
            arguments["resident_policy"] = config.resident_policy
        try:
            plan = resolve(OffloadConfig.from_options(mode, **arguments))
            preflight.require_ready(plan, device)
            need = preflight.device_need(plan, device, arguments.get("slots", 2))
        except (ValueError, TypeError, RuntimeError):
            continue  # This pipeline has no such component, or one that can't be offloaded.
        if need.total <= available:
            if device != resolve_device(None):
                arguments["device"] = str(device)
            words = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            chosen = "" if mode is None else f'"{mode}", '
            sentence = f"enable_omni_offload(pipe, {chosen}{words}) needs {format_bytes(need.total)}."
            if need.total <= available * (1 - _FOR_ACTIVATIONS):
                return sentence
            tight = tight or f"{sentence[:-1]} and leaves {format_bytes(available - need.total)} for activations."
        smallest = need.total if smallest is None else min(smallest, need.total)
    if tight:
        return tight
    least = f"Whatever is offloaded, it takes {format_bytes(smallest)}: " if smallest is not None else ""
    return f"{least}free some of the device's memory."


def _alternatives(config: OffloadConfig) -> Iterator[dict[str, Any]]:
    """Arguments of `enable_omni_offload`: fewer residents, more streamed encoders, fewer slots; then whole components
    that take turns."""
    encoders = ("text_encoder", "image_encoder")
    if config.strategy is not OffloadStrategy.MODEL_LEVEL and not config.choices:
        yield from _streamed_alternatives(config, encoders)
    slots = {} if config.slots == 2 else {"slots": min(config.slots, 2)}
    for dit, encoder in (("module", "module"), ("layer", "module"), ("layer", "layer")):
        for kinds in (encoders, encoders[:1], ()):
            yield {"components": {"dit": dit, **dict.fromkeys(kinds, encoder), "vae": "module"}, **slots}


def _streamed_alternatives(config: OffloadConfig, encoders: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    residents = max((options.resident_layers for options in config.layer_options.values()), default=0)
    chosen = config.components or ("dit",)
    selections = [tuple(dict.fromkeys((*chosen, *encoders[:count]))) for count in range(len(encoders) + 1)]
    rows = [(chosen, kept, config.slots) for kept in range(residents - 1, -1, -1)]
    rows += [(selection, kept, config.slots) for selection in selections for kept in dict.fromkeys((residents, 0))]
    rows += [(selections[-1], 0, slots) for slots in range(min(config.slots - 1, 2), 0, -1)]
    for components, kept, slots in rows:
        options: dict[str, Any] = {"mode": "layer", "components": list(components)}
        if kept:
            options["layer_options"] = {"dit": {"resident_layers": kept}}
        if slots != 2:
            options["slots"] = slots
        yield options
