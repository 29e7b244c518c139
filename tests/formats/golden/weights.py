"""The weights that the judges of these files quantize: random ones, and rows made of what goes wrong at the edges."""

import torch

TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints of E2M1
TOPS = (7.0, 6.0, 4.0, 1.75, 1.74, 1.9, 1.95, 2.0, 448.0, 464.0, 480.0, 500.0, 896.0)  # largest magnitudes of a block


def random_weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Bfloat16 weights, rows of different size, a few of them far out."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    far = torch.rand(rows, columns, generator=generator) < 0.01
    return (weight * torch.where(far, 8.0, 1.0)).bfloat16()


def edge_weight() -> torch.Tensor:
    """Float32 ``[rows, 32]``, a row for each case: its halves have the same largest magnitude."""
    rows = [
        torch.zeros(32),
        -torch.zeros(32),
        torch.tensor([6.0, *TIES, -6.0, *(-tie for tie in TIES)]).repeat(2),  # ties at scale 1
        torch.tensor(
            [6.0, 1e-3, -1e-3, 0.0, -0.0, 1e-30, -1e-30, 0.2499, -0.2501, -0.2499, 5.001, 4.999, 1.0, -1.0, 2.0, 3.0]
        ).repeat(2),
        torch.full((32,), 1e-40),  # subnormal
        torch.full((32,), 2.0**-126),
        torch.full((32,), 1.6e38),
    ]
    ramp = torch.linspace(-1, 1, 16).repeat(2)
    for top in TOPS:
        for exact in (top, float(torch.nextafter(torch.tensor(top), torch.tensor(0.0)))):
            rows.append(ramp * exact)
    return torch.stack(rows)
