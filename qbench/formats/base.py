"""How a weight is represented: the `Format` contract and `QuantizedTensor`.

A format is a frozen dataclass of a few plain fields. Its methods work on float32 columns of a ``[out, in]``
weight; ``fit`` chooses parameters for a block of columns that share them, ``encode`` and ``decode`` turn columns
into codes and back. Because the three are apart, a solver such as GPTQ can drive any format column by column.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qbench.errors import QbenchError
from qbench.lazy import lazy_import
from qbench.registry import Registry

if TYPE_CHECKING:
    import torch

    from qbench.formats.activation import ActivationFormat
else:
    torch = lazy_import("torch")

Params = dict[str, "torch.Tensor"]
Fit = Callable[["torch.Tensor", Params, "torch.Tensor | None"], Params]  # as `Format.fit`: columns, shared, importance


class Format(ABC):
    """Base of every weight format. Subclasses are frozen dataclasses whose fields are plain YAML values."""

    name: ClassVar[str]
    any_order: ClassVar[bool] = True  # a block's columns may come from anywhere in the row (g_idx)

    def for_width(self, in_features: int) -> Format | None:
        """The format to use for rows of `in_features`: itself, another where it cannot, None where none can."""
        return self

    def refusal(self, in_features: int) -> str | None:
        """Why rows of `in_features` should not be stored with the fields as they are; None when they may."""
        return None

    @property
    def weighs_importance(self) -> bool:
        """Whether `fit` searches, so that the importance of columns decides something."""
        return False

    @property
    def rows_share(self) -> bool:
        """Whether output rows share parameters, so that they cannot be found row by row."""
        return False

    @property
    def holds_zero(self) -> bool:
        """Whether a weight that is exactly 0 is decoded as exactly 0, whatever its neighbours are."""
        return True

    @abstractmethod
    def block_size(self, in_features: int) -> int:
        """Number of neighbouring input columns that share parameters (the whole row: `in_features`)."""

    def shared(self, weight: torch.Tensor) -> Params:
        """What all blocks of a weight have in common (a scale of the scales), found before any block is fitted."""
        return {}

    def shared_among(self, weights: Sequence[torch.Tensor]) -> list[Params]:
        """`shared` for each of `weights` that read one tensor, which an engine may multiply as one matrix."""
        return [self.shared(weight) for weight in weights]

    @abstractmethod
    def fit(self, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None = None) -> Params:
        """Parameters for one block of float32 `columns` ``[out, n]``: each tensor ``[out, k]``, k = 1 for most formats.

        `importance` ``[out, n]`` (or ``[1, n]``) >= 0 weighs the squared error of each weight, for formats that search.
        """

    def spread(self, params: Params, start: int, stop: int) -> Params:
        """The parameters of a block's columns ``start..stop``, to broadcast against ``[out, stop - start]``.

        The same for every column unless blocks have sub-blocks.
        """
        return params

    @abstractmethod
    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        """Codes ``[out, n]`` (one a weight, unpacked) of float32 `columns` ``[out, n]`` under spread `params`."""

    @abstractmethod
    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        """Float32 columns ``[out, n]`` that `codes` stand for under spread `params`."""

    @abstractmethod
    def pack(self, codes: torch.Tensor, params: Params, g_idx: torch.Tensor | None = None) -> QuantizedTensor:
        """The stored form of a whole weight: `codes` ``[out, in]``, fitted `params` side by side ``[out, blocks * k]``.

        `g_idx` (int32 ``[in]``) says which block each column's parameters are in, when it is not column // block.
        """

    @abstractmethod
    def unpack(self, parts: Params, shape: tuple[int, int]) -> tuple[torch.Tensor, Params]:
        """Unpacked codes ``[out, in]`` and what `decode` needs, a value a block, a column (``[out, in]``) or a row."""

    def stored_bytes(self, shape: tuple[int, int]) -> int | None:
        """Bytes of a weight ``[out, in]``, where they do not grow row by row; None where storing two rows tells."""
        return None

    def blocks(self, in_features: int) -> int:
        return -(-in_features // self.block_size(in_features))

    def quantize(
        self,
        weight: torch.Tensor,
        importance: torch.Tensor | None = None,
        fit: Fit | None = None,
        shared: Params | None = None,
    ) -> QuantizedTensor:
        """Nearest codes for a ``[out, in]`` weight; a last partial block gets its own parameters.

        `importance` ``[in]`` >= 0 weighs the squared error of each input column, for formats that search. `fit` is a
        solver's way of finding parameters, where it has one of its own. `shared` replaces the weight's own.
        """
        fit = fit or self.fit
        weight = weight.float()
        width = weight.shape[1]
        block = self.block_size(width)
        shared = self.shared(weight) if shared is None else shared
        codes, params = [], []
        for start, stop in runs_of_blocks(width, block):
            n = min(block, stop - start)
            part = weight[:, start:stop].reshape(-1, n)  # [out * blocks_in_run, n]
            each = None
            if importance is not None:
                each = importance[start:stop].expand(weight.shape[0], -1).reshape(-1, n)
            found = fit(part, repeated(shared, part.shape[0] // weight.shape[0]), each)
            codes.append(self.encode(part, self.spread(found, 0, n)).reshape(weight.shape[0], stop - start))
            params.append({k: v.reshape(weight.shape[0], -1) for k, v in found.items()})
        return self.pack(torch.cat(codes, 1), {k: torch.cat([p[k] for p in params], 1) for k in params[0]})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON: ``{"name": ..., **fields}``."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


def block_absmax(columns: torch.Tensor, name: str) -> torch.Tensor:
    """The largest magnitude of each row ``[out, 1]``. Raises `QbenchError`, naming the format, if one is not finite."""
    absmax = columns.abs().amax(1, keepdim=True)
    if not bool(torch.isfinite(absmax).all()):
        raise QbenchError(f"format {name}: a weight is NaN or infinite.")
    return absmax


def group_refusal(name: str, group_size: int | None, in_features: int) -> str | None:
    """Why groups of `group_size` (None: none) are too wide for rows of `in_features`; None when they are not."""
    if group_size is None or group_size <= in_features:
        return None
    return f"format {name}: group_size is {group_size}, rows are {in_features} wide; allowed: 2 to {in_features}"


def repeated(shared: Params, times: int) -> Params:
    """Parameters of rows repeated for each of their blocks; those of the whole tensor ``[1, 1]`` stay."""
    return {k: v if v.shape[0] == 1 else v.repeat_interleave(times, 0) for k, v in shared.items()}


def runs_of_blocks(width: int, block: int) -> list[tuple[int, int]]:
    """The whole blocks as one run, then the partial one, so that each run can be reshaped."""
    whole = width // block * block
    return [run for run in ((0, whole), (whole, width)) if run[0] < run[1]]


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight in a format: `shape` is the logical ``[out, in]``; `parts` are its stored tensors.

    `activation` says how the linear's input is rounded when it runs (None: it is not); a static scale is the part
    ``input_scale``.
    """

    format: Format
    shape: tuple[int, int]
    parts: Params
    activation: ActivationFormat | None = None

    def dequantize(self) -> torch.Tensor:
        """The float32 ``[out, in]`` weight that the stored parts stand for."""
        codes, params = self.format.unpack(self.parts, self.shape)
        return self.format.decode(codes, {k: self.expand(v) for k, v in params.items()})

    def expand(self, param: torch.Tensor) -> torch.Tensor:
        """A parameter ``[out, blocks]`` repeated to one value a column; ``[out, 1]`` and ``[out, in]`` stay."""
        if param.shape[1] in (1, self.shape[1]):
            return param
        g_idx = self.parts.get("g_idx")
        if g_idx is not None:
            return param[:, g_idx.long()]
        return param.repeat_interleave(self.format.block_size(self.shape[1]), 1)[:, : self.shape[1]]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    @property
    def bits_per_weight(self) -> float:
        """True stored bits over logical weights, scales and zero points included."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])


FORMATS = Registry(
    "format",
    {
        "int": "qbench.formats.integer:Integer",
        "nf4": "qbench.formats.codebook:NF4",
        "fp4": "qbench.formats.codebook:FP4",
        "fp8": "qbench.formats.float8:FP8",
        "q4_0": "qbench.formats.gguf_blocks:Q4_0",
        "q4_1": "qbench.formats.gguf_blocks:Q4_1",
        "q5_0": "qbench.formats.gguf_blocks:Q5_0",
        "q5_1": "qbench.formats.gguf_blocks:Q5_1",
        "q8_0": "qbench.formats.gguf_blocks:Q8_0",
        "q2_k": "qbench.formats.kquants:Q2_K",
        "q3_k": "qbench.formats.kquants:Q3_K",
        "q4_k": "qbench.formats.kquants:Q4_K",
        "q5_k": "qbench.formats.kquants:Q5_K",
        "q6_k": "qbench.formats.kquants:Q6_K",
        "mxfp8": "qbench.formats.mx:MXFP8",
        "mxfp4": "qbench.formats.mx:MXFP4",
        "nvfp4": "qbench.formats.nvfp4:NVFP4",
    },
)


def format_from_dict(fields: dict[str, Any]) -> Format:
    """The inverse of `Format.to_dict`. Raises `QbenchError` on an unknown name, key or value."""
    from qbench.formats.dense import Dense
    from qbench.formats.parse import build

    if fields == Dense().to_dict():  # no recipe can ask for it, so it is in no registry
        return Dense()
    format: Format = build(FORMATS, fields)
    return format
