"""Named starting points. A preset is plain data: a format, a solver, perhaps a transform, pruning or an activation
format; a recipe may override any field of them."""

from __future__ import annotations

from typing import Any

from qbench.errors import QbenchError
from qbench.formats.activation import ACTIVATIONS
from qbench.formats.base import FORMATS
from qbench.formats.parse import build
from qbench.gguf_mixes import MIXES
from qbench.solvers.base import SOLVERS
from qbench.transforms.base import TRANSFORMS
from qbench.transforms.prune import PRUNERS

_GROUPED_INT4 = {
    "name": "int",
    "bits": 4,
    "granularity": "group",
    "group_size": 128,
    "symmetric": True,
    "full_range": True,
    "scale_dtype": "float16",
}
_CHANNEL_INT8 = {"name": "int", "bits": 8, "granularity": "channel", "scale_dtype": "float32"}

PRESETS: dict[str, dict[str, Any]] = {
    "absmax-int8": {
        "description": "8-bit integers, one scale a row: the largest magnitude becomes 127",
        "format": _CHANNEL_INT8 | {"symmetric": True, "full_range": False},
        "solver": {"name": "nearest"},
    },
    "zeropoint-int8": {
        "description": "8-bit integers, a scale and a zero point a row: the row's whole range is used",
        "format": _CHANNEL_INT8 | {"symmetric": False},
        "solver": {"name": "nearest"},
    },
    "nf4": {
        "description": "4-bit codebook of normal quantiles, one absmax per 64 weights",
        "format": {"name": "nf4", "group_size": 64},
        "solver": {"name": "nearest"},
    },
    "fp4": {
        "description": "4-bit floats in bitsandbytes' numbering, one absmax per 64 weights",
        "format": {"name": "fp4", "group_size": 64},
        "solver": {"name": "nearest"},
    },
    "llm-int8": {
        "description": "8-bit integer weights and inputs; input columns with values of 6 or more stay as they are",
        "format": _CHANNEL_INT8 | {"symmetric": True, "full_range": False},
        "solver": {"name": "nearest"},
        "activation": {"name": "llm-int8", "threshold": 6.0},
    },
    "w8a8": {
        "description": "8-bit integer weights, one scale a row, and inputs, one scale a token",
        "format": _CHANNEL_INT8 | {"symmetric": True, "full_range": False},
        "solver": {"name": "nearest"},
        "activation": {"name": "int8", "granularity": "token"},
    },
    "fp8": {
        "description": "8-bit floating point E4M3 weights, one scale a row, and inputs, one scale a token",
        "format": {"name": "fp8", "granularity": "channel"},
        "solver": {"name": "nearest"},
        "activation": {"name": "fp8", "granularity": "token"},
    },
    "fp8-static": {
        "description": "8-bit floating point E4M3 weights and inputs, one scale each, that of the inputs calibrated",
        "format": {"name": "fp8", "granularity": "tensor"},
        "solver": {"name": "nearest"},
        "activation": {"name": "fp8", "granularity": "tensor"},
    },
    "fp8-block": {
        "description": "8-bit floating point E4M3, a scale per 128 x 128 weights and per 128 values of each token",
        "format": {"name": "fp8", "granularity": "block"},
        "solver": {"name": "nearest"},
        "activation": {"name": "fp8", "granularity": "group"},
    },
    "fp8-w8a16": {
        "description": "8-bit floating point E4M3 weights, one scale a row; inputs as they are",
        "format": {"name": "fp8", "granularity": "channel"},
        "solver": {"name": "nearest"},
    },
    "mxfp8": {
        "description": "8-bit floating point E4M3, a power of two per 32 weights and per 32 values of each token",
        "format": {"name": "mxfp8"},
        "solver": {"name": "nearest"},
        "activation": {"name": "mxfp8"},
    },
    "mxfp8-w8a16": {
        "description": "8-bit floating point E4M3 weights, a power of two per 32; inputs as they are",
        "format": {"name": "mxfp8"},
        "solver": {"name": "nearest"},
    },
    "mxfp4": {
        "description": "4-bit floating point E2M1, a power of two per 32 weights",
        "format": {"name": "mxfp4"},
        "solver": {"name": "nearest"},
    },
    "nvfp4": {
        "description": "4-bit floating point E2M1 weights and inputs, an 8-bit scale per 16 and one for the tensor",
        "format": {"name": "nvfp4"},
        "solver": {"name": "nearest"},
        "activation": {"name": "nvfp4"},
    },
    "nvfp4-w4a16": {
        "description": "4-bit floating point E2M1, an 8-bit scale per 16 weights and one for the tensor; weights only",
        "format": {"name": "nvfp4"},
        "solver": {"name": "nearest"},
    },
    **{
        name: {
            "description": f"GGUF's {name.upper()}, the bytes that llama.cpp's quantizer makes, every linear alike",
            "format": {"name": name},
            "solver": {"name": "nearest"},
        }
        for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
    },
    **{
        name: {
            "description": f"llama.cpp's mix {name.upper()}: {name[:4].upper()}, and more bits where its rules say so",
            "format": {"name": name[:4]},
            "solver": {"name": "nearest"},
            "mix": name,
        }
        for name in MIXES
    },
    "rtn": {
        "description": "4-bit integers in groups of 128, each weight rounded to the nearest code",
        "format": _GROUPED_INT4,
        "solver": {"name": "nearest"},
    },
    "hqq": {
        "description": "4-bit integers in groups of 64, float zero points fitted to the weights alone",
        "format": _GROUPED_INT4 | {"group_size": 64, "symmetric": False, "zero_point_dtype": "float16"},
        "solver": {"name": "hqq"},
    },
    "gptq": {
        "description": "4-bit integers in groups of 128, rounding errors made up for column by column from calibration",
        "format": _GROUPED_INT4,
        "solver": {"name": "gptq", "percdamp": 0.01, "act_order": "static"},
    },
    "autoround": {
        "description": "4-bit integers in groups of 128, rounding and ranges learned from the output of each block",
        "format": _GROUPED_INT4 | {"signed_scale": True},
        "solver": {"name": "signround", "iters": 200},
    },
    "awq": {
        "description": "4-bit integers in groups of 128, channels with large activations scaled up, ranges clipped",
        "format": _GROUPED_INT4 | {"symmetric": False},
        "solver": {"name": "nearest"},
        "transform": {"name": "awq", "grid": 20, "form": "duo", "clip": True},
    },
    "smoothquant-w8a8": {
        "description": "8-bit integer weights and inputs; outliers of the inputs moved into the weights first",
        "format": _CHANNEL_INT8 | {"symmetric": True, "full_range": False},
        "solver": {"name": "nearest"},
        "transform": {"name": "smoothquant", "alpha": 0.5},
        "activation": {"name": "int8", "granularity": "token"},
    },
    "sparse24-int8": {
        "description": "2 of 4 neighbouring weights pruned by Wanda's score, the others in 8-bit integers",
        "format": _CHANNEL_INT8 | {"symmetric": True, "full_range": False},
        "solver": {"name": "nearest"},
        "prune": {"name": "wanda", "pattern": "2:4"},
    },
}


