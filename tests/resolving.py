"""Toy pipelines, and the configurations and checks that the tests of the resolver share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.declarations import OffloadPlan
from diffusers_omni_offload.topology import findings
from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.topology.resolver import resolve_offload_plan


@pytest.fixture(autouse=True)
def strict_warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warnings of earlier tests are forgotten, and one that a test doesn't expect fails it."""
    monkeypatch.setattr(findings, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def blocks(count: int, width: int = 2) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


class Stack(nn.Module):
    """Lists of blocks by name, and an embedding beside them."""

    def __init__(self, **counts: int) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        for name, count in counts.items():
            setattr(self, name, blocks(count))


class Pipeline:
    """A plain object with attributes; declarations are given as keyword arguments."""

    def __init__(self, components: dict[str, Any], **declared: Any) -> None:
        for name, value in {**components, **{f"_{key}": value for key, value in declared.items()}}.items():
            setattr(self, name, value)


def pipeline(
    components: dict[str, Any],
    dit: Any = ("transformer",),
    encoder: Any = (),
    vae: Any = (),
    resident: Any = (),
    **plan: Any,
) -> Pipeline:
    return Pipeline(
        components,
        dit_modules=dit,
        encoder_modules=encoder,
        vae_modules=vae,
        resident_modules=resident,
        offload_plan=OffloadPlan(**plan),
    )


def layer(*components: str, residents: int = 0, **options: Any) -> OffloadConfig:
    layer_options = {"dit": {"resident_layers": residents}} if residents else None
    return OffloadConfig.from_options("layer", components=components or None, layer_options=layer_options, **options)


def legacy(distributed: bool = False, residents: int = 0) -> OffloadConfig:
    return OffloadConfig.from_od_config(
        {
            "enable_layerwise_offload": not distributed,
            "enable_distributed_layerwise_offload": distributed,
            "dlo_use_allgather": False,
            "dlo_resident_layers": residents,
        }
    )


def refuses(words: list[str], subject: Any, config: OffloadConfig, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error) as caught:
        resolve_offload_plan(subject, config)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def paths(plan: ResolvedPlan) -> dict[str, tuple[str, ...]]:
    return {stack.component: stack.block_paths for stack in plan.stacks}


def with_role(plan: ResolvedPlan, role: str) -> list[str]:
    """The paths of the components of a role."""
    return [component.path for component in plan.components if component.role == role]


BLOCKS = {"transformer": ("blocks",)}
LAYERS = ("layers",)
