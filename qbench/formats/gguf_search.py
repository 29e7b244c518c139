"""The searches for scales behind GGUF's block types, as llama.cpp's quantizers do them, over many blocks at once.

`x` and `weights` are float32 ``[n, blocks]``: a block is a column here, so that every step runs over all blocks. Found
is one value a block, ``[blocks]``. Every search tries a grid of scales near ``range / steps``, rounds, and keeps the
scale (and minimum) that fits those codes best in the weighted squared error. The codes themselves are not returned
but the ``inverse`` (and ``origin``) that they came from: ``code = round(inverse * (x - origin))``, cut to the range;
halves go to the even code.

Near-ties are common, and which side wins hangs on the last bit. So sums run in the order of the elements and products
are grouped as llama.cpp has them; its library is built without fused multiply-add, which agrees with torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

ZERO = 1e-15  # a block whose magnitudes are all smaller is zero
TRIES = [i for i in range(-9, 10) if i]  # tenths of a step around the plain scale


def _grid(start: float, step: float, tries: range | list[int], base: int) -> list[float]:
    """``start + step * i + base`` for each i of `tries`, each operation rounded to float32."""
    return [float(torch.tensor(step) * i + start + base) for i in tries]


def ordered_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, term after term in float32."""
    total = values[0].clone()
    for row in values[1:]:
        total += row
    return total


def divided(number: float, by: torch.Tensor) -> torch.Tensor:
    """``number / by``, rounded once (the operator multiplies by the reciprocal)."""
    return torch.div(torch.tensor(number, dtype=by.dtype, device=by.device), by)


def root(values: torch.Tensor) -> torch.Tensor:
    """The square root, rounded once (torch's own is off by a bit now and then in float32)."""
    return values.double().sqrt().float()


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """0 where the denominator is not positive."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


def extreme(x: torch.Tensor) -> torch.Tensor:
    """The value of largest magnitude of each column, with its sign; the first of several."""
    return x.gather(0, x.abs().argmax(0, keepdim=True)).squeeze(0)


def symmetric(x: torch.Tensor, half: int, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``-half .. half - 1``: the `scale` and the `inverse`. The extreme value starts at code ``-half``."""
    far = extreme(x)
    weighted = weights * x

    def fit(tried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = (tried * x).round_().clamp_(-half, half - 1)
        return ordered_sum(weighted * codes), ordered_sum(weights * codes * codes)

    inverse = divided(-half, far)
    dot, square = fit(inverse)
    scale = _ratio(dot, square)
    best = scale * dot
    for steps in _grid(0.0, 0.1, TRIES, half):
        tried = divided(-steps, far)
        dot, square = fit(tried)
        better = (square > 0) & (dot * dot > best * square)
        inverse, scale = torch.where(better, tried, inverse), torch.where(better, dot / square, scale)
        best = torch.where(better, scale * dot, best)
    zero = far.abs() < ZERO
    return scale.masked_fill(zero, 0), inverse.masked_fill(zero, 0)


def affine(
    x: torch.Tensor,
    top: int,
    weights: torch.Tensor,
    start: float,
    step: float,
    count: int,
    *,
    absolute: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes ``0 .. top`` over a minimum that is never above 0: `scale`, `minimum`, `inverse`, `origin`.

    The range is divided into ``top``, then ``top + start + step * i`` for i up to `count`; each time scale and minimum
    are those of the weighted least squares for the codes. `absolute`: errors are compared by magnitude, not squared.
    """

    def error(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
        difference = (scale * codes).add_(minimum).sub_(x)
        return ordered_sum(weights * (difference.abs_() if absolute else difference.square_()))

    low, high = x.amin(0).clamp_(max=0), x.amax(0)
    flat = high <= low
    sum_w, sum_x = ordered_sum(weights), ordered_sum(weights * x)
    inverse, origin, minimum = divided(top, high - low), low, low
    scale = 1 / inverse
    best = error((inverse * (x - origin)).round_().clamp_(0, top), scale, minimum)
    for steps in _grid(start, step, range(count + 1), top):
        tried = divided(steps, high - minimum)
        codes = (tried * (x - minimum)).nan_to_num_(0, top, 0).round_().clamp_(0, top)
        by_codes = weights * codes
        sum_l, sum_l2, sum_xl = ordered_sum(by_codes), ordered_sum(by_codes * codes), ordered_sum(by_codes * x)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        above = new_minimum > 0
        new_scale = torch.where(above, sum_xl / sum_l2, new_scale)
        new_minimum = new_minimum.masked_fill(above, 0)
        found = error(codes, new_scale, new_minimum)
        better = (determinant > 0) & (found < best)
        inverse, origin = torch.where(better, tried, inverse), torch.where(better, minimum, origin)
        scale, minimum = torch.where(better, new_scale, scale), torch.where(better, new_minimum, minimum)
        best = torch.where(better, found, best)
    return scale.masked_fill(flat, 0), torch.where(flat, low, minimum), inverse.masked_fill(flat, 0), origin


def unsigned(x: torch.Tensor, top: int, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``0 .. top`` of values that are not negative: the `scale` ``[blocks]`` and the codes ``[n, blocks]``.

    After the grid, each code in turn moves to where it fits best beside the others, until none does (5 rounds).
    """

    def error(tried: torch.Tensor, cut: int | None) -> torch.Tensor:
        difference = x - (1 / tried) * (tried * x).round_().clamp_(max=cut or torch.inf)
        return ordered_sum(weights * difference * difference)

    high = x.amax(0).clamp_(min=0)
    inverse = divided(top, high)
    best = error(inverse, None)
    for steps in _grid(0.0, 0.1, TRIES[5:-5], top):
        tried = divided(steps, high)
        found = error(tried, top)
        better = found < best
        inverse, best = torch.where(better, tried, inverse), torch.where(better, found, best)
    codes = (inverse * x).round_().clamp_(0, top).nan_to_num_(0)
    scale, codes = _descend(x, codes, weights, 0, top)
    zero = high < ZERO
    return scale.masked_fill(zero, 0), codes.masked_fill(zero, 0)


def signed_descent(x: torch.Tensor, half: int) -> torch.Tensor:
    """The scale for codes ``-half .. half - 1`` weighted by ``x * x``, found by moving each code in turn."""
    far = extreme(x)
    codes = (divided(-half, far) * x).round_().clamp_(-half, half - 1)
    scale, _ = _descend(x, codes, x * x, -half, half - 1)
    return scale.masked_fill(far.abs() < ZERO, 0)


def _descend(
    x: torch.Tensor, codes: torch.Tensor, weights: torch.Tensor, lowest: int, highest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least-squares scale and the codes after coordinate descent."""
    weighted = weights * x
    dot, square = ordered_sum(weighted * codes), ordered_sum(weights * codes * codes)
    for _ in range(5):
        changed = False
        for i in range(len(x)):
            dot_rest = dot - weighted[i] * codes[i]
            square_rest = square - weights[i] * codes[i] * codes[i]
            moved = (x[i] * square_rest / dot_rest).nan_to_num_(0).round_().clamp_(lowest, highest)
            dot_new = dot_rest + weighted[i] * moved
            square_new = square_rest + weights[i] * moved * moved
            better = (dot_rest > 0) & (moved != codes[i]) & (square_new > 0)
            better &= dot_new * dot_new * square > dot * dot * square_new
            if lowest == 0:
                better &= square_rest > 0
            codes[i] = torch.where(better, moved, codes[i])
            dot, square = torch.where(better, dot_new, dot), torch.where(better, square_new, square)
            changed = changed or bool(better.any())
        if not changed:
            break
    return _ratio(dot, square), codes
