"""Quantize models in memory, through the quantizers that diffusers and transformers use while they load one."""

from __future__ import annotations

import tempfile
from typing import Any

import gguf
import torch
from bitsandbytes.nn import Linear8bitLt
from diffusers.quantizers import DiffusersAutoQuantizer
from diffusers.quantizers.gguf.utils import GGUFParameter
from diffusers.utils import get_module_from_name
from torch import nn

from .calm import calm_bitsandbytes

calm_bitsandbytes()

CPU = torch.device("cpu")


def quantize(model: Any, config: Any, state: dict[str, torch.Tensor] | None = None) -> Any:
    """`model` as `from_pretrained(folder, quantization_config=config)` of a folder with its weights gives it.

    Args:
        model: a diffusers model; its linear layers are replaced.
        config: a quantization config of diffusers.
        state: the weights, if they aren't the model's own.
    """
    quantizer = DiffusersAutoQuantizer.from_config(config, pre_quantized=state is not None)
    if config.quant_method != "bitsandbytes":  # It asks for a GPU, and works without one.
        quantizer.validate_environment()
    if state is None:
        state = dict(model.state_dict())
        model.register_to_config(quantization_config=config)
    kept = model._keep_in_fp32_modules or []
    quantizer.preprocess_model(model=model, device_map=None, keep_in_fp32_modules=list(kept), state_dict=state)
    for name, value in state.items():
        if is_kept(name, kept):
            value = value.float()
        if quantizer.check_if_quantized_param(model, value, name, state, param_device="cpu"):
            quantizer.create_quantized_param(model, value, name, CPU, state, [], dtype=value.dtype)
        else:
            module, own = get_module_from_name(model, name)
            if own in module._parameters:
                wanted = module._parameters[own].requires_grad
                module._parameters[own] = nn.Parameter(value.detach(), requires_grad=wanted)
            else:
                module._buffers[own] = value
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    return model.eval()


def is_kept(name: str, kept: list[str]) -> bool:
    """Whether a weight belongs to a module that diffusers leaves in float32."""
    return any(part in kept for part in name.split("."))


def gguf_state(model: Any, quant_type: str) -> dict[str, torch.Tensor]:
    """The weights of `model` as a GGUF file holds them: those of wide linear layers in blocks of `quant_type`."""
    kind = gguf.GGMLQuantizationType[quant_type]
    kept = model._keep_in_fp32_modules or []
    state = dict(model.state_dict())
    for path, module in model.named_modules():
        whole = isinstance(module, nn.Linear) and module.in_features % gguf.GGML_QUANT_SIZES[kind][0] == 0
        if whole and not is_kept(path, kept):
            blocks = gguf.quants.quantize(module.weight.detach().float().numpy(), kind)
            state[f"{path}.weight"] = GGUFParameter(torch.from_numpy(blocks.copy()), quant_type=kind)
    return state


def reload_encoder(encoder: Any, config: Any) -> Any:
    """A text encoder of transformers, saved and loaded with a quantization config of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        encoder.save_pretrained(folder)
        loaded = type(encoder).from_pretrained(
            folder, quantization_config=config, dtype=encoder.dtype, device_map="cpu", local_files_only=True
        )
    return loaded.eval()


def to_resident(pipe: Any, device: torch.device) -> Any:
    """`pipe.to(device)`; what 8-bit layers keep beside their weights follows, which bitsandbytes leaves behind."""
    pipe.to(device)
    for component in pipe.components.values():
        for module in component.modules() if isinstance(component, nn.Module) else ():
            if isinstance(module, Linear8bitLt):
                holder = module.state if module.weight.CB is None else module.weight
                holder.CB, holder.SCB = module.weight.data, holder.SCB.to(device)
    return pipe
