"""Which components a pipeline has and what part each plays: declared, or found by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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


FoundBy = Literal["declaration", "scan", "guess"]
"""How components were found: as declared; by well-known names, so that one of them may be no DiT at all; or by what any
names say, and their blocks as well, large lists within their parts among them."""


@dataclass(frozen=True)
class Discovery:
    """What was found.

    Attributes:
        plan: what is declared or was guessed of the components' blocks.
        declared: the paths of each role as they were declared or found, absent ones too.
        absent: those of them whose component is None or isn't there.
        components: each module once.
        source: in words: where the declarations come from, for errors.
        found_by: how the components were found.
        kept: modules that stay on the device even if they are blocks: `id` -> why.
    """

    plan: OffloadPlan
    declared: Mapping[ComponentRole, tuple[str, ...]]
    absent: tuple[str, ...]
    components: tuple[ResolvedComponent, ...]
    source: str
    found_by: FoundBy
    kept: Mapping[int, str] = field(default_factory=dict)

    def loaded(self, role: ComponentRole) -> tuple[ResolvedComponent, ...]:
        """Components of a role that are there."""
        return tuple(component for component in self.components if component.role == role)


@dataclass(frozen=True)
class _Declared:
    """What is known before any path is looked up; see `Discovery`."""

    plan: OffloadPlan
    paths: Mapping[ComponentRole, tuple[str, ...]]
    source: str
    found_by: FoundBy
    kept: Mapping[int, str] = field(default_factory=dict)

    @property
    def every_path(self) -> list[str]:
        return [path for paths in self.paths.values() for path in paths]


def discover(
    pipeline: Any, declarations: type | None, selected: frozenset[ComponentRole], findings: Findings
) -> Discovery:
    """Reads the declarations of `pipeline` (its own, else those of `declarations`, else a scan) and lists all its
    modules.

    A declared path that isn't there is a problem for the `selected` roles and a warning for the others.
    """
    modules = list(iterate_modules(pipeline))
    declared = _declared(pipeline, declarations, modules, findings)
    components: dict[int, ResolvedComponent] = {}
    absent: list[str] = []
    for role, paths in declared.paths.items():
        for path in paths:
            is_own = _declares_itself(pipeline, declarations, _DECLARATIONS[role])
            module = _declared_module(pipeline, path, role, declared.source, is_own, role in selected, findings)
            if module is None:
                absent.append(path)
                continue
            known = components.setdefault(id(module), ResolvedComponent(path, module, role))
            if known.role != role:
                findings.note(
                    f"{path!r} ({role}) is the same module as {known.path!r} ({known.role}) and is treated as that."
                )
    kept = {
        **declared.kept,
        **{
            module_id: f"{declared.source} declares it in {_DECLARATIONS['resident']}"
            for module_id, component in components.items()
            if component.role == "resident"
        },
    }
    for path, module in [*modules, *_iterate_holders(pipeline, declared.every_path)]:
        components.setdefault(id(module), ResolvedComponent(path, module, "resident"))
    return Discovery(
        plan=declared.plan,
        declared=declared.paths,
        absent=tuple(absent),
        components=tuple(components.values()),
        source=declared.source,
        found_by=declared.found_by,
        kept=kept,
    )


def _declared(
    pipeline: Any, declarations: type | None, modules: Sequence[tuple[str, nn.Module]], findings: Findings
) -> _Declared:
    """What is declared or, without declarations, guessed for diffusers pipelines and scanned for in other objects."""
    owner, source = _declaring(pipeline, declarations)
    plan = _read_plan(owner, source)
    name = type(pipeline).__name__
    if owner is not None and getattr(owner, _DECLARATIONS["dit"], None) is not None:
        paths = {
            role: checked_paths(f"{source}.{attribute}", getattr(owner, attribute, None) or ())
            for role, attribute in _DECLARATIONS.items()
        }
        return _Declared(plan, paths, source, "declaration")
    if is_diffusers_pipeline(pipeline):
        found = guess(pipeline, modules, plan)
        findings.say_once("guess", type(pipeline), found.summary)
        return _Declared(found.plan, found.declared, "the names of its components", "guess", found.shared)
    scanned = _Declared(plan, _scan(pipeline, plan), f"a scan of {name} for well-known names", "scan")
    findings.warn_once(
        "scan",
        type(pipeline),
        f"{name} declares no components, so they were found by their names "
        f"({', '.join(scanned.every_path) or 'none'}). Declare _dit_modules, _encoder_modules and _vae_modules on the "
        "class, or register an adapter.",
    )
    return scanned


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
    if any(_declares_itself(pipeline, declarations, name) for name in (_DECLARATIONS["dit"], OFFLOAD_PLAN_ATTRIBUTE)):
        return pipeline, type(pipeline).__name__
    if declarations is not None:
        return declarations, getattr(declarations, "__name__", type(declarations).__name__)
    return None, ""


def _declares_itself(pipeline: Any, declarations: type | None, name: str) -> bool:
    # An offloaded pipeline's class is composed with its adapter, whose declarations aren't the pipeline's own.
    return getattr(pipeline, name, None) not in (None, getattr(declarations, name, None))


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
    pipeline: Any, path: str, role: ComponentRole, source: str, is_own: bool, is_selected: bool, findings: Findings
) -> nn.Module | None:
    # An adapter serves pipelines that differ in what they leave out, so only what is needed is worth a warning.
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
