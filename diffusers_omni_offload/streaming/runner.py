"""A block's forward on streamed weights, and what a block may do with them: read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diffusers_omni_offload.nested import any_tensor
from diffusers_omni_offload.streaming.guard import (
    gradient_message,
    needs_gradient,
    refuse_unservable,
    view_message,
    written_message,
)
from diffusers_omni_offload.streaming.scope import CallScope
from diffusers_omni_offload.streaming.shared import SharedLeaves
from diffusers_omni_offload.streaming.streamer import Streamer


class BlockRunner:
    """Runs the forwards of a streamer's blocks and refuses what streamed weights can't serve.

    Args:
        streamer: what binds the blocks.
        scope: opened around a block that is called on its own.
        shared: leaves that several blocks, or blocks and other modules, hold; None if there are none.
    """

    def __init__(self, streamer: Streamer, scope: CallScope, shared: SharedLeaves | None) -> None:
        self._streamer, self._scope, self._shared = streamer, scope, shared
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
            streamer.enter(block)
            return forward(*args, **kwargs)
        refuse_unservable(streamer.platform, master, args, kwargs)
        slot = streamer.enter(block)
        assert slot is not None
        versions = master.versions()
        caches_casts = torch.is_autocast_enabled(self._device_type) and torch.is_autocast_cache_enabled()
        if caches_casts:
            # Autocast caches a weight's cast by the tensor object, which holds another slot's bytes next time.
            torch.set_autocast_cache_enabled(False)
        try:
            output = forward(*args, **kwargs)
            written = master.written_leaf(versions)
            if written is None and block not in self._inspected:
                written = master.replaced_leaf(slot.buffer)
        finally:
            if caches_casts:
                torch.set_autocast_cache_enabled(True)
            streamer.leave(block, slot)
        if written is not None:
            raise RuntimeError(written_message(written))
        if torch.is_grad_enabled() and any_tensor(output, needs_gradient):
            raise RuntimeError(gradient_message(master.path, "its output"))
        if any_tensor(output, slot.holds):
            raise RuntimeError(view_message(f"{master.path} returned"))
        if block not in self._inspected:
            kept = master.attribute_where(slot.holds)
            if kept is not None:
                raise RuntimeError(view_message(f"{kept} keeps"))
            self._inspected.add(block)
        return output
