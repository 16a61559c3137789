"""Blocks whose weights are in a file, and a transport that copies them straight from the page cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from diffusers_omni_offload.backends.masters import Unit
from diffusers_omni_offload.platform import Platform, platform_for
from diffusers_omni_offload.streaming.page_cache import Ceiling, FromPageCache
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.streaming.staging import Staging
from diffusers_omni_offload.weights.checkpoint import CheckpointFile
from diffusers_omni_offload.weights.mapped import MappedMaster
from diffusers_omni_offload.weights.pinning import PinnedBudget
from diffusers_omni_offload.weights.sources import LeafSource, Segment

#: More than fits in a page, and no whole number of pages.
WIDTH = 40


class Cached:
    """Linear blocks in files of some blocks each, with what a streamer has.

    Args:
        device: the simulated device.
        files: how many blocks each file has.
        width: features of a block.
        ceiling: how many bytes may be page-locked.
        pieces: so many pieces make up each weight in the file.
        stored: what the files have.
        slots: device buffers.
        folder: where the files go; one of its own if None.

    Attributes:
        blocks: the modules.
        masters: theirs, in order.
        paths: the files.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        files: Sequence[int] = (3,),
        width: int = WIDTH,
        ceiling: int = 1 << 30,
        pieces: int = 1,
        stored: torch.dtype = torch.float32,
        slots: int = 2,
        folder: Path | None = None,
        platform: Platform | None = None,
    ) -> None:
        self._folder = None if folder is not None else tempfile.TemporaryDirectory()
        folder = Path(self._folder.name) if folder is None and self._folder is not None else folder
        assert folder is not None
        torch.manual_seed(0)
        self.blocks = [nn.Linear(width, width).requires_grad_(False) for _ in range(sum(files))]
        self.paths = [folder / f"{number}.safetensors" for number in range(len(files))]
        self.masters = list(self._saved(files, pieces, stored))
        self.platform = platform if platform is not None else platform_for(device)
        self.budget = PinnedBudget(True)
        self.staging = Staging(self.platform, self.budget)
        self.ceiling = ceiling
        ceilings = [Ceiling(ceiling, tuple(self.masters))]
        self.transport = FromPageCache(self.platform, self.staging, lambda: ceilings)
        self.copies = self.platform.stream()
        self.slots = [Slot(self.masters[0].nbytes, self.platform) for _ in range(slots)]
        self._turn = 0

    def _saved(self, files: Sequence[int], pieces: int, stored: torch.dtype) -> Iterator[MappedMaster]:
        first = 0
        for path, count in zip(self.paths, files, strict=True):
            blocks = {f"{i:02}": self.blocks[i] for i in range(first, first + count)}
            first += count
            content = {}
            for name, block in blocks.items():
                for i, part in enumerate(block.weight.chunk(pieces)):
                    content[f"{name}.weight.{i}"] = part.to(stored).contiguous()
                content[f"{name}.bias"] = block.bias.to(stored)
            save_file(content, path)
            file = CheckpointFile(path)
            for name, block in blocks.items():
                keys = {"weight": [f"{name}.weight.{i}" for i in range(pieces)], "bias": [f"{name}.bias"]}
                origins = {}
                for attribute, parts in keys.items():
                    leaf = getattr(block, attribute)
                    entries = [file.entries[key] for key in parts]
                    segments = tuple(Segment(file, entry.start, entry.nbytes) for entry in entries)
                    origins[id(leaf)] = (leaf, LeafSource(segments, stored, leaf.dtype, leaf.shape))
                unit = Unit(f"blocks.{name}", block)
                master = MappedMaster(partial(unit.leaves, frozenset()), [block], unit.path, origins)
                master.pack()
                yield master

    def load(self, master: MappedMaster) -> Slot:
        """Load into the next slot. Nothing waits for the copy, so that the device may put it off."""
        slot = self.slots[self._turn % len(self.slots)]
        self._turn += 1
        self.transport.load(master, slot, self.copies)
        return slot

    def compute(self, slot: Slot, master: MappedMaster) -> torch.Tensor:
        """Have the device read the slot: a copy of its bytes, on the device."""
        stream = self.platform.current_stream()
        stream.wait_event(slot.ready)
        output = slot.buffer[: master.nbytes].clone()
        slot.free.record(stream)
        return output

    def run(self, master: MappedMaster) -> torch.Tensor:
        """Load and compute."""
        return self.compute(self.load(master), master)

    def run_all(self) -> None:
        """Every block, expected ahead; AssertionError if one has wrong bytes."""
        for number, master in enumerate(self.masters):
            self.transport.expect(self.masters[number : number + 2])
            check(master, self.run(master))

    def straight(self) -> list[int]:
        """The blocks that are copied straight from the page cache, found by loading each."""
        found = []
        for number, master in enumerate(self.masters):
            before = self.transport.loads
            check(master, self.run(master))
            if self.transport.loads > before:
                found.append(number)
        return found


def check(master: MappedMaster, output: torch.Tensor) -> None:
    """The leaves' bytes are the master's; what lies between them is nobody's."""
    expected = torch.zeros(master.nbytes, dtype=torch.uint8)
    master.read_into(expected)
    found = output.cpu()
    for offset, leaf in master.source.leaves:
        end = offset + leaf.nbytes
        assert torch.equal(found[offset:end], expected[offset:end]), f"wrong values of {master.path}"


def is_mapped_shared(path: Path) -> bool:
    """Whether this process has a shared mapping of a file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.endswith(str(path)) and line.split()[1].endswith("s") for line in lines)
