"""Layerwise offload: blocks stream through slots."""

from __future__ import annotations

from diffusers_omni_offload.backends.plan_backend import PlanBackend


class LayerwiseBackend(PlanBackend):
    """Streams the blocks of the selected components; the rest stays on the device, or is swapped."""
