from __future__ import annotations

import time

import numpy as np
import pytest

from domino_spec.checkpoints import tokenizer_fingerprint
from domino_spec.data import is_loop, load_corpus, read_shard, write_shard
from domino_spec.data.corpus import Collector, Corpus
from domino_spec.errors import DataError
from tests.data.corpora import make_corpus, random_lengths
from tests.support.tokens import small_tokenizer


def shard_of(path, count: int, *, length: int = 300, vocab: int = 500, **more):
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, vocab, (count, length // 3)).tolist()
    answers = rng.integers(0, vocab, (count, length - length // 3)).tolist()
    write_shard(path, prompts=prompts, answers=answers, vocab_size=vocab, **more)
    return prompts, answers


def load(path, **changes) -> Corpus:
    values = {"tokenizer": None, "vocab_size": 500, "max_length": 1000, **changes}
    return load_corpus([str(path)], **values)


def test_a_shard_comes_back_as_it_was(tmp_path):
    path = tmp_path / "a.npz"
    prompts, answers = shard_of(path, 5, sources=list("aabbb"), temperatures=[0, 0.5, 1, 0, 1])
    shard = read_shard(path)
    assert shard.tokens.dtype == np.uint16
    assert shard.temperatures.tolist() == [0, 0.5, 1, 0, 1]
    corpus = load(path)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        example = corpus[index]
        assert example.tokens.tolist() == prompt + answer
        assert example.supervised.tolist() == [False] * len(prompt) + [True] * len(answer)
        assert example.source == "aabbb"[index]
    assert corpus.report.supervised_tokens == sum(map(len, answers))
    assert not list(tmp_path.glob("*.partial"))


def test_lengths_of_16_bits_add_up_beyond_them(tmp_path):
    path = tmp_path / "a.npz"
    prompts, answers = shard_of(path, 400)  # 120,000 tokens
    with np.load(path) as file:
        assert file["length"].dtype == np.uint16
        assert file["length"].sum(dtype=np.uint16) != 120_000
    corpus = load(path)
    assert corpus.report.tokens == 120_000
    assert corpus[399].tokens.tolist() == prompts[399] + answers[399]


def test_large_vocabularies_take_32_bits(tmp_path):
    write_shard(tmp_path / "a.npz", prompts=[[1]], answers=[[150_000]], vocab_size=151_000)
    assert read_shard(tmp_path / "a.npz").tokens.dtype == np.uint32
    assert load(tmp_path / "a.npz", vocab_size=151_000)[0].tokens.tolist() == [1, 150_000]


def test_bad_conversations_of_a_shard_are_counted(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        tokens=np.array([1, 2, 3, 1, 499, 7, 7, 1, 2, 3, 4, 5, 5, 5], dtype=np.uint16),
        length=np.array([3, 2, 0, 2, 4, 3], dtype=np.uint16),
        prompt_len=np.array([1, 1, 0, 3, 3, 3], dtype=np.uint16),
    )
    corpus = load(tmp_path / "a.npz", vocab_size=100, max_length=4)
    assert [corpus[i].tokens.tolist() for i in range(len(corpus))] == [[1, 2, 3], [1, 2, 3, 4]]
    assert corpus[1].supervised.tolist() == [False, False, False, True]
    places = {reason: (rows.count, rows.first[-5:]) for reason, rows in corpus.report.bad.items()}
    assert places == {
        "it holds token ids outside the vocabulary": (1, "row 2"),
        "it is empty": (1, "row 3"),
        "its prompt is longer than itself": (1, "row 4"),
        "no assistant token lies within the maximum length": (1, "row 6"),
    }
    cut = load(tmp_path / "a.npz", vocab_size=100, max_length=2)
    assert (len(cut), cut.report.cut, cut[0].tokens.tolist()) == (1, 1, [1, 2])
    assert len(load(tmp_path / "a.npz", limit=1)) == 1


def test_damaged_shards_are_named(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"a.npz could not be read"):
        load(path)
    np.savez(path, tokens=np.zeros(3, dtype=np.uint16))
    with pytest.raises(DataError, match="has no length and no prompt_len"):
        load(path)
    values = {"tokens": np.zeros(3, dtype=np.int32), "prompt_len": np.array([1])}
    np.savez(path, **values, length=np.array([4]))
    with pytest.raises(DataError, match="add up to 4 tokens but there are 3"):
        load(path)
    np.savez(path, **values, length=np.array([1, 2]))
    with pytest.raises(DataError, match="prompt_len has 1 entries but length has 2"):
        load(path)
    with pytest.raises(DataError, match="below the vocabulary"):
        write_shard(path, prompts=[[1]], answers=[[5]], vocab_size=5)


def test_another_tokenizers_shard_is_refused(tmp_path):
    path, tokenizer = tmp_path / "a.npz", small_tokenizer()
    sha = tokenizer_fingerprint(tokenizer)
    write_shard(path, prompts=[[1]], answers=[[2]], vocab_size=97, tokenizer_sha256=sha)
    assert len(load(path, tokenizer=tokenizer)) == 1
    write_shard(path, prompts=[[1]], answers=[[2]], vocab_size=97, tokenizer_sha256="0" * 64)
    with pytest.raises(DataError, match="made with another tokenizer"):
        load(path, tokenizer=tokenizer)


def test_the_fingerprint_follows_the_content_alone():
    corpus = make_corpus([5, 9, 7])
    assert corpus.fingerprint == make_corpus([5, 9, 7], vocab=1 << 18).fingerprint
    narrow, wide = (make_corpus([5, 9], vocab=v, unique=False) for v in (100, 1 << 20))
    assert narrow.fingerprint == wide.fingerprint  # whatever the ids are stored in
    assert narrow[0].tokens.dtype == wide[0].tokens.dtype == np.int32
    others = [make_corpus([5, 7, 9]), make_corpus([5, 9]), make_corpus([5, 9, 7], prompt=2)]
    assert len({corpus.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_a_split_is_by_content_and_repeatable():
    lengths = random_lengths(200, low=10, high=40)
    corpus = make_corpus(lengths)
    train, held = corpus.split(held_out=20, seed=3)
    assert (len(train), len(held)) == (180, 20)
    first_ids = lambda part: {int(part[i].tokens[0]) for i in range(len(part))}  # noqa: E731
    assert first_ids(train) | first_ids(held) == first_ids(corpus)
    assert not first_ids(train) & first_ids(held)
    assert corpus.split(held_out=20, seed=3)[1].fingerprint == held.fingerprint
    assert corpus.split(held_out=20, seed=4)[1].fingerprint != held.fingerprint
    longer = make_corpus([*lengths, 33]).split(held_out=20, seed=3)[1]
    assert len(first_ids(longer) & first_ids(held)) >= 19
    assert held.report.tokens == held.lengths.sum()
    assert sum(held.report.sources.values()) == 20
    whole = [corpus[i].tokens.tolist() for i in range(len(corpus))]
    assert all(held[i].tokens.tolist() in whole for i in range(len(held)))
    with pytest.raises(DataError, match="held out of 200"):
        corpus.split(held_out=200, seed=0)


def test_answers_to_one_prompt_stay_on_one_side():
    collector = Collector(vocab_size=100)
    for prompt in range(30):
        for answer in range(3):
            collector.add([prompt, prompt + 1, answer], np.array([0, 0, 1], dtype=bool), "", "")
    train, held = collector.corpus().split(held_out=10, seed=0)
    prompts = [{int(part[i].tokens[0]) for i in range(len(part))} for part in (train, held)]
    assert len(held) == 10
    assert len(prompts[0] & prompts[1]) == 1  # 10 is no multiple of 3


def test_counts_of_learnt_tokens():
    corpus = make_corpus([4, 5, 3 + 3], unique=False)
    assert corpus.token_counts(8).tolist() == [0, 0, 0, 3, 2, 1, 0, 0]
    with pytest.raises(DataError, match="token id 5"):
        corpus.token_counts(5)


def test_a_large_corpus_loads_and_indexes_quickly(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(100, 500, 76_000)
    np.savez(
        tmp_path / "a.npz",
        tokens=rng.integers(0, 500, int(lengths.sum())).astype(np.uint16),
        length=lengths.astype(np.uint16),
        prompt_len=(lengths // 3).astype(np.uint16),
    )
    started = time.perf_counter()
    corpus = load(tmp_path / "a.npz")
    assert time.perf_counter() - started < 10
    started = time.perf_counter()
    for index in range(0, 76_000, 10):
        corpus[index]
    assert (time.perf_counter() - started) / 7600 < 100e-6
    assert corpus[-1].tokens.tolist() == corpus[75_999].tokens.tolist()
    with pytest.raises(IndexError):
        corpus[76_000]


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        ([], False),
        ([1, 1, 1], False),
        ([1, 1, 1, 1], False),  # one 4-gram, and it is distinct
        ([1, 1, 1, 1, 1, 1], True),
        (list(range(50)), False),
        ([1, 2, 3, 4] * 2, False),  # 4 of 5
        ([1, 2, 3, 4] * 3, True),  # 4 of 9
        ([1, 2, 3, 4] * 2 + [1, 2, 3], False),  # 4 of 8: half is enough
        (list(range(30)) + [1, 2, 3, 4] * 4, False),
        (np.ones(20, dtype=np.uint16), True),
    ],
)
def test_what_a_loop_is(tokens, looping):
    assert is_loop(tokens) is looping
