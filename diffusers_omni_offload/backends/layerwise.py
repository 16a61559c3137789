"""Layerwise offload: blocks stream through slots, everything else stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from torch import nn

from diffusers_omni_offload import hooks
from diffusers_omni_offload.backends import preflight
from diffusers_omni_offload.backends.base import OffloadBackend
from diffusers_omni_offload.backends.components import ManagedComponents, foreign_message
from diffusers_omni_offload.backends.remarks import first_call_summary, warn_of_pageable, warn_of_plain_tensors
from diffusers_omni_offload.backends.residency import Residency
from diffusers_omni_offload.backends.sharing import shared_leaves
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.messages import logger
from diffusers_omni_offload.platform import on_device, platform_for, return_freed_host_memory
from diffusers_omni_offload.registry import adapter_for
from diffusers_omni_offload.streaming.runner import BlockRunner
from diffusers_omni_offload.streaming.scope import CallScope
from diffusers_omni_offload.streaming.shared import SharedLeaves
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.topology.plan import ResolvedComponent, ResolvedPlan, format_bytes
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from diffusers_omni_offload.weights.leaves import Leaf, find_leaves, is_plain, move_back, move_tensors
from diffusers_omni_offload.weights.master import Master
from diffusers_omni_offload.weights.pinning import PinnedBudget


@dataclass(frozen=True)
class Counters:
    """Copies into slots, those a forward had to wait for, their bytes; device bytes and page-locked bytes held."""

    loads: int = 0
    demand_loads: int = 0
    bytes_moved: int = 0
    device_bytes: int = 0
    pinned_bytes: int = 0


class LayerwiseBackend(OffloadBackend):
    """Streams the blocks of a plan; see `streaming` for how, and `enable` for what it does to the modules.

    Attributes:
        plan: the resolved plan while enabled.
        scope: the call scope.
        streamer: slots, order and counters.
    """

    def __init__(self, config: OffloadConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.platform = platform_for(device)
        self.plan: ResolvedPlan | None = None
        self._enabled = False
        self._reset()

    def _reset(self) -> None:
        self.budget = PinnedBudget(self.config.pin_memory)
        self.streamer = Streamer(self.platform, self.config.slots)
        self.scope = CallScope(self.streamer, self.audit, self._after_call)
        self.residency = Residency(self.device)
        self.shared: SharedLeaves | None = None
        self._runner: BlockRunner | None = None
        self._masters: list[Master] = []
        self._blocks: list[tuple[nn.Module, str]] = []
        self.components = ManagedComponents(self.device, self, self._run_component)
        self._shared_ids: set[int] = set()
        self._resident_paths: set[str] = set()
        self._reported = self._said_slots_released = False

    # ------------------------------------------------------------------ lifecycle

    def is_enabled(self) -> bool:
        return self._enabled

    def enable(self, pipeline: Any, plan: ResolvedPlan | None = None) -> None:
        """Stream the blocks of a plan and place the rest; all is undone if a step fails.

        Nothing is done for a plan with a `skip_reason`, or if it is enabled already.

        Args:
            pipeline: what to resolve if `plan` is None.
            plan: a plan that was resolved before.

        Raises:
            RuntimeError, TypeError, ValueError: as `preflight.check` says; nothing was touched.
        """
        if self._enabled:
            logger.warning("Layerwise offload is enabled already; disable it first to change it.")
            return
        if plan is None:
            plan = resolve_offload_plan(pipeline, self.config, declarations=adapter_for(type(pipeline)))
        if plan.skip_reason is not None:
            logger.warning("Nothing was offloaded: %s", plan.skip_reason)
            return
        preflight.check(plan, self.platform, self.config.slots)
        with ExitStack() as undo:
            self.install(plan, undo)
            undo.pop_all()

    def install(self, plan: ResolvedPlan, undo: ExitStack) -> None:
        """`enable` for a caller that has resolved and checked the plan; `undo` gets the way back of every step."""
        self._reset()
        undo.callback(self._forget)
        with on_device(self.device):
            self._build(plan, undo)
        self.plan = plan
        self._enabled = True
        self.streamer.stalls.start()
        if not self._masters:
            logger.info("Every block is resident, so nothing is streamed.")
        warn_of_plain_tensors(plan)
        if self.config.pin_memory is not False and self.platform.is_asynchronous:
            warn_of_pageable(self._masters, self.budget)

    def disable(self) -> None:
        """Remove our hooks, give device and pinned memory back and leave every tensor on the CPU.

        The tensors of a block that was streamed still share one allocation, of the block's size. Every step is tried,
        whatever fails; the first failure is raised at the end.

        Raises:
            RuntimeError: a call is running.
        """
        if self._enabled:
            with self.scope.exclusive("disabled"):
                self.tear_down()

    def tear_down(self) -> None:
        """`disable` for a caller that keeps calls out itself."""
        with ExitStack() as steps, on_device(self.device):
            steps.callback(self._forget)
            steps.callback(self.residency.move_to_host)
            for master in self._masters:
                steps.callback(master.release)
            steps.callback(self._release_device)
            steps.callback(self.components.detach_all)
            for block, _ in self._blocks:
                steps.callback(hooks.remove_owned, block, hooks.BLOCK_HOOK)

    def _forget(self) -> None:
        self.plan = None
        self._enabled = False
        self._reset()

    def _release_device(self) -> None:
        self.streamer.release_slots()
        if self.shared is not None:
            self.shared.release()

    def _build(self, plan: ResolvedPlan, undo: ExitStack) -> None:
        """The steps of `enable`; each has put its own undoing on `undo` before it can fail."""
        streamed = list(plan.streamed_blocks())
        blocks = {id(block) for _, block in streamed}
        self._resident_paths = {
            component.path
            for component in plan.components
            if not any(id(module) in blocks for module in component.module.modules())
        }
        components = self._not_borrowed(plan)
        for component in components:
            self.residency.add(component.path, component.module)
        for _, block in streamed:
            self.residency.leave_out(block)
        shared = shared_leaves([find_leaves(block, path) for path, block in streamed], self.residency.leaves())
        self._shared_ids.update(id(leaf.tensor) for leaf in shared)
        self._pack(plan, shared, undo)

        self.residency.place(self._held_ids(), undo)
        return_freed_host_memory()

        undo.callback(self._release_device)
        self.streamer.require_slots()
        if self.shared is not None:
            self.shared.require_slot()

        self._runner = BlockRunner(self.streamer, self.scope, self.shared)
        for stack in plan.stacks:
            for index, block in enumerate(stack.blocks):
                undo.callback(hooks.remove_owned, block, hooks.BLOCK_HOOK)
                # Its number in the streamer, which got the stacks in the same order.
                hook = hooks.BlockHook(stack.path(index), len(self._blocks), self._runner.run)
                hooks.install_innermost(block, hook, hooks.BLOCK_HOOK)
                self._blocks.append((block, hook.path))
        for component in components:
            before = self.spare_slots if component.role == "vae" else None
            self.components.attach(component.path, component.module, undo, before)

    def _not_borrowed(self, plan: ResolvedPlan) -> list[ResolvedComponent]:
        """The components that no other backend looks after: those it places and hooks for both."""
        ours = []
        for component in plan.components:
            hook = hooks.owned_hook(component.module, hooks.COMPONENT_HOOK)
            if hook is None:
                ours.append(component)
            elif hook.owner.device != self.device:
                raise ValueError(
                    f"{component.path} is offloaded by another pipeline, which runs it on {str(hook.owner.device)!r}, "
                    f"not {str(self.device)!r}. Use the same device, or call disable_omni_offload() there."
                )
        return ours

    def _pack(self, plan: ResolvedPlan, shared: list[Leaf], undo: ExitStack) -> None:
        packed: dict[int, Master] = {}
        with _progress(sum(len(stack.streamed) for stack in plan.stacks)) as advance:
            # DiTs first: they are streamed at every step, so they get what may be pinned.
            for stack in sorted(plan.stacks, key=lambda stack: stack.kind != "dit"):
                for index in stack.streamed:
                    block = stack.blocks[index]
                    packed[id(block)] = self._add_master(self._block_master(block, stack.path(index)), undo)
                    return_freed_host_memory()
                    advance()
            if shared:
                master = Master(lambda: shared, [], "shared leaves", self.platform, self.budget)
                self.shared = SharedLeaves(self._add_master(master, undo), self.streamer)
        for stack in plan.stacks:
            # Resident blocks have no master.
            self.streamer.add_stack(packed.get(id(block)) for block in stack.blocks)

    def _block_master(self, block: nn.Module, path: str) -> Master:
        def find() -> list[Leaf]:
            return find_leaves(block, path, self._shared_ids)

        return Master(find, [block], path, self.platform, self.budget)

    def _add_master(self, master: Master, undo: ExitStack) -> Master:
        self._masters.append(master)
        undo.callback(move_back, [(leaf.tensor, leaf.tensor.device) for leaf in master.find()])
        undo.callback(master.release)
        master.pack()
        return master

    def _held_ids(self) -> set[int]:
        return {id(tensor) for master in self._masters for tensor in master.tensors}

    # ------------------------------------------------------------------ components

    def add_resident(self, path: str, module: nn.Module, undo: ExitStack) -> None:
        """Manage a component that came later: it lives on the device. `undo` gets the way back first."""
        undo.callback(self.residency.remove, module)
        missing = sum(leaf.nbytes for leaf in find_leaves(module, path) if leaf.tensor.device != self.device)
        if self.platform.is_asynchronous and missing > self.platform.free_bytes():
            raise RuntimeError(
                f"{path} takes {format_bytes(missing)} on {str(self.device)!r}, which has "
                f"{format_bytes(self.platform.free_bytes())} free. Free some of it, or enable with more components "
                "streamed."
            )
        self.residency.add(path, module)
        self.residency.place(self._held_ids(), undo)
        self._resident_paths.add(path)
        # Its role isn't declared; where it is no VAE, its entry points announce themselves to nobody.
        self.components.attach(path, module, undo, self.spare_slots)

    def remove_component(self, module: nn.Module) -> None:
        """Let go of a component that no pipeline needs offloaded any more: its tensors end on the CPU."""
        inside = {id(child) for child in module.modules()}
        for number, (block, _) in enumerate(self._blocks):
            master = self.streamer.masters[number]
            if id(block) in inside:
                hooks.remove_owned(block, hooks.BLOCK_HOOK)
                if master is not None:
                    self.streamer.retire(number)
                    self._masters.remove(master)
                    master.release()
        self.components.detach(module)
        self.residency.remove(module)
        kept = {id(leaf.tensor) for leaf in self.residency.leaves()}
        move_tensors([leaf.tensor for leaf in find_leaves(module, "", kept) if is_plain(leaf)], torch.device("cpu"))

    def _run_component(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.shared is not None:
            with self.scope.opened(), self.shared:
                return forward(*args, **kwargs)
        if path in self._resident_paths:
            # It streams nothing, so it needs no scope, and a worker thread may run it beside a call.
            return forward(*args, **kwargs)
        with self.scope.opened():
            return forward(*args, **kwargs)

    # ------------------------------------------------------------------ calls

    def audit(self) -> bool:
        """Make masters and residents agree with what the modules hold now. Under 1 ms for 1,000 leaves.

        Returns:
            Whether anything had changed, in-place edits aside.

        Raises:
            RuntimeError: somebody else took over a component's weights.
        """
        self.components.require_ours()
        for block, path in self._blocks:
            owner = hooks.foreign_offload([block])
            if owner is not None:
                raise RuntimeError(foreign_message(path, owner))
        stale = [master for master in self._masters if not master.is_current()]
        has_changed = bool(stale) or not self.residency.is_current()
        if has_changed:
            with on_device(self.device):
                self._follow(stale)
        if self.shared is not None:
            self.shared.require_slot()
        return has_changed

    def _follow(self, stale: list[Master]) -> None:
        self.components.require_ours_throughout()
        blocks = [find_leaves(self._blocks[number][0], master.path) for number, master in self._streamed()]
        shared = shared_leaves(blocks, self.residency.leaves())
        if {id(leaf.tensor) for leaf in shared} != self._shared_ids:
            raise RuntimeError(
                "Weights were tied or untied between blocks, or between a block and other modules, while offloaded: "
                f"{', '.join(leaf.path for leaf in shared[:3]) or 'a tie is gone'}. "
                "Call disable_omni_offload() and enable_omni_offload() again."
            )
        # Swapped data lies in each other's masters: written in place, the first would overwrite the second's.
        in_place = not any(
            master.holds(tensor)
            for other in stale
            for tensor in other.tensors
            for master in self._masters
            if master is not other
        )
        for master in stale:
            master.pack(in_place=in_place)
            return_freed_host_memory()
        self.residency.place(self._held_ids())
        if self._runner is not None:
            self._runner.inspect_again()

    def _streamed(self) -> Iterator[tuple[int, Master]]:
        for number, master in enumerate(self.streamer.masters):
            if master is not None:
                yield number, master

    def spare_slots(self) -> None:
        """Give the slots back if less than half of the device's memory is free; the next block takes them again."""
        if not self.streamer.slots.slots or self.platform.free_bytes() >= self.platform.total_bytes() // 2:
            return
        if self.streamer.is_running:
            return
        held = self.streamer.slots.nbytes
        self.streamer.release_slots()
        if not self._said_slots_released:
            self._said_slots_released = True
            logger.info("Gave %s of slots back before the VAE, since device memory is short.", format_bytes(held))

    def _after_call(self) -> None:
        if self._reported or not self.streamer.loads:
            return
        waited = self.streamer.stalls.stop() if self.platform.is_asynchronous else 0.0
        if waited is None:
            return  # A call of an encoder alone, say: too short for a verdict. The next one may do.
        self._reported = True
        logger.info("%s", first_call_summary(self._masters, self.streamer, waited))

    def counters(self) -> Counters:
        """What was moved so far, and what is held now."""
        streamer = self.streamer
        shared = 0 if self.shared is None else self.shared.nbytes
        return Counters(
            loads=streamer.loads,
            demand_loads=streamer.demand_loads,
            bytes_moved=streamer.bytes_moved,
            device_bytes=streamer.slots.nbytes + shared,
            pinned_bytes=self.budget.pinned_bytes,
        )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], Any]]:
    with diffusers_logging.tqdm(total=total, desc="Packing blocks", unit="block", leave=False) as bar:
        yield lambda: bar.update(1)
