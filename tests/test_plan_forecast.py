"""`plan_omni_offload`: what it says of each mode, in which forms, and that the calls it names do what it says."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from diffusers_omni_offload import disable_omni_offload, enable_omni_offload, omni_offload
from diffusers_omni_offload.forecast import OffloadForecast
from diffusers_omni_offload.planner import plan_omni_offload
from diffusers_omni_offload.planning.costs import Rates
from diffusers_omni_offload.platform import platform_for
from diffusers_omni_offload.profile import PROFILE_VARIABLE, Profile, default_path
from diffusers_omni_offload.topology.sizes import module_nbytes
from tests import tiny
from tests.undeclared import DiT, undeclared

PUBLISHED = Path(__file__).parent / "data" / "published"
FAMILIES = {**tiny.BUILDERS, **tiny.STANDINS}
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was measured on this machine before."""
    monkeypatch.setenv(PROFILE_VARIABLE, "")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_calls_do_what_is_said(name: str, device: torch.device) -> None:
    pipe, _ = FAMILIES[name]()
    total = sum(cost.nbytes for cost in plan_omni_offload(pipe).problem.components)
    forecast = plan_omni_offload(pipe, memory_budget=total // 2)
    sizes = {cost.path: sum(cost.dtypes.values()) for cost in forecast.problem.components}
    modes = [mode for mode in forecast.modes if "enable_omni_offload" in mode.call]
    assert {"layer", "layer, rest swapped"} <= {mode.name for mode in modes} or name.startswith("cosmos3_split")
    for mode in modes:
        # Stand-ins of classes that aren't in diffusers have no methods of ours.
        call = mode.call.replace("pipe.enable_omni_offload(", "enable_omni_offload(pipe, ")
        eval(call, {"pipe": pipe, "enable_omni_offload": enable_omni_offload})
        handle = omni_offload(pipe)
        assert handle is not None
        plan, stacks = handle.plan, {stack.component: stack for stack in handle.plan.stacks}
        for path, share in mode.components.items():
            if share.streamed_nbytes:
                assert share.streamed_nbytes - 256 * 100 * share.blocks < stacks[path].streamed_bytes
                assert stacks[path].streamed_bytes <= share.streamed_nbytes
                assert (len(stacks[path].resident), len(stacks[path].blocks)) == (share.residents, share.blocks)
            elif share.swapped_nbytes:
                assert path in (*plan.swapped, *plan.on_demand) and sizes[path] == module_nbytes(plan.module(path))
            elif share.resident_nbytes:
                assert path not in plan.swapped
        disable_omni_offload(pipe)


def test_nothing_is_touched_and_offload_makes_no_difference(device: torch.device) -> None:
    pipe, _ = tiny.build_wan()
    before = plan_omni_offload(pipe, memory_budget="1GiB").to_json()
    assert type(pipe).__name__ == "WanPipeline" and omni_offload(pipe) is None
    pipe.enable_omni_offload("layer")
    assert plan_omni_offload(pipe, memory_budget="1GiB").to_json() == before


# ---------------------------------------------------------------------- published pipelines


def of_wan(**arguments: Any) -> OffloadForecast:
    return plan_omni_offload(PUBLISHED / "Wan2.2-T2V-A14B-Diffusers", **arguments)


def test_wan_on_a_card_of_24_gib() -> None:
    forecast = of_wan(memory_budget="24GiB", link_gb_per_s=25, tflops=150)
    assert [(mode.name, mode.fits) for mode in forecast.modes] == [
        ("resident", False),
        ("module", False),
        ("layer", True),
        ("layer, rest swapped", True),
        ("auto", True),
    ]
    layer = forecast.mode("layer").prediction
    assert layer is not None and layer.host_nbytes == 80 * 702_870_528
    # 1.68e15 operations a forward are more than 28 GB over the link.
    step = layer.steps["transformer"]
    assert step.bound == "compute" and step.seconds == pytest.approx(1678.4e12 / 150e12, rel=0.01)
    best = forecast.best
    assert best is not None and best.fits and "The fastest that fits: " + best.name in str(forecast)
    assert forecast.workload is not None and forecast.workload.call.num_frames == 81


def test_the_link_sets_the_time_of_small_images() -> None:
    forecast = plan_omni_offload(PUBLISHED / "Qwen-Image", link_gb_per_s=16, tflops=200, height=256, width=256)
    layer = forecast.mode("layer").prediction
    assert layer is not None and layer.steps["transformer"].bound == "transfer"
    assert layer.steps["transformer"].seconds == pytest.approx(60 * 679_662_592 / 16e9, rel=0.01)


def test_other_dtypes() -> None:
    halves = plan_omni_offload(PUBLISHED / "FLUX.2-dev").problem.component("transformer").nbytes
    whole = plan_omni_offload(PUBLISHED / "FLUX.2-dev", dtype=torch.float32).problem.component("transformer").nbytes
    assert whole == 2 * halves == 4 * 32_223_281_152


def test_what_nothing_fits_in() -> None:
    forecast = of_wan(memory_budget="2GiB")
    assert all(mode.fits is False for mode in forecast.modes) and forecast.best is None
    problem = forecast.mode("auto").problem
    assert problem is not None and "missing at the least" in problem and problem in str(forecast)
    on_host = of_wan(memory_budget="100GiB", host_memory_budget="30GiB")
    assert on_host.mode("layer").fits is False and on_host.mode("resident").fits


def test_without_rates_times_are_those_of_copies() -> None:
    text = str(of_wan(memory_budget="24GiB"))
    assert "Compute isn't known, so the times are those of the copies alone" in text and "bound by" not in text
    assert "Link: 16 GB/s, assumed" in text and "copies," in text
    known = str(of_wan(tflops=100, link_gb_per_s=25.5))
    assert "bound by" in known and "Link: 25.5 GB/s, given" in known and "Compute: 100 TFLOPS, given" in known


# ---------------------------------------------------------------------- forms


def test_as_json() -> None:
    forecast = of_wan(memory_budget="16GiB", tflops=100, num_inference_steps=8)
    found = json.loads(forecast.to_json())
    assert found == forecast.to_dict() and found["call"]["num_inference_steps"] == 8
    assert found["memory_budget"] == 16 * GIB and found["operations_per_s"] == 100e12 and found["compute_is_known"]
    modes = {mode["name"]: mode for mode in found["modes"]}
    assert set(modes) == {"resident", "module", "layer", "layer, rest swapped", "auto"}
    for mode in modes.values():
        for path, share in mode["components"].items():
            parts = share["resident_nbytes"] + share["streamed_nbytes"] + share["swapped_nbytes"]
            assert parts == next(c["nbytes"] for c in found["components"] if c["path"] == path)
    dit = found["components"][0]
    assert (dit["parameters"], len(dit["blocks"]), dit["class_name"]) == (14_288_491_584, 40, "WanTransformer3DModel")


def test_as_text_html_and_rich() -> None:
    forecast = of_wan(memory_budget="16GiB")
    text, html = str(forecast), forecast._repr_html_()
    for word in ("WanPipeline", "14,288,491,584", "26.2 GiB streamed", "swapped", "resident", "Predicted"):
        assert word in text and word in html
    assert html.count("<table") == 3 and "color:inherit" in html
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=220, record=True, file=io.StringIO())
    console.print(forecast)
    assert "14,288,491,584" in console.export_text()


