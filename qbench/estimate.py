"""How much memory, disk and time a run will take, from the model's header alone.

Memory and disk follow from the shapes. Time is floating-point operations over the machine's own speed at a matrix
product, measured for a few milliseconds, times how much of that speed each stage was seen to reach (`EFFICIENCY`).
Expect it within a factor of two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qbench.calibration.data import SELF_GENERATED
from qbench.compress.held import AT_ONCE as AT_ONCE_HELD
from qbench.compress.held import HELD_BYTES
from qbench.compress.smoothing import SEARCH_TOKENS
from qbench.formats.size import stored_bytes
from qbench.models.source import ModelSource, TensorInfo
from qbench.models.structure import layer_index
from qbench.peers.choice import Choice
from qbench.recipe import Recipe
from qbench.resolve import HEAD, module_shapes
from qbench.scheme import Scheme
from qbench.self_generated import AT_ONCE
from qbench.solvers.base import Solver
from qbench.solvers.signround import SignRound

PROCESS_BYTES = 600 * 2**20  # the interpreter with torch and transformers
BATCH_TOKENS = 4096  # of calibration and scoring, taken at once
LOGIT_ROWS = 512  # positions whose logits are held at once
FLOAT32 = 4
ROUNDING = 2500  # what rounding a weight once costs while it is learned, as operations of a matrix product
STORED = {"F32": 4, "F16": 2, "BF16": 2}  # anything else is decoded to float32 when it is loaded
# Share of the matrix-product speed that was reached with a 135M model in float32 on processor cores with AVX-512.
EFFICIENCY = {
    "forward": 0.4,  # calibration, scoring and prompts
    "solve": 0.15,  # GPTQ's columns and factorizations
    "decode_step": 0.025,  # what a decode step costs however many requests share it, as one token's operations
    "decode_token": 0.1,  # what each request adds to it
}


@dataclass(frozen=True)
class Estimate:
    """What one variant (or the reference) takes."""

    weight_bytes: int  # all its weights, as stored and as held while running
    bits_per_weight: float  # of the compressed modules; of all weights for the reference
    compress_memory: int  # peak while compressing; 0 for the reference
    run_memory: int  # peak while measuring
    disk: int  # compressed model and exports
    seconds: float


def machine_speed(device: torch.device) -> float:
    """Operations a second of a matrix product on `device`: the best of a few tries, because others may be busy too.

    On a processor one thread is timed and the others are taken to be as fast: threads that wait for each other on a
    busy machine would measure the neighbours.
    """
    accelerated = device.type != "cpu"
    n = 4096 if accelerated else 256
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a = torch.ones(n, n, device=device)
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(a, a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(threads)
    return 2 * n**3 / best * (1 if accelerated else threads)


def count(info: TensorInfo) -> int:
    """Number of values in a tensor."""
    return math.prod(info.shape)


def float_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor once loaded as floats."""
    return count(info) * STORED.get(info.dtype, FLOAT32)


