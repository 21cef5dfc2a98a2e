"""One decoder, two ways to run a request: same tokens on both, and a reason for each choice."""

import gc
import warnings
import weakref

import pytest
import torch
import transformers as tf

from domino_spec import DominoDecoder, DominoGenerate, SamplingParams
from domino_spec.api import ReferenceLoopNotice
from domino_spec.api import decoder as decoder_module
from domino_spec.engine import sizes
from domino_spec.engine.engine import Engine
from domino_spec.errors import InputError
from tests.engine.runs import own
from tests.support.families import make_target, plain_greedy, random_drafter, random_prompts
from tests.support.hooks import ban_by_prefix
from tests.support.tokens import small_tokenizer

PROMPTS = random_prompts([3, 8, 5])
TEXT = "the quick domino"
NEW = 12
LONG = {"max_new_tokens": NEW, "ignore_eos": True}


def decoder(engine, family="llama", **options):
    options = {"depth": 7, **options}
    return DominoDecoder(
        own(make_target(family)), random_drafter(), small_tokenizer(), engine=engine, **options
    )


@pytest.fixture(scope="module")
def fast():
    return decoder("fast")


@pytest.fixture(scope="module")
def reference():
    return decoder("reference")


@pytest.fixture(scope="module")
def auto():
    return decoder("auto")


# The same tokens ----------------------------------------------------------------------------------


