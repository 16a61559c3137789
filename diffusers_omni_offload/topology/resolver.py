"""The entry point of the topology: a pipeline and a configuration become a plan, or a sentence that says why not."""

from __future__ import annotations

from typing import Any

from torch import nn

from diffusers_omni_offload.config import LayerOptions, OffloadConfig, OffloadStrategy, WeightTransfer
from diffusers_omni_offload.declarations import ENCODER_COMPONENT_TYPES, OffloadPlan, a_type
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.topology.blocks import (
    BLOCKS_ATTRIBUTE,
    Block,
    check_ownership,
    collect_blocks,
    declared_containers,
    find_container,
)
from diffusers_omni_offload.topology.choices import Choices
from diffusers_omni_offload.topology.discovery import Discovery, discover
from diffusers_omni_offload.topology.findings import Findings
from diffusers_omni_offload.topology.lists import find_lists
from diffusers_omni_offload.topology.paths import MissingPathError, is_inside, lookup
from diffusers_omni_offload.topology.plan import BlockStack, ComponentRole, ResolvedComponent, ResolvedPlan, StackKind
from diffusers_omni_offload.topology.residents import resident_indices
from diffusers_omni_offload.topology.sizes import module_nbytes
from diffusers_omni_offload.weights.leaves import find_leaves

LARGE_SUBMODULE_BYTES = 1 << 30
"""An undeclared submodule of a DiT above this defeats streaming if it stays on the device."""

_LIFECYCLE = ("load_to_device", "offload_to_cpu")


def resolve_offload_plan(pipeline: Any, config: OffloadConfig, *, declarations: type | None = None) -> ResolvedPlan:
    """What a configuration means for a pipeline. Pure: reads modules' structure, shapes and dtypes, and nothing else.

    Args:
        pipeline: a pipeline.
        config: the configuration.
        declarations: a class with component declarations, used if the pipeline has none of its own.

    Returns:
        The plan; its `skip_reason` is set if nothing is left to do.

    Raises:
        ValueError, TypeError: what the pipeline can't do. If no components were selected, most of that is warned about
            and skipped instead.
    """
    if config.strategy is OffloadStrategy.NONE:
        return ResolvedPlan(config.strategy, (), (), skip_reason="offloading is switched off")
    return _Resolver(pipeline, config, declarations).resolve()


