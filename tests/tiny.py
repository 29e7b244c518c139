"""Tiny random models for tests: every part real (config, weights, byte-level tokenizer), nothing downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """256 bytes, three special tokens, and a few merges up to `vocab_size`; identical in every call."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = specials + alphabet
    merges = []
    letters = "etaoinshrdlu"
    pairs = [(a, b) for a in letters for b in letters]
    for a, b in pairs[: vocab_size - len(tokens)]:
        merges.append((a, b))
        tokens.append(a + b)
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_tiny_llama(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Writes a random Llama in Hugging Face layout to `folder` and returns it.

    Defaults: hidden 64, 3 layers, 4 query / 2 key-value heads, MLP 128, vocabulary 300, untied head.
    """
    fields: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "initializer_range": 0.2,
    }
    config = LlamaConfig(**(fields | overrides))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder)
    byte_tokenizer(min(config.vocab_size, 300)).save_pretrained(folder)
    return folder
