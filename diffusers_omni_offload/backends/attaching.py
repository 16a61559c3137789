"""Our hooks on a plan's components, and a stage for each of those that move."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from diffusers_omni_offload.backends.compiling import component_rules
from diffusers_omni_offload.backends.entry_points import EntryPoints
from diffusers_omni_offload.streaming.stages import OnDemandStage, PackedStage, Stage
from diffusers_omni_offload.topology.plan import ResolvedComponent, ResolvedPlan

if TYPE_CHECKING:
    from diffusers_omni_offload.backends.plan_backend import PlanBackend


class Attaching:
    """Attaches components to a backend.

    Args:
        backend: whose masters are packed.
        plan: its plan.
    """

    def __init__(self, backend: PlanBackend, plan: ResolvedPlan) -> None:
        self._backend, self._plan = backend, plan

    def attach(self, components: Sequence[ResolvedComponent], undo: ExitStack) -> None:
        """Put our hooks on components, and make stages of those that move; `undo` gets the way back first."""
        plan, backend = self._plan, self._backend
        for component in components:
            stage: Stage | None = None
            group = plan.group(component)
            if component.path in plan.on_demand:
                stage = OnDemandStage(component.path, group, component.module, backend.device)
            elif component.path in plan.swapped:
                master = backend.masters.of(component.module)
                assert master is not None
                stage = PackedStage(component.path, group, component.module, master, backend.streamer)
            self._attach(component, stage, undo)
        ours = {component.module for component in components}
        for path in plan.on_demand:
            if plan.module(path) not in ours:
                part = ResolvedComponent(path, plan.module(path), "resident")
                backend.runner.add(path, part.role, is_still=False)
                self._attach(part, OnDemandStage(path, part.role, part.module, backend.device), undo)

    def _attach(self, component: ResolvedComponent, stage: Stage | None, undo: ExitStack) -> None:
        plan, backend = self._plan, self._backend
        module, path = component.module, component.path
        rules = component_rules(plan, component)
        entries, moves_itself = None, stage is not None and stage.moves_itself
        before = backend.runner.spare_memory if component.role == "vae" else None
        if stage is not None:
            backend.stages.add(module, stage)
            before = partial(backend.runner.announce, stage)
        if stage is not None or self._needs_entries(component):
            entries = EntryPoints(
                module,
                path,
                backend.device,
                plan.entry_points.get(path, ()),
                run=partial(backend.runner.run, path),
                is_inside=partial(backend.runner.is_inside, path),
                is_still=rules.captured,
            )
        backend.components.attach(path, module, undo, before, entries, rules, moves_itself=moves_itself)

    def _needs_entries(self, component: ResolvedComponent) -> bool:
        """Whether a component that isn't swapped has to know of every way into it: it makes room for itself, holds
        leaves that others hold as well, or is a VAE, whose work nobody would see otherwise: it is entered by `encode`
        and `decode`."""
        moving = [self._plan.module(path) for path in (*self._plan.swapped, *self._plan.on_demand)]
        is_still = set(moving).isdisjoint(component.module.modules())
        return is_still and (self._backend.shared is not None or bool(moving) or component.role == "vae")
