"""An entry point of a swapped component, run on its weights on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diffusers_omni_offload.nested import any_tensor, map_tensors
from diffusers_omni_offload.streaming.guard import (
    gradient_message,
    needs_gradient,
    refuse_unservable,
    view_message,
    written_message,
)
from diffusers_omni_offload.streaming.stages import PackedStage, Stage, Stages
from diffusers_omni_offload.streaming.streamer import Streamer


class StageRunner:
    """Runs entry points of stages and refuses what swapped weights can't serve.

    Args:
        streamer: what binds the weights.
        stages: all of the pipeline's.
    """

    def __init__(self, streamer: Streamer, stages: Stages) -> None:
        self._streamer, self._stages = streamer, stages
        self._inspected: set[tuple[Stage, int, str]] = set()

    def inspect_again(self) -> None:
        """Look once more, the next time that each stage is entered by each way, at what it does to its weights."""
        self._inspected.clear()

    @torch.compiler.disable
    def run(self, stage: Stage, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`function(*args, **kwargs)`, an entry point that comes from outside, with the weights on the device.

        Raises:
            RuntimeError: it needs gradients, is being captured into a graph, wrote to its weights or keeps a view of
                them.
        """
        if isinstance(stage, PackedStage):
            return self._run_packed(stage, function, args, kwargs)
        self._stages.bring(stage)
        stage.bind()
        try:
            return function(*args, **kwargs)
        finally:
            stage.unbind()

    def _run_packed(
        self, stage: PackedStage, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        master = stage.master
        refuse_unservable(self._streamer.platform, master, args, kwargs)
        self._stages.bring(stage)
        device_type = self._streamer.platform.device.type
        caches_casts = torch.is_autocast_enabled(device_type) and torch.is_autocast_cache_enabled()
        if caches_casts:
            # Autocast would keep the cast of every weight on the device, beyond the stage's time there.
            torch.set_autocast_cache_enabled(False)
        kept, entry = None, (stage, id(getattr(function, "__self__", None)), getattr(function, "__name__", ""))
        try:
            stage.bind()
            versions = master.versions()
            output = function(*args, **kwargs)
            if any_tensor(output, stage.slot.holds):
                # A view of the weights would keep all of the component on the device for as long as it lives.
                output = map_tensors(output, lambda tensor: tensor.clone() if stage.slot.holds(tensor) else tensor)
            written = master.written_leaf(versions)
            if entry not in self._inspected:
                written = written or master.replaced_leaf(stage.slot.buffer)
                kept = master.attribute_where(stage.slot.holds)
        finally:
            if caches_casts:
                torch.set_autocast_cache_enabled(True)
            stage.unbind()
        if written is not None:
            raise RuntimeError(written_message(written))
        if kept is not None:
            raise RuntimeError(view_message(f"{kept} keeps"))
        if torch.is_grad_enabled() and any_tensor(output, needs_gradient):
            raise RuntimeError(gradient_message(master.path, "its output"))
        self._inspected.add(entry)
        return output
