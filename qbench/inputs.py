"""What a run feeds its models: calibration rows, evaluation windows, benchmark prompts; and the reference model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qbench.calibration.data import TextData, load_data
from qbench.calibration.rows import packed_rows, token_stream
from qbench.models.source import ModelSource, open_model
from qbench.recipe import Recipe, Rows

if TYPE_CHECKING:
    from qbench.evaluate.windows import Window


def reference_source(recipe: Recipe) -> ModelSource:
    """The model every variant is made from and compared with, permuted off its grid when the recipe says so."""
    from qbench.models.offgrid import OffGrid

    source = open_model(recipe.model.source)
    return OffGrid(source, recipe.seed) if recipe.model.off_grid else source


@dataclass
class Inputs:
    """Token ids of a recipe's calibration and evaluation text, made when first asked for."""

    recipe: Recipe
    source: ModelSource

    @cached_property
    def tokenizer(self) -> Any:
        from qbench.models.tokenizer import load_tokenizer

        return load_tokenizer(self.source)

    @cached_property
    def calibration(self) -> TextData:
        return load_data(self.recipe.calibration.data, self.recipe.calibration.split)

    @cached_property
    def calibration_rows(self) -> list[list[int]]:
        wanted = self.recipe.calibration
        return packed_rows(self.calibration, self.tokenizer, wanted.rows, wanted.seq_len)

    @property
    def held_out(self) -> Rows:
        """Where evaluation windows and benchmark prompts are cut from."""
        return self.recipe.evaluate or self.recipe.calibration

    @cached_property
    def evaluation(self) -> TextData:
        return load_data(self.held_out.data, self.held_out.split)

    @cached_property
    def evaluation_tokens(self) -> list[int]:
        return token_stream(self.evaluation, self.tokenizer)

    @cached_property
    def bos(self) -> int | None:
        """The id that the tokenizer's own default puts in front of a text, if it does."""
        ids = self.tokenizer("a")["input_ids"]
        first: int | None = ids[0] if ids and ids[0] == self.tokenizer.bos_token_id else None
        return first

    @cached_property
    def windows(self) -> list[Window]:
        """At most `evaluate.rows` windows."""
        from qbench.evaluate.windows import windows

        assert self.recipe.evaluate is not None
        wanted = self.recipe.evaluate
        return windows(self.evaluation_tokens, wanted.seq_len, bos=self.bos)[: wanted.rows]

    def warnings(self) -> list[str]:
        """Where the text gives less than the recipe asks for. Raises `QbenchError` where it gives too little to run."""
        from qbench.benchmark.closed_loop import Workload

        if (load := self.recipe.benchmark) is not None:
            Workload(load.requests, load.prompt_tokens, load.output_tokens).prompts(self.evaluation_tokens, 1)
        found = []
        wanted = self.recipe.calibration
        tokens = sum(map(len, self.calibration_rows))
        if tokens < wanted.rows * wanted.seq_len:
            found.append(
                f"calibration: {wanted.data} gives {tokens} tokens; {wanted.rows} rows of {wanted.seq_len} were asked "
                "for. All of it is used."
            )
        hidden = int(self.source.config.get("hidden_size", 0))
        if tokens < hidden:
            found.append(f"calibration: {tokens} tokens are few for layers of {hidden} inputs; expect a weak result.")
        if self.recipe.evaluate is not None and len(self.windows) < self.recipe.evaluate.rows:
            asked = self.recipe.evaluate.rows
            found.append(f"evaluate: the text gives {len(self.windows)} windows; {asked} were asked for.")
        return found
