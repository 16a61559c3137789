"""MiniMax-H3: video and audio in one packed sequence."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny import build_minimax_h3
from tests.tiny.transformers import minimax_h3_transformer
from tests.zoo.building import normal
from tests.zoo.registry import Arguments, pipeline, transformer


@transformer("MiniMaxH3Transformer3DModel")
def minimax_h3() -> tuple[Any, Arguments]:
    """Four tokens of text, six of audio, eight of video; the audio has a time step of its own."""
    text, audio, video = torch.arange(4), torch.arange(4, 10), torch.arange(10, 18)

    def call() -> dict[str, Any]:
        positions = torch.zeros(18, 3)
        positions[:, 0] = torch.arange(18)
        positions[video, 1], positions[video, 2] = torch.arange(8.0) % 4, torch.arange(8.0) % 2
        tags, steps = torch.zeros(18, dtype=torch.long), torch.zeros(18, dtype=torch.long)
        tags[text], tags[audio] = 1, 2
        steps[audio] = 1
        return {
            "hidden_states": normal(1, 8, 16),
            "audio_hidden_states": normal(1, 6, 8, seed=1),
            "encoder_hidden_states": normal(1, 4, 16, seed=2),
            "timestep": torch.tensor([0.7, 0.3]),
            "timestep_indices": steps,
            "token_tags": tags,
            "position_ids": positions,
            "video_indices": video.clone(),
            "audio_indices": audio.clone(),
            "text_indices": text.clone(),
        }

    return minimax_h3_transformer(), call


@pipeline("MiniMaxH3ModularPipeline")
def minimax_h3_pipeline() -> tuple[Any, Arguments]:
    return build_minimax_h3()
