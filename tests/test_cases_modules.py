"""Public cases of components that are found, entered and shared in unusual ways, in every mode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn
from torch.nn import functional

from diffusers_omni_offload import OffloadPlan
from tests.comparing import State, assert_equal, leftovers, resident_output
from tests.modes import MODES, chosen, in_every_mode, in_every_mode_layers_slow
from tests.tiny import ToyDiT, ToyPipeline, build_sd3, build_toy, build_wan, run
from tests.tiny.toy import ToyBlock, ToyOutput, ToyTextEncoder, ToyVAE

Build = Callable[[], tuple[Any, Callable[[], dict[str, Any]]]]


def full_toy() -> tuple[Any, Callable[[], dict[str, Any]]]:
    return build_toy(4, text_encoder=True, vae=True)


def assert_runs(build: Build, device: torch.device, sim: ModuleType, **options: Any) -> tuple[Any, Any]:
    """The offloaded pipeline and its handle, after three calls that were equal to the resident one's."""
    reference = resident_output(build, device)
    pipe, call = build()
    handle = pipe.enable_omni_offload(**options)
    for _ in range(3):
        assert_equal(run(pipe, call), reference)
    assert sim.hazards() == [] and handle.bytes_moved > 0
    return pipe, handle


# ---------------------------------------------------------------------- what is found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "module", "components": ["text_encoder", "image_encoder"]}, r"image_encoder.*no such encoder"),
        ({"components": {"dit": "layer", "text_encodr": "module"}}, "Did you mean 'text_encoder'"),
        ({"components": {"dit": "layer", "vea": "module"}}, "Did you mean 'vae'"),
        ({"components": {"transformr": "module"}}, "Did you mean 'transformer'"),
        ({"components": {"dit": "modul"}}, "Did you mean 'module'"),
        ({"components": {"transformer_2": "module"}}, "transformer_2.*isn't loaded"),
        ({"components": {"dit": "resident", "vae": "resident"}}, "keeps everything resident"),
        ({"mode": "module", "components": []}, "components is empty"),
    ],
)
def test_vllm_omni_2935_a_choice_that_matches_nothing_is_an_error(
    device: torch.device, options: dict[str, Any], words: str
) -> None:
    """A selector that matched no module did nothing, without a line in the log."""
    pipe, _ = full_toy()
    before = State.of(pipe)
    with pytest.raises(ValueError, match=words):
        pipe.enable_omni_offload(**options)
    before.assert_same(State.of(pipe))
    assert pipe.omni_offload is None


def test_vllm_omni_2935_components_without_weights_are_an_error(device: torch.device) -> None:
    """Nothing that could be swapped is in what was chosen."""
    pipe, _ = build_toy(4)
    pipe.vae = nn.Identity()
    with pytest.raises(ValueError, match="ToyPipeline"):
        pipe.enable_omni_offload(components={"vae": "module"})
    assert pipe.omni_offload is None and leftovers(pipe) == []


# ---------------------------------------------------------------------- entered without `forward`


class BareVAE(nn.Module):
    """Somebody else's VAE: no decorator announces `encode` and `decode`, and they use weights of their own, too."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(61)
            self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
            self.codebook = nn.Parameter(torch.randn(8, 8))

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(pixels)) @ self.codebook

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.up(torch.tanh(latents @ self.codebook.T))


class FromPixels(ToyPipeline):
    """Image to image: what it denoises is encoded before, and decoded after."""

    def __call__(self, *args: Any, **kwargs: Any) -> ToyOutput:
        pixels = torch.linspace(-1, 1, 32).reshape(1, 4, 8).to(self._execution_device)
        with torch.no_grad():
            return super().__call__(*args, x=self.vae.encode(pixels), **kwargs)


@pytest.mark.parametrize("options", [*MODES.values(), {"components": {"dit": "module", "vae": "module"}}])
def test_diffusers_2285_a_vae_without_a_decorator(
    device: torch.device, sim: ModuleType, options: dict[str, Any]
) -> None:
    """Hooks on `forward` never fired for `encode` and `decode`."""

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = build_toy(4, text_encoder=True)
        return FromPixels(pipe.transformer, text_encoder=pipe.text_encoder, vae=BareVAE().eval()), call

    pipe, handle = assert_runs(build, device, sim, **options)
    assert ("vae" in handle.plan.swapped) == (options.get("components", {}).get("vae") == "module")
    assert pipe.vae.codebook.device.type == ("cpu" if "vae" in handle.plan.swapped else "sim")


def tiled_sd3() -> tuple[Any, Callable[[], dict[str, Any]]]:
    pipe, call = build_sd3(t5=False)
    pipe.vae.enable_tiling()
    pipe.vae.enable_slicing()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 16, 8
    return pipe, lambda: {**call(), "height": 32, "width": 32, "num_images_per_prompt": 2}


def tiled_wan() -> tuple[Any, Callable[[], dict[str, Any]]]:
    pipe, call = build_wan(two_stage=False)
    pipe.vae.enable_tiling(16, 16, 8, 8)
    return pipe, lambda: {**call(), "height": 32, "width": 32}


@in_every_mode_layers_slow
@pytest.mark.parametrize("build", [tiled_sd3, pytest.param(tiled_wan, marks=pytest.mark.slow)])
def test_diffusers_12096_a_vae_in_tiles_and_slices(
    device: torch.device, sim: ModuleType, mode: str, build: Build
) -> None:
    """Tiles call encoder and decoder from outside of what was hooked."""
    reference = resident_output(build, device)
    pipe, call = build()
    handle = pipe.enable_omni_offload(**MODES[mode])
    tiles: list[str] = []
    pipe.vae.decoder.register_forward_hook(lambda *_: tiles.append(pipe.vae.decoder.conv_in.weight.device.type))
    assert_equal(run(pipe, call), reference)
    assert len(tiles) > 4 and set(tiles) == {"sim"}
    if mode == "mixed":
        encoders = len([path for path in handle.plan.swapped if "text_encoder" in path])
        assert handle.swaps == encoders + 1, "the VAE comes once, not once a tile"


class InnerEncoder(ModelMixin, ConfigMixin):
    """A component of which only parts are ever called."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.projection = ToyTextEncoder(), ToyBlock(8, 16, seed=3)

    def forward(self, *args: Any) -> None:
        raise AssertionError("this pipeline calls the parts")


