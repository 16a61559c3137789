"""Tokenizers and processors built from in-memory vocabularies: one token a character or byte, no merges."""

from __future__ import annotations

from typing import Any

CLIP_VOCABULARY = 514

QWEN_SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_VOCABULARY = 256 + len(QWEN_SPECIALS)
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MISTRAL_SPECIALS = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
MISTRAL_SPECIALS += ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
MISTRAL_VOCABULARY = 256 + len(MISTRAL_SPECIALS)
MISTRAL_TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if m['role'] == 'system' %}[SYSTEM_PROMPT]{% else %}[INST]{% endif %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}[IMG]{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'system' %}[/SYSTEM_PROMPT]{% else %}[/INST]{% endif %}{% endfor %}"
)


def byte_characters() -> list[str]:
    """The 256 printable characters that stand for the bytes in byte-level BPE, in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    characters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in characters:
            characters[byte] = chr(256 + len(characters) - len(printable))
    return [characters[byte] for byte in range(256)]


def clip_tokenizer(model_max_length: int = 77) -> Any:
    """A `CLIPTokenizer` over single characters: 512 symbols, and the start and end of a text."""
    from transformers import CLIPTokenizer

    characters = byte_characters()
    symbols = [*characters, *(character + "</w>" for character in characters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=model_max_length)


def qwen_tokenizer(model_max_length: int = 4096, eos_token: str = "<|im_end|>") -> Any:
    """A `Qwen2Tokenizer`: one token a byte, Qwen's special tokens and a chat template."""
    from transformers import Qwen2Tokenizer

    vocabulary = {symbol: index for index, symbol in enumerate([*byte_characters(), *QWEN_SPECIALS])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        eos_token=eos_token,
        pad_token="<|endoftext|>",
        additional_special_tokens=QWEN_SPECIALS[1:],
        model_max_length=model_max_length,
    )
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


def mistral_tokenizer() -> Any:
    """A fast tokenizer: one token a byte, Mistral's special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: index for index, symbol in enumerate([*MISTRAL_SPECIALS, *byte_characters()])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=MISTRAL_SPECIALS[4:],
        model_max_length=4096,
        padding_side="left",
    )
    tokenizer.chat_template = MISTRAL_TEMPLATE
    return tokenizer


def has_torchvision() -> bool:
    """Whether torchvision can be imported (a build for another torch raises RuntimeError)."""
    try:
        import torchvision  # noqa: F401
    except Exception:
        return False
    return True


def pixtral_processor() -> Any:
    """FLUX.2's `tokenizer`, a `PixtralProcessor`; the plain tokenizer where torchvision is missing.

    Text to image calls nothing but `apply_chat_template`, which both have.
    """
    tokenizer = mistral_tokenizer()
    if not has_torchvision():
        return tokenizer
    from transformers import PixtralProcessor
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralProcessor(
        image_processor=PixtralImageProcessorPil(patch_size=6, size={"longest_edge": 24}),
        tokenizer=tokenizer,
        patch_size=6,
        spatial_merge_size=1,
        chat_template=MISTRAL_TEMPLATE,
    )


def qwen2vl_processor(tokenizer: Any) -> Any:
    """LongCat's `text_processor`, a `Qwen2VLProcessor`; the tokenizer itself where torchvision is missing.

    Text to image calls `apply_chat_template`, `__call__(text=...)` and `batch_decode` only, which both have.
    """
    if not has_torchvision():
        return tokenizer
    from transformers import Qwen2VLProcessor, Qwen2VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=QWEN_TEMPLATE,
    )
