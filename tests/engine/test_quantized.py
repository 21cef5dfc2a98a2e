"""Quantised targets decode on the engine as in the reference loop, with and without drafts."""

import pytest
import torch

from domino_spec.audit import Audit, EngineWay, audit_greedy
from domino_spec.drafter.config import DominoHeadConfig
from domino_spec.engine.attention import AttentionMetadata, store_context
from domino_spec.engine.cache import LayerCache
from domino_spec.engine.engine import Engine
from domino_spec.engine.kernels.linear import linear, linear_then_norm
from domino_spec.engine.kernels.packing import Packed, Parts
from domino_spec.engine.models import load_model
from domino_spec.engine.models.base import Shape
from domino_spec.engine.policy import Costs, DepthPolicy, Drafts
from domino_spec.engine.sampling import Draws
from domino_spec.quantization import QuantizedWeight, compiled
from domino_spec.quantization.drafts import DraftContext
from domino_spec.quantization.modules import quantized_weights
from domino_spec.targets import Target, load_target
from tests.engine.runs import make_engine, own, run_engine, run_reference
from tests.support.families import drafter_config, make_model, random_drafter, random_prompts
from tests.support.ggufs import write_gguf

NEW = 12
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "accept": "coupled"}
PROMPTS = [[token % 80 for token in prompt] for prompt in random_prompts([9, 1, 14, 5, 20])]
FOUR_BITS = dict.fromkeys(
    ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"], "Q4_1"
)
OF_GGUF = {
    "llama": FOUR_BITS,
    "qwen2": {**dict.fromkeys(FOUR_BITS, "Q4_0"), "attn_v": "Q8_0"},  # kinds that cannot be joined
    "qwen3": {"attn_v": "Q5_1", "ffn_gate": "Q5_0", "ffn_up": "Q5_0"},
}
K_QUANTS = {
    **dict.fromkeys(FOUR_BITS, "Q4_K"), "attn_k": "Q5_K", "attn_v": "Q6_K", "ffn_down": "Q6_K",
}  # fmt: skip
ROUNDED = {"mistral": "int8", "olmo2": "int4"}


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Target]:
    folder = tmp_path_factory.mktemp("quantised")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOMINO_CACHE", str(folder / "cache"))
        for family, kinds in OF_GGUF.items():
            file = write_gguf(folder / f"{family}.gguf", architecture=family, kinds=kinds)
            found[family] = load_target(file, quantize="keep", device="cpu").target
        file = write_gguf(folder / "k-quants.gguf", kinds=K_QUANTS, hidden=256)
        found["k-quants"] = load_target(file, quantize="keep", device="cpu").target
        for family, quantize in ROUNDED.items():
            make_model(family).save_pretrained(folder / family)
            loaded = load_target(folder / family, quantize=quantize, device="cpu")
            found[family] = loaded.target
    return found


def drafter_for(target: Target, **changes):
    size = target.vocab_size
    return random_drafter(drafter_config(vocab_size=size, mask_token_id=size - 1, **changes))


@pytest.mark.usefixtures("packing_small_weights")
@pytest.mark.parametrize(
    ("family", "batch"), [("llama", 1), *((each, 5) for each in (*OF_GGUF, *ROUNDED))]
)
def test_the_engine_says_what_the_reference_loop_says(targets, family, batch):
    target, prompts = targets[family], PROMPTS[:batch]
    drafter = drafter_for(target)
    plain, _, _ = run_reference(target, None, prompts, max_new_tokens=NEW)
    assert run_reference(target, drafter, prompts, max_new_tokens=NEW)[0] == plain
    engine = make_engine(target, drafter)
    assert run_engine(engine, prompts, max_new_tokens=NEW)[0] == plain
    sampled, _, _ = run_reference(target, None, prompts, max_new_tokens=NEW, **SAMPLED)
    assert run_engine(engine, prompts, max_new_tokens=NEW, **SAMPLED)[0] == sampled
    undrafted = make_engine(target)
    assert run_engine(undrafted, prompts, max_new_tokens=NEW)[0] == plain
    assert run_engine(undrafted, prompts, max_new_tokens=NEW, **SAMPLED)[0] == sampled


