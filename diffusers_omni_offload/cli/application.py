"""The commands, their flags and help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from diffusers_omni_offload.cli.errors import BadInput, Failed, one_line

PROGRAM = "omni-offload"

app = typer.Typer(
    name=PROGRAM,
    help="Run diffusers pipelines whose weights are larger than the GPU: plan, run and measure them.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def run_command(arguments: list[str]) -> int:
    """Run one command; the exit status."""
    command = typer.main.get_command(app)
    try:
        outcome = command.main(args=arguments or ["--help"], prog_name=PROGRAM, standalone_mode=False)
    except BadInput as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except Failed as error:
        print(one_line(error), file=sys.stderr)
        return 1
    except typer.TyperException as error:
        print(one_line(error.format_message()), file=sys.stderr)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return outcome if isinstance(outcome, int) else 0


# Flags that several commands have ------------------------------------------------------------------------------------

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help='A pipeline\'s folder, its name on the Hub, or "demo": a tiny Wan that is built in.'
    ),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="DEVICE", help="Where to run, such as cuda:1, or cpu for a try.  [default: the accelerator]"),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE", help="Of the weights: bfloat16, float16 or float32.  [default: bfloat16; demo: float32]"
    ),
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Device memory for weights and activations, such as 12GiB.  [default: what is free, less 5 %]",
    ),
]
HostMemoryBudget = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Host memory for offloaded weights, such as 32GiB.  [default: no limit]"),
]
Profile = Annotated[
    bool,
    typer.Option(
        "--profile/--no-profile", help="With --mode auto: use what was measured on this machine before, and keep it."
    ),
]
Steps = Annotated[int | None, typer.Option(metavar="N", min=1, help="Denoising steps.  [default: the pipeline's]")]
Height = Annotated[int | None, typer.Option(metavar="N", min=1, help="Height in pixels.  [default: the pipeline's]")]
Width = Annotated[int | None, typer.Option(metavar="N", min=1, help="Width in pixels.  [default: the pipeline's]")]
NumFrames = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Frames of a video.  [default: the pipeline's]")
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(
    name="plan",
    epilog="\b\n"
    "Examples:\n"
    "  $ omni-offload plan demo --memory-budget 1MiB\n"
    "  $ omni-offload plan Wan-AI/Wan2.2-T2V-A14B-Diffusers --memory-budget 24GiB --link-gb-per-s 25 --tflops 150\n"
    "  $ omni-offload plan Qwen/Qwen-Image --memory-budget 16GiB --height 1024 --width 1024 --json\n",
)
def plan(
    model: ModelName,
    memory_budget: MemoryBudget = None,
    host_memory_budget: HostMemoryBudget = None,
    link_gb_per_s: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="Of copies from page-locked host memory, in 1e9 bytes a second; omni-offload doctor measures it.  "
            "[default: as measured on this machine before, or 16]",
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            metavar="TFLOPS",
            help="What the device reaches in matrix products, in 1e12 operations a second.  [default: times are those "
            "of copies alone]",
        ),
    ] = None,
    steps: Steps = None,
    height: Height = None,
    width: Width = None,
    num_frames: NumFrames = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Say what each mode would take, from configurations alone: device and host memory, seconds, and the call that
    asks for it."""
    from diffusers_omni_offload.cli import forecasting
    from diffusers_omni_offload.cli.models import CallFlags

    forecasting.plan(
        forecasting.PlanRequest(
            model=model,
            memory_budget=memory_budget,
            host_memory_budget=host_memory_budget,
            link_gb_per_s=link_gb_per_s,
            tflops=tflops,
            call=CallFlags(steps=steps, height=height, width=width, num_frames=num_frames),
            dtype=dtype,
            device=device,
            as_json=as_json,
        )
    )


