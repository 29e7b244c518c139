"""A run folder with made-up numbers: a reference, two variants, one of them with an awkward name."""

import json
from pathlib import Path
from typing import Any

from qbench.result import Result, make_results, write_results

HOSTILE = "<script>alert(1)</script>&\"'"
QUALITY = {"window": {"seq_len": 512, "stride": 511, "bos": None}, "dtype": "float32", "engine": "qbench"}
SPEED = {"dtype": "float32", "engine": "qbench", "prefix_cache": False}


def made_up_run(folder: Path, second: str = "nf4", second_quality: dict[str, Any] | None = None) -> Path:
    """Writes `run.json` and `results.jsonl`; `second` names the second variant."""
    rows: list[Result] = []
    for name, bits, perplexity, kl, rate in (
        ("reference", 32.0, 30.0, 1e-12, 25.0),
        ("gptq", 4.5, 33.0, 0.05, 50.0),
        (second, 8.0, 30.3, 0.002, 40.0),
    ):
        quality = second_quality if second_quality and name == second else QUALITY
        rows += make_results(name, [("perplexity", perplexity, {}), ("kl_mean", kl, {})], quality)
        rows += make_results(name, [("kl_mean", kl, {"confidence": "0.9-1"})], quality)
        rows += make_results(name, [("scored_tokens", 40, {"confidence": "0.9-1"})], quality)
        speed: list[tuple[str, float, dict[str, Any]]] = [("peak_memory_bytes", 5e8, {"where": "process"})]
        for level in (1, 8):
            speed.append(("output_tokens_per_s", rate * level**0.5, {"concurrency": level}))
            speed.append(("ttft_s", 0.2, {"concurrency": level, "percentile": 50}))
        rows += make_results(name, speed, SPEED)
        rows += make_results(name, [("bits_per_weight", bits, {}), ("disk_bytes", bits * 1e7, {})], {})
        if name != "reference":
            errors = [
                ("layer_error", 0.01 * bits * (layer + 1), {"layer": layer, "module": f"model.layers.{layer}.{module}"})
                for layer in range(3)
                for module in ("self_attn.q_proj", "mlp.down_proj")
            ]
            rows += make_results(
                name,
                [*errors, ("solver_fallbacks", 2.0, {}), ("solver_fallbacks", 2.0, {"reason": "no token came by"})],
                {},
            )
    write_results(folder / "results.jsonl", rows)
    record = {
        "recipe_name": "trial",
        "recipe": {"name": "trial", "variants": {"gptq": {"preset": "gptq", "format": {"group_size": 32}}, second: {}}},
        "recipe_hash": "ab" * 32,
        "model": "some/model",
        "model_revision": "1",
        "architecture": {"parameters": "1 M"},
        "started": "2026-01-01T10:00:00Z",
        "warnings": ["The source was quantized."],
        "seconds": 75.0,
        "exports": {
            "reference": [],
            "gptq": [
                {
                    "label": "gguf",
                    "files": ["/somewhere/m.gguf"],
                    "nbytes": 1234567,
                    "bits_per_weight": 4.5,
                    "max_abs_difference": 0.00031,
                    "worst_tensor": "layers.1.mlp",
                    "quantized_max_abs_difference": 0.0,
                }
            ],
        },
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder
