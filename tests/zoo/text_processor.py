"""Stand-in for a processor of texts and pictures where only texts are given."""

from __future__ import annotations

from typing import Any

from tests.tiny.tokenizers import qwen_tokenizer


class TextProcessor:
    """Qwen's processor as far as texts go: it has no pictures to read."""

    def __init__(self) -> None:
        self.tokenizer = qwen_tokenizer()

    def __call__(self, text: Any, images: Any = None, **options: Any) -> Any:
        if images is not None:
            raise NotImplementedError("This stand-in reads texts only.")
        return self.tokenizer(text, **options)
