"""Tiny stock pipelines with quantized weights, of every kind that diffusers loads."""

from .kinds import KINDS, ONE_A_LIBRARY, TEXT_KINDS, Kind
from .loading import gguf_state, quantize, to_resident
from .models import build, build_text, builder, transformer
from .tensors import QuantizedState, bytes_of, inner_tensors, plain, quantized_bytes

__all__ = [
    "KINDS",
    "ONE_A_LIBRARY",
    "TEXT_KINDS",
    "Kind",
    "QuantizedState",
    "build",
    "build_text",
    "builder",
    "bytes_of",
    "gguf_state",
    "inner_tensors",
    "plain",
    "quantize",
    "quantized_bytes",
    "to_resident",
    "transformer",
]
