"""Who looks after an offload while it is on, as the mode "auto" does."""

from __future__ import annotations

from typing import Protocol

from diffusers_omni_offload.backends.attempts import Relief


class Watcher(Relief, Protocol):
    """Is told what happens, and makes room on the device where that is too short."""

    def component_has_run(self, path: str) -> None:
        """A component has run without an error, and no other one does."""

    def call_has_ended(self) -> None:
        """A call has ended without an error."""

    def weights_have_changed(self) -> None:
        """Weights have come, gone or changed; no forward is running."""