def both(one, other, *arguments, **options):
    """Both answers, and that each went its own way."""
    found = [d.generate(*arguments, **options) for d in (one, other)]
    assert [results[0].run.engine for results in found] == ["fast", "reference"]
    return ([row.tokens for row in results] for results in found)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_greedy_batches_of_different_lengths(family):
    found, expected = both(decoder("auto", family), decoder("reference", family), PROMPTS, **LONG)
    assert found == expected
    model = make_target(family).model
    assert found == [plain_greedy(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("params", [
    {"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
], ids=str)  # fmt: skip
def test_a_seed_gives_the_reference_loops_coupled_text(fast, reference, params):
    params = {"seed": 5, **params, **LONG}
    found, expected = both(fast, reference, PROMPTS, **params, accept="coupled")
    assert found == expected
    plain = fast.generate(PROMPTS, **params, speculate=False)  # the rule need not be said
    assert [row.tokens for row in plain] == found
    assert [row.tokens for row in fast.generate(PROMPTS, **params | {"seed": 6})] != found


def test_a_seed_keeps_its_text_unless_another_rule_is_asked_for(fast, reference):
    params = {"seed": 5, "temperature": 0.8, **LONG}
    unsaid = reference.generate(TEXT, **params).tokens
    for decoder in (fast, reference):
        assert decoder.generate(TEXT, **params).tokens == unsaid
        assert decoder.generate(TEXT, **params, accept="match").tokens == unsaid
        assert decoder.generate(TEXT, **params, accept="block").tokens != unsaid


def test_without_a_seed_torchs_own_counts(fast):
    def drawn():
        torch.manual_seed(3)
        return fast.generate(TEXT, temperature=1.0, accept="coupled", **LONG).tokens

    assert drawn() == drawn()


def test_rows_with_parameters_of_their_own(fast, reference):
    params = [
        SamplingParams(max_new_tokens=4, ignore_eos=True),
        SamplingParams(max_new_tokens=20, temperature=0.9, seed=2, accept="coupled"),
        SamplingParams(max_new_tokens=9, temperature=0.7, top_k=5, seed=3, accept="coupled"),
    ]
    found, expected = both(fast, reference, PROMPTS, params)
    assert found == expected


def test_streams(fast, reference):
    for params in ({}, {"temperature": 0.9, "seed": 4, "accept": "coupled"}):
        found, expected = (list(d.stream(TEXT, **params, **LONG)) for d in (fast, reference))
        for name in ("token", "text", "cycle", "finish_reason"):
            assert [getattr(t, name) for t in found] == [getattr(t, name) for t in expected]
        # The loop never drafts a row's last token, the engine may.
        accepted = [[t.accepted for t in tokens[:-1]] for tokens in (found, expected)]
        assert accepted[0] == accepted[1]


def test_interleaved_streams_share_one_engine():
    one = decoder("fast")
    expected = [result.tokens for result in one.generate(PROMPTS, **LONG)]
    engine = one.engine
    streams = [one.stream(prompt, **LONG) for prompt in PROMPTS[:2]]
    left = one.stream(PROMPTS[2], **LONG)
    next(left)
    pairs, most = [], 0
    for first, second in zip(*streams, strict=True):
        pairs.append((first.token, second.token))
        most = max(most, engine.running)
    left.close()
    assert [list(tokens) for tokens in zip(*pairs, strict=True)] == expected[:2]
    assert one.engine is engine
    assert most == 3
    assert (engine.running, engine.waiting) == (0, 0)
    assert [result.tokens for result in one.generate(PROMPTS, **LONG)] == expected


def test_drafts_and_plain_decoding_share_one_engine(fast, reference):
    expected = [reference.generate(prompt, **LONG).tokens for prompt in PROMPTS[:2]]
    drafted = fast.stream(PROMPTS[0], **LONG)
    first = next(drafted)
    plain = fast.generate(PROMPTS[1], speculate=False, **LONG)
    assert plain.tokens == expected[1]
    assert plain.stats.drafted == 0
    assert [first.token, *(token.token for token in drafted)] == expected[0]


def test_a_larger_request_makes_the_caches_grow():
    growing = decoder("fast")
    before = growing.generate(TEXT, **LONG)
    engine, size = growing.engine, growing.engine.size
    assert size.slots == 1
    growing.target.config.max_position_embeddings = 4096
    longer = {"max_new_tokens": size.capacity, "ignore_eos": True, "stop": before.text[9:12]}
    found = growing.generate(TEXT, **longer)
    assert found.tokens == before.tokens[: len(found.tokens)]
    several = growing.generate([TEXT] * 3, **LONG)
    assert [row.tokens for row in several] == [before.tokens] * 3
    assert growing.engine is engine
    assert engine.size.slots >= 3
    assert engine.size.capacity > size.capacity


def test_stop_strings_and_end_tokens(fast, reference):
    whole = fast.generate(TEXT, **LONG)
    found, expected = (d.generate(TEXT, **LONG, stop=whole.text[9:12]) for d in (fast, reference))
    assert (found.text, found.tokens) == (expected.text, expected.tokens)
    assert found.finish_reason == expected.finish_reason == "stop"
    ended = decoder("fast")
    ended.target.model.generation_config.eos_token_id = whole.tokens[9]
    found = ended.generate(TEXT, max_new_tokens=NEW)
    assert found.tokens == whole.tokens[: whole.tokens.index(whole.tokens[9]) + 1]
    assert found.finish_reason == "eos"


def test_chats(fast, reference):
    chat = [{"role": "user", "content": "the fox"}]
    found, expected = (d.generate(chat, **LONG) for d in (fast, reference))
    assert found.tokens == expected.tokens
    assert found.prompt_tokens == expected.prompt_tokens


def test_candidates_and_no_drafter():
    for options in ({"candidates": 4}, {"depth": 0}):
        each = (decoder(engine, **options) for engine in ("fast", "reference"))
        found, expected = both(*each, PROMPTS, **LONG)
        assert found == expected
    plain = DominoDecoder(own(make_target("llama")), None, engine="fast")
    expected = plain_greedy(plain.target.model, PROMPTS[0], NEW)
    assert plain.generate(PROMPTS[0], **LONG).tokens == expected


@pytest.mark.parametrize("params", [
    {"repetition_penalty": 1.5}, {"presence_penalty": 1.2, "frequency_penalty": 0.4},
    {"frequency_penalty": 1.5, "temperature": 0.7, "seed": 4, "accept": "coupled"},
], ids=str)  # fmt: skip
def test_penalties_give_one_text(fast, reference, params):
    found, expected = both(fast, reference, PROMPTS, **params, **LONG)
    assert found == expected
    free = {name: value for name, value in params.items() if "penalty" not in name}
    assert found != [row.tokens for row in fast.generate(PROMPTS, **free, **LONG)]


def test_scores_are_told_where_they_are_asked_for(fast, reference):
    each = [{"logprobs": 2}, {"logprobs": 2, "temperature": 0.7, "seed": 4, "accept": "coupled"}]
    for params in each:
        found, expected = (d.generate(PROMPTS, **params, **LONG) for d in (fast, reference))
        for one, other in zip(found, expected, strict=True):
            assert len(one.scores) == len(one.tokens) == len(other.scores)
            for score, known in zip(one.scores, other.scores, strict=True):
                assert score.logprob == pytest.approx(known.logprob, abs=1e-3)
                assert [token for token, _ in score.top] == [token for token, _ in known.top]
        told = found[0].to_dict()["scores"][0]
        assert told == {"logprob": found[0].scores[0].logprob, "top": found[0].scores[0].top}
    silent = fast.generate(TEXT, **LONG)
    assert silent.scores is None
    assert "scores" not in silent.to_dict()


@pytest.mark.parametrize("params", [
    {"processors": tf.NoRepeatNGramLogitsProcessor(2)},
    {"hooks": ban_by_prefix},
    {"hooks": ban_by_prefix, "temperature": 0.7, "seed": 4, "accept": "coupled"},
], ids=["processor", "hook", "sampled"])  # fmt: skip
def test_processors_and_hooks_give_one_text(fast, reference, params):
    found, expected = both(fast, reference, PROMPTS, **params, **LONG)
    assert found == expected
    free = {n: value for n, value in params.items() if n not in ("processors", "hooks")}
    assert found != [row.tokens for row in fast.generate(PROMPTS, **free, **LONG)]


# What the engine cannot do ------------------------------------------------------------------------

HOOKED = {"temperature": 0.8, "seed": 1, "hooks": (lambda prompt, output, logits: logits,)}
REFUSED = {
    "rejection": ({**HOOKED, "accept": "rejection"}, "accept='rejection'"),
    "match": ({**HOOKED, "accept": "match"}, "accept='match'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_engine_cannot_do_the_reference_loop_does_and_says_so_once(kind, reference):
    params, words = REFUSED[kind]
    auto = decoder("auto")
    with pytest.warns(ReferenceLoopNotice, match=words) as told:
        found = auto.generate(PROMPTS, **params, **LONG)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReferenceLoopNotice)
        auto.generate(PROMPTS[:1], **params, **LONG)
    expected = reference.generate(PROMPTS, **params, **LONG)
    assert [row.tokens for row in found] == [row.tokens for row in expected]
    assert found[0].run.engine == "reference"
    assert words in found[0].run.to_dict()["engine_reason"]


@pytest.mark.parametrize("kind", REFUSED)
def test_who_asks_for_the_engine_alone_is_told_why_not(kind, fast):
    params, words = REFUSED[kind]
    with pytest.raises(InputError, match=f"engine is 'fast', but .*{words}.*'auto'"):
        fast.generate(PROMPTS, **params, **LONG)
    with pytest.raises(InputError, match=words):
        fast.stream(PROMPTS[0], **params, **LONG)  # at once, not with the first token


def test_greedy_rows_have_one_way_to_accept(fast):
    for rule in ("block", "rejection", "match", "coupled"):
        assert fast.generate(TEXT, accept=rule, **LONG).run.engine == "fast"


def test_a_family_the_engine_does_not_know():
    with pytest.raises(InputError, match="'fast', but .*Gemma2ForCausalLM"):
        decoder("fast", "gemma2")
    auto = decoder("auto", "gemma2")
    with pytest.warns(
        ReferenceLoopNotice,
        match="Gemma2ForCausalLM; the engine runs gemma3_text, gpt_oss, granite",
    ):
        found = auto.generate(PROMPTS, **LONG)
    assert [r.tokens for r in found] == [plain_greedy(auto.target.model, p, NEW) for p in PROMPTS]


def test_who_asks_for_the_reference_loop_is_not_told():
    plain = decoder("reference", "gemma2")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReferenceLoopNotice)
        found = plain.generate(TEXT, repetition_penalty=1.5, **LONG)
    assert found.run.engine_reason == "engine='reference' was asked for"


def test_a_model_that_somebody_listens_to_is_called_as_it_is(auto):
    """Steering by hooks is part of the model, and the engine would leave it out."""
    before = auto.generate(TEXT, **LONG).tokens
    layer = auto.target.layers[2]
    handle = layer.register_forward_hook(lambda _module, _args, output: output * -1.0)
    try:
        with pytest.warns(ReferenceLoopNotice, match="layers.2 has a hook"):
            steered = auto.generate(TEXT, **LONG)
    finally:
        handle.remove()
    assert steered.tokens != before
    again = auto.generate(TEXT, **LONG)
    assert again.tokens == before
    assert again.run.engine == "fast"


def test_a_module_whose_forward_was_replaced_is_called_as_it_is(auto):
    before = auto.generate(TEXT, **LONG).tokens
    module = auto.target.layers[2].mlp
    plain = module.forward
    module.forward = lambda states: plain(states) * -1.0
    try:
        with pytest.warns(ReferenceLoopNotice, match=r"layers.2.mlp has a hook"):
            steered = auto.generate(TEXT, **LONG)
    finally:
        del module.forward
    assert steered.tokens != before
    assert auto.generate(TEXT, **LONG).run.engine == "fast"


def test_transformers_own_hooks_are_harmless(auto):
    auto.target.model(torch.tensor([[5, 6]]), output_hidden_states=True, output_attentions=True)
    assert auto.generate(TEXT, **LONG).run.engine == "fast"


def test_slots_that_do_not_fit_into_memory(monkeypatch):
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 10_000)
    with pytest.warns(ReferenceLoopNotice, match="slot of 20 tokens takes 0.0 GB"):
        assert decoder("auto").generate(PROMPTS, **LONG)[0].run.engine == "reference"
    with pytest.raises(InputError, match="which is not free"):
        decoder("fast").generate(PROMPTS, **LONG)


def out_of_memory(*arguments, **options):
    raise torch.OutOfMemoryError


def after_a_cycle(engine, sequences, stats=None, **options):
    """A stream that fails once it has given tokens."""
    for number, output in enumerate(REAL_STREAM(engine, sequences, stats, **options)):
        if number == 2:
            raise torch.OutOfMemoryError
        yield output


REAL_STREAM = Engine.stream


@pytest.mark.parametrize("name", ["__init__", "resize", "_start_prefill"])
def test_memory_that_runs_out_after_all(monkeypatch, reference, name):
    """As the engine, its caches or the first activations are made."""
    monkeypatch.setattr(Engine, name, out_of_memory)
    with pytest.warns(ReferenceLoopNotice, match="ran out of memory"):
        found = decoder("auto").generate(PROMPTS, **LONG)
    assert found[0].run.engine == "reference"
    assert found[0].finish_reason == "length"
    expected = reference.generate(PROMPTS, **LONG)
    assert [row.tokens for row in found] == [row.tokens for row in expected]
    assert [row.stats for row in found] == [row.stats for row in expected]
    with pytest.raises(torch.OutOfMemoryError):
        decoder("fast").generate(PROMPTS, **LONG)


def test_memory_that_runs_out_once_tokens_were_given_is_an_error(monkeypatch):
    """They were told already: a reference loop would begin anew."""
    monkeypatch.setattr(Engine, "stream", after_a_cycle)
    with pytest.raises(torch.OutOfMemoryError):
        decoder("auto").generate(PROMPTS[0], **LONG)


def test_the_engine_is_gone_before_the_reference_loop_needs_its_memory(monkeypatch):
    auto = decoder("auto")
    engine = weakref.ref(auto.engine)
    plain = decoder_module.decode

    def decode(*arguments):
        gc.collect()
        assert engine() is None
        return plain(*arguments)

    monkeypatch.setattr(Engine, "_start_prefill", out_of_memory)
    monkeypatch.setattr(decoder_module, "decode", decode)
    with pytest.warns(ReferenceLoopNotice, match="ran out of memory"):
        assert auto.generate(PROMPTS[0], **LONG).run.engine == "reference"


def test_an_unknown_engine():
    with pytest.raises(InputError, match="engine is 'quick'; expected one of 'auto', 'fast'"):
        decoder("quick")


# The Transformers model goes on ------------------------------------------------------------------


def test_the_model_still_works_when_the_engine_has_its_weights(auto):
    expected = auto.generate(PROMPTS[0], **LONG)
    assert expected.run.engine == "fast"
    model = auto.target.model
    assert plain_greedy(model, PROMPTS[0], NEW) == expected.tokens
    loop = DominoDecoder(auto.target, auto.drafter, engine="reference", depth=7)
    found = loop.generate(PROMPTS[0], **LONG)
    assert (found.tokens, found.stats.cycles) == (expected.tokens, expected.stats.cycles)
    bridge = DominoGenerate(auto)
    ids = torch.tensor([PROMPTS[0]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, eos_token_id=None,
        pad_token_id=0, custom_generate=bridge,
    )  # fmt: skip
    assert out[0, len(PROMPTS[0]) :].tolist() == expected.tokens
    assert bridge.stats.engine == "fast"


def test_scores_of_generate_are_not_for_the_engine(fast):
    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(InputError, match="'fast', but .*scores of every token are kept"):
        fast.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, pad_token_id=0,
            custom_generate=DominoGenerate(fast), output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip


def test_a_model_can_be_saved_after_that(auto, tmp_path):
    auto.generate(TEXT, **LONG)
    auto.target.model.save_pretrained(tmp_path)
    saved = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in auto.target.model.named_parameters():
        assert torch.equal(saved.get_parameter(name), weight), name


@pytest.mark.usefixtures("packing_small_weights")
def test_a_stream_that_is_left_open_does_not_keep_old_weights():
    """Its own tokens are the old weights', all that is asked for afterwards is the new ones'."""
    changing = decoder("auto", pack=True)
    model = changing.target.model
    before = plain_greedy(model, PROMPTS[0], NEW)
    stream = changing.stream(PROMPTS[0], **LONG)
    first = next(stream)
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.mul_(-1.0)
    after = changing.generate(PROMPTS[0], **LONG).tokens
    assert after == plain_greedy(model, PROMPTS[0], NEW) != before
    assert [first.token, *(token.token for token in stream)] == before


@pytest.mark.usefixtures("packing_small_weights")
@pytest.mark.parametrize("pack", [True, False])
def test_weights_that_change_are_noticed(pack):
    """In place, as training does it, and replaced, as a change of type does."""
    changing = decoder("auto", pack=pack)
    model = changing.target.model
    before = changing.generate(PROMPTS, **LONG)
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.mul_(-1.0)
    after = changing.generate(PROMPTS, **LONG)
    assert [row.tokens for row in after] != [row.tokens for row in before]
    assert [row.tokens for row in after] == [plain_greedy(model, p, NEW) for p in PROMPTS]
    model.to(torch.bfloat16)
    assert changing.generate(TEXT, **LONG).tokens
    assert changing.engine.target.dtype == torch.bfloat16
