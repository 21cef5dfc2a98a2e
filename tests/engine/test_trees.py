"""Trees of drafts: one row of the engine is what the reference loop verifies branch by branch."""

import random

import pytest
import torch

from domino_spec.decoding import SamplingParams
from domino_spec.drafter.tree import tree_of
from domino_spec.drafters.lookup import LookupDrafter
from domino_spec.engine.model_runner import Plan
from domino_spec.errors import InputError
from tests.engine.runs import make_engine, make_requests, opened, run_engine, run_reference
from tests.engine.test_engine import DRAFTERS
from tests.support.families import (
    VOCAB,
    drafter_config,
    make_target,
    random_drafter,
    random_prompts,
)
from tests.support.pair import SIZE, bigram_target, knowing_drafter
from tests.support.runs import run

PROMPTS = random_prompts([3, 1, 9, 5, 14, 2, 7])
NEW = 14
QUICK = ("shift", "markov", "reduced", "sliding")
FAMILIES = ("qwen3", "mistral", "olmo2", "gemma3_text", "gpt_oss")
OTHERS = ("llama", "granite", "qwen2", "olmo3", "phi3", "qwen3_moe", "smollm3")


def compare(target, drafter, *, tree, prompts=PROMPTS, new=NEW, options=(), **params):
    """Tokens and acceptance; the reference loop drafts less at a sequence's end."""
    expected, counts = run(
        target, opened(drafter).with_tree(tree), prompts, max_new_tokens=new, **params
    )
    engine = make_engine(target, drafter, tree=tree, **dict(options))
    assert engine.nodes == tree
    found, own, _ = run_engine(engine, prompts, max_new_tokens=new, **params)
    assert found == expected
    whole = counts.acceptance
    assert (own.cycles, own.committed) == (whole.cycles, whole.committed)
    return own


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in DRAFTERS],
)
def test_both_loops_verify_the_same_trees(kind):
    drafter = random_drafter(drafter_config(**DRAFTERS[kind]))
    target = make_target("qwen3")
    plain, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW)
    own = compare(target, drafter, tree=15)
    assert (
        run_engine(make_engine(target, drafter, tree=15), PROMPTS, max_new_tokens=NEW)[0] == plain
    )
    assert len(own.ranks) > 1  # some were not the best child


CHOICES = [
    pytest.param({"temperature": 0.8, "seed": 3}, marks=pytest.mark.slow),
    pytest.param({"temperature": 0.8, "accept": "match", "seed": 3}, marks=pytest.mark.slow),
    {"temperature": 1.2, "top_p": 0.8, "top_k": 20, "seed": 4},
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"presence_penalty": 0.9},
]


@pytest.mark.parametrize("params", CHOICES, ids=str)
def test_a_seed_keeps_its_text(params):
    """Children are drawn with the target's own noise; penalties follow the path."""
    target, drafter = make_target("llama"), random_drafter()
    plain, _ = run(target, None, PROMPTS, max_new_tokens=NEW, **params)
    engine = make_engine(target, drafter, tree=15)
    found, own, _ = run_engine(engine, PROMPTS, max_new_tokens=NEW, **params)
    assert found == plain
    compare(target, drafter, tree=7, **params)
    assert sum(own.accepted) > 0


@pytest.mark.parametrize("params", [
    {"temperature": 0.8, "accept": "block"}, {"temperature": 0.8, "accept": "rejection"},
], ids=str)  # fmt: skip
def test_drafts_that_are_drawn_are_a_chain(params):
    """Rejection and block verification know chains alone, and say so by drafting these."""
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter, tree=15)
    found, own, _ = run_engine(engine, PROMPTS, max_new_tokens=NEW, seed=5, **params)
    chains, counts, _ = run_engine(
        make_engine(target, drafter), PROMPTS, max_new_tokens=NEW, seed=5, **params
    )
    assert (found, own.accepted, own.offered) == (chains, counts.accepted, counts.offered)
    assert not Plan.of([SamplingParams(**params), SamplingParams()], 7, 15, alone=False).nodes


# Trees by script: every shape, right and wrong ----------------------------------------------------


