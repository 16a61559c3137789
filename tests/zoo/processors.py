"""Qwen's processors of texts and pictures, without the one for videos: that one needs torchvision."""

from __future__ import annotations

from typing import Any

from tests.tiny.tokenizers import QWEN_TEMPLATE, qwen_tokenizer


class _WithoutVideos:
    """Mixin of a processor: it is content with `None` for the processor of videos."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor" and argument is None:
            return type(None)
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


def _processor(processor_class: type, patch_size: int) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    side = 2 * patch_size
    # Two by two patches make a token; a picture has between one and four tokens.
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=patch_size, size={"shortest_edge": side**2, "longest_edge": 4 * side**2}
    )
    without_videos = type(processor_class.__name__, (_WithoutVideos, processor_class), {})
    return without_videos(
        image_processor=image_processor, tokenizer=qwen_tokenizer(), video_processor=None, chat_template=QWEN_TEMPLATE
    )


def qwen2_vl_processor() -> Any:
    """A `Qwen2VLProcessor` for `tests.tiny.text_encoders.qwen25_vl`."""
    from transformers import Qwen2VLProcessor

    return _processor(Qwen2VLProcessor, 14)


def qwen3_vl_processor() -> Any:
    """A `Qwen3VLProcessor` for `tests.tiny.text_encoders.qwen3_vl`."""
    from transformers import Qwen3VLProcessor

    return _processor(Qwen3VLProcessor, 16)
