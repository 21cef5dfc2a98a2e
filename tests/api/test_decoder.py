"""The decoder as people use it: text, chats, ids, batches, streams."""

import copy
import types
import warnings

import numpy
import pytest
import torch
import transformers as tf

import domino_spec
from domino_spec import DominoDecoder, Provenance, SamplingParams, save_drafter
from domino_spec.api import MismatchWarning, UselessDrafterWarning
from domino_spec.decoding.stopping import at_strings
from domino_spec.errors import InputError, MismatchError, TargetError
from tests.support.families import (
    CONTEXT,
    VOCAB,
    drafter_config,
    make_model,
    make_target,
    plain_greedy,
    random_drafter,
    random_prompts,
)
from tests.support.pair import bigram_target, knowing_drafter
from tests.support.tokens import small_tokenizer

TEXT = "the quick domino"


@pytest.fixture(scope="module")
def decoder():
    return DominoDecoder(make_target("llama"), random_drafter(), small_tokenizer())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make_model("llama").save_pretrained(root / "target")
    small_tokenizer().save_pretrained(root / "target")
    make_model("llama").save_pretrained(root / "bare")
    save_drafter(random_drafter(), root / "draft", provenance=Provenance(training_length=64))
    return root


def test_text_is_continued_and_decoded(decoder):
    result = decoder.generate(TEXT, max_new_tokens=20, ignore_eos=True)
    prompt = small_tokenizer()(TEXT)["input_ids"]
    assert result.prompt_tokens == prompt
    assert result.tokens == plain_greedy(decoder.target.model, prompt, 20)
    assert result.text == small_tokenizer().decode(result.tokens, skip_special_tokens=True)
    assert result.finish_reason == "length"
    assert result.run.seconds > 0
    assert result.stats.committed == 19


def test_messages_go_through_the_chat_template(decoder):
    chat = [{"role": "user", "content": "the fox"}]
    result = decoder.generate(chat, max_new_tokens=3)
    assert small_tokenizer().decode(result.prompt_tokens) == "<|user|>the fox<|end|><|assistant|>"
    thinking = DominoDecoder(
        decoder.target, None, small_tokenizer(), chat_options={"enable_thinking": True}
    )
    prompt = thinking.generate(chat, max_new_tokens=1).prompt_tokens
    assert "<|think|>" in small_tokenizer().decode(prompt)


def test_ids_and_tensors_are_taken_as_they_are(decoder):
    (prompt,) = random_prompts((6,))
    by_list = decoder.generate(prompt, max_new_tokens=9)
    by_tensor = decoder.generate(torch.tensor(prompt), max_new_tokens=9)
    assert by_list.tokens == by_tensor.tokens
    batch = decoder.generate(torch.tensor([prompt, prompt]), max_new_tokens=9)
    assert [row.tokens for row in batch] == [by_list.tokens] * 2


def test_batch_rows_equal_single_rows(decoder):
    prompts = random_prompts((3, 11, 6))
    batch = decoder.generate(prompts, max_new_tokens=25, ignore_eos=True)
    alone = [decoder.generate(prompt, max_new_tokens=25, ignore_eos=True) for prompt in prompts]
    assert [row.tokens for row in batch] == [row.tokens for row in alone]


def test_each_row_may_have_its_own_parameters(decoder):
    prompts = random_prompts((3, 5))
    params = [
        SamplingParams(max_new_tokens=4, ignore_eos=True),
        SamplingParams(max_new_tokens=9, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True),
    ]
    first, second = decoder.generate(prompts, params)
    assert len(first.tokens) == 4
    assert len(second.tokens) == 9
    assert first.tokens == plain_greedy(decoder.target.model, prompts[0], 4)


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_stream_yields_each_token_as_blocks_commit(engine):
    drafter = knowing_drafter(shift=True, prefix=1)
    decoder = DominoDecoder(bigram_target(), drafter, depth=7, engine=engine)
    pieces = list(decoder.stream([4, 9], max_new_tokens=17))
    whole = decoder.generate([4, 9], max_new_tokens=17)
    assert [piece.token for piece in pieces] == whole.tokens
    assert [piece.finish_reason for piece in pieces] == [None] * 16 + ["length"]
    cycles = [piece.cycle for piece in pieces]
    assert cycles == [0] + [1] * 8 + [2] * 8
    accepted = [piece.accepted for piece in pieces]
    assert accepted == [False] + ([True] * 7 + [False]) * 2


