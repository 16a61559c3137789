"""What data parallel ranks must have in common in their calls, and how prompts are spread over them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from diffusers_omni_offload.agreement import Agreement, RanksDisagree
from diffusers_omni_offload.parallel import WeightGroup
from diffusers_omni_offload.waves import STEPS, agree_on_wave, spread_prompts, wave_facts

PIPELINES = {
    name: inspect.signature(getattr(diffusers, name).__call__)
    for name in (
        "WanPipeline",
        "WanImageToVideoPipeline",
        "Flux2Pipeline",
        "QwenImagePipeline",
        "StableDiffusion3Pipeline",
        "StableDiffusionXLPipeline",
        "Cosmos3OmniPipeline",
    )
}
IMAGE = Image.new("RGB", (8, 8))


def facts(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    found = wave_facts(PIPELINES[name], args, kwargs)
    assert json.loads(json.dumps(found)) == found, "they are sent as JSON"
    return found


def call(name: str, **more: Any) -> dict[str, Any]:
    """The facts of a call with what the pipeline needs."""
    image = {"image": IMAGE} if name == "WanImageToVideoPipeline" else {}
    return facts(name, **{"prompt": "a cat", "num_inference_steps": 4, **image, **more})


def with_argument(*names: str) -> list[str]:
    return [
        name for name, signature in PIPELINES.items() if all(argument in signature.parameters for argument in names)
    ]


@pytest.mark.parametrize("name", PIPELINES)
def test_requests_differ_in_their_content(name: str) -> None:
    """All that belongs to one request may differ: what is compared is the same."""
    signature = PIPELINES[name]
    own: dict[str, Any] = {
        "prompt": ["a dog", "a horse"],
        "height": 64,
        "width": 96,
        "num_frames": 5,
        "generator": torch.Generator(),
        "latents": torch.zeros(1),
        "output_type": "latent",
        "return_dict": False,
        "num_images_per_prompt": 2,
        "num_videos_per_prompt": 2,
        "callback_on_step_end": print,
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
        "max_sequence_length": 64,
        "original_size": (64, 64),
        "crops_coords_top_left": (1, 1),
        "guidance_rescale": 0.5,
        "eta": 0.1,
        "fps": 12.0,
    }
    assert call(name, **{key: value for key, value in own.items() if key in signature.parameters}) == call(name)


@pytest.mark.parametrize("name", PIPELINES)
def test_steps_are_to_be_written_in_the_call(name: str) -> None:
    assert call(name)["num_inference_steps"] == call(name, num_inference_steps=np.int64(4))["num_inference_steps"] == 4
    assert call(name, num_inference_steps=None)["num_inference_steps"] is None
    image = {"image": IMAGE} if name == "WanImageToVideoPipeline" else {}
    assert facts(name, prompt="a cat", **image)["num_inference_steps"] is None, "a default isn't written in the call"


def test_arguments_by_place_and_with_self() -> None:
    """With the signature of a bound method as well."""
    by_place = facts("WanPipeline", "a cat", None, 64, 64, 5, 4)
    assert by_place["num_inference_steps"] == 4 and by_place == call("WanPipeline")
    signature = PIPELINES["WanPipeline"]
    unbound = signature.replace(parameters=list(signature.parameters.values())[1:])
    assert wave_facts(unbound, ("a cat",), {"num_inference_steps": 4}) == call("WanPipeline")
    with pytest.raises(TypeError, match="steps"):
        facts("WanPipeline", "a cat", steps=4)


CHANGES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "steps": (list(PIPELINES), {"num_inference_steps": 5}),
    "guidance off": ([name for name in PIPELINES if name != "QwenImagePipeline"], {"guidance_scale": 1.0}),
    "the second expert's guidance off": (["WanPipeline", "WanImageToVideoPipeline"], {"guidance_scale_2": 1.0}),
    "true guidance off": (["QwenImagePipeline"], {"true_cfg_scale": 1.0}),
    "a negative prompt": (with_argument("negative_prompt"), {"negative_prompt": "blurred"}),
    "an empty negative prompt": (["QwenImagePipeline"], {"negative_prompt": ""}),
    "embeddings": (with_argument("prompt_embeds"), {"prompt_embeds": torch.zeros(1)}),
    "a schedule": (with_argument("sigmas"), {"sigmas": [1.0, 0.5]}),
    "time steps": (with_argument("timesteps"), {"timesteps": torch.tensor([900, 500])}),
    "layers that are skipped": (["StableDiffusion3Pipeline"], {"skip_guidance_layers": [1, 2]}),
    "until when": (["StableDiffusion3Pipeline"], {"skip_layer_guidance_stop": 0.5}),
    "no skipping": (["StableDiffusion3Pipeline"], {"skip_layer_guidance_scale": 0}),
    "an early end": (["StableDiffusionXLPipeline"], {"denoising_end": 0.8}),
    "an image to go by": (["StableDiffusion3Pipeline"], {"ip_adapter_image": IMAGE}),
    "images to start from": (["Flux2Pipeline"], {"image": [IMAGE, IMAGE]}),
    "another layer of the encoder": (["Flux2Pipeline"], {"text_encoder_out_layers": (9, 18, 27)}),
    "something for attention": (["WanPipeline", "QwenImagePipeline"], {"attention_kwargs": {"scale": 0.5}}),
    "sound": (["Cosmos3OmniPipeline"], {"enable_sound": True}),
    "a video": (["Cosmos3OmniPipeline"], {"video": np.zeros((2, 8, 8, 3))}),
    "the frames that are given": (["Cosmos3OmniPipeline"], {"condition_frame_indexes_vision": (0,)}),
    "which of them": (["Cosmos3OmniPipeline"], {"condition_video_keep": "last"}),
}


def changed(name: str, change: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    more = dict(change)
    without = {"prompt": None} if "prompt_embeds" in more else {}
    return call(name), call(name, **more, **without)


@pytest.mark.parametrize("name, change", [(name, change) for change, (names, _) in CHANGES.items() for name in names])
def test_what_changes_the_path_counts(name: str, change: str) -> None:
    plain, other = changed(name, CHANGES[change][1])
    differing = {fact for fact in {*plain, *other} if plain.get(fact) != other.get(fact)}
    assert differing >= set(CHANGES[change][1])


def test_values_that_leave_the_path_alone() -> None:
    """A strength of guidance, and values of a schedule, are the request's own."""
    for name in ("WanPipeline", "StableDiffusion3Pipeline"):
        assert call(name, guidance_scale=3.0) == call(name, guidance_scale=7.5)
    assert call("QwenImagePipeline", true_cfg_scale=2) == call("QwenImagePipeline", true_cfg_scale=8.0)
    assert call("Flux2Pipeline", sigmas=[1.0, 0.5]) == call("Flux2Pipeline", sigmas=np.array([0.9, 0.1]))
    assert call("Flux2Pipeline", image=IMAGE) == call("Flux2Pipeline", image=[IMAGE, IMAGE])
    one, two = ({"scale": scale} for scale in (0.5, 0.7))
    assert call("WanPipeline", attention_kwargs=one) == call("WanPipeline", attention_kwargs=two)


