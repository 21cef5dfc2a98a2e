"""A right decoder passes, every decoder broken on purpose is called so, a tie is not a bug."""

from functools import cache

import pytest
import torch
import transformers as tf
from benchmarks.gpu_exactness import judge_first

from domino_spec.audit import Audit, EngineWay, ReferenceWay, audit_greedy
from domino_spec.audit.forwards import PlainReader, ShapedReader, float32_logits
from domino_spec.audit.greedy import judge
from domino_spec.decoding import SamplingParams, loop
from domino_spec.drafters import BlockDrafter, LookupDrafter
from domino_spec.engine.recurrent import HybridCache
from domino_spec.targets import Target, TargetCache, probe_target
from domino_spec.targets.recurrent import RecurrentStates
from tests.engine.runs import make_engine, script
from tests.support.drafters import Adversarial, Good
from tests.support.families import (
    VOCAB,
    make_target,
    plain_greedy,
    random_drafter,
    random_prompts,
    randomise,
)
from tests.support.pair import bigram_target, knowing_drafter

LENGTHS, NEW, DEPTH = (5, 9, 3, 12, 1), 20, 7


@cache
def answers_of(target):
    return [plain_greedy(target.model, prompt, NEW) for prompt in random_prompts(LENGTHS)]


def scripted(target, kind=Good):
    """A way whose drafts are often right, and its prompts."""
    prompts, answers = random_prompts(LENGTHS), answers_of(target)
    way = ReferenceWay(target, kind(answers, depth=DEPTH, vocab=target.vocab_size), batch_size=4)
    return way, prompts


def greedy(target, way, prompts, eos=()):
    return audit_greedy(target, way, prompts, max_new_tokens=NEW, eos=eos)


PAIRS = [
    (family, kind) for family in ("llama", "gemma3_text", "gpt2") for kind in (Good, Adversarial)
]
PAIRS += [("qwen3_next", Adversarial), ("qwen3_5_text", Good)]


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_the_reference_loop_is_lossless(family, kind):
    target = make_target(family)
    found = greedy(target, *scripted(target, kind))
    assert found.differences == ()
    assert found.tokens == len(LENGTHS) * NEW
    assert sum(found.stats.accepted) > 10
    assert Audit(greedy=found, sampling=None).answer == "lossless"


def test_any_proposer_goes_and_endings_are_compared():
    target = make_target("llama")
    prompts, answers = random_prompts(LENGTHS), answers_of(target)
    eos = {answers[0][3], answers[1][0]}
    drafter = random_drafter()
    way = ReferenceWay(target, BlockDrafter(drafter).with_depth(DEPTH))
    found = greedy(target, way, prompts, eos)
    assert found.differences == ()
    assert found.tokens < len(LENGTHS) * NEW


def test_the_engine_is_lossless():
    target, drafter = bigram_target(), knowing_drafter(shift=True, prefix=1)
    way = EngineWay(make_engine(target, drafter, slots=2))
    found = greedy(target, way, [[4, 9], [20], [1, 2, 3]])
    assert found.differences == ()
    assert found.stats.tokens_per_cycle > 5


def test_trees_are_lossless():
    target, drafter = bigram_target(), knowing_drafter(shift=True, prefix=1)
    way = EngineWay(make_engine(target, drafter, slots=2, tree=15, candidates=40))
    found = greedy(target, way, [[4, 9], [20], [1, 2, 3]])
    assert found.differences == ()
    assert found.stats.tokens_per_cycle > 5


def keeps_what_was_rejected(self, counts):
    """The first rejected draft's states stand where the last accepted one's should."""
    start = self.slots
    for layer in self._layers() if start else ():
        for states in (layer.keys, layer.values):
            for row, count in enumerate(counts):
                if start + count < states.shape[2]:
                    states[row, :, start + count - 1] = states[row, :, start + count].clone()
    REAL_COMMIT(self, counts)


