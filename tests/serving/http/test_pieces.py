"""A single token's name and bytes, for tokenizers of every make."""

import pytest
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from domino_spec.serving.http.pieces import _LETTERS, TokenNames
from tests.cli import tiny


def test_the_letters_of_bytes_are_the_tokenizers_own():
    assert set(_LETTERS) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(_LETTERS.values()) == list(range(256))


@pytest.mark.parametrize("text", ["the quick", " fox", "→", "naïve 日本", "\x00\n\t", "😀"])
def test_bytes_of_a_byte_level_tokenizer(text):
    tokenizer = tiny.make_tokenizer()
    names = TokenNames(tokenizer)
    tokens = tokenizer(text)["input_ids"]
    assert b"".join(map(names.raw, tokens)) == text.encode()


def test_special_tokens_are_called_by_their_names():
    names = TokenNames(tiny.make_tokenizer())
    end = tiny.SPECIALS.index("<|end|>")
    assert names.special(end)
    assert names.name(end) == "<|end|>"
    assert not names.special(len(tiny.SPECIALS) + 1)


def test_half_a_character_is_written_in_bytes():
    tokenizer = tiny.make_tokenizer()
    names = TokenNames(tokenizer)
    assert [names.name(t) for t in tokenizer("→")["input_ids"]] == ["\\xe2", "\\x86", "\\x92"]


def test_an_id_that_the_tokenizer_does_not_have():
    assert TokenNames(tiny.make_tokenizer()).raw(10**6) == b""


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
    names = TokenNames(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁fox", "es", "▁", "<0xE2>", "<0x86>"])
    assert b"".join(map(names.raw, ids)) == b" the foxes \xe2\x86"
    assert [names.name(token) for token in ids[3:]] == [" ", "\\xe2", "\\x86"]


def test_a_tokenizer_of_another_make_is_asked_what_a_token_says():
    backend = Tokenizer(models.WordLevel({"fox": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert TokenNames(tokenizer).raw(0) == b"fox"
