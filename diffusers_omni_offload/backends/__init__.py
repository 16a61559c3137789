"""Strategies: each puts masters, a streamer and hooks together for a plan."""

from __future__ import annotations

import torch

from diffusers_omni_offload.backends.base import Counters, OffloadBackend
from diffusers_omni_offload.backends.delegated import DelegatedBackend, is_delegated
from diffusers_omni_offload.backends.distributed import DistributedLayerwiseBackend
from diffusers_omni_offload.backends.layerwise import LayerwiseBackend
from diffusers_omni_offload.backends.model_level import ModelLevelBackend
from diffusers_omni_offload.backends.plan_backend import PlanBackend
from diffusers_omni_offload.config import OffloadConfig, OffloadStrategy
from diffusers_omni_offload.messages import logger
from diffusers_omni_offload.platform import is_supported, resolve_device

__all__ = [
    "Counters",
    "DelegatedBackend",
    "DistributedLayerwiseBackend",
    "LayerwiseBackend",
    "ModelLevelBackend",
    "OffloadBackend",
    "PlanBackend",
    "get_offload_backend",
    "is_delegated",
]

_BACKENDS: dict[OffloadStrategy, type[PlanBackend]] = {
    OffloadStrategy.MODEL_LEVEL: ModelLevelBackend,
    OffloadStrategy.LAYERWISE: LayerwiseBackend,
    OffloadStrategy.DISTRIBUTED_LAYERWISE: DistributedLayerwiseBackend,
}


def get_offload_backend(config: OffloadConfig, device: torch.device, pipeline: object = None) -> OffloadBackend | None:
    """The strategy that carries out a configuration.

    Args:
        config: the configuration.
        device: the execution device, the current one of its type if it has no index.
        pipeline: what is to be offloaded. Model-level offload is left to a pipeline that moves its own phases.

    Returns:
        The backend; None, with one line in the log, if there is nothing to do or nowhere to do it.
    """
    if config.strategy is OffloadStrategy.NONE:
        logger.info("Offload is off: the configuration selects no strategy.")
        return None
    if not is_supported(device):
        logger.warning("Offload is off: the device %r can't be streamed to.", str(device))
        return None
    if is_delegated(pipeline, config):
        return DelegatedBackend(config, resolve_device(device), pipeline)
    return _BACKENDS[config.strategy](config, resolve_device(device))
