"""Full-precision weights under a half-precision model."""

import pytest
import torch
from torch import nn

from domino_spec.checkpoints.quantise import quantise
from domino_spec.training.optimiser import Masters, Muon, Optimiser


def weights(values, dtype=torch.bfloat16):
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor(values, dtype=dtype))
    return module, Masters(module.named_parameters())


def test_small_steps_add_up_where_half_precision_would_round_each_away():
    step = 1e-3  # at 1.0 bfloat16 knows 1.0078 and 0.9961, nothing between
    module, masters = weights([1.0])
    optimiser = torch.optim.SGD(masters.parameters, lr=step)
    plain = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    rounding = torch.optim.SGD([plain], lr=step)
    for _ in range(100):
        for parameter in (module.weight, plain):
            parameter.grad = torch.ones(1, dtype=torch.bfloat16)
        masters.take_gradients()
        optimiser.step()
        rounding.step()
        masters.give_weights()
        masters.clear()
    assert plain.item() == 1.0, "without masters nothing is learnt: the test is not blind"
    assert masters.parameters[0].item() == pytest.approx(0.9, abs=1e-5)
    assert module.weight.item() == pytest.approx(0.9, abs=0.004)
    assert module.weight.dtype == torch.bfloat16
    assert masters.parameters[0].dtype == torch.float32


def test_the_model_gets_the_rounded_masters():
    module, masters = weights([1.0, -2.0, 3.0])
    with torch.no_grad():
        masters.parameters[0] += torch.tensor([1e-4, 0.3, -0.7])
    masters.give_weights()
    assert module.weight.equal(masters.parameters[0].bfloat16())


def test_the_model_gets_what_packing_will_keep_while_masters_go_on():
    module = nn.Module()
    module.matrix = nn.Parameter(torch.randn(6, 100, generator=torch.manual_seed(1)))
    module.norm = nn.Parameter(torch.rand(5))
    masters = Masters(module.named_parameters(), bits=4)
    before = [p.detach().clone() for p in masters.parameters]
    masters.give_weights()
    assert module.matrix.equal(before[0]), "not yet"
    masters.packing = True
    masters.give_weights()
    codes, scales = quantise(before[0], bits=4, group_size=64)
    kept = codes.float() * scales.float().repeat_interleave(64, dim=1)[:, :100]
    assert module.matrix.equal(kept)
    assert not kept.equal(before[0])
    assert module.norm.equal(before[1])
    assert masters.parameters[0].equal(before[0])
    assert masters.state_dict()["matrix"].equal(before[0])
    assert masters.state_dict(packed=True)["matrix"].equal(kept)


def test_gradients_are_summed_in_full_precision():
    module, masters = weights([1.0])
    small = 2**-9
    for value in (1.0, *[small] * 64):
        module.weight.grad = torch.tensor([value], dtype=torch.bfloat16)
        masters.take_gradients()
        assert module.weight.grad is None
    assert masters.parameters[0].grad.dtype == torch.float32
    assert masters.parameters[0].grad.item() == 1.0 + 64 * small
    rounded = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(64):
        rounded += small
    assert rounded == 1.0, "in half precision they would be lost"


def test_gradients_are_cut_to_a_norm_as_a_whole():
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    module.b = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    masters = Masters(module.named_parameters())
    module.a.grad = torch.tensor([3.0, 0.0], dtype=torch.bfloat16)
    module.b.grad = torch.tensor([4.0], dtype=torch.bfloat16)
    masters.take_gradients()
    assert masters.clip(1.0).item() == pytest.approx(5.0)
    gradients = [p.grad.tolist() for p in masters.parameters]
    assert gradients == [pytest.approx([0.6, 0.0], rel=1e-4), pytest.approx([0.8], rel=1e-4)]
    assert masters.clip(2.0).item() == pytest.approx(1.0, rel=1e-4), "short ones stay"
    assert masters.parameters[1].grad.item() == pytest.approx(0.8, rel=1e-4)
    masters.clear()
    assert all(p.grad is None for p in masters.parameters)


def test_a_full_precision_model_is_its_own_master():
    module, masters = weights([1.0], dtype=torch.float32)
    assert masters.parameters[0] is module.weight
    module.weight.grad = torch.ones(1)
    masters.take_gradients()
    assert module.weight.grad is not None


def test_frozen_weights_are_left_out():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    assert Masters(module.named_parameters()).names == ["weight"]