def test_updates_that_plain_steps_deferred_are_the_same_to_the_last_bit(targets):
    """Rows share a product, which rounds each as it would alone."""
    caches = []
    for defers in (True, False):
        engine = make_engine(targets["llama"], drafter_for(targets["llama"]))
        assert engine.drafter._context is not None
        engine.runner._defers = defers
        engine.policy = policy = DepthPolicy(Costs({1: {0: 1.0, 1: 9.0}}), engine.depth)
        policy.choose = lambda _batch: Drafts(0)
        run_engine(engine, PROMPTS, max_new_tokens=30)
        engine.runner.update_draft_cache()
        caches.append(engine.drafter.cache.layers[:2])
    assert caches[0][0].any()
    assert all(torch.equal(*pair) for pair in zip(*caches, strict=True))


@pytest.mark.usefixtures("packing_small_weights")
def test_blocks_are_neither_packed_nor_held_twice(targets):
    target = own(targets["llama"])
    engine = Engine(target, None, capacity=32, pack=True)
    held = {w.tiles.untyped_storage().data_ptr() for w in quantized_weights(target.model).values()}
    read = [engine.target.embedding, engine.target.output]
    read += [value for layer in engine.target.layers for value in vars(layer).values()]
    matrices = [each for each in read if isinstance(each, QuantizedWeight | Parts | Packed)]
    assert len(matrices) == 2 + 4 * len(engine.target.layers)
    for weight in matrices:
        for part in getattr(weight, "parts", [weight]):
            assert part.tiles.untyped_storage().data_ptr() in held
    bytes_a_layer = sum(w.nbytes for n, w in quantized_weights(target.layers[0]).items())
    assert bytes_a_layer < engine.target.layers[0].nbytes < 1.2 * bytes_a_layer


@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_a_tokens_bits_do_not_depend_on_what_shares_its_forward(targets, family):
    """In float32 they do, and rounding to 8 bits would make whole levels of that."""
    model = load_model(own(targets[family]), slots=2, capacity=64)
    prompt, block = torch.tensor([PROMPTS[4]]), torch.tensor([PROMPTS[0]])  # 20 and 9 tokens
    first, second, start = torch.tensor([0]), torch.tensor([1]), torch.tensor([0])

    def states(tokens, slots, starts, **mask):
        return model.forward(tokens, AttentionMetadata(slots, starts, tokens.shape[1], **mask))[0]

    whole = states(prompt, first, start)
    parts = [states(prompt[:, at : at + 5], second, start + at) for at in range(0, 20, 5)]
    assert torch.equal(torch.cat([part.rows for part in parts]), whole.rows)
    alone = [states(block[:, [at]], second, start + 20 + at).rows for at in range(9)]
    both = states(block.expand(2, -1), torch.tensor([0, 1]), torch.tensor([20, 20])).rows
    assert torch.equal(torch.cat(alone * 2), both)
    # Two branches of a tree: tokens 0, 1, 2 and 0, 3.
    nodes, bits = block[:, [0, 1, 2, 5]], torch.tensor([[0b1, 0b11, 0b111, 0b1001]])
    positions = torch.tensor([[20, 21, 22, 21]])
    tree = states(nodes, first, start + 20, positions=positions, ancestors=bits).rows
    assert torch.equal(tree[:3], torch.cat(alone[:3]))
    branch = states(block[:, [0, 5]], second, start + 20).rows
    assert torch.equal(tree[[0, 3]], branch)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "k-quants"])
@torch.no_grad()
def test_layers_in_one_call_are_the_layers_one_by_one(targets, family, monkeypatch):
    """To the bit, by a team of threads too: captured states, caches and a window."""
    monkeypatch.setattr(compiled, "_GRAIN", 1)
    monkeypatch.setattr(compiled, "_processors", lambda: 3)
    tokens, slots = torch.tensor([PROMPTS[4]] * 2), torch.tensor([1, 0])
    found, before = [], torch.get_num_threads()
    for threads, whole in [(1, False), (1, True), (3, True), (3, True)]:
        model = load_model(own(targets[family]), slots=2, capacity=24)
        if not whole:
            monkeypatch.setitem(vars(model), "_stack", None)
        assert (model._stack is None) == (not whole)
        torch.set_num_threads(threads)
        try:
            states = [
                model.forward(part, AttentionMetadata(slots, start, part.shape[1]), [0, 2, 3])
                for part, start in zip(
                    tokens.split([12, 8], dim=1),
                    (torch.tensor([0, 0]), torch.tensor([12, 12])),
                    strict=True,
                )
            ]
        finally:
            torch.set_num_threads(before)
        rows = [each for normed, captured in states for each in (normed.rows, captured)]
        found.append([*rows, *model.cache.layers[:2]])
    assert all(each.isfinite().all() for each in found[0][:-2])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_reduced_vocabulary_and_a_tree_read_chosen_rows(targets):
    target = targets["llama"]
    tokens = torch.arange(0, target.vocab_size, 2)
    config = drafter_config(
        vocab_size=target.vocab_size, mask_token_id=target.vocab_size - 1,
        draft_vocab_size=len(tokens),
    )  # fmt: skip
    drafter = random_drafter(config)
    drafter.draft_tokens.copy_(tokens)
    expected, counts, _ = run_reference(target, drafter, PROMPTS[:2], max_new_tokens=NEW)
    engine = make_engine(target, drafter)
    found, own_counts, _ = run_engine(engine, PROMPTS[:2], max_new_tokens=NEW)
    assert found == expected
    assert own_counts.committed == counts.committed
    trees = make_engine(target, drafter, tree=5)
    assert run_engine(trees, PROMPTS[:2], max_new_tokens=NEW)[0] == expected


