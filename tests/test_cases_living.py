"""Public cases of weights that are used, changed and merged between calls: by hand, by LoRA, by textual inversion."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from tests.comparing import State, assert_equal, leftovers, resident_output
from tests.equality import assert_equal_outputs, assert_no_hazards, build_as, build_resident
from tests.living import fast_ones, sd3, with_arguments
from tests.modes import MODES, in_every_mode
from tests.operations.families import FLUX2, SD3, WAN, Family
from tests.operations.placements import misplaced
from tests.operations.subject import Subject
from tests.test_living_textual_inversion import forget, learn
from tests.zoo import PIPELINES

Step = Callable[[Subject], None]
mostly_slow = pytest.mark.parametrize("mode", fast_ones(MODES, "mixed"))


def twins(family: Family, steps: list[Step], device: torch.device, **options: Any) -> tuple[Subject, list[np.ndarray]]:
    """A resident and an offloaded pipeline that the same is done to, with a call after each step.

    Returns:
        the offloaded one and the outputs, which are those of the resident one.
    """
    outputs: list[list[np.ndarray]] = []
    for offloaded in (False, True):
        subject = Subject(family)
        if offloaded:
            subject.pipe.enable_omni_offload(**options)
        else:
            subject.pipe.to(device)
        found = [subject.run()]
        for step in steps:
            step(subject)
            found.append(subject.run())
        outputs.append(found)
    assert_equal_outputs(outputs[1], outputs[0], f"{family.name}, {options}")
    return subject, outputs[0]


# ---------------------------------------------------------------------- used by hand


@mostly_slow
def test_compel_121_text_encoders_that_others_call(device: torch.device, sim: ModuleType, mode: str) -> None:
    """Prompt weighting calls the text encoder itself, before, between and after calls, with ids on the host."""
    resident, call = build_resident(sd3, device)
    expected = tiny.run(resident, call)
    prompts = {"prompt": "a cat", "prompt_2": "a cat", "prompt_3": "a cat"}
    ids = torch.arange(1, 78)[None] % 500
    hidden = {
        "hidden_states": torch.ones(1, 4, 8, 8),
        "timestep": torch.tensor([3.0]),
        "encoder_hidden_states": torch.ones(1, 5, resident.transformer.config.joint_attention_dim),
        "pooled_projections": torch.ones(1, resident.transformer.config.pooled_projection_dim),
    }
    hidden["hidden_states"] = torch.ones(1, resident.transformer.config.in_channels, 8, 8)

    def by_hand(pipe: Any) -> list[torch.Tensor]:
        # A resident component doesn't move its inputs.
        moved = {name: value.to(device) for name, value in hidden.items()} if pipe is resident else hidden
        tokens = ids.to(device) if pipe is resident else ids
        with torch.no_grad():
            encoded = [tensor for tensor in pipe.encode_prompt(**prompts) if tensor is not None]
            text = pipe.text_encoder(tokens, output_hidden_states=True).hidden_states[-2]
            return [*encoded, text, pipe.transformer(**moved, return_dict=False)[0]]

    wanted = by_hand(resident)
    pipe, _ = build_as(sd3)
    pipe.enable_omni_offload(**MODES[mode])
    for _ in range(2):
        found = by_hand(pipe)
        assert all(tensor.device.type == "sim" for tensor in found)
        assert all(torch.equal(mine, reference) for mine, reference in zip(found, wanted, strict=True))
        assert_equal(tiny.run(pipe, call), expected)
    assert_no_hazards(sim, mode)


class DecodesOnly:
    """A thin stand-in for a VAE that shows what a pipeline needs of it to decode."""

    def __init__(self, vae: Any) -> None:
        self.config, self.dtype, self.decode = vae.config, vae.dtype, vae.decode


@mostly_slow
def test_vllm_omni_7241_a_proxy_of_a_part_of_a_component(device: torch.device, sim: ModuleType, mode: str) -> None:
    """It lost the hook of what it stood for."""
    resident, call = build_resident(sd3, device)
    expected = tiny.run(resident, call)
    pipe, _ = build_as(sd3)
    handle = pipe.enable_omni_offload(**MODES[mode])
    assert_equal(tiny.run(pipe, call), expected)
    vae = pipe.vae
    latents = torch.ones(1, vae.config.latent_channels, 4, 4, device=device)
    with torch.no_grad():
        wanted = resident.vae.decode(latents).sample
        assert torch.equal(DecodesOnly(vae).decode(latents).sample, wanted), "beside the pipeline it is right"
        pipe.vae = DecodesOnly(vae)
        if "vae" in handle.plan.swapped:
            with pytest.raises(RuntimeError, match=r"vae is offloaded and was (replaced|removed)"):
                tiny.run(pipe, call)
        else:
            assert_equal(tiny.run(pipe, call), expected)
        pipe.vae = vae
    assert_equal(tiny.run(pipe, call), expected)
    assert_no_hazards(sim, mode)


# ---------------------------------------------------------------------- LoRA

ADAPTERS: list[Step] = [
    lambda subject: subject.load("plain"),
    lambda subject: subject.load("larger", "detail"),
    lambda subject: subject.pipe.set_adapters(["style", "detail"], [0.7, 0.4]),
    lambda subject: subject.pipe.set_adapters("style"),
    lambda subject: subject.pipe.delete_adapters("detail"),
    lambda subject: subject.pipe.disable_lora(),
    lambda subject: subject.pipe.enable_lora(),
    lambda subject: subject.pipe.unload_lora_weights(),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", [FLUX2, WAN], ids=lambda family: family.name)
@in_every_mode
def test_diffusers_11791_adapters_that_come_and_go(
    device: torch.device, sim: ModuleType, mode: str, family: Family
) -> None:
    """Weights of an adapter stayed on the host, those of Wan's second transformer as well."""
    subject, outputs = twins(family, ADAPTERS, device, **MODES[mode])
    assert np.array_equal(outputs[-1], outputs[0]) and not np.array_equal(outputs[1], outputs[0])
    assert misplaced(subject.pipe, device) == []
    assert_no_hazards(sim, mode)