def test_streamed_text_joins_to_the_whole(decoder):
    for stop in ((), ("th",), ("e",)):
        whole = decoder.generate(TEXT, max_new_tokens=30, stop=stop, ignore_eos=True)
        pieces = list(decoder.stream(TEXT, max_new_tokens=30, stop=stop, ignore_eos=True))
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [piece.token for piece in pieces] == whole.tokens


def test_what_might_have_become_a_stop_string_comes_at_the_end(decoder):
    params = {"max_new_tokens": 8, "ignore_eos": True}
    text = decoder.generate(TEXT, **params).text
    pieces = list(decoder.stream(TEXT, stop=(f"{text[-2:]}\0",), **params))
    assert "".join(piece.text for piece in pieces) == text


def test_a_stream_can_be_left_early(decoder):
    stream = decoder.stream(TEXT, max_new_tokens=50)
    next(stream)
    stream.close()
    assert decoder.generate(TEXT, max_new_tokens=3).tokens


def test_stop_strings_end_inside_a_block():
    tokenizer = small_tokenizer()
    target = make_target("llama")
    prompt = tokenizer(TEXT)["input_ids"]
    answer = plain_greedy(target.model, prompt, 40)
    text = tokenizer.decode(answer, skip_special_tokens=True)
    stop = text[9:12]
    decoder = DominoDecoder(target, random_drafter(), tokenizer)
    result = decoder.generate(TEXT, max_new_tokens=40, stop=stop, ignore_eos=True)
    assert result.finish_reason == "stop"
    assert stop not in (result.text or "")
    assert text.startswith(result.text)
    assert answer[: len(result.tokens)] == result.tokens
    assert stop in tokenizer.decode(result.tokens)
    assert stop not in tokenizer.decode(result.tokens[:-1])


def test_eos_comes_from_the_generation_config(decoder):
    assert decoder.eos_token_ids == {2}


def test_loading_from_folders(folders):
    decoder = DominoDecoder.from_pretrained(folders / "target", folders / "draft")
    result = decoder.generate(TEXT, max_new_tokens=12, ignore_eos=True)
    plain = decoder.generate(TEXT, max_new_tokens=12, ignore_eos=True, speculate=False)
    assert result.tokens == plain.tokens
    assert plain.stats.offered == []
    assert decoder.provenance.training_length == 64
    assert decoder.depth == 7


def test_plain_decoding_needs_no_drafter(folders):
    decoder = DominoDecoder.from_pretrained(folders / "target", None)
    assert decoder.generate(TEXT, max_new_tokens=5, ignore_eos=True).stats.tokens_per_cycle == 1.0


def test_public_names_load_lazily():
    for name in domino_spec.__all__:
        assert getattr(domino_spec, name)
    with pytest.raises(AttributeError, match="no_such"):
        domino_spec.no_such  # noqa: B018


# What goes wrong ------------------------------------------------------------------------------


def test_empty_prompts(decoder):
    for prompt in ("", [], torch.tensor([], dtype=torch.long)):
        with pytest.raises(InputError, match="empty|no prompt"):
            decoder.generate(prompt, max_new_tokens=3)
    with pytest.raises(InputError, match="prompt is empty"):
        decoder.generate(["the fox", ""], max_new_tokens=3)


def test_prompt_longer_than_the_context(decoder):
    with pytest.raises(InputError, match=f"{CONTEXT + 4} tokens.*context of {CONTEXT}.*shorten"):
        decoder.generate([5] * (CONTEXT + 4), max_new_tokens=1)
    with pytest.raises(InputError, match="at most 6 new tokens"):
        decoder.generate([5] * (CONTEXT - 6), max_new_tokens=7)
    assert len(decoder.generate([5] * (CONTEXT - 6), max_new_tokens=6, ignore_eos=True).tokens) == 6


def test_foreign_token_ids(decoder):
    with pytest.raises(InputError, match=f"token id {VOCAB}"):
        decoder.generate([3, VOCAB], max_new_tokens=3)


def test_missing_tokenizer(folders):
    decoder = DominoDecoder.from_pretrained(folders / "bare", folders / "draft")
    assert decoder.tokenizer is None
    assert decoder.generate([3, 4], max_new_tokens=3).text is None
    with pytest.raises(InputError, match="without a tokenizer"):
        decoder.generate("the fox", max_new_tokens=3)
    with pytest.raises(InputError, match="stop strings need a tokenizer"):
        decoder.generate([3, 4], max_new_tokens=3, stop=("x",))


def test_missing_chat_template():
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=small_tokenizer()._tokenizer)
    decoder = DominoDecoder(make_target("llama"), None, tokenizer)
    with pytest.raises(InputError, match="no chat template"):
        decoder.generate([{"role": "user", "content": "the fox"}], max_new_tokens=3)


