"""The GGUF layout: one file for llama.cpp and what is built on it.

Integer results keep their codes (see `gguf_types`); what is stored differently from the model it was made from:

- scales are float16; a float32 scale is rounded. A zero-point weight stores its minimum, ``-scale * zero_point``,
  rounded to float16.
- dense matrices are float16, vectors float32; q and k rows are in llama.cpp's order.

`write` reads the file back, compares every tensor and reports the largest difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from qbench.errors import QbenchError
from qbench.export.gguf_metadata import architecture_of, file_type, heads_of, network_metadata, network_notes, rope_of
from qbench.export.gguf_types import check_type, refuse, stored_type
from qbench.export.layouts import verify
from qbench.export.report import ExportReport
from qbench.formats.base import FORMATS, QuantizedTensor
from qbench.models.source import ModelSource
from qbench.resources import written_whole
from qbench.scheme import Scheme

if TYPE_CHECKING:
    from qbench.models.gguf_source import GGUFSource

EMBEDDING = "model.embed_tokens.weight"
FILE_NAME = "model.gguf"


def check(
    schemes: Mapping[str, Scheme],
    shapes: Mapping[str, tuple[int, int]],
    config: Mapping[str, Any],
    *,
    type: str = "auto",
) -> None:
    """Raises `QbenchError` naming every module (keys of `schemes`) that `type` cannot store; nothing is loaded.

    `shapes` gives each module's ``[out, in]``.
    """
    check_type(type)
    architecture_of(config)
    problems = []
    for module, scheme in schemes.items():
        try:
            kind = stored_type(module, scheme.format, shapes[module], type).lower()
            if scheme.prune is not None and kind in FORMATS and not FORMATS.get(kind)().holds_zero:
                problems.append(f"{module}: {kind} has no exact zero, so pruned weights would come back")
        except QbenchError as error:
            problems.append(f"{module}: {error}")
        if type == "auto" and scheme.solver.to_dict().get("act_order") == "dynamic":
            problems.append(f"{module}: act_order dynamic scatters a group's columns; act_order static does not")
    refuse(problems)


def other_types(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], type: str = "auto") -> list[str]:
    """Which modules a file of `type` will hold in another type, because of the length of their rows; sentences."""
    found: dict[str, list[str]] = {}
    for module, scheme in schemes.items():
        kind = stored_type(module, scheme.format, shapes[module], type)
        if type != "auto" and kind != type.upper():
            found.setdefault(kind, []).append(module)
    return [_other_type(kind, modules) for kind, modules in found.items()]


def _other_type(kind: str, names: list[str]) -> str:
    return f"{len(names)} linears are {kind}: their rows do not divide into the type's blocks ({names[0]}, ...)."


def check_tokenizer(source: ModelSource, pre_tokenizer: str | None = None) -> None:
    """Raises `QbenchError` when a GGUF file cannot hold the source's tokenizer; reads no weights."""
    _metadata(source, pre_tokenizer)


def read(location: str | Path) -> GGUFSource:
    """Opens a GGUF file, whoever made it."""
    from qbench.models.gguf_source import open_gguf

    return open_gguf(location)


