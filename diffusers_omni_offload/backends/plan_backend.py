"""Carries out a plan: streams its stacks, swaps its components, and keeps the rest on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from inspect import Signature
from typing import Any

import torch
from torch import nn

from diffusers_omni_offload.backends import preflight
from diffusers_omni_offload.backends.attaching import Attaching
from diffusers_omni_offload.backends.base import Counters, OffloadBackend
from diffusers_omni_offload.backends.component_runner import ComponentRunner
from diffusers_omni_offload.backends.components import ManagedComponents
from diffusers_omni_offload.backends.hooked_blocks import HookedBlocks
from diffusers_omni_offload.backends.making import LocalMaking
from diffusers_omni_offload.backends.masters import Making, Masters, units_of
from diffusers_omni_offload.backends.merging import Merging
from diffusers_omni_offload.backends.origins import Origins
from diffusers_omni_offload.backends.ownership import not_borrowed, require_unowned
from diffusers_omni_offload.backends.records import Records
from diffusers_omni_offload.backends.remarks import first_call_summary, warn_of_pageable, warn_of_plain_tensors
from diffusers_omni_offload.backends.residency import Residency, tell_of_move
from diffusers_omni_offload.backends.transports import blocks_by_ceiling, local_transports
from diffusers_omni_offload.backends.watcher import Watcher
from diffusers_omni_offload.config import OffloadConfig
from diffusers_omni_offload.host import return_freed_host_memory
from diffusers_omni_offload.messages import format_bytes, logger
from diffusers_omni_offload.platform import on_device, platform_for
from diffusers_omni_offload.registry import adapter_for
from diffusers_omni_offload.streaming.recorder import waited_share
from diffusers_omni_offload.streaming.runner import BlockRunner
from diffusers_omni_offload.streaming.scope import CallScope
from diffusers_omni_offload.streaming.shared import SharedLeaves
from diffusers_omni_offload.streaming.stages import Stages
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.streaming.transport import Transport
from diffusers_omni_offload.topology.fsdp import left_to_fsdp
from diffusers_omni_offload.topology.plan import ResolvedPlan
from diffusers_omni_offload.topology.resolver import resolve_offload_plan
from diffusers_omni_offload.weights.derived import restore_derived
from diffusers_omni_offload.weights.leaves import find_leaves, is_plain, move_tensors
from diffusers_omni_offload.weights.master import Master
from diffusers_omni_offload.weights.pinning import PinnedBudget
from diffusers_omni_offload.weights.wrappers import move_wrappers


class PlanBackend(OffloadBackend):
    """What every strategy does with its plan; see `streaming` for how, and `enable` for what it does to the modules.

    Attributes:
        is_shared: whether other pipelines with the same components may use it.
        plan: the resolved plan while enabled.
        scope: the call scope.
        streamer: slots, order and counters of streamed blocks.
        stages: the components that are swapped.
        records: who records what is done.
    """

    is_shared = True

    def __init__(self, config: OffloadConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.platform = platform_for(device)
        self.plan: ResolvedPlan | None = None
        self._enabled = False
        self._reset()

    def _reset(self, plan: ResolvedPlan | None = None) -> None:
        self.budget = PinnedBudget(self.config.pin_memory)
        self.origins = Origins(plan)
        self.streamer = Streamer(self.platform, self.config.slots, self.transports())
        self.stages = Stages(self.streamer)
        self.scope = CallScope(self.streamer, self.stages, self.audit, self._after_call, self._call_failed)
        self.masters = Masters(self.making())
        self.blocks = HookedBlocks(self.streamer, self.masters)
        self.residency = Residency(self.device)
        self.lora = Merging(self.masters, self.device)
        self.runner = ComponentRunner(self.streamer, self.scope, self.stages, self.lora.unmerged)
        self.components = ManagedComponents(self.device, self, self.runner.run, self.merging)
        self.shared: SharedLeaves | None = None
        self.records = Records(self.streamer, self.device_weights_nbytes)

    def transports(self) -> list[Transport]:
        """How weights get to the device; the first one that serves a master brings it."""
        return local_transports(
            self.platform, self.budget, self.origins, self.config, lambda: blocks_by_ceiling(self.plan, self.masters)
        )

    def making(self) -> Making:
        """What kinds of masters there are."""
        return LocalMaking(self.platform, self.budget, self.origins)

    # ------------------------------------------------------------------ lifecycle

    def is_enabled(self) -> bool:
        return self._enabled

    def enable(self, pipeline: Any, plan: ResolvedPlan | None = None) -> None:
        """Offload what a plan says and place the rest; all is undone if a step fails.

        Nothing is done for a plan with a `skip_reason`, or if it is enabled already.

        Args:
            pipeline: what to resolve if `plan` is None.
            plan: a plan that was resolved before.

        Raises:
            RuntimeError, TypeError, ValueError: as `preflight.check` says; nothing was touched.
        """
        if self._enabled:
            logger.warning("Offload is enabled already; disable it first to change it.")
            return
        if plan is None:
            plan = self.resolve(pipeline)
        if plan.skip_reason is not None:
            logger.warning("Nothing was offloaded: %s", plan.skip_reason)
            return
        preflight.check(plan, self.platform, self.config.slots)
        with ExitStack() as undo:
            self.install(plan, undo)
            undo.pop_all()

    def resolve(self, pipeline: Any) -> ResolvedPlan:
        """The plan of a pipeline for this backend's configuration; see `resolve_offload_plan`."""
        return resolve_offload_plan(pipeline, self.config, declarations=adapter_for(type(pipeline)))

    def install(self, plan: ResolvedPlan, undo: ExitStack) -> None:
        """`enable` for a caller that has resolved and checked the plan; `undo` gets the way back of every step."""
        self._reset(plan)
        undo.callback(self._forget)
        with on_device(self.device):
            self._build(plan, undo)
        self.plan = plan
        self._enabled = True
        self.records.start()
        if plan.stacks and not any(stack.streamed for stack in plan.stacks):
            logger.info("Every block is resident, so nothing is streamed.")
        warn_of_plain_tensors(plan)
        if self.config.pin_memory is not False and self.platform.is_asynchronous:
            warn_of_pageable(list(self.masters), self.budget)

    def disable(self) -> None:
        """Remove our hooks, give device and pinned memory back and leave every tensor on the CPU.

        The tensors of a block that was streamed, or of a component that was swapped, still share one allocation, of its
        size. Every step is tried, whatever fails; the first failure is raised at the end.

        Raises:
            RuntimeError: a call is running.
        """
        if self._enabled:
            with self.scope.exclusive("disabled"):
                self.tear_down()

    def bring_home(self) -> None:
        """Before `tear_down`, which can't be refused: have all weights on this host, where they are anyway."""

    def tear_down(self) -> None:
        """`disable` for a caller that keeps calls out itself."""
        with ExitStack() as steps, on_device(self.device):
            steps.callback(self._forget)
            steps.callback(tell_of_move, [child for _, module in self.components for child in module.modules()])
            for module in self.stages.modules():
                steps.callback(restore_derived, module)
            steps.callback(self.residency.move_to_host)
            for master in self.masters:
                steps.callback(master.release)
            steps.callback(self._release_device)
            steps.callback(self.components.detach_all)
            self.blocks.remove(steps)

    def _forget(self) -> None:
        self.plan = None
        self._enabled = False
        self._reset()

    def _release_device(self) -> None:
        self.streamer.release_slots()
        self.stages.give_up_all()
        if self.shared is not None:
            self.shared.release()

    def _build(self, plan: ResolvedPlan, undo: ExitStack) -> None:
        """The steps of `enable`; each has put its own undoing on `undo` before it can fail."""
        units = units_of(plan)
        on_demand = [plan.module(path) for path in plan.on_demand]
        components = not_borrowed(plan, self.device)
        require_unowned(units)
        for component in components:
            self.residency.add(component.path, component.module)
        offloaded = [*(unit.module for unit in units), *on_demand]
        for module in offloaded:
            self.residency.leave_out(module)
        moving = {*offloaded, *(stack.blocks[index] for stack in plan.stacks for index in stack.moving)}
        for component in components:
            is_still = moving.isdisjoint(component.module.modules())
            self.runner.add(component.path, plan.group(component), is_still=is_still)
        self.origins.realize(self.residency.leaves())
        self.masters.pack(units, self.residency.leaves, undo)
        self.lora.look()
        self.residency.place(self.masters.held(), undo)
        self.origins.require_unchanged()  # What was copied through views of files is the files' as they were opened.
        return_freed_host_memory()
        tell_of_move(module for component in components for module in component.module.modules())

        undo.callback(self._release_device)
        for stack in plan.stacks:
            # Resident blocks have no master.
            self.streamer.add_stack(map(self.masters.of, stack.blocks), stack.paths)
        self.streamer.require_slots()
        if self.masters.shared is not None:
            self.shared = self.runner.shared = SharedLeaves(self.masters.shared, self.streamer)
            self.shared.require_slot()
        self.blocks.install(plan, BlockRunner(self.streamer, self.scope, self.shared, self.lora.unmerged), undo)
        Attaching(self, plan).attach(components, undo)
        for stage in self.stages:
            stage.settle(undo)

    def watch(self, watcher: Watcher | None) -> None:
        """Tell `watcher` what happens from now on, and nobody else. If there is one, calls are recorded anew, with
        the peaks of device memory."""
        self.runner.watcher = watcher
        self.records.counts_peaks = watcher is not None
        if watcher is not None:
            self.records.start()

    # ------------------------------------------------------------------ components

    def add_resident(self, path: str, module: nn.Module, undo: ExitStack) -> None:
        """Manage a component that came later: it lives on the device. `undo` gets the way back first."""
        preflight.require_unwrapped(path, module)
        undo.callback(self.residency.remove, module)
        leaves = find_leaves(module, path, left_to_fsdp(module))
        missing = sum(leaf.nbytes for leaf in leaves if leaf.tensor.device != self.device)
        if self.platform.is_asynchronous and missing > self.platform.free_bytes():
            raise RuntimeError(
                f"{path} takes {format_bytes(missing)} on {str(self.device)!r}, which has "
                f"{format_bytes(self.platform.free_bytes())} free. Free some of it, or enable with more components "
                "streamed."
            )
        self.residency.add(path, module)
        self.residency.place(self.masters.held(), undo)
        self.runner.add(path, "resident", is_still=True)
        # Its role isn't declared; where it is no VAE, its entry points announce themselves to nobody.
        self.components.attach(path, module, undo, self.runner.spare_memory)

    def remove_component(self, module: nn.Module) -> None:
        """Let go of a component that no pipeline needs offloaded any more: its tensors end on the CPU."""
        self.blocks.retire(set(module.modules()))
        self.components.detach(module)
        self.stages.remove(module)
        self.masters.remove(module)
        self.residency.remove(module)
        kept = {id(leaf.tensor) for leaf in self.residency.leaves()} | left_to_fsdp(module)
        move_wrappers(module.modules(), torch.device("cpu"), kept)
        move_tensors([leaf.tensor for leaf in find_leaves(module, "", kept) if is_plain(leaf)], torch.device("cpu"))

    # ------------------------------------------------------------------ calls

    def refresh(self) -> None:
        """Make what was edited since the call began count; see `CallScope.refresh`."""
        self.scope.refresh()

    def edits(self) -> AbstractContextManager[None]:
        """Between forwards of a call, the body may edit weights; see `CallScope.edits`."""
        return self.scope.edits()

    def merging(self) -> AbstractContextManager[None]:
        """In the body LoRA layers merge into offloaded weights, or unmerge, on the device; what they do counts at once.

        Raises:
            RuntimeError: a block or a swapped component is running.
        """
        return self._merging()

    @contextmanager
    def _merging(self) -> Iterator[None]:
        with self.opened(), on_device(self.device):
            self.refresh()
            with self.lora.on_device():
                yield
            self.refresh()

    @contextmanager
    def gather(self) -> Iterator[None]:
        """In the body every offloaded weight can be read and changed between calls, as most can anyway: what a
        checkpoint has in another form is read into host memory, where it stays.

        Raises:
            CheckpointError: a file can't be read or was changed.
            RuntimeError: a call is running.
        """
        with self.scope.exclusive("gathered"):
            for master in self.masters:
                master.realize()
        yield

    def agree_on_call(self, name: str, signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A call of a pipeline is about to begin; there is nobody to agree with."""

    def refuse_cast(self, dtype: torch.dtype) -> None:
        """Before weights are cast: RuntimeError, which says what to do, if some can't be because they aren't here."""
        for master in self.masters:
            for tensor in master.withheld:
                if tensor.is_floating_point() and tensor.dtype != dtype:
                    tensor.detach()

    def opened(self, prepare: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Be inside a call for the body; `prepare` runs first if this is the outermost one."""
        if self.scope.is_open:
            self.lora.expect_unmerging()  # A flag is all that may have changed, which isn't worth an audit.
        return self.scope.opened(prepare)

    def audit(self) -> bool:
        """Make masters and residents agree with what the modules hold now. Under 1 ms for 1,000 leaves.

        Returns:
            Whether anything had changed, in-place edits aside.

        Raises:
            RuntimeError: somebody else took over a component's weights.
        """
        self.components.require_ours()
        self.blocks.require_ours()
        stale = self.masters.stale()
        has_changed = bool(stale) or not self.residency.is_current()
        if has_changed:
            self._follow(stale)
            self.look_again()
        self.lora.expect_unmerging()
        if self.shared is not None:
            self.shared.require_slot()
        return has_changed

    def _follow(self, stale: Sequence[Master]) -> None:
        """Take in what was replaced, and have on the device what belongs there."""
        with on_device(self.device):
            self.components.require_ours_throughout()
            self.masters.follow(stale)
            watcher = self.runner.watcher
            if watcher is not None:
                watcher.weights_have_changed()
            try:
                self.residency.place(self.masters.held())
            except torch.OutOfMemoryError:
                if watcher is None or not watcher.can_make_room(""):
                    raise
                watcher.make_room("")
                self.residency.place(self.masters.held())

    def look_again(self) -> None:
        """Weights have changed: what was known of how they are used isn't any more."""
        self.runner.inspect_again()
        self.blocks.inspect_again()
        self.lora.look()

    def _after_call(self) -> None:
        if self.records.is_waiting:
            self._tell_of_first_call()
        if self.runner.watcher is not None:
            self.runner.watcher.call_has_ended()

    def _tell_of_first_call(self) -> None:
        recorder, plan = self.records.latest, self.plan
        assert recorder is not None and plan is not None
        dits = {component.path for component in plan.components if component.role == "dit"}
        if dits and not dits & recorder.components():
            self.records.start()
            return  # An encoder ran by itself, say.
        waited: float | None = 0.0
        if self.streamer.loads and self.platform.is_asynchronous:
            waited = waited_share(recorder.spans())
        if waited is None:
            self.records.start()
            return  # Too short for a verdict. The next one may do.
        self.records.stop()
        if self.streamer.loads or self.stages.swaps:
            logger.info("%s", first_call_summary(list(self.masters), self.streamer, self.stages, waited))

    def _call_failed(self) -> None:
        """A call has ended with an error, which is being handled."""
        if self.records.is_waiting:
            self.records.start()

    def device_weights_nbytes(self) -> int:
        """Device bytes that the pipeline's weights take now."""
        return self._moving_nbytes() + self.residency.nbytes

    def _moving_nbytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.nbytes
        return self.streamer.slots.nbytes + self.stages.nbytes + shared

    def counters(self) -> Counters:
        """What was moved so far, and what is held now."""
        return Counters(
            loads=self.streamer.loads,
            demand_loads=self.streamer.demand_loads,
            swaps=self.stages.swaps,
            bytes_moved=self.streamer.bytes_moved,
            device_bytes=self._moving_nbytes(),
            pinned_bytes=self.budget.pinned_bytes,
        )
