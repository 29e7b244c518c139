"""Importance matrices of models: collected in one pass, block by block in little memory, and given to solvers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qbench.calibration.batches import token_batches
from qbench.calibration.imatrix import Imatrix, SquareSum
from qbench.compress.skeleton import Skeleton
from qbench.errors import QbenchError
from qbench.models.source import ModelSource
from qbench.models.structure import linear_names
from qbench.progress import progress_bar
from qbench.scheme import Scheme
from qbench.solvers.known_importance import KnownImportance
from qbench.solvers.nearest import Nearest


@torch.inference_mode()
def collect_imatrix(
    source: ModelSource, rows: Sequence[Sequence[int]], *, dataset: str = "", device: torch.device | None = None
) -> Imatrix:
    """Squares of the inputs of every linear of the decoder blocks, over the token `rows`; nothing is quantized.

    `dataset` says where the rows come from. Raises `QbenchError` naming the module whose inputs are not finite.
    """
    skeleton = Skeleton(source, device or torch.device("cpu"))
    names = linear_names(source.tensors, source.config)
    hidden, calls = skeleton.embed(token_batches(rows))
    entries: dict[str, SquareSum] = {}
    with progress_bar("imatrix", len(skeleton.blocks)) as bar:
        for index in range(len(skeleton.blocks)):
            prefix = skeleton.block_name(index) + "."
            with skeleton.filled(skeleton.block_name(index)) as block, ExitStack() as hooks:
                for name in (name for name in names if name.startswith(prefix)):
                    linear = block.get_submodule(name.removeprefix(prefix))
                    assert isinstance(linear, nn.Linear)
                    entry = entries[name] = SquareSum(torch.zeros(linear.in_features, device=skeleton.device))

                    def note(_: nn.Module, args: Any, entry: SquareSum = entry) -> None:
                        entry.add(args[0])

                    hooks.callback(linear.register_forward_pre_hook(note).remove)
                for i, batch in enumerate(hidden):
                    hidden[i] = skeleton.run_block(block, batch, calls[i][index])
            bar.advance()
    for name, entry in entries.items():
        if not bool(torch.isfinite(entry.total).all()):
            raise QbenchError(f"{name}: its inputs are NaN or infinite on the calibration rows.")
    return Imatrix(entries, max(map(len, rows)), [dataset] if dataset else [], source.revision)


def with_importance(schemes: Mapping[str, Scheme], imatrix: Imatrix) -> dict[str, Scheme]:
    """`schemes` by module, those that weigh by importance with what `imatrix` says instead of statistics of their own.

    Modules whose importance is equal, as those that read one tensor, get equal schemes.
    """
    made: dict[tuple[Nearest, bytes | None], KnownImportance] = {}
    found = dict(schemes)
    for name, scheme in schemes.items():
        if not scheme.weighs_importance:
            continue
        assert isinstance(scheme.solver, Nearest)
        entry = imatrix.entry(name)
        known = entry.total / entry.tokens if entry is not None and entry.tokens else None
        key = scheme.solver, None if known is None else known.cpu().numpy().tobytes()
        solver = made.setdefault(key, KnownImportance(scheme.solver, known))
        found[name] = replace(scheme, solver=solver)
    return found
