"""What the user asked for: the Python API, the compact form, the legacy flags, and what contradicts what."""

from __future__ import annotations

import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from diffusers_omni_offload.config import LayerOptions, OffloadConfig, OffloadStrategy, WeightTransfer

NONE, MODEL = OffloadStrategy.NONE, OffloadStrategy.MODEL_LEVEL
LAYERWISE, DISTRIBUTED = OffloadStrategy.LAYERWISE, OffloadStrategy.DISTRIBUTED_LAYERWISE
ALLGATHER, RANK_LOCAL = WeightTransfer.ALLGATHER, WeightTransfer.RANK_LOCAL


def raises(error: type[Exception], words: list[str], call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    for word in words:
        assert word in str(caught.value), str(caught.value)


# The Python API


def test_defaults_of_the_python_api() -> None:
    config = OffloadConfig.from_options("layer")
    assert config.strategy is LAYERWISE
    assert config.components == ("dit",)
    assert dict(config.layer_options) == {"dit": LayerOptions()}
    assert (config.pin_memory, config.slots, config.resident_policy) == (True, 2, "spread")
    assert config.is_explicit and config.selects("dit") and not config.selects("text_encoder")


def test_requests_that_mean_the_same_are_equal() -> None:
    first = OffloadConfig.from_options("layer", components=["text_encoder", "dit"])
    second = OffloadConfig.from_options("layer", components={"dit", "text_encoder"}, layer_options={"dit": {}})
    assert first == second and hash(first) == hash(second)
    assert first.components == ("dit", "text_encoder")
    assert first != OffloadConfig.from_options("layer")


@pytest.mark.parametrize(
    ("mode", "layer_options", "strategy"),
    [
        ("module", None, MODEL),
        ("layer", None, LAYERWISE),
        ("layer", {"dit": {"weight_transfer": "rank-local"}}, LAYERWISE),
        ("layer", {"dit": {"weight_transfer": "allgather"}}, DISTRIBUTED),
        ("layer", {"text_encoder": {"weight_transfer": "allgather"}}, DISTRIBUTED),
        ("layer", {"dit": {"resident_layers": 0}}, LAYERWISE),
        ("layer", {"dit": {"resident_layers": 4}}, DISTRIBUTED),
        ("layer", {"dit": {"resident_layers": 0, "weight_transfer": "allgather"}}, DISTRIBUTED),
        ("layer", {"dit": {"source": "checkpoint"}}, LAYERWISE),
    ],
)
def test_strategy(mode: str, layer_options: Any, strategy: OffloadStrategy) -> None:
    config = OffloadConfig.from_options(mode, components=["dit", "text_encoder"], layer_options=layer_options)
    assert config.strategy is strategy


def test_omitted_transfer_is_rank_local() -> None:
    config = OffloadConfig.from_options("layer", layer_options={"dit": {"resident_layers": 3}})
    assert config.options_for("dit") == LayerOptions(RANK_LOCAL, 3, "auto")
    assert config.options_for("text_encoder") == LayerOptions()


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"mode": "layers"}, ValueError, ["'layers'", "layer, module", "Did you mean 'layer'?"]),
        ({"mode": 3}, TypeError, ["mode is 3"]),
        ({"components": "dit"}, TypeError, ["components=['dit']"]),
        ({"components": {"dit": 1}}, TypeError, ["components['dit'] is 1", "layer, module, resident"]),
        ({"components": {1: "layer"}}, TypeError, ["the key 1 (an int)", "dit, text_encoder, image_encoder, vae"]),
        ({"components": {"dit": "layers"}}, ValueError, ["components['dit']", "'layers'", "Did you mean 'layer'?"]),
        ({"components": {"dit": "resident"}}, ValueError, ["keeps everything resident"]),
        ({"components": {"dit": "layer"}, "mode": "module"}, ValueError, ["mode is 'module'", "leave the mode out"]),
        ({"components": {}}, ValueError, ["components is empty", "layer, module, resident"]),
        ({"components": 3}, TypeError, ["components", "int"]),
        ({"components": []}, ValueError, ["components is empty", "dit, text_encoder, image_encoder"]),
        ({"components": ["text-encoder"]}, ValueError, ["Did you mean 'text_encoder'?"]),
        ({"components": ["dit", 3]}, TypeError, ["components is 3"]),
        ({"components": ["vae"]}, ValueError, ["'vae'", "dit, text_encoder, image_encoder"]),
        ({"layer_options": ["dit"]}, TypeError, ["layer_options is a list"]),
        ({"layer_options": {1: {}}}, TypeError, ["key 1"]),
        ({"layer_options": {"vae": {}}}, ValueError, ["'vae'", "choose from"]),
        ({"layer_options": {"text_encoder": {}}}, ValueError, ["'text_encoder'", "isn't selected to be streamed"]),
        ({"layer_options": {"dit": 3}}, TypeError, ["layer_options['dit'] is an int"]),
        ({"layer_options": {"dit": {"residents": 3}}}, ValueError, ["'residents'", "Did you mean 'resident_layers'?"]),
        ({"layer_options": {"dit": {"resident_layers": True}}}, TypeError, ["layer_options['dit']", "True"]),
        ({"layer_options": {"dit": {"resident_layers": 1.0}}}, TypeError, ["1.0"]),
        ({"layer_options": {"dit": {"resident_layers": -1}}}, ValueError, ["-1", "at least 0"]),
        ({"layer_options": {"dit": {"weight_transfer": "all-gather"}}}, ValueError, ["Did you mean 'allgather'?"]),
        (
            {"layer_options": {"dit": {"weight_transfer": "allgather", "resident_layers": 2}}},
            ValueError,
            ["resident_layers=2", "rank-local"],
        ),
        ({"layer_options": {"dit": {"host_registration_limit_gib": "8"}}}, TypeError, ["'8'", "number of GiB"]),
        ({"layer_options": {"dit": {"host_registration_limit_gib": -1}}}, ValueError, ["-1", "at least 0"]),
        ({"layer_options": {"dit": {"host_registration_limit_gib": float("inf")}}}, ValueError, ["inf", "finite"]),
        (
            {"layer_options": {"dit": {"host_registration_limit_gib": 8, "source": "memory"}}},
            ValueError,
            ["host_registration_limit_gib=8", "source='memory'"],
        ),
        (
            {"layer_options": {"dit": {"host_registration_limit_gib": 8, "weight_transfer": "allgather"}}},
            ValueError,
            ["host_registration_limit_gib=8", "allgather"],
        ),
        ({"layer_options": {"dit": {"source": "disk"}}}, ValueError, ["'disk'", "auto, memory, checkpoint"]),
        (
            {"components": ["text_encoder"], "layer_options": {"text_encoder": {"resident_layers": 2}}},
            ValueError,
            ["layer_options['text_encoder']", "only 'dit'"],
        ),
        ({"mode": "module", "layer_options": {"dit": {}}}, ValueError, ["mode='layer'", "'module'"]),
        ({"pin_memory": "yes"}, TypeError, ["'yes'", "budget in bytes"]),
        ({"pin_memory": 1.5}, TypeError, ["1.5"]),
        ({"pin_memory": -1}, ValueError, ["-1"]),
        ({"slots": True}, TypeError, ["slots is True"]),
        ({"slots": 0}, ValueError, ["slots is 0", "from 1 to 64"]),
        ({"slots": 65}, ValueError, ["65"]),
        ({"resident_policy": "spreadd"}, ValueError, ["spread, leading", "Did you mean 'spread'?"]),
    ],
)
def test_python_api_refuses(kwargs: dict, error: type[Exception], words: list[str]) -> None:
    raises(error, words, OffloadConfig.from_options, kwargs.pop("mode", "layer"), **kwargs)