def random_shape(rng: random.Random, nodes: int, depth: int) -> list[int]:
    """Parents, each before its children, no deeper than that."""
    parents, depths = [0], [0]
    for _ in range(nodes):
        parent = rng.choice([node for node, deep in enumerate(depths) if deep < depth])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def scripted_tree(rng, answer, *, anchor, nodes, depth, spoil):
    """Random branches; one random path holds the answer, until `spoil` has it wrong."""
    parents = random_shape(rng, nodes, depth)
    right = {0: 0}  # nodes on the right path, and their depths
    tokens, taken = [anchor], {}
    for node in range(1, nodes + 1):
        parent = parents[node]
        deep = right.get(parent)
        known = None if deep is None or deep >= len(answer) else answer[deep]
        here = taken.setdefault(parent, set())
        if known is not None and known not in here and rng.random() > spoil:
            token, right[node] = known, deep + 1
        else:
            wrong = [t for t in range(VOCAB) if t not in here and t != known]
            later = [t for t in answer if t in wrong]  # wrong here, right further on
            token = rng.choice(later or wrong)
        here.add(token)
        tokens.append(token)
    return tokens, parents


def script_trees(engine, answers, *, spoil, seed=0):
    rng = random.Random(seed)

    def propose_tree(anchors, *, slots, starts, depth, nodes, sampler):
        running = {sequence.slot: sequence for sequence in engine.scheduler.running}
        made = []
        for slot, start, anchor in zip(
            slots.tolist(), starts.tolist(), anchors.tolist(), strict=True
        ):
            sequence = running.get(slot)
            answer = []
            if sequence is not None:
                answer = answers[sequence.index][start + 1 - len(sequence.prompt) :]
            made.append(
                scripted_tree(rng, answer, anchor=anchor, nodes=nodes, depth=depth, spoil=spoil)
            )
        tokens, parents = (torch.tensor(each) for each in zip(*made, strict=True))
        depths = torch.zeros_like(parents)
        for node in range(1, nodes + 1):
            depths[:, node] = depths.gather(1, parents[:, node : node + 1]).squeeze(1) + 1
        return tree_of(tokens, parents, depths)

    engine.drafter.propose_tree = propose_tree


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)]
)
@pytest.mark.parametrize(
    ("prompts", "tree"),
    [
        (PROMPTS, 7),
        pytest.param(PROMPTS[:1], 15, marks=pytest.mark.slow),
        pytest.param(PROMPTS, 31, marks=pytest.mark.slow),
    ],
)
def test_any_tree_leaves_the_text_as_it_is(family, prompts, tree):
    """Random shapes, the right path anywhere among wrong branches, and adversarial ones."""
    target = make_target(family)
    plain, _, _ = run_reference(target, None, prompts, max_new_tokens=40)
    for spoil in (0.0, 0.2, 1.0):
        engine = make_engine(target, random_drafter(), tree=tree)
        script_trees(engine, plain, spoil=spoil)
        found, own, _ = run_engine(engine, prompts, max_new_tokens=40)
        assert found == plain
        if spoil == 1.0:
            assert not any(own.accepted)
        else:
            assert own.tokens_per_cycle > 1.4
            assert (len(own.ranks) > 1) is (spoil > 0)


def test_penalties_follow_the_path():
    """A token of a branch that lost is not repeated when it comes."""
    target, params = make_target("llama"), {"presence_penalty": 1.5, "max_new_tokens": 40}
    plain, _ = run(target, None, PROMPTS, **params)
    engine = make_engine(target, random_drafter(), tree=15)
    script_trees(engine, plain, spoil=0.3)
    found, own, _ = run_engine(engine, PROMPTS, **params)
    assert found == plain
    assert len(own.ranks) > 1


@pytest.mark.parametrize("fault", ["ancestors", "positions", "compact"])
def test_a_tree_read_wrongly_is_noticed(fault, monkeypatch):
    """The test above has power over a missing mask, wrong positions, and drafts left in place."""
    target = make_target("llama")
    plain, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=40)
    engine = make_engine(target, random_drafter(), tree=15)
    script_trees(engine, plain, spoil=0.2)
    if fault == "compact":
        monkeypatch.setattr(engine.target.cache, "compact", lambda *_: None)
    else:
        forward = engine.target.forward

        def wrong(tokens, metadata, layers=()):
            object.__setattr__(metadata, fault, None)
            return forward(tokens, metadata, layers)

        monkeypatch.setattr(engine.target, "forward", wrong)
    assert run_engine(engine, PROMPTS, max_new_tokens=40)[0] != plain