class CallsParts(ToyPipeline):
    """As MusicLDM, Shap-E and UniDiffuser do."""

    @torch.no_grad()
    def __call__(self, steps: int = 2, **arguments: Any) -> ToyOutput:
        tokens = torch.arange(4)[None].to(self._execution_device)
        latents = self.text_encoder.projection(self.text_encoder.inner(tokens))
        for _ in range(steps):
            latents = latents + 0.5 * self.transformer(latents)
        return ToyOutput(images=self.vae.decode(latents))


@in_every_mode
def test_diffusers_4514_only_parts_of_a_component_are_called(device: torch.device, sim: ModuleType, mode: str) -> None:
    """The hook on the component never fired, and the part that was called lay on the host."""

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = full_toy()
        return CallsParts(pipe.transformer, text_encoder=InnerEncoder().eval(), vae=pipe.vae), call

    reference = resident_output(build, device)
    pipe, call = build()
    handle = pipe.enable_omni_offload(**MODES[mode])
    loaded: list[bool] = []
    if mode != "layer":
        stage = handle.backend.stages.at("text_encoder")
        tensors = list(pipe.text_encoder.parameters())
        pipe.text_encoder.inner.embed.register_forward_hook(
            lambda *_: loaded.append(stage.is_loaded and {tensor.device.type for tensor in tensors} == {"sim"})
        )
    for index in range(3):
        assert_equal(run(pipe, call), reference)
        if mode != "layer":
            assert loaded == [True] * (index + 1), "all of the component is there, whatever part is called"
            assert handle.swaps == 2 * (index + 1)


class TwoEncoders(ToyPipeline):
    """With an image encoder whose pooling head reads the weights of a child that it never calls."""

    _encoder_modules = ["text_encoder", "image_encoder"]
    _offload_plan = OffloadPlan(
        block_attrs={"transformer": ("blocks",)},
        encoder_block_attrs={"text_encoder": ("layers",), "image_encoder": ("encoder.layers",)},
        encoder_component_types={"text_encoder": "text_encoder", "image_encoder": "image_encoder"},
    )

    def __init__(
        self, image_encoder: Any, transformer: Any, text_encoder: Any, vae: Any, transformer_2: Any = None
    ) -> None:
        super().__init__(transformer, transformer_2, text_encoder, vae)
        self.register_modules(image_encoder=image_encoder)

    def __call__(self, *args: Any, **kwargs: Any) -> ToyOutput:
        pixels = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32).to(self._execution_device)
        with torch.no_grad():
            pooled = self.image_encoder(pixels).pooler_output
            return super().__call__(*args, x=pooled[:, :32].reshape(1, 4, 8), **kwargs)


def with_siglip() -> tuple[Any, Callable[[], dict[str, Any]]]:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(62)
        sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
        encoder = SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=32, patch_size=16)).eval()
    pipe, call = full_toy()
    return TwoEncoders(encoder, pipe.transformer, pipe.text_encoder, pipe.vae), call


@pytest.mark.parametrize(
    "options",
    [
        *MODES.values(),
        {"components": ["dit", "text_encoder", "image_encoder"]},
        {"components": {"dit": "layer", "image_encoder": "module"}},
        {"components": {"dit": "module", "image_encoder": "layer"}},
    ],
)
def test_diffusers_11428_a_pooling_head_reads_its_childs_weights(
    device: torch.device, sim: ModuleType, options: dict[str, Any]
) -> None:
    """torch's MultiheadAttention uses `out_proj.weight` and never calls `out_proj`."""
    assert_runs(with_siglip, device, sim, **options)