@pytest.mark.parametrize("pin_memory", [True, False, 0, 1, 1 << 33])
def test_pinning_is_a_bool_or_a_budget(pin_memory: bool | int) -> None:
    assert OffloadConfig.from_options("layer", pin_memory=pin_memory).pin_memory is pin_memory


def test_configuration_is_frozen_and_picklable() -> None:
    options = {"dit": {"resident_layers": 3}}
    config = OffloadConfig.from_options("layer", layer_options=options, pin_memory=10)
    options["dit"]["resident_layers"] = 9
    assert config.options_for("dit").resident_layers == 3
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(TypeError):
        config.layer_options["dit"] = LayerOptions()  # type: ignore[index]
    with pytest.raises(AttributeError):
        config.slots = 3  # type: ignore[misc]


# The compact form


def test_compact_form() -> None:
    config = OffloadConfig.parse(
        {
            "mode": "layer",
            "components": ["dit", "text_encoder"],
            "layer_options": {"dit": {"weight_transfer": "rank-local", "resident_layers": 2}},
            "pin_memory": False,
        }
    )
    assert config.strategy is DISTRIBUTED
    assert config.components == ("dit", "text_encoder")
    assert config.options_for("dit").resident_layers == 2
    assert config.pin_memory is False


@pytest.mark.parametrize(
    ("mapping", "error", "words"),
    [
        ([("mode", "layer")], TypeError, ["list", "mapping"]),
        ("layer", TypeError, ["str", "mapping"]),
        ({1: "layer"}, TypeError, ["key 1", "strings"]),
        ({"mode": "layer"}, ValueError, ["no 'components'", "dit, text_encoder, image_encoder"]),
        ({"components": ["dit"]}, ValueError, ["no 'mode'", "layer, module"]),
        ({"mode": "layer", "components": "dit"}, TypeError, ["components=['dit']"]),
        ({"mode": "layer", "components": []}, ValueError, ["empty"]),
        ({"mode": "layer", "components": ["dit"], "pin_memory": 1}, TypeError, ["pin_memory is 1", "True or False"]),
        (
            {"mode": "layer", "components": ["dit"], "pinned_memory": True},
            ValueError,
            ["'pinned_memory'", "Did you mean 'pin_memory'?"],
        ),
        ({"mode": "layer", "components": ["dit"], "slots": 2}, ValueError, ["'slots'", "mode, components"]),
    ],
)
def test_compact_form_refuses(mapping: Any, error: type[Exception], words: list[str]) -> None:
    raises(error, words, OffloadConfig.parse, mapping)


