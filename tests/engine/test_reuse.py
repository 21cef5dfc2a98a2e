"""What lies in the slots is used again, and text and drafts stay the same."""

import pytest

from domino_spec.decoding import SamplingParams
from domino_spec.engine import engine as engine_module
from domino_spec.engine.calibration import adapt_depth
from tests.engine.runs import finish, make_engine, run_reference, watch
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.pair import bigram_target, knowing_drafter
from tests.support.runs import make_sequences

SYSTEM, ASK, OTHER, FAR = random_prompts([30, 6, 7, 12])
GREEDY = SamplingParams(max_new_tokens=14)
SAMPLED = SamplingParams(max_new_tokens=14, temperature=0.9, top_p=0.95)


def new_sequence(prompt, params=GREEDY, **options):
    return make_sequences([prompt], params, seed=5, **options)[0]


def answer(engine, prompt, params=GREEDY, *, cycles=None, **options):
    """A sequence decoded to its end, or for some cycles, and how much of its prompt was there."""
    sequence = new_sequence(prompt, params, **options)
    engine.add_request(sequence)
    while not sequence.finished and (cycles is None or sequence.cycles < cycles):
        engine.step()
    return sequence, sequence.cached


def fresh(target, drafter, prompt, params=GREEDY):
    """The same by an engine that has seen nothing else: text, drafts and counts."""
    engine = make_engine(target, drafter, slots=1)
    blocks = watch(engine)
    sequence, _ = answer(engine, prompt, params)
    return sequence.output, blocks, sequence.stats


@pytest.mark.parametrize(
    ("family", "params"), [("llama", SAMPLED), ("qwen3", GREEDY), ("mistral", GREEDY)]
)
def test_text_and_drafts_after_a_prefix_are_those_of_a_fresh_engine(family, params):
    target, drafter = make_target(family), random_drafter()
    engine = make_engine(target, drafter, slots=1, reuse=True)
    answer(engine, SYSTEM + ASK, params)
    for prompt, shared in ((SYSTEM + OTHER, 30), (SYSTEM[:17] + FAR, 17), (FAR, 0)):
        blocks = watch(engine)
        sequence, reused = answer(engine, prompt, params)
        assert reused == shared
        assert (sequence.output, blocks, sequence.stats) == fresh(target, drafter, prompt, params)


def test_greedy_text_is_the_reference_loops():
    target = make_target("llama")
    engine = make_engine(target, random_drafter(), slots=2, reuse=True)
    prompts = [SYSTEM + ASK, SYSTEM + OTHER, SYSTEM, SYSTEM + OTHER + ASK]
    found = [answer(engine, prompt)[0].output for prompt in prompts]
    expected = run_reference(target, None, prompts, max_new_tokens=14)[0]
    assert found == expected


@pytest.mark.parametrize("drafts", [True, False])
def test_the_next_turn_of_a_chat_reads_what_is_new_alone(drafts):
    """The last token of an answer was an anchor: its states are not in the caches."""
    target, drafter = make_target("llama"), random_drafter() if drafts else None
    engine = make_engine(target, drafter, slots=2, reuse=True)
    text, known = SYSTEM + ASK, 0
    for new in (OTHER, FAR, ASK):
        sequence, reused = answer(engine, text)
        assert reused == known
        assert sequence.output == fresh(target, drafter, text)[0]
        known = len(text) + len(sequence.output) - 1
        text = text + sequence.output + new


def test_the_whole_prompt_but_its_last_token_is_the_most_there_is():
    engine = make_engine(make_target("llama"), random_drafter(), slots=1, reuse=True)
    first, _ = answer(engine, SYSTEM)
    again, reused = answer(engine, SYSTEM)
    assert reused == len(SYSTEM) - 1
    assert again.output == first.output


@pytest.mark.parametrize(
    ("params", "ahead"), [(GREEDY, True), (SAMPLED, False)], ids=["greedy", "sampled"]
)
def test_a_running_sequences_tokens_are_copied(params, ahead):
    """Prompt and committed answer alike, while its cycles go on."""
    target, drafter = make_target("qwen3"), random_drafter()
    engine = make_engine(target, drafter, slots=3, reuse=True, ahead=ahead)
    running, _ = answer(engine, SYSTEM, params, cycles=4)
    assert running.finish_reason is None
    assert len(running.output) >= 4
    text = SYSTEM + running.output
    prompts = [SYSTEM[:20] + ASK, text + OTHER]
    others = []
    for prompt, shared in zip(prompts, (20, len(text) - 1), strict=True):
        sequence = new_sequence(prompt, params)
        engine.add_request(sequence)
        others.append((sequence, shared))
    finish(engine)
    assert all(sequence.cached == shared for sequence, shared in others)
    for sequence in (running, *(each for each, _ in others)):
        output, _, stats = fresh(target, drafter, sequence.prompt, params)
        assert (sequence.output, sequence.stats) == (output, stats)


