"""The simulation counts what the decoder counts: tokens, cycles and acceptance, row by row."""

from functools import cache

import pytest
import torch

from domino_spec.api import DominoDecoder
from domino_spec.decoding import SamplingParams
from domino_spec.engine.models import unsupported_reason
from domino_spec.errors import InputError
from domino_spec.evaluation import Continuations, continue_prompts, simulate, without_head
from domino_spec.evaluation.runs import decode_prompts
from tests.support.families import (
    drafter_config,
    make_target,
    markov_head,
    plain_greedy,
    random_drafter,
    random_prompts,
)
from tests.support.pair import SIZE, bigram_target, knowing_drafter, successor

LENGTHS = (5, 12, 1, 20)
NEW = 18  # not a multiple of a block, so that the last block is cut
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
DRAFTERS = {
    "shift": {},
    "no-shift": {"shift": False},
    "shift, no prefix": {"prefix": 0},
    "dflash": {"shift": False, "head": False},
    "dflash shifted": {"head": False},
    "markov": {"head": markov_head()},
    "sliding": SLIDING,
    "reduced vocabulary": {"draft_vocab_size": 41},
}


def decoded(target, drafter, prompts, *, depth=None, candidates=None, eos=(), new=NEW, rows=None):
    """By the reference loop in batches of `rows`, unset by the engine where it can."""
    depth = drafter.config.default_depth if depth is None else depth
    engine = "fast" if rows is None else "reference"
    decoder = DominoDecoder(target, drafter, depth=depth, candidates=candidates, engine=engine)
    params = SamplingParams(max_new_tokens=new)
    return decode_prompts(decoder, prompts, params, eos=eos, batch_size=rows or 1)


def continued(target, prompts, *, eos=(), new=NEW):
    return continue_prompts(target, prompts, eos=eos, max_new_tokens=new, batch_size=3)


@cache
def continued_of(family):
    return continued(make_target(family), random_prompts(LENGTHS))


def assert_same(simulation, answers, continuations):
    assert continuations.answers == tuple(tuple(answer.output) for answer in answers)
    assert simulation.sequences == [answer.stats for answer in answers]
    committed = sum(len(answer.output) - 1 for answer in answers)  # but the prefill's token
    cycles = sum(answer.stats.cycles for answer in answers)
    assert simulation.total.committed == committed
    assert simulation.tokens_per_cycle == pytest.approx(committed / cycles)


def nearly_knowing_drafter(**options):
    """Knows the target's table but for some tokens, so that acceptance stops anywhere."""
    drafter = knowing_drafter(**options)
    with torch.no_grad():
        weight = drafter.head.embed_proj[2].weight
        for token in range(0, SIZE, 5):
            weight[:, token] = weight[:, token].roll(1)
    return drafter


@pytest.mark.parametrize(("shift", "prefix", "spoiled", "rows"), [
    (True, 1, False, 3), (True, 0, False, None), (False, 0, False, 3),
    (True, 1, True, None), (True, 0, True, 3), (False, 0, True, None),
])  # fmt: skip
def test_a_drafter_that_knows_much(spoiled, shift, prefix, rows):
    target = bigram_target()
    make = nearly_knowing_drafter if spoiled else knowing_drafter
    drafter = make(shift=shift, prefix=prefix)
    prompts = [[4, 9], [20], [1, 2, 3, 4, 5], [7] * 9]
    continuations = continued(target, prompts, new=50)
    simulation = simulate(drafter, target, continuations, batch_size=rows)
    assert_same(simulation, decoded(target, drafter, prompts, new=50, rows=rows), continuations)
    assert simulation.tokens_per_cycle > (2.5 if spoiled else 6.5)
    if spoiled:
        assert len(set(simulation.total.accepted)) > 4, "always the same length: the test is blind"


@pytest.mark.parametrize(
    ("family", "case"),
    [*(("qwen3", case) for case in DRAFTERS), ("gemma2", "shift"), ("gpt2", "shift")],
)
def test_random_drafters(family, case):
    target = make_target(family)
    drafter = random_drafter(drafter_config(**DRAFTERS[case]))
    prompts, continuations = random_prompts(LENGTHS), continued_of(family)
    assert list(continuations.answers[0]) == plain_greedy(target.model, prompts[0], NEW)
    rows = None if unsupported_reason(target) is None else 1
    simulated = simulate(
        drafter, target, continuations, sequences_per_forward=4, max_slots=64, batch_size=rows
    )
    assert_same(simulated, decoded(target, drafter, prompts, rows=rows), continuations)


