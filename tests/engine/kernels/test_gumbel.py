"""One noise for both: PyTorch and Triton hash to the same integers."""

import pytest
import torch
import triton
import triton.language as tl

from domino_spec.decoding.noise import gumbel, hashed
from domino_spec.engine.kernels.gumbel import gumbel_of, hashed_bits

SEEDS = [0, 1, 2**31, 2**32 + 7, 2**62 - 1, -5]
POSITIONS = [0, 1, 4095, 2**31 + 3]


@triton.jit
def _both(seeds, positions, tokens, bits, noise, COUNT: tl.constexpr):
    row, index = tl.program_id(0), tl.arange(0, COUNT)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    ids = tl.load(tokens + index)
    tl.store(bits + row * COUNT + index, hashed_bits(seed, position, ids).to(tl.int64))
    tl.store(noise + row * COUNT + index, gumbel_of(seed, position, ids))


@pytest.fixture
def drawn(device):
    seeds, positions = torch.meshgrid(torch.tensor(SEEDS), torch.tensor(POSITIONS), indexing="ij")
    tokens = torch.randint(152_000, (64,), generator=torch.Generator().manual_seed(0))
    return seeds.flatten().to(device), positions.flatten().to(device), tokens.to(device)


def test_both_give_identical_integers(drawn, device):
    seeds, positions, tokens = drawn
    bits = torch.zeros(len(seeds), len(tokens), dtype=torch.int64, device=device)
    noise = torch.zeros(bits.shape, device=device)
    _both[(len(seeds),)](seeds, positions, tokens, bits, noise, COUNT=len(tokens))
    expected = hashed(seeds[:, None], positions[:, None], tokens)
    assert torch.equal(bits, expected)
    torch.testing.assert_close(noise, gumbel(expected), rtol=1e-4, atol=1e-5)
