"""A block's forward on streamed weights, and what a block may do with them: read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diffusers_omni_offload.streaming.scope import CallScope
from diffusers_omni_offload.streaming.shared import SharedLeaves
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.weights.master import Master


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
        if torch.is_grad_enabled():
            _refuse_gradients(master, args, kwargs)
        if streamer.platform.is_capturing():
            raise RuntimeError(
                f"{master.path} is streamed, and its stream is being captured into a graph: a replay would read "
                "slots that hold other blocks by then. Run it without CUDA graphs, or don't stream its component."
            )
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
            raise RuntimeError(
                f"{written} was written to during its block's forward. A streamed block may only read its weights and "
                "buffers, since what it writes goes to a slot and is lost. Call .eval() on the component if this is "
                "a running statistic, or leave the component out of `components`."
            )
        if torch.is_grad_enabled() and _any_tensor(output, _needs_gradient):
            raise RuntimeError(_gradient_message(master.path, "its output"))
        if _any_tensor(output, slot.holds):
            raise RuntimeError(_view_message(f"{master.path} returned"))
        if block not in self._inspected:
            kept = master.attribute_where(slot.holds)
            if kept is not None:
                raise RuntimeError(_view_message(f"{kept} keeps"))
            self._inspected.add(block)
        return output


def _refuse_gradients(master: Master, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if master.requires_grad():
        raise RuntimeError(_gradient_message(master.path, "one of its parameters"))
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())):
        raise RuntimeError(_gradient_message(master.path, "one of its inputs"))


def _gradient_message(path: str, what: str) -> str:
    return (
        f"{path} ran with gradients enabled and {what} requires one. Offloaded weights are for inference: run it under "
        "torch.no_grad(), or disable offload to train."
    )


def _view_message(who: str) -> str:
    return (
        f"{who} a view of the block's own weights, which other blocks' weights overwrite once the block is over. "
        "Take a copy (.clone()), or leave the component out of `components`."
    )


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


def _any_tensor(value: Any, test: Callable[[torch.Tensor], bool]) -> bool:
    """Whether `test` holds for any tensor in `value`: a tensor, or tuples, lists, mappings and dataclasses of such."""
    if isinstance(value, torch.Tensor):
        return test(value)
    if isinstance(value, (tuple, list)):
        return any(_any_tensor(item, test) for item in value)
    if isinstance(value, Mapping):
        return any(_any_tensor(item, test) for item in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_any_tensor(getattr(value, field.name, None), test) for field in dataclasses.fields(value))
    return False
