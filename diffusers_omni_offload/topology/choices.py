"""What the configuration chooses for each component: to stream it, to swap it as a whole, or to keep it resident."""

from __future__ import annotations

import difflib

from diffusers_omni_offload.config import CHOICES, SELECTORS, OffloadConfig, OffloadStrategy
from diffusers_omni_offload.declarations import ENCODER_COMPONENT_TYPES
from diffusers_omni_offload.topology.discovery import Discovery
from diffusers_omni_offload.topology.findings import Findings
from diffusers_omni_offload.topology.fsdp import is_left_to_fsdp
from diffusers_omni_offload.topology.plan import ResolvedComponent
from diffusers_omni_offload.topology.roles import encoder_selector
from diffusers_omni_offload.topology.sizes import module_nbytes


class Choices:
    """The choice for each discovered component.

    Args:
        config: what the user asked for.
        discovery: what was found.
        findings: where notes and problems go.
        pipeline_name: the pipeline's class, for messages.
    """

    def __init__(self, config: OffloadConfig, discovery: Discovery, findings: Findings, pipeline_name: str) -> None:
        self._config, self._discovery, self._findings = config, discovery, findings
        self._name = pipeline_name

    def of(self, component: ResolvedComponent) -> str:
        """ "layer", "module" or "resident"; the last for what FSDP moves, whatever was chosen."""
        return "resident" if is_left_to_fsdp(component.module) else self._wanted(component)

    def chosen(self, choice: str, selector: str) -> tuple[ResolvedComponent, ...]:
        """The components that `selector` stands for and that this was chosen for; "" stands for those without one."""
        return tuple(
            component
            for component in self._discovery.components
            if self.selector(component) == selector and self.of(component) == choice
        )

    def selector(self, component: ResolvedComponent) -> str:
        """The selector that a component answers to; "" if only its path does."""
        if component.role == "encoder":
            return self._encoder_selector(component.path)
        return "" if component.role == "resident" else component.role

    def declared_encoders(self, selector: str) -> tuple[str, ...]:
        """The paths of the declared encoders that `selector` stands for, absent ones too."""
        return tuple(path for path in self._discovery.declared["encoder"] if self._encoder_selector(path) == selector)

    def check(self) -> str | None:
        """Complain about a choice for something that isn't there.

        Returns:
            Why nothing can be done at all; None if something can.

        Raises:
            ValueError: with an explicit selection.
        """
        self._check_paths()
        self._check_fsdp()
        discovery, config = self._discovery, self._config
        has_others = config.is_default and bool(discovery.loaded("encoder"))
        if config.selects("dit") and not discovery.loaded("dit") and not has_others:
            declared = ", ".join(discovery.declared["dit"])
            what = f"none of {declared} is loaded" if declared else "none is declared"
            self._findings.problem(
                f"{self._name} has no DiT to offload: {what} ({discovery.source}). Its components are "
                f"{self._listed()}. Declare the denoising modules in _dit_modules, on its class or on an adapter "
                "(register_adapter), or load one."
            )
            return f"{self._name} has no DiT"
        if config.has_selection:
            self._check_selectors()
        is_model_level = config.strategy is OffloadStrategy.MODEL_LEVEL
        if is_model_level and not self._findings.explicit and not discovery.loaded("encoder"):
            self._findings.problem(f"{self._name} has no encoders to swap with its DiT, so nothing is offloaded.")
            return f"{self._name} has no encoders"
        return None

    def swapped(self) -> tuple[str, ...]:
        """The paths of the components to swap as wholes; one that lies inside another moves with that.

        Raises:
            ValueError: a part of such a component was chosen to be resident.
        """
        components = self._discovery.components
        whole = [component for component in components if self.of(component) == "module"]
        outers = {
            component.path: next((other for other in whole if component.is_part_of(other)), None)
            for component in components
        }
        for path, outer in outers.items():
            if outer is not None and self._config.choices.get(path) == "resident":
                raise ValueError(
                    f"components keeps {path!r} resident, which is a part of {outer.path!r} and can't stay when that "
                    "is swapped as a whole; leave it out."
                )
        found = []
        for component in whole:
            outer = outers[component.path]
            if module_nbytes(component.module) == 0:
                self._findings.note(f"{component.path!r} holds no weights, so there is nothing to swap.")
            elif outer is not None:
                self._findings.note(f"{component.path!r} is a part of {outer.path!r} and moves with it.")
            else:
                found.append(component.path)
        return tuple(found)

    def _encoder_selector(self, path: str) -> str:
        """Declared, or by the name."""
        return self._discovery.plan.encoder_component_types.get(path) or encoder_selector(path)

    def _listed(self) -> str:
        named = (f"{component.path} ({type(component.module).__name__})" for component in self._discovery.components)
        return ", ".join(named) or "no modules"

    def _check_paths(self) -> None:
        paths = [component.path for component in self._discovery.components]
        for name in self._config.choices:
            if name in SELECTORS or name in paths:
                continue
            if name in self._discovery.absent:
                raise ValueError(f"components has {name!r}, which isn't loaded in this {self._name}; leave it out.")
            known = (*SELECTORS, *(path for path in paths if path))
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"components has {name!r}, which {self._name} doesn't have; choose from {', '.join(known)}, each with "
                f"{', '.join(CHOICES)}.{hint}"
            )

    def _wanted(self, component: ResolvedComponent) -> str:
        return self._config.choice_for(self.selector(component), component.path)

    def _check_fsdp(self) -> None:
        for component in self._discovery.components:
            if self._wanted(component) != "resident" and is_left_to_fsdp(component.module):
                self._findings.warn(
                    f"{component.path!r} is left to FSDP, which has sharded it and gathers it itself. With "
                    "fully_shard(..., offload_policy=CPUOffloadPolicy()) its shards stay in host memory."
                )

    def _check_selectors(self) -> None:
        paths = {component.path for component in self._discovery.components}
        encoders = ", ".join(self._discovery.declared["encoder"]) or "no encoders"
        for selector in ENCODER_COMPONENT_TYPES:
            if self._config.selects(selector) and selector not in paths and not self.declared_encoders(selector):
                raise ValueError(
                    f"components has {selector!r}, but {self._name} declares no such encoder "
                    f"({self._discovery.source}: {encoders}); leave it out."
                )
        if self._config.selects("vae") and "vae" not in paths and not self._discovery.loaded("vae"):
            raise ValueError(f"components has 'vae', but {self._name} has none; leave it out.")