# Legacy flags


def flags(**values: Any) -> OffloadConfig:
    return OffloadConfig.from_od_config(SimpleNamespace(**values))


@pytest.mark.parametrize(
    ("values", "strategy"),
    [
        ({}, NONE),
        ({"enable_cpu_offload": True}, MODEL),
        ({"enable_layerwise_offload": True}, LAYERWISE),
        ({"enable_distributed_layerwise_offload": True}, DISTRIBUTED),
        ({"enable_cpu_offload": True, "enable_layerwise_offload": True}, LAYERWISE),
        ({"enable_layerwise_offload": True, "enable_distributed_layerwise_offload": True}, DISTRIBUTED),
        ({"enable_cpu_offload": True, "enable_distributed_layerwise_offload": True}, DISTRIBUTED),
        ({"enable_cpu_offload": None, "enable_layerwise_offload": True}, LAYERWISE),
    ],
)
def test_priority_of_the_flags(values: dict, strategy: OffloadStrategy) -> None:
    for config in (flags(**values), OffloadConfig.from_od_config(values)):
        assert config.strategy is strategy
        assert config.components is None and not config.is_explicit
        assert config.resident_policy == "leading"


def test_flags_select_the_dit_for_layers_and_everything_for_modules() -> None:
    layerwise, model = flags(enable_layerwise_offload=True), flags(enable_cpu_offload=True)
    assert layerwise.selects("dit") and not layerwise.selects("text_encoder")
    assert model.selects("dit") and model.selects("text_encoder")
    assert not flags().selects("dit")


