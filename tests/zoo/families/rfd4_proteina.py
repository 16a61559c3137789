"""RFD4-Proteina: structures and sequences of proteins."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.building import build, generator, normal
from tests.zoo.registry import Arguments, pipeline, transformer

TOKENS = 6
LATENT = 4
RESIDUES = 21
TIMES = ("time_emb_bb_ca", "time_emb_local_latents")


def rfd4_dit() -> Any:
    """An `RFD4ProteinaTransformer`: layers of the trunk, with an update of the pairs after every other one."""
    from diffusers import RFD4ProteinaTransformer

    return build(
        RFD4ProteinaTransformer,
        seed=53,
        nlayers=5,
        token_dim=32,
        nheads=2,
        dim_cond=16,
        pair_repr_dim=16,
        latent_dim=LATENT,
        token_type_emb_dim=8,
        t_emb_dim=16,
        xt_pair_dist_dim=8,
        feats_seq=("xt_bb_ca", "xt_local_latents", "token_type"),
        feats_cond_seq=TIMES,
        feats_pair_repr=("xt_bb_ca_pair_dists", "molecule_idx_pair"),
        feats_pair_cond=TIMES,
        tri_mult_c=16,
        num_sequence_classes=RESIDUES,
    )


def masks() -> dict[str, torch.Tensor]:
    """The last token is padding, the first one a given context."""
    padding = torch.tensor([[True] * (TOKENS - 1) + [False]])
    context = torch.tensor([[True] + [False] * (TOKENS - 1)])
    return {
        "padding_mask": padding,
        "is_in_context_conditioning": context,
        "supports_local_latent": torch.ones_like(padding),
    }


@transformer("RFD4ProteinaTransformer")
def rfd4_transformer() -> tuple[nn.Module, Arguments]:
    def arguments() -> dict[str, Any]:
        conditioning = masks()
        return {
            "bb_ca": normal(1, TOKENS, 3),
            "local_latents": normal(1, TOKENS, LATENT, seed=1),
            "bb_ca_time": torch.tensor([0.3]),
            "local_latents_time": torch.tensor([0.2]),
            "padding_mask": conditioning.pop("padding_mask"),
            "token_type": torch.zeros(1, TOKENS, dtype=torch.long),
            "conditioning": {**conditioning, "molecule_iid": torch.tensor([[0, 0, 0, 1, 1, 1]])},
            "recycle_depth": 2,
        }

    return rfd4_dit(), arguments


@pipeline("RFD4ProteinaPipeline")
def rfd4() -> tuple[Any, Arguments]:
    from diffusers import RFD4ProteinaAutoencoder, RFD4ProteinaPipeline, RFD4ProteinaScheduler

    vae = build(
        RFD4ProteinaAutoencoder,
        seed=54,
        atom37_mask=[[True] * 37] * RESIDUES,
        allowed_residue_types=[[True] * RESIDUES] * 7,
        latent_dim=LATENT,
        n_residue_types=RESIDUES,
        nlayers=2,
        token_dim=32,
        nheads=2,
        dim_cond=16,
        pair_repr_dim=16,
        token_type_emb_dim=8,
    )
    pipe = RFD4ProteinaPipeline(
        transformer=rfd4_dit(),
        vae=vae,
        bb_ca_scheduler=RFD4ProteinaScheduler("log", "1/t", tsr_k=1.0, tsr_sigma=1.0, tail_steps=1),
        local_latents_scheduler=RFD4ProteinaScheduler("power", "tan", tsr_k=1.0, tsr_sigma=1.0, tail_steps=1),
        recycle_depths=[2, 1, 1],
    )

    def arguments() -> dict[str, Any]:
        return {
            **masks(),
            "token_type": torch.zeros(1, TOKENS, dtype=torch.long),
            "atom37_mask": torch.ones(1, TOKENS, 37, dtype=torch.bool),
            "conditioning_features": {
                "condition_sequence_1_residue": torch.zeros(1, TOKENS, dtype=torch.long),
                "molecule_iid": torch.tensor([[0, 0, 0, 1, 1, 1]]),
            },
            "generator": generator(),
        }

    return pipe, arguments