@mostly_slow
def test_diffusers_11791_an_adapter_that_was_there_first(device: torch.device, sim: ModuleType, mode: str) -> None:
    resident, subject = Subject(WAN), Subject(WAN)
    for each in (resident, subject):
        each.load("plain")
    resident.pipe.to(device)
    subject.pipe.enable_omni_offload(**MODES[mode])
    for step in (lambda each: None, *ADAPTERS[1:]):
        step(resident)
        step(subject)
        assert_equal(subject.run(), resident.run())
    assert misplaced(subject.pipe, device) == []
    assert_no_hazards(sim, mode)


@mostly_slow
def test_sglang_16737_merging_into_offloaded_weights(device: torch.device, sim: ModuleType, mode: str) -> None:
    """Merging read placeholders, or loaded everything to merge."""
    sim.configure(alloc_round=1)
    subject = Subject(FLUX2)
    transformer = subject.pipe.transformer
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    subject.pipe.enable_omni_offload(**MODES[mode])
    plain = subject.run()
    before = State.of(subject.pipe).values
    subject.load("plain")
    added = subject.run()
    block = max(sum(leaf.nbytes for leaf in block.parameters()) for block in blocks)
    tuned = [module for block in blocks for module in block.modules() if hasattr(module, "lora_A")]
    layer = max(sum(leaf.nbytes for leaf in module.parameters()) for module in tuned)
    held = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    subject.fuse()
    # One layer at a time is there, and PEFT holds what it adds to it twice: before and after it is scaled.
    assert torch.accelerator.max_memory_allocated() - held <= max(block, 3 * layer)
    fused = [subject.run(), subject.run()]
    resident = Subject(FLUX2)
    resident.pipe.to(device)
    resident.load("plain")
    resident.fuse()
    assert_equal_outputs(fused, [resident.run()] * 2, mode)
    assert not np.array_equal(fused[0], plain) and np.allclose(fused[0], added, atol=1e-3)
    for each in (resident, subject):
        each.unfuse()
        each.pipe.unload_lora_weights()
    # PEFT adds and subtracts in place, which leaves a last digit with offload or without; the same one.
    after, wanted = State.of(subject.pipe).values, State.of(resident.pipe).values
    assert before.keys() == after.keys() == wanted.keys()
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)
    assert all(torch.allclose(after[name], before[name], atol=1e-6) for name in wanted)
    assert_equal(subject.run(), resident.run())


