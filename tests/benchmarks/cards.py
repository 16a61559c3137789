"""Which mode for which card: the README's table, predicted from published configurations.

`python -m tests.benchmarks.cards` writes it anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from diffusers_omni_offload.blueprint import build_blueprint
from diffusers_omni_offload.forecast import ModeForecast, OffloadForecast
from diffusers_omni_offload.messages import format_bytes
from diffusers_omni_offload.planner import plan_omni_offload

ROOT = Path(__file__).resolve().parent.parent.parent
PUBLISHED = ROOT / "tests" / "data" / "published"
CARDS = (8, 12, 16, 24)
"""GiB of device memory; one of them is left to the driver and the desktop."""
LINK_GB_PER_S = 25.0
TFLOPS = 60.0
_KINDS = ("resident", "module", "layer")
START, END = "<!-- cards: begin -->", "<!-- cards: end -->"


@dataclass(frozen=True)
class Family:
    """A model and what is asked of it.

    Attributes:
        name: as the table has it.
        folder: of its published configurations.
        height, width: of the output, in pixels.
        num_frames: of the output; None for images.
        steps: denoising steps.
    """

    name: str
    folder: str
    height: int
    width: int
    num_frames: int | None
    steps: int

    def forecasts(self) -> dict[int, OffloadForecast]:
        """Card, in GiB -> what each mode would take on it."""
        pipe = build_blueprint(PUBLISHED / self.folder, dtype=torch.bfloat16)
        return {
            card: plan_omni_offload(
                pipe,
                memory_budget=f"{card - 1}GiB",
                link_gb_per_s=LINK_GB_PER_S,
                tflops=TFLOPS,
                height=self.height,
                width=self.width,
                num_frames=self.num_frames,
                num_inference_steps=self.steps,
                device="cpu",
            )
            for card in CARDS
        }


FAMILIES = (
    Family("Wan 2.2 A14B, 832 x 480, 81 frames", "Wan2.2-T2V-A14B-Diffusers", 480, 832, 81, 40),
    Family("FLUX.2-dev, 1024 x 1024", "FLUX.2-dev", 1024, 1024, None, 50),
    Family("Qwen-Image, 1024 x 1024", "Qwen-Image", 1024, 1024, None, 50),
    Family("SD 3.5 Large, 1024 x 1024", "stable-diffusion-3.5-large", 1024, 1024, None, 28),
)


def cell(mode: ModeForecast) -> str:
    """What is chosen, and what a step takes."""
    if mode.prediction is None:
        found = re.match(r"(.+) of device memory are missing .* while (\w+) runs", mode.problem or "")
        assert found is not None, mode.problem
        return f"{found[1]} short, in the {found[2].replace('vae', 'VAE').replace('_', ' ')}"
    kinds, residents = mode.prediction.choice.kinds, mode.prediction.choice.residents
    dit = next(path for path in ("transformer", "unet") if path in kinds)
    encoder = max(
        (path for path in kinds if path.startswith("text_encoder")), key=lambda path: _KINDS.index(kinds[path])
    )
    words = [kinds[path] for path in (dit, encoder, "vae")]
    kept = f", {residents[dit]} {'block stays' if residents[dit] == 1 else 'blocks stay'}" if residents.get(dit) else ""
    step = mode.prediction.steps[dit]
    return f"{', '.join(words)}{kept}: {step.seconds:.2g} s, {format_bytes(mode.prediction.peak_nbytes)}"


def table() -> str:
    """The table, in Markdown, with its markers."""
    found = [family.forecasts() for family in FAMILIES]
    lines = [f"| card | {' | '.join(family.name for family in FAMILIES)} |", "| --- |" + " --- |" * len(FAMILIES)]
    for card in CARDS:
        lines.append(f"| {card} GB | {' | '.join(cell(each[card].mode('auto')) for each in found)} |")
    return "\n".join([START, *lines, END])


def written() -> str:
    """The table that stands in the README, with its markers."""
    text = (ROOT / "README.md").read_text()
    return text[text.index(START) : text.index(END) + len(END)]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(readme.read_text().replace(written(), table()))
