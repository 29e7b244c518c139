"""AWQ and SmoothQuant on their own: scales against the formulas of the papers, clipping against a plain search."""

from __future__ import annotations

import pytest
import torch

from qbench.calibration.channels import ChannelStatistics
from qbench.errors import QbenchError
from qbench.formats.integer import Integer
from qbench.transforms.awq import AWQ
from qbench.transforms.base import Readers
from qbench.transforms.clipping import clamped, clip_search
from qbench.transforms.smoothquant import SmoothQuant

INT4 = Integer(bits=4, group_size=16, symmetric=False)


def readers(weights: list[torch.Tensor], inputs: torch.Tensor, format: Integer = INT4) -> Readers:
    """Linears that are judged by their own outputs, fed by a norm of weight 1."""

    def loss(scales: torch.Tensor) -> float:
        rounded = [format.quantize(weight * scales).dequantize() / scales for weight in weights]
        return sum(float((inputs @ (a - b).T).square().mean()) for a, b in zip(weights, rounded, strict=True))

    return Readers(
        mean_abs=inputs.float().abs().mean(0),
        max_abs=inputs.float().abs().amax(0),
        weights=weights,
        block_size=format.block_size(weights[0].shape[1]),
        largest_produced=torch.ones(inputs.shape[1]),
        loss=loss,
    )


def outlier_inputs(tokens: int = 200, channels: int = 64) -> torch.Tensor:
    inputs = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(0))
    inputs[:, ::13] *= 20
    return inputs


def random_weights(*rows: int, channels: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, channels, generator=generator) for n in rows]


@pytest.mark.parametrize("form", ["activation", "duo"])
def test_scales_are_those_of_the_formula(form: str) -> None:
    """AutoAWQ's search written out: normalised weight means, ratios in twentieths, the best output error."""
    weights, x = random_weights(48, 32), outlier_inputs()
    stacked = torch.cat(weights).view(-1, 16)
    w_mean = (stacked.abs() / (stacked.abs().amax(1, keepdim=True) + 1e-6)).view(-1, 64).mean(0)
    x_mean = x.abs().mean(0)
    best_error, best_scales, best_ratio = float("inf"), None, None
    for i in range(20):
        ratio = i / 20
        if i == 0:
            s = torch.ones(64)
        elif form == "duo":
            s = (x_mean.pow(ratio) / (w_mean.pow(1 - ratio) + 1e-4)).clamp(min=1e-4)
        else:
            s = x_mean.pow(ratio).clamp(min=1e-4)
        s = s / (s.max() * s.min()).sqrt()
        error = 0.0
        for w in weights:
            grouped = (w * s).view(-1, 16)
            low, high = grouped.amin(1, keepdim=True).clamp(max=0), grouped.amax(1, keepdim=True).clamp(min=0)
            step = ((high - low) / 15).half().float()
            zero = (-low / step).round()
            rounded = (((grouped / step).round() + zero).clamp(0, 15) - zero) * step
            error += (x @ (rounded.view_as(w) / s - w).T).square().mean().item()
        if error < best_error:
            best_error, best_scales, best_ratio = error, s, ratio
    choice = AWQ(form=form).choose(readers(weights, x))
    assert choice is not None
    assert choice.detail["ratio"] == best_ratio != 0
    torch.testing.assert_close(choice.scales, best_scales)
    assert choice.detail["loss"] == pytest.approx(best_error, rel=1e-4)


def test_scales_lower_the_error_where_activations_have_outliers() -> None:
    group = readers(random_weights(48), outlier_inputs())
    choice = AWQ().choose(group)
    assert choice is not None
    assert choice.detail["loss"] < 0.7 * group.loss(torch.ones(64))


@pytest.mark.trap(22)
@pytest.mark.parametrize("magnitude", [1e-4, 300.0])
@pytest.mark.parametrize("transform", [AWQ(form="both"), SmoothQuant(), SmoothQuant(alpha="search")], ids=str)
def test_small_and_large_float16_activations_give_usable_scales(magnitude: float, transform: AWQ | SmoothQuant) -> None:
    inputs = (outlier_inputs() * magnitude / 20).half().float()
    group = readers([weight.half().float() for weight in random_weights(48)], inputs)
    choice = transform.choose(group)
    assert choice is not None
    assert bool((torch.isfinite(choice.scales) & (choice.scales > 0)).all())


