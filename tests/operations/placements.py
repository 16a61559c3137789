"""Where the weights are that operations are done to, as arguments of `enable_omni_offload`."""

from __future__ import annotations

from typing import Any

import torch

from tests.comparing import modules

PLACEMENTS: dict[str, dict[str, Any]] = {
    "streamed": {"mode": "layer", "components": ["dit", "text_encoder"]},
    "resident": {"mode": "layer", "layer_options": {"dit": {"resident_layers": 99}}},
    "module-swapped": {"mode": "module"},
}
"""All blocks streamed, those of text encoders too; all blocks on the device; DiTs and text encoders swapped."""

MIXED: dict[str, dict[str, Any]] = {
    "partly resident": {"mode": "layer", "slots": 3, "layer_options": {"dit": {"resident_layers": 1}}},
    "resident beside swapped": {"components": {"dit": "resident", "text_encoder": "module"}},
}
"""Others, for walks."""


def misplaced(pipe: Any, device: torch.device) -> list[str]:
    """The parameters and buffers of an offloaded pipeline at rest that aren't where its plan has them."""
    plan = pipe.omni_offload.plan
    offloaded = [stack.blocks[index] for stack in plan.stacks for index in stack.streamed]
    offloaded += [plan.module(path) for path in plan.swapped]
    on_host = {id(module) for outer in offloaded for module in outer.modules()}
    found = []
    for path, module in modules(pipe):
        home = torch.device("cpu") if id(module) in on_host else device
        for table in (module._parameters, module._buffers):
            found += [
                f"{path}.{name} is on {str(tensor.device)!r}"
                for name, tensor in table.items()
                if tensor is not None and tensor.device.type != home.type
            ]
    return found
