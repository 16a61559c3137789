"""Which components a pipeline has and what part each plays: declared, or found by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from diffusers_omni_offload.declarations import OFFLOAD_PLAN_ATTRIBUTE, OffloadPlan, a_type, checked_paths
from diffusers_omni_offload.topology.findings import Findings
from diffusers_omni_offload.topology.generic import guess, is_diffusers_pipeline
from diffusers_omni_offload.topology.paths import MissingPathError, lookup, prefixes
from diffusers_omni_offload.topology.plan import ComponentRole, ResolvedComponent

WELL_KNOWN_NAMES: Mapping[ComponentRole, tuple[str, ...]] = {
    "dit": ("transformer", "transformer_2", "dit", "sr_dit", "language_model", "transformer_blocks", "model"),
    "encoder": ("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder"),
    "vae": ("vae", "audio_vae"),
}
"""What the scan looks for in an object without declarations that is no diffusers pipeline."""

_DECLARATIONS: Mapping[ComponentRole, str] = {
    "dit": "_dit_modules",
    "encoder": "_encoder_modules",
    "vae": "_vae_modules",
    "resident": "_resident_modules",
}


@dataclass(frozen=True)
class Discovery:
    """What was found. `declared` has the paths of each role as they were declared (or scanned), absent ones too;
    `absent` those whose component is None or isn't there. `components` has each module once."""

    plan: OffloadPlan
    declared: Mapping[ComponentRole, tuple[str, ...]]
    absent: tuple[str, ...]
    components: tuple[ResolvedComponent, ...]
    source: str
    """In words: where the declarations come from, for errors."""
    is_scan: bool
    """True if the components were found by their names, so that one of them may be no DiT at all."""
    is_guess: bool = False
    """True if their blocks were found as well, large lists within their parts among them."""
    kept: Mapping[int, str] = field(default_factory=dict)
    """Modules that stay on the device even if they are blocks: `id` -> why."""

    def loaded(self, role: ComponentRole) -> tuple[ResolvedComponent, ...]:
        """Components of a role that are there."""
        return tuple(component for component in self.components if component.role == role)


def discover(
    pipeline: Any, declarations: type | None, selected: frozenset[ComponentRole], findings: Findings
) -> Discovery:
    """Reads the declarations of `pipeline` (its own, else those of `declarations`, else a scan) and lists all its
    modules.

    A declared path that isn't there is a problem for the `selected` roles and a warning for the others.
    """
    owner, source = _declaring(pipeline, declarations)
    plan = _read_plan(owner, source)
    is_scan = owner is None or getattr(owner, _DECLARATIONS["dit"], None) is None
    is_guess = is_scan and is_diffusers_pipeline(pipeline)
    kept: dict[int, str] = {}
    modules = list(iterate_modules(pipeline))
    declared: Mapping[ComponentRole, tuple[str, ...]]
    if not is_scan:
        declared = {
            role: checked_paths(f"{source}.{name}", getattr(owner, name, None) or ())
            for role, name in _DECLARATIONS.items()
        }
    elif is_guess:
        found = guess(pipeline, modules, plan)
        declared, plan = found.declared, found.plan
        kept.update(found.shared)
        source = "the names of its components"
        findings.say_once("guess", type(pipeline), found.summary)
    else:
        source = f"a scan of {type(pipeline).__name__} for well-known names"
        declared = _scan(pipeline, plan)
        findings.warn_once(
            "scan",
            type(pipeline),
            f"{type(pipeline).__name__} declares no components, so they were found by their names "
            f"({', '.join(path for paths in declared.values() for path in paths) or 'none'}). Declare _dit_modules, "
            "_encoder_modules and _vae_modules on the class, or register an adapter.",
        )
    components: dict[int, ResolvedComponent] = {}
    absent: list[str] = []
    for role, paths in declared.items():
        for path in paths:
            module = _declared_module(pipeline, path, role, source, role in selected, findings)
            if module is None:
                absent.append(path)
                continue
            earlier = components.get(id(module))
            if earlier is None:
                components[id(module)] = ResolvedComponent(path, module, role)
            elif earlier.role != role:
                findings.note(
                    f"{path!r} ({role}) is the same module as {earlier.path!r} ({earlier.role}) and is treated as that."
                )
            if components[id(module)].role == "resident":
                kept[id(module)] = f"{source} declares it in {_DECLARATIONS[role]}"
    every_path = [path for paths in declared.values() for path in paths]
    for path, module in [*modules, *_iterate_holders(pipeline, every_path)]:
        components.setdefault(id(module), ResolvedComponent(path, module, "resident"))
    return Discovery(plan, declared, tuple(absent), tuple(components.values()), source, is_scan, is_guess, kept)


def iterate_modules(pipeline: Any) -> Iterator[tuple[str, nn.Module]]:
    """(dotted path, module) of the modules that a pipeline holds directly or in pipelines, lists and dicts within
    it."""
    yield from _iterate_modules(pipeline, "", set())


