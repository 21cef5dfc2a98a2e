"""Launches with production shapes on tensors without memory, for `sm90` to compile."""

import torch

from domino_spec.drafter.heads import (
    DominoHead,
    DominoHeadConfig,
    MarkovHeadConfig,
    build_head,
)
from domino_spec.drafter.masks import Window
from domino_spec.drafter.tree import DraftTree
from domino_spec.engine.cache import PAGE
from domino_spec.engine.kernels import (
    commit,
    compact,
    dequantize,
    experts,
    lengths,
    linear,
    packing,
    pointwise,
    rollout_candidates,
    rollout_vocabulary,
    rotate,
    split_attention,
    trees,
)
from domino_spec.engine.kernels.gumbel import Noise
from domino_spec.quantization import ScaledWeight
from domino_spec.quantization.scaled import STORED

CAPACITY = 8192


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _attention(
    n: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: Window | None,
    dtype: torch.dtype = torch.bfloat16,
    tree: bool = False,
    rotated: int | None = None,
    sinks: bool = False,
) -> None:
    cache = _meta(4, kv_heads, PAGE, head_dim, dtype=dtype)
    pages = _meta(1, CAPACITY // PAGE, dtype=torch.int32)
    ids = _meta(1, dtype=torch.long)
    table = _meta(CAPACITY, rotated or head_dim, dtype=torch.float32)
    norm = _meta(head_dim, dtype=dtype)
    qkv = _meta(1, n, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    query = rotate._launch(qkv, table, table, cache, cache, pages, ids, heads, norm, norm, 1e-6)
    split_attention.launch(
        query, cache, cache, pages, ids, causal=True, window=window, scale=head_dim**-0.5,
        positions=_meta(1, n, dtype=torch.long) if tree else None,
        paths=_meta(1, n, n, dtype=torch.long) if tree else None,
        sinks=_meta(heads, dtype=dtype) if sinks else None,
    )  # fmt: skip


def plain() -> None:
    """One token of Qwen3-8B."""
    _attention(1, heads=32, kv_heads=8, head_dim=128, window=None)


def block() -> None:
    """A block of 16."""
    _attention(16, heads=32, kv_heads=8, head_dim=128, window=None)


def ragged() -> None:
    """Blocks of up to 8 tokens, 96 in all, of 32 sequences of SmolLM2; and how long each is."""
    cache, whole = _meta(999, 3, PAGE, 64), _meta(32, dtype=torch.long)
    pages = _meta(32, CAPACITY // PAGE, dtype=torch.int32)
    split_attention.launch(
        _meta(96, 1, 9, 64), cache, cache, pages, whole, causal=True, window=None, scale=0.125,
        offsets=_meta(33, dtype=torch.long), count=8,
    )  # fmt: skip
    lengths.usable = lambda _: True
    weights = _meta(2, 7, 2, dtype=torch.float32)
    batch = lengths.Sequences(whole, whole, 32, _meta(32, dtype=torch.float32))
    found = lengths.verify_lengths(lengths.margins(_meta(32, 7, 32)), weights, batch, 2)
    lengths.pad_tokens(_meta(96, 1, dtype=torch.long), found, 8)
    lengths.learn(
        found, _meta(32, 9, dtype=torch.long)[:, 0], weights, _meta(2, 7, 3, dtype=torch.float32),
        _meta(3, dtype=torch.float32),
    )  # fmt: skip


def few_bits() -> None:
    """Qwen3-8B's products with weights of few bits: one fused with all else, and many rows."""
    linear.usable = packing.usable = dequantize.usable = lambda _: True
    norm, rows = _meta(4096), _meta(16, 4096)
    fed = linear.Normed(rows, norm, 1e-6, rows, _meta(128, 16, dtype=torch.float32))
    linear.linear(fed, scaled("fp8", 24576, 4096), gated=True)
    down = scaled("fp8", 4096, 12288, group=128, row_block=128)
    linear.linear_then_norm(_meta(16, 12288), down, norm, 1e-6, residual=rows)
    qkv = scaled("int4", 6144, 4096, group=128, pairs=torch.float16)
    linear.linear(rows, qkv, bias=_meta(6144))
    linear.linear(_meta(300, 4096), qkv)


def scaled(
    kind: str,
    n: int,
    k: int,
    *,
    group: int | None = None,
    row_block: int = 1,
    pairs: torch.dtype | None = None,
) -> ScaledWeight:
    """A weight of few bits without memory."""
    group = group or k
    values = _meta(n, k // 2 if kind == "int4" else k, dtype=STORED[kind])
    word = torch.float32 if pairs is None else torch.int32
    scales = _meta(-(-k // group), -(-n // row_block), dtype=word)
    return ScaledWeight(kind, values, scales, group=group, row_block=row_block, pairs=pairs)


def branched() -> None:
    """A tree of 16, with few queries a key and with many."""
    for heads, head_dim in ((32, 128), (8, 128)):
        _attention(16, heads=heads, kv_heads=8, head_dim=head_dim, window=None, tree=True)


def windowed() -> None:
    """A block under a sliding window."""
    _attention(16, heads=32, kv_heads=8, head_dim=128, window=Window(512))


def windowed_sinks() -> None:
    """A drafter's block over a window and sink tokens."""
    _attention(8, heads=32, kv_heads=8, head_dim=128, window=Window(2048, 64))


def widest() -> None:
    """As many queries as a program holds."""
    _attention(16, heads=32, kv_heads=4, head_dim=128, window=None)


def narrow() -> None:
    """Small heads."""
    _attention(17, heads=14, kv_heads=2, head_dim=64, window=None)


def uneven() -> None:
    """Heads whose width is no power of two, as Phi-3-mini's."""
    _attention(8, heads=32, kv_heads=32, head_dim=96, window=Window(2048))


def wide() -> None:
    """Heads twice as wide."""
    for n in (1, 16):
        _attention(n, heads=16, kv_heads=8, head_dim=256, window=None)


def wide_token() -> None:
    """One token of a model whose heads are twice as wide."""
    _attention(1, heads=16, kv_heads=8, head_dim=256, window=None)


def product() -> None:
    """Qwen3-8B's queries, keys and values: the product with most steps on their way."""
    linear.usable = packing.usable = lambda _: True
    linear.linear(_meta(16, 4096), _meta(6144, 4096))


def partly_rotated() -> None:
    """A block of Phi-4-mini."""
    _attention(16, heads=24, kv_heads=8, head_dim=128, window=None, rotated=96)


def exact() -> None:
    """In float32, heads of usual width and twice that."""
    for head_dim in (128, 256):
        _attention(16, heads=16, kv_heads=8, head_dim=head_dim, window=None, dtype=torch.float32)


def _rollout(*, candidates: int | None, drawn: bool, reduced: bool = False) -> None:
    hidden_size, vocabulary, depth = 4096, 151_936, 15
    config = DominoHeadConfig(emb_dim=256, gru_hidden_dim=1024, pure_draft_prefix_len=1)
    with torch.device("meta"):
        head = DominoHead(config, hidden_size=hidden_size, output_vocab_size=vocabulary)
    head = head.to(torch.bfloat16)
    ids = _meta(1, dtype=torch.long)
    noise = Noise(_meta(1, dtype=torch.float32), ids, ids) if drawn else None
    draft_tokens = _meta(vocabulary, dtype=torch.long) if reduced else None
    embedding, hidden = _meta(vocabulary, hidden_size), _meta(1, depth, hidden_size)
    if candidates is None:
        base = _meta(1, depth, vocabulary)
        rollout_vocabulary.launch(head, embedding, 1.0, hidden, ids, base, draft_tokens, noise)
        return
    columns = _meta(1, depth, candidates, dtype=torch.long)
    base = _meta(1, depth, candidates)
    rollout_candidates.launch(head, embedding, hidden, ids, base, columns, draft_tokens, noise)


def _tree(kind: str, *, drawn: bool) -> None:
    hidden_size, vocabulary, depth, nodes, count = 4096, 151_936, 15, 15, 32
    sizes = {"vocab_size": vocabulary, "output_vocab_size": vocabulary}
    configs = {
        "domino": DominoHeadConfig(emb_dim=256, gru_hidden_dim=1024, pure_draft_prefix_len=1),
        "markov": MarkovHeadConfig(emb_dim=256, pure_draft_prefix_len=0),
    }
    with torch.device("meta"):
        head = build_head(configs[kind], hidden_size=hidden_size, **sizes)
    ids = _meta(1, dtype=torch.long)
    search = trees._Search(
        ids,
        _meta(1, depth, count),
        _meta(1, depth, count, dtype=torch.long),
        None,
        nodes,
        Noise(_meta(1, dtype=torch.float32), ids, ids) if drawn else None,
    )
    head = head.to(torch.bfloat16)
    if isinstance(head, DominoHead):
        search.carry_states(head, _meta(vocabulary, hidden_size), _meta(1, depth, hidden_size))
    else:
        search.look_up(head)


def tree() -> None:
    """A tree of 15 over the best 32, and its end."""
    _tree("domino", drawn=False)
    nodes = _meta(1, 16, dtype=torch.long)
    ids = _meta(1, dtype=torch.long)
    commit.usable = compact.usable = lambda _: True
    commit.commit_tree(nodes, DraftTree(nodes, nodes, nodes, nodes, nodes), ids, ids, ids, 15)
    pages = _meta(1, CAPACITY // PAGE, dtype=torch.int32)
    compact.compact(_meta(36, 2, 4, 8, PAGE, 128), pages, ids, nodes)


def tree_drawn() -> None:
    """Drawn, by a Markov head."""
    _tree("markov", drawn=True)


def norms() -> None:
    """What stands between Gemma 3's products."""
    table, rows = _meta(262_144, 640), _meta(8, 640)
    norm = _meta(640, dtype=torch.float32)
    tokens = _meta(8, dtype=torch.long)
    pointwise.weigh(table, norm, 1e-6, padded=16, tokens=tokens, rows=rows, scale=25.25)
    pointwise.add_and_weigh(rows, norm, rows, norm, 1e-6, padded=16, rows=rows)
    pointwise.usable = lambda _: True
    pointwise.gate(_meta(100, 2 * 2048), pointwise.GELU_TANH)


def _mixture(
    tokens: int, chosen: int, own: experts.Experts, gate: experts.Gate | None = None
) -> None:
    count, hidden, _ = own.down.shape
    weights = _meta(tokens, chosen)
    order, offsets = (_meta(n, dtype=torch.long) for n in (weights.numel(), count + 1))
    routing = experts.Routing(weights, order, offsets)
    experts._launch(_meta(tokens, hidden), routing, own, gate or experts.Gate())


def mixture() -> None:
    """The experts of Qwen3-30B-A3B, of one sequence's block and of a prompt."""
    own = experts.Experts(gate_up=_meta(128, 2 * 768, 2048), down=_meta(128, 2048, 768))
    for tokens in (8, 2048):
        _mixture(tokens, 8, own)


def sinks() -> None:
    """A block of GPT-OSS-20B."""
    _attention(8, heads=64, kv_heads=8, head_dim=64, window=Window(128), sinks=True)
    own = experts.Experts(
        gate_up=_meta(32, 2880, 2 * 2880).transpose(1, 2), gate_up_bias=_meta(32, 2 * 2880),
        down=_meta(32, 2880, 2880).transpose(1, 2), down_bias=_meta(32, 2880),
    )  # fmt: skip
    _mixture(8, 4, own, experts.Gate(interleaved=True, limit=7.0, alpha=1.702))


def best() -> None:
    """Greedy over the best 32."""
    _rollout(candidates=32, drawn=False)


def best_drawn() -> None:
    """Drawn from the best 32 of a reduced vocabulary."""
    _rollout(candidates=32, drawn=True, reduced=True)


def everything() -> None:
    """Greedy over the whole vocabulary."""
    _rollout(candidates=None, drawn=False)


def everything_drawn() -> None:
    """Drawn from a reduced vocabulary."""
    _rollout(candidates=None, drawn=True, reduced=True)
