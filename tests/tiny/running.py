"""Run tiny pipelines: outputs as arrays, a save-and-load round trip, and the order in which blocks ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# What pipelines make, and what is compared of those that make nothing. A modular pipeline returns everything that it
# has ever held, embeddings too, so the order matters.
_MADE = ("frames", "images", "videos", "video", "audios", "audio", "prediction", "coords_nm", "image")
_EMBEDDED = ("prompt_embeds", "image_embeds")


def to_array(output: Any) -> np.ndarray:
    """A pipeline's output as one array: frames, images, sound, maps, a protein, or embeddings."""
    for name in (*_MADE, *_EMBEDDED):
        value = getattr(output, name, None)
        if value is not None:
            break
    else:
        value = output
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float()
    return np.asarray(value)


def run(pipe: Any, call: Callable[[], dict[str, Any]]) -> np.ndarray:
    """One call with fresh arguments; the output as an array."""
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(disable=True)
    return to_array(pipe(**call()))


def align_parameters(pipe: Any) -> Any:
    """Give every parameter and buffer that starts off a 64-byte boundary an allocation of its own.

    safetensors maps weights at arbitrary offsets, and some CPU kernels round differently by alignment (up to 1e-6).
    Do this before comparing a pipeline loaded from disk bit for bit with the one that was saved.
    """
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            for tensor in [*component.parameters(), *component.buffers()]:
                if tensor.data_ptr() % 64:
                    tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
    return pipe


def reload(pipe: Any, folder: Any, torch_dtype: torch.dtype | None = None, align: bool = True) -> Any:
    """`save_pretrained` to `folder`, then `from_pretrained` of the same class.

    Raises:
        NotImplementedError: for a modular pipeline, which saves no weights of its own.
    """
    if not hasattr(pipe, "model_cpu_offload_seq"):
        raise NotImplementedError(f"{type(pipe).__name__} is a modular pipeline: it can't be saved and loaded here.")
    pipe.save_pretrained(folder, safe_serialization=True)
    arguments: dict[str, Any] = {} if torch_dtype is None else {"torch_dtype": torch_dtype}
    # A component that is None and not optional (SD3's text_encoder_3, say) has to be passed again.
    absent = [name for name, value in pipe.components.items() if value is None]
    arguments.update({name: None for name in absent if name not in pipe._optional_components})
    loaded = type(pipe).from_pretrained(folder, local_files_only=True, **arguments)
    if hasattr(pipe, "tokenizer_max_length"):
        loaded.tokenizer_max_length = pipe.tokenizer_max_length
    return align_parameters(loaded) if align else loaded


def trace(pipe: Any, call: Callable[[], dict[str, Any]]) -> list[tuple[str, int]]:
    """The elements of components' top-level `ModuleList`s in the order they ran: `("transformer.blocks", 3)`."""
    order: list[tuple[str, int]] = []
    handles = []

    def note(key: tuple[str, int]) -> Callable[..., None]:
        return lambda module, arguments: order.append(key)

    for component_name, component in pipe.components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        for list_name, modules in component.named_children():
            if isinstance(modules, torch.nn.ModuleList):
                for index, module in enumerate(modules):
                    handles.append(module.register_forward_pre_hook(note((f"{component_name}.{list_name}", index))))
    try:
        run(pipe, call)
    finally:
        for handle in handles:
            handle.remove()
    return order
