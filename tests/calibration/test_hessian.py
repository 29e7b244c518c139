import pytest
import torch

from qbench.calibration.hessian import InputStatistics, relative_output_error
from qbench.errors import QbenchError


@pytest.mark.trap(12)
def test_batching_makes_no_difference() -> None:
    rows = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))
    together, one_by_one = (InputStatistics(32, torch.device("cpu")) for _ in range(2))
    together.add(rows)
    for row in rows:
        one_by_one.add(row)
    expected = torch.einsum("rti,rtj->ij", rows.double(), rows.double()) / 64
    for statistics in (together, one_by_one):
        assert statistics.tokens == 64
        assert (statistics.hessian("layer") - expected).abs().max() < 1e-5


@pytest.mark.trap(9)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_name_the_layer(bad: float) -> None:
    statistics = InputStatistics(4, torch.device("cpu"))
    statistics.add(torch.tensor([[1.0, bad, 0.0, 0.0]]))
    with pytest.raises(QbenchError, match=r"model\.layers\.3\.mlp\.up_proj"):
        statistics.hessian("model.layers.3.mlp.up_proj")


def test_relative_error_is_that_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(50, 8, generator=generator), torch.randn(6, 8, generator=generator)
    other = weight + 0.1 * torch.randn(6, 8, generator=generator)
    outputs = inputs.double() @ weight.double().T
    expected = torch.linalg.norm(inputs.double() @ other.double().T - outputs) / torch.linalg.norm(outputs)
    statistics = InputStatistics(8, torch.device("cpu"))
    statistics.add(inputs)
    assert relative_output_error(weight, other, statistics.hessian("x")) == pytest.approx(float(expected), rel=1e-5)
    assert relative_output_error(weight, weight, statistics.hessian("x")) == 0
    assert relative_output_error(torch.zeros(6, 8), torch.zeros(6, 8), statistics.hessian("x")) == 0


def test_wide_inputs_give_the_whole_symmetric_matrix() -> None:
    rows = torch.randn(3, 50, 600, generator=torch.Generator().manual_seed(0))
    statistics = InputStatistics(600, torch.device("cpu"))
    for count, row in enumerate(rows, 1):
        statistics.add(row)
        expected = rows[:count].flatten(0, 1).double()
        found = statistics.hessian("layer")  # asked for in between as well
        assert torch.allclose(found.double(), expected.T @ expected / len(expected), atol=1e-5)
        assert torch.equal(found, found.T)


@pytest.mark.parametrize("inputs_size", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("weight_size", [1e-37, 1e-20, 1e19, 1e37])
def test_relative_error_is_the_same_for_weights_and_inputs_of_any_size(weight_size: float, inputs_size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(50, 8, generator=generator), torch.randn(6, 8, generator=generator)
    other = weight + 0.1 * torch.randn(6, 8, generator=generator)
    expected = torch.linalg.norm(inputs @ (other - weight).T) / torch.linalg.norm(inputs @ weight.T)
    statistics = InputStatistics(8, torch.device("cpu"))
    statistics.add(inputs * inputs_size)
    found = relative_output_error(weight * weight_size, other * weight_size, statistics.hessian("x"))
    assert found == pytest.approx(float(expected), rel=1e-4)
