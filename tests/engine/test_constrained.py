"""Grammars on the engine: the reference loop's text, whatever is drafted."""

import json
import re
from functools import cache

import jsonschema
import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from domino_spec.decoding import Grammar, SamplingParams, Sequence, decode
from domino_spec.decoding.stopping import at_eos, at_length
from domino_spec.engine import constrained, model_runner
from domino_spec.engine.model_runner import ModelRunner, Plan
from domino_spec.errors import InputError
from domino_spec.grammars import GrammarCompiler, Matcher, Vocabulary, matcher
from tests.engine.replays import Replays
from tests.engine.runs import draft, make_engine
from tests.engine.stress import disturbed_target, drafter_for, table_for
from tests.support.hooks import ban_by_prefix
from tests.support.pair import SIZE

END = 0
TOKENS = ["<end>", *'{}[]":,-abcdefghij0123456789', '{"', '":', "ab"]
"""The lm_head has more rows than that."""


def make_vocabulary():
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    merges = [("{", '"'), ('"', ":"), ("a", "b")]
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=backend)
    return Vocabulary.of(tokenizer, rows=SIZE, ends=[END])


COMPILER = GrammarCompiler(make_vocabulary)
PROMPTS = [[5, 9, 30], [1, 2, 3, 1, 2, 3, 1], [8], [20, 21, 22, 23, 20, 21]]
NEW = 18
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0},
        "b": {"type": "array", "items": {"enum": ["cd", "ef", True]}, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
WORDS = Grammar.regex(r"[\[\]{}:,a-j0-9-]+")
"""What leaves the target most of its tokens."""
JSON = Grammar.json_schema(SCHEMA)
CHOICE = Grammar.choice(["abba", "bad", "ab0"])
LARK = Grammar.grammar('start: pair ("," pair)*\npair: /[a-j]+/ ":" /[0-9]{1,3}/')


@cache
def case(kind):
    """Engines work on copies."""
    table = table_for(kind, SIZE)
    return disturbed_target(table, disturbance=0.3), drafter_for(kind, table)


def sequences_of(params, *, speculate=True):
    return [
        Sequence(
            prompt,
            own,
            index=index,
            stop_rules=[at_eos([END]), at_length()],
            speculate=speculate,
            matcher=None if own.grammar is None else COMPILER.compile(own.grammar).matcher(),
        )
        for index, (prompt, own) in enumerate(zip(PROMPTS, params, strict=True))
    ]


def params_of(*each, **common):
    return [SamplingParams(max_new_tokens=NEW, **common, **own) for own in each]


def reference(target, params, drafter=None):
    sequences = sequences_of(params)
    for _ in decode(target, drafter, sequences):
        pass
    return [(sequence.output, sequence.finish_reason) for sequence in sequences]


def run(engine, params, **how):
    sequences = sequences_of(params, **how)
    outputs = list(engine.stream(sequences))
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(sequence.output, sequence.finish_reason) for sequence in sequences], outputs


def text_of(output):
    return "".join(TOKENS[token] for token in output if token != END)


@pytest.mark.parametrize(("kind", "ahead"), [("domino", True), ("lookup", False)])
@pytest.mark.parametrize("common", [{}, SAMPLED], ids=["greedy", "seeded"])
def test_grammars_give_the_reference_loops_text_with_drafts_and_without(kind, ahead, common):
    target, drafter = case(kind)
    params = params_of(
        {"grammar": WORDS},
        {},
        {"grammar": JSON, "frequency_penalty": 0.4, "logprobs": 2},
        {"grammar": LARK, "hooks": ban_by_prefix} if ahead else {"grammar": CHOICE},
        **common,
    )
    expected = reference(target, params)
    assert reference(target, params, drafter) == expected
    engine = make_engine(target, drafter, slots=3, ahead=ahead, reuse=True)
    found, outputs = run(engine, params)
    assert found == expected
    assert run(engine, params, speculate=False)[0] == expected
    scores = [score for o in outputs if o.sequence.index == 2 for score in o.scores]
    assert len(scores) == len(expected[2][0])
    # The grammars held, and changed what would have been written.
    free = reference(target, params_of({}, {}, {"frequency_penalty": 0.4}, {}, **common))
    assert [one == other for one, other in zip(expected, free, strict=True)] == [0, 1, 0, 0]
    assert re.fullmatch(WORDS.text, text_of(expected[0][0]))
    if expected[2][1] != "length":
        jsonschema.validate(json.loads(text_of(expected[2][0])), SCHEMA)
    if not ahead:
        assert text_of(expected[3][0]) in ("abba", "bad", "ab0")
        assert expected[3][1] == "stop"  # nothing can follow, and no end token is waited for


