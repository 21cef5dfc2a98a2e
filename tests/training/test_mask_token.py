"""The mask token: an id that neither text nor the target's answers hold."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from domino_spec.doctor.reading import read_mask
from domino_spec.errors import ConfigError
from domino_spec.targets import load_tokenizer
from domino_spec.training.start import choose_mask_token
from tests.cli.tiny import MASK as TINY_MASK
from tests.cli.tiny import make_tokenizer
from tests.support import vocabularies
from tests.support.ggufs import write_gguf
from tests.support.tokens import small_tokenizer
from tests.support.vocabularies import USER_DEFINED, Token, Vocabulary, save_hugging_face


class Rows:
    """A target of which only the vocabulary's size and the ends of a sequence count."""

    def __init__(self, size, ends=None):
        self.vocab_size = size
        self.model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))


def test_the_mask_is_a_row_after_the_tokenizers_last():
    tokenizer = make_tokenizer()
    size = len(tokenizer) + 10
    found = choose_mask_token(Rows(size), tokenizer, np.zeros(size, dtype=np.int64))
    assert found == len(tokenizer)


def test_the_mask_is_an_unused_special_token():
    tokenizer = make_tokenizer()  # its specials: end, user, assistant, system, mask
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    assert choose_mask_token(Rows(len(tokenizer)), tokenizer, counts) == TINY_MASK


def test_a_special_token_of_the_text_or_the_template_is_no_mask():
    tokenizer = make_tokenizer()
    size = len(tokenizer)
    counts = np.zeros(size, dtype=np.int64)
    counts[TINY_MASK] = 3
    tokenizer.chat_template = "<|user|><|assistant|>"
    found = choose_mask_token(Rows(size), tokenizer, counts)
    assert tokenizer.convert_ids_to_tokens(found) == "<|system|>"
    tokenizer.chat_template = "<|user|><|assistant|><|system|>"
    with pytest.raises(ConfigError, match="mask_token_id"):
        choose_mask_token(Rows(size), tokenizer, counts)


def test_a_tokenizers_own_mask_token():
    tokenizer = make_tokenizer()
    tokenizer.mask_token = "<|system|>"
    found = choose_mask_token(Rows(len(tokenizer)), tokenizer, np.zeros(len(tokenizer)))
    assert found == tokenizer.convert_tokens_to_ids("<|system|>")


def test_without_a_tokenizer_a_mask_must_be_named():
    with pytest.raises(ConfigError, match="no unused token.*mask_token_id"):
        choose_mask_token(Rows(50), None, np.zeros(50, dtype=np.int64))


def test_ends_and_padding_are_never_the_mask():
    tokenizer = small_tokenizer()
    size = len(tokenizer)
    counts = np.ones(size, dtype=np.int64)
    counts[tokenizer.all_special_ids] = 0
    # The template puts role marks together, so that only the text shows them.
    counts[tokenizer.convert_tokens_to_ids(["<|user|>", "<|system|>"])] = 1
    with pytest.raises(ConfigError, match="no unused token"):
        choose_mask_token(Rows(size), tokenizer, counts)


# The families, as Hugging Face folders and as GGUF files.

FAMILIES = {
    "qwen2.5": (vocabularies.qwen2_5(), "the first row after the last token"),
    "qwen3": (vocabularies.qwen3(), "the first row after the last token"),
    "llama3": (vocabularies.llama3(), "<|reserved_special_token_247|>"),
    "smollm2": (vocabularies.smollm2(), "<empty_output>"),
    "gemma3 1B": (vocabularies.gemma3(images=False), "<unused149>"),
    "gemma3 4B": (vocabularies.gemma3(images=True), "the first row after the last token"),
}


@pytest.fixture(params=["hugging face", "gguf"])
def load(request, tmp_path, monkeypatch):
    """Loads a vocabulary's tokenizer as a target's is loaded."""
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))

    def saved_and_loaded(vocabulary: Vocabulary):
        if request.param == "gguf":
            source = write_gguf(tmp_path / "tiny.gguf", vocabulary=vocabulary)
        else:
            source = save_hugging_face(vocabulary, tmp_path / "target")
        tokenizer = load_tokenizer(source)
        for token in vocabulary.tokens[: vocabulary.rows]:
            assert tokenizer.convert_tokens_to_ids(token.text) == vocabulary.id(token.text)
        return tokenizer

    return saved_and_loaded


def chosen(vocabulary, tokenizer, *, held=(), ends=None):
    counts = np.zeros(vocabulary.rows, dtype=np.int64)
    counts[list(held)] = 1
    return choose_mask_token(Rows(vocabulary.rows, ends), tokenizer, counts)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_one(load, family):
    vocabulary, expected = FAMILIES[family]
    tokenizer = load(vocabulary)
    row = "first row" in expected
    mask = len(vocabulary.tokens) if row else vocabulary.id(expected)
    assert chosen(vocabulary, tokenizer) == mask
    shape = SimpleNamespace(mask_token_id=mask, vocab_size=vocabulary.rows)
    assert [finding.state for finding in read_mask(shape, tokenizer)] == ["ok"]
    # Whatever the data hold, the next choice is never one that the target emits or reads.
    text = [i for i, token in enumerate(vocabulary.tokens) if token.type == vocabularies.NORMAL]
    ends = [vocabulary.id(vocabulary.eos)]
    other = chosen(vocabulary, tokenizer, held=[mask], ends=ends)
    assert other not in {mask, *ends, *text}
    name = tokenizer.convert_ids_to_tokens(other)
    assert name is None or name not in vocabulary.template


def test_padding_of_older_gguf_files(load):
    """They gave the rows after the last token the type of user-defined tokens."""
    vocabulary = vocabularies.qwen2_5(padding=0)
    first = len(vocabulary.tokens)
    padding = [Token(f"[PAD{first + i}]", USER_DEFINED, False) for i in range(20)]
    tokens = (*vocabulary.tokens, *padding)
    old = replace(vocabulary, tokens=tokens, rows=len(tokens))
    assert chosen(old, load(old)) == first


def test_an_end_of_the_generation_config_is_never_the_mask(load):
    vocabulary = vocabularies.smollm2()
    ends = [vocabulary.id("<|im_end|>"), vocabulary.id("<empty_output>")]
    found = chosen(vocabulary, load(vocabulary), ends=ends)
    assert found == vocabulary.id("<jupyter_script>")


def test_reserved_tokens_of_the_template_or_the_data_are_passed_over(load):
    vocabulary = vocabularies.llama3()
    vocabulary = replace(
        vocabulary, template=vocabulary.template + "<|reserved_special_token_247|>"
    )
    held = [vocabulary.id("<|reserved_special_token_246|>")]
    found = chosen(vocabulary, load(vocabulary), held=held)
    assert found == vocabulary.id("<|reserved_special_token_245|>")
