"""Tokenizers of more kinds than `tests/tiny/tokenizers.py` has: one token a character or byte."""

from __future__ import annotations

from typing import Any

_BERT_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_BERT_CHARACTERS = [chr(code) for code in range(33, 127)]
BERT_VOCABULARY = len(_BERT_SPECIALS) + 2 * len(_BERT_CHARACTERS)


def bert_tokenizer() -> Any:
    """A `BertTokenizer` whose words are spelt: printable ASCII characters, first and later ones of a word."""
    from transformers import BertTokenizer

    symbols = [*_BERT_SPECIALS, *_BERT_CHARACTERS, *("##" + character for character in _BERT_CHARACTERS)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    return BertTokenizer(vocab=vocabulary, model_max_length=77)