@pytest.mark.trap(22)
def test_scales_that_overflow_float16_are_not_taken() -> None:
    """A channel that is nearly silent but whose producer is large: dividing it by its small scale would overflow."""
    inputs = outlier_inputs()
    inputs[:, 5] = 0
    group = readers(random_weights(48), inputs)
    huge = Readers(**{**vars(group), "largest_produced": torch.full((64,), 6e4)})
    choice = AWQ(form="both").choose(huge)
    assert choice is not None
    assert float((6e4 / choice.scales).max()) <= 65504
    assert SmoothQuant(alpha=1.0).choose(huge) is None


def test_smoothquant_scales_are_those_of_the_formula() -> None:
    weights, x = random_weights(48, 32), outlier_inputs()
    choice = SmoothQuant(alpha=0.7).choose(readers(weights, x))
    assert choice is not None
    for channel in (0, 1, 13):
        w_max = max(float(weight[:, channel].abs().max()) for weight in weights)
        expected = float(x[:, channel].abs().max()) ** 0.7 / w_max**0.3
        assert float(choice.scales[channel]) == pytest.approx(expected, rel=1e-5)


def test_searched_alpha_is_the_best_of_the_fixed_ones() -> None:
    group = readers(random_weights(48, 32), outlier_inputs())
    searched = SmoothQuant(alpha="search").choose(group)
    fixed = [SmoothQuant(alpha=i / 10).choose(group) for i in range(11)]
    assert searched is not None
    assert searched.detail["loss"] == min(choice.detail["loss"] for choice in fixed if choice is not None)


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_takes_the_best_fraction_for_each_block(symmetric: bool) -> None:
    """Block by block and row by row against a plain loop over outputs."""
    format = Integer(bits=3, group_size=16, symmetric=symmetric)
    weight, inputs = random_weights(5, channels=40)[0], outlier_inputs(60, 40)
    statistics = ChannelStatistics(40, 60, torch.device("cpu"), [16])
    for part in inputs.split(13):
        statistics.add(part)
    low, high = clip_search(weight, format, statistics.grams[16])
    for row in range(5):
        for block, columns in enumerate((slice(0, 16), slice(16, 32), slice(32, 40))):
            w, x = weight[row : row + 1, columns], inputs[:, columns].double()
            top = float(w.abs().max()) if symmetric else float(w.max())
            bottom = -top if symmetric else float(w.min())
            errors = []
            for i in range(10):
                cut = w.clamp(bottom * (1 - i / 20), top * (1 - i / 20))
                rounded = format.quantize(cut).dequantize()
                errors.append(float((x @ (rounded - w).double().T).square().sum()))
            factor = 1 - errors.index(min(errors)) / 20
            assert float(high[row, block]) == pytest.approx(top * factor, rel=1e-6)
            assert float(low[row, block]) == pytest.approx(bottom * factor, rel=1e-6)
    before, after = (format.quantize(w).dequantize() for w in (weight, clamped(weight, (low, high), 16)))
    errors = [float((inputs @ (w - weight).T).square().sum()) for w in (before, after)]
    assert errors[1] < errors[0]


def test_queries_and_keys_and_formats_without_a_range_are_not_clipped() -> None:
    for name in ("self_attn.q_proj", "self_attn.k_proj", "attention.query_key_value", "self_attn.qkv_proj"):
        assert not AWQ().clips(name, INT4)
    assert not AWQ().clips("mlp.down_proj", Integer(bits=8, granularity="tensor"))
    assert not AWQ(clip=False).clips("mlp.down_proj", INT4)
    assert not SmoothQuant().clips("mlp.down_proj", INT4)
    assert AWQ().clips("mlp.down_proj", INT4)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(QbenchError, match="grid is 0"):
        AWQ(grid=0)
    with pytest.raises(QbenchError, match=r"alpha is 1\.5"):
        SmoothQuant(alpha=1.5)
