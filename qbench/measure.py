"""Measuring one model in a process of its own, so that peak memory is its own: ``python -m qbench.measure JOB.json``.

The job says which model, what to measure and where the rows go. Standard input stays open as long as the parent lives.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qbench.errors import QbenchError, file_message
from qbench.recipe import Recipe
from qbench.resources import written_whole

if TYPE_CHECKING:
    import torch

    from qbench.result import Result
    from qbench.runtime.llm import LLM

USER_MISTAKE = 2


@dataclass(frozen=True)
class MeasureJob:
    """One model and what to measure of it. Every path is a file; a stage without a path is not run."""

    variant: str
    recipe: dict[str, Any]
    folder: str | None  # the compressed model; None is the reference
    inputs: str  # JSON: {"windows": [[ids, num_context], ...], "tokens": [...]}
    states: str  # the reference's hidden states: written by the reference, read by the others
    provenance: dict[str, Any]
    quality: str | None
    quality_key: str
    speed: str | None
    speed_key: str


def run_job(job: MeasureJob, path: Path) -> None:
    """Runs `job` in a fresh process. Raises `QbenchError` with that process's message when it ends on one."""
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps(asdict(job)), encoding="utf-8")
    command = [sys.executable, "-m", "qbench.measure", str(path)]
    # A process group of its own: Ctrl-C is for the parent, which then ends the child.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as child:
        assert child.stdout is not None
        try:
            message = child.stdout.read().decode()
            code = child.wait()
        except BaseException:
            child.kill()
            raise
    if code == USER_MISTAKE:
        raise QbenchError(f"{job.variant}: {message.strip()}")
    if code < 0:
        raise QbenchError(
            f"{job.variant}: the measuring process was ended by {signal.Signals(-code).name}. A system that is short "
            "of memory does this; what was finished is kept, the same command goes on from there."
        )
    if code != 0:
        raise RuntimeError(f"measuring {job.variant} ended with exit code {code}")


def write_stage(path: Path, key: str, rows: list[Result], **more: Any) -> None:
    """The outcome of a stage, with the key of what it was made from."""
    with written_whole(path) as temporary:
        content = {"key": key, **more, "rows": [asdict(row) for row in rows]}
        temporary.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")


def _measure(job: MeasureJob) -> None:
    from qbench.inputs import reference_source
    from qbench.models.source import open_model
    from qbench.runtime.llm import LLM

    recipe = Recipe.model_validate(job.recipe)
    source = open_model(job.folder) if job.folder else reference_source(recipe)
    lengths = [1]
    batch = 1
    if job.quality and recipe.evaluate:
        lengths.append(recipe.evaluate.seq_len)
    if job.speed and recipe.benchmark:
        lengths.append(recipe.benchmark.prompt_tokens + recipe.benchmark.output_tokens)
        batch = max(recipe.benchmark.concurrency)
    llm = LLM(
        source,
        dtype=recipe.model.dtype,
        device=recipe.model.device,
        max_model_len=max(lengths),
        max_num_seqs=max(batch, 4),
        seed=recipe.seed,
    )
    inputs = json.loads(Path(job.inputs).read_text(encoding="utf-8"))
    if job.speed:
        write_stage(Path(job.speed), job.speed_key, _speed(job, recipe, llm, inputs["tokens"]))
    if job.quality:
        write_stage(Path(job.quality), job.quality_key, _quality(job, llm, inputs["windows"]))


def _provenance(job: MeasureJob, llm: LLM, **more: Any) -> dict[str, Any]:
    import torch

    import qbench

    return {
        **job.provenance,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "device": str(llm.device),
        "kv_cache": llm.runner.cache.stored_as,
        "threads": torch.get_num_threads(),
        "kernel": "+".join(sorted(llm.runner.kernels)),
        "engine": "qbench",
        "engine_version": qbench.__version__,
        "torch_version": torch.__version__,
        **more,
    }


def _speed(job: MeasureJob, recipe: Recipe, llm: LLM, tokens: list[int]) -> list[Result]:
    from qbench.benchmark.closed_loop import Workload, run_closed_loop
    from qbench.benchmark.memory import peak_memory
    from qbench.benchmark.metrics import latency_metrics
    from qbench.progress import progress_bar
    from qbench.result import make_results

    settings = recipe.benchmark
    assert settings is not None
    workload = Workload(settings.requests, settings.prompt_tokens, settings.output_tokens, recipe.seed)
    measured = []
    with progress_bar(f"{job.variant}: speed", len(settings.concurrency)) as bar:
        for concurrency in settings.concurrency:
            measured += latency_metrics(run_closed_loop(llm.engine, workload, tokens, concurrency), concurrency)
            bar.advance()
    runner = llm.runner
    measured += [("weight_bytes", runner.weight_bytes, {}), ("kv_cache_bytes", runner.kv_cache_bytes, {})]
    measured.append(("kv_token_bytes", runner.cache.token_bytes, {}))
    measured += peak_memory(llm.device)
    about = _provenance(
        job, llm, workload=workload.provenance(), prefix_cache=llm.engine.settings.enable_prefix_caching
    )
    return make_results(job.variant, measured, about)


def _quality(job: MeasureJob, llm: LLM, cut: list[tuple[list[int], int]]) -> list[Result]:
    from qbench.evaluate.divergence import ReferenceStates, reference_states
    from qbench.evaluate.score import score
    from qbench.evaluate.windows import Window
    from qbench.progress import progress_bar
    from qbench.result import make_results

    windows = [Window(ids, context) for ids, context in cut]
    with progress_bar(f"{job.variant}: quality", 1):
        if job.folder is None:
            states = reference_states(llm.engine, windows, _head(llm), len(llm.tokenizer))
            states.save(Path(job.states))
        scores = score(llm.engine, windows, ReferenceStates.load(Path(job.states)))
    return make_results(job.variant, scores.measured(), _provenance(job, llm))


def _head(llm: LLM) -> torch.Tensor:
    """The model's output weight ``[vocab, hidden]``; the embedding when they are tied."""
    source = llm.source
    name = "lm_head.weight" if "lm_head.weight" in source.tensors else "model.embed_tokens.weight"
    return source.load_dense(name).to(llm.device, llm.dtype)


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _refuse(message: str) -> NoReturn:
    sys.stdout.write(message)
    sys.stdout.flush()
    os._exit(USER_MISTAKE)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _measure(MeasureJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    except QbenchError as error:
        _refuse(str(error))
    except OSError as error:
        message = file_message(error)
        if message is None:
            raise
        _refuse(message)
    os._exit(0)
