"""Attention over slot caches equals attention over each row's own keys and values."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from domino_spec.drafter.masks import BlockLayout, Window, dense_mask
from domino_spec.drafter.tree import ancestor_mask, tree_of
from domino_spec.engine import attention as host_attention
from domino_spec.engine.attention import AttentionMetadata, HostMetadata, Ragged, Spans
from domino_spec.engine.kernels import attention, rotate, split_attention
from domino_spec.quantization import reference
from tests.engine.kernels import paged, test_rotate

CAPACITY = 48
SLOTS = [3, 0, 2]


def inputs(n, dtype, device, *, starts, group=2, head_dim=32, capacity=CAPACITY):
    generator = torch.Generator().manual_seed(n)
    kv_heads = 2

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return (
        draw(len(starts), n, kv_heads * group, head_dim),
        draw(4, kv_heads, capacity, head_dim),
        draw(4, kv_heads, capacity, head_dim),
        torch.tensor(SLOTS[: len(starts)], device=device),
        torch.tensor(starts, device=device),
    )


def made(window):
    """Parameters say a window's size alone, or with its sink tokens too."""
    return Window(window) if isinstance(window, int) else window and Window(*window)


def by_hand(
    query, keys, values, slots, starts, *, causal, window, scale, positions=None, mask=None,
    sinks=None,
):  # fmt: skip
    """Softmax of one query over what it may see, one after the other, in float32."""
    rows, n, heads, head_dim = query.shape
    mixed = torch.zeros(rows, n, heads, head_dim)
    for row, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
        for i in range(n):
            end = min(start + n, keys.shape[2])
            at = list(range(end))  # the position of what lies at each place
            if positions is not None:
                at[start:end] = positions[row].tolist()
            rule = [j <= i or not causal for j in range(n)] if mask is None else mask[row, i]
            seen = (
                [
                    p
                    for p in range(end)
                    if (p < start or rule[p - start])
                    and (
                        window is None
                        or abs(at[start + i] - at[p]) < window.size
                        or at[p] < window.sink_tokens
                    )
                ]
                if start + i < end
                else [0]
            )
            for head in range(heads):
                kv = head // (heads // keys.shape[1])
                near = keys[slot, kv, seen].float()
                scores = near @ query[row, i, head].float() * scale
                if sinks is not None:  # of a key without a value
                    scores = torch.cat((scores, sinks[head : head + 1].float()))
                weights = scores.softmax(dim=0)[: len(seen)]
                mixed[row, i, head] = weights.cpu() @ values[slot, kv, seen].float().cpu()
    return mixed.flatten(2)


def per_token(query, keys, values, metadata, *, causal, window, scale):
    """As quantised layers attend."""
    seen = metadata.per_token(keys.shape[2], keys.shape[2]).seen(causal, window)
    found = (seen.spans, seen.extras)
    return reference.attend(query.flatten(0, 1), keys, values, *found, scale).view_as(
        query.flatten(2)
    )


def in_pages(way, size=None, **options):
    """A way over caches in pages of so many tokens, out of order; or of one page a slot."""

    def attend(query, keys, values, slots, starts, *others, **rule):
        count = 1 if size is None else keys.shape[2] // size
        table = paged.table_of(len(keys), count).to(keys.device)
        pages = table[slots]
        if "ragged" in rule:
            rule["ragged_pages"] = table[rule["ragged"].slots]
        caches = (paged.cut(states, table) for states in (keys, values))
        return way(query, *caches, pages, starts, *others, **options, **rule)

    return attend


WAYS = {
    "kernel": in_pages(attention.attend),
    "four": in_pages(split_attention.launch, 16, block=16, splits=4),
    "two": in_pages(split_attention.launch, 16, block=16, splits=2),
    "one": in_pages(split_attention.launch, block=16, splits=1),
    "rows": lambda query, keys, values, slots, starts, positions=None, ancestors=None, **rule: (
        Spans(slots, starts, query.shape[1], positions, ancestors).attend(
            query, keys, values, **rule
        )
    ),
    "alone": lambda query, keys, values, slots, starts, **rule: per_token(
        query, keys, values, AttentionMetadata(slots, starts, query.shape[1]), **rule
    ),
    "batch": lambda *given, causal, window, scale, positions=None, ancestors=None, sinks=None: (
        in_pages(attention.batch_reference, 8)(
            *given,
            causal,
            window,
            scale,
            CAPACITY,
            positions,
            None if ancestors is None else ancestor_mask(ancestors),
            sinks,
        )
    ),
}
RAGGED = {
    "kernel": in_pages(attention.attend),
    "four": WAYS["four"],
    "rows": lambda query, keys, values, slots, starts, *, ragged, **rule: HostMetadata(
        AttentionMetadata(slots, starts, 1, ragged=ragged),
        (torch.zeros(CAPACITY, 32), torch.zeros(CAPACITY, 32)),
        query.dtype,
    ).attend(query, keys, values, **rule),
    "batch": lambda *given, ragged, **rule: WAYS["batch"](*given, **rule),
}