@app.command(
    name="run",
    epilog="\b\n"
    "Examples:\n"
    "  $ omni-offload run demo --prompt 'a cat walks' --output cat.gif\n"
    "  $ omni-offload run demo --prompt 'a cat walks' --output cat.gif --enable-layerwise-offload\n"
    "  $ torchrun --nproc-per-node 2 -m diffusers_omni_offload.cli run demo --prompts prompts.txt --output cat.gif "
    "--enable-distributed-layerwise-offload --data-parallel-size 2\n",
)
def run(
    model: ModelName,
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="The file to write: .png, .jpg or .webp for an image, .gif or .mp4 for a video."
        ),
    ],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What to make.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with a prompt on each line; prompt 3 goes to cat-3.gif if the output is cat.gif. Processes "
            "that torchrun has started share the prompts.",
        ),
    ] = None,
    negative_prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What not to make.")] = None,
    steps: Steps = None,
    height: Height = None,
    width: Width = None,
    num_frames: NumFrames = None,
    guidance_scale: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="How much the prompt counts.  [default: the pipeline's]")
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Of the noise; prompt 3 of a file has this plus 3.")
    ] = 0,
    fps: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Frames per second of a video.")] = 16,
    dtype: Dtype = None,
    device: Device = None,
    source: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="Where streamed weights are: memory (page-locked), or checkpoint (they stay in the model's files).",
        ),
    ] = "memory",
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help="auto fits the call into --memory-budget, layer streams the DiT's blocks, module swaps whole "
            "components, resident offloads nothing.  [default: auto]",
        ),
    ] = None,
    memory_budget: MemoryBudget = None,
    host_memory_budget: HostMemoryBudget = None,
    profile: Profile = True,
    enable_cpu_offload: Annotated[
        bool, typer.Option("--enable-cpu-offload", help="Swap whole components (model-level).")
    ] = False,
    enable_layerwise_offload: Annotated[
        bool, typer.Option("--enable-layerwise-offload", help="Stream the DiT's blocks; goes before the one above.")
    ] = False,
    enable_distributed_layerwise_offload: Annotated[
        bool,
        typer.Option(
            "--enable-distributed-layerwise-offload",
            help="Stream blocks of weights that several processes share; goes before both.",
        ),
    ] = False,
    data_parallel_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Groups of processes that have prompts of their own.  [default: all, by --usp]"
        ),
    ] = None,
    usp: Annotated[
        int, typer.Option(metavar="N", min=1, help="Processes that share the tokens of a prompt (Ulysses).")
    ] = 1,
    dlo_use_allgather: Annotated[
        bool,
        typer.Option(
            "--dlo-use-allgather/--dlo-no-use-allgather",
            help="Each process holds a share of the weights and gathers each block, or each has all of them.",
        ),
    ] = True,
    dlo_resident_layers: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Blocks of each DiT that stay on the device; needs --dlo-no-use-allgather."
        ),
    ] = 0,
    diffusion_offload_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='All in one: {"mode": "layer", "components": ["dit", "text_encoder"], "layer_options": {"dit": '
            '{"resident_layers": 8}}, "pin_memory": true}.',
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file for a trace of the first call, which https://ui.perfetto.dev opens."),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print what was measured beside what was predicted.")
    ] = False,
) -> None:
    """Call a pipeline with offload, and write what it makes."""
    from diffusers_omni_offload.cli import running
    from diffusers_omni_offload.cli.models import CallFlags
    from diffusers_omni_offload.cli.strategy import StrategyFlags

    running.run(
        running.RunRequest(
            model=model,
            output=output,
            prompt=prompt,
            prompts=prompts,
            seed=seed,
            device=device,
            dtype=dtype,
            source=source,
            fps=fps,
            trace=trace,
            report=report,
            call=CallFlags(negative_prompt, steps, height, width, num_frames, guidance_scale),
            strategy=StrategyFlags(
                mode=mode,
                memory_budget=memory_budget,
                host_memory_budget=host_memory_budget,
                profile=profile,
                enable_cpu_offload=enable_cpu_offload,
                enable_layerwise_offload=enable_layerwise_offload,
                enable_distributed_layerwise_offload=enable_distributed_layerwise_offload,
                data_parallel_size=data_parallel_size,
                usp=usp,
                dlo_use_allgather=dlo_use_allgather,
                dlo_resident_layers=dlo_resident_layers,
                diffusion_offload_config=diffusion_offload_config,
            ),
        )
    )


@app.command(
    name="bench",
    epilog="\b\n"
    "Examples:\n"
    "  $ omni-offload bench demo\n"
    "  $ omni-offload bench demo --modes resident,layer --calls 1 --json\n",
)
def bench(
    model: ModelName,
    modes: Annotated[
        str,
        typer.Option(metavar="MODES", help="What is compared: any of resident, module, layer and auto, with commas."),
    ] = "resident,module,layer,auto",
    calls: Annotated[int, typer.Option(metavar="N", min=1, help="Calls in each mode, after one that isn't timed.")] = 3,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to make.")] = "a cat walks on the grass",
    steps: Steps = None,
    height: Height = None,
    width: Width = None,
    num_frames: NumFrames = None,
    dtype: Dtype = None,
    device: Device = None,
    memory_budget: MemoryBudget = None,
    host_memory_budget: HostMemoryBudget = None,
    profile: Profile = True,
    as_json: AsJson = False,
) -> None:
    """Measure calls of a pipeline in several modes: seconds, device memory, bytes copied, and whether the outputs are
    equal."""
    from diffusers_omni_offload.cli import benching
    from diffusers_omni_offload.cli.models import CallFlags

    benching.bench(
        benching.BenchRequest(
            model=model,
            modes=tuple(dict.fromkeys(name.strip() for name in modes.split(",") if name.strip())),
            calls=calls,
            prompt=prompt,
            device=device,
            dtype=dtype,
            call=CallFlags(steps=steps, height=height, width=width, num_frames=num_frames),
            memory_budget=memory_budget,
            host_memory_budget=host_memory_budget,
            profile=profile,
            as_json=as_json,
        )
    )


@app.command(name="doctor", epilog="\b\nExamples:\n  $ omni-offload doctor\n  $ omni-offload doctor --json\n")
def doctor(
    device: Device = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where checkpoints are: a file there is tried. [default: the Hub's cache, or temporary files]",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Look at this machine: versions, memory, link, page-locking, and what would go wrong. Ends with 1 if offload
    can't work here."""
    from diffusers_omni_offload.cli.errors import input_is_to_blame
    from diffusers_omni_offload.cli.showing import show
    from diffusers_omni_offload.doctor import diagnose

    with input_is_to_blame():
        diagnosis = diagnose(device, folder=folder)
    if as_json:
        print(diagnosis.to_json())
    else:
        show(diagnosis)
    return 0 if diagnosis.works else 1
