"""An entry point of a swapped component, run on its weights on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diffusers_omni_offload.nested import any_tensor, map_tensors
from diffusers_omni_offload.streaming.guard import Edited, Watch, refuse_unservable, uncached_casts
from diffusers_omni_offload.streaming.stages import PackedStage, Stage, Stages
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.weights.leaves import cast_tensors


class StageRunner:
    """Runs entry points of stages and refuses what swapped weights can't serve.

    Args:
        streamer: what binds the weights.
        stages: all of the pipeline's.
        edited: tells what an entry point has changed for good.
    """

    def __init__(self, streamer: Streamer, stages: Stages, edited: Edited) -> None:
        self._streamer, self._stages, self._edited = streamer, stages, edited
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
            return self._streamer.run_component(stage.path, function, args, kwargs)
        finally:
            stage.unbind()

    def _run_packed(
        self, stage: PackedStage, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        master = stage.master
        refuse_unservable(self._streamer.platform, master, args, kwargs)
        self._stages.bring(stage)
        entry = (stage, id(getattr(function, "__self__", None)), getattr(function, "__name__", ""))
        watch: Watch | None = None
        try:
            stage.bind()
            is_thorough = entry not in self._inspected
            watch = Watch(self._streamer, master, stage.slot, self._edited, is_thorough=is_thorough)
            with uncached_casts(self._streamer.platform.device.type):
                output = self._streamer.run_component(stage.path, function, args, kwargs)
            if any_tensor(output, stage.slot.holds):
                # A view of the weights would keep all of the component on the device for as long as it lives.
                output = map_tensors(output, lambda tensor: tensor.clone() if stage.slot.holds(tensor) else tensor)
            watch.look()
            watch.refuse_kept_views()
        except BaseException:
            if watch is not None:
                watch.take_edits()
            raise
        finally:
            stage.unbind()
        watch.refuse_gradients(output)
        cast_tensors(watch.casts)
        self._inspected.add(entry)
        return output
