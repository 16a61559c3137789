"""What steers a UNet from outside: ControlNets, adapters and motion modules, none of them without effect."""

from __future__ import annotations

import inspect
from typing import Any

from tests.zoo.building import build


def controlnet(unet: Any, conditioning_channels: int = 3, seed: int = 31) -> Any:
    """A `ControlNetModel` with the weights of `unet`; it reads pictures twice the size of the latents."""
    from diffusers import ControlNetModel

    return build(
        ControlNetModel.from_unet,
        seed,
        unet=unet,
        conditioning_embedding_out_channels=(4, 8),
        conditioning_channels=conditioning_channels,
    )


def controlnet_union(unet: Any, seed: int = 32) -> Any:
    """A `ControlNetUnionModel` of the shape of `unet`, for two kinds of control."""
    from diffusers import ControlNetUnionModel

    taken = inspect.signature(ControlNetUnionModel.__init__).parameters
    width = unet.config.block_out_channels[0]
    return build(
        ControlNetUnionModel,
        seed,
        **{name: value for name, value in unet.config.items() if name in taken},
        conditioning_embedding_out_channels=(4, 8),
        num_control_type=2,
        num_trans_channel=width,
        num_trans_head=2,
        num_proj_channel=width,
    )


def controlnet_xs(unet: Any, seed: int = 33) -> Any:
    """A `ControlNetXSAdapter` half as wide as `unet`."""
    from diffusers import ControlNetXSAdapter

    return build(
        ControlNetXSAdapter.from_unet, seed, unet=unet, size_ratio=0.5, conditioning_embedding_out_channels=(4, 8)
    )


def t2i_adapter(unet: Any, seed: int = 34) -> Any:
    """A `T2IAdapter` for `unet`; it reads pictures twice the size of the latents."""
    from diffusers import T2IAdapter

    # A first block without attention takes its features after it has halved the picture.
    attends = unet.config.down_block_types[0].startswith("CrossAttn")
    return build(
        T2IAdapter,
        seed,
        channels=list(unet.config.block_out_channels),
        num_res_blocks=1,
        downscale_factor=2 if attends else 4,
        adapter_type="full_adapter" if attends else "full_adapter_xl",
    )


def motion_adapter(unet: Any, seed: int = 35) -> Any:
    """A `MotionAdapter` for `unet`."""
    from diffusers import MotionAdapter

    return build(
        MotionAdapter,
        seed,
        block_out_channels=tuple(unet.config.block_out_channels),
        motion_layers_per_block=unet.config.layers_per_block,
        motion_num_attention_heads=2,
        motion_norm_num_groups=4,
        motion_max_seq_length=8,
    )


def sparse_controlnet(unet: Any, seed: int = 36) -> Any:
    """A `SparseControlNetModel` of the shape of `unet`; it reads pictures of some of the frames."""
    from diffusers import SparseControlNetModel

    taken = inspect.signature(SparseControlNetModel.__init__).parameters
    config = {name: value for name, value in unet.config.items() if name in taken}
    config["down_block_types"] = [name.replace("Block2D", "BlockMotion") for name in unet.config.down_block_types]
    return build(
        SparseControlNetModel,
        seed,
        **config,
        # With the simplified embedding a call would draw from the global generator.
        use_simplified_condition_embedding=False,
        conditioning_channels=3,
        conditioning_embedding_out_channels=(4, 8),
        motion_num_attention_heads=2,
        motion_max_seq_length=8,
    )
