"""LoRA layers that merge in ways of their own: DoRA, quantized weights, nested methods, by hand, half way."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear

from tests import tiny
from tests.comparing import leftovers
from tests.equality import build_as
from tests.modes import MODES
from tests.operations.families import SD3
from tests.operations.subject import Subject
from tests.quantized import build

PLACED: dict[str, dict[str, Any]] = {
    "streamed": {"mode": "layer"},
    "slots for all blocks": {"mode": "layer", "slots": 8},
    "module-swapped": {"mode": "module"},
}
placements = pytest.mark.parametrize("placement", PLACED)


def twins(placement: str, device: torch.device, dtype: torch.dtype | None = None) -> tuple[Subject, Subject]:
    """A resident subject and an offloaded one."""
    resident, offloaded = Subject(SD3, dtype), Subject(SD3, dtype)
    resident.pipe.to(device)
    offloaded.pipe.enable_omni_offload(**PLACED[placement])
    return resident, offloaded


def lora_layers(subject: Subject) -> list[Any]:
    return [module for module in subject.blocks[0].modules() if isinstance(module, LoraLinear)]


def add_dora(subject: Subject) -> None:
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(SD3.targets), use_dora=True, init_lora_weights=False)
    subject.pipe.transformer.add_adapter(config, adapter_name="style")


@placements
def test_dora_that_is_unmerged_in_a_forward(placement: str, device: torch.device, sim: ModuleType) -> None:
    """PEFT puts other data in the place of the weight, and the next forward reads the slot again."""
    subjects = twins(placement, device)
    outputs: list[list[np.ndarray]] = [[], []]
    for subject, found in zip(subjects, outputs, strict=True):
        add_dora(subject)
        found.append(subject.run())
        subject.fuse(lora_scale=0.7)
        found.append(subject.run())
        subject.pipe.disable_lora()
        found += [subject.run(), subject.run()]
    assert all(map(np.array_equal, *outputs)) and sim.hazards() == []
    resident, offloaded = (subject.pipe.transformer.transformer_blocks for subject in subjects)
    for path, parameter in resident.named_parameters():
        assert torch.equal(parameter.cpu(), offloaded.get_parameter(path)), path


@placements
def test_text_encoders_merge_on_the_device_after_the_dit(placement: str, device: torch.device) -> None:
    """`pipe.fuse_lora` calls the DiT's own, and then merges text encoders layer by layer."""
    outputs = []
    for subject in twins(placement, device, torch.bfloat16):
        subject.load("text")
        subject.fuse(lora_scale=0.7)
        outputs.append([subject.run()])
        subject.unfuse()
        outputs[-1].append(subject.run())
    assert all(map(np.array_equal, *outputs))


@placements
def test_layers_merged_by_hand(placement: str, device: torch.device) -> None:
    resident, offloaded = twins(placement, device, torch.bfloat16)
    for subject in (resident, offloaded):
        subject.load("plain")
    for layer in lora_layers(resident):
        layer.merge()
    with offloaded.pipe.omni_offload.merging():
        for layer in lora_layers(offloaded):
            layer.merge()
    assert np.array_equal(resident.run(), offloaded.run())
    assert not any("merge" in vars(layer) for layer in lora_layers(offloaded))


@placements
def test_a_merge_that_fails_half_way_leaves_every_weight_at_home(placement: str, device: torch.device) -> None:
    _, subject = twins(placement, device)
    subject.load("plain")
    subject.run()
    merge, calls = LoraLinear.merge, []

    def failing(layer: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(layer)
        if len(calls) == 5:
            raise KeyboardInterrupt("injected")
        merge(layer, *args, **kwargs)

    with mock.patch.object(LoraLinear, "merge", failing), pytest.raises(KeyboardInterrupt, match=r"^injected$"):
        subject.fuse()
    layers = [
        module for module in subject.pipe.transformer.transformer_blocks.modules() if isinstance(module, LoraLinear)
    ]
    assert [layer.merged for layer in layers].count(True) == 4
    assert {parameter.device.type for layer in layers for parameter in layer.parameters()} == {"cpu"}
    assert not any("merge" in vars(layer) for layer in layers)
    subject.unfuse()
    subject.run()
    subject.pipe.disable_omni_offload()
    assert leftovers(subject.pipe) == []


@placements
@pytest.mark.parametrize("where", [0, -1])
def test_a_forward_that_fails_after_it_has_unmerged(placement: str, where: int, device: torch.device) -> None:
    outputs = []
    for subject in twins(placement, device):
        subject.load("plain")
        subject.fuse()
        subject.pipe.disable_lora()

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt("injected")

        removable = lora_layers(subject)[where].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt, match=r"^injected$"):
            subject.run()
        removable.remove()
        outputs.append([subject.run()])
        subject.pipe.enable_lora()
        outputs[-1].append(subject.run())
    assert all(map(np.array_equal, *outputs))


