"""Where a model runs, in which dtype, and how large its key-value cache may be."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from qbench.errors import QbenchError
from qbench.formats.base import FORMATS
from qbench.formats.kv_cache import KVCache
from qbench.models.source import ModelSource
from qbench.runtime.architecture import Architecture
from qbench.runtime.scheduler import SchedulerSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_SHARE = {"cpu": 0.25, "cuda": 0.85}  # of the memory left beside the weights, for the key-value cache


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU when there is one. Raises `QbenchError` on a device that is unknown or absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and not name.startswith("cuda"):
        raise QbenchError(f"Device {name!r} is unknown; allowed: auto, cpu, cuda, cuda:N.")
    if name != "cpu" and not torch.cuda.is_available():
        raise QbenchError(f"Device {name!r}: no CUDA device is available; use cpu or auto.")
    return torch.device(name)


def choose_dtype(name: str, source: ModelSource, device: torch.device) -> torch.dtype:
    """Dtype of activations and cache.

    `auto` is the model's own dtype on a GPU. On a CPU it is bfloat16 for a bfloat16 model where the CPU has bfloat16
    units, else float32: without such units 16-bit products are several times slower.
    """
    if name != "auto":
        if name not in DTYPES:
            raise QbenchError(f"dtype {name!r} is unknown; allowed: auto, {', '.join(DTYPES)}.")
        return DTYPES[name]
    own = DTYPES.get(str(source.config.get("dtype") or source.config.get("torch_dtype")), torch.float32)
    if device.type == "cuda" or (own == torch.bfloat16 and _cpu_has_bfloat16()):
        return own
    return torch.float32


def default_num_blocks(
    source: ModelSource, device: torch.device, dtype: torch.dtype, settings: SchedulerSettings
) -> int:
    """Blocks for as many and as long requests as `settings` allow at once, or as many as fit in `CACHE_SHARE` of the
    memory left beside the weights.

    Raises `QbenchError` when not even one fits.
    """
    left = available_memory(device) - _weight_bytes(source, dtype)
    block_bytes = settings.block_size * token_bytes(Architecture.from_config(source.config), dtype, source.kv_cache)
    fitting = int(left * CACHE_SHARE[device.type] / block_bytes)
    if fitting < 1:
        raise QbenchError(
            f"{source.location}: the weights leave no memory for a key-value cache on {device} "
            f"({available_memory(device) / 2**30:.1f} GiB available). Set num_blocks, or use a smaller model."
        )
    return min(fitting, settings.max_num_seqs * -(-settings.max_model_len // settings.block_size))


def token_bytes(architecture: Architecture, dtype: torch.dtype, kv_cache: KVCache | None) -> int:
    """Bytes of one token's keys and values over all layers, in the format they are kept in (None: in `dtype`)."""
    heads, dim = architecture.num_kv_heads, architecture.head_dim
    in_layer = 2 * heads * dim * dtype.itemsize if kv_cache is None else kv_cache.format.token_bytes(heads, dim)
    return architecture.num_layers * in_layer


def available_memory(device: torch.device) -> int:
    """Bytes a new allocation can use: the GPU's free memory; on a CPU what Linux calls available, elsewhere all of
    the physical memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _weight_bytes(source: ModelSource, dtype: torch.dtype) -> int:
    """Quantized weights keep their stored form; the rest is held in `dtype`."""
    return sum(
        info.nbytes if info.dtype in FORMATS else math.prod(info.shape) * dtype.itemsize
        for info in source.tensors.values()
    )


def _cpu_has_bfloat16() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and any(unit in cpuinfo.read_text() for unit in ("avx512_bf16", "amx_bf16"))
