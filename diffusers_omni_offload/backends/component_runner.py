"""Runs the entry points of components: what has to leave the device leaves, and what is needed there comes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from diffusers_omni_offload.backends.attempts import run_with_relief
from diffusers_omni_offload.backends.watcher import Watcher
from diffusers_omni_offload.messages import format_bytes, logger
from diffusers_omni_offload.streaming.guard import Edited
from diffusers_omni_offload.streaming.scope import CallScope
from diffusers_omni_offload.streaming.shared import SharedLeaves
from diffusers_omni_offload.streaming.stage_runner import StageRunner
from diffusers_omni_offload.streaming.stages import Stage, Stages
from diffusers_omni_offload.streaming.streamer import Streamer

#: After so many entries of a DiT outside of any call, the user is told what that costs.
_STRAY_ENTRIES = 3


class ComponentRunner:
    """Runs components in their pipeline's call scope. What moves weights isn't traced by the compiler.

    Args:
        streamer: what streams blocks.
        scope: opened around an entry that comes outside of any call.
        stages: what is swapped.
        edited: tells what an entry point has changed of its weights for good.

    Attributes:
        shared: leaves that several owners hold; None if there are none.
        before_entry: called with the path of a component that is about to run.
        watcher: is told of components that have run, and makes room when the device's memory was too short for one;
            None if there is nobody.
        keeps_slots: whether slots are never given back in a call, however short this device's memory is.
    """

    def __init__(self, streamer: Streamer, scope: CallScope, stages: Stages, edited: Edited) -> None:
        self._streamer, self._scope, self._stages = streamer, scope, stages
        self.shared: SharedLeaves | None = None
        self.before_entry: Callable[[str], None] | None = None
        self.watcher: Watcher | None = None
        self.keeps_slots = False
        self._stage_runner = StageRunner(streamer, stages, edited)
        self._groups: dict[str, str] = {}
        self._still: set[str] = set()
        # Path -> the call that it runs in, so that what an interrupt leaves here means nothing to the next one.
        self._running: dict[str, object] = {}
        self._said_memory_spared = False
        self._stray_entries = 0

    def add(self, path: str, group: str, *, is_still: bool) -> None:
        """Know a component: its group, and whether nothing of it ever moves."""
        self._groups[path] = group
        if is_still:
            self._still.add(path)

    def inspect_again(self) -> None:
        """Look once more, at each stage's next entry, at what it does to its weights."""
        self._stage_runner.inspect_again()

    @torch.compiler.disable
    def run(self, path: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, an entry point of the component at `path`."""
        stage = self._stages.at(path)
        if self.is_inside(path):
            return function(*args, **kwargs)
        if not self._scope.is_open:
            if self.shared is None and path in self._still:
                # It moves nothing of its own, so it needs no scope, and a worker thread may run it beside a call.
                return function(*args, **kwargs)
            self._count_stray(path, stage)
        with self._scope.opened():
            if self.before_entry is not None:
                self.before_entry(path)
            is_outermost = not self._running and not self._stages.is_running and not self._streamer.is_running
            enter = partial(self._enter, path, stage, function, args, kwargs)
            watcher = self.watcher
            if not is_outermost or watcher is None:
                return enter()
            output = run_with_relief(path, watcher, self._streamer.platform.device, enter, args, kwargs)
            if self.watcher is watcher:  # It may have been let go meanwhile.
                watcher.component_has_run(path)
            return output

    def _enter(self, path: str, stage: Stage | None, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.shared or nullcontext():
            if stage is None:
                return self._run_beside(path, function, args, kwargs)
            if stage.group == "vae":
                self.spare_memory(stage)
            return self._stage_runner.run(stage, function, args, kwargs)

    @torch.compiler.disable
    def is_inside(self, path: str) -> bool:
        """Whether the component is running in this thread, with all that it needs on the device."""
        if not self._scope.is_open:
            return False
        stage = self._stages.at(path)
        return stage.is_inside if stage is not None else self._running.get(path) is self._scope.call

    @torch.compiler.disable
    def announce(self, stage: Stage) -> None:
        """An entry point of a swapped component is about to run."""
        if self._scope.is_open:
            self._stages.announce(stage)

    @torch.compiler.disable
    def spare_memory(self, vae: Stage | None = None) -> None:
        """Before a VAE: give back what is swapped in and the slots, if less than half of the device's memory is free;
        what runs next takes them again.

        Args:
            vae: the VAE, if it is swapped itself and so mustn't make room for itself.
        """
        platform = self._streamer.platform
        before = self._held_bytes()
        if not before or not self._scope.is_open or self._streamer.is_running:
            return
        if platform.free_bytes() >= platform.total_bytes() // 2:
            return
        if not self.keeps_slots:
            self._streamer.release_slots()
        self._stages.make_room("vae", vae)
        given_back = before - self._held_bytes()
        if given_back and not self._said_memory_spared:
            self._said_memory_spared = True
            logger.info(
                "Gave %s of weights back before the VAE, since device memory is short.", format_bytes(given_back)
            )

    def _count_stray(self, path: str, stage: Stage | None) -> None:
        if stage is not None and stage.group == "dit":
            self._stray_entries += 1
            if self._stray_entries == _STRAY_ENTRIES:
                logger.info(
                    "%s runs outside of a pipeline call, so it is copied to the device each time. "
                    "`with pipe.omni_offload.call():` around the loop keeps it there.",
                    path,
                )

    def _held_bytes(self) -> int:
        return self._streamer.slots.nbytes + self._stages.nbytes

    def _run_beside(self, path: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a component that isn't swapped itself; it makes room for itself."""
        self._make_room(path)
        try:
            self._running[path] = self._scope.call
            return self._streamer.run_component(path, function, args, kwargs)
        finally:
            self._running.pop(path, None)

    def _make_room(self, path: str) -> None:
        group = self._groups.get(path, "resident")
        if group == "vae":
            self.spare_memory()
        else:
            self._stages.make_room(group)
