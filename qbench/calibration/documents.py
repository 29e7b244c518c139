"""One document of a data set: a text, or a conversation (a list of messages)."""

from __future__ import annotations

from typing import Any

from qbench.errors import QbenchError

Message = dict[str, str]  # {"role": ..., "content": ...}
Document = str | list[Message]

TEXT, CHAT = "text", "messages"  # the columns looked for when none is named


def as_document(value: Any, where: str) -> Document:
    """`value` of a data set's row as a document; `where` names file, row and column.

    Raises `QbenchError` when it is neither a text nor a list of ``{"role": text, "content": text}``.
    """
    if isinstance(value, str):
        return _unicode(value, where)
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return [{key: _unicode(message[key], where) for key in ("role", "content")} for message in value]
    raise QbenchError(
        f'{where}: found {_short(value)}; expected a text, or messages [{{"role": ..., "content": ...}}, ...].'
    )


def column_of(columns: list[str], wanted: str | None, where: str) -> str:
    """The column that holds the documents: the one that is `wanted`, else `messages`, else `text`.

    Raises `QbenchError` naming the columns there are.
    """
    found = [name for name in ([wanted] if wanted is not None else [CHAT, TEXT]) if name in columns]
    if not found:
        asked = repr(wanted) if wanted is not None else f"{TEXT!r} or {CHAT!r}"
        raise QbenchError(f"{where}: no column {asked}; found {', '.join(map(repr, columns)) or 'none'}.")
    return found[0]


def is_blank(document: Document) -> bool:
    """Whether nothing can be learned from it."""
    return not document.strip() if isinstance(document, str) else not any(m["content"].strip() for m in document)


def _unicode(text: str, where: str) -> str:
    """`text`, unless it holds half of a surrogate pair, which JSON can escape and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QbenchError(f"{where}: no Unicode text: {error.reason} (character {error.start}).") from error
    return text


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