def test_a_modular_pipeline_takes_what_it_is_given() -> None:
    signature = inspect.signature(diffusers.ModularPipeline.__call__)
    found = wave_facts(signature, (), {"prompt": "a cat", "num_inference_steps": 4, "strength": 0.5, "height": 64})
    assert found == {"num_inference_steps": 4, "prompt": "given", "strength": 0.5}
    assert wave_facts(signature, (), {"prompt": "a cat"})["num_inference_steps"] is None


def test_every_pipeline_of_diffusers_has_facts() -> None:
    """Each argument with a value of a plain kind, and what is compared can be sent."""
    seen = 0
    for name in dir(diffusers):
        if not name.endswith("Pipeline"):
            continue
        signature = inspect.signature(getattr(diffusers, name).__call__)
        if STEPS not in signature.parameters:
            continue
        needed = {
            parameter.name: "x"
            for parameter in signature.parameters.values()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        needed.pop("self", None)
        found = wave_facts(signature, (), {**needed, STEPS: 4})
        assert found[STEPS] == 4 and json.loads(json.dumps(found)) is not None
        assert not {"generator", "latents", "height", "output_type", "return_dict"} & set(found)
        seen += 1
    assert seen > 200


# ---------------------------------------------------------------------- agreement


class Answers:
    """An agreement of two ranks, one of which has given its facts already."""

    def __init__(self, other: dict[str, Any]) -> None:
        self.group = WeightGroup("data", (0, 1), 0)
        self.other = other

    def exchange(self, found: dict[str, Any], what: str) -> list[dict[str, Any]]:
        return [found, self.other]

    require_equal: Callable[..., None] = Agreement.require_equal


def test_ranks_that_agree() -> None:
    agree_on_wave(Answers(call("WanPipeline", prompt="a dog")), call("WanPipeline"), "the call")  # type: ignore[arg-type]


def test_steps_that_one_rank_leaves_out() -> None:
    other = facts("WanPipeline", prompt="a dog")
    with pytest.raises(RanksDisagree, match="num_inference_steps is 4 on rank 0, None on rank 1"):
        agree_on_wave(Answers(other), call("WanPipeline"), "the call of WanPipeline")  # type: ignore[arg-type]


def test_steps_that_all_leave_out() -> None:
    found = facts("WanPipeline", prompt="a dog")
    with pytest.raises(ValueError, match="num_inference_steps isn't given for the call of WanPipeline"):
        agree_on_wave(Answers(found), found, "the call of WanPipeline")  # type: ignore[arg-type]


def test_a_schedule_says_how_many_steps_there_are() -> None:
    found = facts("Flux2Pipeline", prompt="a dog", sigmas=[1.0, 0.5])
    agree_on_wave(Answers(found), found, "the call")  # type: ignore[arg-type]
    with pytest.raises(RanksDisagree, match="sigmas is '2 values' on rank 0, '3 values' on rank 1"):
        other = facts("Flux2Pipeline", prompt="a cat", sigmas=[1.0, 0.5, 0.1])
        agree_on_wave(Answers(other), found, "the call")  # type: ignore[arg-type]


def test_guidance_on_one_rank() -> None:
    other = call("QwenImagePipeline", negative_prompt="blurred")
    with pytest.raises(RanksDisagree, match="negative_prompt is not given on rank 0, 'given' on rank 1"):
        agree_on_wave(Answers(other), call("QwenImagePipeline"), "the call")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- prompts


def group(size: int, rank: int, kind: Any = "data") -> WeightGroup:
    return WeightGroup(kind, tuple(range(size)), rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 9])
def test_each_prompt_goes_to_one_rank(count: int, size: int) -> None:
    prompts = [f"prompt {index}" for index in range(count)]
    turns = [list(spread_prompts(prompts, group(size, rank))) for rank in range(size)]
    assert {len(its) for its in turns} == {-(-count // size)}, "as many turns on each rank"
    given = [(index, prompt) for its in turns for index, prompt in its if index is not None]
    assert sorted(given) == list(enumerate(prompts))
    assert {prompt for its in turns for index, prompt in its if index is None} <= {f"prompt {count - 1}"}


def test_ranks_that_share_a_request_get_all_prompts() -> None:
    for rank in range(2):
        assert list(spread_prompts("ab", group(2, rank, "sequence"))) == [(0, "a"), (1, "b")]


def test_prompts_without_other_processes() -> None:
    assert list(spread_prompts(iter("ab"))) == list(spread_prompts("ab", group(1, 0, "none"))) == [(0, "a"), (1, "b")]
