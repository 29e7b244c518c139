"""GGUF sources: values, names and row order against gguf-py and transformers' own GGUF loader."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qbench.errors import QbenchError
from qbench.export.gguf import write
from qbench.models.gguf_file import read_gguf
from qbench.models.gguf_names import rows_to_gguf, rows_to_huggingface, to_gguf
from qbench.models.gguf_source import GGUFSource, can_decode, decode, open_gguf
from qbench.models.source import ModelSource, open_model
from tests.models import gguf_bytes
from tests.models.gguf_bytes import patched
from tests.tiny import make_tiny_llama


@pytest.fixture(scope="module")
def tiny_gguf(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-gguf")
    write(open_model(tiny_llama), folder, type="f16")
    return folder / "model.gguf"


def test_transformers_reads_the_same_weights_from_the_file(tiny_gguf: Path) -> None:
    source = open_gguf(tiny_gguf)
    model = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
    expected = model.state_dict()
    assert set(source.tensors) == set(expected)
    for name, info in source.tensors.items():
        loaded = source.load(name)
        assert tuple(loaded.shape) == info.shape
        torch.testing.assert_close(loaded.float(), expected[name], rtol=0, atol=0)


def test_config_builds_the_same_network(tiny_llama: Path, tiny_gguf: Path) -> None:
    source = open_gguf(tiny_gguf)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float16)
    config = AutoConfig.for_model(**source.config)
    rebuilt = AutoModelForCausalLM.from_config(config)
    rebuilt.load_state_dict({name: source.load(name) for name in source.tensors})
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(rebuilt.float()(ids).logits, model.float()(ids).logits, rtol=1e-5, atol=1e-4)
    assert source.config["dtype"] == "float16"
    assert source.grid is None


def test_default_model(default_model: ModelSource) -> None:
    source = default_model
    assert isinstance(source, GGUFSource)
    assert source.grid == "Q4_1"
    assert source.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in source.tensors
    assert source.tensors["model.layers.3.mlp.up_proj.weight"].dtype == "Q4_1"
    assert source.tensors["model.layers.3.self_attn.k_proj.weight"].shape == (192, 576)
    for name in ("model.layers.3.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        stored = source.file.tensors[str(to_gguf(name))]
        rows = stored.read().reshape(*stored.shape[:-1], -1)
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[stored.type])
        np.testing.assert_array_equal(source.load(name).numpy(), expected)


def test_default_model_opens_and_loads_quickly(default_model: ModelSource) -> None:
    start = time.process_time()
    source = open_gguf(default_model.file.paths[0])  # type: ignore[attr-defined]
    assert time.process_time() - start < 2
    assert sum(source.load(name).numel() for name in source.tensors) == 134_515_008
    assert time.process_time() - start < 10


@pytest.mark.trap(35)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 8), (8, 8), (3, 4), (4, 32)])
def test_row_order_goes_both_ways(heads: int, head_dim: int) -> None:
    rows = torch.arange(heads * head_dim)
    stored = rows_to_gguf(rows, heads)
    if head_dim == 8:
        assert stored[:10].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12]
    assert torch.equal(rows_to_huggingface(stored, heads), rows)


@pytest.mark.trap(36)
def test_bfloat16_is_bit_exact(tmp_path: Path) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).reshape(64, 1024)  # every one, subnormals too
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", patterns.numpy().view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = decode(read_gguf(path).tensors["w"])
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.view(torch.int16), patterns)


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_other_block_types_are_decoded(tmp_path: Path, kind: str) -> None:
    ggml_type = gguf.GGMLQuantizationType[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    raw = np.random.default_rng(0).integers(0, 60, (6, 2 * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert can_decode(kind)
    loaded = decode(read_gguf(tmp_path / "m.gguf").tensors["w"])
    np.testing.assert_array_equal(loaded.numpy(), gguf.quants.dequantize(raw, ggml_type))


@pytest.mark.trap(42)
def test_split_model_opens_whole(tmp_path: Path, tiny_gguf: Path) -> None:
    whole = open_gguf(tiny_gguf)
    parts = split_in_two(tiny_gguf, tmp_path)
    source = open_gguf(parts[0])
    assert set(source.tensors) == set(whole.tensors)
    for name in whole.tensors:
        assert torch.equal(source.load(name), whole.load(name))
    before = source.revision
    data = bytearray(parts[1].read_bytes())
    data[-1] ^= 1
    parts[1].write_bytes(data)
    assert open_gguf(parts[0]).revision != before


def split_in_two(path: Path, folder: Path) -> list[Path]:
    """The model again as two parts, written by gguf-py."""
    reader = gguf.GGUFReader(path)
    names = [tensor.name for tensor in reader.tensors]
    parts = []
    for part in (0, 1):
        parts.append(folder / f"tiny-{part + 1:05d}-of-00002.gguf")
        writer = gguf.GGUFWriter(parts[-1], "llama")
        if part == 0:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    kinds = field.types
                    writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(names))
        for tensor in reader.tensors:
            if (names.index(tensor.name) >= len(names) // 2) == bool(part):
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general__architecture": "mamba"}, "'mamba' is not supported"),
        ({"llama__block_count": None}, r"'llama\.block_count' is missing"),
        ({"llama__block_count": "3"}, "is str"),
        ({"llama__attention__head_count": 0}, "0 query heads"),
        ({"llama__attention__head_count": 2}, r"'blk\.0\.attn_q\.weight' has shape \(64, 64\), expected \(32, 64\)"),
        ({"llama__block_count": 2}, r"'blk\.2\.\w+\.weight' has no place"),
        ({"llama__block_count": 4}, r"'blk\.3\.attn_norm\.weight' is missing"),
        ({"llama__block_count": 2**31}, "2147483648 blocks"),
        ({"llama__embedding_length": 0}, "query heads"),
        ({"llama__feed_forward_length": 64}, r"ffn_gate\.weight' has shape \(128, 64\), expected \(64, 64\)"),
        ({"tokenizer__ggml__tokens": [str(i) for i in range(301)], "tokenizer__ggml__token_type": None}, "301 tokens"),
        ({"llama__attention__value_length": 8}, "unequal length"),
        ({"llama__expert_count": 8}, "mixture-of-experts"),
        ({"llama__rope__scaling__type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama__rope__dimension_count": 8}, "8 of 16 dimensions"),
        ({"tokenizer__ggml__model": "t5"}, "tokenizer model 't5'"),
        ({"tokenizer__ggml__pre": "gpt2"}, "Did you mean 'gpt-2'"),
        ({"tokenizer__ggml__pre": None}, r"'tokenizer\.ggml\.pre' is missing"),
        ({"tokenizer__ggml__eos_token_id": 300}, "300 tokens"),
    ],
)
@pytest.mark.trap(39)
def test_what_is_not_supported_is_named(tmp_path: Path, tiny_gguf: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(QbenchError, match=message):
        open_gguf(patched(tiny_gguf, tmp_path, **change))


def test_files_that_are_no_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(QbenchError, match="no such file"):
        open_gguf(tmp_path / "missing.gguf")
    empty = gguf_bytes.write(tmp_path / "empty.gguf")
    with pytest.raises(QbenchError, match=r"general\.architecture"):
        open_gguf(empty)


def test_explicit_head_dim(tmp_path: Path) -> None:
    write(open_model(make_tiny_llama(tmp_path / "m", head_dim=32)), tmp_path, type="f16")
    source = open_gguf(tmp_path / "model.gguf")
    assert source.config["head_dim"] == 32
    assert source.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (128, 64)
