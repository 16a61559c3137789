"""Position ids of DiTs that are given them."""

from __future__ import annotations

import torch


def grid_ids(height: int, width: int, axes: int = 3) -> torch.Tensor:
    """Position ids of image tokens: row and column in axes 1 and 2, zeros in the others."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ids = torch.zeros(height, width, axes)
    ids[..., 1], ids[..., 2] = rows, columns
    return ids.reshape(height * width, axes)
