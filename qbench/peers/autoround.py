"""AutoRound: plain rounding, and rounding learned with signed gradients (SignRound)."""

from __future__ import annotations

from typing import Any

import torch
from auto_round import AutoRound
from torch import nn
from transformers import AutoTokenizer

from qbench.peers.tools import Layer, Work, code_bytes, load_model, row_tensors, tensor_bytes

BATCH_ROWS = 8  # the library's own default


def quantize(work: Work) -> nn.Module:
    """The model whose linears hold rounded weights, with their scales beside them. The library leaves out every row
    that is shorter than the longest."""
    options = dict(work.options)
    scheme = {"bits": options.pop("bits"), "group_size": options.pop("group_size"), "sym": options.pop("sym")}
    scheme |= {"data_type": "int", "act_bits": 16}
    if work.method == "rtn":
        options |= {"iters": 0, "disable_opt_rtn": True}
    torch.manual_seed(work.seed)
    rounder = AutoRound(
        load_model(work),
        AutoTokenizer.from_pretrained(work.model),
        scheme=scheme,
        dataset=[{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in row_tensors(work)],
        seqlen=max(map(len, work.rows)),
        nsamples=len(work.rows),
        batch_size=min(BATCH_ROWS, len(work.rows)),
        device_map=work.device,
        seed=work.seed,
        enable_torch_compile=False,
        amp=False,
        **{key: value for key, value in options.items() if value is not None},
    )
    model, _ = rounder.quantize()
    quantized: nn.Module = model
    return quantized


def layers(work: Work, model: nn.Module) -> dict[str, Layer]:
    """The linears as the library left them."""
    return {name: _layer(model.get_submodule(name), work.options) for name in work.modules}


def _layer(module: Any, options: dict[str, Any]) -> Layer:
    weight = module.weight.data.float()
    nbytes = code_bytes(weight, options["bits"]) + tensor_bytes(module.scale)
    if not options["sym"]:
        nbytes += code_bytes(module.scale, options["bits"])
    return Layer(weight, nbytes)
