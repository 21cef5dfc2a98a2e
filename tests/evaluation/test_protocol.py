"""The standard measurement: what counts, what is left out, and two ways to one figure."""

import dataclasses
import json

import numpy as np
import pytest

from domino_spec.api import DominoDecoder
from domino_spec.data import load_corpus
from domino_spec.data.shards import write_shard
from domino_spec.errors import InputError
from domino_spec.evaluation import (
    PromptSet,
    Protocol,
    continuations_for,
    corpus_prompts,
    measure_decoded,
    measure_simulated,
)
from tests.support.families import VOCAB, make_target, random_drafter, random_prompts
from tests.support.pair import bigram_target, knowing_drafter

LOOP, ANSWER = [1, 2, 3] * 20, list(range(60))


def write_lines(path, *values):
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n", encoding="utf-8")
    return path


def test_which_answers_count():
    protocol = Protocol()
    assert protocol.outcome(ANSWER) == "used"
    assert protocol.outcome(ANSWER[:32]) == "used"
    assert protocol.outcome(ANSWER[:31]) == "short"
    assert protocol.outcome(LOOP) == "loop"
    assert protocol.outcome(LOOP[:31]) == "short"


def test_the_standard_is_what_released_figures_use():
    assert dataclasses.asdict(Protocol()) == {
        "longest_prompt": 399,
        "max_new_tokens": 256,
        "shortest_answer": 32,
        "temperature": 0.0,
        "seed": 0,
    }


def test_a_prompt_must_leave_room_for_its_answer():
    target = make_target("llama")  # a context of 256
    assert Protocol(max_new_tokens=56).longest_for(target) == 200
    assert Protocol(max_new_tokens=56, longest_prompt=150).longest_for(target) == 150


def test_too_long_prompts_are_counted_and_leave_gaps():
    found = PromptSet.of("some", [[1] * 5, [1] * 6, [1] * 4], longest=5)
    assert found.prompts == ((1,) * 5, (1,) * 4)
    assert found.numbers == (0, 2)
    assert found.too_long == 1


def test_prompts_of_a_corpus(tmp_path):
    prompts = [[5, 6, 7], [8, 9], [5, 6, 7], [4] * 9]
    path = write_shard(tmp_path / "a.npz", prompts=prompts, answers=[[1, 2]] * 4, vocab_size=VOCAB)
    corpus = load_corpus([str(path)], tokenizer=None, vocab_size=VOCAB)
    found = corpus_prompts("held out", corpus, longest=8)
    assert found.prompts == ((5, 6, 7), (8, 9))  # once each
    assert found.too_long == 1
    assert corpus_prompts("held out", corpus, longest=8, limit=1).prompts == ((5, 6, 7),)
    np.savez(tmp_path / "texts.npz", tokens=[4, 5, 6], length=[3], prompt_len=[0])
    texts = load_corpus([str(tmp_path / "texts.npz")], tokenizer=None, vocab_size=VOCAB)
    with pytest.raises(InputError, match="no conversation with a prompt"):
        corpus_prompts("texts", texts, longest=8)


@pytest.fixture(scope="module")
def decoder():
    return DominoDecoder(bigram_target(), knowing_drafter(shift=True, prefix=1))


PROMPTS = PromptSet.of("some", [[4, 9], [20], [1, 2, 3, 4, 5], [6] * 50], longest=40)
SHORT = Protocol(max_new_tokens=34)