@pytest.mark.parametrize(("new", "rows"), [(1, 4), (2, 1), (3, 4), (8, 1), (17, 4)])
def test_the_last_block_is_cut(new, rows):
    target, drafter = bigram_target(), nearly_knowing_drafter(shift=True, prefix=1)
    prompts = [[4, 9], [20], [1, 2, 3, 4, 5], [8]]
    continuations = continued(target, prompts, new=new)
    simulation = simulate(drafter, target, continuations, batch_size=rows)
    answers = decoded(target, drafter, prompts, new=new, rows=rows)
    assert continuations.answers == tuple(tuple(answer.output) for answer in answers)
    assert simulation.sequences == [answer.stats for answer in answers]


@pytest.mark.parametrize(("steps", "rows"), [(1, 4), (2, 1), (4, 4), (9, 1), (16, 4)])
def test_the_end_of_a_sequence_in_the_middle(steps, rows):
    """The ends of the rows fall on drafts and on the target's own tokens, at all places."""
    target, drafter = bigram_target(), nearly_knowing_drafter(shift=True, prefix=1)
    table, token = successor(), 4
    for _ in range(steps):
        token = int(table[token])
    prompts = [[4], [int(table[4])], [9], [1, 2, 3]]
    continuations = continued(target, prompts, eos={token}, new=30)
    assert len(continuations.answers[0]) == steps
    assert continuations.answers[0][-1] == token
    simulation = simulate(drafter, target, continuations, batch_size=rows)
    answers = decoded(target, drafter, prompts, eos={token}, new=30, rows=rows)
    assert_same(simulation, answers, continuations)


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 8])
def test_depth(depth):
    target, drafter = bigram_target(), nearly_knowing_drafter(shift=True, prefix=1)
    prompts = [[4, 9], [20], [1, 2, 3, 4, 5]]
    continuations = continued(target, prompts)
    simulation = simulate(drafter, target, continuations, depth=depth)
    assert_same(simulation, decoded(target, drafter, prompts, depth=depth), continuations)
    assert len(simulation.total.accepted) == depth


@pytest.mark.parametrize("rows", [1, None])
@pytest.mark.parametrize("candidates", [1, 2, 8])
def test_candidates(candidates, rows):
    """A head that may choose among fewer candidates accepts another number of drafts."""
    target, drafter = bigram_target(), nearly_knowing_drafter(shift=True, prefix=0)
    # A bigram's base logits are one number and zeros. Among equal ones the engine takes the lowest
    # token ids and torch.topk, by which the reference drafts, any: without this they would agree in
    # no position on the second candidate.
    with torch.no_grad():
        noise = torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
        target.model.lm_head.weight += 1e-3 * noise
    prompts = [[4, 9], [20], [1, 2, 3, 4, 5]]
    continuations = continued(target, prompts)
    simulation = simulate(drafter, target, continuations, candidates=candidates, batch_size=rows)
    answers = decoded(target, drafter, prompts, candidates=candidates, rows=rows)
    assert_same(simulation, answers, continuations)
    assert simulation.tokens_per_cycle < simulate(drafter, target, continuations).tokens_per_cycle


def test_a_reduced_vocabulary_drafts_its_own_tokens_only():
    target, prompts = make_target("llama"), random_prompts(LENGTHS)
    continuations = continued_of("llama")
    counts = []
    for tokens in (torch.arange(10, 51), torch.arange(50, 91)):
        drafter = random_drafter(drafter_config(draft_vocab_size=41))
        drafter.draft_tokens = tokens
        for candidates in (None, 4):
            simulation = simulate(drafter, target, continuations, candidates=candidates)
            answers = decoded(target, drafter, prompts, candidates=candidates)
            assert_same(simulation, answers, continuations)
            counts.append(simulation.total.accepted)
    assert any(sum(accepted) for accepted in counts)


