"""The reference loop over the lean forward does what it does over the target, commit by commit."""

from functools import cache

import pytest
import torch

from domino_spec.baselines import Eagle3Proposer, MedusaProposer, PromptLookup
from domino_spec.decoding import DominoProposer, NoDrafts, SamplingParams, decode
from domino_spec.engine.verifier import Kind, LeanVerifier
from domino_spec.errors import InputError, TargetError
from domino_spec.targets import TargetOutput
from tests.engine.replays import Replays
from tests.engine.runs import own
from tests.support.baselines import random_baseline
from tests.support.drafters import Adversarial, Good, Oracle
from tests.support.families import (
    CONTEXT,
    LAYERS,
    VOCAB,
    make_target,
    random_drafter,
    random_prompts,
)
from tests.support.runs import make_rows

FAMILIES = ("llama", "qwen3", "mistral")
LENGTHS = (5, 19, 3, 12, 7)
NEW = (17, 4, 9, 17, 12)
"""What each row may generate: they end one after the other."""
DEPTH = 7


def scripted(kind, target, answers):
    return kind(answers, depth=DEPTH, vocab=VOCAB)


SOURCES = {
    "plain": lambda target, answers: NoDrafts(),
    "domino": lambda target, answers: DominoProposer(random_drafter(), target, depth=DEPTH),
    "medusa": lambda target, answers: MedusaProposer(random_baseline("medusa"), target, depth=5),
    "eagle3": lambda target, answers: Eagle3Proposer(random_baseline("eagle3"), target, depth=5),
    "reduced": lambda target, answers: Eagle3Proposer(
        random_baseline("eagle3", draft_vocab_size=40), target, depth=3
    ),
    "lookup": lambda target, answers: PromptLookup(depth=6),
    "oracle": lambda target, answers: scripted(Oracle, target, answers),
    "good": lambda target, answers: scripted(Good, target, answers),
    "adversarial": lambda target, answers: scripted(Adversarial, target, answers),
}
CHOICES = {"greedy": {}, "sampled": {"temperature": 1.3, "accept": "coupled", "seed": 4}}


def commits(verifier, proposer, prompts, *, eos=(), new=NEW, **params):
    """All that a run commits, in order, and each row's counts."""
    rows = make_rows(verifier, prompts, SamplingParams(max_new_tokens=max(new), **params), eos=eos)
    for row, most in zip(rows, new, strict=True):
        row.max_new_tokens = most
    found = list(decode(verifier, proposer, rows))
    return found, [row.stats for row in rows], [row.generated for row in rows]


def prompts_of(lengths=LENGTHS):
    """Each says its beginning twice, so that looking up finds something."""
    return [prompt + prompt[:3] for prompt in random_prompts(lengths)]


@cache
def expected(family, source, choice):
    """On the target itself."""
    target, params = make_target(family), CHOICES[choice]
    _, _, plain = commits(target, NoDrafts(), prompts_of(), **params)
    eos = (plain[3][6],)
    proposer = SOURCES[source](target, plain)
    return commits(target, proposer, prompts_of(), eos=eos, **params), plain, eos


def make_verifier(target, **changes):
    options = {"slots": len(LENGTHS), "capacity": 40, "depth": DEPTH, **changes}
    return LeanVerifier(target, **options)


