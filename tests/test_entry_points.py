"""Ways into a swapped component besides its forward: methods, parts that are called directly, lifecycles of its own."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.configuration_utils import register_to_config
from torch import nn
from torch.nn import functional

from diffusers_omni_offload import OffloadPlan, disable_omni_offload, enable_omni_offload
from diffusers_omni_offload.streaming.stages import PackedStage, Stages
from diffusers_omni_offload.streaming.streamer import Streamer
from diffusers_omni_offload.weights.packed import PackedMaster
from tests import tiny
from tests.comparing import State, leftovers
from tests.equality import Call, assert_equal_outputs, assert_no_hazards, outputs
from tests.occupancy import Occupancy
from tests.swapped import AtRest
from tests.tiny import text_encoders, vaes
from tests.tiny.standins.parts import PlainVAE
from tests.tiny.toy import ToyDiT, ToyTextEncoder, ToyVAE, build_toy

# ---------------------------------------------------------------------- every way in


@dataclass(frozen=True)
class Way:
    """A way into a component.

    Attributes:
        build: makes the pipeline.
        path: of the component, which is swapped.
        enter: uses it, with inputs that lie on a device.
        declared: entry points that the plan names.
        loads: how often it comes, outside of a call.
    """

    build: Callable[[], tuple[Any, Call]]
    path: str
    enter: Callable[[Any, torch.device], Any]
    declared: tuple[str, ...] = ()
    loads: int = 1


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def ids(length: int = 6) -> torch.Tensor:
    return torch.arange(1, length + 1)[None]


def toy_with(**components: Callable[[], Any]) -> Callable[[], tuple[Any, Call]]:
    """Builds the toy pipeline with some of its components replaced."""

    def build() -> tuple[Any, Call]:
        pipe, call = build_toy(3, text_encoder=True, vae=True)
        for name, make in components.items():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(11)
                pipe.register_modules(**{name: make().eval()})
        return pipe, call

    return build


def quantized_vae() -> Any:
    return vaes.kl_vae(4, quant=True)


def tiled_vae() -> Any:
    vae = quantized_vae()
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 16, 8
    return vae


def sliced_vae() -> Any:
    vae = tiled_vae()
    vae.enable_slicing()
    return vae


def tiled_wan_vae() -> Any:
    vae = vaes.wan_vae()
    vae.enable_tiling(16, 16, 8, 8)
    return vae


def clip_text_model() -> Any:
    return text_encoders.clip_text(True)


def clip_model() -> Any:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    return CLIPModel(CLIPConfig(text_config={**sizes, "vocab_size": 64}, vision_config=vision, projection_dim=8))


def siglip_model() -> Any:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    return SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=32, patch_size=16))


class Functional(ToyTextEncoder):
    """Methods that use weights without calling any module: nothing announces them."""

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        return functional.linear(pixels, self.layers[0].expand.weight).mean(dim=-1)

    def similarity(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.embed.weight) @ self.embed.weight.T

    def through_methods(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.similarity(tokens).sum(dim=-1) + self.encode_image(self(tokens))


class Head(nn.Module):
    """A part with a method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def sample(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight


class WithParts(ToyTextEncoder):
    """Parts in every kind of container."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.several = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Sequential(nn.Linear(8, 8), nn.Tanh())})
        self.nested = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)])])


def _vae(
    use: Callable[[Any, torch.Tensor], torch.Tensor], *shape: int, make: Any = quantized_vae, **options: Any
) -> Way:
    """A way into a VAE."""
    return Way(toy_with(vae=make), "vae", lambda vae, device: use(vae, noise(*shape).to(device)), **options)


def _encoder(
    use: Callable[[Any, torch.Tensor], Any], *shape: int, make: Any = ToyTextEncoder, declared: Any = (), **options: Any
) -> Way:
    """A way into an encoder, with token ids or, if a shape is given, with numbers."""

    def enter(encoder: Any, device: torch.device) -> Any:
        return use(encoder, (noise(*shape) if shape else ids()).to(device))

    return Way(toy_with(text_encoder=make), "text_encoder", enter, declared=declared, **options)


def _unet(use: Callable[[Any, torch.Tensor], torch.Tensor], *shape: int) -> Way:
    return Way(tiny.build_sdxl, "unet", lambda unet, device: use(unet, noise(*shape).to(device)))


WAYS: dict[str, Way] = {
    "forward of an encoder": _encoder(lambda e, x: e(x)),
    "forward of a DiT": Way(toy_with(), "transformer", lambda t, device: t(noise(1, 4, 8).to(device))),
    "a keyword": _encoder(lambda e, x: e(input_ids=x).last_hidden_state, make=text_encoders.t5_encoder),
    "vae.decode": _vae(lambda v, x: v.decode(x).sample, 1, 4, 8, 8),
    "vae.encode": _vae(lambda v, x: v.encode(x).latent_dist.mean, 1, 3, 16, 16),
    "vae.decode in tiles": _vae(lambda v, x: v.decode(x).sample, 1, 4, 20, 20, make=tiled_vae),
    "vae.encode in tiles": _vae(lambda v, x: v.encode(x).latent_dist.mean, 1, 3, 40, 40, make=tiled_vae),
    "vae.decode in slices and tiles": _vae(lambda v, x: v.decode(x).sample, 2, 4, 20, 20, make=sliced_vae),
    "vae.decode of a video in tiles": _vae(lambda v, x: v.decode(x).sample, 1, 16, 1, 4, 4, make=tiled_wan_vae),
    "vae.tiled_decode": _vae(lambda v, x: v.tiled_decode(x).sample, 1, 4, 20, 20, make=tiled_vae),
    "forward of a VAE": _vae(lambda v, x: v(x).sample, 1, 3, 16, 16, make=tiled_vae),
    "vae.post_quant_conv": _vae(lambda v, x: v.post_quant_conv(x), 1, 4, 8, 8),
    "vae.post_quant_conv and vae.decoder": _vae(lambda v, x: v.decoder(v.post_quant_conv(x)), 1, 4, 8, 8, loads=2),
    "decode by its class": _vae(lambda v, x: type(v).decode(v, x.to(v.device)).sample, 1, 4, 8, 8, loads=2),
    "a VAE that announces nothing": _vae(lambda v, x: v.decode(x).sample, 1, 4, 8, 8, make=lambda: PlainVAE(4)),
    "generate": _encoder(
        lambda e, x: e.generate(input_ids=x.to(e.device), max_new_tokens=5, do_sample=False),
        make=lambda: text_encoders.qwen25_vl(32),
    ),
    "get_image_features": _encoder(lambda e, x: e.get_image_features(x).pooler_output, 1, 3, 32, 32, make=clip_model),
    "get_text_features": _encoder(lambda e, x: e.get_text_features(x).pooler_output, make=clip_model),
    "a pooling head with attention": _encoder(lambda e, x: e(x).pooler_output, 1, 3, 32, 32, make=siglip_model),
    "get_input_embeddings": _encoder(lambda e, x: e.get_input_embeddings()(x), make=text_encoders.t5_encoder),
    "text_model": _encoder(lambda e, x: e.text_model(x).last_hidden_state, make=clip_text_model),
    "text_model.final_layer_norm": _encoder(
        lambda e, x: e.text_model.final_layer_norm(x), 1, 6, 32, make=clip_text_model
    ),
    "an element of a list": _encoder(lambda e, x: e.layers[1](x), 1, 6, 8),
    "an element of a list in a list": _encoder(lambda e, x: e.nested[0][0](x), 1, 6, 8, make=WithParts),
    "entries of a dict": _encoder(lambda e, x: e.several["b"](e.several["a"](x)), 1, 6, 8, make=WithParts, loads=2),
    "encode_image": _encoder(lambda e, x: e.encode_image(x), 1, 4, 8, make=Functional),
    "a declared method": _encoder(lambda e, x: e.similarity(x), make=Functional, declared=("similarity",)),
    "a declared method that calls others": _encoder(
        lambda e, x: e.through_methods(x), make=Functional, declared=("through_methods", "similarity")
    ),
    "a declared method of a part": _encoder(
        lambda e, x: e.head.sample(x), 1, 6, 8, make=WithParts, declared=("head.sample",)
    ),
    "a declared forward of a part": _encoder(
        lambda e, x: e.several["a"].forward(x), 1, 6, 8, make=WithParts, declared=("several.a.forward",)
    ),
    "unet.add_embedding": _unet(lambda u, x: u.add_embedding(x[:, : u.add_embedding.linear_1.in_features]), 1, 256),
    "unet.conv_in": _unet(lambda u, x: u.conv_in(x), 1, 4, 8, 8),
}


def with_plan(pipe: Any, **fields: Any) -> Any:
    """The pipeline, of a class of the same name whose plan has these fields, too."""
    cls = type(pipe)
    known = getattr(cls, "_offload_plan", OffloadPlan())
    blocks = {name: getattr(known, name) for name in ("block_attrs", "encoder_block_attrs", "encoder_component_types")}
    pipe.__class__ = type(cls.__name__, (cls,), {"_offload_plan": OffloadPlan(**{**blocks, **fields})})
    return pipe


def enable_way(way: Way, **options: Any) -> tuple[Any, Any]:
    pipe, _ = way.build()
    if way.declared:
        with_plan(pipe, entry_points={way.path: way.declared})
    return pipe, enable_omni_offload(pipe, **(options or {"components": {way.path: "module"}}))


@cache
def expected_of(name: str, device: torch.device) -> torch.Tensor:
    """By the component that lives on the device."""
    way = WAYS[name]
    component = getattr(way.build()[0], way.path).to(device)
    with torch.no_grad():
        return way.enter(component, device).cpu()


@pytest.mark.parametrize("name", WAYS)
def test_every_way_in(name: str, device: torch.device, sim: ModuleType) -> None:
    """Outside of any call, in one, and again: equal, loaded once a call, at rest afterwards."""
    way, expected = WAYS[name], expected_of(name, device)
    pipe, handle = enable_way(way)
    component, at_rest = getattr(pipe, way.path), AtRest(handle)
    with torch.no_grad(), Occupancy(handle) as occupancy:
        for where in (torch.device("cpu"), device):
            found = way.enter(component, where)
            assert found.device.type == device.type and torch.equal(found.cpu(), expected)
            at_rest.check()
            assert handle.device_bytes == 0
        assert len(occupancy.loads) == 2 * way.loads
        with handle.call():
            for where in (torch.device("cpu"), device):
                assert torch.equal(way.enter(component, where).cpu(), expected)
                at_rest.check()
            assert len(occupancy.loads) == 2 * way.loads + 1
        assert handle.device_bytes == 0
    assert_no_hazards(sim, name)
    handle.disable()
    assert leftovers(pipe) == []


@pytest.mark.parametrize("name", WAYS)
def test_every_way_in_leaves_the_module_as_it_was(name: str, device: torch.device) -> None:
    """No attribute of ours is left, and a method that was replaced on the instance is there again."""
    way = WAYS[name]
    pipe, _ = way.build()
    if way.declared:
        with_plan(pipe, entry_points={way.path: way.declared})
    component = getattr(pipe, way.path)
    method = "decode" if hasattr(type(component), "decode") else "to"
    component.__dict__[method] = own = lambda *args, **kwargs: None
    before, callables = State.of(pipe), {key: vars(module).copy() for key, module in component.named_modules()}
    for _ in range(2):
        enable_omni_offload(pipe, components={way.path: "module"}).disable()
        before.assert_same(State.of(pipe))
        assert vars(component)[method] is own
        for key, module in component.named_modules():
            assert {name: id(value) for name, value in vars(module).items()} == {
                name: id(value) for name, value in callables[key].items()
            }


def test_what_isnt_an_entry_point_raises(device: torch.device) -> None:
    """Weights read where nobody knows of it are on the host: an error of torch, never other numbers."""
    pipe, _ = toy_with(text_encoder=Functional)()
    enable_omni_offload(pipe, components={"text_encoder": "module"})
    with torch.no_grad():
        for enter in (
            lambda: pipe.text_encoder.similarity(ids().to(device)),
            lambda: functional.linear(noise(1, 8).to(device), pipe.text_encoder.layers[0].expand.weight),
            lambda: pipe.text_encoder.layers[0].contract(noise(1, 16).to(device)),
        ):
            with pytest.raises(RuntimeError, match="two devices"):
                enter()
        # On the host they are true.
        twin = Functional()
        assert torch.equal(pipe.text_encoder.similarity(ids()), twin.similarity(ids()))


def test_tiles_are_not_loads(device: torch.device) -> None:
    """The decoder really ran several times."""
    pipe, handle = enable_way(WAYS["vae.decode in slices and tiles"])
    ran: list[int] = []
    pipe.vae.decoder.register_forward_hook(lambda *_: ran.append(1))
    with torch.no_grad(), handle.call():
        pipe.vae.decode(noise(2, 4, 20, 20))
    assert len(ran) > 8 and handle.swaps == 1


@pytest.mark.parametrize("is_short", [False, True])
def test_a_swapped_vae_comes_once_a_call(is_short: bool, device: torch.device, sim: ModuleType) -> None:
    """However often it is entered, and even if it has to make room for itself."""
    pipe, handle = enable_way(WAYS["vae.decode"], components={"dit": "module", "vae": "module"})
    taken = torch.zeros(1 << 20, device=device)  # most of a small device
    if is_short:
        sim.configure(capacity_bytes=torch.accelerator.memory_allocated() + taken.nbytes // 2)
    with torch.no_grad(), Occupancy(handle) as occupancy, handle.call():
        pipe.transformer(noise(1, 4, 8))
        for _ in range(4):
            pipe.vae.decode(noise(1, 4, 8, 8))
    assert occupancy.loads == ["transformer", "vae"]


# ---------------------------------------------------------------------- declared entry points


@pytest.mark.parametrize(
    ("entry_points", "words"),
    [
        ({"vae": ("nope",)}, ["'nope'", "'vae'"]),
        ({"vae": ("decoder.nope",)}, ["decoder.nope", "'vae'"]),
        ({"vae": ("nope.decode",)}, ["nope.decode", "'vae'"]),
        ({"vae": ("config",)}, ["'config'", "'vae'"]),
        ({"vae": ("decoder",)}, ["'decoder'", "'vae'"]),
        ({"vae": ("decode", "nope")}, ["'nope'", "'vae'"]),
        ({"va": ("decode",)}, ["'va'", "entry_points"]),
    ],
)
def test_declared_entry_points_that_are_wrong(
    entry_points: dict[str, tuple[str, ...]], words: list[str], device: torch.device
) -> None:
    """They are refused by name, before anything is touched."""
    pipe, _ = build_toy(3, text_encoder=True, vae=True)
    with_plan(pipe, entry_points=entry_points)
    before, allocated = State.of(pipe), torch.accelerator.memory_allocated()
    with pytest.raises(ValueError) as caught:
        enable_omni_offload(pipe, components={"vae": "module"})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    before.assert_same(State.of(pipe))
    assert leftovers(pipe) == [] and torch.accelerator.memory_allocated() == allocated


# ---------------------------------------------------------------------- before, between and after calls


def build_for_raw_use() -> tuple[Any, Call]:
    return build_toy(3, two_stage=True, text_encoder=True, vae=True)


@pytest.mark.parametrize(
    "choice",
    [
        {"dit": "module", "text_encoder": "module", "vae": "module"},
        {"dit": "layer", "text_encoder": "module", "vae": "module"},
        {"dit": "module", "text_encoder": "layer"},
        {"text_encoder": "module"},
    ],
    ids=lambda choice: ", ".join(choice.values()),
)
def test_components_used_before_between_and_after_calls(
    choice: dict[str, str], device: torch.device, sim: ModuleType
) -> None:
    resident, call = build_for_raw_use()
    resident.to(device)
    pipe, call = build_for_raw_use()
    handle = enable_omni_offload(pipe, components=choice)

    @torch.no_grad()
    def raw(pipe: Any, inputs: torch.device) -> list[torch.Tensor]:
        """Each component, with inputs on the CPU or on the device."""
        return [
            pipe.text_encoder(ids().to(inputs)).cpu(),
            pipe.transformer(x=noise(1, 4, 8).to(inputs)).cpu(),
            pipe.transformer_2(noise(1, 4, 8).to(inputs)).cpu(),
            pipe.vae.decode(noise(1, 4, 8).to(inputs)).cpu(),
        ]

    expected, output = raw(resident, device), tiny.run(resident, call)
    for _ in range(2):
        for inputs in (torch.device("cpu"), device):
            assert all(map(torch.equal, raw(pipe, inputs), expected))
        assert np.array_equal(tiny.run(pipe, call), output)
        with handle.call():
            assert all(map(torch.equal, raw(pipe, torch.device("cpu")), expected))
            assert np.array_equal(tiny.run(pipe, call), output)
    assert_no_hazards(sim, str(choice))


@pytest.mark.parametrize(
    "name", ["sdxl", "wan", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sd3", "qwen_image"))]
)
def test_encode_prompt_outside_of_a_call(name: str, device: torch.device) -> None:
    """As prompt-weighting libraries do, before, between and after calls; its outputs serve the next call."""

    def encode(pipe: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            prompts = {"prompt_2": "a cat", "prompt_3": "a cat"} if name == "sd3" else {}
            found = pipe.encode_prompt(prompt="a cat", **prompts)
        return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]

    resident, call = tiny.BUILDERS[name]()
    expected, output = [tensor.cpu() for tensor in encode(resident.to(device))], tiny.run(resident, call)
    pipe, call = tiny.BUILDERS[name]()
    enable_omni_offload(pipe, "module")
    for _ in range(2):
        found = encode(pipe)
        assert found and all(tensor.device.type == device.type for tensor in found)
        assert all(map(torch.equal, [tensor.cpu() for tensor in found], expected))
        assert np.array_equal(tiny.run(pipe, call), output)


# ---------------------------------------------------------------------- casts in the middle of a call


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param({"vae": "module"}, marks=pytest.mark.slow),
        {"dit": "module", "text_encoder": "module", "vae": "module"},
    ],
)
def test_a_vae_that_is_cast_before_it_decodes(choice: dict[str, str], device: torch.device, sim: ModuleType) -> None:
    """Stable Diffusion XL casts its VAE to float32 and back in every call."""

    def build() -> tuple[Any, Call]:
        pipe, call = tiny.build_sdxl()
        return pipe.to(torch.float16), call

    resident, call = build()
    dtypes: list[torch.dtype] = []
    resident.vae.decoder.register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
    expected = outputs(resident.to(device), call)
    assert set(dtypes) == {torch.float32} and resident.vae.dtype is torch.float16
    pipe, call = build()
    pinned, states = sim.stats()["pinned_current"], []
    handle = enable_omni_offload(pipe, components=choice)
    locked = handle.pinned_bytes
    for output in expected:
        assert_equal_outputs([tiny.run(pipe, call)], [output], "upcast")
        assert pipe.vae.dtype is torch.float16 and next(pipe.vae.parameters()).device.type == "cpu"
        gc.collect()
        states.append((torch.accelerator.memory_allocated(), handle.device_bytes))
    assert len(set(states)) == 1 and handle.device_bytes == 0
    tiny.run(pipe, call)
    with handle.call():
        pass  # The audit packs what was cast back.
    gc.collect()
    assert sim.stats()["pinned_current"] - pinned == handle.pinned_bytes == locked
    assert_no_hazards(sim, "upcast")
    handle.disable()
    assert np.array_equal(tiny.run(pipe.to(device), call), expected[0])


@pytest.mark.parametrize("path", ["text_encoder", "vae", "transformer"])
def test_a_cast_between_two_entries_of_one_call(path: str, device: torch.device, sim: ModuleType) -> None:
    """Also of a component that is on the device at that moment, whose copy may not have arrived."""
    sim.configure(h2d_bytes_per_s=1e6)

    def use(pipe: Any) -> torch.Tensor:
        if path == "vae":
            return pipe.vae.decode(noise(1, 4, 8))
        return pipe.text_encoder(ids()) if path == "text_encoder" else pipe.transformer(noise(1, 4, 8))

    def sequence(pipe: Any) -> list[torch.Tensor]:
        found = [use(pipe)]
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            getattr(pipe, path).to(dtype)
            found.append(use(pipe))
        return [tensor.cpu() for tensor in found]

    resident, _ = build_toy(3, text_encoder=True, vae=True)
    resident.to(device)
    pipe, _ = build_toy(3, text_encoder=True, vae=True)
    handle = enable_omni_offload(pipe, components={path: "module"})
    with torch.no_grad():
        expected = sequence(_on_device(resident, device))
        with handle.call():
            found = sequence(pipe)
    assert all(map(torch.equal, found, expected))
    assert_no_hazards(sim, path)


def _on_device(pipe: Any, device: torch.device) -> Any:
    """A resident pipeline whose components move their inputs themselves, as offloaded ones do."""
    for component in (pipe.text_encoder, pipe.transformer):
        component.register_forward_pre_hook(lambda module, args: tuple(value.to(device) for value in args))
    decode = pipe.vae.decode
    pipe.vae.decode = lambda latents: decode(latents.to(device))
    return pipe


# ---------------------------------------------------------------------- proxies and replaced components


class Proxy:
    """A thin stand-in for a VAE that is no module."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vae, name)


class Wrapper(nn.Module):
    """A module around a VAE."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.inner = vae

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.inner.decode(latents)


class DecoderOnly(nn.Module):
    """Shows the decoder of a VAE and nothing else of it."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.decoder = vae.decoder

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decoder(latents.transpose(1, 2))


@pytest.mark.parametrize("wrap", [Proxy, Wrapper, DecoderOnly])
def test_a_proxy_around_a_swapped_vae(wrap: type, device: torch.device) -> None:
    """Used beside the pipeline it works; in the component's place it is an error that names it."""
    resident, call = build_toy(3, text_encoder=True, vae=True)
    with torch.no_grad():
        expected = resident.to(device).vae.decode(noise(1, 4, 8).to(device)).cpu()
    pipe, call = build_toy(3, text_encoder=True, vae=True)
    handle = enable_omni_offload(pipe, components={"vae": "module", "text_encoder": "module"})
    vae, proxy = pipe.vae, wrap(pipe.vae)
    with torch.no_grad():
        for scope in (contextlib.nullcontext(), handle.call()):
            with scope:
                assert torch.equal(proxy.decode(noise(1, 4, 8).to(device)).cpu(), expected)
    pipe.vae = proxy
    with pytest.raises(RuntimeError, match=r"vae is offloaded and was (replaced|removed)"):
        tiny.run(pipe, call)
    pipe.vae = vae
    assert np.array_equal(tiny.run(pipe, call), tiny.run(resident, call))


# ---------------------------------------------------------------------- components that load themselves


class LogBook:
    """What the lifecycle methods of components did, in order."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def balance(self) -> dict[str, int]:
        """Component -> loads less offloads."""
        names = {entry[1:] for entry in self.entries}
        return {name: self.entries.count(f"+{name}") - self.entries.count(f"-{name}") for name in sorted(names)}

    def assert_alternates(self) -> None:
        for name in {entry[1:] for entry in self.entries}:
            own = [entry[0] for entry in self.entries if entry[1:] == name]
            assert own == ["+", "-"] * (len(own) // 2), f"{name}: {''.join(own)}"


def on_demand(cls: type, name: str, book: LogBook) -> type:
    """`cls` with a lifecycle that refuses to be loaded twice."""

    class OnDemand(cls):  # type: ignore[misc, valid-type]
        def load_to_device(self) -> None:
            book.entries.append(f"+{name}")
            self.to("sim")

        def offload_to_cpu(self) -> None:
            book.entries.append(f"-{name}")
            self.to("cpu")

    OnDemand.__name__ = cls.__name__
    return OnDemand


def build_on_demand(book: LogBook) -> tuple[Any, Call]:
    """Text encoder and VAE load themselves."""
    pipe, call = build_toy(3, two_stage=True, text_encoder=True, vae=True)
    pipe.text_encoder.__class__ = on_demand(ToyTextEncoder, "text_encoder", book)
    pipe.vae.__class__ = on_demand(ToyVAE, "vae", book)
    return with_plan(pipe, on_demand_component_paths=("text_encoder", "vae")), call


ON_DEMAND_CHOICES: tuple[dict[str, Any], ...] = (
    {"mode": "layer"},
    {"mode": "module"},
    {"components": {"dit": "layer", "text_encoder": "module", "vae": "module"}},
    {"components": {"transformer": "layer", "transformer_2": "module"}},
)


@pytest.mark.parametrize("options", ON_DEMAND_CHOICES, ids=str)
@pytest.mark.parametrize("from_device", [False, True])
def test_components_that_load_themselves(
    options: dict[str, Any], from_device: bool, device: torch.device, sim: ModuleType
) -> None:
    resident, call = build_for_raw_use()
    expected = outputs(resident.to(device), call)
    book = LogBook()
    pipe, call = build_on_demand(book)
    pipe.to(device) if from_device else None
    handle = enable_omni_offload(pipe, **options)
    assert set(handle.plan.on_demand) == {"text_encoder", "vae"}
    # They are where they belong until they are used, wherever they were before.
    owned = (pipe.text_encoder, pipe.vae)
    assert {parameter.device.type for module in owned for parameter in module.parameters()} == {"cpu"}
    book.entries.clear()
    for output in expected:
        assert_equal_outputs([tiny.run(pipe, call)], [output], str(options))
        # The encoder leaves before the DiT comes, the VAE when the call ends.
        assert book.entries == ["+text_encoder", "-text_encoder", "+vae", "-vae"]
        book.entries.clear()
    assert_no_hazards(sim, str(options))
    handle.disable()
    assert leftovers(pipe) == []
    assert set(book.balance().values()) <= {0}


@pytest.mark.parametrize("options", ON_DEMAND_CHOICES, ids=str)
@pytest.mark.parametrize("where", ["text_encoder", "transformer", "vae", "load", "offload"])
def test_lifecycles_are_balanced_if_a_call_raises(options: dict[str, Any], where: str, device: torch.device) -> None:
    resident, call = build_for_raw_use()
    expected = tiny.run(resident.to(device), call)
    book = LogBook()
    pipe, call = build_on_demand(book)
    enable_omni_offload(pipe, **options)
    tiny.run(pipe, call)
    book.entries.clear()
    with contextlib.ExitStack() as undo:
        if where in ("load", "offload"):
            name = "load_to_device" if where == "load" else "offload_to_cpu"
            original = getattr(pipe.text_encoder, name)

            def fail() -> None:
                original()
                vars(pipe.text_encoder).pop(name)
                raise Boom

            vars(pipe.text_encoder)[name] = fail
        else:
            part = {"text_encoder": pipe.text_encoder.layers[1], "vae": pipe.vae.decoder}
            undo.callback(part.get(where, pipe.transformer.blocks[1]).register_forward_pre_hook(raiser(Boom)).remove)
        with pytest.raises(Boom):
            tiny.run(pipe, call)
    book.assert_alternates()
    assert book.entries[0] == "+text_encoder" and next(pipe.text_encoder.parameters()).device.type == "cpu"
    book.entries.clear()
    assert np.array_equal(tiny.run(pipe, call), expected)
    assert book.entries == ["+text_encoder", "-text_encoder", "+vae", "-vae"]


@pytest.mark.parametrize("mode", ["layer", "module"])
def test_a_pipeline_may_load_them_itself(mode: str, device: torch.device) -> None:
    """Loaded by the pipeline around their use, as MiniMax-H3 does: right, and off the device when they are done."""
    book = LogBook()
    pipe, _ = build_on_demand(book)
    twin, _ = build_for_raw_use()
    with torch.no_grad():
        expected = twin.text_encoder.to(device)(ids().to(device)).cpu()
        handle = enable_omni_offload(pipe, mode)
        with handle.call():
            for _ in range(2):
                pipe.text_encoder.load_to_device()
                assert torch.equal(pipe.text_encoder(ids()).cpu(), expected)
                pipe.text_encoder.offload_to_cpu()
                # Once more, and this time the pipeline leaves the loading to us.
                assert torch.equal(pipe.text_encoder(ids()).cpu(), expected)
    assert next(pipe.text_encoder.parameters()).device.type == "cpu"


# ---------------------------------------------------------------------- what a forward may not do


class Boom(Exception):
    """What is raised in these tests."""


def raiser(error: type[BaseException]) -> Callable[..., None]:
    def fail(*args: Any) -> None:
        raise error

    return fail


EVERYTHING = {"dit": "module", "text_encoder": "module", "vae": "module"}


def offloaded() -> tuple[Any, Call, Any]:
    pipe, call = build_for_raw_use()
    return pipe, call, enable_omni_offload(pipe, components=EVERYTHING)


@cache
def expected_output(device: torch.device) -> np.ndarray:
    pipe, call = build_for_raw_use()
    return tiny.run(pipe.to(device), call)


class Writing(ToyVAE):
    """Counts its calls in a buffer."""

    counts = True

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.counter.add_(1)
        return super().decode(latents)


def test_a_buffer_that_is_written_is_refused_by_name(device: torch.device) -> None:
    pipe, call = build_for_raw_use()
    pipe.vae.register_buffer("counter", torch.zeros(1))
    pipe.vae.__class__ = Writing
    handle = enable_omni_offload(pipe, components=EVERYTHING)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"vae\.counter was written to during its own forward"):
            tiny.run(pipe, call)
        assert pipe.vae.counter.item() == 0 and pipe.vae.counter.device.type == "cpu"
        assert not handle.backend.scope.is_open and handle.device_bytes == 0
    pipe.vae.counts = False
    assert np.array_equal(tiny.run(pipe, call), expected_output(device))


def test_running_statistics_are_refused_by_name(device: torch.device) -> None:
    pipe, call = build_for_raw_use()
    pipe.vae.decoder = nn.Sequential(pipe.vae.decoder, nn.BatchNorm1d(3)).train()
    type(pipe.vae).decode = type(pipe.vae).decode
    vae = pipe.vae
    vars(vae)["decode"] = lambda latents: vae.decoder(latents.transpose(1, 2))
    enable_omni_offload(pipe, components=EVERYTHING)
    with pytest.raises(RuntimeError, match=r"vae\.decoder\.1\.(running_mean|running_var|num_batches_tracked)"):
        tiny.run(pipe, call)
    pipe.vae.decoder.eval()
    tiny.run(pipe, call)


def test_outputs_that_are_views_of_weights_hold_no_device_memory(device: torch.device) -> None:
    class Views(ToyTextEncoder):
        def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
            return {"queries": self.embed.weight[None, :4], "both": [self.layers[0].shift, tokens]}

    pipe, _ = build_for_raw_use()
    pipe.text_encoder.__class__ = Views
    values = pipe.text_encoder.embed.weight.detach().clone(), pipe.text_encoder.layers[0].shift.clone()
    handle = enable_omni_offload(pipe, components=EVERYTHING)
    allocated = torch.accelerator.memory_allocated()
    with torch.no_grad():
        output = pipe.text_encoder(ids())
    assert torch.accelerator.memory_allocated() - allocated <= 4 * 512 and handle.device_bytes == 0
    assert torch.equal(output["queries"].cpu(), values[0][None, :4]) and torch.equal(output["both"][0].cpu(), values[1])
    assert output["queries"].device.type == device.type
    # They are copies: an edit of them isn't one of the weights.
    output["queries"].zero_()
    assert torch.equal(pipe.text_encoder.embed.weight, values[0])


def test_a_view_of_weights_that_is_kept_is_refused_by_name(device: torch.device) -> None:
    class Keeping(ToyTextEncoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.kept = self.embed.weight.data[:2]
            return super().forward(tokens)

    pipe, call = build_for_raw_use()
    pipe.text_encoder.__class__ = Keeping
    enable_omni_offload(pipe, components=EVERYTHING)
    with pytest.raises(RuntimeError, match=r"text_encoder\.kept keeps a view of its own weights"):
        tiny.run(pipe, call)


@pytest.mark.parametrize("error", [Boom, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["text_encoder", "transformer", "transformer_2", "vae", "vae part"])
def test_a_forward_that_raises_in_the_middle(where: str, error: type[BaseException], device: torch.device) -> None:
    pipe, call, handle = offloaded()
    at_rest, pinned = AtRest(handle), handle.pinned_bytes
    tiny.run(pipe, call)
    allocated = torch.accelerator.memory_allocated()
    part = {
        "text_encoder": pipe.text_encoder.layers[1],
        "transformer": pipe.transformer.blocks[1].contract,
        "transformer_2": pipe.transformer_2.norm,
        "vae": pipe.vae.decoder,
        "vae part": pipe.vae.decoder,
    }[where]
    removable = part.register_forward_pre_hook(raiser(error))
    for _ in range(2):
        with pytest.raises(error):
            pipe.vae.decoder(noise(1, 8, 4)) if where == "vae part" else tiny.run(pipe, call)
        at_rest.check()
        assert not handle.backend.scope.is_open and handle.device_bytes == 0
    removable.remove()
    gc.collect()
    assert torch.accelerator.memory_allocated() == allocated and handle.pinned_bytes == pinned
    assert np.array_equal(tiny.run(pipe, call), expected_output(device))


def test_a_stage_that_raised_is_used_again_in_the_same_call(device: torch.device) -> None:
    pipe, call, handle = offloaded()
    with torch.no_grad():
        expected = pipe.text_encoder(ids()).cpu()
        with handle.call():
            removable = pipe.text_encoder.layers[0].register_forward_pre_hook(raiser(Boom))
            with pytest.raises(Boom):
                pipe.text_encoder(ids())
            removable.remove()
            assert torch.equal(pipe.text_encoder(ids()).cpu(), expected)
            assert np.array_equal(tiny.run(pipe, call), expected_output(device))


@pytest.mark.parametrize("enter", ["forward", "decode", "part"])
def test_gradients_are_refused_by_name(enter: str, device: torch.device) -> None:
    pipe, call, handle = offloaded()
    ways: dict[str, tuple[str, Callable[[], Any]]] = {
        "forward": ("text_encoder", lambda: pipe.text_encoder(ids())),
        "decode": ("vae", lambda: pipe.vae.decode(noise(1, 4, 8))),
        "part": ("vae", lambda: pipe.vae.decoder(noise(1, 8, 4))),
    }
    path, run = ways[enter]
    with torch.enable_grad(), pytest.raises(RuntimeError, match=rf"^{path}.*gradient.*inference"):
        run()
    assert handle.device_bytes == 0
    component = getattr(pipe, path).requires_grad_(False)
    with torch.enable_grad():
        run()  # Nothing asks for a gradient.
        if path == "vae":
            with pytest.raises(RuntimeError, match="one of its inputs"):
                latents = noise(1, 4, 8).to(device).requires_grad_()
                component.decode(latents)
    assert np.array_equal(tiny.run(pipe, call), expected_output(device))


# ---------------------------------------------------------------------- an interrupt during a swap

SWAP_STEPS: dict[str, tuple[type, str]] = {
    "making room": (Stages, "make_room"),
    "bringing": (Stages, "bring"),
    "loading": (PackedStage, "load"),
    "copying": (Streamer, "load_apart"),
    "binding": (Streamer, "bind_apart"),
    "binding the leaves": (PackedMaster, "bind"),
    "unbinding": (Streamer, "unbind_apart"),
    "unbinding the leaves": (PackedMaster, "unbind"),
    "giving up": (PackedStage, "give_up"),
    "giving all up": (Stages, "give_up_all"),
}


def interrupted(original: Callable[..., Any], at: int, after: bool) -> Callable[..., Any]:
    """`original`, whose call number `at` is interrupted right before or right after it."""
    calls = iter(range(1 << 30))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        is_it = next(calls) == at
        if is_it and not after:
            raise KeyboardInterrupt
        result = original(*args, **kwargs)
        if is_it:
            raise KeyboardInterrupt
        return result

    return wrapped


@pytest.mark.parametrize("step", SWAP_STEPS)
def test_an_interrupt_during_a_swap(
    step: str, device: torch.device, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before and right after each of its steps: the next call is right, and nothing is left."""
    owner, name = SWAP_STEPS[step]
    pipe, call, handle = offloaded()
    at_rest = AtRest(handle)
    tiny.run(pipe, call)
    allocated = torch.accelerator.memory_allocated()
    came = 0
    for at, after in [(at, after) for at in range(4) for after in (False, True)]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted(getattr(owner, name), at, after))
            try:
                tiny.run(pipe, call)
            except KeyboardInterrupt:
                came += 1
        assert np.array_equal(tiny.run(pipe, call), expected_output(device)), (at, after)
        at_rest.check()
        assert not handle.backend.scope.is_open and handle.device_bytes == 0
    assert came >= 2
    gc.collect()
    assert torch.accelerator.memory_allocated() == allocated
    assert_no_hazards(sim, step)
    disable_omni_offload(pipe)
    assert leftovers(pipe) == []


