"""Importance of experts: one row and one count for each in a tensor of all, as llama.cpp has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qbench.calibration.imatrix import Imatrix, SquareSum, load_imatrix
from qbench.calibration.imatrix_names import gguf_place, module_of, usual_module
from qbench.compress.engine import compress
from qbench.compress.imatrix import collect_imatrix, with_importance
from qbench.errors import QbenchError
from qbench.formats.base import FORMATS, QuantizedTensor
from qbench.models.source import open_model
from qbench.models.structure import linear_names
from qbench.scheme import Scheme
from qbench.solvers.nearest import Nearest
from tests.families import make_family

GATES = "blk.0.ffn_gate_exps.weight"


def rows(count: int = 3, length: int = 5) -> list[list[int]]:
    return torch.randint(3, 300, (count, length), generator=torch.Generator().manual_seed(0)).tolist()


def mixtral(folder: Path) -> Path:
    """Eight experts, two a token."""
    return make_family(folder, "mixtral", num_local_experts=8)


def routed(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into the experts of the first block, and which ones each token goes to, in transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: list[Any] = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda _, args, kwargs: seen.extend([*args, *kwargs.values()]), with_kwargs=True)
    with torch.no_grad():
        model(torch.tensor(rows()))
    return seen[0].reshape(-1, seen[0].shape[-1]), seen[1]


def test_each_expert_has_the_squares_and_the_count_of_its_own_tokens(tmp_path: Path) -> None:
    folder = mixtral(tmp_path / "m")
    found = collect_imatrix(open_model(folder), rows(), dataset="random")
    inputs, chosen = routed(folder)
    counts = [int((chosen == expert).sum()) for expert in range(8)]
    assert sum(counts) == 2 * 15
    for expert, count in enumerate(counts):
        entry = found.entry(f"model.layers.0.mlp.experts.{expert}.gate_proj")
        assert entry is not None and entry.tokens == count
        expected = inputs[(chosen == expert).any(1)].square().sum(0)
        torch.testing.assert_close(entry.total, expected, rtol=1e-4, atol=1e-5)


def test_the_file_is_llama_cpps(tmp_path: Path) -> None:
    found = collect_imatrix(open_model(mixtral(tmp_path / "m")), rows())
    found.save(tmp_path / "i.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    sums, counts = tensors[f"{GATES}.in_sum2"], tensors[f"{GATES}.counts"]
    assert sums.shape.tolist() == [64, 8] and counts.shape.tolist() == [1, 8]  # GGUF's order: columns first
    entries = [found.entry(f"model.layers.0.mlp.experts.{i}.gate_proj") for i in range(8)]
    np.testing.assert_array_equal(sums.data, np.stack([entry.total.numpy() for entry in entries if entry is not None]))
    assert counts.data.reshape(-1).tolist() == [entry.tokens for entry in entries if entry is not None]
    read = load_imatrix(tmp_path / "i.gguf")
    assert read.revision == found.revision
    assert len(read.entries) == len(found.entries) == 2 * (4 + 3 * 8)
    for module, entry in found.entries.items():
        again = read.entry(module)
        assert again is not None and again.tokens == entry.tokens and torch.equal(again.total, entry.total)


def written(path: Path, sums: np.ndarray, counts: np.ndarray, name: str = GATES) -> Path:
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_tensor(f"{name}.in_sum2", sums.astype(np.float32))
    writer.add_tensor(f"{name}.counts", counts.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_llama_cpp_writes_is_read(tmp_path: Path) -> None:
    sums = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = load_imatrix(written(tmp_path / "i.gguf", sums, np.array([[2], [0], [4]])))
    assert found.importance("model.layers.0.mlp.experts.2.gate_proj").tolist() == [2, 2.25, 2.5, 2.75]
    assert found.importance("model.layers.0.block_sparse_moe.experts.0.w1").tolist() == [0, 0.5, 1, 1.5]
    with pytest.raises(QbenchError, match=r"experts\.1\.gate_proj: the importance matrix has no tokens"):
        found.importance("model.layers.0.mlp.experts.1.gate_proj")


@pytest.mark.parametrize(
    ("sums", "counts", "name", "message"),
    [
        (np.ones((2, 4)), np.ones((3, 1)), GATES, "has 8 sums for the counts"),
        (np.ones((2, 4)), np.array([[1], [-1]]), GATES, "for the counts"),
        (np.ones((2, 4)), np.array([[1], [np.nan]]), GATES, "for the counts"),
        (np.ones((2, 4)), np.ones((2, 1)), "blk.0.attn_q.weight", "only experts' tensors may"),
        (np.ones((2, 4)), np.ones((2, 1)), "blk.0.ffn_odd_exps.weight", "is no weight of a supported architecture"),
    ],
)
def test_counts_that_cannot_be(tmp_path: Path, sums: np.ndarray, counts: np.ndarray, name: str, message: str) -> None:
    with pytest.raises(QbenchError, match=message):
        load_imatrix(written(tmp_path / "i.gguf", sums, counts, name))


@pytest.mark.parametrize(
    ("module", "place", "usual"),
    [
        ("self_attn.q_proj", ("attn_q", None), "self_attn.q_proj"),
        ("block_sparse_moe.experts.3.w2", ("ffn_down_exps", 3), "mlp.experts.3.down_proj"),
        ("mlp.experts.11.up_proj", ("ffn_up_exps", 11), "mlp.experts.11.up_proj"),
        ("mlp.shared_expert.gate_proj", ("ffn_gate_shexp", None), "mlp.shared_expert.gate_proj"),
        ("self_attn.qkv_proj", ("attn_qkv", None), "self_attn.qkv_proj"),
        ("mlp.gate_up_proj", ("ffn_up", None), "mlp.up_proj"),
    ],
)
def test_names(module: str, place: tuple[str, int | None], usual: str) -> None:
    found = gguf_place(f"model.layers.5.{module}")
    assert found == (f"blk.5.{place[0]}.weight", place[1])
    assert module_of(*found) == usual_module(f"model.layers.5.{module}") == f"model.layers.5.{usual}"


def test_a_module_that_gguf_does_not_know_keeps_its_name_and_is_not_saved(tmp_path: Path) -> None:
    odd = Imatrix({"model.layers.0.odd": SquareSum(torch.ones(4), 1)})
    assert odd.importance("model.layers.0.odd").tolist() == [1] * 4
    with pytest.raises(QbenchError, match=r"model\.layers\.0\.odd: GGUF has no name for it"):
        odd.save(tmp_path / "i.gguf")
    assert not (tmp_path / "i.gguf").exists()


def test_a_saved_matrix_decides_the_codes_and_unreached_experts_are_told(tmp_path: Path) -> None:
    source = open_model(mixtral(tmp_path / "m"))
    found = collect_imatrix(source, rows(1, 2))
    names = linear_names(source.tensors, source.config)
    format = FORMATS.get("q4_0")()
    plain = {name: Scheme(format, Nearest(importance=True)) for name in names if ".layers.0." in name}
    schemes = with_importance(plain, found)
    q, k = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")
    assert schemes[q] == schemes[k]  # they read one tensor
    done = compress(source, schemes, rows(), tmp_path / "done", key="k")
    unreached = {name for name in plain if (entry := found.entry(name)) is None or entry.tokens == 0}
    assert unreached and len(unreached) < len(plain)
    for report in done.layers:
        assert report.solver == "nearest"
        weight, stored = source.load(f"{report.module}.weight"), done.model.load(f"{report.module}.weight")
        assert isinstance(weight, torch.Tensor) and isinstance(stored, QuantizedTensor)
        told = "the importance matrix has no token of it" if report.module in unreached else None
        assert report.fallback == told
        importance = None if told else found.importance(report.module)
        assert torch.equal(stored.parts["blocks"], format.quantize(weight.float(), importance).parts["blocks"])


def test_odd_metadata_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    for key, value in (("imatrix.datasets", 3), ("imatrix.chunk_size", 0)):
        writer = gguf.GGUFWriter(tmp_path / "i.gguf", "imatrix")
        writer.add_uint32(key, value)
        writer.add_tensor(f"{GATES}.in_sum2", np.ones((1, 4), np.float32))
        writer.add_tensor(f"{GATES}.counts", np.ones((1, 1), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if value:
            with pytest.raises(QbenchError, match=r"imatrix\.datasets"):
                load_imatrix(tmp_path / "i.gguf")
        else:
            load_imatrix(tmp_path / "i.gguf").save(tmp_path / "again.gguf")