AXES = {"format": FORMATS, "solver": SOLVERS, "transform": TRANSFORMS, "activation": ACTIVATIONS, "prune": PRUNERS}
OPTIONAL = ("transform", "activation", "prune")  # a recipe may take them from a preset with ``name: none``


def build_axis(axis: str, preset: str | None, *layers: dict[str, Any]) -> Any:
    """The member of `axis` (a key of `AXES`) that `layers` of fields over a preset's describe.

    A layer that names another member than the one below it starts afresh. None for a format without a name, and where
    nothing is said of an axis that may be left out, or it is named ``none``. Raises ValueError with the reason.
    """
    start = PRESETS[preset] if preset is not None else {"format": {}, "solver": {"name": "nearest"}}
    fields: dict[str, Any] = dict(start.get(axis, {}))
    for layer in layers:
        afresh = "name" in layer and layer["name"] != fields.get("name")
        fields = dict(layer) if afresh else {**fields, **layer}
    if axis in OPTIONAL and fields in ({}, {"name": "none"}):
        return None
    if axis == "format" and "name" not in fields:
        return None
    try:
        built = build(AXES[axis], fields)
    except QbenchError as error:
        raise ValueError(str(error)) from error
    for key in (key for layer in layers for key in layer):
        if key in fields and getattr(built, key) != fields[key]:
            raise ValueError(f"{axis} {built.name}: {key} {fields[key]} has no effect beside the other fields: {built}")
    return built
