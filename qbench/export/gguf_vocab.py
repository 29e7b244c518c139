"""The part of GGUF metadata that describes the tokenizer, from the files transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from qbench.errors import QbenchError
from qbench.models.gguf_tokenizer import (
    BYTE,
    CONTROL,
    END_MARKERS,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from qbench.models.json_file import read_json
from qbench.models.pre_tokenizers import PRE_TOKENIZERS, identify
from qbench.registry import nearest

SPECIAL_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


class Vocabulary:
    """A model folder's tokenizer as GGUF metadata; `notes` says what could not be kept.

    `rows` is the height of the embedding: shorter vocabularies are filled with unused placeholders. `pre_tokenizer`
    names the rule when tokenizer.json holds one that is not known. Raises `QbenchError` when GGUF cannot hold it.
    """

    def __init__(self, folder: Path, config: dict[str, Any], rows: int, pre_tokenizer: str | None) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise QbenchError("The model has no tokenizer.json, which GGUF export reads the vocabulary from.")
        self.notes: list[str] = []
        self.path = path
        self.described = read_json(path)
        self.settings = _optional(folder / "tokenizer_config.json")
        self.named = _optional(folder / "special_tokens_map.json")
        self.generation = _optional(folder / "generation_config.json")
        self.config = config
        model = self.described["model"]
        if model.get("type") != "BPE":
            raise QbenchError(f"tokenizer.json: a {model.get('type')} tokenizer cannot be exported; BPE can.")
        self.sentencepiece = bool(model.get("byte_fallback"))
        self._read_tokens(rows)
        self.metadata = self._metadata(folder, pre_tokenizer)

    def _read_tokens(self, rows: int) -> None:
        by_id = {i: token for token, i in self.described["model"]["vocab"].items()}
        added = {entry["id"]: entry for entry in self.described["added_tokens"]}
        by_id |= {i: entry["content"] for i, entry in added.items()}
        if max(by_id) >= rows:
            raise QbenchError(f"The tokenizer has {max(by_id) + 1} tokens, the embedding only {rows} rows.")
        unknown = self.described["model"].get("unk_token")
        taken = set(by_id.values())
        self.tokens: list[str] = []
        self.types: list[int] = []
        for i in range(rows):
            token = by_id.get(i)
            if token is None:
                token, kind = _placeholder(i, taken), UNUSED
            elif i in added:
                kind = CONTROL if added[i]["special"] else USER_DEFINED
            else:
                kind = NORMAL
            if self.sentencepiece and token == unknown:
                kind = UNKNOWN
            elif self.sentencepiece and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                kind = BYTE
            self.tokens.append(token)
            self.types.append(kind)
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def _metadata(self, folder: Path, pre_tokenizer: str | None) -> dict[str, Any]:
        kind = self._sentencepiece() if self.sentencepiece else self._byte_level(pre_tokenizer)
        special = self._special_ids()
        add_bos, add_eos = self._added_around(special)
        metadata = {
            **kind,
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": np.array(self.types, np.int32),
            **{f"tokenizer.ggml.{SPECIAL_KEYS[name]}_token_id": i for name, i in special.items()},
            "tokenizer.ggml.add_bos_token": add_bos,
            "tokenizer.ggml.add_eos_token": add_eos,
        }
        self._add_other_ends(metadata, special.get("eos"))
        template = self._chat_template(folder)
        if template:
            metadata["tokenizer.chat_template"] = template
        return metadata

    def _byte_level(self, pre_tokenizer: str | None) -> dict[str, Any]:
        if pre_tokenizer is not None and pre_tokenizer not in PRE_TOKENIZERS:
            raise QbenchError(f"Unknown pre-tokenizer {pre_tokenizer!r}. {nearest(pre_tokenizer, PRE_TOKENIZERS)}")
        found = identify(self.described)
        name = pre_tokenizer or found
        if name is None:
            raise QbenchError(
                "tokenizer.json: its pre-tokenizer is none of those that GGUF has a name for and that are known here. "
                f"Give the export a pre_tokenizer to choose one yourself. {nearest('', PRE_TOKENIZERS)}"
            )
        if found is None:
            self.notes.append(f"The pre-tokenizer was given as {name!r}; tokenizer.json holds another rule.")
        merges = self.described["model"]["merges"]
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        }

    def _sentencepiece(self) -> dict[str, Any]:
        """A token's score is the (negative) rank of the first merge that makes it: llama.cpp merges by score."""
        lowest = -float(len(self.described["model"]["merges"]) + 1)
        scores = np.full(len(self.tokens), lowest, np.float32)
        for rank, merge in reversed(list(enumerate(self.described["model"]["merges"]))):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            scores[self.ids[left + right]] = -float(rank)
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.add_space_prefix": self._space_prefix(),
        }

    def _space_prefix(self) -> bool:
        """Whether text gets a space in front. Raises `QbenchError` on a normalization llama.cpp does not know."""
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prepend = {"type": "Prepend", "prepend": SPACE}
        normalizer, rule = self.described.get("normalizer"), self.described.get("pre_tokenizer")
        steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
        if rule is None and steps in ([prepend, replace], [replace]):
            return bool(steps[0] == prepend)
        if rule and rule["type"] == "Metaspace" and normalizer is None and not rule.get("split", True):
            if rule["prepend_scheme"] == "first":
                self.notes.append(
                    "llama.cpp puts a space in front of text after a special token too; the source does not."
                )
            return bool(rule["prepend_scheme"] != "never")
        raise QbenchError(
            "tokenizer.json: its normalizer and pre-tokenizer are not SentencePiece's; cannot be exported."
        )

    def _special_ids(self) -> dict[str, int]:
        found = {}
        for name in SPECIAL_KEYS:
            token = self.settings.get(f"{name}_token") or self.named.get(f"{name}_token")
            text = token["content"] if isinstance(token, dict) else token
            if text is None and name in ("bos", "eos"):
                stated = self.config.get(f"{name}_token_id")
                text = self.tokens[stated] if isinstance(stated, int) else None
            if text is not None:
                if text not in self.ids:
                    raise QbenchError(f"tokenizer_config.json: {name}_token {text!r} is not in the vocabulary.")
                found[name] = self.ids[text]
        return found

    def _added_around(self, special: dict[str, int]) -> tuple[bool, bool]:
        """Whether the tokenizer puts BOS in front and EOS behind, seen from what it does."""
        tokenizer = Tokenizer.from_file(str(self.path))
        bare = tokenizer.encode("a", add_special_tokens=False).ids
        whole = tokenizer.encode("a").ids
        for add_bos in (False, True):
            for add_eos in (False, True):
                front = [special.get("bos")] if add_bos else []
                if whole == [*front, *bare, *([special.get("eos")] if add_eos else [])]:
                    return add_bos, add_eos
        raise QbenchError(f"tokenizer.json: adds special tokens ({whole} for {bare}) that are not one BOS or EOS.")

    def _add_other_ends(self, metadata: dict[str, Any], eos: int | None) -> None:
        """End tokens beyond EOS: llama.cpp knows the usual ones by their text, one more has a key."""
        ends: list[int] = []
        for source in (self.generation, self.config):
            ids = source.get("eos_token_id")
            ends += ids if isinstance(ids, list) else [] if ids is None else [ids]
        for i in ends:
            if not 0 <= i < len(self.tokens):
                raise QbenchError(f"eos_token_id {i} is not a token; allowed: 0 to {len(self.tokens) - 1}.")
        unmarked = [i for i in dict.fromkeys(ends) if i != eos and self.tokens[i] not in END_MARKERS]
        if unmarked:
            metadata["tokenizer.ggml.eot_token_id"] = unmarked[0]
        self.notes += [f"End token {self.tokens[i]!r} is not stored: GGUF has no key for it." for i in unmarked[1:]]

    def _chat_template(self, folder: Path) -> str | None:
        path = folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self.settings.get("chat_template")
        if isinstance(template, list):  # several by name
            template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
        return template


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _placeholder(i: int, taken: set[str]) -> str:
    """A name for a row without a token, unlike every other token."""
    name = f"[PAD{i}]"
    while name in taken:
        name = f"[{name}]"
    taken.add(name)
    return name
