"""The tokenizer, chat template and generation settings inside a GGUF file, as the files transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from qbench.errors import QbenchError
from qbench.models.gguf_file import GGUFFile
from qbench.models.pre_tokenizers import PRE_TOKENIZERS
from qbench.registry import nearest
from qbench.resources import written_whole

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
END_MARKERS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"}
SPACE = "\u2581"  # how SentencePiece writes a space


class GGUFTokenizer:
    """Reads ``tokenizer.*`` metadata. Raises `QbenchError` when the tokenizer is of a kind that is not known."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.kind = file.get("tokenizer.ggml.model", str)
        if self.kind not in ("gpt2", "llama"):
            raise self._fail(
                f"tokenizer model {self.kind!r} cannot be read; allowed: gpt2 (BPE), llama (SentencePiece)"
            )
        self.tokens: list[str] = file.get("tokenizer.ggml.tokens", list)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise self._fail("tokenizer.ggml.tokens holds a token twice")
        types = file.get("tokenizer.ggml.token_type", np.ndarray, np.full(len(self.tokens), NORMAL))
        if len(types) != len(self.tokens):
            raise self._fail(f"{len(types)} token types for {len(self.tokens)} tokens")
        self.types: list[int] = types.tolist()
        self.special = {
            name: self._token_id(key)
            for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
        }
        if self.kind == "gpt2":
            pre = file.get("tokenizer.ggml.pre", str)
            if pre not in PRE_TOKENIZERS:
                raise self._fail(f"pre-tokenizer {pre!r} is not known. {nearest(pre, PRE_TOKENIZERS)}")
            self.pre_tokenizer = PRE_TOKENIZERS[pre]
        spm = self.kind == "llama"
        self.add_bos = file.get("tokenizer.ggml.add_bos_token", bool, spm or self.pre_tokenizer.add_bos)
        self.add_eos = file.get("tokenizer.ggml.add_eos_token", bool, False)
        self.chat_template: str = file.get("tokenizer.chat_template", str, "")

    def _fail(self, what: str) -> QbenchError:
        return QbenchError(f"{self.file.paths[0]}: {what}")

    def _token_id(self, key: str) -> int | None:
        name = f"tokenizer.ggml.{key}_token_id"
        if name not in self.file.metadata:
            return None
        found: int = self.file.get(name, int)
        if not 0 <= found < len(self.tokens):
            raise self._fail(f"{name} is {found}; the vocabulary has {len(self.tokens)} tokens")
        return found

    @property
    def end_ids(self) -> list[int]:
        """Every id that ends a text: the file's own (eos, end of turn, end of message), then control tokens that
        are end markers by their text, which is llama.cpp's rule too."""
        stated = [self._token_id(key) for key in ("eos", "eot", "eom")]
        marked = [i for i, t in enumerate(self.tokens) if t in END_MARKERS and self.types[i] == CONTROL]
        return list(dict.fromkeys([i for i in stated if i is not None] + marked))

    def tokenizer_json(self) -> dict[str, Any]:
        """The content of tokenizer.json."""
        described = self._byte_level_bpe() if self.kind == "gpt2" else self._sentencepiece()
        added = [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": self.types[i] != USER_DEFINED,
            }
            for i, token in enumerate(self.tokens)
            if self.types[i] in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            **described,
            "post_processor": self._template(),
        }

    def _model(self, merges: list[list[str]], **settings: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
        }
        fields |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **settings}
        return {"type": "BPE", **fields, "vocab": self.ids, "merges": merges}

    def _byte_level_bpe(self) -> dict[str, Any]:
        merges = []
        for line in self.file.get("tokenizer.ggml.merges", list):
            left, _, right = str(line).partition(" ")
            if not {left, right, left + right} <= self.ids.keys():
                raise self._fail(f"merge {line!r} is not of two tokens into a third")
            merges.append([left, right])
        byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        return {
            "normalizer": self.pre_tokenizer.normalizer,
            "pre_tokenizer": self.pre_tokenizer.rule,
            "decoder": byte_level,
            "model": self._model(merges, ignore_merges=self.pre_tokenizer.ignore_merges),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        """SentencePiece BPE: pairs are merged by the score of what they make, the highest first."""
        prefix = self.file.get("tokenizer.ggml.add_space_prefix", bool, True)
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
        normalizers = [replace]
        if prefix:
            normalizers = [{"type": "Prepend", "prepend": SPACE}, replace]
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self.special["unk"]
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._model(
                self._merges_from_scores(),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            ),
        }

    def _merges_from_scores(self) -> list[list[str]]:
        scores = self.file.get("tokenizer.ggml.scores", np.ndarray)
        if len(scores) != len(self.tokens):
            raise self._fail(f"{len(scores)} token scores for {len(self.tokens)} tokens")
        mergeable = {t for t, kind in zip(self.tokens, self.types, strict=True) if kind in (NORMAL, USER_DEFINED)}
        merges = []
        for token in sorted(mergeable, key=lambda t: (-scores[self.ids[t]], self.ids[t])):
            pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            merges += [[left, right] for left, right in pairs if left in mergeable and right in mergeable]
        return merges

    def _template(self) -> dict[str, Any]:
        """Adds BOS in front and EOS behind, as the file says; exactly one of each."""
        before = [self.special["bos"]] if self.add_bos and self.special["bos"] is not None else []
        after = [self.special["eos"]] if self.add_eos and self.special["eos"] is not None else []

        def pieces(sequence: str, type_id: int) -> list[dict[str, Any]]:
            text: dict[str, Any] = {"Sequence": {"id": sequence, "type_id": type_id}}
            around = [
                [{"SpecialToken": {"id": self.tokens[i], "type_id": type_id}} for i in ids] for ids in (before, after)
            ]
            return [*around[0], text, *around[1]]

        specials = {
            self.tokens[i]: {"id": self.tokens[i], "ids": [i], "tokens": [self.tokens[i]]} for i in before + after
        }
        return {
            "type": "TemplateProcessing",
            "single": pieces("A", 0),
            "pair": pieces("A", 0) + pieces("B", 1),
            "special_tokens": specials,
        }

    def write(self, folder: Path) -> list[str]:
        """Writes tokenizer.json, tokenizer_config.json and generation_config.json; returns their names."""
        texts = {f"{name}_token": self.tokens[i] for name, i in self.special.items() if i is not None}
        ids = {f"{name}_token_id": self.special[name] for name in ("bos", "pad") if self.special[name] is not None}
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.file.get(f"{self.file.metadata['general.architecture']}.context_length", int),
            "clean_up_tokenization_spaces": False,
            **texts,
        }
        if self.chat_template:
            config["chat_template"] = self.chat_template
        ends = self.end_ids
        generation = {**ids, **({"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {})}
        files = {
            "tokenizer.json": self.tokenizer_json(),
            "tokenizer_config.json": config,
            "generation_config.json": generation,
        }
        for name, content in files.items():
            with written_whole(folder / name) as path:
                indent = None if name == "tokenizer.json" else 2  # a long file: unindented is written much faster
                path.write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
        return list(files)