def test_distributed_flags_gather_unless_told_otherwise() -> None:
    gathered = flags(enable_distributed_layerwise_offload=True)
    assert gathered.options_for("dit").weight_transfer is ALLGATHER
    assert gathered.options_for("text_encoder").weight_transfer is RANK_LOCAL
    local = flags(enable_distributed_layerwise_offload=True, dlo_use_allgather=False, dlo_resident_layers=3)
    assert local.options_for("dit") == LayerOptions(RANK_LOCAL, 3)


def test_pinning_flag() -> None:
    assert flags(enable_layerwise_offload=True).pin_memory is True
    assert flags(enable_layerwise_offload=True, pin_cpu_memory=False).pin_memory is False


def test_resident_flag_without_its_strategy_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = flags(enable_layerwise_offload=True, dlo_resident_layers=3)
    assert config.strategy is LAYERWISE
    assert "dlo_resident_layers=3 has no effect" in caplog.text


COMPACT = {"mode": "layer", "components": ["dit"]}


def test_compact_form_beside_flags_that_agree() -> None:
    config = flags(diffusion_offload_config=COMPACT, enable_layerwise_offload=True, dlo_use_allgather=True)
    assert config == OffloadConfig.parse(COMPACT)
    assert flags(diffusion_offload_config=COMPACT, pin_cpu_memory=False).pin_memory is False
    ready = OffloadConfig.from_options("layer", slots=3)
    assert flags(diffusion_offload_config=ready) is not None
    assert flags(diffusion_offload_config=ready) == ready


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"diffusion_offload_config": COMPACT, "enable_cpu_offload": True}, ValueError, ["enable_cpu_offload"]),
        (
            {"diffusion_offload_config": COMPACT, "enable_distributed_layerwise_offload": True},
            ValueError,
            ["'layerwise'", "enable_distributed_layerwise_offload"],
        ),
        ({"diffusion_offload_config": COMPACT, "dlo_use_allgather": False}, ValueError, ["weight_transfer"]),
        ({"diffusion_offload_config": COMPACT, "dlo_resident_layers": 2}, ValueError, ["resident_layers"]),
        ({"diffusion_offload_config": COMPACT, "host_weight_runtime_mode": "mmap"}, ValueError, ["mmap"]),
        ({"diffusion_offload_config": ["layer"]}, TypeError, ["list"]),
        (
            {"enable_distributed_layerwise_offload": True, "dlo_resident_layers": 2},
            ValueError,
            ["dlo_resident_layers=2", "dlo_use_allgather=False"],
        ),
        (
            {"enable_distributed_layerwise_offload": True, "dlo_use_allgather": False, "dlo_resident_layers": True},
            TypeError,
            ["dlo_resident_layers is True"],
        ),
        (
            {"enable_distributed_layerwise_offload": True, "dlo_use_allgather": False, "dlo_resident_layers": -1},
            ValueError,
            ["at least 0"],
        ),
        ({"enable_layerwise_offload": "yes"}, TypeError, ["enable_layerwise_offload is 'yes'"]),
        ({"pin_cpu_memory": 1}, TypeError, ["pin_cpu_memory is 1"]),
        (
            {"enable_distributed_layerwise_offload": True, "data_parallel_size": 2, "cache_backend": "cache_dit"},
            ValueError,
            ["cache_backend='cache_dit'", "data_parallel_size=2"],
        ),
        (
            {"enable_distributed_layerwise_offload": True, "parallel_config": {"use_hsdp": True}},
            ValueError,
            ["HSDP", "rank-local"],
        ),
        ({"enable_layerwise_offload": True, "dlo_host_registration_limit_gib": 2}, ValueError, ["rank-local"]),
        (
            {"enable_distributed_layerwise_offload": True, "dlo_host_registration_limit_gib": float("nan")},
            ValueError,
            ["finite"],
        ),
        ({"dlo_host_registration_limit_gib": True}, TypeError, ["True"]),
        ({"dlo_host_registration_limit_gib": -1.0}, ValueError, ["at least 0"]),
        ({"enable_layerwise_offload": True, "fullgraph": True}, ValueError, ["full graph"]),
        ({"data_parallel_size": 0}, ValueError, ["data_parallel_size is 0"]),
    ],
)
def test_contradictions(values: dict, error: type[Exception], words: list[str]) -> None:
    raises(error, words, flags, **values)