def write(
    source: ModelSource, folder_or_file: Path, *, type: str = "auto", pre_tokenizer: str | None = None
) -> ExportReport:
    """Writes `source` to a ``.gguf`` file (``model.gguf`` in a folder), reads it back and compares.

    `type` is one of `gguf_types.TYPES`; `pre_tokenizer` names the rule of a tokenizer that is not recognised. One
    tensor is in memory at a time, and equal sources give equal bytes. Raises `QbenchError` when GGUF cannot hold the
    model; nothing is left behind then.
    """
    check_type(type)
    path = folder_or_file if folder_or_file.suffix == ".gguf" else folder_or_file / FILE_NAME
    metadata, warnings = _metadata(source, pre_tokenizer)
    with written_whole(path) as part:
        kinds, replaced = _write_tensors(source, part, metadata, type)
        readback = verify(source, read(part))
        nbytes = part.stat().st_size
    notes = []
    if readback.quantized_difference:
        notes.append(f"Quantized weights read back with a difference of up to {readback.quantized_difference:.3g}.")
    notes += [_other_type(kind, names) for kind, names in replaced.items()]
    return ExportReport(
        layout="gguf",
        files=[path],
        nbytes=nbytes,
        tensor_types=dict(Counter(kinds.values())),
        bits_per_weight=8 * nbytes / sum(prod(info.shape) for info in source.tensors.values()),
        max_abs_difference=readback.max_abs_difference,
        worst_tensor=readback.worst_tensor,
        quantized_max_abs_difference=readback.quantized_difference,
        notes=notes,
        warnings=warnings,
    )


def _metadata(source: ModelSource, pre_tokenizer: str | None) -> tuple[dict[str, Any], list[str]]:
    from qbench.export.gguf_vocab import Vocabulary

    metadata = network_metadata(source.config, source.location)
    if EMBEDDING not in source.tensors:
        raise QbenchError(f"{source.location}: tensor {EMBEDDING} is missing.")
    rows = source.tensors[EMBEDDING].shape[0]
    with TemporaryDirectory(prefix="qbench-gguf-") as folder:
        source.write_side_files(Path(folder))
        vocabulary = Vocabulary(Path(folder), source.config, rows, pre_tokenizer)
    return metadata | vocabulary.metadata, network_notes(source.config) + vocabulary.notes


def _write_tensors(
    source: ModelSource, path: Path, metadata: dict[str, Any], requested: str
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Streams every tensor into `path`; gives each one's stored type, and by type the linears that are in another
    one than was asked for, because of the length of their rows."""
    from qbench.export.gguf_container import GGUFWriter
    from qbench.export.gguf_encode import encode
    from qbench.models.gguf_names import ARCHITECTURES, rotary_heads, rows_to_gguf, to_gguf
    from qbench.models.gguf_rope import FACTORS_TENSOR, llama3_factors

    heads, key_heads, head_dim = heads_of(source.config)
    reordered = ARCHITECTURES[architecture_of(source.config)].interleaved_rows
    rope = rope_of(source.config)
    names: dict[str, str] = {}
    for name in source.tensors:
        stored = to_gguf(name)
        if stored is None:
            raise QbenchError(f"{source.location}: tensor {name!r} has no place in a GGUF file of this architecture.")
        names[stored] = name
    shapes = {stored: source.tensors[name].shape for stored, name in names.items()}
    extra = {}
    if rope["rope_type"] == "llama3":
        extra[FACTORS_TENSOR] = llama3_factors(rope, rope["rope_theta"], head_dim)
        shapes[FACTORS_TENSOR] = (head_dim // 2,)
    kinds: dict[str, str] = {}
    replaced: defaultdict[str, list[str]] = defaultdict(list)
    with GGUFWriter(path, shapes, metadata) as writer:
        for stored in shapes:
            tensor = extra[stored] if stored in extra else source.load(names[stored])
            kind, data = encode(names.get(stored, stored), tensor, requested)
            count = rotary_heads(stored, heads, key_heads) if reordered else None
            if count is not None:  # every row is encoded by itself, so its bytes move as one
                rows = data.reshape(shapes[stored][0], -1)
                data = rows_to_gguf(rows, count)
            writer.add(stored, kind, data.contiguous().numpy())
            kinds[names.get(stored, stored)] = kind
            if kind != "F32" and ".layers." in names[stored]:
                own = requested == "auto"
                if (isinstance(tensor, QuantizedTensor) and kind == "F16") if own else kind != requested.upper():
                    replaced[kind].append(names[stored])
        metadata["general.file_type"] = file_type(Counter(kinds.values()))
        writer.finish()
    return kinds, replaced
