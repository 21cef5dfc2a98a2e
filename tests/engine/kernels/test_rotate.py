"""New tokens' queries, keys and values: rotated, normed and stored where each row's tokens go."""

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from domino_spec.engine.kernels import rotate
from tests.engine.kernels import paged

HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 4, 2, 32, 24
SLOTS, STARTS = [2, 0, 3], [5, 0, 22]  # out of order; the last row runs over the capacity


def config() -> Qwen3Config:
    return Qwen3Config(
        hidden_size=48,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
    )


def inputs(n: int, dtype: torch.dtype, device: torch.device, *, queries: bool = True):
    generator = torch.Generator().manual_seed(n)
    positions = torch.arange(CAPACITY + 4).unsqueeze(0)
    cos, sin = Qwen3RotaryEmbedding(config())(torch.zeros(1), positions)
    width = ((HEADS if queries else 0) + 2 * KV_HEADS) * HEAD_DIM
    cache = torch.randn(4, KV_HEADS, CAPACITY, HEAD_DIM, generator=generator)
    norm = torch.rand(2, HEAD_DIM, generator=generator) + 0.5
    return {
        "qkv": torch.randn(3, n, width, generator=generator).to(device, dtype),
        "cos": cos[0].to(device),
        "sin": sin[0].to(device),
        "keys": cache.to(device, dtype),
        "values": cache.flip(0).to(device, dtype).contiguous(),
        "slots": torch.tensor(SLOTS, device=device),
        "starts": torch.tensor(STARTS, device=device),
        "q_norm": norm[0].to(device, dtype),
        "k_norm": norm[1].to(device, dtype),
    }


def in_pages(way, given, count, **rule):
    """What a way gives over slots of so many pages, which lie in another order."""
    given, table = dict(given), paged.table_of(4, count).to(given["keys"].device)
    caches = {name: paged.cut(given.pop(name), table) for name in ("keys", "values")}
    pages = table[given.pop("slots")]
    found = way(**given, **caches, pages=pages, **rule)
    return found, *(paged.join(states, table) for states in caches.values())


def by_hand(qkv, cos, sin, keys, values, slots, starts, q_norm, k_norm, heads):
    """Row by row with the functions of Transformers."""

    def normed(states, weight):
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return states if weight is None else weight * wide.to(states.dtype)

    queries = []
    for row, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
        n = qkv.shape[1]
        states = qkv[row].view(n, -1, HEAD_DIM).transpose(0, 1).unsqueeze(0)  # [1, all, n, dim]
        query, key, value = states.split((heads, KV_HEADS, KV_HEADS), dim=1)
        places = torch.arange(start, start + n, device=qkv.device).clamp(max=len(cos) - 1)
        turn = (cos[places][None].to(qkv.dtype), sin[places][None].to(qkv.dtype))
        query, key = apply_rotary_pos_emb(normed(query, q_norm), normed(key, k_norm), *turn)
        end = min(start + n, CAPACITY)
        keys[slot, :, start:end] = key[0, :, : end - start]
        values[slot, :, start:end] = value[0, :, : end - start]
        queries.append(query[0].transpose(0, 1))
    return torch.stack(queries)


# Triton's interpreter cuts bfloat16 off instead of rounding it; float16 it rounds like PyTorch.
# A GPU rounds a product and a sum once, PyTorch's operations twice.
TWICE = 2 * torch.finfo(torch.float16).eps * torch.cuda.is_available()
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": TWICE, "atol": 2 * TWICE},
    torch.bfloat16: {"rtol": 0.05, "atol": 0.12},
}