def test_prompt_cache_with_a_gathered_encoder() -> None:
    compact = {
        "mode": "layer",
        "components": ["dit", "text_encoder"],
        "layer_options": {"text_encoder": {"weight_transfer": "allgather"}},
    }
    values = {"diffusion_offload_config": compact, "enable_prompt_cache": True}
    raises(ValueError, ["prompt cache"], flags, data_parallel_size=2, **values)
    assert flags(**values).uses_allgather  # a single rank has nobody to wait for
    assert flags(data_parallel_size=2, diffusion_offload_config=COMPACT, enable_prompt_cache=True).group_size == 2


def test_caches_are_fine_without_a_gather() -> None:
    config = flags(
        enable_distributed_layerwise_offload=True,
        dlo_use_allgather=False,
        data_parallel_size=2,
        cache_backend="cache_dit",
    )
    assert config.group_size == 2


def test_registration_limit_with_what_it_needs() -> None:
    config = flags(
        enable_distributed_layerwise_offload=True,
        dlo_use_allgather=False,
        host_weight_runtime_mode="mmap",
        dlo_host_registration_limit_gib=1.5,
    )
    assert config.strategy is DISTRIBUTED
    assert config.layer_options == {"dit": LayerOptions(source="checkpoint", host_registration_limit_gib=1.5)}


@pytest.mark.parametrize("fields", [{"dlo_host_registration_limit_gib": 0}, {"host_weight_runtime_mode": "mmap"}])
def test_without_a_registration_limit_weights_stay_where_they_are(fields: dict[str, Any]) -> None:
    config = flags(enable_distributed_layerwise_offload=True, dlo_use_allgather=False, **fields)
    assert config.layer_options == {"dit": LayerOptions()}


@pytest.mark.parametrize(
    ("parallel", "size"),
    [
        ({}, 1),
        ({"data_parallel_size": 4}, 4),
        ({"sequence_parallel_size": 4}, 4),
        ({"data_parallel_size": 2, "sequence_parallel_size": 4}, 2),
        ({"ulysses_degree": 2, "ring_degree": 2}, 4),
        ({"use_hsdp": True, "hsdp_shard_size": 4, "hsdp_replicate_size": 2, "data_parallel_size": 3}, 8),
        ({"use_hsdp": True, "hsdp_shard_size": -1, "sequence_parallel_size": 2}, 2),
        ({"hsdp_shard_size": 4, "data_parallel_size": 3}, 3),
    ],
)
def test_group_size(parallel: dict, size: int) -> None:
    values = {"enable_distributed_layerwise_offload": True, "dlo_use_allgather": False}
    assert flags(parallel_config=SimpleNamespace(**parallel), **values).group_size == size
    assert flags(parallel_config=parallel, **values).group_size == size


def test_ranks_that_share_nothing_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        flags(enable_distributed_layerwise_offload=True, dlo_use_allgather=False, data_parallel_size=2)
    assert "Each of the 2 ranks streams its own weights" in caplog.text


def test_reading_changes_nothing_and_can_be_repeated() -> None:
    source = SimpleNamespace(diffusion_offload_config=dict(COMPACT), pin_cpu_memory=True, enable_layerwise_offload=None)
    before = dict(vars(source))
    assert OffloadConfig.from_od_config(source) == OffloadConfig.from_od_config(source)
    assert vars(source) == before


@pytest.mark.parametrize("source", [None, "layer", 3, True])
def test_only_objects_with_fields_are_read(source: Any) -> None:
    raises(TypeError, ["from_od_config"], OffloadConfig.from_od_config, source)
