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
