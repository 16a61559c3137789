"""A choice for each component, and the call that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Choice:
    """What `enable_omni_offload` can be asked for.

    Attributes:
        kinds: path of a component -> "resident", "module" or "layer".
        residents: path of a component that is streamed -> how many of its blocks stay on the device.
        slots: device buffers of the size of the largest streamed block.
    """

    kinds: Mapping[str, str]
    residents: Mapping[str, int] = field(default_factory=dict)
    slots: int = 2

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `enable_omni_offload` that ask for it; empty if everything is resident."""
        if set(self.kinds.values()) <= {"resident"}:
            return {}
        offloaded = {path: kind for path, kind in self.kinds.items() if kind != "resident"}
        arguments: dict[str, Any] = {"components": offloaded}
        options = {
            path: {"resident_layers": count}
            for path, count in self.residents.items()
            if count and self.kinds.get(path) == "layer"
        }
        if options:
            arguments["layer_options"] = options
        if self.slots != 2 and "layer" in offloaded.values():
            arguments["slots"] = self.slots
        return arguments

    def as_call(self, others: Mapping[str, Any] | None = None) -> str:
        """The line of Python that asks for it.

        Args:
            others: more arguments of `enable_omni_offload`.
        """
        arguments = self.arguments()
        if not arguments:
            return "pipe.to(device)"
        arguments |= others or {}
        words = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        return f"pipe.enable_omni_offload({words})"
