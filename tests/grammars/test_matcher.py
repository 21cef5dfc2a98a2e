"""Grammars over the tokenizers of real families, and how they are compiled and kept."""

import json
import random

import numpy as np
import pytest
import transformers as tf
from tokenizers import Tokenizer, decoders, models, normalizers

from domino_spec.errors import InputError
from domino_spec.grammars import Grammar, GrammarCompiler, Vocabulary, matcher
from domino_spec.serving.tokenization import TokenTexts
from domino_spec.targets.load import load_tokenizer
from tests.support.ggufs import write_gguf
from tests.support.tokens import small_tokenizer
from tests.support.vocabularies import llama3, qwen2_5, save_hugging_face, smollm2


def sentencepiece():
    """As Llama 2's: a mark for the space before a word, and before the text; bytes for the rest."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [*"▁thefoxqu", "th", "the", "▁the", "▁f", "▁fo", "▁fox"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "f"), ("▁f", "o"), ("▁fo", "x")]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.add_special_tokens(words[:3])
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def of_folder(vocabulary, folder):
    return load_tokenizer(save_hugging_face(vocabulary, folder))


def of_gguf(vocabulary, folder):
    return load_tokenizer(write_gguf(folder / "tiny.gguf", vocabulary=vocabulary))


TOKENIZERS = {
    "sentencepiece": lambda _: sentencepiece(),
    "qwen2.5": lambda folder: of_folder(qwen2_5(), folder),
    "qwen2.5, GGUF": lambda folder: of_gguf(qwen2_5(padding=5), folder),
    "llama 3, GGUF": lambda folder: of_gguf(llama3(), folder),
    "smollm2": lambda folder: of_folder(smollm2(), folder),
}
TEXT = 'the fox: "→ 日本 😀"\n\tthe\x7f'


def allowed_by(follower, rows):
    mask = np.zeros(follower.words, np.int32)
    follower.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[rows:].any()
    return np.flatnonzero(bits).tolist()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_is_written_byte_by_byte_by_any_of_its_tokens(name, tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    tokenizer = TOKENIZERS[name](tmp_path)
    texts, end = TokenTexts(tokenizer), tokenizer.eos_token_id
    rows = len(tokenizer) + 70  # an lm_head with more rows than there are tokens
    compiler = GrammarCompiler(lambda: Vocabulary.of(tokenizer, rows=rows, ends=[end]))
    chosen = compiler.compile(Grammar.choice([TEXT, TEXT + "!"]))
    for seed in range(4):
        follower, rng, written = chosen.matcher(), random.Random(seed), b""
        while not follower.ended:
            allowed = allowed_by(follower, len(tokenizer))
            assert (end in allowed) == (written == TEXT.encode())
            token = rng.choice(allowed)
            assert token == end or not texts.is_special(token)
            written += b"" if token == end else texts.bytes_of(token)
            follower.commit(token)
            assert follower.is_end(token) == (token == end)
        assert written.decode() in (TEXT, TEXT + "!")
    # What the tokenizer itself makes of a text is allowed, wherever the grammar leaves a choice.
    follower = compiler.compile(Grammar.regex(r"(.|\n)*")).matcher()
    for token in tokenizer(TEXT, add_special_tokens=False)["input_ids"]:
        assert token in allowed_by(follower, len(tokenizer))
        follower.commit(token)


def test_an_end_token_that_is_no_special_one_is_no_text():
    tokenizer = small_tokenizer()
    end = tokenizer.convert_tokens_to_ids("the")
    vocabulary = Vocabulary.of(tokenizer, rows=len(tokenizer), ends=[end])
    follower = GrammarCompiler(lambda: vocabulary).compile(Grammar.regex("[a-z ]+x")).matcher()
    assert end not in allowed_by(follower, len(tokenizer))
    forced = GrammarCompiler(lambda: vocabulary).compile(Grammar.regex("the fox")).matcher()
    with pytest.raises(InputError, match="asks for the name of an end token after 0 tokens"):
        allowed_by(forced, len(tokenizer))


def test_a_grammar_is_compiled_once_while_it_is_used(monkeypatch):
    tokenizer = small_tokenizer()
    compiler = GrammarCompiler(lambda: Vocabulary.of(tokenizer, rows=97, ends=[2]))
    monkeypatch.setattr(matcher, "MAX_COMPILED", 2)
    one, two, three = (Grammar.choice([word]) for word in ("the", "fox", "dog"))
    first = compiler.compile(one)
    compiler.compile(two)
    assert compiler.compile(Grammar.choice(["the"])) is first
    compiler.compile(three)
    assert [compiler.known(each) is not None for each in (one, two, three)] == [True, False, True]


@pytest.mark.parametrize(("grammar", "words"), [
    (lambda: Grammar.json_schema({"type": "objekt"}), "schema cannot be compiled: Invalid type"),
    (lambda: Grammar.json_schema({"not": {}}), 'cannot be compiled: Unimplemented keys: ["not"]'),
    (lambda: Grammar.json_schema("{"), "the JSON schema is not JSON that can be read"),
    (lambda: Grammar.json_schema("[]"), "the JSON schema is list; expected an object"),
    (lambda: Grammar.json_schema(False), "JSON schema cannot be compiled: Unsatisfiable"),
    (lambda: Grammar.json_schema(json.loads("[" * 65 + "]" * 65)), "is list; expected an object"),
    (lambda: Grammar.json_schema({"enum": json.loads("[" * 65 + "]" * 65)}), "more than 64 deep"),
    (lambda: Grammar.regex("(a"), "the regular expression cannot be compiled"),
    (lambda: Grammar.regex("a{,}|" * 40000), "has 200000 characters; at most 131072"),
    (lambda: Grammar.regex(""), "the regular expression is empty"),
    (lambda: Grammar.choice([]), "there are 0 choices; expected 1 to 1000"),
    (lambda: Grammar.choice(["a", ""]), "a choice is ''; expected a text"),
    (lambda: Grammar.grammar("start: ("), "the grammar cannot be compiled"),
    (lambda: Grammar.grammar("hello"), "the grammar cannot be compiled"),
])  # fmt: skip
def test_what_is_wrong_with_a_grammar_is_said(grammar, words):
    compiler = GrammarCompiler(lambda: Vocabulary.of(small_tokenizer(), rows=97, ends=[2]))
    with pytest.raises(InputError) as wrong:
        compiler.compile(grammar())
    assert words in str(wrong.value)


def test_keywords_are_ignored_where_that_is_asked_for():
    grammar = Grammar.json_schema({"type": "null", "not": {}}, lenient=True)
    compiler = GrammarCompiler(lambda: Vocabulary.of(small_tokenizer(), rows=97, ends=[2]))
    assert compiler.compile(grammar).matcher().words == 4


@pytest.mark.parametrize(("tokenizer", "ends", "words"), [
    (None, [2], "need a fast tokenizer, whose tokens have known bytes; found none"),
    (object(), [2], "found object"),
    (small_tokenizer(), [], "need an end token, and the target has none"),
])  # fmt: skip
def test_targets_without_what_grammars_need(tokenizer, ends, words):
    with pytest.raises(InputError, match=words):
        Vocabulary.of(tokenizer, rows=97, ends=ends)
