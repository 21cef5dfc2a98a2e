"""A single token's name and bytes, for tokenizers of every make."""

import pytest
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from domino_spec.serving.tokenization import _LETTERS, TokenTexts
from tests.cli import tiny


def test_the_letters_of_bytes_are_the_tokenizers_own():
    assert set(_LETTERS) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(_LETTERS.values()) == list(range(256))


@pytest.mark.parametrize("text", ["the quick", " fox", "→", "naïve 日本", "\x00\n\t", "😀"])
def test_bytes_of_a_byte_level_tokenizer(text):
    tokenizer = tiny.make_tokenizer()
    names = TokenTexts(tokenizer)
    tokens = tokenizer(text)["input_ids"]
    assert b"".join(map(names.bytes_of, tokens)) == text.encode()


def test_special_tokens_are_called_by_their_names():
    names = TokenTexts(tiny.make_tokenizer())
    end = tiny.SPECIALS.index("<|end|>")
    assert names.is_special(end)
    assert names.text_of(end) == "<|end|>"
    assert not names.is_special(len(tiny.SPECIALS) + 1)


def test_half_a_character_is_written_in_bytes():
    tokenizer = tiny.make_tokenizer()
    names = TokenTexts(tokenizer)
    assert [names.text_of(t) for t in tokenizer("→")["input_ids"]] == ["\\xe2", "\\x86", "\\x92"]


def test_an_id_that_the_tokenizer_does_not_have():
    assert TokenTexts(tiny.make_tokenizer()).bytes_of(10**6) == b""


def fallback_tokenizer():
    """As SentencePiece's: words with a mark for the space before them, bytes for the rest."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁fox", "es", "▁"]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_bytes_of_a_tokenizer_that_falls_back_to_them():
    tokenizer = fallback_tokenizer()
    names = TokenTexts(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁fox", "es", "▁", "<0xE2>", "<0x86>"])
    assert b"".join(map(names.bytes_of, ids)) == b" the foxes \xe2\x86"
    assert [names.text_of(token) for token in ids[3:]] == [" ", "\\xe2", "\\x86"]


def test_a_tokenizer_of_another_make_is_asked_what_a_token_says():
    backend = Tokenizer(models.WordLevel({"fox": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert TokenTexts(tokenizer).bytes_of(0) == b"fox"
