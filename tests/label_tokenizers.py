# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny tokenizers of the families that labels are written with, trained on a few lines."""

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "Technology and science, sports and politics; the technology of sports.",
    "Artificial intelligence > machine learning > deep learning, 2024 and 1999!",
    "Café crème & naïve façade: Ünïcode 北京 Москва हिन्दी — émigré",
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789 > & ; , . : / - ( ) | ' café ĉ",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]
LABELS = [
    "Technology",
    "Technology > AI",
    "Technology > AI > Deep learning",
    "Sports",
    "sport",
    "Café & crème",
    "北京",
]


@functools.cache
def tokenizer_of(kind: str) -> Any:
    """A tiny tokenizer of a family."""
    trainer: Any
    if kind.startswith("bpe"):
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bpe-prefix-space")
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
        )
    elif kind in ("unigram", "llama"):
        made = Tokenizer(models.Unigram())
        if kind == "unigram":
            made.normalizer = normalizers.NFKC()
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
            made.decoder = decoders.Metaspace(prepend_scheme="always")
        else:  # the normalizer of Llama 2, which puts a space before one that is there already
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
            made.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
            )
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
    else:
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer(lowercase=kind == "wordpiece-uncased")
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    unknown = None if kind.startswith("bpe") else "<unk>"
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token=unknown)
