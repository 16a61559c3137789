"""A block's forward on streamed weights, and what a block may do with them: read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diffusers_omni_offload.nested import any_tensor
from diffusers_omni_offload.streaming.guard import Edited, Watch, refuse_unservable, uncached_casts, view_message
from diffusers_omni_offload.streaming.scope import CallScope
from diffusers_omni_offload.streaming.shared import SharedLeaves
from diffusers_omni_offload.streaming.streamer import Streamer


class BlockRunner:
    """Runs the forwards of a streamer's blocks and refuses what streamed weights can't serve.

    Args:
        streamer: what binds the blocks.
        scope: opened around a block that is called on its own.
        shared: leaves that several blocks, or blocks and other modules, hold; None if there are none.
        edited: tells what a forward has changed for good.
    """

    def __init__(self, streamer: Streamer, scope: CallScope, shared: SharedLeaves | None, edited: Edited) -> None:
        self._streamer, self._scope, self._shared, self._edited = streamer, scope, shared, edited
        self._device_type = streamer.platform.device.type
        self._inspected: set[int] = set()

    def inspect_again(self) -> None:
        """Look once more, in each block's next forward, at what it does to its leaves and keeps of them."""
        self._inspected.clear()

    @torch.compiler.disable
    def run(self, block: int, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`forward(*args, **kwargs)` with the block's weights on the device.

        Raises:
            RuntimeError: the forward needs gradients, is being captured into a graph, wrote to the block's weights
                or returned a view of them.
        """
        if not self._scope.is_open or (self._shared is not None and not self._shared.is_bound):
            with self._scope.opened():
                if self._shared is None:
                    return self._run(block, forward, args, kwargs)
                with self._shared:
                    return self._run(block, forward, args, kwargs)
        return self._run(block, forward, args, kwargs)

    def _run(self, block: int, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        streamer = self._streamer
        master = streamer.masters[block]
        if master is None:
            slot = streamer.enter(block)
            try:
                return forward(*args, **kwargs)
            finally:
                streamer.leave(block, slot)
        refuse_unservable(streamer.platform, master, args, kwargs)
        slot = streamer.enter(block)
        assert slot is not None
        watch = Watch(streamer, master, slot, self._edited, is_thorough=block not in self._inspected)
        try:
            with uncached_casts(self._device_type):
                output = forward(*args, **kwargs)
            watch.look()
        except BaseException:
            watch.take_edits()
            raise
        finally:
            streamer.leave(block, slot)
        watch.refuse_gradients(output)
        if any_tensor(output, slot.holds):
            raise RuntimeError(view_message(f"{master.path} returned"))
        watch.refuse_kept_views()
        if watch.casts:
            streamer.take_casts(block, watch.casts)
        self._inspected.add(block)
        return output
