"""Which methods of which libraries a variant can ask for, with the options of each under that library's own names.

`calibrates` False: the result comes from the weights alone, whatever calibration rows the library is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from qbench.errors import QbenchError
from qbench.registry import Registry


@dataclass(frozen=True)
class GPTQModelGPTQ:
    """``gptqmodel.quantization.GPTQConfig``; act_group_aware null: the library decides."""

    bits: Literal[2, 3, 4, 8] = 4
    group_size: int = 128
    sym: bool = True
    desc_act: bool = False
    act_group_aware: bool | None = None
    damp_percent: float = 0.05

    def __post_init__(self) -> None:
        if self.desc_act and self.act_group_aware:
            raise QbenchError("gptqmodel: desc_act and act_group_aware exclude each other.")


@dataclass(frozen=True)
class GPTQModelAWQ:
    """``gptqmodel.quantization.AWQConfig``; the library packs it from 16-bit floats only."""

    bits: Literal[4] = 4
    group_size: int = 128
    sym: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise QbenchError(f"gptqmodel awq: group_size is {self.group_size}; allowed: 1 or more.")


WeightScheme = Literal["W4A16", "W4A16_ASYM", "W8A16"]
Scheme = Literal[
    "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W4AFP8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4",
    "MXFP4A16", "MXFP8A16", "MXFP8",
]  # fmt: skip


@dataclass(frozen=True)
class LLMCompressorGPTQ:
    """`GPTQModifier` with a scheme of compressed-tensors; group_size replaces the scheme's own."""

    scheme: Scheme = "W4A16"
    group_size: int | None = None
    actorder: Literal["static", "weight"] | None = "static"
    dampening_frac: float = 0.01
    block_size: int = 128


@dataclass(frozen=True)
class LLMCompressorAWQ:
    """`AWQModifier`, then rounding into the scheme."""

    scheme: WeightScheme = "W4A16_ASYM"
    group_size: int | None = None
    duo_scaling: bool = True
    n_grid: int = 20


@dataclass(frozen=True)
class LLMCompressorSmoothQuant:
    """`SmoothQuantModifier`, then rounding into the scheme."""

    scheme: Scheme = "W8A8"
    smoothing_strength: float = 0.5


@dataclass(frozen=True)
class LLMCompressorRounding:
    """`QuantizationModifier`: plain rounding into the scheme."""

    scheme: Scheme = "FP8_DYNAMIC"
    group_size: int | None = None

    @property
    def calibrates(self) -> bool:
        return self.scheme in ("FP8", "NVFP4")  # static scales of inputs


@dataclass(frozen=True)
class ModelOptGroups:
    """A configuration of groups of `block_size` weights along the row."""

    block_size: int = 128

    @property
    def group_size(self) -> int:
        return self.block_size


@dataclass(frozen=True)
class ModelOptPlain:
    """A configuration as the library has it."""


@dataclass(frozen=True)
class ModelOptRounding(ModelOptPlain):
    """The same, and nothing is measured on text: inputs are not rounded, or a token at a time."""

    calibrates: ClassVar[bool] = False


@dataclass(frozen=True)
class ModelOptRoundedGroups(ModelOptGroups):
    """Groups of weights, rounded plainly."""

    calibrates: ClassVar[bool] = False


@dataclass(frozen=True)
class AutoRoundRTN:
    """Plain rounding: AutoRound with no iterations, its searched start switched off."""

    calibrates: ClassVar[bool] = False

    bits: Literal[2, 3, 4, 8] = 4
    group_size: int = 128
    sym: bool = True


@dataclass(frozen=True)
class AutoRoundSignRound(AutoRoundRTN):
    """Rounding learned block by block with signed gradients."""

    calibrates: ClassVar[bool] = True

    iters: int = 200
    lr: float | None = None


@dataclass(frozen=True)
class BitsAndBytes4Bit:
    """``bitsandbytes.functional.quantize_4bit``: blocks of the flattened weight."""

    calibrates: ClassVar[bool] = False

    blocksize: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = 64
    compress_statistics: bool = False


