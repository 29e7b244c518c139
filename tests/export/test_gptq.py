"""Writing GPTQ folders: exact round trips, the bytes other tools expect, the configuration, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from qbench.errors import QbenchError
from qbench.export.gptq import check, read, write
from qbench.export.gptq_config import BITS, GROUP_SIZES
from qbench.formats.base import Format, QuantizedTensor
from qbench.formats.codebook import NF4
from qbench.formats.integer import Integer
from qbench.models.source import ModelSource, open_model
from qbench.scheme import Scheme
from qbench.solvers.nearest import Nearest
from tests.export.quantized import QuantizedSource
from tests.tiny import make_tiny_llama

Q_PROJ = "model.layers.0.self_attn.q_proj"


def every(format: Format) -> Callable[[str], Format | None]:
    return lambda name: format


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Two layers with attention biases that are not zero."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("biased"), num_hidden_layers=2, attention_bias=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(".bias"):
            tensors[name] = torch.linspace(-1, 1, tensors[name].numel()) / 3
    save_file(tensors, path, metadata={"format": "pt"})
    return open_model(folder)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.trap(20)
@pytest.mark.trap(21)
def test_quantized_weights_read_back_exactly(
    model: ModelSource, tmp_path: Path, bits: int, symmetric: bool, act_order: bool
) -> None:
    source = QuantizedSource(model, every(Integer(bits=bits, group_size=32, symmetric=symmetric)), act_order)
    write(source, tmp_path / "out")
    back = read(str(tmp_path / "out"))
    for name in source.tensors:
        ours, theirs = source.load(name), back.load(name)
        if isinstance(ours, QuantizedTensor):
            assert isinstance(theirs, QuantizedTensor)
            assert theirs.format == ours.format
            assert theirs.parts.keys() == ours.parts.keys()
            assert all(torch.equal(theirs.parts[part], ours.parts[part]) for part in ours.parts)
            assert torch.equal(theirs.dequantize(), ours.dequantize())


@pytest.mark.parametrize(
    "format",
    [
        Integer(bits=8, granularity="channel", symmetric=True, full_range=False),
        Integer(bits=4, granularity="channel", symmetric=False),
        Integer(bits=4, granularity="tensor"),
        Integer(bits=4, group_size=64),
    ],
    ids=lambda format: f"{format.granularity}-{'sym' if format.symmetric else 'asym'}",
)
def test_every_granularity_keeps_its_values(model: ModelSource, tmp_path: Path, format: Integer) -> None:
    report = write(QuantizedSource(model, every(format)), tmp_path / "out")
    assert "Quantized weights read back exactly" in report.notes[0]


@pytest.mark.trap(21)
def test_one_group_a_row_is_group_size_minus_one(model: ModelSource, tmp_path: Path) -> None:
    write(QuantizedSource(model, every(Integer(bits=8, granularity="channel"))), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors[f"{Q_PROJ}.scales"].shape == (1, 64)
    assert not tensors[f"{Q_PROJ}.g_idx"].any()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["group_size"] == -1


@pytest.mark.trap(18)
@pytest.mark.trap(19)
def test_words_of_symmetric_four_bit(model: ModelSource, tmp_path: Path) -> None:
    source = QuantizedSource(model, every(Integer(bits=4, group_size=32)))
    write(source, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors[f"{Q_PROJ}.qzeros"].unique().tolist()) == {0x77777777}
    quantized = source.load(f"{Q_PROJ}.weight")
    assert isinstance(quantized, QuantizedTensor)
    codes, _ = quantized.format.unpack(quantized.parts, quantized.shape)
    word = int(tensors[f"{Q_PROJ}.qweight"][0, 5]) & 0xFFFFFFFF
    assert [word >> 4 * i & 15 for i in range(8)] == codes[5, :8].tolist()


@pytest.mark.trap(20)
def test_three_bits_take_three_words_for_32_codes(model: ModelSource, tmp_path: Path) -> None:
    write(QuantizedSource(model, every(Integer(bits=3, group_size=32))), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.qweight"].shape == (12, 64)  # 128 inputs


@pytest.mark.trap(18)
def test_a_zero_point_of_zero_is_written_as_v2(model: ModelSource, tmp_path: Path) -> None:
    class NonNegative(QuantizedSource):
        def load(self, name: str) -> torch.Tensor | QuantizedTensor:
            if name != f"{Q_PROJ}.weight":
                return super().load(name)
            weight = self.inner.load(name)
            assert isinstance(weight, torch.Tensor)
            return Integer(bits=4, group_size=32, symmetric=False).quantize(weight.abs())

    source = NonNegative(model, every(Integer(bits=4, group_size=32)))
    report = write(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["checkpoint_format"] == "gptq_v2"
    assert any("gptq_v2" in note for note in report.warnings)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors["model.layers.1.self_attn.q_proj.qzeros"].unique().tolist()) == {0x88888888 - 2**32}
    assert not tensors[f"{Q_PROJ}.qzeros"].any()


@pytest.mark.trap(5)
@pytest.mark.trap(33)
def test_biases_norms_and_side_files_are_kept(model: ModelSource, tmp_path: Path) -> None:
    report = write(QuantizedSource(model, every(Integer(bits=4, group_size=32))), tmp_path / "out")
    back = open_model(tmp_path / "out")
    for name in (f"{Q_PROJ}.bias", "model.norm.weight"):
        ours, theirs = model.load(name), back.load(name)
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        assert theirs.dtype == ours.dtype and torch.equal(theirs, ours)
    origin = Path(model.location)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (origin / name).read_bytes()
    assert report.nbytes == sum(file.stat().st_size for file in report.files)
    assert report.tensor_types == {"gptq-int4": 14, "float16": 2, "float32": 13}


def test_dense_matrices_keep_bfloat16(tmp_path: Path) -> None:
    source = open_model(make_tiny_llama(tmp_path / "in", num_hidden_layers=1, dtype=torch.bfloat16))
    report = write(QuantizedSource(source, every(Integer(bits=4, group_size=32))), tmp_path / "out")
    assert report.exact
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_configuration_of_modules_that_differ(model: ModelSource, tmp_path: Path) -> None:
    def choose(name: str) -> Format | None:
        if ".mlp.down_proj" in name:
            return Integer(bits=8, granularity="channel")
        if "layers.1.self_attn" in name:
            return None
        return Integer(bits=4, group_size=32)

    report = write(QuantizedSource(model, choose), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    dense, other = config["dynamic"]
    assert dense.startswith("-:") and r"model\.layers\.1\.self_attn\.qkv_proj" in dense
    assert other == r"+:^(model\.layers\.0\.mlp\.down_proj|model\.layers\.1\.mlp\.down_proj)$"
    assert config["dynamic"][other] == {"bits": 8, "group_size": -1}
    assert f"{Q_PROJ}" in config["modules_in_block_to_quantize"][0]
    assert "model.layers.1.self_attn.q_proj" not in config["modules_in_block_to_quantize"][0]
    assert any("transformers ignores" in note for note in report.warnings)


def test_equal_exports_are_equal_bytes_and_replace_each_other(model: ModelSource, tmp_path: Path) -> None:
    source = QuantizedSource(model, every(Integer(bits=4, group_size=32)))
    first = {file.name: file.read_bytes() for file in write(source, tmp_path / "out").files}
    second = {file.name: file.read_bytes() for file in write(source, tmp_path / "out").files}
    assert first == second
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_something_else_is_left_alone(model: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(QbenchError, match="no earlier export"):
        write(QuantizedSource(model, every(Integer(bits=4, group_size=32))), tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("module", "format", "shape", "message"),
    [
        (Q_PROJ, NF4(), (64, 64), "format nf4 cannot be stored; allowed: int"),
        (Q_PROJ, Integer(bits=5), (64, 128), "5 bits cannot be stored; allowed: 2, 3, 4, 8"),
        (
            Q_PROJ,
            Integer(bits=4, group_size=128),
            (64, 192),
            "group sizes that fit: 16, 32, 64, or granularity channel",
        ),
        (Q_PROJ, Integer(bits=4, group_size=48), (64, 96), "group sizes that fit: 16, 32, or granularity channel"),
        (Q_PROJ, Integer(bits=4, granularity="channel"), (64, 60), "60 in_features do not fill"),
        (Q_PROJ, Integer(bits=3, granularity="channel"), (48, 64), "48 out_features do not fill"),
        ("lm_head", Integer(bits=8), (512, 128), "only linears of decoder blocks"),
        (
            Q_PROJ,
            Integer(bits=4, group_size=64, symmetric=False, zero_point_dtype="float16"),
            (64, 64),
            "zero_point_dtype float16 cannot be stored, .* allowed: uint8",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(
    module: str, format: Format, shape: tuple[int, int], message: str
) -> None:
    with pytest.raises(QbenchError, match=message) as error:
        check({module: Scheme(format, Nearest())}, {module: shape}, {})
    assert module in str(error.value)


def test_many_refusals_are_one_message() -> None:
    schemes = {f"model.layers.{i}.mlp.up_proj": Scheme(NF4(), Nearest()) for i in range(20)}
    with pytest.raises(QbenchError, match="and 12 more") as error:
        check(schemes, dict.fromkeys(schemes, (64, 64)), {})
    assert str(error.value).count("\n") == 9


def test_write_refuses_what_check_would(model: ModelSource, tmp_path: Path) -> None:
    with pytest.raises(QbenchError, match="nf4"):
        write(QuantizedSource(model, every(NF4())), tmp_path / "out")
    with pytest.raises(QbenchError, match="no linear is quantized"):
        write(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_checking_imports_no_torch() -> None:
    code = "import sys, qbench.export.gptq; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_target_table_says_what_is_allowed() -> None:
    stores = yaml.safe_load((Path(__file__).parents[2] / "export" / "targets" / "gptq.yaml").read_text())["stores"]
    assert tuple(stores["bits"]) == BITS
    assert tuple(stores["group_size"]) == GROUP_SIZES
