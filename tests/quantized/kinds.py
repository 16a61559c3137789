"""The kinds of quantized weights that the tests know, each under one name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .loading import gguf_state, quantize

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Kind:
    """A kind of quantized weights.

    Args:
        library: what it is from.
        apply: quantizes the linear layers of a diffusers model.
        config: makes the quantization config with which diffusers loads such a model; None where there is none.
        dtype: the dtype that the pipeline computes in.
        gguf_type: the name of the type in GGUF files.
    """

    library: str
    apply: Callable[[Any], Any]
    config: Callable[[], Any] | None = None
    dtype: torch.dtype = BFLOAT16
    gguf_type: str | None = None


def _loaded(library: str, config: Callable[[], Any], dtype: torch.dtype = BFLOAT16) -> Kind:
    return Kind(library, lambda model: quantize(model, config()), config, dtype)


def _torchao(name: str, **options: Any) -> Kind:
    def config() -> Any:
        import torchao.quantization
        from diffusers import TorchAoConfig

        return TorchAoConfig(getattr(torchao.quantization, name)(**options))

    return _loaded("torchao", config)


def _bitsandbytes(**options: Any) -> Kind:
    def config() -> Any:
        from diffusers import BitsAndBytesConfig

        return BitsAndBytesConfig(bnb_4bit_compute_dtype=BFLOAT16, **options)

    return _loaded("bitsandbytes", config)


def _four_bits(quant_type: str, nested: bool) -> Kind:
    return _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=nested)


def _eight_bits(threshold: float) -> Kind:
    return _bitsandbytes(load_in_8bit=True, llm_int8_threshold=threshold)


def _quanto(weights: str, dtype: torch.dtype = BFLOAT16) -> Kind:
    def config() -> Any:
        from diffusers import QuantoConfig

        return QuantoConfig(weights)

    return _loaded("quanto", config, dtype)


def _gguf(quant_type: str) -> Kind:
    def config() -> Any:
        from diffusers import GGUFQuantizationConfig

        return GGUFQuantizationConfig(compute_dtype=BFLOAT16)

    def apply(model: Any) -> Any:
        return quantize(model, config(), gguf_state(model, quant_type))

    return Kind("gguf", apply, config, gguf_type=quant_type)


def _cast(model: Any) -> Any:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=BFLOAT16)
    return model


KINDS: dict[str, Kind] = {
    "torchao int8": _torchao("Int8WeightOnlyConfig", version=2),
    "torchao int8 v1": _torchao("Int8WeightOnlyConfig", version=1),
    "torchao int8 dynamic": _torchao("Int8DynamicActivationInt8WeightConfig", version=2),
    "torchao int4": _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao float8": _torchao("Float8WeightOnlyConfig"),
    "bitsandbytes int8": _eight_bits(0.0),
    "bitsandbytes int8 outliers": _eight_bits(6.0),
    "bitsandbytes nf4": _four_bits("nf4", nested=False),
    "bitsandbytes nf4 nested": _four_bits("nf4", nested=True),
    "bitsandbytes fp4": _four_bits("fp4", nested=False),
    "bitsandbytes fp4 nested": _four_bits("fp4", nested=True),
    "quanto int8": _quanto("int8"),
    "quanto float8": _quanto("float8"),
    # In bfloat16 these become another class, for a kernel of one kind of GPU.
    "quanto int4": _quanto("int4", FLOAT32),
    "quanto int2": _quanto("int2", FLOAT32),
    "gguf q8_0": _gguf("Q8_0"),
    "gguf q4_0": _gguf("Q4_0"),
    "gguf q5_1": _gguf("Q5_1"),
    "gguf bf16": _gguf("BF16"),
    "layerwise casting": Kind("diffusers", _cast),
}

ONE_A_LIBRARY = {
    "torchao": "torchao int8",
    "bitsandbytes": "bitsandbytes nf4 nested",
    "quanto": "quanto int8",
    "gguf": "gguf q8_0",
    "diffusers": "layerwise casting",
}


def _text_config(name: str) -> Any:
    import transformers

    if name == "bitsandbytes nf4":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=BFLOAT16,
        )
    if name == "bitsandbytes int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.QuantoConfig(weights="int8")


TEXT_KINDS: dict[str, Callable[[], Any]] = {
    name: lambda name=name: _text_config(name) for name in ("bitsandbytes nf4", "bitsandbytes int8", "quanto int8")
}
"""The quantization configs of transformers with which text encoders are loaded."""
