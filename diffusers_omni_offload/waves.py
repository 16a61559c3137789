"""Waves: the calls that data parallel ranks make at the same time, each with a request of its own."""

from __future__ import annotations

import inspect
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch.distributed as dist

from diffusers_omni_offload.agreement import Agreement
from diffusers_omni_offload.parallel import WeightGroup

T = TypeVar("T")

STEPS = "num_inference_steps"
_GIVEN = "given"
_SCHEDULES = ("sigmas", "timesteps")

#: What belongs to one request and leaves the path of blocks alone.
_OWN = re.compile(
    r"(.*_)?(latents|generator|seed|eta|rescale|conditioning_scale|temperature|noise_level|aesthetic_score|fps|frame_rate"
    r"|height|width|resolution|size|num_frames|video_length|duration|seconds|audio_length_in_s|audio_duration_s|bpm)"
    r"|output_type|return_dict|output|state|callback.*|.*callback_on_step_end.*|num_\w+_per_prompt|batch_size"
    r"|.*crops_coords_top_left|max_sequence_length|decode_\w+|padding_mask_crop"
)
#: Texts that belong to one request: whether there are any decides on what runs.
_TEXTS = re.compile(r".*(prompt|text|lyrics|instruction|transcription|caption|message|language|keyscale|subject).*")
#: Scales that switch another pass of the DiT on, and from where on.
_SWITCHES = (
    (re.compile(r".*(skip_layer_guidance|pag|stg)_scale"), 0.0),
    (re.compile(r".*(guidance|cfg|modality)_scale(_\d)?"), 1.0),
)


def wave_facts(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Of a pipeline call's arguments, and the defaults of the others, what has to be equal on all ranks of a wave.

    | argument | what counts |
    | --- | --- |
    | `num_inference_steps` | its value; None if it isn't written in the call |
    | `sigmas`, `timesteps` | how many |
    | `guidance_scale`, `true_cfg_scale` and the like | whether they are above 1 |
    | `skip_layer_guidance_scale`, `pag_scale`, `stg_scale` | whether they are above 0 |
    | prompts, negative prompts, other texts, embeddings | whether there are any |
    | images, videos, masks, sounds | whether there are any |
    | `attention_kwargs` and other mappings | their keys |
    | other numbers, switches and choices, and lists of them: `strength`, `skip_guidance_layers` ... | their values |
    | latents, generators, height, width, number of frames, of images for a prompt, kind of output, callbacks, scales \
that only weigh something | nothing |

    Args:
        signature: of the pipeline's `__call__`, with `self` or without.
        args, kwargs: of the call, without `self`.

    Raises:
        TypeError: the call's arguments don't fit the signature.
    """
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    bound = signature.replace(parameters=parameters).bind(*args, **kwargs)
    written = dict(bound.arguments)
    bound.apply_defaults()
    more = next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), None)
    arguments = {**bound.arguments, **bound.arguments.get(more or "", {})}
    written.update(written.get(more or "", {}))
    facts: dict[str, Any] = {}
    if STEPS in arguments or more is not None:
        facts[STEPS] = _plain(written.get(STEPS))
    for name, value in arguments.items():
        if name not in (STEPS, more) and not _OWN.fullmatch(name):
            fact = _fact(name, _plain(value))
            if fact is not None:
                facts[name] = fact
    return facts


def agree_on_wave(agreement: Agreement, facts: Mapping[str, Any], what: str) -> None:
    """Make sure, before a wave, that all ranks go through the same blocks; `what` says of which call.

    Raises:
        RanksDisagree: they don't, with the arguments and the ranks.
        ValueError: none of them says how many steps there are, so a default of one of them may be another one.
        RankMissing, RankFailed: not all came; see `Agreement.exchange`.
    """
    agreement.require_equal(facts, what)
    if STEPS in facts and facts[STEPS] is None and not any(name in facts for name in _SCHEDULES):
        raise ValueError(
            f"{STEPS} isn't given for {what}, or is None. Ranks that gather weights together make the same number of "
            f"steps, so say on each rank how many: pipe(..., {STEPS}=30)."
        )


def spread_prompts(prompts: Iterable[T], group: WeightGroup | None = None) -> Iterator[tuple[int | None, T]]:
    """This rank's prompts, in as many turns as every other rank has.

    Where the prompts don't suffice for the last turn, some ranks get the last prompt again, with None as its index:
    make the call, because the others need this rank in it, and drop the output.

    Args:
        prompts: the same on each rank; prompts, or whatever a call is made from.
        group: the ranks that take turns; ranks that share a request all get all prompts. None means all processes, each
            with requests of its own.

    Returns:
        (index in all of `prompts`, prompt), one after the other.
    """
    everything = list(prompts)
    size, rank = _place(group)
    for first in range(0, len(everything), size):
        index = first + rank
        yield (index, everything[index]) if index < len(everything) else (None, everything[-1])


def _place(group: WeightGroup | None) -> tuple[int, int]:
    if group is not None:
        return (group.size, group.rank) if group.kind == "data" else (1, 0)
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def _fact(name: str, value: Any) -> Any:
    """What counts of an argument; None if it isn't there."""
    if value is None:
        return None
    if name in _SCHEDULES:
        return f"{len(value)} values"
    if isinstance(value, Mapping):
        return sorted(map(str, value))
    if isinstance(value, str):
        return _GIVEN if _TEXTS.fullmatch(name) else value
    if isinstance(value, (int, float)):
        for pattern, off in _SWITCHES:
            if pattern.fullmatch(name):
                return f"above {off:g}" if value > off else f"at most {off:g}"
        return value
    if isinstance(value, (list, tuple)):
        items = [_fact(name, _plain(item)) for item in value]
        return _GIVEN if any(item == _GIVEN for item in items) else items
    return _GIVEN


def _plain(value: Any) -> Any:
    """Numbers and choices as Python has them."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, numbers.Number) and hasattr(value, "item"):
        return value.item()
    return value
