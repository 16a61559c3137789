"""Several GPUs that hold a Wan together: each makes videos for prompts of its own.

    torchrun --nproc-per-node 4 notebooks/multi_gpu.py Wan-AI/Wan2.2-T2V-A14B-Diffusers
    accelerate launch --multi_gpu --num_processes 4 notebooks/multi_gpu.py Wan-AI/Wan2.2-T2V-A14B-Diffusers

Without a model it makes a few pixels with a tiny Wan of random weights, on CPUs if there is no GPU.
"""

import os
import sys
from datetime import timedelta

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_gif

from diffusers_omni_offload import load_omni_pipeline, spread_prompts
from diffusers_omni_offload.demo.tiny_wan import build_pipeline

PROMPTS = ["a cat walks on the grass", "a dog swims", "rain", "a red kite", "two dancers", "snow on a mountain"]

if torch.accelerator.is_available():
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group(timeout=timedelta(minutes=10))
if len(sys.argv) > 1:
    pipe, size = load_omni_pipeline(WanPipeline, sys.argv[1], torch_dtype=torch.bfloat16), {}
else:
    pipe, size = build_pipeline()[0], {"height": 16, "width": 16, "num_frames": 5}
device = torch.accelerator.current_accelerator() or "cpu"
pipe.enable_omni_offload("layer", layer_options={"dit": {"weight_transfer": "allgather"}}, device=device)
for index, prompt in spread_prompts(PROMPTS):
    generator = torch.Generator().manual_seed(index or 0)
    video = pipe(prompt, num_inference_steps=8, generator=generator, output_type="pil", **size).frames[0]
    if index is not None:  # some ranks repeat the last prompt, so that all make the same number of calls
        export_to_gif(video, f"{index}.gif")
torch.distributed.destroy_process_group()