@dataclass(frozen=True)
class BitsAndBytesInt8:
    """``Linear8bitLt``: int8 rows, int8 tokens, outlier columns of the input apart."""

    calibrates: ClassVar[bool] = False

    threshold: float = 6.0


@dataclass(frozen=True)
class AutoAWQ:
    """``awq.AutoAWQForCausalLM.quantize``."""

    w_bit: Literal[4] = 4
    q_group_size: int = 128
    zero_point: bool = True

    @property
    def group_size(self) -> int:
        return self.q_group_size


@dataclass(frozen=True)
class HQQ:
    """``hqq.core.quantize.Quantizer.quantize`` along the row."""

    calibrates: ClassVar[bool] = False

    nbits: Literal[2, 3, 4, 8] = 4
    group_size: int = 64


@dataclass(frozen=True)
class Library:
    """A library: the package it comes in, the module that runs it, and its methods; the first is the default."""

    name: str
    package: str
    worker: str  # in `qbench.peers`
    methods: Registry
    default: str
    install: str = "pip install 'qbench-workbench[peers]'"
    longest_rows_only: bool = False  # rows shorter than the longest are left out of calibration

    PATH: ClassVar[str] = "qbench.peers.methods"


def _library(name: str, package: str, methods: dict[str, str], **more: Any) -> Library:
    entries = {method: f"{Library.PATH}:{options}" for method, options in methods.items()}
    registry = Registry(f"method of {name}", entries)
    return Library(name, package, name.replace("-", ""), registry, next(iter(methods)), **more)


GPTQMODEL = _library(
    "gptqmodel",
    "gptqmodel",
    {"gptq": "GPTQModelGPTQ", "awq": "GPTQModelAWQ"},
    install="an environment of its own, made as export/README.md says, because it changes torch and transformers",
)
LLMCOMPRESSOR = _library(
    "llmcompressor",
    "llmcompressor",
    {
        "gptq": "LLMCompressorGPTQ",
        "awq": "LLMCompressorAWQ",
        "smoothquant": "LLMCompressorSmoothQuant",
        "rounding": "LLMCompressorRounding",
    },
)
MODELOPT = _library(
    "modelopt",
    "nvidia-modelopt",
    {
        "int4_awq": "ModelOptGroups",
        "int4_blockwise_weight_only": "ModelOptRoundedGroups",
        "int8": "ModelOptPlain",
        "int8_smoothquant": "ModelOptPlain",
        "fp8": "ModelOptPlain",
        "fp8_per_channel_per_token": "ModelOptRounding",
        "nvfp4_weight_only": "ModelOptRounding",
    },
)
AUTO_ROUND = _library(
    "auto-round", "auto-round", {"signround": "AutoRoundSignRound", "rtn": "AutoRoundRTN"}, longest_rows_only=True
)
BITSANDBYTES = _library(
    "bitsandbytes",
    "bitsandbytes",
    {"nf4": "BitsAndBytes4Bit", "fp4": "BitsAndBytes4Bit", "llm-int8": "BitsAndBytesInt8"},
)
AUTOAWQ = _library(
    "autoawq",
    "autoawq",
    {"awq": "AutoAWQ"},
    install="pip install autoawq in an environment of its own: it is archived",
)
HQQ_LIBRARY = _library("hqq", "hqq", {"hqq": "HQQ"})

PEERS = Registry(
    "library",
    {
        "modelopt": f"{Library.PATH}:MODELOPT",
        "gptqmodel": f"{Library.PATH}:GPTQMODEL",
        "autoawq": f"{Library.PATH}:AUTOAWQ",
        "auto-round": f"{Library.PATH}:AUTO_ROUND",
        "llmcompressor": f"{Library.PATH}:LLMCOMPRESSOR",
        "bitsandbytes": f"{Library.PATH}:BITSANDBYTES",
        "hqq": f"{Library.PATH}:HQQ_LIBRARY",
    },
)