def test_a_state_keeps_what_half_precision_cannot():
    _, masters = weights([1.0])
    with torch.no_grad():
        masters.parameters[0].fill_(1.001)
    state = masters.state_dict()
    other, again = weights([5.0])
    again.load_state_dict(state)
    assert again.parameters[0].item() == masters.parameters[0].item() == pytest.approx(1.001)
    assert other.weight.item() == 1.0
    with torch.no_grad():
        masters.parameters[0].fill_(9.0)
    assert state["weight"].item() == pytest.approx(1.001), "a state is a copy"


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimisers_state_comes_back_exactly(name):
    def built():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        masters = Masters(module.named_parameters())
        return masters, Optimiser(
            masters.names, masters.parameters, name=name, betas=(0.9, 0.95), weight_decay=0.01
        )

    def step(masters, optimiser, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in masters.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimiser.step(1e-2)

    masters, optimiser = built()
    for seed in range(3):
        step(masters, optimiser, seed)
    other, resumed = built()
    other.load_state_dict(masters.state_dict())
    resumed.load_state_dict(optimiser.state_dict())
    for pair in ((masters, optimiser), (other, resumed)):
        step(*pair, seed=9)
    for one, two in zip(masters.parameters, other.parameters, strict=True):
        assert one.equal(two)
    assert len(optimiser.parts) == (2 if name == "muon" else 1)


def test_scaled_masters_take_the_same_step_whatever_the_inputs_size():
    """A weight that reads inputs 64 times as large changes what it computes by as much."""
    torch.manual_seed(0)
    inputs, goal = torch.randn(16, 4), torch.randn(16, 3)
    size = torch.tensor([1.0, 64.0, 0.25, 1.0])
    outputs, gradients = [], []
    for scale in (None, size):
        module = torch.nn.Linear(4, 3, bias=False)
        seen = inputs if scale is None else inputs * scale
        with torch.no_grad():
            module.weight.copy_(torch.arange(12.0).view(3, 4) / 12)
            if scale is not None:
                module.weight.div_(scale)
        masters = Masters(
            module.named_parameters(), scales={} if scale is None else {"weight": scale}
        )
        optimiser = Optimiser(
            masters.names, masters.parameters, name="adamw", betas=(0.9, 0.95), weight_decay=0.0
        )
        for _ in range(5):
            (module(seen) - goal).square().mean().backward()
            masters.take_gradients()
            gradients.append(masters.parameters[0].grad.clone())
            optimiser.step(1e-2)
            masters.give_weights()
            masters.clear()
        outputs.append(module(seen).detach())
        assert masters.state_dict()["weight"].equal(module.weight.detach().cpu())
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(gradients[5:], gradients[:5], msg="of the masters, not the weights")


def test_scaled_masters_are_restored_exactly():
    module = torch.nn.Linear(4, 3, bias=False)
    masters = Masters(module.named_parameters(), scales={"weight": torch.tensor([8.0, 1, 0.5, 1])})
    kept = {name: weight.clone() for name, weight in masters.state_dict().items()}
    master = masters.parameters[0].detach().clone()
    with torch.no_grad():
        masters.parameters[0].zero_()
    masters.load_state_dict(kept)
    assert masters.parameters[0].equal(master)
    assert module.weight.equal(kept["weight"])


def test_muon_is_pytorchs_matrix_by_matrix(monkeypatch):
    """In float32, on a CPU, where PyTorch's own is in bfloat16."""
    torch.manual_seed(0)
    shapes = ((16, 32), (16, 32), (32, 16), (24, 24))
    own = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(matrix.detach().clone()) for matrix in own]
    ours = Muon(own, lr=0.01, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for mine, other in zip(own, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "bfloat16", None)
            ours.step()
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
            reference.step()
    for mine, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=0)


def test_norms_move_faster():
    norm, matrix = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4, 4))
    optimiser = Optimiser(
        ["norm", "markov"], [norm, matrix], name="muon", betas=(0.9, 0.95), weight_decay=0.0
    )
    for parameter in (norm, matrix):
        parameter.grad = torch.ones_like(parameter)
    optimiser.step(1e-3)
    assert (1 - norm).tolist() == pytest.approx([1e-2] * 4, rel=1e-3)
    assert (1 - matrix).flatten().tolist() == pytest.approx([1e-3] * 16, rel=1e-3)