class _Resolver:
    def __init__(self, pipeline: Any, config: OffloadConfig, declarations: type | None) -> None:
        self.pipeline, self.config = pipeline, config
        self.pipeline_name = type(pipeline).__name__
        self.findings = Findings(config.is_explicit)
        roles: set[ComponentRole] = {"dit"} if config.selects("dit") else set()
        if config.selects("text_encoder") or config.selects("image_encoder"):
            roles.add("encoder")
        self.discovery: Discovery = discover(pipeline, declarations, frozenset(roles), self.findings)
        self.choices = Choices(config, self.discovery, self.findings, self.pipeline_name)
        self.plan: OffloadPlan = self.discovery.plan
        self.components = list(self.discovery.components)
        self.stacks: list[BlockStack] = []
        self.on_demand: list[str] = []

    def resolve(self) -> ResolvedPlan:
        self._check_plan_paths()
        self._collect_on_demand()
        skip_reason = self.choices.check()
        self._check_replication()
        swapped: tuple[str, ...] = ()
        if skip_reason is None:
            swapped = tuple(path for path in self.choices.swapped() if path not in self.on_demand)
        if skip_reason is None and self.config.strategy is not OffloadStrategy.MODEL_LEVEL:
            self._stack_dits()
            self._stack_encoders()
            self._stack_others()
            declared = {id(component.module) for component in self.components if self._is_declared(component)}
            check_ownership(self.stacks, self.components, declared)
            if not self.stacks and not swapped and not self.findings.explicit:
                skip_reason = f"{self.pipeline_name} has no blocks that can be streamed"
        return ResolvedPlan(
            strategy=self.config.strategy,
            components=tuple(self.components),
            stacks=tuple(self.stacks),
            swapped=swapped,
            on_demand=tuple(self.on_demand),
            entry_points=self.plan.entry_points,
            checkpoint_layouts=self.plan.checkpoint_layouts,
            skip_reason=skip_reason,
            notes=tuple(self.findings.notes),
        )

    # Declarations -----------------------------------------------------------------------------------------------

    def _check_plan_paths(self) -> None:
        """A path in the plan that no component list has is a slip of its author."""
        dits, encoders = self.discovery.declared["dit"], self.discovery.declared["encoder"]
        every_path = tuple(path for paths in self.discovery.declared.values() for path in paths)
        fields = (
            ("block_attrs", self.plan.block_attrs, dits, "_dit_modules"),
            ("resident_dit_paths", self.plan.resident_dit_paths, dits, "_dit_modules"),
            ("encoder_block_attrs", self.plan.encoder_block_attrs, encoders, "_encoder_modules"),
            ("encoder_component_types", self.plan.encoder_component_types, encoders, "_encoder_modules"),
            ("encoder_dlo_weight_replication", self.plan.encoder_dlo_weight_replication, encoders, "_encoder_modules"),
            ("entry_points", self.plan.entry_points, every_path, "the declaration"),
            ("checkpoint_layouts", self.plan.checkpoint_layouts, dits, "_dit_modules"),
            ("post_load", self.plan.post_load, every_path, "the declaration"),
        )
        for field, paths, known, attribute in fields:
            for path in paths:
                if path not in known:
                    self.findings.problem(
                        f"The offload plan of {self.discovery.source} has {path!r} in {field}, but {attribute} has "
                        f"only {', '.join(known) or 'nothing'}; add it there or take it out of the plan."
                    )

    def _collect_on_demand(self) -> None:
        for path in self.plan.on_demand_component_paths:
            try:
                module = lookup(self.pipeline, path)
            except MissingPathError as error:
                self.findings.problem(
                    f"The offload plan has {path!r} in on_demand_component_paths, but {error}; correct it."
                )
                continue
            if module is None:
                continue
            _require_lifecycle(path, module, "on_demand_component_paths names it")
            self.on_demand.append(path)

    def _check_replication(self) -> None:
        """Encoders that are sharded over several ranks must hold the same weights on each; stubs count, as other ranks
        may have loaded them."""
        if self.config.group_size <= 1:
            return
        for selector in ENCODER_COMPONENT_TYPES:
            if self.config.options_for(selector).weight_transfer is not WeightTransfer.ALLGATHER:
                continue
            for path in self.choices.declared_encoders(selector):
                if path in self.plan.encoder_block_attrs and path not in self.plan.encoder_dlo_weight_replication:
                    raise ValueError(
                        f"{path!r} can't use weight_transfer='allgather': its weights aren't declared to be the same "
                        "on every rank (encoder_dlo_weight_replication of the offload plan); use 'rank-local'."
                    )

    def _is_declared(self, component: ResolvedComponent) -> bool:
        return any(component.path in paths for paths in self.discovery.declared.values())

    # Stacks -----------------------------------------------------------------------------------------------------

    def _stack_dits(self) -> None:
        dits = self.choices.chosen("layer", "dit")
        if self.discovery.found_by != "declaration":
            # A name proves nothing: what has no blocks isn't taken for a DiT, as long as something else is.
            planned = self.plan.block_attrs
            named = [dit for dit in dits if declared_containers(dit, planned.get(dit.path, ()), self.findings)]
            for dit in dits:
                if named and dit not in named:
                    self.findings.note(f"{dit.path!r} declares no blocks, so it stays on the device.")
            dits = tuple(named) or dits
        found = {dit.path: self._blocks(dit, self.plan.block_attrs.get(dit.path, ())) for dit in dits}
        wishes = {dit.path: self.config.options_for("dit", dit.path).resident_layers for dit in dits}
        wanted = max(wishes.values(), default=0)
        eligible = [path for path, blocks in found.items() if blocks and path in self.plan.resident_dit_paths]
        if wanted and not eligible:
            self.findings.problem(
                f"resident_layers={wanted} was asked for, but no DiT of {self.pipeline_name} may keep blocks on the "
                f"device; name it in resident_dit_paths of its offload plan ({', '.join(found)}) or leave "
                "resident_layers out."
            )
        for dit in dits:
            blocks = found[dit.path]
            if not blocks:
                continue
            residents = wishes[dit.path] if dit.path in eligible else 0
            if wishes[dit.path] and eligible and not residents:
                self.findings.note(f"{dit.path!r} isn't in resident_dit_paths, so it keeps no blocks on the device.")
            self._add_stack(dit, "dit", blocks, self.config.options_for("dit", dit.path), residents)
        self._stack_submodules(dits, [block for blocks in found.values() for _, block in blocks])

    def _stack_encoders(self) -> None:
        for selector in ENCODER_COMPONENT_TYPES:
            loaded: list[tuple[ResolvedComponent, list[Block] | None]] = []
            for encoder in self.choices.chosen("layer", selector):
                if module_nbytes(encoder.module) == 0:
                    self.findings.note(
                        f"{encoder.path!r} isn't loaded (it holds no weights), so nothing is streamed for it."
                    )
                    continue
                containers = declared_containers(
                    encoder, self.plan.encoder_block_attrs.get(encoder.path, ()), self.findings
                )
                loaded.append((encoder, self._blocks_in(encoder, containers) if containers else None))
            without = [encoder for encoder, blocks in loaded if blocks is None]
            if loaded and len(without) == len(loaded):
                names = ", ".join(f"{encoder.path} ({type(encoder.module).__name__})" for encoder in without)
                self.findings.problem(
                    f"components has {selector!r}, but none of the encoders of {self.pipeline_name} declares blocks: "
                    f"{names}. Name them in encoder_block_attrs of the offload plan, or leave it out."
                )
            for encoder in without:
                self.findings.note(f"{encoder.path!r} declares no blocks, so it stays on the device as a whole.")
            for encoder, blocks in loaded:
                if blocks:
                    self._add_stack(encoder, "encoder", blocks, self.config.options_for(selector, encoder.path))

    def _stack_others(self) -> None:
        """Components of any other kind, which only a choice by name can stream."""
        for selector in ("vae", ""):
            for component in self.choices.chosen("layer", selector):
                if component.path in self.on_demand:
                    continue
                is_declared = bool(declared_containers(component, (), self.findings))
                blocks = self._blocks(component, () if is_declared else find_lists(component.module))
                if blocks:
                    self._add_stack(component, "dit", blocks, self.config.options_for(selector, component.path))

    def _blocks(self, dit: ResolvedComponent, planned: tuple[str, ...]) -> list[Block]:
        containers = declared_containers(dit, planned, self.findings)
        if not containers:
            self.findings.problem(
                f"{dit.path!r} ({a_type(dit.module)}) declares no blocks, so it can't be streamed. Name its block "
                f"containers in block_attrs of the pipeline's offload plan, or in {BLOCKS_ATTRIBUTE} on its class."
            )
            return []
        return self._blocks_in(dit, containers)

    def _blocks_in(self, component: ResolvedComponent, containers: tuple[str, ...]) -> list[Block]:
        try:
            blocks = collect_blocks(component, containers, self.findings, self.discovery.kept)
        except ValueError as error:
            self.findings.problem(str(error))
            return []
        if not blocks:
            self.findings.problem(
                f"The block containers {', '.join(containers)} of {component.path!r} ({a_type(component.module)}) hold "
                "no blocks with weights, so it can't be streamed."
            )
        return blocks

    def _add_stack(
        self, component: ResolvedComponent, kind: StackKind, blocks: list[Block], options: LayerOptions, wanted: int = 0
    ) -> None:
        count = len(blocks)
        if wanted > count:
            self.findings.note(
                f"resident_layers={wanted} is more than the {count} blocks of {component.path!r}: all of them stay."
            )
        resident = resident_indices(count, wanted, self.config.resident_policy)
        if count - len(resident) == 1:
            if self.findings.explicit:
                raise ValueError(self._single_block(component, count, len(resident)))
            if self.config.strategy is OffloadStrategy.LAYERWISE:
                self.findings.warn(
                    f"{component.path!r} has a single block, which a ring can't stream; it stays on the device."
                )
                return
            self.findings.note(f"{component.path!r} would stream a single block; it stays on the device.")
            resident = tuple(range(count))
        self.stacks.append(
            BlockStack(
                component=component.path,
                kind=kind,
                block_paths=tuple(path for path, _ in blocks),
                blocks=tuple(block for _, block in blocks),
                resident=resident,
                nbytes=tuple(module_nbytes(block) for _, block in blocks),
                options=options,
            )
        )

    @staticmethod
    def _single_block(component: ResolvedComponent, count: int, residents: int) -> str:
        if residents:
            return (
                f"resident_layers={residents} leaves one of the {count} blocks of {component.path!r} to be streamed, "
                f"and a single block would never leave its slot; use at most {count - 2}, or {count} to keep all of "
                "them on the device."
            )
        return (
            f"{component.path!r} ({a_type(component.module)}) has a single block with weights, and a single block "
            "would never leave its slot, so nothing is gained by streaming it; leave it out of components."
        )

    # Submodules of a DiT ----------------------------------------------------------------------------------------

    def _stack_submodules(self, dits: tuple[ResolvedComponent, ...], blocks: list[nn.Module]) -> None:
        """Declared submodules get a stack of their own; so do large undeclared ones under the distributed strategy."""
        taken = {id(block) for block in blocks}
        streamed = {id(leaf.tensor) for block in blocks for leaf in find_leaves(block, "")}
        unmatched = set(self.plan.offload_submodules)
        for dit in self.discovery.loaded("dit"):
            for name, container in self.plan.offload_submodules.items():
                try:
                    module = lookup(dit.module, name)
                except MissingPathError:
                    continue
                unmatched.discard(name)
                if dit in dits and isinstance(module, nn.Module):
                    self._stack_submodule(dit, name, module, container)
        for dit in dits:
            if self.config.strategy is OffloadStrategy.DISTRIBUTED_LAYERWISE and self.discovery.found_by != "guess":
                self._stack_large_children(dit, taken, streamed)
        for name in sorted(unmatched):
            self.findings.problem(
                f"The offload plan has {name!r} in offload_submodules, but no DiT of {self.pipeline_name} has it; "
                "correct the name."
            )

    def _stack_large_children(self, dit: ResolvedComponent, taken: set[int], streamed: set[int]) -> None:
        declared = {id(component.module): component for component in self.components}
        for name, child in dit.module.named_children():
            path = f"{dit.path}.{name}"
            if id(child) in declared or name in self.plan.offload_submodules:
                continue
            if any(is_inside(on_demand, path) or is_inside(path, on_demand) for on_demand in self.on_demand):
                continue
            elsewhere = {
                id(leaf.tensor)
                for component in declared.values()
                if is_inside(component.path, path)
                for leaf in find_leaves(component.module, "")
            }
            nbytes = module_nbytes(child, without=streamed | elsewhere)
            if nbytes <= LARGE_SUBMODULE_BYTES:
                continue
            container = find_container(child, taken)
            if container is None:
                _require_lifecycle(
                    path,
                    child,
                    f"it holds {format_bytes(nbytes)} and has no blocks to stream, so it would defeat streaming",
                )
                self.on_demand.append(path)
                continue
            self.findings.warn_once(
                "submodule",
                type(child),
                f"{path!r} ({a_type(child)}) holds {format_bytes(nbytes)} and isn't declared; its blocks are taken "
                f"from {container!r}. Declare it in offload_submodules of the offload plan.",
            )
            self._stack_submodule(dit, name, child, container)

    def _stack_submodule(self, dit: ResolvedComponent, name: str, module: nn.Module, container: str) -> None:
        known = next((component for component in self.components if component.module is module), None)
        if known is not None and any(stack.component == known.path for stack in self.stacks):
            return
        submodule = known or ResolvedComponent(f"{dit.path}.{name}", module, "dit")
        blocks = self._blocks_in(submodule, (container,))
        if len(blocks) < 2:
            self.findings.note(
                f"{submodule.path!r} has {len(blocks)} blocks, too few to stream; it stays on the device."
            )
            return
        if known is None:
            self.components.append(submodule)
        self._add_stack(submodule, "dit", blocks, self.config.options_for("dit", dit.path))


def _require_lifecycle(path: str, module: Any, why: str) -> None:
    missing = [name for name in _LIFECYCLE if not callable(getattr(module, name, None))]
    if missing:
        raise ValueError(
            f"{path!r} ({a_type(module)}) has no {' and no '.join(missing)}, which it needs because {why}. Add "
            f"{' and '.join(_LIFECYCLE)}, name its block container in offload_submodules, or declare it in "
            "_resident_modules."
        )