class Estimator:
    """Estimates for the variants of `recipe` on `source`, at `speed` operations a second."""

    def __init__(self, recipe: Recipe, source: ModelSource, speed: float) -> None:
        self.recipe, self.source, self.speed = recipe, source, speed
        self.shapes = module_shapes(source)
        self.linears = {name: shape for name, shape in self.shapes.items() if layer_index(name) is not None}
        self.head = self.shapes.get(HEAD, (0, 0))
        self.hidden_size = self.head[1]
        self.parameters = sum(map(count, source.tensors.values()))
        self.inside = sum(count(info) for name, info in source.tensors.items() if layer_index(name) is not None)

    def variant(self, schemes: Mapping[str, Scheme], num_exports: int) -> Estimate:
        """A variant with these schemes, written in `num_exports` layouts besides its own."""
        compressed = {name: stored_bytes(scheme.format, self.shapes[name]) for name, scheme in schemes.items()}
        plain = sum(
            float_bytes(info)
            for name, info in self.source.tensors.items()
            if name.removesuffix(".weight") not in compressed
        )
        weights = sum(math.prod(self.shapes[name]) for name in compressed)
        total = plain + sum(compressed.values())
        hidden = self._calibration_tokens() * self.hidden_size * FLOAT32
        return Estimate(
            weight_bytes=total,
            bits_per_weight=8 * (sum(compressed.values()) / weights if weights else total / self.parameters),
            compress_memory=self._compress_memory(schemes, hidden),
            run_memory=self._run_memory(total),
            disk=total * (1 + num_exports) + hidden,
            seconds=self._compress_seconds(schemes) + self._measure_seconds(),
        )

    def reference(self) -> Estimate:
        """The uncompressed model, which may write its own calibration text first."""
        total = sum(map(float_bytes, self.source.tensors.values()))
        memory = self._run_memory(total)
        return Estimate(
            total, 8 * total / self.parameters, 0, memory, 0, self._measure_seconds() + self._writing_seconds()
        )

    def peer(self, choice: Choice) -> Estimate:
        """A variant that another library makes of a float32 copy, and that is kept as floats: its bits are those of
        the codes alone, its time that of forward passes and of solving every linear once."""
        total = FLOAT32 * self.parameters
        hidden = self._calibration_tokens() * self.hidden_size * FLOAT32
        solve = sum(2 * rows * width**2 + 4 * width**3 for rows, width in self.linears.values())
        forward = 2 * self._calibration_tokens() * self.inside * 3
        return Estimate(
            weight_bytes=total,
            bits_per_weight=choice.nominal_bits,
            compress_memory=2 * PROCESS_BYTES + 2 * total + 2 * hidden,
            run_memory=self._run_memory(total),
            disk=3 * total,
            seconds=self._seconds(forward, "forward") + self._seconds(solve, "solve") + self._measure_seconds(),
        )

    def _calibration_tokens(self) -> int:
        return self.recipe.calibration.rows * self.recipe.calibration.seq_len

    def _compress_memory(self, schemes: Mapping[str, Scheme], hidden: int) -> int:
        """The largest block twice (as it was and as it is stored), the largest Hessian with its factors, the hidden
        states of all rows, one batch's activations, and what passes hold that wait for a linear to be solved. Where
        rounding is learned, offsets, gradients and what is kept beside the weights, hidden states of the uncompressed
        model too, and activations for the way back."""
        blocks: dict[int | None, int] = {}
        for name, info in self.source.tensors.items():
            index = layer_index(name)
            blocks[index] = blocks.get(index, 0) + count(info) * FLOAT32
        outside = blocks.pop(None, 0)
        widest = max((self.shapes[name][1] for name in schemes), default=0)
        hessians = (4 if any(s.solver.uses_hessian for s in schemes.values()) else 1) * widest**2 * FLOAT32
        batch = min(BATCH_TOKENS, self._calibration_tokens())
        activations = 3 * batch * (self.hidden_size + max(rows for rows, _ in self.linears.values())) * FLOAT32
        head = outside if HEAD in schemes else outside // 2
        largest = max(blocks.values(), default=0)
        if any(scheme.solver.blockwise for scheme in schemes.values()):
            return PROCESS_BYTES + 8 * largest + head + hessians + 4 * hidden + 4 * activations
        held = min(HELD_BYTES, self._calibration_tokens() * (AT_ONCE_HELD * self.hidden_size + widest) * FLOAT32)
        if not any(scheme.sequential for scheme in schemes.values()):
            held = 0
        return PROCESS_BYTES + 2 * largest + head + hessians + 2 * hidden + activations + held

    def _run_memory(self, weights: int) -> int:
        """Weights, the cache of the longest requests at the highest concurrency, and one batch's logits."""
        tokens = BATCH_TOKENS
        if (benchmark := self.recipe.benchmark) is not None:
            tokens = max(tokens, max(benchmark.concurrency) * (benchmark.prompt_tokens + benchmark.output_tokens))
        a_token = sum(rows for name, (rows, _) in self.linears.items() if name.endswith(("k_proj", "v_proj")))
        logits = 2 * LOGIT_ROWS * self.head[0]
        return PROCESS_BYTES + weights + (tokens * a_token + logits) * FLOAT32

    def _compress_seconds(self, schemes: Mapping[str, Scheme]) -> float:
        solved = [self.shapes[name] for name, scheme in schemes.items() if scheme.solver.uses_hessian]
        tokens = self._calibration_tokens() if solved else min(BATCH_TOKENS, self._calibration_tokens())
        passes = 1.1 if solved else 1.9  # a block's forward passes: one and a look at its order, or statistics apart
        products = tokens * sum(2 * shape[1] ** 2 for shape in self.linears.values()) / 3  # half of each; some shared
        forward = 2 * tokens * self.inside * passes + products
        factored = [
            self.shapes[name] for name, s in schemes.items() if s.solver.uses_hessian and not s.solver.blockwise
        ]
        solve = sum(2 * rows * width**2 + 4 * width**3 for rows, width in factored)
        learn = sum(self._learning(self.shapes[name], scheme.solver) for name, scheme in schemes.items())
        for name, scheme in schemes.items():
            if scheme.transform is not None:
                learn += scheme.transform.candidates * math.prod(self.shapes[name]) * (2 * SEARCH_TOKENS + ROUNDING)
        return self._seconds(forward + learn, "forward") + self._seconds(solve, "solve")

    def _learning(self, shape: tuple[int, int], solver: Solver) -> float:
        """Operations to learn a weight's rounding: each step a pass there and back, then the weight rounded anew."""
        if not isinstance(solver, SignRound):
            return 0.0
        calibration = self.recipe.calibration
        tokens = min(solver.batch_rows, calibration.rows) * calibration.seq_len
        return solver.iters * math.prod(shape) * (6 * tokens + ROUNDING)

    def _measure_seconds(self) -> float:
        """Scoring the evaluation rows, then the requests at each concurrency."""
        a_token = 2 * (self.inside + math.prod(self.head))
        seconds = 0.0
        if (evaluate := self.recipe.evaluate) is not None:
            seconds += self._seconds(a_token * evaluate.rows * evaluate.seq_len, "forward")
        if (benchmark := self.recipe.benchmark) is not None:
            for concurrency in benchmark.concurrency:
                tokens = benchmark.output_tokens * benchmark.requests
                seconds += self._seconds(a_token * benchmark.prompt_tokens * benchmark.requests, "forward")
                seconds += self._seconds(a_token * tokens / min(concurrency, benchmark.requests), "decode_step")
                seconds += self._seconds(a_token * tokens, "decode_token")
        return seconds

    def _writing_seconds(self) -> float:
        """Sampling each self-generated set of rows that a variant wants, once."""
        asked = map(self.recipe.calibration_of, self.recipe.variants)
        shapes = {(c.rows, c.seq_len, c.packing, str(c.sampling)) for c in asked if c.data == SELF_GENERATED}
        a_token = 2 * (self.inside + math.prod(self.head))
        steps = sum(math.ceil(rows / AT_ONCE) * seq_len for rows, seq_len, *_ in shapes)
        tokens = sum(rows * seq_len for rows, seq_len, *_ in shapes)
        return self._seconds(a_token * steps, "decode_step") + self._seconds(a_token * tokens, "decode_token")

    def _seconds(self, operations: float, stage: str) -> float:
        return operations / (self.speed * EFFICIENCY[stage])
