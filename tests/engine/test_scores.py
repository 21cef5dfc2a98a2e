"""Scores of the engine are the reference loop's."""

import pytest
import torch

from domino_spec.decoding import SamplingParams, TokenScore, decode
from domino_spec.engine.model_runner import Plan
from domino_spec.engine.scores import ScoreTable, score_columns
from tests.engine.runs import make_engine, make_requests, script
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.runs import make_sequences

PROMPTS = random_prompts([3, 9, 5, 14])
NEW = 12


def heard(outputs):
    """For each sequence its tokens' scores."""
    scores = {}
    for output in outputs:
        if output.scores is not None:
            assert len(output.scores) == len(output.tokens)
            scores.setdefault(output.sequence.index, []).extend(output.scores)
    return scores


def same(found, expected):
    assert found.keys() == expected.keys()
    for row, scores in expected.items():
        for one, other in zip(found[row], scores, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            values = [value for _, value in other.top]
            assert [value for _, value in one.top] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"ahead": True}, {"slots": 2}], ids=str)
@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("changes", [
    {}, {"temperature": 0.9, "top_p": 0.9, "accept": "coupled"},
], ids=["greedy", "sampled"])  # fmt: skip
def test_scores_are_the_reference_loops(changes, drafts, options):
    target, drafter = make_target("qwen3"), random_drafter() if drafts else None
    params = SamplingParams(max_new_tokens=NEW, logprobs=4, seed=3, **changes)
    plain, sequences = (make_sequences(PROMPTS, params) for _ in range(2))
    expected = list(decode(target, None, plain))
    engine = make_engine(target, drafter, **options)
    if drafts:
        script(engine, [sequence.output for sequence in plain])
    found = list(engine.stream(sequences))
    same(heard(found), heard(expected))
    assert sum(map(len, heard(found).values())) == NEW * len(PROMPTS)
    assert (max(len(output.tokens) for output in found) > 2) is drafts


def test_each_sequence_gets_what_it_asked_for():
    """One wants many, one a single number, one nothing, one ends in the midst of a block."""
    target, drafter = make_target("llama"), random_drafter()
    each = [SamplingParams(max_new_tokens=n, logprobs=k) for n, k in
            ((NEW, 20), (NEW, 0), (NEW, None), (3, 2))]  # fmt: skip
    engine = make_engine(target, drafter, slots=4)
    sequences = make_requests(PROMPTS, params=each)
    plain = make_sequences(PROMPTS, SamplingParams(max_new_tokens=NEW))
    list(decode(target, None, plain))
    script(engine, [sequence.output for sequence in plain])
    found = list(engine.stream(sequences))
    assert {output.scores for output in found if output.sequence is sequences[2]} == {None}
    tokens = [len(output.tokens) for output in found if output.sequence is sequences[3]]
    assert tokens == [1, 2]  # of three
    scores = heard(found)
    assert {index: len(kept) for index, kept in scores.items()} == {0: NEW, 1: NEW, 3: 3}
    assert {len(score.top) for score in scores[0]} == {20}
    assert {len(score.top) for score in scores[1]} == {0}
    assert {len(score.top) for score in scores[3]} == {2}
    for index in (0, 1, 3):
        sequence = sequences[index]
        with torch.no_grad():
            logits = target.model(torch.tensor([sequence.prompt + sequence.output])).logits[0]
        own = logits.log_softmax(-1)[len(sequence.prompt) - 1 : -1]
        expected = [float(p[t]) for p, t in zip(own, sequence.output, strict=True)]
        assert [score.logprob for score in scores[index]] == pytest.approx(expected, abs=1e-4)


def test_only_sequences_that_ask_make_a_cycle_score():
    kinds = {k: Plan.of([SamplingParams(), SamplingParams(logprobs=k)], 7, alone=False)
             for k in (None, 0, 3)}  # fmt: skip
    assert [(p.scored, p.ranked) for p in kinds.values()] == [
        (False, False), (True, False), (True, True)
    ]  # fmt: skip
    assert len(set(kinds.values())) == 3  # each is captured by itself


@pytest.mark.parametrize("ranked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_survive_the_report(ranked, dtype):
    torch.manual_seed(0)
    logits = (5 * torch.randn(9, 8, 50)).to(dtype)  # more places than are widened at once
    chosen = torch.randint(50, (9, 8))
    columns = score_columns(logits, chosen, ranked=ranked)
    assert columns.dtype == chosen.dtype
    table = ScoreTable(columns, 8)
    own = logits.float().log_softmax(-1)
    for row in range(9):
        scores = table.of(row, tokens=5, top=20 if ranked else 0)
        assert len(scores) == 5
        for place, score in enumerate(scores):
            assert isinstance(score, TokenScore)
            token = chosen[row, place]
            assert score.logprob == pytest.approx(float(own[row, place, token]), abs=1e-5)
            values = own[row, place].topk(20).values.tolist()[: len(score.top)]
            assert [value for _, value in score.top] == pytest.approx(values, abs=1e-5)
            ids = [token for token, _ in score.top]
            assert own[row, place, ids].tolist() == pytest.approx(values, abs=1e-5)


def test_a_vocabulary_smaller_than_the_most_one_may_ask_for():
    columns = score_columns(torch.randn(1, 2, 7), torch.tensor([[3, 1]]), ranked=True)
    (first, second) = ScoreTable(columns, 2).of(0, tokens=2, top=20)
    assert len(first.top) == len(second.top) == 7


@pytest.mark.parametrize("drafts", [True, False])
def test_prompts_are_scored_in_chunks_as_the_reference_loop_scores_them(drafts, monkeypatch):
    """Of several prompts in one forward, computed whole however much of them lies in a slot."""
    target = make_target("llama")
    monkeypatch.setattr("domino_spec.engine.model_runner.AT_ONCE", 4)
    engine = make_engine(target, random_drafter() if drafts else None, reuse=True, chunk=3)
    prompts = [[5], *PROMPTS, PROMPTS[3] + PROMPTS[1]]
    wanted = [0, None, 4, 20, 0, 2]
    params = [SamplingParams(max_new_tokens=6, prompt_logprobs=top) for top in wanted]
    first, again, plain = (make_requests(prompts, params=params) for _ in range(3))
    for sequences in (first, again):
        list(engine.stream(sequences))
    list(decode(target, None, plain))
    assert [each.cached > 0 for each in again] == [top is None for top in wanted]
    for sequences in (first, again):
        assert [each.output for each in sequences] == [each.output for each in plain]
        for found, expected, top in zip(sequences, plain, wanted, strict=True):
            if top is None:
                assert found.prompt_scores is expected.prompt_scores is None
                continue
            assert found.prompt_scores[0] is expected.prompt_scores[0] is None
            assert len(found.prompt_scores) == len(found.prompt)
            same({0: found.prompt_scores[1:]}, {0: expected.prompt_scores[1:]})
            assert [each.rank for each in found.prompt_scores[1:]] == [
                each.rank for each in expected.prompt_scores[1:]
            ]
