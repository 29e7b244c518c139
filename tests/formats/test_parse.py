import pytest

from qbench.errors import QbenchError
from qbench.formats.base import FORMATS, format_from_dict
from qbench.solvers.base import SOLVERS, solver_from_dict


@pytest.mark.parametrize("name", FORMATS.names())
def test_every_format_round_trips_as_plain_values(name: str) -> None:
    format = FORMATS.get(name)()
    assert format_from_dict(format.to_dict()) == format


@pytest.mark.parametrize("name", SOLVERS.names())
def test_every_solver_round_trips_as_plain_values(name: str) -> None:
    solver = SOLVERS.get(name)()
    assert solver_from_dict(solver.to_dict()) == solver


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs a name"),
        ({"name": "itn"}, "Did you mean 'int'"),
        ({"name": "int", "group_sise": 32}, "Did you mean 'group_size'"),
        ({"name": "int", "bits": "4"}, "a whole number"),
        ({"name": "int", "bits": True}, "a whole number"),
        ({"name": "int", "symmetric": 1}, "true or false"),
        ({"name": "int", "granularity": "row"}, "tensor, channel, group"),
        ({"name": "int", "bits": 12}, "2 to 8"),
    ],
)
def test_mistakes_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(QbenchError, match=message):
        format_from_dict(fields)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300, -(10**400), True, "0.1"])
def test_numbers_are_finite_in_float32(value: object) -> None:
    with pytest.raises(QbenchError, match="allowed: a finite number"):
        solver_from_dict({"name": "hqq", "beta": value})


def test_whole_numbers_are_such_as_any_size_fits_in() -> None:
    with pytest.raises(QbenchError, match=r"a whole number below 2\*\*31"):
        format_from_dict({"name": "nf4", "group_size": 2**31})


def test_long_values_are_shortened() -> None:
    for fields in ({"name": "x" * 9999}, {"name": "int", "y" * 9999: 1}, {"name": "int", "bits": "z" * 9999}):
        with pytest.raises(QbenchError) as caught:
            format_from_dict(fields)
        assert len(str(caught.value)) < 400


def test_a_whole_number_where_any_is_allowed_is_that_number() -> None:
    whole, point = (solver_from_dict({"name": "hqq", "beta": value}) for value in (10**30, 1e30))
    assert repr(whole) == repr(point)
    assert "iterations=20," in repr(solver_from_dict({"name": "hqq", "iterations": 20}))