@pytest.mark.parametrize(
    ("choice", "fill"), [("greedy", False), ("greedy", True), ("sampled", True)]
)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_source_of_drafts_commits_what_it_does_on_the_target(family, source, choice, fill):
    wanted, plain, eos = expected(family, source, choice)
    target = own(make_target(family))
    verifier = make_verifier(target, fill=fill)
    proposer = SOURCES[source](target, plain)
    found = commits(verifier, proposer, prompts_of(), eos=eos, **CHOICES[choice])
    assert found == wanted
    ends = {len(tokens) for tokens in found[2]}
    assert len(ends) > 2  # rows ended one after the other
    if source in ("oracle", "good"):
        assert sum(sum(stats.accepted) for stats in found[1]) > 8


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_taps_are_the_targets(family, fill):
    taps = (1, LAYERS - 1, LAYERS)  # the last one is behind the final norm
    target, verifier = make_target(family), make_verifier(own(make_target(family)), fill=fill)
    verifier.prepare(3, depth=DEPTH, taps=taps)
    prompts = random_prompts((4, 11, 8))
    padded = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(prompt) for prompt in prompts], batch_first=True
    )
    lasts, block = [3, 10, 7], torch.tensor(random_prompts((6, 6, 6), seed=1))
    outputs = []
    for each in (target, verifier):
        memory = each.new_cache(3)
        first = each.forward(padded, memory, taps=taps, keep=lasts)
        memory.commit([4, 11, 8])
        second = each.forward(block, memory, taps=taps, last_positions=[30, 30, 30])
        memory.commit([2, 6, 1])
        memory.select([0, 2])
        third = each.forward(block[:2], memory, taps=taps)
        outputs.append((first, second, third))
    for one, other in zip(*outputs, strict=True):
        assert one.taps.shape == other.taps.shape
        assert one.logits.shape == other.logits.shape
    (one, *blocks), (other, *lean_blocks) = outputs
    for row, (last, column) in enumerate(zip(lasts, (0, 2, 1), strict=True)):
        close(one.logits[row, column], other.logits[row, column])
        close(one.taps[row, : last + 1], other.taps[row, : last + 1])
    for one, other in zip(blocks, lean_blocks, strict=True):
        close(one.logits, other.logits)
        close(one.taps, other.taps)


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_prompts_may_be_read_in_parts():
    target = own(make_target("qwen3"))
    taps = (0, LAYERS)
    prompts, lasts = torch.tensor(random_prompts((11, 11))), [10, 6]
    whole, parts = (make_verifier(target, chunk=chunk) for chunk in (2048, 4))
    one, other = (v.forward(prompts, v.new_cache(2), taps=taps, keep=lasts) for v in (whole, parts))
    close(one.logits, other.logits)
    close(one.taps, other.taps)
    assert not one.taps[1, 7:].any()  # padding was not read
    rows = whole.new_cache(1)
    for part in (prompts[:1, :5], prompts[:1, 5:]):  # also behind what is committed
        last = whole.forward(part, rows, taps=taps, keep=[part.shape[1] - 1])
        rows.commit([part.shape[1]])
    close(last.logits[0, 0], one.logits[0, 1])
    close(last.taps[0], one.taps[0, 5:])


@pytest.mark.parametrize("source", ["domino", "medusa", "eagle3", "oracle", "adversarial"])
def test_answers_reach_the_end_of_the_context(source):
    """Filled blocks go further past it than the loop's own."""
    prompts, new = random_prompts((CONTEXT - 9, CONTEXT - 4, 30)), (9, 4, 9)
    target = make_target("llama")
    _, _, plain = commits(target, NoDrafts(), prompts, new=new)
    wanted = commits(target, SOURCES[source](target, plain), prompts, new=new)
    assert [len(answer) for answer in wanted[2]] == list(new)
    lean = own(target)
    verifier = make_verifier(lean, slots=3, capacity=CONTEXT, fill=True)
    proposer = SOURCES[source](lean, plain)
    verifier._known(tuple(proposer.taps)).add(DEPTH + 1)  # everything is filled up to the longest
    assert commits(verifier, proposer, prompts, new=new) == wanted
    assert len(verifier.lean.rotary[0]) > CONTEXT + DEPTH  # angles of every place a block reaches


# What is captured ---------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A verifier whose graphs are pretended."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)

    def make(target, **changes):
        verifier = make_verifier(target, fill=True, **changes)
        verifier._graphs, verifier._recorder = True, Replays()
        return verifier

    return make


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_replays_give_the_same(as_on_a_gpu, source, prepared):
    wanted, plain, eos = expected("llama", source, "greedy")
    target = own(make_target("llama"))
    verifier = as_on_a_gpu(target)
    proposer = SOURCES[source](target, plain)
    if prepared:
        verifier.prepare(len(LENGTHS), depth=proposer.depth, taps=proposer.taps)
    recorded = len(verifier._recorder.outputs)
    assert commits(verifier, proposer, prompts_of(), eos=eos) == wanted
    assert (len(verifier._recorder.outputs) == recorded) is prepared  # none in the middle of a run


def test_what_a_replay_gave_outlives_the_next(as_on_a_gpu):
    verifier = as_on_a_gpu(own(make_target("llama")))
    rows, block = verifier.new_cache(2), torch.tensor(random_prompts((4, 4)))
    first = verifier.forward(block, rows, taps=(2,))
    kept = first.logits.clone(), first.taps.clone()
    verifier.forward(block.flip(1), rows, taps=(2,))
    assert torch.equal(first.logits, kept[0])
    assert torch.equal(first.taps, kept[1])


