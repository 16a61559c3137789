"""Stream the weights of stock diffusers pipelines from host memory: the same output, bit for bit, on a small GPU.

>>> import diffusers_omni_offload
>>> handle = pipe.enable_omni_offload("layer")

Importing this package gives every pipeline three names, `enable_omni_offload`, `disable_omni_offload` and
`omni_offload`, and changes nothing else of diffusers.
"""

from __future__ import annotations

from diffusers import DiffusionPipeline
from diffusers.modular_pipelines import ModularPipeline

from diffusers_omni_offload.agreement import AgreementError, RankFailed, RankMissing, RanksDisagree
from diffusers_omni_offload.backends import OffloadBackend, get_offload_backend
from diffusers_omni_offload.config import LayerOptions, OffloadConfig, OffloadStrategy, WeightTransfer
from diffusers_omni_offload.declarations import (
    OffloadPlan,
    Stored,
    SupportsComponentDiscovery,
    SupportsModelCpuOffload,
)
from diffusers_omni_offload.forecast import OffloadForecast
from diffusers_omni_offload.handle import OffloadHandle, omni_offload
from diffusers_omni_offload.loading import load_omni_pipeline
from diffusers_omni_offload.phases import PhaseOffload
from diffusers_omni_offload.pipeline import disable_omni_offload, enable_from_config, enable_omni_offload
from diffusers_omni_offload.planner import plan_omni_offload
from diffusers_omni_offload.planning.refusal import DoesNotFit
from diffusers_omni_offload.registry import adapter_for, register_adapter, registered_pipelines
from diffusers_omni_offload.report import OffloadReport
from diffusers_omni_offload.topology.plan import BlockStack, ResolvedComponent, ResolvedPlan
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from diffusers_omni_offload.tracing import Trace
from diffusers_omni_offload.waves import spread_prompts
from diffusers_omni_offload.weights.checkpoint import CheckpointError

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "BlockStack",
    "CheckpointError",
    "DoesNotFit",
    "LayerOptions",
    "OffloadBackend",
    "OffloadConfig",
    "OffloadForecast",
    "OffloadHandle",
    "OffloadPlan",
    "OffloadReport",
    "OffloadStrategy",
    "PhaseOffload",
    "RankFailed",
    "RankMissing",
    "RanksDisagree",
    "ResolvedComponent",
    "ResolvedPlan",
    "Stored",
    "SupportsComponentDiscovery",
    "SupportsModelCpuOffload",
    "Trace",
    "WeightTransfer",
    "adapter_for",
    "disable_omni_offload",
    "enable_from_config",
    "enable_omni_offload",
    "get_offload_backend",
    "load_omni_pipeline",
    "omni_offload",
    "plan_omni_offload",
    "register_adapter",
    "registered_pipelines",
    "resolve_offload_plan",
    "spread_prompts",
]

for _pipeline_class in (DiffusionPipeline, ModularPipeline):
    _pipeline_class.enable_omni_offload = enable_omni_offload  # type: ignore[union-attr]
    _pipeline_class.disable_omni_offload = disable_omni_offload  # type: ignore[union-attr]
    _pipeline_class.omni_offload = property(omni_offload)  # type: ignore[union-attr]