def _iterate_modules(owner: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    for name, value in _attributes(owner):
        path = f"{prefix}{name}"
        if isinstance(value, nn.Module):
            yield path, value
        elif isinstance(value, (list, tuple, dict)):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for key, entry in entries:
                if isinstance(entry, nn.Module):
                    yield f"{path}.{key}", entry
                elif is_pipeline(entry):
                    yield from _iterate_modules(entry, f"{path}.{key}.", seen)
        elif is_pipeline(value):
            yield from _iterate_modules(value, path + ".", seen)
    if isinstance(owner, nn.Module) and not prefix and _has_own_tensors(owner):
        yield "", owner


def _iterate_holders(pipeline: Any, declared: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the plain objects that declared paths lead through ("pipe" of "pipe.transformer")."""
    for prefix in prefixes(declared):
        try:
            holder = lookup(pipeline, prefix)
        except MissingPathError:
            continue
        if not isinstance(holder, (nn.Module, list, tuple, dict)):
            yield from _iterate_modules(holder, prefix + ".", set())


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a pipeline's attributes, registered components first, each name once."""
    names: set[str] = set()
    for name, value in _registered(owner):
        names.add(name)
        yield name, value
    if isinstance(owner, nn.Module):
        for name, value in owner.named_children():
            names.add(name)
            yield name, value
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if name not in names and not (name.startswith("_") and isinstance(value, (list, tuple, dict))):
            yield name, value


def _registered(owner: Any) -> Iterator[tuple[str, Any]]:
    # `DiffusionPipeline.components` raises if an optional constructor argument was never registered; the attributes,
    # which are read next, hold the modules all the same.
    try:
        components = owner.components
    except Exception:
        return
    if isinstance(components, Mapping):
        yield from ((str(name), value) for name, value in components.items())


def is_pipeline(value: Any) -> bool:
    """True for diffusers pipelines, and for objects that declare components or hold `components`; not for modules or
    classes."""
    if isinstance(value, (nn.Module, type)) or value is None:
        return False
    declares = hasattr(type(value), _DECLARATIONS["dit"]) or _DECLARATIONS["dit"] in getattr(value, "__dict__", {})
    return declares or isinstance(getattr(type(value), "components", None), property)


def _has_own_tensors(module: nn.Module) -> bool:
    own = (module.parameters(recurse=False), module.buffers(recurse=False))
    return any(True for tensors in own for _ in tensors)


def _declaring(pipeline: Any, declarations: type | None) -> tuple[Any, str]:
    for name in (_DECLARATIONS["dit"], OFFLOAD_PLAN_ATTRIBUTE):
        # An offloaded pipeline's class is composed with its adapter, whose declarations aren't the pipeline's own.
        if getattr(pipeline, name, None) not in (None, getattr(declarations, name, None)):
            return pipeline, type(pipeline).__name__
    if declarations is not None:
        return declarations, getattr(declarations, "__name__", type(declarations).__name__)
    return None, ""


def _read_plan(owner: Any, source: str) -> OffloadPlan:
    plan = getattr(owner, OFFLOAD_PLAN_ATTRIBUTE, None) if owner is not None else None
    if plan is None:
        return OffloadPlan()
    if not isinstance(plan, OffloadPlan):
        raise TypeError(f"{source}.{OFFLOAD_PLAN_ATTRIBUTE} is {a_type(plan)}, but an OffloadPlan is needed.")
    return plan


def _scan(pipeline: Any, plan: OffloadPlan) -> dict[ComponentRole, tuple[str, ...]]:
    found: dict[ComponentRole, tuple[str, ...]] = {role: () for role in _DECLARATIONS}
    for role, names in WELL_KNOWN_NAMES.items():
        found[role] = tuple(name for name in names if isinstance(getattr(pipeline, name, None), nn.Module))
    # A plan without component lists says which paths are DiTs and encoders all the same.
    if plan.block_attrs:
        found["dit"] = tuple(plan.block_attrs)
    found["encoder"] = tuple(dict.fromkeys([*plan.encoder_block_attrs, *found["encoder"]]))
    return found


def _declared_module(
    pipeline: Any, path: str, role: ComponentRole, source: str, is_selected: bool, findings: Findings
) -> nn.Module | None:
    # An adapter serves pipelines that differ in what they leave out, so only what is needed is worth a warning.
    is_own = getattr(pipeline, _DECLARATIONS[role], None) is not None
    report = findings.problem if is_selected else (findings.warn if is_own else findings.note)
    try:
        module = lookup(pipeline, path)
    except MissingPathError as error:
        if not is_own and not error.found:
            # A modular pipeline that was made for one workflow has no attribute for the components of the others.
            findings.note(f"{source} declares {path!r} ({role}), which this {type(pipeline).__name__} doesn't have.")
            return None
        report(f"{source} declares {path!r} ({role}), but {error}; correct the path or leave it out.")
        return None
    if module is None:
        return None
    if not isinstance(module, nn.Module):
        report(f"{source} declares {path!r} ({role}), which is {a_type(module)} and not an nn.Module; leave it out.")
        return None
    return module