# ---------------------------------------------------------------------- a DiT that is entered in odd ways


class Talkative(ToyDiT):
    """Its forward calls its own entry points and those of another component."""

    other: Any = None

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.proj_in(x)).mean()

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        x = x + self.encode(x)
        if self.other is not None:
            x = x + self.other(torch.arange(x.shape[1], device=x.device)[None]).mean()
        return super().forward(x, **options)


def test_an_entry_inside_of_another_component_s(device: torch.device, sim: ModuleType) -> None:
    """Both are on the device then: what runs isn't taken away under its own feet."""

    def build() -> tuple[Any, Call]:
        pipe, call = build_for_raw_use()
        for dit in (pipe.transformer, pipe.transformer_2):
            dit.__class__ = Talkative
            dit.__dict__["other"] = pipe.text_encoder
        return pipe, call

    resident, call = build()
    expected = outputs(resident.to(device), call)
    pipe, call = build()
    handle = enable_omni_offload(pipe, components=EVERYTHING)
    at_rest = AtRest(handle)
    assert_equal_outputs(outputs(pipe, call), expected, "nested entries")
    at_rest.check()
    assert_no_hazards(sim, "nested entries")
    assert handle.device_bytes == 0


def test_a_generator_is_consumed_inside_its_component(device: torch.device) -> None:
    """A method that yields frame after frame: whatever it yields later is right, or it says why it can't be."""

    class Yielding(ToyVAE):
        def decode_frames(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
            for index in range(latents.shape[1] - 2):
                yield self.decoder(latents[:, index : index + 3].transpose(1, 2))

    twin = Yielding().eval()
    with torch.no_grad():
        expected = [frame.cpu() for frame in twin.to(device).decode_frames(noise(1, 6, 8).to(device))]
    pipe, _ = build_for_raw_use()
    pipe.vae.__class__ = Yielding
    with_plan(pipe, entry_points={"vae": ("decode_frames",)})
    handle = enable_omni_offload(pipe, components=EVERYTHING)
    with torch.no_grad(), handle.call():
        found = [frame.cpu() for frame in pipe.vae.decode_frames(noise(1, 6, 8))]
    assert all(map(torch.equal, found, expected)) and handle.swaps == 1