def test_what_a_run_may_need_is_recorded_once(as_on_a_gpu):
    verifier = as_on_a_gpu(own(make_target("llama")))
    verifier.prepare(3, depth=6, taps=(1,))
    kinds = {Kind(rows, tokens, (1,)) for rows in (1, 2, 4) for tokens in (1, 2, 4, 7)}
    assert set(verifier._captured) == kinds
    verifier.prepare(2, depth=6, taps=(1,))
    assert len(verifier._recorder.outputs) == len(kinds)
    verifier.prepare(1, depth=0)
    assert set(verifier._captured) == {*kinds, Kind(1, 1, ())}


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_parts_of_what_a_forward_reads_lie_apart_and_are_aligned(rows):
    """Kernels are compiled for pointers of 16 bytes: one that is not makes another variant."""
    kind = Kind(rows, 3, ())
    numbers = torch.arange(kind.numbers)
    parts = kind.parts(numbers)
    assert [tuple(part.shape) for part in parts] == [(rows,), (rows,), (rows, 3)]
    assert all(part.storage_offset() * numbers.element_size() % 16 == 0 for part in parts)
    seen = torch.cat([part.flatten() for part in parts])
    assert len(seen.unique()) == len(seen)


def test_without_graphs_nothing_is_recorded():
    verifier = make_verifier(own(make_target("llama")))
    verifier.prepare(3, depth=6)
    assert not verifier._captured


def test_blocks_are_filled_up_to_sizes_that_are_known():
    verifier = make_verifier(own(make_target("llama")), fill=True)
    assert verifier._kind(3, 5, ()) == Kind(4, 5, ())
    assert verifier._kind(1, 2, ()) == Kind(1, 5, ())  # known from now on
    assert verifier._kind(1, 1, ()) == Kind(1, 1, ())  # plain decoding pays for one token
    assert verifier._kind(1, 2, (3,)) == Kind(1, 2, (3,))  # whoever taps other layers is apart
    verifier.prepare(4, depth=DEPTH)
    assert [verifier._kind(4, n, ()).tokens for n in range(1, 9)] == [1, 2, 4, 4, 5, 8, 8, 8]
    exact = make_verifier(own(make_target("llama")))
    assert exact._kind(3, 5, ()) == Kind(3, 5, ())


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"depth": -1}, "depth is -1"),
        ({"chunk": 0}, "chunk is 0"),
        ({"graphs": True}, "graphs are CUDA's"),
    ],
)
def test_what_could_not_run_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        make_verifier(make_target("llama"), **changes)


def test_a_target_that_the_lean_forward_does_not_know_is_refused():
    with pytest.raises(TargetError, match="cannot run on the lean forward"):
        make_verifier(make_target("gpt2"))


def test_a_prompt_of_another_tokenizer_is_refused():
    verifier = make_verifier(own(make_target("llama")), slots=1, capacity=10)
    rows = verifier.new_cache(1)
    with pytest.raises(InputError, match=f"ids from 3 to {VOCAB}; the target knows 0 to"):
        verifier.forward(torch.tensor([[5, 3, VOCAB]]), rows, keep=[2])


def test_rows_and_blocks_that_do_not_fit_are_refused():
    verifier = make_verifier(own(make_target("llama")), slots=2, capacity=10)
    with pytest.raises(InputError, match="3 rows are to decode together"):
        verifier.new_cache(3)
    rows = verifier.new_cache(1)
    with pytest.raises(InputError, match="a row needs 11 tokens; a slot holds 10"):
        verifier.forward(torch.ones(1, 11, dtype=torch.long), rows, keep=[10])
    verifier.forward(torch.ones(1, 8, dtype=torch.long), rows, keep=[7])
    rows.commit([8])
    block = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(InputError, match="a row needs 12 tokens"):
        verifier.forward(block, rows)
    assert isinstance(verifier.forward(block, rows, last_positions=[9]), TargetOutput)
    with pytest.raises(InputError, match="a block has 8 drafts"):
        verifier.forward(torch.ones(1, 9, dtype=torch.long), rows, last_positions=[9])
    with pytest.raises(InputError, match="a block has 8 drafts"):
        verifier.prepare(1, depth=8)
    verifier.new_cache(1)
    with pytest.raises(InputError, match="another run has begun"):
        verifier.forward(block, rows)
