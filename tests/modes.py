"""The modes in which a public case is tried, as arguments of `enable_omni_offload`."""

from __future__ import annotations

from typing import Any

import pytest

MODES: dict[str, dict[str, Any]] = {
    "layer": {"mode": "layer"},
    "module": {"mode": "module"},
    "mixed": {"components": {"dit": "layer", "text_encoder": "module", "vae": "module"}},
}
"""Layer mode, module mode, and what is useful on a card of 24 GB."""

in_every_mode = pytest.mark.parametrize("mode", MODES)
"""For a test that takes the `mode` and calls `enable_omni_offload(**MODES[mode])`."""

in_every_mode_layers_slow = pytest.mark.parametrize(
    "mode", [pytest.param("layer", marks=pytest.mark.slow), "module", "mixed"]
)
"""The same for a test that takes long: layer mode, which other tests come near, is slow."""


def chosen(mode: str, component: str) -> str:
    """What a mode chooses for "dit", "text_encoder" or "vae": "layer", "module" or "resident"."""
    if mode == "mixed":
        return str(MODES["mixed"]["components"][component])
    if mode == "module":
        return "resident" if component == "vae" else "module"
    return "layer" if component == "dit" else "resident"