def test_drafts_are_accepted_and_rejected_under_a_grammar():
    target, drafter = case("domino")
    engine = make_engine(target, drafter, slots=4)
    sequences = sequences_of(params_of(*[{"grammar": WORDS}] * 4))
    list(engine.stream(sequences))
    accepted = sum(sum(s.stats.accepted) for s in sequences)
    assert 0 < accepted < sum(sum(s.stats.offered) for s in sequences)


SCRIPTS = {
    "what the grammar allows nowhere": lambda _known: [SIZE - 1, 13, END, 5, 5, 5, 5],
    "the answer, then what breaks the grammar": lambda known: [*known[:2], TOKENS.index("]")] * 2,
    "what the grammar allows, but not the answer": lambda _known: [
        TOKENS.index(each) for each in ('{"', "a", '":', "1", "2", "3", ",")
    ],
    "an early end": lambda known: [*known[:1], END, *known[2:]],
    "the answer": lambda known: known,
}


@pytest.mark.parametrize(("script", "common"), [
    *((script, {}) for script in SCRIPTS),
    ("what the grammar allows, but not the answer", SAMPLED),
])  # fmt: skip
def test_no_draft_changes_the_text(script, common, monkeypatch):
    monkeypatch.setattr(constrained, "WORKERS", 2 if common else 1)
    target, drafter = case("domino")
    params = params_of({"grammar": JSON}, {"grammar": CHOICE}, {"grammar": LARK}, {}, **common)
    expected = reference(target, params)
    engine = make_engine(target, drafter, slots=4, ahead=True)
    draft(engine, lambda index, done: SCRIPTS[script](expected[index][0][done:]))
    found, outputs = run(engine, params)
    assert found == expected
    if script == "the answer":  # each cycle commits a block
        cycles = max(output.cycle for output in outputs if output.sequence.index == 0)
        assert cycles == -(-(len(expected[0][0]) - 1) // (engine.depth + 1))


def test_a_walk_leaves_the_matcher_where_it_was(monkeypatch):
    """Without the rollback the sequence would go on from drafts that were not accepted."""
    ids = [TOKENS.index(each) for each in ('{"', "a", '":', "1", "}")]
    follower = COMPILER.compile(JSON).matcher()
    before, after = (np.zeros((n, follower.words), np.int32) for n in (2, 6))
    follower.fill(before[0])
    assert follower.walk(ids, after) == len(ids)
    follower.fill(before[1])
    assert (before[0] == before[1]).all()
    assert (after[0] == before[0]).all()
    for place, token in enumerate(ids[:4]):  # and what it told of each place is true
        follower.commit(token)
        follower.fill(before[1])
        assert (after[place + 1] == before[1]).all()
    with pytest.raises(InputError, match="JSON schema does not allow the token 2 as number 5"):
        follower.commit(ids[4])


def test_walks_that_end_early_accept_less_and_change_nothing(monkeypatch):
    """A slow grammar, or one that fails at a draft, which may never be committed."""
    target, drafter = case("domino")
    params = params_of(*[{"grammar": WORDS}] * 4)
    expected = reference(target, params)
    engine = make_engine(target, drafter, slots=4)
    monkeypatch.setattr(matcher, "WALK_SECONDS", -1.0)
    found, outputs = run(engine, params)
    assert found == expected
    assert sum(output.accepted for output in outputs) == 0
    monkeypatch.undo()
    fill, walk, asked = Matcher.fill, Matcher.walk, []

    def failing(self, mask):
        asked.append(mask)
        if len(asked) == 3:
            self._state.consume_token(SIZE - 1)  # banned: the state is an error from now on
        fill(self, mask)

    def walked(self, drafts, masks):
        asked.clear()
        return walk(self, drafts, masks)

    monkeypatch.setattr(Matcher, "fill", failing)
    monkeypatch.setattr(Matcher, "walk", walked)
    found, outputs = run(engine, params)
    assert found == expected
    assert max(output.accepted for output in outputs if output.finish_reason is None) == 1


def test_sequences_without_a_grammar_keep_their_own_cycles(monkeypatch):
    target, drafter = case("domino")
    engine = make_engine(target, drafter, slots=4, ahead=True)
    plans, start = [], engine.runner.start_cycle

    def started(slots, plan):
        plans.append((len(slots), plan))
        return start(slots, plan)

    monkeypatch.setattr(engine.runner, "start_cycle", started)
    run(engine, params_of({"grammar": JSON}, {}, {}, {}))
    assert plans[0] == (3, Plan(engine.depth))
    assert not any(plan.constrained for _, plan in plans)


def test_captured_forwards(monkeypatch):
    """A graph fills up its batch, and its results lie where another one's do."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(model_runner, "_read_back", lambda report, n: report[:n].clone().cpu)
    target, drafter = case("domino")
    engine = make_engine(target, drafter, slots=4, ahead=True)
    engine.runner = ModelRunner(engine.target, engine.drafter, engine.slots, graphs=True, pad=False)
    engine.runner.recorder = Replays()
    params = params_of({"grammar": JSON}, {}, {"grammar": WORDS}, {"grammar": LARK}, **SAMPLED)
    engine.capture(4, params[0])
    found, _ = run(engine, params)
    assert found == reference(target, params)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_grammar_that_leaves_no_token_ends_its_sequence_alone(ahead):
    target, drafter = case("domino")
    stuck = Grammar.regex("Zebra|ab|abZebra")  # no token has a Z
    params = params_of({"grammar": stuck}, {}, {"grammar": Grammar.regex("aZ")}, {"grammar": JSON})
    engine = make_engine(target, drafter, slots=2, ahead=ahead)
    sequences = sequences_of(params)
    outputs = list(engine.stream(sequences))
    assert text_of(sequences[0].output) == "ab"
    failed = sequences[2]
    assert "expression leaves no token after 1 tokens of the output" in str(failed.error)
    assert text_of(failed.output) == "a"
    told = [token for o in outputs if o.sequence is failed for token in o.tokens]
    assert told == failed.output
    assert [s.error for s in sequences if s is not failed] == [None] * 3
    assert sequences[3].output == reference(target, params[:2] + params[3:] * 2)[3][0]
    assert not engine.busy
    with pytest.raises(InputError, match="expression leaves no token after 1 tokens"):
        reference(target, params)


def test_what_a_sequence_with_a_grammar_is_made_of():
    params = SamplingParams(grammar=JSON, temperature=1.0)
    assert params.rule == "coupled"
    with pytest.raises(InputError, match="needs a matcher of it"):
        Sequence([1], params)
    with pytest.raises(InputError, match="expected a Grammar, such as"):
        SamplingParams(grammar=SCHEMA)
    for rule in ("block", "rejection"):
        with pytest.raises(InputError, match=f"accept is '{rule}' with a grammar"):
            SamplingParams(grammar=JSON, accept=rule)


def test_no_token_left_to_a_grammar_by_something_else(monkeypatch):
    """The grammar allows some, and all of these are banned."""
    target, drafter = case("domino")
    params = params_of(*[{"grammar": WORDS}] * 3, {})
    expected = reference(target, params)
    engine = make_engine(target, drafter, slots=4)
    judged, index = engine.runner._judged, max(range(3), key=lambda i: len(expected[i][0]))
    end = len(PROMPTS[index]) + 5

    def banned(logits, block, metadata, plan):
        found, slots = judged(logits, block, metadata, plan), metadata.slots
        own = [s.slot for s in engine.scheduler.running if s.index == index]
        if block is not None and plan.constrained and own:
            places = engine.slots.lengths[slots].unsqueeze(1) + torch.arange(1, block.shape[1] + 1)
            here = (places == end) & (slots == own[0]).unsqueeze(1)
            found = found.masked_fill(here.unsqueeze(2), -torch.inf)
        return found

    monkeypatch.setattr(engine.runner, "_judged", banned)
    sequences = sequences_of(params)
    list(engine.stream(sequences))
    failed = sequences.pop(index)
    assert failed.output == expected.pop(index)[0][:5]
    assert f"no token is left at position {end}" in str(failed.error)
    assert [(s.output, s.finish_reason) for s in sequences] == expected