# ---------------------------------------------------------------------- other pipelines and arguments


def test_a_family_whose_operations_are_not_known() -> None:
    forecast = plan_omni_offload(undeclared(transformer=DiT(blocks=3)), tflops=100, num_inference_steps=7)
    assert forecast.workload is None and not forecast.knows_compute
    assert forecast.problem.component("transformer").forwards == 7
    assert "What a Undeclared computes isn't known" in str(forecast) and "Activations come on top" in str(forecast)
    assert "SDXL" not in str(forecast) and forecast.to_dict()["modes"][0]["bound"] is None


def test_the_link_is_the_one_that_was_measured_before(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(PROFILE_VARIABLE, str(tmp_path / "profile.json"))
    pipe, _ = tiny.build_wan()
    assert "Link: 16 GB/s, assumed" in str(plan_omni_offload(pipe))
    Profile(default_path()).keep_rates(platform_for(device).name, Rates(21e9, 1e-5, "measured"))
    assert "Link: 21 GB/s, profile" in str(plan_omni_offload(pipe))
    assert "Link: 3 GB/s, given" in str(plan_omni_offload(pipe, link_gb_per_s=3))
    assert plan_omni_offload(pipe, device="cpu").problem.rates.source == "assumed"


def test_what_was_measured_of_a_pipeline_counts(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(PROFILE_VARIABLE, str(tmp_path / "profile.json"))
    pipe, call = tiny.build_wan()
    enable_omni_offload(pipe, "auto", memory_budget="600KiB")
    tiny.run(pipe, call)
    disable_omni_offload(pipe)
    forecast = plan_omni_offload(pipe, memory_budget="600KiB")
    assert forecast.knows_compute and forecast.problem.rates.source == "profile"
    assert "Compute and activations: measured on this machine in an earlier call" in str(forecast)
    assert forecast.problem.component("transformer").activation_nbytes > 0
    assert not plan_omni_offload(pipe, height=64, memory_budget="600KiB").knows_compute
    given = plan_omni_offload(pipe, tflops=1, memory_budget="600KiB")
    assert given.operations_per_s == 1e12 and "measured on this machine" not in str(given)
    pipe.vae.enable_tiling()
    assert not plan_omni_offload(pipe, memory_budget="600KiB").knows_compute


def test_the_budget_is_what_is_free_on_the_device(device: torch.device, sim: Any, taken: int) -> None:
    sim.configure(capacity_bytes=taken + (1 << 20))
    forecast = plan_omni_offload(tiny.build_wan()[0], device=device)
    assert forecast.memory_budget is not None and 0 < forecast.memory_budget <= 1 << 20
    assert forecast.problem.total_nbytes == taken + (1 << 20)
    assert "The budget is what is free on" in str(forecast) and forecast.modes[-1].name == "auto"
    assert plan_omni_offload(tiny.build_wan()[0], device="cpu").memory_budget is None


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"memory_budget": "lots"}, ValueError, "memory_budget is 'lots', but a number with one of the units"),
        ({"host_memory_budget": 0}, ValueError, "host_memory_budget is 0, but more than 0 bytes"),
        ({"link_gb_per_s": 0}, ValueError, "link_gb_per_s is 0, but it must be finite and more than 0"),
        ({"tflops": float("inf")}, ValueError, "tflops is inf"),
        ({"tflops": "many"}, TypeError, "tflops is 'many' .*but a number is needed"),
        ({"height": 0}, ValueError, "height is 0, but it must be at least 1"),
        ({"num_frames": 1.5}, TypeError, "num_frames is 1.5"),
        ({"dtype": torch.float16}, ValueError, "dtype is for configurations"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        plan_omni_offload(tiny.build_toy(3)[0], **arguments)


def test_there_is_nothing_at_a_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no model_index\.json"):
        plan_omni_offload(tmp_path)
    with pytest.raises(KeyError, match="No mode 'fast'; there are resident,"):
        plan_omni_offload(tiny.build_toy(3)[0]).mode("fast")


@pytest.mark.parametrize("what", [StableDiffusion3Pipeline, None, 3])
def test_what_is_no_pipeline_is_refused(what: Any) -> None:
    with pytest.raises(TypeError, match="takes a pipeline, its folder or the name of a repository"):
        plan_omni_offload(what)


def test_a_dtype_is_one_of_torch() -> None:
    with pytest.raises(TypeError, match=r"dtype is 'bf16', but a torch.dtype is needed"):
        plan_omni_offload("somewhere", dtype="bf16")
