"""The noise of sampling is fair, and belongs to its place."""

import itertools
import math

import torch

from domino_spec.decoding.noise import (
    ACCEPTS,
    DRAFTS,
    gumbel,
    hashed,
    hashed_after,
    key_of,
    keys,
    noised,
    salted,
    salted_one,
    uniform,
    uniform_of,
)


def chi_square(counts, expected):
    """In standard deviations above its mean, for the degrees of freedom at hand."""
    freedom = len(counts) - 1
    value = float(((counts - expected) ** 2 / expected).sum())
    return (value - freedom) / math.sqrt(2 * freedom)


def test_bits_are_uniform_and_uncorrelated():
    seeds = torch.tensor([0, 1, 2, 3, 2**32, 2**62])[:, None, None]
    positions = torch.arange(60)[None, :, None]
    bits = hashed(seeds, positions, torch.arange(500))  # [6, 60, 500]
    assert bits.min() >= 0
    assert bits.max() < 2**32
    counts = (bits >> 22).flatten().bincount(minlength=1024)
    assert abs(chi_square(counts, torch.full((1024,), bits.numel() / 1024))) < 4
    for bit in range(32):  # each bit is fair
        share = ((bits >> bit) & 1).double().mean()
        assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(bits.numel())
    u = bits.double() / 2**32 - 0.5
    for axis in range(3):  # next seed, next position, next token
        one, other = u.narrow(axis, 1, u.shape[axis] - 1), u.narrow(axis, 0, u.shape[axis] - 1)
        correlation = (one * other).mean() * 12
        assert abs(correlation) < 4 / math.sqrt(one.numel())


def test_keys_do_not_collide():
    """Two words a key: no two of 250 000 (seed, position) pairs see the same noise."""
    seeds, positions = torch.arange(500)[:, None, None], torch.arange(500)[None, :, None]
    bits = hashed(seeds, positions, torch.arange(2))  # two words of noise tell pairs apart
    assert len((bits[..., 0] << 31 ^ bits[..., 1]).flatten().unique()) == 250_000


def test_gumbel_noise_is_exact_in_both_tails():
    bits = torch.tensor([0, 1, 1000, 2**26 - 1, 2**26, 2**31, 2**32 - 300, 2**32 - 1])
    u = (bits.double() + 0.5) / 2**32
    expected = -(-torch.log1p(-u.clamp(max=1 - 2.0**-24))).log()
    noise = gumbel(bits)
    assert noise.isfinite().all()
    # near 1, u itself is rounded to float32: half a unit of 2^-24 of 1 - u = 7e-8 at the end
    assert (noise.double() - expected)[:-2].abs().max() < 1e-5
    assert (noise.double() - expected).abs().max() < 0.1


def test_the_noise_has_a_gumbels_mean_and_variance():
    noise = gumbel(hashed(torch.tensor(11), torch.tensor(5), torch.arange(200_000)))
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.var() - torch.pi**2 / 6) < 0.03


def test_temperature_zero_is_greedy_and_others_draw_from_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(20_000, -1)
    positions, seeds = torch.arange(20_000), torch.full((20_000,), 3)
    cold = noised(logits, torch.arange(3)[None], torch.zeros(20_000), seeds, positions)
    assert torch.equal(cold, logits)
    warm = noised(logits, torch.arange(3)[None], torch.full((20_000,), 0.5), seeds, positions)
    shares = warm.argmax(dim=1).bincount(minlength=3) / 20_000
    torch.testing.assert_close(shares, (logits[0] / 0.5).softmax(dim=0), rtol=0.0, atol=0.01)


def test_one_place_has_the_same_key_without_tensors():
    numbers = [0, 1, 77, 2**31, 2**32 - 1, 2**40 + 3, 2**62, -1, -(2**63), DRAFTS]
    for seed, position in itertools.product(numbers, numbers):
        pair = torch.tensor(seed), torch.tensor(position)
        assert key_of(seed, position) == tuple(map(int, keys(*pair)))
        assert salted_one(seed, position, ACCEPTS) == int(salted(*pair, ACCEPTS))
        bits = hashed(*pair, torch.arange(3))
        assert hashed_after(seed, position, torch.arange(3)).equal(bits)
        assert uniform_of(seed, position) == float(uniform(bits[0]))
