"""The quantized models of these tests are what diffusers' own loading code makes of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer, BnB8BitDiffusersQuantizer
from diffusers.quantizers.gguf.utils import GGUFParameter

from tests.living import fast_ones
from tests.quantized import KINDS, QuantizedState, gguf_state, plain, transformer


def described(model: torch.nn.Module) -> dict[str, Any]:
    """What a model is made of: its modules' and parameters' classes, and everything about its inner tensors."""
    state = QuantizedState.of(model)
    modules = {path: type(module) for path, module in model.named_modules()}
    # Notes of a library say which object is which, and where it came from.
    noted = {
        path: tuple(value for value in row if not isinstance(value, dict)) for path, row in state.attributes.items()
    }
    return {"modules": modules, "parameters": noted, "geometry": state.geometry}


def assert_alike(loaded: torch.nn.Module, built: torch.nn.Module) -> None:
    """The same structure, and the same bytes."""
    assert described(loaded) == described(built)
    values, others = QuantizedState.of(loaded).values, QuantizedState.of(built).values
    for path, value in values.items():
        assert torch.equal(value, others[path]), path
    assert type(loaded.config.get("quantization_config")) is type(built.config.get("quantization_config"))
    assert type(loaded.hf_quantizer) is type(built.hf_quantizer)
    for name in ("is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method"):
        assert getattr(loaded, name, None) == getattr(built, name, None)


FROM_FOLDERS = [kind for kind in KINDS if KINDS[kind].library in ("torchao", "bitsandbytes", "quanto")]


@pytest.mark.filterwarnings("ignore:.*[Qq]uanto:FutureWarning")
@pytest.mark.parametrize("kind", fast_ones(FROM_FOLDERS, "torchao int8", "bitsandbytes int8", "quanto int8"))
def test_from_pretrained(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = KINDS[kind]
    transformer("sd3", dtype=known.dtype).save_pretrained(tmp_path)
    device_map = None
    if known.library == "bitsandbytes":
        # diffusers asks for a GPU, which bitsandbytes itself can do without.
        for quantizer in (BnB4BitDiffusersQuantizer, BnB8BitDiffusersQuantizer):
            monkeypatch.setattr(quantizer, "validate_environment", lambda *args, **kwargs: None)
        device_map = {"": "cpu"}
    loaded = SD3Transformer2DModel.from_pretrained(
        tmp_path, quantization_config=known.config(), torch_dtype=known.dtype, device_map=device_map
    )
    assert_alike(loaded, known.apply(transformer("sd3", dtype=known.dtype)))


@pytest.mark.parametrize("kind", fast_ones([kind for kind in KINDS if KINDS[kind].gguf_type], "gguf q8_0"))
def test_from_single_file(kind: str, tmp_path: Path) -> None:
    known = KINDS[kind]
    model = transformer("sd3")
    model.save_config(tmp_path)
    file = tmp_path / "weights.gguf"
    write_gguf(file, gguf_state(model, known.gguf_type))
    loaded = SD3Transformer2DModel.from_single_file(
        str(file), config=str(tmp_path), quantization_config=known.config(), torch_dtype=torch.bfloat16
    )
    assert_alike(loaded, known.apply(model))


def write_gguf(file: Path, state: dict[str, torch.Tensor]) -> None:
    """A GGUF file with these tensors; what isn't quantized is float32, as GGUF has it."""
    writer = gguf.GGUFWriter(file, "sd3")
    for name, tensor in state.items():
        if isinstance(tensor, GGUFParameter):
            writer.add_tensor(name, plain(tensor).numpy(), raw_dtype=tensor.quant_type)
        else:
            writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
