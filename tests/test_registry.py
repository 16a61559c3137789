"""The registry: names, inheritance, third parties, and entry points that fail."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffusers_omni_offload import OffloadPlan, registry
from diffusers_omni_offload.registry import adapter_for, register_adapter, registered_pipelines
from tests.undeclared import DiT, undeclared


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    registered_pipelines()
    monkeypatch.setattr(registry, "_builtin", dict(registry._builtin))
    monkeypatch.setattr(registry, "_third_party", {})


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    found: list[Any] = []
    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.ENTRY_POINT_GROUP else [])
    yield found


def adapter(name: str = "Adapter", module: str = "third.party") -> type:
    return type(name, (), {"__module__": module, "__qualname__": name})


def test_subclasses_use_the_nearest_adapter() -> None:
    first, second = adapter("First"), adapter("Second")
    assert register_adapter("ToyPipeline", "OtherPipeline")(first) is first
    register_adapter("NearerPipeline")(second)
    toy = type("ToyPipeline", (), {})
    nearer = type("NearerPipeline", (toy,), {})
    assert adapter_for(type("Mine", (toy,), {})) is first
    assert adapter_for(type("Mine", (nearer,), {})) is second
    assert adapter_for(type("OtherPipeline", (), {})) is first
    assert adapter_for(dict) is None


def test_names_and_not_identities_are_compared() -> None:
    from diffusers import WanPipeline

    composed = type("WanPipeline", (WanPipeline,), {})
    assert adapter_for(composed) is adapter_for(WanPipeline) is registered_pipelines()["WanPipeline"]


def test_an_adapter_may_name_at_every_enabling_what_one_workflow_lacks(device: torch.device) -> None:
    """An offloaded pipeline's class has the adapter's declarations, but they don't become the pipeline's own."""
    mine = adapter("Mine")
    mine._dit_modules, mine._encoder_modules = ["transformer", "transformer_of_another"], []  # type: ignore[attr-defined]
    mine._offload_plan = OffloadPlan(block_attrs={"transformer": ("blocks",)})  # type: ignore[attr-defined]
    register_adapter("Workflow")(mine)
    pipe = undeclared("Workflow", transformer=DiT(blocks=3))
    for options in ({"mode": "layer"}, {"components": ["dit"]}, {"mode": "module"}, {"components": {"dit": "layer"}}):
        handle = pipe.enable_omni_offload(**options)
        assert any("'transformer_of_another' (dit), which this Workflow" in note for note in handle.plan.notes)


def test_third_parties_come_before_the_built_in() -> None:
    from diffusers import WanPipeline

    builtin, mine = adapter_for(WanPipeline), adapter("Mine")
    register_adapter("WanPipeline")(mine)
    assert adapter_for(WanPipeline) is mine
    assert registered_pipelines()["WanPipeline"] is mine
    assert builtin is not mine and registry._builtin["WanPipeline"] is builtin


def test_two_classes_for_one_name() -> None:
    register_adapter("ToyPipeline")(adapter("First"))
    with pytest.raises(ValueError, match=r"'ToyPipeline' has the adapter third.party.First.*third.party.Second"):
        register_adapter("FreePipeline", "ToyPipeline")(adapter("Second"))
    assert "FreePipeline" not in registered_pipelines()  # all names or none


def test_the_same_definition_again_takes_its_place() -> None:
    register_adapter("ToyPipeline")(adapter("Again"))
    again = adapter("Again")
    register_adapter("ToyPipeline")(again)
    assert registered_pipelines()["ToyPipeline"] is again


@pytest.mark.parametrize("names", [(), (3,), ("not a name",), (type("ToyPipeline", (), {}),)])
def test_names_are_class_names(names: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError), match="'WanPipeline'"):
        register_adapter(*names)


def test_wrong_subjects() -> None:
    with pytest.raises(TypeError, match="decorates classes"):
        register_adapter("ToyPipeline")(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"type\(pipeline\)"):
        adapter_for(object())  # type: ignore[arg-type]


def test_pipelines_are_listed_by_name() -> None:
    names = list(registered_pipelines())
    assert names == sorted(names) and {"WanPipeline", "Flux2Pipeline", "QwenImagePipeline"} <= set(names)
    registered_pipelines().clear()
    assert registered_pipelines()


def test_entry_points_are_loaded_once_and_late(entry_points: list[Any]) -> None:
    loads: list[str] = []
    mine = adapter("Mine")

    def load() -> Any:
        loads.append("load")
        return lambda: register_adapter("TheirPipeline")(mine)

    entry_points.append(SimpleNamespace(name="theirs", value="their.module:register", load=load))
    assert loads == []
    assert registered_pipelines()["TheirPipeline"] is mine
    registered_pipelines()
    assert loads == ["load"]


def test_entry_point_that_fails_is_named_and_the_others_work(entry_points: list[Any]) -> None:
    def fail() -> Any:
        raise ImportError("no module named their")

    mine = adapter("Mine")
    working = SimpleNamespace(name="good", value="good", load=lambda: register_adapter("GoodPipeline")(mine))
    entry_points.extend([SimpleNamespace(name="bad", value="their.module", load=fail), working])
    with pytest.warns(UserWarning, match=r"'bad' \(their.module\).*ImportError: no module named their"):
        assert registered_pipelines()["GoodPipeline"] is mine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registered_pipelines()


@pytest.mark.processes
def test_registry_imports_no_diffusers_and_no_torch() -> None:
    code = (
        "import sys; from diffusers_omni_offload.registry import registered_pipelines as r; n = len(r());"
        "assert n > 20, n; assert not {'torch', 'diffusers'} & set(sys.modules)"
    )
    package = "import types, sys, pathlib, importlib.util as u; "
    # The package itself imports torch; its rooms of pure data don't have to.
    code = (
        package
        + "p = types.ModuleType('diffusers_omni_offload'); "
        + "p.__path__ = list(u.find_spec('diffusers_omni_offload').submodule_search_locations); "
        + "sys.modules['diffusers_omni_offload'] = p; "
        + code
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
