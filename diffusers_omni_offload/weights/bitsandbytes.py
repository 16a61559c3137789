"""What bitsandbytes leaves open in its weights, put in order before they are taken."""

from __future__ import annotations

import sys

import torch
from torch import nn


def put_in_order(module: nn.Module) -> None:
    """Prepare the weights below `module` that bitsandbytes has quantized.

    The library has one table of codes for all weights of a process, which no pipeline may move: each weight gets its
    own. And once an 8-bit weight has run, the module's copy counts: in the next forward the weight would become that.
    """
    library = sys.modules.get("bitsandbytes.functional")
    if library is None:
        return
    shared = {id(table) for table in library.name2qmap.values()}
    for child in module.modules():
        for weight in child._parameters.values():
            state = getattr(getattr(weight, "quant_state", None), "state2", None)
            if state is not None and id(state.code) in shared:
                state.code = state.code.clone()
        codes = getattr(getattr(child, "state", None), "CB", None)
        if type(child).__name__ == "Linear8bitLt" and isinstance(codes, torch.Tensor):
            weight = child._parameters["weight"]
            is_new = getattr(weight, "CB", None) is not None
            if weight is not None and not is_new and weight.data_ptr() != codes.data_ptr():
                weight.data = codes
