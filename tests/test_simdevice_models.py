"""The simulated device runs stock diffusers and transformers with the CPU's numbers, and sees when their waits go."""

from __future__ import annotations

import contextlib
import copy

import diffusers.hooks.group_offloading as group_offloading
import pytest
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    MistralConfig,
    MistralModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5EncoderModel,
)

ON_STREAMS = dict(offload_type="block_level", num_blocks_per_group=1, use_stream=True)


@pytest.fixture(scope="module")
def components():
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=4,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return dict(transformer=transformer.eval(), vae=vae.eval())


@pytest.fixture(scope="module")
def inputs():
    torch.manual_seed(1)
    return dict(
        hidden_states=torch.randn(1, 16, 2, 8, 8),
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=torch.randn(1, 8, 32),
        return_dict=False,
    )


def forward(transformer, inputs, device="cpu", passes=1):
    moved = {key: value.to(device) if torch.is_tensor(value) else value for key, value in inputs.items()}
    with torch.no_grad():
        for _ in range(passes):
            output = transformer(**moved)[0]
    return output.cpu()


# Whole pipelines

PLACEMENTS = {
    "resident": lambda pipe, device: pipe.to(device),
    "model offload": lambda pipe, device: pipe.enable_model_cpu_offload(),
    "sequential offload": lambda pipe, device: pipe.enable_sequential_cpu_offload(),
    "group offload": lambda pipe, device: pipe.enable_group_offload(
        onload_device=device, offload_type="block_level", num_blocks_per_group=1
    ),
    "group offload, streams": lambda pipe, device: pipe.enable_group_offload(onload_device=device, **ON_STREAMS),
    "group offload, record_stream": lambda pipe, device: pipe.enable_group_offload(
        onload_device=device, record_stream=True, **ON_STREAMS
    ),
}


@pytest.fixture(scope="module")
def expected_frames(components):
    return generate(make_pipeline(components), "cpu")


def make_pipeline(components):
    parts = {name: copy.deepcopy(component) for name, component in components.items()}
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    pipe = WanPipeline(tokenizer=None, text_encoder=None, scheduler=scheduler, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe, device):
    generator = torch.Generator().manual_seed(0)
    embeds, negative = torch.randn(2, 1, 8, 32, generator=generator).to(device)
    return pipe(
        prompt_embeds=embeds,
        negative_prompt_embeds=negative,
        height=16,
        width=16,
        num_frames=5,
        num_inference_steps=2,
        generator=generator,
        output_type="pt",
    ).frames.cpu()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pipelines_equal_the_cpu(device, components, expected_frames, placement):
    pipe = make_pipeline(components)
    PLACEMENTS[placement](pipe, device)
    assert torch.equal(generate(pipe, device), expected_frames)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_equals_the_cpu(device, components, inputs, dtype):
    transformer = copy.deepcopy(components["transformer"]).to(dtype)
    halves = {key: value.to(dtype) if torch.is_tensor(value) else value for key, value in inputs.items()}
    expected = forward(transformer, halves)
    assert torch.equal(forward(transformer.to(device), halves, device), expected)


def test_a_model_too_large_for_the_device_runs_out_of_memory(device, sim, components, inputs):
    transformer = copy.deepcopy(components["transformer"])
    weights = sum(p.numel() * p.element_size() for p in transformer.parameters())
    used = torch.accelerator.memory_stats()["active_bytes.all.current"]
    sim.configure(capacity_bytes=used + weights // 2)
    with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
        transformer.to(device)


# Text models; Mistral and Qwen2 group their heads

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
TEXT_MODELS = {
    "CLIP": lambda: CLIPTextModel(CLIPTextConfig(**SIZES)),
    "T5": lambda: T5EncoderModel(T5Config(d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, vocab_size=100)),
    "Mistral": lambda: MistralModel(MistralConfig(num_key_value_heads=2, **SIZES)),
    "Qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=1, **SIZES)),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_text_models_equal_the_cpu(device, name, padded):
    torch.manual_seed(0)
    model = TEXT_MODELS[name]().eval()
    ids, mask = torch.randint(0, 99, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    if padded:
        mask[1, 7:] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask)[0]
        result = model.to(device)(ids.to(device), attention_mask=mask.to(device))[0]
    assert torch.equal(result.cpu(), expected)


def test_from_pretrained_straight_to_the_device(device, tmp_path):
    torch.manual_seed(0)
    model = TEXT_MODELS["Mistral"]()
    model.save_pretrained(tmp_path)
    loaded = MistralModel.from_pretrained(tmp_path, device_map="sim")
    assert {p.device.type for p in loaded.parameters()} == {"sim"}
    for p, q in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.cpu(), q)


# Breaking diffusers' own waits. Some of these leave the values right: only the race checker sees them.


@contextlib.contextmanager
def without_waiting_for_the_copy_stream(monkeypatch):
    def onload(group):
        with torch.sim.stream(group.stream), group._pinned_memory_tensors() as pinned:
            group._process_tensors_from_modules(pinned, default_stream=torch.sim.default_stream())

    monkeypatch.setattr(group_offloading.ModuleGroup, "_onload_from_memory", onload)
    yield


@contextlib.contextmanager
def without_waiting_before_the_free(monkeypatch):
    offload = group_offloading.ModuleGroup._offload_to_memory

    def offload_at_once(group):
        recorded, group.record_stream = group.record_stream, True
        try:
            offload(group)
        finally:
            group.record_stream = recorded

    monkeypatch.setattr(group_offloading.ModuleGroup, "_offload_to_memory", offload_at_once)
    yield


@contextlib.contextmanager
def without_recording(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    yield


def run_group_offload(components, inputs, device, mutant=None, **options):
    transformer = copy.deepcopy(components["transformer"])
    group_offloading.apply_group_offloading(transformer, onload_device=device, **ON_STREAMS, **options)
    with mutant or contextlib.nullcontext():
        return forward(transformer, inputs, device, passes=2)


@pytest.mark.parametrize("record_stream", [False, True])
def test_group_offload_as_it_is_has_no_hazards(device, sim, components, inputs, record_stream):
    sim.configure(race=1)
    output = run_group_offload(components, inputs, device, record_stream=record_stream)
    assert torch.equal(output, forward(components["transformer"], inputs)) and sim.hazards() == []


@pytest.mark.expects_hazards
@pytest.mark.parametrize(
    ("mutate", "record_stream", "kind"),
    [
        (without_waiting_for_the_copy_stream, False, " reads bytes "),
        (without_waiting_before_the_free, False, "were freed while stream"),
        (without_recording, True, "were freed while stream"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_missing_wait_in_group_offload_is_seen(
    device, sim, components, inputs, monkeypatch, mutate, record_stream, kind
):
    sim.configure(race=1)
    run_group_offload(components, inputs, device, mutate(monkeypatch), record_stream=record_stream)
    assert any(kind in hazard for hazard in sim.hazards())
