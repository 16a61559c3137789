"""Model-level offload: whole components take turns on the device."""

from __future__ import annotations

from diffusers_omni_offload.backends.plan_backend import PlanBackend


class ModelLevelBackend(PlanBackend):
    """Swaps the selected components: encoders leave before a DiT runs, and DiTs before an encoder or another DiT."""