def test_a_larger_cache_changes_no_bit(device):
    """An engine with drafts keeps more room than one without, and gives the same text."""
    query, _, _, slots, starts = inputs(3, torch.float32, device, starts=[180, 40, 130])
    small, large = (
        [
            torch.cat((states, states.new_zeros(*states.shape[:2], more, 32)), dim=2)
            for states in inputs(3, torch.float32, device, starts=[1], capacity=192)[1:3]
        ]
        for more in (0, 64)
    )
    rule = {"causal": True, "window": None, "scale": 32**-0.5}
    first, second = (
        split_attention.launch(query, *caches, slots.unsqueeze(1), starts, **rule)
        for caches in (small, large)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("way", "window"),
    [("kernel", None), ("four", 20), ("rows", None), ("rows", 20), ("batch", None)],
)
def test_ragged_sequences_get_what_whole_blocks_give(device, way, window):
    """Sequences with 9, 1 and 4 new tokens, in one row of tokens: to the last bit by kernels."""
    device = torch.device("cpu") if way == "rows" else device
    starts, lengths = [0, 15, CAPACITY - 9], [9, 1, 4]
    query, *cache, slots, at = inputs(9, torch.float32, device, starts=starts)
    rule = {"causal": True, "window": made(window), "scale": 0.2}
    whole = WAYS["rows" if way in ("rows", "batch") else way](query, *cache, slots, at, **rule)
    rows = torch.tensor([row for row, n in enumerate(lengths) for _ in range(n)], device=device)
    steps = torch.tensor([step for n in lengths for step in range(n)], device=device)
    offsets = torch.tensor([0, 9, 10, 14], device=device)
    ragged = Ragged(slots, at, offsets, rows, steps, 9)
    asked = query[rows, steps].unsqueeze(1)
    if way == "four":
        found = WAYS[way](asked, *cache, slots, at, **rule, offsets=offsets, count=9)
    else:
        found = RAGGED[way](asked, *cache, slots[rows], at[rows] + steps, **rule, ragged=ragged)
    exact = {"rtol": 0, "atol": 0} if way in ("kernel", "four") else {}
    torch.testing.assert_close(found[:, 0], whole[rows, steps], **exact)


@pytest.mark.parametrize("starts", [[7, 0, 30], [0, 0, 0]], ids=str)
@pytest.mark.parametrize(
    ("way", "window"),
    [("four", None), ("one", 20), ("rows", None), ("rows", 20), ("batch", None)],
)
def test_a_sink_takes_its_share_of_a_softmax(device, way, window, starts):
    given = inputs(3, torch.float32, device, starts=starts)
    sinks = torch.tensor([-2.0, 0.5, 3.0, 9.0], device=device)
    rule = {"causal": True, "window": made(window), "scale": 0.2, "sinks": sinks}
    torch.testing.assert_close(WAYS[way](*given, **rule).cpu(), by_hand(*given, **rule))


TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 6]  # each node's parent: the anchor has two children


def tree(starts):
    """The same tree after each start, and its nodes' positions."""
    parents = torch.tensor([0, *TREE[1:]]).expand(len(starts), -1)
    depths = torch.zeros_like(parents)
    for node, parent in enumerate(TREE[1:], start=1):
        depths[:, node] = depths[:, parent] + 1
    return tree_of(parents, parents, depths), starts.unsqueeze(1) + depths