@placements
@pytest.mark.parametrize("way", ["the pipeline's", "the layers'"])
def test_a_fused_lora_is_disabled_inside_of_a_scope(placement: str, way: str, device: torch.device) -> None:
    outputs = []
    for subject in twins(placement, device):
        subject.load("plain")
        subject.fuse()
        handle = subject.pipe.omni_offload
        with nullcontext() if handle is None else handle.call():
            found = [subject.run()]
            if way == "the pipeline's":
                subject.pipe.disable_lora()
            else:
                for layer in lora_layers(subject):
                    layer.enable_adapters(False)
            found.append(subject.run())
        outputs.append([*found, subject.run()])
    assert all(map(np.array_equal, *outputs))


@pytest.mark.parametrize("mode", ["layer", "module"])
def test_torchao_weights_that_were_merged(mode: str, device: torch.device, sim: ModuleType) -> None:
    """PEFT makes new weights on the device; at rest they are the host's, and the library can read them there."""
    pipe, call = build("torchao int8", "sd3", 128)
    resident, _ = build("torchao int8", "sd3", 128)
    for each in (resident.to(device), pipe):
        if each is pipe:
            each.enable_omni_offload(**MODES[mode])
        torch.manual_seed(3)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["to_q"], init_lora_weights=False)
        each.transformer.add_adapter(config, adapter_name="style")
        each.transformer.fuse_lora()
    expected = tiny.run(resident, call)
    assert np.array_equal(tiny.run(pipe, call), expected)
    weight = pipe.transformer.transformer_blocks[1].attn.to_q.base_layer.weight
    assert weight.device.type == weight.qdata.device.type == "cpu"
    assert len(pipe.transformer.state_dict()) == len(resident.transformer.state_dict())
    pipe.enable_omni_offload("module" if mode == "layer" else "layer")
    assert np.array_equal(tiny.run(pipe, call), expected) and sim.hazards() == []
    pipe.disable_omni_offload()
    assert np.array_equal(tiny.run(pipe.to(device), call), expected)


@pytest.mark.parametrize("kind", ["torchao int8", "quanto int8"])
@pytest.mark.parametrize("mode", ["layer", "module"])
def test_quantized_weights_that_begin_on_the_device(mode: str, kind: str, device: torch.device) -> None:
    """As those that a loader has put there: at rest they are the host's, and afterwards they can go back."""
    pipe, call = build(kind, "sd3", 128)
    expected = tiny.run(pipe.to(device), call)
    pipe.enable_omni_offload(**MODES[mode])
    assert np.array_equal(tiny.run(pipe, call), expected)
    weight = pipe.transformer.transformer_blocks[1].attn.to_q.weight
    assert weight.device.type == "cpu" and pipe.transformer.state_dict()
    pipe.disable_omni_offload()
    assert {parameter.device.type for parameter in pipe.transformer.parameters()} == {"cpu"}
    assert np.array_equal(tiny.run(pipe.to(device), call), expected)


def test_without_peft_layers_nothing_is_wrapped(device: torch.device) -> None:
    pipe, call = build_as(SD3.build)
    pipe.enable_omni_offload("layer")
    before = tiny.run(pipe, call)
    with pipe.omni_offload.merging():
        assert not any("merge" in vars(module) for module in pipe.transformer.modules())
    assert np.array_equal(tiny.run(pipe, call), before)