@pytest.mark.parametrize("head", [True, False])
def test_both_ways_give_one_figure(decoder, head):
    continuations = continuations_for(decoder, PROMPTS, SHORT)
    simulated = measure_simulated(decoder, PROMPTS, SHORT, continuations, head=head)
    decoded = measure_decoded(decoder, PROMPTS, SHORT, head=head, batch_size=1)
    assert simulated.total == decoded.total
    assert simulated.counts == decoded.counts
    assert simulated.counts == {"used": 3, "loops": 0, "short": 0, "too_long": 1}
    assert simulated.total.committed == 99  # 33 each: the prefill's token is in no cycle
    assert simulated.total.cycles == (3 * 5 if head else simulated.total.cycles)
    assert head == (simulated.total.tokens_per_cycle > 6)
    mine, its = simulated.to_dict(), decoded.to_dict()
    assert mine.pop("way") == "simulated"
    assert its.pop("way") == "decoded"
    assert min(mine.pop("seconds"), its.pop("seconds")) > 0
    assert mine == its


def test_loops_and_short_answers_are_left_out_of_the_sums():
    """The bigram table is a cycle of 39 tokens: a long answer loops, an ended one is short."""
    decoder = DominoDecoder(bigram_target(), knowing_drafter(shift=True, prefix=1))
    looping = dataclasses.replace(SHORT, max_new_tokens=120)
    for measurement in (
        measure_simulated(decoder, PROMPTS, looping, continuations_for(decoder, PROMPTS, looping)),
        measure_decoded(decoder, PROMPTS, looping),
    ):
        assert measurement.counts == {"used": 0, "loops": 3, "short": 0, "too_long": 1}
        assert measurement.total.cycles == 0
    brief = dataclasses.replace(SHORT, max_new_tokens=31)
    assert measure_decoded(decoder, PROMPTS, brief).counts["short"] == 3


@pytest.mark.slow
def test_sampling_draws_drafts_and_depends_on_the_seed():
    decoder = DominoDecoder(make_target("llama"), random_drafter())
    prompts = PromptSet.of("some", random_prompts((5, 9, 3)), longest=40)
    warm = Protocol(max_new_tokens=20, temperature=0.7, shortest_answer=1)

    def measured(protocol, **options):
        found = measure_decoded(decoder, prompts, protocol, **options)
        return found.accept, found.sequences

    first = measured(warm)
    assert first[0] == "coupled"  # there is a seed
    assert measured(warm, accept="rejection")[0] == "rejection"
    assert first == measured(warm, batch_size=1)
    assert first[1] != measured(dataclasses.replace(warm, seed=9))[1]
    continuations = continuations_for(decoder, prompts, warm, accept="match")
    simulated = measure_simulated(decoder, prompts, warm, continuations, batch_size=16)
    assert simulated.accept == "match"
    decoder = DominoDecoder(
        decoder.target, decoder.drafter, engine="reference"
    )  # drafts to the end
    assert measured(warm, accept="match") == ("match", simulated.sequences)
    assert measured(dataclasses.replace(warm, temperature=0.0))[0] is None


def test_a_record_holds_every_prompt(decoder):
    record = measure_decoded(decoder, PROMPTS, SHORT).to_dict()
    assert json.loads(json.dumps(record)) == record
    each = record["per_prompt"]
    assert each["number"] == [0, 1, 2]
    assert each["outcome"] == ["used"] * 3
    assert sum(each["committed"]) == record["committed"]
    assert sum(each["cycles"]) == record["cycles"]
    assert record["tokens_per_cycle"] == record["committed"] / record["cycles"]


def test_continuations_of_other_prompts_are_refused(decoder):
    continuations = continuations_for(decoder, PROMPTS, SHORT)
    others = PromptSet.of("others", [[1]], longest=40)
    with pytest.raises(InputError, match="other prompts than others"):
        measure_simulated(decoder, others, SHORT, continuations)


def test_plain_decoding_is_decoded_but_not_simulated():
    plain = DominoDecoder(make_target("llama"), None)
    found = measure_decoded(plain, PROMPTS, SHORT)
    assert (found.depth, found.head, found.total.tokens_per_cycle) == (0, None, 1.0)
    continuations = continuations_for(plain, PROMPTS, SHORT)
    with pytest.raises(InputError, match="no drafter to measure"):
        measure_simulated(plain, PROMPTS, SHORT, continuations)
