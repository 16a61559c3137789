"""Blocks that are gathered from shares, and the same blocks resident: for one rank alone, or for each of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from diffusers_omni_offload.platform import Platform
from diffusers_omni_offload.streaming.gather import Gather
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.streaming.transport import HostToDevice
from diffusers_omni_offload.weights.leaves import find_leaves
from diffusers_omni_offload.weights.master import Master
from diffusers_omni_offload.weights.packed import PackedMaster
from diffusers_omni_offload.weights.pinning import PinnedBudget
from diffusers_omni_offload.weights.sharded import ShardedMaster, Sharding
from tests.simdevice.collectives import install_collectives
from tests.tiny.toy import ToyBlock


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, on the simulated device, which has to be installed."""
    dist.init_process_group(install_collectives(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Gathered:
    """A streamer of toy blocks whose shares the ranks of the default group hold, as far as they aren't `local`.

    Args:
        count: number of blocks.
        slots: of the streamer.
        chunk_nbytes: of a gather.
        local: blocks that each rank has whole.
        hidden: features of the blocks' hidden layers, repeated.
    """

    def __init__(
        self,
        count: int = 4,
        slots: int = 2,
        *,
        chunk_nbytes: int = 2048,
        local: Sequence[int] = (),
        hidden: Sequence[int] = (48,),
        width: int = 16,
    ) -> None:
        self.platform = Platform(torch.device("sim", 0))
        self.gather = Gather(self.platform, None)
        self.streamer = Streamer(self.platform, slots, [self.gather, HostToDevice()])
        self.blocks, twins = (
            [ToyBlock(width, hidden[n % len(hidden)], seed=n).eval().requires_grad_(False) for n in range(count)]
            for _ in range(2)
        )
        self.twins = [twin.to(self.platform.device) for twin in twins]
        self.masters: list[Master] = []
        budget = PinnedBudget(True)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for n, block in enumerate(self.blocks):
            path, find = f"blocks.{n}", lambda n=n, block=block: find_leaves(block, f"blocks.{n}")  # type: ignore[misc]
            master: Master
            if n in local:
                master = PackedMaster(find, [block], path, self.platform, budget)
                master.pack()
            else:
                share = lambda nbytes: Sharding(nbytes, ranks, rank, chunk_nbytes)  # noqa: E731
                master = ShardedMaster(find, [block], path, self.platform, budget, share)
                master.pack()
                master.commit()
            self.masters.append(master)
        self.streamer.add_stack(self.masters)
        self.x = torch.linspace(-1, 1, 4 * width).reshape(1, 4, width).to(self.platform.device)

    @torch.no_grad()
    def forward(self, order: Sequence[int]) -> torch.Tensor:
        """Blocks in this order, inside of a call."""
        x = self.x
        for n in order:
            slot = self.streamer.enter(n)
            try:
                x = self.blocks[n](x)
            finally:
                self.streamer.leave(n, slot)
        return x

    def run(self, order: Sequence[int]) -> torch.Tensor:
        """A call."""
        self.streamer.begin()
        try:
            return self.forward(order)
        finally:
            self.streamer.end()

    @torch.no_grad()
    def resident(self, order: Sequence[int]) -> torch.Tensor:
        """The same with the twins."""
        x = self.x
        for n in order:
            x = self.twins[n](x)
        return x

    def check(self, order: Sequence[int]) -> None:
        """A call gives what the twins do."""
        output = self.run(order)
        assert torch.equal(output.cpu(), self.resident(order).cpu()), "wrong values"