def test_without_the_head():
    target = bigram_target()
    drafter = knowing_drafter(shift=True, prefix=1)
    prompts = [[4, 9], [20], [1, 2, 3, 4, 5]]
    continuations = continued(target, prompts)
    simulation = simulate(drafter, target, continuations, head=False)
    assert_same(simulation, decoded(target, without_head(drafter), prompts), continuations)
    assert simulation.tokens_per_cycle < 2.5
    assert simulate(drafter, target, continuations).tokens_per_cycle > 5
    assert drafter.head is not None
    assert drafter.config.head is not None


def test_drawn_answers_give_the_match_rule():
    target = make_target("llama")
    drafter = random_drafter()
    prompts = random_prompts(LENGTHS)
    drawn = continue_prompts(
        target, prompts, eos=(), max_new_tokens=NEW, temperature=0.4, seed=5, batch_size=2,
        accept="match",
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=NEW, temperature=0.4, seed=5, accept="match")
    decoder = DominoDecoder(target, drafter, depth=7, engine="reference")
    answers = decode_prompts(decoder, prompts, params, eos=(), batch_size=4)
    assert drawn.answers == tuple(tuple(answer.output) for answer in answers)
    assert simulate(drafter, target, drawn, batch_size=4).sequences == [a.stats for a in answers]
    assert continued_of("llama").answers != drawn.answers


def test_chunks_change_nothing():
    target, drafter = bigram_target(), nearly_knowing_drafter(shift=False, prefix=0)
    continuations = continued(target, [[4, 9], [20], [1, 2, 3, 4, 5], [30] * 12], eos={11})
    whole = simulate(drafter, target, continuations)
    for sequences, slots in ((1, 50), (3, 1), (3, 10**6), (100, 1), (100, 50)):
        chunks = {"sequences_per_forward": sequences, "max_slots": slots}
        assert simulate(drafter, target, continuations, **chunks) == whole, chunks


def test_every_anchor_is_counted():
    target, drafter = bigram_target(), nearly_knowing_drafter(shift=True, prefix=0)
    continuations = continued(target, [[4, 9], [20]], new=20)
    simulation = simulate(drafter, target, continuations)
    right = 0
    wrong = set(range(0, SIZE, 5))
    for answer in continuations.answers:
        right += sum(token not in wrong for token in answer[:-1])
    assert simulation.first_draft_accuracy == pytest.approx(right / 38)  # 19 anchors a sequence
    perfect = simulate(knowing_drafter(shift=True, prefix=0), target, continuations)
    assert perfect.first_draft_accuracy == 1


def test_a_drafter_in_training_is_left_as_it_was():
    target = make_target("llama")
    drafter = random_drafter().train()
    drafter.backbone.layers[0].eval()
    drafter.backbone.attention = "flex"
    modes = [module.training for module in drafter.modules()]
    continuations = continued(target, random_prompts((5, 9)), new=12)
    found = simulate(drafter, target, continuations)
    simulate(drafter, target, continuations, head=False)
    assert [module.training for module in drafter.modules()] == modes
    assert drafter.backbone.attention == "flex"
    drafter.backbone.attention = "dense"
    assert found == simulate(drafter.eval(), target, continuations)
    assert all(parameter.grad is None for parameter in drafter.parameters())


def test_half_precision_runs():
    target = make_target("llama")
    continuations = continued(target, random_prompts((5, 9)), new=12)
    drafter = random_drafter().to(torch.bfloat16)
    assert simulate(drafter, target, continuations).total.committed == 22


def test_arguments_that_make_no_sense():
    target, drafter = make_target("llama"), random_drafter()
    continuations = continued(target, random_prompts((5,)), new=4)
    with pytest.raises(InputError, match="depth is 9"):
        simulate(drafter, target, continuations, depth=9)
    with pytest.raises(InputError, match="candidates is 0"):
        simulate(drafter, target, continuations, candidates=0)
    with pytest.raises(InputError, match="max_slots is 0"):
        simulate(drafter, target, continuations, max_slots=0)
    with pytest.raises(InputError, match="batch size is 0"):
        simulate(drafter, target, continuations, sequences_per_forward=0)
    with pytest.raises(InputError, match="2 prompts but 1 answers"):
        Continuations(prompts=((1,), (2,)), answers=((3,),), max_new_tokens=4)
