"""Twenty prompts of many kinds: short, longer than several cache blocks, sharing beginnings, chat, code, unicode."""

from __future__ import annotations

from typing import Any

STORY = (
    "The old lighthouse keeper climbed the stairs every evening at the same hour, carrying a lamp that had belonged to "
    "his grandfather. From the gallery he could see the fishing boats come home, one after another, and the long grey "
    "line of the breakwater where the gulls gathered when the weather turned. He had kept a diary for forty years. "
)
TEXTS = [
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7,",
    "A",
    STORY,
    STORY + "One night the lamp would not light, and",
    STORY + "One night the lamp would not light, so",
    STORY * 3 + "On the last page he wrote:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    a, b = 0, 1\n    for",
    "SELECT name, COUNT(*) FROM orders\nGROUP BY",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "Le petit prince habitait une planète à peine plus grande que lui, et il avait besoin d’un ami. Un jour,",
    "日本の首都は東京です。フランスの首都は",
    "Привет! Как тебя зовут? Меня зовут",
    "Weather today: ☀️ 🌧️ ❄️ and tomorrow 😀 it will be",
    "   \n\n\t  spaces and tabs   matter ,  don't they ?\n\n",
]
CHATS = [
    [{"role": "user", "content": "Name three colours."}],
    [{"role": "user", "content": "Write a haiku about the sea. 🌊"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is photosynthesis?"},
        {"role": "assistant", "content": "Plants turn light, water and air into sugar."},
        {"role": "user", "content": "And why are leaves green?"},
    ],
]


def prompt_ids(llm: Any) -> list[list[int]]:
    """The token ids of all twenty, chats in the model's own template. `llm` is a `qbench.LLM`."""
    return [list(llm.tokenizer(text)["input_ids"]) for text in TEXTS] + [llm.chat_prompt(chat) for chat in CHATS]