def test_unknown_model(tmp_path):
    with pytest.raises(TargetError, match="no model at nobody/nothing"):
        DominoDecoder.from_pretrained("nobody/nothing", None)
    with pytest.raises(TargetError, match="no model at"):
        DominoDecoder.from_pretrained(tmp_path / "missing", None)
    with pytest.raises(TargetError, match="no GGUF file"):
        DominoDecoder.from_pretrained(tmp_path / "missing.gguf", None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "hidden"),
        ({"vocab_size": 200}, "vocab"),
        ({"num_target_layers": 7}, "layers"),
    ],
)
def test_drafter_of_another_target(changes, words):
    with pytest.raises(MismatchError, match=words):
        DominoDecoder(make_target("llama"), random_drafter(drafter_config(**changes)))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (torch.tensor([3.7, 4.2]), "float32; expected whole token ids"),
        (torch.zeros(1, 2, 3, dtype=torch.long), "3 dimensions"),
        ([[3, "a"]], "list of int, str"),
        ([None], "NoneType"),
        (3, "a prompt is int"),
        ([{"role": "user"}], "chat template does not take"),
        ([{"role": "wizard", "content": "abracadabra"}], "no wizards here"),
    ],
)
def test_prompts_that_are_no_prompts(prompt, words):
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'wizard' %}"
        "{{ raise_exception('no wizards here') }}{% endif %}{{ '' + m['content'] }}{% endfor %}"
    )
    decoder = DominoDecoder(make_target("llama"), None, tokenizer)
    with pytest.raises(InputError, match=words):
        decoder.generate(prompt, max_new_tokens=3)


def test_ids_from_numpy_are_ids(decoder):
    ids = [numpy.int64(token) for token in random_prompts((4,))[0]]
    assert decoder.generate(ids, max_new_tokens=3).prompt_tokens == [int(i) for i in ids]


def test_a_stop_string_across_a_special_token_stops():
    """The rule and the shown text must agree on what the text is."""
    tokenizer = small_tokenizer()
    rule = at_strings(("thequick",), tokenizer)
    row = types.SimpleNamespace(output=[])
    the, quick = (tokenizer(word)["input_ids"] for word in ("the", "quick"))
    reasons = []
    for token in [*the, tokenizer.convert_tokens_to_ids("<|user|>"), *quick]:
        row.output.append(token)
        reasons.append(rule(row))
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}


def test_loaded_parts_are_taken_by_from_pretrained(folders):
    model = make_model("llama")
    decoder = DominoDecoder.from_pretrained(model, random_drafter(), tokenizer=small_tokenizer())
    assert decoder.target.model is model
    assert decoder.generate(TEXT, max_new_tokens=4).tokens
    with pytest.raises(InputError, match="the drafter is int"):
        DominoDecoder(model, 7)
    with pytest.raises(InputError, match="expected SamplingParams"):
        decoder.generate(TEXT, [{"max_new_tokens": 3}])


def test_unknown_parameters_are_named(decoder):
    with pytest.raises(InputError, match="temprature"):
        decoder.generate(TEXT, temprature=0.5)
    with pytest.raises(InputError, match="1 prompts but 2"):
        decoder.generate(TEXT, [SamplingParams(), SamplingParams()])
    with pytest.raises(InputError, match="depth is 9"):
        DominoDecoder(make_target("llama"), random_drafter(), depth=9)
    with pytest.raises(InputError, match="candidates is 0"):
        DominoDecoder(make_target("llama"), random_drafter(), candidates=0)
    with pytest.raises(InputError, match="one prompt"):
        decoder.stream(["the fox", "the dog"])


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_useless_drafter_is_reported_once_with_what_to_check(engine):
    decoder = DominoDecoder(
        make_target("llama"), random_drafter(), small_tokenizer(), depth=7, engine=engine
    )
    with pytest.warns(
        UselessDrafterWarning, match=r"alignment.*'shift'.*llama.*chat template"
    ) as w:
        decoder.generate(TEXT, max_new_tokens=120, ignore_eos=True)
    assert len(w) == 1


def test_a_good_drafter_is_not_reported():
    decoder = DominoDecoder(bigram_target(), knowing_drafter(shift=True, prefix=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoder.generate([4, 9], max_new_tokens=450)


def test_another_tokenizer_than_in_training_is_a_warning():
    provenance = Provenance(tokenizer_sha256="0" * 64)
    with pytest.warns(MismatchWarning, match="tokenizer"):
        DominoDecoder(
            make_target("llama"), random_drafter(), small_tokenizer(), provenance=provenance
        )
