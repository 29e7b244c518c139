"""Loads GPTQ folders in plain transformers (with gptqmodel, on the CPU) and compares them with what qbench reads.

    python export/check_gptq.py FOLDER... [--python INTERPRETER] [--loader gptqmodel]

INTERPRETER belongs to an environment that holds gptqmodel (export/README.md says how to make one); the default is the
variable QBENCH_ORACLES_PYTHON, else the interpreter this script runs in. The judge gets a process of its own, because
importing gptqmodel changes torch, safetensors and transformers.

What must hold, in the judge's arithmetic:

- transformers reports no missing, unexpected or mismatched tensor, and every quantized linear of the folder is a
  gptqmodel layer (an unknown quantization would be skipped with a log line and leave random weights).
- weights: gptqmodel's torch kernel dequantizes to float16. They equal qbench's values, rounded to float16, bit for bit.
- logits: the default kernel, with the model in float32, multiplies float32 activations with those float16 weights cast
  to float32, and keeps biases in float16. Transformers' dense model, given the same weights and biases, must agree to
  1e-4 of the largest logit: only the order of float32 sums differs.

With ``--loader gptqmodel`` the folder is opened by gptqmodel's own loader, which follows ``dynamic`` overrides where
transformers does not, and only weights are compared. Prints a JSON list; exit code 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LOGITS_TOLERANCE = 1e-4  # of the largest logit
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "GPTQMODEL_CPU_WORKERS": "2", "HF_HUB_OFFLINE": "1"}


def token_ids(vocab_size: int) -> torch.Tensor:
    """Sixty-four ids spread over the vocabulary, one row."""
    return (torch.arange(64) * 7919 % vocab_size)[None]


def judge(folder: str, dump: str) -> None:
    """In the judge's process: transformers' weights and logits of `folder` into the safetensors file `dump`."""
    from transformers import AutoModelForCausalLM, GPTQConfig

    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    problems = {kind: sorted(map(str, names)) for kind, names in loading.items() if names}
    kernels = sorted({type(layer).__name__ for layer in quantized_layers(model).values()})
    with torch.inference_mode():
        logits = model.eval()(token_ids(model.config.vocab_size)).logits[0]
    config = GPTQConfig(bits=model.config.quantization_config.bits, backend="torch")  # all else comes from the folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config).eval()
    metadata = {"kernels": json.dumps(kernels), "problems": json.dumps(problems)}
    save_file({**dequantized(model), "logits": logits.clone()}, dump, metadata=metadata)


def judge_by_gptqmodel(folder: str, dump: str) -> None:
    """As `judge`, with gptqmodel's own loader; weights only."""
    from gptqmodel import BACKEND, GPTQModel

    model = GPTQModel.load(folder, device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model.eval()
    kernels = sorted({type(layer).__name__ for layer in quantized_layers(model).values()})
    save_file(dequantized(model), dump, metadata={"kernels": json.dumps(kernels), "problems": "{}"})


def quantized_layers(model: torch.nn.Module) -> dict[str, Any]:
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseQuantLinear)}


def dequantized(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Float16 weights ``[out, in]`` of the quantized layers."""
    layers = quantized_layers(model)
    return {f"{name}.weight": layer.dequantize_weight().T.contiguous().clone() for name, layer in layers.items()}


def reference_logits(source: Any) -> torch.Tensor:
    """Logits of transformers' dense model with `source`'s weights; quantized ones and their biases in float16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from qbench.formats.base import QuantizedTensor

    config = AutoConfig.for_model(**source.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {name: source.load(name) for name in source.tensors}
    quantized = {name for name, tensor in state.items() if isinstance(tensor, QuantizedTensor)}
    for name, tensor in state.items():
        half = name in quantized or name.removesuffix("bias") + "weight" in quantized
        values = tensor.dequantize() if name in quantized else tensor.float()
        state[name] = values.half().float() if half else values
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    with torch.inference_mode():
        logits: torch.Tensor = model(token_ids(config.vocab_size)).logits[0]
    return logits


def compare(folder: str, dump: str) -> dict[str, Any]:
    """How the judge, whose findings lie in `dump`, and qbench differ on `folder`; `ok` is the verdict."""
    from safetensors import safe_open

    from qbench.export.gptq import read
    from qbench.formats.base import QuantizedTensor

    source = read(folder)
    theirs = load_file(dump)
    with safe_open(dump, "pt") as file:
        metadata = file.metadata()
    logits = theirs.pop("logits", None)
    loaded = {name: source.load(name) for name in source.tensors}
    ours = {name: w.dequantize().half() for name, w in loaded.items() if isinstance(w, QuantizedTensor)}
    unequal = sorted(name for name in ours if name not in theirs or not torch.equal(ours[name], theirs[name]))
    problems = json.loads(metadata["problems"])
    found = {
        "folder": folder,
        "ok": ours.keys() == theirs.keys() and not unequal and not problems,
        "kernels": json.loads(metadata["kernels"]),
        "quantized_linears": len(theirs),
        "unequal_weights": unequal,
        "loading_problems": problems,
    }
    if logits is not None:
        expected = reference_logits(source)
        difference = float((logits - expected).abs().max() / expected.abs().max())
        found["relative_logit_difference"] = difference
        found["top1_agreement"] = float((logits.argmax(-1) == expected.argmax(-1)).float().mean())
        found["ok"] &= difference <= LOGITS_TOLERANCE
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--python", default=os.environ.get("QBENCH_ORACLES_PYTHON") or sys.executable)
    parser.add_argument("--loader", choices=["transformers", "gptqmodel"], default="transformers")
    parser.add_argument("--judge", metavar="DUMPS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.judge:
        load = judge if arguments.loader == "transformers" else judge_by_gptqmodel
        for number, folder in enumerate(arguments.folders):
            load(folder, f"{arguments.judge}/{number}.safetensors")
        return 0
    with tempfile.TemporaryDirectory() as dumps:
        command = [arguments.python, __file__, *arguments.folders, "--loader", arguments.loader, "--judge", dumps]
        done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"The judge {arguments.python} failed:\n{(done.stdout + done.stderr)[-4000:]}", file=sys.stderr)
            return 1
        found = [compare(folder, f"{dumps}/{number}.safetensors") for number, folder in enumerate(arguments.folders)]
    print(json.dumps(found, indent=2))
    return 0 if all(one["ok"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
