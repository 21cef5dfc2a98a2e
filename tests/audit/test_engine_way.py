"""What the engine says of its forwards, and what its kernels say of a text by themselves."""

from types import SimpleNamespace

import pytest
import torch

from domino_spec.audit import EngineWay, Pass
from domino_spec.audit.forwards import PlainReader
from domino_spec.decoding import SamplingParams
from domino_spec.drafters import LookupDrafter
from domino_spec.engine.policy import Drafts
from tests.engine.runs import make_engine
from tests.support.families import make_target, plain_greedy, random_drafter, random_prompts


def test_the_engines_own_logits_are_those_of_known_text():
    target = make_target("llama")
    way = EngineWay(make_engine(target, random_drafter(), slots=3))
    ids = random_prompts((14,))[0]
    expected = PlainReader(target).read(ids)
    prompt, block = (Pass(start=0, width=n, batch=1, kept=n) for n in (14, 5))
    between = Pass(start=5, width=8, batch=2, kept=6)
    last = Pass(start=11, width=8, batch=8, kept=3)  # more sequences than slots: it was filled up
    for passes, times in (([prompt], 1), ([block, between, last], 2)):
        found = list(way.own_logits(ids, passes))
        assert len(found) == times
        for logits in found:
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("ahead", [False, True])
def test_forwards_of_rows_that_come_and_go_are_told_as_they_were(ahead, monkeypatch):
    """Each with the rows that were in it, and the depth that was chosen for it."""
    engine = make_engine(make_target("llama"), LookupDrafter(depth=5), slots=2, ahead=ahead)
    depths, started = iter(range(10_000)), []
    engine.policy = SimpleNamespace(
        choose=lambda batch: Drafts(next(depths) % 6),
        record=lambda *_, **__: None,
        observe=lambda *_: None,
    )
    plain = engine._start_cycles

    def start(sequences):
        launched = plain(sequences)
        for launch in launched:
            rows = [sequence.index for sequence in launch.sequences]
            started.append((rows, len(rows), launch.plan.depth + 1))
        return launched

    monkeypatch.setattr(engine, "_start_cycles", start)
    way, params = EngineWay(engine), SamplingParams(max_new_tokens=11)
    written = way.write(random_prompts((5, 9, 4)), params, eos=())
    for index, text in enumerate(written):
        mine = [(rows, width) for indices, rows, width in started if index in indices]
        told = [(each.batch, each.width) for each in text.passes if each.prefill is None]
        assert told == mine[: len(told)]
        assert len(mine) - len(told) <= ahead  # one more may have started before its end was known
    assert {rows for _, rows, _ in started} == {1, 2}


def told(passes):
    """Of each prefill forward: tokens before it, its tokens, its rows and their width."""
    return [(p.start, p.kept, p.batch, p.width) for p in passes if p.prefill is not None]


def test_prompts_that_share_a_forward_are_told_with_its_shape():
    way = EngineWay(make_engine(make_target("llama"), LookupDrafter(depth=3), slots=4))
    params = SamplingParams(max_new_tokens=3)
    written = way.write(random_prompts((9, 3, 10, 7)), params, eos=())
    shared = [[(0, n, 3, 10)] for n in (9, 10, 7)]
    shared.insert(1, [(0, 3, 1, 3)])  # too short to be padded to that
    assert [told(text.passes) for text in written] == shared


def test_a_prompt_computed_in_chunks_is_told_so():
    target, prompts = make_target("llama"), random_prompts((5, 6, 14))
    engine = make_engine(target, LookupDrafter(depth=3), slots=2, chunk=6)
    way, params = EngineWay(engine), SamplingParams(max_new_tokens=16)
    # The first ends at once: the third comes in while the second decodes.
    eos = set(plain_greedy(target.model, prompts[0], 1))
    written = way.write(prompts, params, eos=eos)
    assert [step[:2] for step in told(written[2].passes)] == [(0, 6), (6, 6), (12, 2)]
    for text, prompt in zip(written, prompts, strict=True):
        places = range(len(prompt) + len(text.tokens) - 1)
        assert all(any(p.holds(place) for p in text.passes) for place in places)


@pytest.mark.parametrize("pad", [False, True])
def test_own_logits_come_from_forwards_of_the_very_shapes(pad, monkeypatch):
    """Prompts that share a forward, in chunks and padded as on a GPU, and the cycles after."""
    engine = make_engine(make_target("llama"), LookupDrafter(depth=3), slots=3, chunk=6)
    engine.runner._pad = pad
    way, params = EngineWay(engine), SamplingParams(max_new_tokens=6)
    prompts = random_prompts((5, 6, 14, 13))
    seen, plain = [], engine.target.forward

    def forward(tokens, rows, *arguments, **options):
        seen.append((tuple(tokens.shape), rows.longest))
        return plain(tokens, rows, *arguments, **options)

    written = way.write(prompts, params, eos=())
    monkeypatch.setattr(engine.target, "forward", forward)
    widths = set()
    for prompt, text in zip(prompts, written, strict=True):
        ids = [*prompt, *text.tokens[:-1]]
        seen.clear()
        found = list(way.own_logits(ids, text.passes))
        used = [(p.batch, p.width) for p in text.passes]
        assert [shape for shape, _ in seen[-len(used) :]] == used
        for shape, each in zip(seen[-len(used) :], text.passes, strict=True):
            assert each.prefill is None or shape[1] == each.prefill.longest
        assert int(found[-1].argmax()) == text.tokens[-1]
        widths |= {p.width for p in text.passes if p.prefill is not None}
    assert any(p.batch > 1 for text in written for p in text.passes if p.prefill is not None)
    assert (16 in widths) is pad


def test_the_engine_is_left_as_it_was():
    """Reading a text again writes over slots, so nothing in them may be reused; no hook stays."""
    engine = make_engine(make_target("llama"), LookupDrafter(depth=3), slots=1, reuse=True)
    way, params = EngineWay(engine), SamplingParams(max_new_tokens=6)
    prompt, other = random_prompts((12, 12))
    (text,) = way.write([prompt], params, eos=())
    assert "start_cycle" not in vars(engine.runner)
    assert "run_prefill" not in vars(engine.runner)
    whole = Pass(start=0, width=len(other), batch=1, kept=len(other))
    assert len(list(way.own_logits(other, [whole]))) == 1
    assert way.write([prompt], params, eos=())[0].tokens == text.tokens
