"""The benchmark scripts: the stacks are what they say, the ideal is right, and the scripts run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from diffusers_omni_offload.weights.leaves import find_leaves
from tests import tiny
from tests.benchmarks import __main__ as tables
from tests.benchmarks import calls, gpu_check, ranks, real, stacks, steps
from tests.benchmarks.tables import format_table
from tests.ranks import RankPool

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("family", stacks.FAMILIES)
def test_every_block_of_a_stack_matters(family: str) -> None:
    pipe = stacks.build(family, 6, width=16)
    baseline = pipe(1)
    assert baseline.isfinite().all() and len(pipe.transformer.blocks()) == 6
    for block in pipe.transformer.blocks():
        before = [parameter.detach().clone() for parameter in block.parameters()]
        for parameter in block.parameters():
            parameter.data.mul_(1.5)
        assert not torch.equal(pipe(1), baseline)
        for parameter, value in zip(block.parameters(), before, strict=True):
            parameter.data.copy_(value)
    assert torch.equal(pipe(1), baseline)


def test_the_stacks_have_the_sizes_they_are_named_for() -> None:
    sizes = {
        family: [stacks.block_nbytes(block) for block in stacks.build(family, 6, width=64).transformer.blocks()]
        for family in stacks.FAMILIES
    }
    assert len(set(sizes["Wan-like"])) == len(set(sizes["SD3-like"])) == 1
    assert sizes["2:1"] == [sizes["2:1"][0]] * 2 + [sizes["2:1"][0] // 2] * 4
    assert sizes["Flux-like"][0] == pytest.approx(2 * sizes["Flux-like"][-1], rel=0.01)
    assert len(find_leaves(stacks.build("Wan-like", 1).transformer.blocks()[0], "")) == real.LEAVES


def test_the_ideal_comes_from_rates_and_bytes(sim: ModuleType) -> None:
    bench = steps.Bench("Wan-like", num_blocks=4)
    for ratio in (0.5, 4.0):
        bench.set_ratio(ratio)
        assert bench.ideal() == pytest.approx(max(1, ratio) * bench.compute)
    assert bench.ideal([0]) == pytest.approx(bench.compute)
    operations = sum(2 * 8 * p.numel() for p in bench._pipe().transformer.parameters() if p.dim() == 2)
    assert bench.compute == pytest.approx(operations / bench.flops_per_s, rel=0.05)  # the rest: attention and norms


def test_a_step_of_the_bench_moves_what_the_ideal_counts(sim: ModuleType) -> None:
    bench = steps.Bench("2:1", num_blocks=6, width=16)
    bench.set_ratio(1)
    sim.configure(trace=1)
    sim.reset_clock()
    bench.ours(residents=0.5)
    copies = [row for row in sim.trace() if row[0] == "copy_h2d"]
    streamed = 3
    assert len(copies) >= streamed * (steps.WARM + steps.MEASURED)


def test_model_offload_copies_every_weight_back_and_module_mode_none(sim: ModuleType) -> None:
    bench = calls.CallBench(tiny.build_wan)
    resident, module, everything = bench.resident(), bench.module_mode(), bench.module_mode(calls.WITH_VAE)
    peer = bench.model_offload()
    assert module.to_host == everything.to_host == resident.to_host
    assert peer.to_host - resident.to_host == bench.weight_bytes == peer.to_device - resident.to_device
    assert (module.swaps, everything.swaps, peer.swaps) == (3, 4, 4)
    assert module.copies == resident.copies + 3
    tensors = sum(len(find_leaves(part, "")) for part in tiny.build_wan()[0].components.values() if hasattr(part, "to"))
    assert peer.copies == resident.copies + 2 * tensors
    assert everything.peak < peer.peak < module.peak < resident.peak


@pytest.mark.parametrize("ratio", calls.RATIOS)
def test_a_call_takes_its_compute_and_its_copies(ratio: float, sim: ModuleType) -> None:
    """Whole components come before their compute, so the two don't overlap: times add up, here to a few percent."""
    bench = calls.CallBench(tiny.build_wan)
    bench.set_ratio(ratio)
    resident, everything, peer = bench.resident(), bench.module_mode(calls.WITH_VAE), bench.model_offload()
    link = sim.get_config("h2d_bytes_per_s")
    prompt_and_output = (resident.to_device + resident.to_host) / (link / 4)
    assert resident.seconds == pytest.approx(calls.CALL_S + prompt_and_output, rel=0.02)
    packed = (everything.to_device - resident.to_device) / link
    assert everything.seconds == pytest.approx(resident.seconds + packed, rel=0.02)
    there_and_back = (peer.to_device - resident.to_device + peer.to_host - resident.to_host) / (link / 4)
    assert peer.seconds == pytest.approx(resident.seconds + there_and_back, rel=0.02)


def test_text_encoders_stay_together_until_the_dit_needs_the_room(sim: ModuleType) -> None:
    """Prompt and negative prompt: accelerate moves the first two of three encoders twice."""
    bench = calls.CallBench(tiny.build_sd3)
    assert bench.module_mode().swaps == 4 and bench.model_offload().swaps == 7


