from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from domino_spec.checkpoints import (
    FORMAT_VERSION,
    Provenance,
    chat_template_fingerprint,
    tokenizer_fingerprint,
)
from domino_spec.errors import ConfigError

VOCABULARY = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "<pad>": 5}
MERGES = [("a", "b"), ("ab", "c")]


def tokenizer(
    *,
    vocabulary: dict[str, int] = VOCABULARY,
    merges: list[tuple[str, str]] = MERGES,
    template: Any = None,
) -> Any:
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    made.chat_template = template
    return made


def test_values_survive_as_plain_ones() -> None:
    facts = Provenance(
        target_id="org/target",
        target_revision="abc",
        tokenizer_sha256="t",
        chat_template_sha256="c",
        thinking="on",
        training_length=3072,
        license="apache-2.0",
        format_version=FORMAT_VERSION,
        created_with="domino-spec 0.1.0",
    )
    assert Provenance.from_dict(facts.to_dict()) == facts
    assert Provenance().to_dict() == {}
    assert Provenance.from_dict({}) == Provenance()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"targetid": "x"}, "no field 'targetid'"),
        ({"format_version": FORMAT_VERSION + 1, "new": 1}, "format_version is 2.*upgrade"),
        ({"thinking": "maybe"}, "thinking is 'maybe'"),
        ({"training_length": "3072"}, "training_length is '3072'"),
        ({"target_id": 3}, "target_id is 3"),
        ({"format_version": "1"}, "format_version is '1'"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Provenance.from_dict(values)


def test_the_fingerprint_survives_saving_and_use(tmp_path: Path) -> None:
    made = tokenizer(template="{{ messages }}\n")
    before = tokenizer_fingerprint(made), chat_template_fingerprint(made)
    made.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer_fingerprint(again), chat_template_fingerprint(again)) == before
    again(["a b", "abc"], padding=True, truncation=True, max_length=2)
    assert again.backend_tokenizer.truncation is not None
    assert tokenizer_fingerprint(again) == before[0]


def test_the_fingerprint_of_a_qwen_tokenizer_survives_saving(tmp_path: Path) -> None:
    made = Qwen2Tokenizer(vocab={**VOCABULARY, "<|endoftext|>": 6}, merges=MERGES)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(made)


@pytest.mark.slow
def test_the_fingerprint_is_the_same_in_another_process(tmp_path: Path) -> None:
    made = tokenizer()
    made.save_pretrained(tmp_path)
    code = (
        "import sys; from transformers import AutoTokenizer\n"
        "from domino_spec.checkpoints import tokenizer_fingerprint\n"
        "print(tokenizer_fingerprint(AutoTokenizer.from_pretrained(sys.argv[1])))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == tokenizer_fingerprint(made)


def test_the_fingerprint_tells_tokenizers_apart() -> None:
    swapped = {**VOCABULARY, "a": 1, "b": 0}
    added = tokenizer()
    added.add_tokens([AddedToken("<new>")])
    prints = {
        tokenizer_fingerprint(each)
        for each in (
            tokenizer(),
            tokenizer(vocabulary=swapped),
            tokenizer(merges=MERGES[:1]),
            added,
        )
    }
    assert len(prints) == 4


def test_the_same_rules_stored_otherwise_are_the_same() -> None:
    wordy = tokenizer()
    wordy.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert wordy.backend_tokenizer.to_str() != tokenizer().backend_tokenizer.to_str()
    assert tokenizer_fingerprint(wordy) == tokenizer_fingerprint(tokenizer())


def test_a_tokenizer_without_a_fast_backend() -> None:
    class Slow:
        def __init__(self, vocabulary: dict[str, int]) -> None:
            self.get_vocab = lambda: vocabulary

    one, reordered = Slow({"a": 0, "b": 1}), Slow({"b": 1, "a": 0})
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(reordered)
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(Slow({"a": 1, "b": 0}))


def test_chat_templates() -> None:
    assert chat_template_fingerprint(tokenizer()) is None
    plain = chat_template_fingerprint(tokenizer(template="x"))
    assert plain == chat_template_fingerprint(tokenizer(template="x"))
    assert plain != chat_template_fingerprint(tokenizer(template="y"))
    several = chat_template_fingerprint(tokenizer(template={"a": "x", "b": "y"}))
    assert several == chat_template_fingerprint(tokenizer(template={"b": "y", "a": "x"}))
    assert several not in (None, plain)