def keeps_the_place_of_longer_rows(self, counts):
    """Shorter rows' states are not moved to their end: they read stale ones."""
    lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
    for layer in self._layers():
        layer.keys = layer.keys[:, :, : max(lengths)]
        layer.values = layer.values[:, :, : max(lengths)]
    self.lengths = lengths


def accepts_one_too_many(sequence, logits, tree, drawn_from, argmax):
    before, drafts = len(sequence.output), tree.tokens[1:]
    path = REAL_WALK(sequence, logits, tree, drawn_from, argmax)
    if 0 < len(path) < len(drafts) and sequence.finish_reason is None:
        sequence.output[before + len(path)] = drafts[len(path)]
    return path


def keeps_recurrent_states(self, counts):
    """Rejected drafts and padding stay in what linear-attention layers have summed up."""


def restores_without_reading_again(self, rows, count):
    """The states of the block's start: accepted drafts never come in."""
    REAL_REPLAY(self, rows, 0)


REAL_REPLAY = RecurrentStates._replay
REAL_COMMIT, REAL_WALK = TargetCache.commit, loop._walk
BROKEN = {
    "wrong roll-back": ("llama", TargetCache, "commit", keeps_what_was_rejected),
    "stale cache": ("llama", TargetCache, "commit", keeps_the_place_of_longer_rows),
    "off-by-one acceptance": ("llama", loop, "_walk", accepts_one_too_many),
    "states not restored": ("qwen3_next", RecurrentStates, "commit", keeps_recurrent_states),
    "no replay": ("qwen3_5_text", RecurrentStates, "_replay", restores_without_reading_again),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_loop_is_a_bug(kind, monkeypatch):
    family, owner, name, broken = BROKEN[kind]
    target = make_target(family)
    way, prompts = scripted(target)
    monkeypatch.setattr(owner, name, broken)
    found = greedy(target, way, prompts)
    assert found.count("bug") > 0
    assert found.count("tie") == 0
    bug = next(d for d in found.differences if d.verdict == "bug")
    assert bug.gap > bug.bound > 0
    assert bug.plain != bug.found
    audit = Audit(greedy=found, sampling=None)
    assert (audit.answer, audit.exit_code) == ("bug", 1)


def test_a_broken_engine_is_a_bug(monkeypatch):
    engine = make_engine(make_target("llama"), random_drafter(), slots=2)
    real = engine.runner.start_cycle

    def start(slots, plan):
        report = real(slots, plan)

        def one_more():
            read = report().clone()
            read[:, 0] = (read[:, 0] + 1).clamp(max=plan.depth)
            return read

        return one_more

    monkeypatch.setattr(engine.runner, "start_cycle", start)
    found = greedy(make_target("llama"), EngineWay(engine), random_prompts((5, 9)))
    assert found.count("bug") > 0


def keeps_all_of_a_block(self, slots, accepted):
    """Rejected drafts stay in what linear-attention layers have summed up."""
    room = next(iter(self._recurrent.values()))._keys.shape[1]
    REAL_HYBRID_COMMIT(self, slots, torch.full_like(accepted, room - 1))


REAL_HYBRID_COMMIT = HybridCache.commit


@pytest.mark.parametrize("broken", [None, keeps_all_of_a_block])
def test_an_engine_that_does_not_restore_states_is_a_bug(broken, monkeypatch):
    target, prompts = make_target("qwen3_5_text"), random_prompts(LENGTHS)[:2]
    engine = make_engine(target, random_drafter(), slots=2)
    script(engine, answers_of(target))
    if broken is not None:
        monkeypatch.setattr(HybridCache, "commit", broken)
    found = greedy(target, EngineWay(engine), prompts)
    assert 0 < sum(found.stats.accepted) < sum(found.stats.offered)
    assert (found.count("bug") > 0) is (broken is not None)
    assert found.count("tie") == 0
    assert found.count("unclear") == 0


def test_overrunning_the_end_is_a_bug(monkeypatch):
    target = make_target("llama")
    way, prompts = scripted(target)
    eos = {answers_of(target)[0][3]}
    monkeypatch.setattr("domino_spec.evaluation.runs.at_eos", lambda _: lambda row: None)
    found = greedy(target, way, prompts, eos)
    assert any(d.verdict == "bug" and d.plain is None for d in found.differences)


def test_ending_too_soon_is_a_bug(monkeypatch):
    target = make_target("llama")
    way, prompts = scripted(target)
    stops = answers_of(target)[0][3]
    real = way.write
    monkeypatch.setattr(way, "write", lambda p, params, eos: real(p, params, eos={stops}))
    found = greedy(target, way, prompts)
    assert any(d.verdict == "bug" and d.found is None for d in found.differences)


def test_nothing_drafted_cannot_be_told():
    target = make_target("llama")
    found = greedy(target, ReferenceWay(target, None), random_prompts((5, 3)))
    audit = Audit(greedy=found, sampling=None)
    assert found.differences == ()
    assert (audit.answer, audit.exit_code) == ("unclear", 2)


def test_the_yardstick_cuts_what_linear_attention_has_summed_up():
    """After forwards of any shape it goes on from the text that is left."""
    target = make_target("qwen3_5_text")
    (text,) = random_prompts((12,))
    reader = ShapedReader(target)
    reader.read([*text[:5], 7, 8, 9], batch=2)  # a padded prompt
    reader.cut(5)
    reader.read([*text[5:7], 7, 8], batch=3, slots=9)
    reader.cut(7)
    reader.read([7, 8])
    reader.cut(7)
    found = reader.read(text[7:])
    with torch.no_grad():
        expected = target.model(torch.tensor([text])).logits[0, 7:]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


# Ties ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paired():
    """A bfloat16 target whose tokens come in pairs with all but equal logits."""
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = randomise(tf.AutoModelForCausalLM.from_config(config), 0.06, seed=2).eval()
    with torch.no_grad():
        rows = model.lm_head.weight
        nudge = torch.randn(rows[1::2].shape, generator=torch.Generator().manual_seed(1))
        rows[1::2] = rows[:-1:2] + 2e-4 * nudge
    target = Target(model.bfloat16())
    probe_target(target)
    return target


def test_a_real_near_tie_is_distinguished_from_a_bug(paired, monkeypatch):
    way, prompts = scripted(paired)
    found = greedy(paired, way, prompts)
    assert found.count("tie") >= 3
    assert found.count("bug") == found.count("unclear") == 0
    assert sum(tie.plain // 2 == tie.found // 2 for tie in found.differences) >= 3  # of one pair
    for tie in found.differences:
        assert tie.gap < tie.bound
        assert "float32" in tie.why
    assert Audit(greedy=found, sampling=None).exit_code == 0
    monkeypatch.setattr(loop, "_walk", accepts_one_too_many)
    assert greedy(paired, way, prompts[:1]).count("bug") > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_the_engines_forwards_done_again_choose_what_it_chose(paired, ahead):
    """The same kernels in the same shapes: prompts that share a forward, rows that come and go."""
    way = EngineWay(make_engine(paired, LookupDrafter(depth=3), slots=2, ahead=ahead, chunk=4))
    prompts, params = random_prompts((5, 6, 9)), SamplingParams(max_new_tokens=9)
    otherwise = 0
    for prompt, text in zip(prompts, way.write(prompts, params, eos=()), strict=True):
        for place in (0, 3, 8):
            found = list(way.own_logits([*prompt, *text.tokens[:place]], text.passes))
            assert int(found[-1].argmax()) == text.tokens[place]
            otherwise += not torch.equal(found[0], found[-1])
    assert otherwise  # text that was read in blocks is not what it is when read at once


def test_the_same_difference_without_rounding_is_a_bug(paired):
    """In float32 these texts never part: the bound is measured, not granted."""
    target = Target(paired.model.float())
    try:
        prompt = random_prompts((9,))[0]
        way = ReferenceWay(target, Good([[0] * NEW], depth=DEPTH, vocab=VOCAB))
        (text,) = way.write([prompt], SamplingParams(max_new_tokens=NEW), eos=())
        plain = plain_greedy(target.model, prompt, NEW)
        assert judge_first(target, prompt, plain, text.tokens, text.passes) is None
        changed = [*plain[:5], plain[5] ^ 1, *plain[6:]]
        bug = judge_first(target, prompt, plain, changed, text.passes)
        assert (bug.position, bug.verdict) == (5, "bug")
        assert bug.gap > bug.bound
    finally:
        paired.model.bfloat16()


@pytest.mark.parametrize(("apart", "verdict"), [(0.0, "bug"), (100.0, "unclear")])
def test_what_only_a_ways_own_forward_explains_is_unclear(apart, verdict):
    target = make_target("llama")
    way, prompts = scripted(target)
    single = PlainReader(target).read(prompts[0])
    passes = way.write(prompts[:1], SamplingParams(max_new_tokens=2), eos=())[0].passes
    way.own_logits = lambda ids, passes: iter([single + apart, single])
    found = judge(
        target, way, prompt=0, position=0, ids=prompts[0], single=single,
        found=int(single.argsort()[-2]), passes=passes,
    )  # fmt: skip
    assert found.verdict == verdict
    assert found.gap > found.bound


def test_blocks_that_were_stored_wrongly_do_not_excuse_themselves(paired):
    """Kernels that are right about text read at once, and far off after blocks."""
    way, prompts = scripted(paired)
    single = PlainReader(paired).read(prompts[0])
    passes = way.write(prompts[:1], SamplingParams(max_new_tokens=2), eos=())[0].passes
    found = int(single.argmin())
    wrong = single.clone()
    wrong[found] += 100.0
    way.own_logits = lambda ids, passes: iter([single, wrong])
    judged = judge(
        paired, way, prompt=0, position=0, ids=prompts[0], single=single, found=found,
        passes=passes,
    )  # fmt: skip
    assert judged.verdict == "bug"


def own_kernels(paired, *, rank, off, chosen=True):
    """A difference after a prompt, whose forward has but one shape: no other shape explains it.

    The way's own logits are so many of the model's errors off float32's. What is found is the
    float32 token of that rank, and what the way's kernels choose themselves if it is `chosen`.
    """
    way, prompts = scripted(paired)
    single, wide = PlainReader(paired).read(prompts[0]), float32_logits(paired, prompts[0])
    error = float((single - wide).abs().max())
    passes = way.write(prompts[:1], SamplingParams(max_new_tokens=2), eos=())[0].passes
    plain = int(single.argmax())
    order = [token for token in wide.argsort(descending=True).tolist() if token != plain]
    own = wide + off * error
    own[order[rank]] = own[plain] + (1e-3 if chosen else -1e-3)
    way.own_logits = lambda ids, passes: iter([single, own])
    judged = judge(
        paired, way, prompt=0, position=0, ids=prompts[0], single=single, found=order[rank],
        passes=passes,
    )  # fmt: skip
    return judged, error


def test_kernels_of_ones_own_may_round_as_far_as_the_type_does(paired):
    tie, error = own_kernels(paired, rank=0, off=1.5)
    assert tie.verdict == "tie"
    assert tie.gap < tie.bound == pytest.approx(2 * error)
    assert "what the type rounds" in tie.why


@pytest.mark.parametrize(
    ("rank", "off", "chosen"), [(0, 2.5, True), (VOCAB // 2, 1.5, True), (0, 1.5, False)]
)
def test_other_kernels_tokens_and_choices_are_not_excused(paired, rank, off, chosen):
    """Too far off; too far apart; not what the kernels choose: then decoding's state is wrong."""
    judged, _ = own_kernels(paired, rank=rank, off=off, chosen=chosen)
    assert judged.verdict in ("unclear", "bug")
    assert "what the type rounds" not in judged.why


@pytest.mark.parametrize("lower", [True, False])
def test_of_equal_logits_the_kernels_choose_the_first(paired, monkeypatch, lower):
    """In half precision two tokens' logits are often one number: argmax takes the lower token."""
    way, prompts = scripted(paired)
    passes = way.write(prompts[:1], SamplingParams(max_new_tokens=2), eos=())[0].passes
    single = PlainReader(paired).read(prompts[0])
    first, second = 10, 20
    plain, found = (second, first) if lower else (first, second)
    top = float(single.max()) + 1.0
    wide, own = single.clone(), single.clone()
    single[plain], single[found] = top + 0.25, top
    wide[plain], wide[found] = top + 0.1, top
    own[plain] = own[found] = top
    monkeypatch.setattr("domino_spec.audit.greedy.float32_logits", lambda *_: wide)
    monkeypatch.setattr("domino_spec.audit.greedy._in_shapes_used", lambda *_: iter([single]))
    way.own_logits = lambda ids, passes: iter([own])
    judged = judge(
        paired, way, prompt=0, position=0, ids=prompts[0], single=single, found=found,
        passes=passes,
    )  # fmt: skip
    assert judged.verdict == ("tie" if lower else "unclear")
    own[first + 1] = top + 0.1  # a third token is what they choose
    assert (
        judge(
            paired, way, prompt=0, position=0, ids=prompts[0], single=single, found=found,
            passes=passes,
        ).verdict
        == "unclear"
    )  # fmt: skip


def test_a_gap_wider_than_the_type_rounds_is_not_excused(paired, monkeypatch):
    """Though kernels a little further off than the model would choose so."""
    way, prompts = scripted(paired)
    single = PlainReader(paired).read(prompts[0])
    passes = way.write(prompts[:1], SamplingParams(max_new_tokens=2), eos=())[0].passes
    plain = int(single.argmax())
    wide = single.clone()
    wide[plain] += 0.5  # the model's largest error
    found = plain ^ 1
    for gap, verdict in ((0.9, "tie"), (1.1, "unclear")):
        wide[found] = wide[plain] - gap
        own = wide.clone()
        own[found], own[plain] = wide[found] + 0.6, wide[plain] - 0.6
        close = single.clone()
        close[found] = wide[found]  # no larger error than the one above
        ties = "domino_spec.audit.greedy"
        monkeypatch.setattr(f"{ties}.float32_logits", lambda *_, w=wide: w)
        monkeypatch.setattr(f"{ties}._in_shapes_used", lambda *_, c=close: iter([c]))
        way.own_logits = lambda ids, passes, o=own: iter([o])
        judged = judge(
            paired, way, prompt=0, position=0, ids=prompts[0], single=close, found=found,
            passes=passes,
        )  # fmt: skip
        assert judged.verdict == verdict, gap


def test_right_kernels_excuse_nothing_that_they_do_not_choose(paired):
    """A stale cache may write a token that is all but as likely; the kernels alone would not."""
    way, prompts = scripted(paired)
    single = PlainReader(paired).read(prompts[0])
    passes = way.write(prompts[:1], SamplingParams(max_new_tokens=2), eos=())[0].passes
    way.own_logits = lambda ids, passes: iter([single])
    judged = judge(
        paired, way, prompt=0, position=0, ids=prompts[0], single=single,
        found=int(single.argmax()) ^ 1, passes=passes,
    )  # fmt: skip
    assert judged.verdict == "bug"


def test_the_models_own_forward_is_excused_by_shapes_alone(paired):
    """The reference loop has no kernels of its own: the type's rounding is the same in both."""
    way, prompts = scripted(paired)
    single = PlainReader(paired).read(prompts[0])
    passes = way.write(prompts[:1], SamplingParams(max_new_tokens=2), eos=())[0].passes
    other = int(single.argmax()) ^ 1
    judged = judge(
        paired, way, prompt=0, position=0, ids=prompts[0], single=single, found=other, passes=passes
    )
    assert judged.verdict != "tie"
    assert judged.bound == 0