TOGGLES: list[Step] = [
    lambda subject: subject.load("plain"),
    lambda subject: subject.fuse(),
    lambda subject: None,
    lambda subject: None,
    lambda subject: subject.unfuse(),
    lambda subject: subject.fuse(lora_scale=0.5),
    lambda subject: subject.unfuse(),
    lambda subject: subject.pipe.unload_lora_weights(),
]


@pytest.mark.parametrize("residents", fast_ones((0, 1, 3), 1))
def test_comfyui_4282_a_merged_adapter_and_partial_residency(
    device: torch.device, sim: ModuleType, residents: int
) -> None:
    """It was applied to what was resident alone, or twice in the second run."""
    options = {"layer_options": {"dit": {"resident_layers": residents}}}
    _, outputs = twins(SD3, TOGGLES, device, mode="layer", **options)
    assert np.array_equal(outputs[2], outputs[3]) and np.array_equal(outputs[3], outputs[4])
    # In float32 unmerging leaves a last digit, with offload or without.
    assert np.allclose(outputs[0], outputs[-1], atol=1e-5) and not np.allclose(outputs[2], outputs[0], atol=1e-3)
    assert_no_hazards(sim, f"{residents} residents")


@mostly_slow
def test_diffusers_9453_a_hotswapped_adapter(device: torch.device, sim: ModuleType, mode: str) -> None:
    """In place, so that nothing tells that the weights changed."""
    steps: list[Step] = [
        lambda subject: subject.load("plain"),
        lambda subject: subject.load("same", "style", hotswap=True),
        lambda subject: subject.load("plain", "style", hotswap=True),
    ]
    _, outputs = twins(SD3, steps, device, **MODES[mode])
    assert not np.array_equal(outputs[1], outputs[2]) and np.array_equal(outputs[1], outputs[3])
    assert_no_hazards(sim, mode)


# ---------------------------------------------------------------------- textual inversion


@pytest.mark.parametrize("place", [MODES["module"], {"mode": "layer", "components": ["dit", "text_encoder"]}])
def test_diffusers_3922_words_that_are_learned_while_offloaded(
    device: torch.device, sim: ModuleType, place: dict[str, Any]
) -> None:
    """The embeddings were made larger where they were placeholders; the same as learning them first."""

    def taught() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = PIPELINES["StableDiffusionPipeline"]()
        learn(pipe, ["<one>"], 5)
        return pipe, with_arguments(call, prompt="a <one>")

    reference = resident_output(taught, device)
    pipe, call = PIPELINES["StableDiffusionPipeline"]()
    call = with_arguments(call, prompt="a <one>")
    pipe.enable_omni_offload(**place)
    plain = tiny.run(pipe, call)
    rows = len(pipe.text_encoder.get_input_embeddings().weight)
    learn(pipe, ["<one>"], 5)
    assert len(pipe.text_encoder.get_input_embeddings().weight) == rows + 1
    assert_equal(tiny.run(pipe, call), reference)
    assert not np.array_equal(plain, reference)
    forget(pipe)
    assert_equal(tiny.run(pipe, call), plain)
    pipe.disable_omni_offload()
    assert leftovers(pipe) == [] and sim.hazards() == []
