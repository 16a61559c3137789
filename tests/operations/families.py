"""The families that operations are tried on: a small pipeline each, and where LoRA layers go in it."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from tests import tiny
from tests.equality import Build


@dataclass(frozen=True)
class Family:
    """A family of pipelines.

    Args:
        name: as it is known.
        build: a small pipeline of it.
        stack: path of the blocks below each DiT.
        targets: the linear layers of a block that get LoRA layers, by the end of their names.
        outside: linear layers outside of the blocks that can have them.
        scale_argument: the argument of a call that scales all LoRA layers.
        experts: the DiTs.
        arguments: more arguments of a call, which make it short: no guidance, few pixels.
        text_encoders: those whose LoRA layers the pipeline can load.
    """

    name: str
    build: Build
    stack: str
    targets: tuple[str, ...]
    outside: tuple[str, ...]
    scale_argument: str = "attention_kwargs"
    experts: tuple[str, ...] = ("transformer",)
    arguments: tuple[tuple[str, Any], ...] = ()
    text_encoders: tuple[str, ...] = ()

    def dits(self, pipe: Any) -> list[nn.Module]:
        """The DiTs of a pipeline of this family."""
        return [getattr(pipe, expert) for expert in self.experts]

    def blocks(self, pipe: Any) -> list[nn.ModuleList]:
        """The blocks of each DiT."""
        return [attrgetter(self.stack)(dit) for dit in self.dits(pipe)]


WAN = Family(
    "Wan",
    lambda: tiny.build_wan(num_layers=2),
    "blocks",
    ("to_q", "to_out.0", "ffn.net.2"),
    ("proj_out", "condition_embedder.time_proj"),
    experts=("transformer", "transformer_2"),
    arguments=(("guidance_scale", 1.0), ("guidance_scale_2", 1.0)),
)
FLUX2 = Family(
    "Flux2",
    lambda: tiny.build_flux2(2, 2),
    "transformer_blocks",
    ("to_q", "to_out.0", "to_qkv_mlp_proj", "ff.linear_in"),
    ("proj_out", "context_embedder"),
)
SD3 = Family(
    "SD3",
    lambda: tiny.build_sd3(3, t5=False),
    "transformer_blocks",
    ("to_q", "to_out.0", "add_q_proj", "ff.net.2"),
    ("proj_out", "context_embedder"),
    arguments=(("guidance_scale", 1.0),),
    scale_argument="joint_attention_kwargs",
    text_encoders=("text_encoder", "text_encoder_2"),
)
QWEN_IMAGE = Family(
    "QwenImage",
    lambda: tiny.build_qwen_image(3),
    "transformer_blocks",
    ("to_q", "to_out.0", "add_q_proj", "img_mlp.net.2"),
    ("proj_out", "txt_in"),
    arguments=(("true_cfg_scale", 1.0), ("height", 16), ("width", 16)),
)

FAMILIES = (WAN, FLUX2, SD3, QWEN_IMAGE)
