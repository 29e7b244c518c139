"""The model's own code without its weights: built by transformers on the meta device, filled block by block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qbench.compress.experts import split_experts
from qbench.errors import QbenchError
from qbench.models.source import ModelSource


class PassEnded(Exception):
    """Ends a forward pass as soon as what was wanted of it is there."""


@dataclass
class BlockCall:
    """What a decoder block is called with besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def rows(self, rows: torch.Tensor | slice, batch: int) -> BlockCall:
        """The call for some of the `batch` rows it was noted with: of what has a value a row, those are taken."""

        def cut(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(cut, value))
            has_rows = isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == batch
            return value[rows] if has_rows else value

        return BlockCall(tuple(map(cut, self.args)), {key: cut(value) for key, value in self.kwargs.items()})


class Skeleton:
    """A causal language model whose parameters are on the meta device until `filled`."""

    def __init__(self, source: ModelSource, device: torch.device) -> None:
        import transformers
        from accelerate import init_empty_weights
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

        self.source = source
        self.device = device
        fields = {key: value for key, value in source.config.items() if key != "quantization_config"}
        if fields.get("model_type") not in CONFIG_MAPPING:
            raise QbenchError(
                f"{source.location}: config.json: model_type is {fields.get('model_type')!r}, which transformers "
                f"{transformers.__version__} does not know."
            )
        try:
            config = AutoConfig.for_model(**fields)
            config.use_cache = False
            with init_empty_weights(include_buffers=False):
                self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
                split_experts(self.model, config.model_type)
        except Exception as error:  # whatever a family's own code says to values that it cannot be built with
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise QbenchError(
                f"{source.location}: transformers cannot build the model that config.json describes ({reason})."
            ) from error
        self.model.eval()
        self.block_prefix, self.blocks = _find_blocks(self.model, config)
        for name, buffer in list(self.model.named_buffers()):
            owner, _, key = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[key] = buffer.to(device)

    def block_name(self, index: int) -> str:
        """Dotted name of block `index`: ``model.layers.3``."""
        return f"{self.block_prefix}.{index}"

    def linear(self, name: str) -> nn.Linear:
        """The linear of that name. Raises `QbenchError` when the model's code has none."""
        try:
            module = self.model.get_submodule(name)
        except AttributeError:
            raise QbenchError(f"{name}: the model's code has no such module.") from None
        if not isinstance(module, nn.Linear):
            raise QbenchError(f"{name}: a {type(module).__name__}, not a linear layer; it cannot be compressed.")
        return module

    def load(self, name: str) -> torch.Tensor:
        """A source tensor in float32 on the device; a quantized one is dequantized."""
        if name not in self.source.tensors:
            raise QbenchError(f"{self.source.location}: tensor {name} is missing.")
        return self.source.load_dense(name).to(self.device, torch.float32)

    @contextmanager
    def filled(self, module_name: str) -> Iterator[nn.Module]:
        """The module with its weights loaded; they are dropped when the block ends."""
        module = self.model.get_submodule(module_name)
        for name, parameter in module.named_parameters():
            found = self.source.tensors.get(f"{module_name}.{name}")
            if found is not None and found.shape != tuple(parameter.shape):
                raise QbenchError(
                    f"{self.source.location}: {module_name}.{name} has shape {list(found.shape)}, "
                    f"config.json asks for {list(parameter.shape)}."
                )
        state = {name: self.load(f"{module_name}.{name}") for name, _ in module.named_parameters()}
        module.load_state_dict(state, strict=False, assign=True)
        try:
            yield module
        finally:
            for part in module.modules():
                for key, parameter in part._parameters.items():
                    if parameter is not None:
                        part._parameters[key] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    @torch.inference_mode()
    def embed(self, batches: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[list[BlockCall]]]:
        """The first block's hidden states for token ids ``[rows, n]``, and how each block is called for each batch."""
        hidden, calls = [], []
        with self._outside_filled():
            for ids in batches:
                seen: list[tuple[torch.Tensor, BlockCall]] = []
                with self._replaced_blocks(seen):
                    self._run(ids)
                hidden.append(seen[0][0])
                calls.append([call for _, call in seen])
        return hidden, calls

    @torch.inference_mode()
    def head_inputs(self, batches: list[torch.Tensor], hidden: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """What the head sees when the last block gave `hidden`."""
        head = self.model.get_output_embeddings()
        with self._outside_filled(with_norm=True):
            for ids, last in zip(batches, hidden, strict=True):
                seen: list[torch.Tensor] = []
                hook = head.register_forward_pre_hook(lambda _, args, seen=seen: _stop_with(seen, args[0]))
                with self._replaced_blocks([], result=last):
                    self._run(ids)
                hook.remove()
                yield seen[0]

    def run_block(self, block: nn.Module, hidden: torch.Tensor, call: BlockCall) -> torch.Tensor:
        """The block's output hidden states."""
        output = block(hidden, *call.args, **call.kwargs)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def _run(self, ids: torch.Tensor) -> None:
        try:
            self.model(input_ids=ids.to(self.device), use_cache=False)
        except PassEnded:
            pass

    @contextmanager
    def _outside_filled(self, with_norm: bool = False) -> Iterator[None]:
        """Weights of everything the model applies before the blocks (and after them, but for the head)."""
        blocks = self.block_prefix + "."
        head = _name_of(self.model, self.model.get_output_embeddings())
        outside = {
            name.rpartition(".")[0]
            for name, _ in self.model.named_parameters()
            if not name.startswith(blocks) and name.rpartition(".")[0] != head
        }
        if not with_norm:
            outside = {_name_of(self.model, self.model.get_input_embeddings())}
        with ExitStack() as stack:
            for name in sorted(outside):
                stack.enter_context(self.filled(name))
            yield

    @contextmanager
    def _replaced_blocks(
        self, seen: list[tuple[torch.Tensor, BlockCall]], result: torch.Tensor | None = None
    ) -> Iterator[None]:
        """Blocks that do nothing but note how they are called; without a `result` the last one ends the pass."""
        originals = list(self.blocks)
        last = len(originals) - 1
        for index, original in enumerate(originals):
            self.blocks[index] = _Recorder(original, seen, result, stop=result is None and index == last)
        try:
            yield
        finally:
            for index, original in enumerate(originals):
                self.blocks[index] = original


class _Recorder(nn.Module):
    def __init__(self, original: nn.Module, seen: list[Any], result: torch.Tensor | None, *, stop: bool) -> None:
        super().__init__()
        self._original = [original]  # in a list, so that its parameters are not this module's
        self._seen, self._result, self._stop = seen, result, stop

    def __getattr__(self, name: str) -> Any:
        """What the model asks of its blocks (``attention_type``, ...)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"][0], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._seen.append((hidden, BlockCall(args, kwargs)))
        if self._stop:
            raise PassEnded
        return hidden if self._result is None else self._result


def _stop_with(seen: list[torch.Tensor], value: torch.Tensor) -> None:
    seen.append(value)
    raise PassEnded


def _name_of(model: nn.Module, module: nn.Module) -> str:
    found: str = next(name for name, candidate in model.named_modules() if candidate is module)
    return found


def _find_blocks(model: nn.Module, config: Any) -> tuple[str, nn.ModuleList]:
    """The list of decoder blocks: the module list as long as the config says the model is deep."""
    depth = config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, module
    raise QbenchError(f"{type(model).__name__}: no list of {depth} decoder blocks found in its code.")