@pytest.mark.usefixtures("packing_small_weights")
@pytest.mark.parametrize("reduced", [False, True])
def test_greedy_drafts_come_of_one_call(targets, reduced, monkeypatch):
    if compiled.kernel() is None:
        pytest.skip("there is no compiler")
    target = targets["llama"]
    head = DominoHeadConfig(gru_hidden_dim=32, emb_dim=32, pure_draft_prefix_len=2)
    tokens = torch.arange(0, target.vocab_size, 2)
    drafter = random_drafter(
        drafter_config(
            vocab_size=target.vocab_size, mask_token_id=target.vocab_size - 1, head=head,
            draft_vocab_size=len(tokens) if reduced else None,
        )
    )  # fmt: skip
    if reduced:
        drafter.draft_tokens.copy_(tokens)
    expected, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW)
    engine = make_engine(target, drafter, pack=True)
    assert engine.drafter is not None
    assert engine.drafter._rollout is not None
    hidden = torch.randn(64, engine.drafter.depth, 32, generator=torch.Generator().manual_seed(0))
    anchors = torch.arange(64) % target.vocab_size
    given = (hidden, anchors, torch.zeros(64, dtype=torch.int64), Draws())
    found = engine.drafter._roll_out(*given)
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW)[0] == expected
    monkeypatch.setattr(engine.drafter, "_rollout", None)
    one_by_one = engine.drafter._roll_out(*given)
    assert (found == one_by_one).float().mean() > 0.9  # the head is rounded in one of them


def test_the_audit_finds_it_lossless(targets):
    target = targets["llama"]
    way = EngineWay(make_engine(target, drafter_for(target)))
    found = audit_greedy(target, way, PROMPTS[:2], max_new_tokens=NEW, eos=())
    assert Audit(greedy=found, sampling=None).answer == "lossless"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("normed", [False, True])
def test_a_drafters_context_in_one_call_is_its_products(threads, normed, monkeypatch):
    """Past the capacity too."""
    if (compiled_kernel := compiled.kernel()) is None:
        pytest.skip("there is no compiler")
    monkeypatch.setattr(compiled, "_GRAIN", 1)
    monkeypatch.setattr(compiled, "_processors", lambda: 3)
    draw = torch.Generator().manual_seed(0)

    def matrix(rows, columns):
        return QuantizedWeight.quantize(torch.randn(rows, columns, generator=draw), "Q8_0")

    project, kv = matrix(32, 64), matrix(32, 32)
    hidden_norm, eps = torch.rand(32, generator=draw), 1e-5
    norms = torch.randn(2, 8, generator=draw) if normed else None
    captured = torch.randn(6, 64, generator=draw)
    rotary = torch.randn(2, 40, 8, generator=draw).unbind()
    shape = Shape(
        hidden=32, heads=4, kv_heads=1, head_dim=8, eps=eps, windows=(None, None), scale=1.0
    )
    metadata = AttentionMetadata(torch.tensor([1, 0]), torch.tensor([3, 14]), 3)
    expected, found = (torch.zeros(2, 2, 2, 1, 16, 8) for _ in range(2))
    rows = linear(linear_then_norm(captured, project, hidden_norm, eps), kv)
    cache = LayerCache(expected[:, 0], expected[:, 1], None)
    store_context(rows, norms, cache, rotary, metadata, shape)
    context = DraftContext(
        compiled_kernel, project, kv, norm=hidden_norm, k_norms=norms, eps=eps, layers=2,
        kv_heads=1,
    )  # fmt: skip
    places = metadata.per_token(16, 40).places
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        context.store(captured, (found[:, 0], found[:, 1]), rotary, places)
    finally:
        torch.set_num_threads(before)
    assert expected.any()
    torch.testing.assert_close(found, expected)