@pytest.mark.parametrize(
    ("way", "window"),
    [
        *(("rows", window) for window in (None, 3, 20)),
        *(("batch", window) for window in (None, 3, 20)),
        ("kernel", 20),
        pytest.param("two", None, marks=pytest.mark.slow),
        pytest.param("four", 3, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_tree_of_tokens_sees_its_own_branches(device, way, window):
    """A node sees what came before the tree and its ancestors, wherever these lie."""
    for starts in ([0, 15, 33], [16, 17, CAPACITY - len(TREE)]):
        given = inputs(len(TREE), torch.float32, device, starts=starts)
        nodes, positions = tree(torch.tensor(starts))
        rule = {"causal": True, "window": made(window), "scale": 0.2}
        mask = ancestor_mask(nodes.ancestors)
        expected = by_hand(*given, **rule, positions=positions, mask=mask)
        if way not in ("four", "two", "one"):
            rule["ancestors"] = nodes.ancestors.to(device)
        if way not in ("rows", "batch"):
            rule["paths"] = nodes.paths.to(device)
        mixed = WAYS[way](*given, **rule, positions=positions.to(device))
        torch.testing.assert_close(mixed.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("way", "window"), [("two", None), pytest.param("four", 20, marks=pytest.mark.slow)]
)
def test_a_node_gets_what_its_branch_gives_as_a_chain_to_the_last_bit(device, way, window):
    """Wherever its ancestors lie: near-ties fall the same way with a tree and without.

    After 15 tokens two stretches of a node reach new ones.
    """
    starts = [15]
    query, keys, values, slots, at = inputs(len(TREE), torch.float32, device, starts=starts)
    nodes, positions = tree(torch.tensor(starts))
    rule = {"causal": True, "window": made(window), "scale": 0.2}
    found = WAYS[way](
        query, keys, values, slots, at, **rule,
        positions=positions.to(device), paths=nodes.paths.to(device),
    )  # fmt: skip
    for node in range(len(TREE)):
        path = nodes.paths[0, node, : int(nodes.depths[0, node]) + 1].to(device)
        chains = [keys.clone(), values.clone()]
        for chain, states in zip(chains, (keys, values), strict=True):
            for slot, start in zip(slots.tolist(), starts, strict=True):
                chain[slot, :, start : start + len(path)] = states[slot][:, start + path]
        alone = WAYS[way](query[:, path].contiguous(), *chains, slots, at, **rule)
        assert torch.equal(found[:, node], alone[:, -1])


@pytest.mark.parametrize(("way", "window"), [("kernel", None), ("four", (9, 3))])
def test_heads_whose_width_is_no_power_of_two(device, way, window):
    """Phi-3-mini's are 96 wide; what lies after a head is the next place's."""
    given = inputs(2, torch.float32, device, starts=[33, 2], head_dim=96)
    rule = {"causal": True, "window": made(window), "scale": 0.2}
    mixed = WAYS[way](*given, **rule)
    torch.testing.assert_close(mixed.cpu(), by_hand(*given, **rule), rtol=1e-5, atol=1e-5)
    if window is None:
        starts = torch.tensor([33, 2])
        query = inputs(len(TREE), torch.float32, device, starts=[33, 2], head_dim=96)[0]
        nodes, positions = tree(starts)
        rule |= {"positions": positions.to(device)}
        found = WAYS[way](query, *given[1:], **rule, paths=nodes.paths.to(device))
        expected = by_hand(query, *given[1:], **rule, mask=ancestor_mask(nodes.ancestors))
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def packed(mask):
    return (mask.long() << torch.arange(mask.shape[-1])).sum(dim=-1)


def test_a_mask_of_64_tokens_fits_its_bits():
    mask = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(ancestor_mask(packed(mask)), mask)


@pytest.mark.parametrize("way", [
    pytest.param(way, marks=[pytest.mark.slow] * (way == "two")) for way in WAYS
])  # fmt: skip
@pytest.mark.parametrize(
    ("causal", "window", "n", "starts"),
    [  # empty, at and around the edge of a block of 16, and up to the capacity
        (True, None, 9, [0, 15, 33]),
        (True, 3, 1, [16, 0, CAPACITY - 1]),
        (True, 20, 5, [17, 11, CAPACITY - 5]),
        (False, None, 1, [15, 16, 33]),
        (False, 3, 9, [0, 17, CAPACITY - 9]),
        (False, 20, 9, [16, 7, 33]),
        # Sink tokens: within a block, of several, and up to the window or into it.
        (False, (9, 5), 8, [36, 2, 13]),
        (False, (9, 20), 9, [CAPACITY - 9, 28, 33]),
        (True, (3, 20), 1, [40, 17, 22]),
    ],
)
def test_each_row_sees_its_own_cache(device, way, causal, window, n, starts):
    device = torch.device("cpu") if way == "alone" else device
    given = inputs(n, torch.float32, device, starts=starts)
    rule = {"causal": causal, "window": made(window), "scale": 0.2}
    mixed = WAYS[way](*given, **rule)
    torch.testing.assert_close(mixed.cpu(), by_hand(*given, **rule), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("causal", "window", "n", "starts", "padded", "calls"),
    [
        (True, None, 1, [5, 30, 12, 7], True, 2),  # the last one's slot lies apart
        (True, None, 1, [5, 30, 12, 7], False, 4),
        (True, None, 1, [9, 9, 9, 9], False, 2),  # no padding, no reason to part
        (True, None, 6, [0, 0, 0, 4], False, 2),
        (True, None, 6, [0, 21, 3, 4], True, 2),
        (True, 4, 1, [5, 30, 12, 7], True, 2),
        (False, None, 6, [5, 30, 12, 7], True, 2),
        (False, (8, 2), 6, [25, 30, 12, 17], True, 2),
    ],
)
def test_neighbouring_slots_attend_in_one_call(
    monkeypatch, causal, window, n, starts, padded, calls
):
    monkeypatch.setattr(host_attention, "_CALL_BYTES", 1 << 40 if padded else 0)
    called = []
    monkeypatch.setattr(
        host_attention,
        "mix",
        lambda *given, **rule: called.append(1) or attention.mix(*given, **rule),
    )
    generator = torch.Generator().manual_seed(n)
    query = torch.randn(4, n, 6, 32, generator=generator)
    keys, values = torch.randn(2, 7, 2, CAPACITY, 32, generator=generator)
    given = (query, keys, values, torch.tensor([2, 3, 4, 6]), torch.tensor(starts))
    rule = {"causal": causal, "window": made(window), "scale": 0.2}
    mixed = WAYS["rows"](*given, **rule)
    assert len(called) == calls
    torch.testing.assert_close(mixed, by_hand(*given, **rule), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 300, (100, 4)])
def test_a_prompts_mask_is_not_copied_for_every_query_head(monkeypatch, window):
    n, start = 160, 400
    given = inputs(n, torch.float32, "cpu", starts=[start], group=6, capacity=start + n)
    rule = {"causal": True, "window": made(window), "scale": 0.2}
    folded = WAYS["rows"](*given, **rule)
    mix, read = F.scaled_dot_product_attention, []

    def watched(*given, attn_mask, **rule):
        read.append(attn_mask.untyped_storage().nbytes())
        return mix(*given, attn_mask=attn_mask, **rule)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(attention, "_FOLDED", 2 * n * (start + n))
    found = WAYS["rows"](*given, **rule)
    assert max(read) <= 4 * attention._FOLDED
    assert len(read) > 1
    assert torch.equal(found, folded)


@pytest.mark.parametrize(("way", "dtype"), [
    ("four", torch.bfloat16), ("two", torch.float16), ("rows", torch.bfloat16),
    ("rows", torch.float16), ("batch", torch.bfloat16),
])  # fmt: skip
def test_short_types(device, way, dtype):
    given = inputs(4, dtype, device, starts=[7, 40], group=4, head_dim=64)
    rule = {"causal": True, "window": None, "scale": 0.125}
    mixed = WAYS[way](*given, **rule)
    assert mixed.dtype == dtype
    torch.testing.assert_close(mixed.float().cpu(), by_hand(*given, **rule), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("way", "window"), [("four", None), ("two", 4), ("rows", 4)])
def test_past_the_capacity_nothing_breaks(device, way, window):
    """Tokens that did not fit see garbage, the others what they should, and none NaN."""
    given = inputs(5, torch.float32, device, starts=[CAPACITY - 2, 3])
    rule = {"causal": True, "window": made(window), "scale": 0.2}
    mixed = WAYS[way](*given, **rule)
    expected = by_hand(*given, **rule)
    torch.testing.assert_close(mixed[0, :2].cpu(), expected[0, :2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mixed[1].cpu(), expected[1], rtol=1e-5, atol=1e-5)
    assert mixed.isfinite().all()


def test_what_lies_after_a_rows_end_does_not_matter_to_the_kernel(device):
    given = inputs(2, torch.float32, device, starts=[10, 20])
    rule = {"causal": True, "window": None, "scale": 0.2}
    expected = WAYS["four"](*given, **rule)
    given[1][:, :, 22:] = given[2][:, :, 22:] = float("nan")
    assert torch.equal(WAYS["four"](*given, **rule), expected)


@pytest.mark.parametrize(
    ("group", "dtype", "window"),
    [(2, torch.bfloat16, None), (3, torch.float32, 9), (2, torch.float32, (9, 20))],
    ids=str,
)
def test_a_token_of_a_block_gets_what_it_gets_alone_to_the_last_bit(device, group, dtype, window):
    """Over starts in every block: stretches grow from one block to two on the way."""
    n, rule = 4, {"causal": True, "window": made(window), "scale": 0.2}
    for start in (0, 14, 30, CAPACITY - n):
        query, keys, values, slots, starts = inputs(n, dtype, device, starts=[start], group=group)
        block = WAYS["two"](query, keys, values, slots, starts, **rule)
        for place in range(n):
            own = query[:, place : place + 1].contiguous()
            alone = WAYS["two"](own, keys, values, slots, starts + place, **rule)
            assert torch.equal(alone[:, 0], block[:, place]), (start, place)


@pytest.mark.parametrize(("causal", "window"), [(True, 7), (False, 3), (False, (6, 2))])
def test_the_windows_are_the_drafters(device, causal, window):
    """One block after its context, under the mask that drafters are trained with."""
    n, start = 5, 11
    query, keys, values, slots, starts = inputs(n, torch.float32, device, starts=[start])
    rule = {"causal": causal, "window": made(window), "scale": 0.2}
    layout = BlockLayout(
        anchors=starts.unsqueeze(1),
        block_size=n,
        context_positions=torch.arange(start, device=device).unsqueeze(0),
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys[slots, :, : start + n],
        values[slots, :, : start + n],
        attn_mask=dense_mask(layout, window=made(window), causal=causal),
        scale=0.2,
        enable_gqa=True,
    )
    mixed = attention.attend(query, keys, values, slots.unsqueeze(1), starts, **rule)
    torch.testing.assert_close(mixed, expected.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["kernel", "reference"])
@torch.no_grad()
def test_qwen3s_attention(monkeypatch, device, how):
    """Projection, norms, rotation and attention together, a prompt and then three tokens."""
    if how == "reference":
        monkeypatch.setenv("DOMINO_KERNELS", "off")
    module = test_rotate.qwen3_attention().to(device)
    config, prompt, n = module.config, 9, 3
    states = torch.randn(1, prompt + n, config.hidden_size).to(device)
    positions = torch.arange(prompt + n, device=device).unsqueeze(0)
    cos, sin = Qwen3RotaryEmbedding(config).to(device)(states, positions)
    mask = torch.full((prompt + n, prompt + n), float("-inf"), device=device).triu(1)
    expected, _ = module(states, (cos, sin), mask[None, None])

    weights = [part.weight for part in (module.q_proj, module.k_proj, module.v_proj)]
    qkv = states @ torch.cat(weights).T
    caches = [torch.zeros(2, 2, 20, config.head_dim, device=device) for _ in range(2)]
    pages, outputs = torch.tensor([[1]], device=device), []
    for start, end in ((0, prompt), (prompt, prompt + n)):
        starts = torch.tensor([start], device=device)
        query = rotate.rotate_and_store(
            qkv[:, start:end].contiguous(),
            cos[0],
            sin[0],
            *caches,
            pages,
            starts,
            heads=config.num_attention_heads,
            q_norm=module.q_norm.weight,
            k_norm=module.k_norm.weight,
            eps=config.rms_norm_eps,
        )
        mixed = attention.attend(query, *caches, pages, starts, causal=True, scale=module.scaling)
        outputs.append(module.o_proj(mixed))
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_a_prompt_in_empty_slots_needs_no_mask(device):
    given = inputs(9, torch.float32, device, starts=[0, 0])
    rule = {"causal": True, "window": None, "scale": 0.2}
    mixed = in_pages(attention.batch_reference, 16)(*given, True, None, 0.2, longest=9)
    torch.testing.assert_close(mixed.cpu(), by_hand(*given, **rule), rtol=1e-5, atol=1e-5)


def test_a_cpu_writes_new_tokens_as_far_as_slots_reach():
    starts, slots, table = [3, CAPACITY - 2], torch.tensor([2, 0]), torch.zeros(CAPACITY, 8)
    metadata = AttentionMetadata(slots, torch.tensor(starts), 4)
    cache = (torch.zeros(3, 2, CAPACITY, 8), torch.zeros(3, 2, CAPACITY, 8))
    key, value = torch.randn(2, 2, 4, 2, 8, generator=torch.Generator().manual_seed(0))
    metadata.on_host((table, table), torch.float32).write(cache, key, value)
    for states, new in zip(cache, (key, value), strict=True):
        expected = torch.zeros_like(states)
        expected[2, :, 3:7] = new[0].transpose(0, 1)
        expected[0, :, CAPACITY - 2 :] = new[1, :2].transpose(0, 1)
        assert torch.equal(states, expected)
