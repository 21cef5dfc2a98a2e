"""Experts of routed tokens, by one launch for gate and up and one for down."""

import pytest
import torch
from torch.nn import functional as F

from domino_spec.engine.kernels.experts import Experts, Gate, route, run_experts

HIDDEN, WIDTH, COUNT, CHOSEN = 40, 24, 5, 2


def drawn(tokens: int, dtype: torch.dtype, device: torch.device):
    generator = torch.Generator().manual_seed(tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    own = Experts(
        gate_up=normal(COUNT, 2 * WIDTH, HIDDEN) / 4, down=normal(COUNT, HIDDEN, WIDTH) / 4
    )
    chances = torch.rand(tokens, COUNT - 1, generator=generator)  # nobody asks the last expert
    weights, chosen = chances.topk(CHOSEN)
    return normal(tokens, HIDDEN), own, chosen.to(device), weights.to(device, dtype)


def by_hand(x, own, chosen, weights):
    """Token by token in float64."""
    rows = []
    for row, experts_of, factors in zip(x.double(), chosen.tolist(), weights.double(), strict=True):
        total = torch.zeros_like(row)
        for expert, factor in zip(experts_of, factors, strict=True):
            gate, up = (own.gate_up[expert].double() @ row).chunk(2)
            total += factor * (own.down[expert].double() @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("how", ["kernel", "reference"])
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, torch.float32), (45, torch.float32), (45, torch.bfloat16)], ids=str
)
def test_each_token_is_the_sum_of_its_experts(monkeypatch, device, how, tokens, dtype):
    """Experts without a token, with a few, and with more than a tile of them."""
    if how == "reference":
        monkeypatch.setenv("DOMINO_KERNELS", "off")
    x, own, chosen, weights = drawn(tokens, dtype, device)
    found = run_experts(x, route(chosen, weights, COUNT), own, Gate())
    truth = by_hand(x, own, chosen, weights)
    error = (found.double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert error.max() < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_token_among_others_is_what_it_is_alone_to_the_last_bit(device):
    x, own, chosen, weights = drawn(7, torch.float32, device)
    together = run_experts(x, route(chosen, weights, COUNT), own, Gate())
    alone = run_experts(x[3:4], route(chosen[3:4], weights[3:4], COUNT), own, Gate())
    assert torch.equal(alone[0], together[3])


def test_the_host_need_not_know_the_routing():
    """What a CUDA graph captures must not read results back: these tensors have none."""
    chosen = torch.empty(3, CHOSEN, dtype=torch.long, device="meta")
    routing = route(chosen, chosen.float(), COUNT)
    assert (len(routing.order), len(routing.offsets)) == (3 * CHOSEN, COUNT + 1)