def test_the_drafter_reads_accepted_branches():
    """After a tree the drafter's own context is that of the accepted path."""
    target, drafter = bigram_target(), knowing_drafter(shift=True, prefix=1)
    prompts = [[1, 2], [5], [9, 9, 9]]
    plain, _, _ = run_reference(target, None, prompts, max_new_tokens=33)
    # Its base logits are all alike: any 32 of them would be the best.
    own = compare(target, opened(drafter, candidates=SIZE), tree=15, prompts=prompts, new=33)
    assert own.tokens_per_cycle > 5
    engine = make_engine(target, drafter, candidates=SIZE, tree=15)
    assert run_engine(engine, prompts, max_new_tokens=33)[0] == plain


@pytest.mark.parametrize("options", [{"slots": 2}, {"ahead": True}, {"ahead": True, "slots": 1}])
def test_slots_and_cycles_ahead_change_nothing(options):
    target, drafter = make_target("qwen3"), random_drafter()
    plain, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW)
    engine = make_engine(target, drafter, tree=7, **options)
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW, eos={plain[0][4]})[0] == [
        text[: text.index(plain[0][4]) + 1] if plain[0][4] in text else text for text in plain
    ]


def test_scores_are_those_of_the_path():
    target = make_target("llama")
    plain, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=20)
    scores = []
    for tree in (0, 15):
        engine = make_engine(target, random_drafter(), tree=tree)
        if tree:
            script_trees(engine, plain, spoil=0.1)
        sequences = make_requests(PROMPTS, max_new_tokens=20, logprobs=3)
        found = {sequence: [] for sequence in sequences}
        for output in engine.stream(sequences):
            found[output.sequence] += output.scores
        scores.append([found[sequence] for sequence in sequences])
    for one, other in zip(*scores, strict=True):
        assert [s.top[0][0] for s in one] == [s.top[0][0] for s in other]
        torch.testing.assert_close(
            torch.tensor([s.logprob for s in one]), torch.tensor([s.logprob for s in other]),
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip


def test_outputs_hold_the_branches_that_lost():
    target = make_target("llama")
    plain, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=20)
    engine = make_engine(target, random_drafter(), tree=7)
    script_trees(engine, plain, spoil=0.1)
    seen = 0
    for output in engine.stream(make_requests(PROMPTS, max_new_tokens=20)):
        if output.tree is None:
            assert output.cycle == 0
            continue
        path = [output.tree.tokens[node] for node in output.tree.path]
        assert path[: output.accepted] == list(output.tokens[: output.accepted])
        assert len(output.tree.tokens) == len(output.tree.parents) == 8
        seen += len(path)
    assert seen > 20


@pytest.mark.parametrize(("tree", "words"), [(-1, "expected 1 to 63"), (64, "expected 1 to 63")])
def test_trees_of_impossible_sizes_are_refused(tree, words):
    with pytest.raises(InputError, match=words):
        make_engine(make_target("llama"), random_drafter(), tree=tree)


def test_nothing_in_a_tree_cycle_waits_for_the_host(monkeypatch):
    """Numbers of the host, sent to the device, cannot be captured in a CUDA graph."""
    engine = make_engine(make_target("llama"), random_drafter(), tree=15)
    run_engine(engine, PROMPTS, max_new_tokens=3)

    def sent(*_args, **_options):
        raise AssertionError("a tensor of the host's numbers")

    monkeypatch.setattr(torch, "tensor", sent)
    monkeypatch.setattr(torch.Tensor, "new_tensor", sent)
    engine.runner.draft(
        torch.arange(7), engine.slots.lengths[:7], engine.runner.draws(torch.arange(7), Plan(7)),
        Plan(7, 15),
    )  # fmt: skip


def test_a_tree_without_a_drafter_is_refused():
    with pytest.raises(InputError, match="tree is 8 without a drafter"):
        make_engine(make_target("llama"), None, tree=8)


def test_drafters_of_chains_refuse_trees():
    with pytest.raises(InputError, match="drafts chains"):
        make_engine(make_target("llama"), LookupDrafter(), tree=7)