def test_drafts_in_the_cache_of_a_running_sequence_are_not_reused():
    """Its drafts were written there too, right or wrong; only committed tokens count."""
    target = make_target("llama")
    engine = make_engine(target, random_drafter(), slots=2, reuse=True, ahead=True)
    running, _ = answer(engine, SYSTEM, cycles=3)
    whole = fresh(target, None, SYSTEM)[0]
    done = len(running.output)
    assert done < len(whole) - 2
    sequence = new_sequence(SYSTEM + whole[: done + 2])
    engine.add_request(sequence)
    engine.step()
    assert sequence.cached == len(SYSTEM) + done - 1


def test_drafts_are_accepted_as_before():
    engine = make_engine(
        bigram_target(), knowing_drafter(shift=True, prefix=1), slots=2, reuse=True
    )
    first, _ = answer(engine, [1, 2, 3, 4])
    second, reused = answer(engine, [1, 2, 3, 4, *first.output, 9, 9])
    assert reused == 4 + len(first.output) - 1
    assert all(share == 1.0 for share in second.stats.acceptance_by_position)
    assert second.stats.tokens_per_cycle == first.stats.tokens_per_cycle > 4


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sequence_aborted_in_mid_flight_leaves_what_it_committed(ahead):
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter, slots=1, reuse=True, ahead=ahead)
    gone, _ = answer(engine, SYSTEM, cycles=4)
    engine.abort(gone)
    text = SYSTEM + gone.output
    blocks = watch(engine)
    sequence, reused = answer(engine, text + OTHER)
    assert reused == len(text) - 1
    output, drafts, _ = fresh(target, drafter, text + OTHER)
    assert sequence.output == output
    assert drafts <= blocks  # a cycle started ahead may draft once more


def test_a_sequence_aborted_in_prefill_leaves_what_was_computed(monkeypatch):
    monkeypatch.setattr(engine_module, "_ALONE", 1)
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter, slots=1, reuse=True, chunk=8)
    gone = new_sequence(SYSTEM + ASK)
    engine.add_request(gone)
    for _ in range(3):
        engine.step()
    engine.abort(gone)
    sequence, reused = answer(engine, SYSTEM + ASK)
    assert reused == 24
    assert sequence.output == fresh(target, drafter, SYSTEM + ASK)[0]


# What is forgotten --------------------------------------------------------------------------------


def forget_by(engine, how):
    if how == "resize":
        engine.resize(slots=2, capacity=128)
    elif how == "reset":
        engine.reset(RuntimeError("a step failed"))
    else:
        adapt_depth(engine, batches=[1])
        engine.policy = None


@pytest.mark.parametrize("how", ["resize", "reset", "measured"])
def test_what_is_no_longer_there_is_not_used(how, tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path))
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter, slots=2, reuse=True)
    answer(engine, SYSTEM + ASK)
    forget_by(engine, how)
    sequence, reused = answer(engine, SYSTEM + OTHER)
    assert reused == 0
    assert sequence.output == fresh(target, drafter, SYSTEM + OTHER)[0]
    assert answer(engine, SYSTEM + ASK)[1] == 30


def test_with_drafts_what_was_computed_without_is_not_used():
    """The drafter's cache holds nothing of it; the other way round all of it is of use."""
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter, slots=2, reuse=True)
    answer(engine, SYSTEM + ASK, speculate=False)
    assert answer(engine, SYSTEM + ASK, speculate=False)[1] == 35
    blocks = watch(engine)
    sequence, reused = answer(engine, SYSTEM + OTHER)
    assert reused == 0
    assert (sequence.output, blocks, sequence.stats) == fresh(target, drafter, SYSTEM + OTHER)
    assert answer(engine, SYSTEM + OTHER, speculate=False)[1] == 36


def test_a_sequence_that_wants_no_reuse_gets_none():
    engine = make_engine(make_target("llama"), random_drafter(), slots=2, reuse=True)
    answer(engine, SYSTEM)
    assert answer(engine, SYSTEM, reuse=False)[1] == 0


def test_without_reuse_nothing_is_remembered():
    engine = make_engine(make_target("llama"), None, slots=2)
    answer(engine, SYSTEM)
    assert answer(engine, SYSTEM)[1] == 0