@pytest.mark.parametrize(
    ("dtype", "n", "normed"),
    [
        (torch.float32, 3, True),
        (torch.float32, 1, False),
        (torch.float16, 3, False),
        (torch.float16, 1, True),
        (torch.bfloat16, 3, True),
        (torch.bfloat16, 1, False),
    ],
    ids=str,
)
@pytest.mark.parametrize(("how", "pages"), [("kernel", 1), ("kernel", 6), ("reference", 6)])
def test_matches_transformers_row_by_row(monkeypatch, device, dtype, n, normed, how, pages):
    if how == "reference":
        monkeypatch.setenv("DOMINO_KERNELS", "off")
    given = inputs(n, dtype, device)
    if not normed:
        given["q_norm"] = given["k_norm"] = None
    expected = {**given, "keys": given["keys"].clone(), "values": given["values"].clone()}
    rule = {"heads": HEADS, "eps": 1e-6}
    query, keys, values = in_pages(rotate.rotate_and_store, given, pages, **rule)
    torch.testing.assert_close(query, by_hand(**expected, heads=HEADS), **CLOSE[dtype])
    torch.testing.assert_close(keys, expected["keys"], **CLOSE[dtype])
    torch.testing.assert_close(values, expected["values"], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("how", ["kernel", "reference"])
def test_positions_turn_a_token_and_its_place_stays(monkeypatch, device, how):
    if how == "reference":
        monkeypatch.setenv("DOMINO_KERNELS", "off")
    given, other = (inputs(5, torch.float32, device) for _ in range(2))
    steps = torch.tensor([0, 1, 1, 2, 2], device=device)
    for start in (5, 0, 22):  # as if the table said so: of one row at a time
        rows = {"qkv": 1, "slots": 1, "starts": 1}
        one, two = ({k: v[:1] if k in rows else v for k, v in g.items()} for g in (given, other))
        one["starts"] = two["starts"] = torch.tensor([start], device=device)
        for name in ("cos", "sin"):
            two[name] = two[name].clone()
            two[name][start : start + 5] = one[name][start + steps]
        positions = (start + steps).unsqueeze(0)
        rule = {"heads": HEADS, "eps": 1e-6}
        found = in_pages(rotate.rotate_and_store, one, 3, **rule, positions=positions)
        for mine, expected in zip(
            found, in_pages(rotate.rotate_and_store, two, 3, **rule), strict=True
        ):
            assert torch.equal(mine, expected)


@pytest.mark.parametrize("how", ["kernel", "reference"])
def test_keys_and_values_alone(monkeypatch, device, how):
    if how == "reference":
        monkeypatch.setenv("DOMINO_KERNELS", "off")
    """Of two layers at once, each with a norm and a cache of its own."""
    layers = [inputs(3, torch.float32, device, queries=False) for _ in range(2)]
    layers[1]["qkv"], layers[1]["k_norm"] = -2 * layers[0]["qkv"], 3 * layers[0]["k_norm"]
    stacked = {
        name: torch.stack([layer[name] for layer in layers])
        for name in ("keys", "values", "k_norm")
    }
    kv = torch.stack([layer["qkv"] for layer in layers], dim=2)
    for layer in layers:
        by_hand(**{**layer, "q_norm": None}, heads=0)
    shared = {name: layers[0][name] for name in ("cos", "sin", "slots", "starts")}
    _, keys, values = in_pages(rotate.store, {"kv": kv, **shared, **stacked}, 4, eps=1e-6)
    for index, layer in enumerate(layers):
        torch.testing.assert_close(keys[index], layer["keys"])
        torch.testing.assert_close(values[index], layer["values"])


@pytest.mark.parametrize("how", ["kernel", "reference"])
@pytest.mark.parametrize("start", [CAPACITY, CAPACITY + 9])
def test_a_full_row_is_left_alone(monkeypatch, device, how, start):
    if how == "reference":
        monkeypatch.setenv("DOMINO_KERNELS", "off")
    given = inputs(2, torch.float32, device)
    given["starts"] = torch.full((3,), start, device=device)
    query, keys, values = in_pages(rotate.rotate_and_store, given, 2, heads=HEADS, eps=1e-6)
    assert query.isfinite().all()
    assert torch.equal(given["keys"], keys)
    assert torch.equal(given["values"], values)


def qwen3_attention() -> Qwen3Attention:
    made = config()
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    return Qwen3Attention(made, 0).eval()
