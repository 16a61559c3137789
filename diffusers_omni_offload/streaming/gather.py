"""From shards to a slot: each rank's piece goes up, and an all-gather brings the others'.

A block comes in chunks. The piece of a chunk is copied to its place in the slot on the copy stream; the communication
stream waits for that and gathers the chunk in place. So one chunk is gathered while the next is copied, and both while
another block computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from diffusers_omni_offload.platform import Platform, Stream
from diffusers_omni_offload.streaming.slots import Slot
from diffusers_omni_offload.weights.master import Master
from diffusers_omni_offload.weights.sharded import ShardedMaster

#: The older name is deprecated where the newer one is.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Bytes that are gathered at once.
CHUNK_NBYTES = 64 << 20


class Gather:
    """Brings sharded masters into slots, on all ranks at once: each has to load the same ones in the same order.

    Args:
        platform: the device.
        process_group: the ranks that hold the shards.

    Attributes:
        gathered: number of blocks that were gathered.
        error: why the ranks' collectives don't match any more, once one has failed: a sentence.
    """

    lookahead = 0
    is_collective = True

    def __init__(self, platform: Platform, process_group: Any) -> None:
        self._group = process_group
        self._stream = platform.stream()
        self._copied = platform.event()
        self.gathered = 0
        self.error: BaseException | None = None
        self._history = hashlib.sha256()
        self._last = ""

    @property
    def digest(self) -> str:
        """Tells whether two ranks have gathered the same blocks in the same order."""
        return self._history.hexdigest()[:16]

    @property
    def progress(self) -> str:
        """How far this rank is, for a message."""
        return f"{self.gathered} blocks, the last one {self._last}" if self._last else "none"

    def serves(self, master: Master) -> bool:
        return isinstance(master, ShardedMaster)

    def expect(self, masters: Sequence[Master]) -> None: ...

    def is_ready(self, master: Master) -> bool:
        return True

    def load(self, master: ShardedMaster, slot: Slot, copies: Stream) -> int:
        """See `Transport.load`.

        Raises:
            RuntimeError: a collective failed, now or before: a rank is gone, or does something else.
        """
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
        sharding, shard = master.sharding, master.shard
        # Here it is a slip of ours and costs nothing; in a collective it would cost the weights.
        assert slot.buffer.numel() >= sharding.padded_nbytes
        self._history.update(master.path.encode() + b"\n")
        copies.wait_event(slot.free)
        try:
            for chunk in sharding.chunks():
                gathered = slot.buffer[chunk.start : chunk.start + chunk.piece_nbytes * sharding.ranks]
                own = gathered[sharding.rank * chunk.piece_nbytes :][: chunk.piece_nbytes]
                with copies:
                    own.copy_(shard[chunk.shard_start : chunk.shard_start + chunk.piece_nbytes], non_blocking=True)
                self._copied.record(copies)
                self._stream.wait_event(self._copied)
                with self._stream:
                    _all_gather(gathered, own, group=self._group)
        except BaseException as error:
            self.error = RuntimeError(broken_message(master.path, error))
            if isinstance(error, RuntimeError):
                raise RuntimeError(str(self.error)) from error
            raise
        slot.ready.record(self._stream)
        slot.writer = self._stream
        self.gathered, self._last = self.gathered + 1, master.path
        return sharding.shard_nbytes

    def settle(self) -> None:
        self._stream.synchronize()

    def release(self) -> None: ...


def broken_message(path: str, error: BaseException) -> str:
    """What to say of a collective that failed."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"{path} couldn't be gathered: another rank failed, is gone, or runs something else ({text}). The ranks' "
        "weights can't be brought together any more; start the processes anew."
    )
