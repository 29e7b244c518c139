"""The pre-tokenizers that GGUF names by a word, as the ``tokenizers`` library describes them.

A byte-level BPE vocabulary means nothing without the rule that cuts text into words first. GGUF stores only the
rule's name (``tokenizer.ggml.pre``); tokenizer.json stores the rule itself. This table goes both ways; a rule that
is not in it is never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Rule = dict[str, Any]

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    f"(?i:{_CONTRACTIONS})"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# llama.cpp tells upper case from lower only in ASCII here, so it cuts other scripts elsewhere than this rule does.
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> Rule:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> Rule:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*rules: Rule) -> Rule:
    return {"type": "Sequence", "pretokenizers": list(rules)}


@dataclass(frozen=True)
class PreTokenizer:
    """One named rule with the settings that come with its name."""

    rule: Rule  # tokenizer.json's "pre_tokenizer"
    normalizer: Rule | None = None  # tokenizer.json's "normalizer"
    ignore_merges: bool = False  # a word that is a token whole is never built from merges
    add_bos: bool = False  # when the file does not say


_SMOLLM = PreTokenizer(_sequence({"type": "Digits", "individual_digits": True}, _byte_level(True)))
_LLAMA_BPE = PreTokenizer(_sequence(_split(_LLAMA3), _byte_level(False)), ignore_merges=True, add_bos=True)
_GPT_2 = PreTokenizer(_byte_level(True))

PRE_TOKENIZERS = {
    "gpt-2": _GPT_2,
    "olmo": _GPT_2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": PreTokenizer(_sequence(_split(_QWEN2), _byte_level(False)), normalizer={"type": "NFC"}),
    "tekken": PreTokenizer(_sequence(_split(_TEKKEN), _byte_level(False)), ignore_merges=True, add_bos=True),
    "default": PreTokenizer(
        _sequence(
            _split(r"[\p{P}\$\+<=>\^~\|]+"), _split(_GPT2), _split(r"\p{N}+"), _split("[0-9][0-9][0-9]"),
            _byte_level(False),
        )
    ),
}  # fmt: skip


def _canonical(rule: Any) -> Any:
    """A rule without the settings that do not change which tokens come out."""
    if isinstance(rule, list):
        return [_canonical(item) for item in rule]
    if isinstance(rule, dict):
        return {key: _canonical(value) for key, value in rule.items() if key != "trim_offsets"}
    return rule


def identify(tokenizer: dict[str, Any]) -> str | None:
    """The GGUF name of the rule in a tokenizer.json, or None when it is none of the known ones.

    A missing NFC normalizer is accepted: llama.cpp itself never applies one.
    """
    for name, known in PRE_TOKENIZERS.items():
        if (
            _canonical(tokenizer.get("pre_tokenizer")) == _canonical(known.rule)
            and tokenizer.get("normalizer") in (known.normalizer, None)
            and bool(tokenizer["model"].get("ignore_merges", False)) == known.ignore_merges
        ):
            return name
    return None
