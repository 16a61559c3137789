"""What operations on weights cost: blocks that are packed anew, and device memory while a LoRA is fused."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from diffusers_omni_offload.weights.packed import PackedMaster
from tests.operations import lora
from tests.operations.families import FAMILIES, SD3, Family
from tests.operations.placements import PLACEMENTS
from tests.operations.subject import Change, Subject

accelerator = torch.accelerator
FAST = [SD3, *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family is not SD3)]
each_family = pytest.mark.parametrize("family", FAST, ids=lambda family: family.name)


def packed_by(subject: Subject, change: Change) -> list[str]:
    """The paths of what an operation and the next call pack anew."""
    paths: list[str] = []
    pack = PackedMaster.pack

    def noted(self: PackedMaster, *args: Any, **kwargs: Any) -> None:
        paths.append(self.path)
        pack(self, *args, **kwargs)

    with mock.patch.object(PackedMaster, "pack", noted):
        change(subject)
        subject.run()
    return sorted(paths)


def offloaded(family: Family, placement: str, dtype: torch.dtype | None = None) -> Subject:
    """An offloaded pipeline that was called once."""
    subject = Subject(family, dtype)
    subject.pipe.enable_omni_offload(**PLACEMENTS[placement])
    subject.run()
    return subject


def first_blocks(subject: Subject) -> list[str]:
    """The paths of the first block of each DiT."""
    return sorted(f"{expert}.{subject.family.stack}.0" for expert in subject.family.experts)


@each_family
def test_a_lora_of_one_block_packs_that_block_alone(family: Family, device: torch.device) -> None:
    """When it comes, and when it goes."""
    subject = offloaded(family, "streamed")
    assert packed_by(subject, lora.load_first_block) == first_blocks(subject)
    assert packed_by(subject, lambda subject: subject.pipe.unload_lora_weights()) == first_blocks(subject)
    assert packed_by(subject, lambda subject: None) == []


@each_family
def test_a_lora_of_the_dits_packs_the_dits_alone(family: Family, device: torch.device) -> None:
    """Module mode: the text encoders stay as they are."""
    subject = offloaded(family, "module-swapped")
    assert packed_by(subject, lora.load) == sorted(family.experts)
    assert packed_by(subject, lambda subject: subject.pipe.delete_adapters("style")) == sorted(family.experts)


@pytest.mark.parametrize("placement", ["streamed", "module-swapped"])
@pytest.mark.parametrize(
    "change",
    [lora.set_adapters, lora.choose_one, lora.scale_in_call, lora.disable, lora.enable],
    ids=lambda change: change.__name__,
)
def test_scales_and_switches_pack_nothing(change: Change, placement: str, device: torch.device) -> None:
    subject = offloaded(SD3, placement)
    lora.load(subject)
    lora.load_second(subject)
    subject.run()
    assert packed_by(subject, change) == []


@pytest.mark.parametrize("placement", ["streamed", "module-swapped"])
def test_hotswap_of_the_same_rank_packs_nothing(placement: str, device: torch.device) -> None:
    subject = offloaded(SD3, placement)
    lora.load(subject)
    subject.run()
    assert packed_by(subject, lora.hotswap) == []


FUSING: dict[str, Callable[[Subject], None]] = {
    "fuse": lora.fuse,
    "fuse safely": lora.fuse_safely,
    "fuse the DiT itself": lora.fuse_component,
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", FUSING)
@pytest.mark.parametrize("placement", ["streamed", "module-swapped"])
def test_fusing_takes_at_most_one_block_on_the_device(
    placement: str, way: str, dtype: torch.dtype | None, device: torch.device, sim: ModuleType
) -> None:
    """And so does unfusing, between calls and in the next one."""
    sim.configure(alloc_round=1)
    subject = offloaded(SD3, placement, dtype)
    lora.load(subject)
    subject.run()
    block = max(sum(leaf.nbytes for leaf in block.parameters()) for block in subject.blocks[0])
    for change in (FUSING[way], lora.unfuse):
        accelerator.reset_peak_memory_stats()
        before = accelerator.memory_allocated()
        change(subject)
        assert accelerator.max_memory_allocated() - before <= block
        assert accelerator.memory_allocated() <= before
        subject.run()
