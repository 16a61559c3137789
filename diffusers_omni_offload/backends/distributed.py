"""Distributed layerwise offload. In a group of one with rank-local transfer it is the layerwise streamer."""

from __future__ import annotations

from diffusers_omni_offload.backends.plan_backend import PlanBackend


class DistributedLayerwiseBackend(PlanBackend):
    """Layerwise offload with resident blocks: whole blocks per rank, streamed from the rank's own host memory."""