class FunctionalBlock(ToyBlock):
    """Uses its children's weights and never calls them."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shifted = hidden_states + self.shift
        hidden = torch.tanh(functional.linear(shifted, self.expand.weight, self.expand.bias)) * self.scale
        return torch.tanh(hidden_states + functional.linear(hidden, self.contract.weight) * self.gate)


@in_every_mode
def test_transformers_46978_weights_of_children_that_are_never_called(
    device: torch.device, sim: ModuleType, mode: str
) -> None:
    """Offloaded weights that a parent used stayed where they were, and results were wrong in silence."""

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = full_toy()
        for block in [*pipe.transformer.blocks, *pipe.text_encoder.layers]:
            block.__class__ = FunctionalBlock
        return pipe, call

    pipe, handle = assert_runs(build, device, sim, **MODES[mode])
    weights = [pipe.transformer.blocks[0].expand.weight]
    weights += [pipe.text_encoder.layers[0].expand.weight] if mode != "layer" else []
    for weight in weights:
        with handle.call(), torch.no_grad(), pytest.raises(RuntimeError):
            functional.linear(torch.ones(1, weight.shape[1], device=device), weight)


# ---------------------------------------------------------------------- lifecycle


@in_every_mode
def test_qwen_image_236_two_threads(device: torch.device, sim: ModuleType, mode: str) -> None:
    """Two threads called one pipeline, and each other's components: black images, and errors."""
    inputs = [torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    references = [resident_output(lambda x=x: (full_toy()[0], lambda: {"x": x}), device) for x in inputs]
    pipe, _ = full_toy()
    pipe.enable_omni_offload(**MODES[mode])
    barrier, running, together = threading.Barrier(2), [0], []

    def count(change: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            running[0] += change
            together.append(running[0])

        return hook

    for part in (pipe.transformer.blocks[0].expand, pipe.text_encoder.embed, pipe.vae.decoder):
        part.register_forward_pre_hook(count(1))
        part.register_forward_hook(count(-1))
    results: dict[int, list[Any]] = {0: [], 1: []}

    def work(which: int) -> None:
        barrier.wait()
        for _ in range(3):
            results[which].append(run(pipe, lambda: {"x": inputs[which]}))

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert max(together) == 1
    for which, reference in enumerate(references):
        assert len(results[which]) == 3
        for result in results[which]:
            assert_equal(result, reference)


@pytest.mark.parametrize("mode", ["module", "mixed"])
def test_diffusers_7891_a_pipeline_that_shares_some_components(
    device: torch.device, sim: ModuleType, mode: str
) -> None:
    """The encoder and the VAE belong to two pipelines, the DiTs to one each: the second is refused, and both stay."""
    reference = resident_output(full_toy, device)
    first, call = full_toy()
    first.enable_omni_offload(**MODES[mode])
    second = ToyPipeline(ToyDiT(4, seed=9).eval(), text_encoder=first.text_encoder, vae=first.vae)
    before = State.of(second)
    with pytest.raises(ValueError, match=r"text_encoder.*another pipeline.*disable_omni_offload\(\)"):
        second.enable_omni_offload(**MODES[mode])
    before.assert_same(State.of(second))
    assert second.omni_offload is None
    assert_equal(run(first, call), reference)
    first.disable_omni_offload()
    second.enable_omni_offload(**MODES[mode])
    assert run(second, call).size
    second.disable_omni_offload()
    first.enable_omni_offload(**MODES[mode])
    assert_equal(run(first, call), reference)


@in_every_mode
@pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae"])
@pytest.mark.parametrize("replacement", ["another", "none"])
def test_diffusers_5281_a_component_is_replaced_or_taken_away(
    device: torch.device, mode: str, component: str, replacement: str
) -> None:
    """It ran but wasn't offloaded: what was offloaded asks for enabling again, what was resident is taken in."""
    makes: dict[str, Callable[[], nn.Module]] = {
        "transformer": lambda: ToyDiT(4, seed=5).eval(),
        "text_encoder": lambda: ToyTextEncoder(seed=77).eval(),
        "vae": lambda: ToyVAE(seed=78).eval(),
    }

    def build() -> tuple[Any, Callable[[], dict[str, Any]]]:
        pipe, call = full_toy()
        setattr(pipe, component, makes[component]() if replacement == "another" else None)
        return pipe, call

    pipe, call = full_toy()
    pipe.enable_omni_offload(**MODES[mode])
    assert run(pipe, call).size
    old, new = getattr(pipe, component), makes[component]() if replacement == "another" else None
    setattr(pipe, component, new)
    kind = "dit" if component == "transformer" else component
    if chosen(mode, kind) != "resident":
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"{component}.*(replaced|removed).*enable_omni_offload\(\) again"):
                run(pipe, call)
        if new is None and component == "transformer":
            pipe.disable_omni_offload()
            return
        pipe.disable_omni_offload()
        pipe.enable_omni_offload(**(MODES[mode] if new is not None else {"mode": "layer"}))
    assert_equal(run(pipe, call), resident_output(build, device))
    assert not {"_hf_hook", "_diffusers_hook", "forward", "_apply"} & vars(old).keys()
    assert {tensor.device.type for tensor in [*old.parameters(), *old.buffers()]} == {"cpu"}
    pipe.disable_omni_offload()
    assert leftovers(pipe) == []