def test_the_ideal_of_ranks_is_the_longest_of_compute_copy_and_gather() -> None:
    """A block of 0.7 GB: 43.75 ms over the link, 14 and 58.3 ms over the fabrics."""
    rates = ranks.Rates(ratio=2.0)
    assert rates.compute == pytest.approx(0.021875)
    assert rates.ideal("rank-local", 4) == pytest.approx(0.04375)
    assert rates.ideal("allgather", 4) == pytest.approx(0.021875)
    assert ranks.Rates(2.0, fabric=12e9).ideal("allgather", 4) == pytest.approx(0.04375)
    shared = ranks.Rates(2.0, link=4e9)
    assert shared.ideal("rank-local", 4) == pytest.approx(0.175)
    assert shared.ideal("allgather", 4) == pytest.approx(0.04375)


@pytest.mark.processes
def test_steps_of_two_ranks_are_near_the_ideal() -> None:
    """Bound by copies, by gathers, by a shared link and by compute."""
    rates = [ranks.Rates(2.0), ranks.Rates(2.0, fabric=12e9), ranks.Rates(1.0, link=8e9), ranks.Rates(0.5)]
    with RankPool(2, device="sim") as pool:
        local, gathered = (
            ranks.run(pool, transfer, rates, num_blocks=8, width=32) for transfer in ("rank-local", "allgather")
        )
    for found in (local, gathered):
        ratios = [step.ratio for step in found.steps]
        assert all(0.99 <= ratio <= 1.1 for ratio in ratios), ratios
        assert found.computes == pytest.approx([8 * rate.compute for rate in rates], rel=0.01)
    assert gathered.host_bytes == pytest.approx(local.host_bytes / 2, rel=0.02)
    assert gathered.link_bytes == pytest.approx(local.link_bytes / 2, rel=0.02)
    assert (local.fabric_bytes, gathered.fabric_bytes) == (0, pytest.approx(gathered.link_bytes, rel=0.02))


@pytest.mark.slow
@pytest.mark.processes
def test_the_tables_of_ranks_run() -> None:
    own, shared, notes = ranks.tables((1, 2), num_blocks=6, width=16)
    for table in (own, shared):
        title, _, _, *rows = table.splitlines()
        assert title.startswith("modelled step / compute (ideal)") and "6 blocks of 0.7 GB" in title
        assert [row.split("  ")[0] for row in rows] == [
            "1, rank-local",
            "2, rank-local",
            "2, allgather, NVLink-like 50 GB/s",
            "2, allgather, PCIe-like 12 GB/s",
        ]
    assert "(4.00)" in shared and "(4.00)" not in own and "grows with N" in notes


def test_tables_line_up() -> None:
    text = format_table("title", ["a", "bb"], [["long name", "1"], ["x", "22.0"]])
    assert text.splitlines() == ["title", "a            bb", "---------  ----", "long name     1", "x          22.0"]


def test_the_tables_run(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "RATIOS", (1.0,))
    monkeypatch.setattr(steps, "RESIDENT_SHARES", (0.0, 0.5))
    monkeypatch.setattr(steps.Bench.__init__, "__defaults__", (6, 16, steps.LONG_BLOCKS))
    text = "\n".join(tables.modelled())
    assert text.count("modelled step / ideal") == 14 and "group offload" in text and "leading" in text


def test_the_tables_of_calls_run(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PIPELINES", {"Wan": lambda: tiny.build_wan(num_layers=2)})
    table, note = tables.whole_calls()
    title, header, _, *rows = table.splitlines()
    assert title.startswith("modelled: a call of a tiny Wan") and header.split()[:2] == ["offload", "to"]
    assert rows[0].endswith("1.00     1.00") and [row[:13] for row in rows[3:]] == ["model offload"] * 2
    assert "accelerate" in note


@pytest.mark.slow
@pytest.mark.timing
def test_the_measured_table_runs(sim: ModuleType) -> None:
    text = "\n".join(tables.measured())
    assert text.startswith("real, CPU host only") and "audit of 1,000 leaves" in text


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(SystemExit, match="modelled, calls, ranks, real, staging"):
        tables.main(["reel"])


def test_gpu_check_runs_on_the_simulated_device(sim: ModuleType, tmp_path: Path) -> None:
    sim.configure(flops_per_s=2e9)
    size = gpu_check.Size(num_blocks=8, width=64, dtype=torch.float32, tokens=(4, 64), forwards=2, residents=4)
    report = gpu_check.check(torch.device("sim", 0), size)
    assert [run["equal"] for run in report["runs"]] == [True] * 4
    assert all(0.99 <= run["step_by_ideal"] <= 1.1 for run in report["runs"]), report["runs"]
    assert 1 <= report["pinned_by_weights"] <= 1.01 and report["python_us_per_block"] > 0
    path = gpu_check.write(report, tmp_path)
    text = path.read_text()
    assert "modelled step" in text and gpu_check.SIMULATED in text and "NO" not in text
    assert json.loads(path.with_suffix(".json").read_text())["modelled"] is True


@pytest.mark.processes
def test_gpu_check_says_that_there_is_no_accelerator() -> None:
    if torch.cuda.is_available() or torch.xpu.is_available():
        pytest.skip("there is one here")
    command = [sys.executable, "-m", "tests.benchmarks.gpu_check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "no accelerator here"
