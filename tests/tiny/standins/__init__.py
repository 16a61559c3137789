"""Stand-ins for pipelines that aren't in diffusers: their structure and their traps, tiny and with random weights.

Each is a plain `nn.Module` under the name of the class that it stands in for, so that it finds its adapter.
"""

from collections.abc import Callable
from typing import Any

from .bagel import build_bagel
from .cosmos3_split import build_cosmos3_split
from .minimax_h3_spec import build_minimax_h3_spec
from .nextstep import build_nextstep
from .parts import Call
from .soulx_singer import build_soulx_singer_svc, build_soulx_singer_svs

STANDINS: dict[str, Callable[..., tuple[Any, Call]]] = {
    "nextstep": build_nextstep,
    "soulx_singer_svs": build_soulx_singer_svs,
    "soulx_singer_svc": build_soulx_singer_svc,
    "bagel": build_bagel,
    "cosmos3_split": build_cosmos3_split,
    "minimax_h3_spec": build_minimax_h3_spec,
    "minimax_h3_spec_reference": lambda: build_minimax_h3_spec(has_reference=True),
}

__all__ = ["STANDINS"]
