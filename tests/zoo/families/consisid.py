"""ConsisID: a video of a person in a picture."""

from __future__ import annotations

from typing import Any

from tests.zoo.building import build, normal
from tests.zoo.families.cogvideox import COGVIDEOX, cogvideox_arguments
from tests.zoo.registry import Arguments, transformer


def consisid_transformer(in_channels: int = 4) -> Any:
    from diffusers import ConsisIDTransformer3DModel

    return build(
        ConsisIDTransformer3DModel,
        71,
        **COGVIDEOX,
        in_channels=in_channels,
        is_train_face=True,
        cross_attn_interval=2,
        cross_attn_dim_head=4,
        cross_attn_num_heads=2,
        LFE_id_dim=8,
        LFE_vit_dim=6,
        LFE_depth=4,
        LFE_dim_head=8,
        LFE_num_heads=2,
        LFE_num_id_token=2,
        LFE_num_querie=3,
        LFE_output_dim=21,
        LFE_ff_mult=1,
        LFE_num_scale=2,
    )


@transformer("ConsisIDTransformer3DModel")
def consisid() -> tuple[Any, Arguments]:
    def call() -> dict[str, Any]:
        return {
            **cogvideox_arguments(),
            "id_cond": normal(1, 8, seed=2),
            "id_vit_hidden": [normal(1, 5, 6, seed=3), normal(1, 5, 6, seed=4)],
        }

    return consisid_transformer(), call
