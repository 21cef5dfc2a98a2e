from __future__ import annotations

import json

import numpy as np
import pytest

from domino_spec.data import load_corpus, write_shard
from domino_spec.errors import DataError
from tests.data.test_chat import FORGETFUL, tokenizer_with
from tests.support.tokens import small_tokenizer

VOCAB = 97


def chat(*turns: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


GOOD = chat("the fox", "jumps over")


def lines(path, *rows) -> str:
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return str(path)


def load(*sources, **changes):
    values = {"tokenizer": small_tokenizer(), "vocab_size": VOCAB, "max_length": 64, **changes}
    return load_corpus([str(source) for source in sources], **values)


def text_of(example, *, learnt: bool = False) -> str:
    ids = example.tokens[example.supervised] if learnt else example.tokens
    return small_tokenizer().decode(ids.tolist())


def test_all_layouts_of_a_conversation_are_one(tmp_path):
    share = {
        "conversations": [
            {"from": "human", "value": "the fox"},
            {"from": "gpt", "value": "jumps over"},
        ]
    }
    parts = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "the fox"}]},
            {"role": "assistant", "content": "jumps over"},
            {"role": "user", "content": "a question nobody answered"},
        ]
    }
    path = lines(tmp_path / "a.jsonl", GOOD, share, parts)
    listed = tmp_path / "b.json"
    listed.write_text(json.dumps([GOOD, share]))
    corpus = load(path, listed, lines(tmp_path / "c.json", GOOD, share))
    assert len(corpus) == 7
    for index in range(7):
        assert text_of(corpus[index]) == "<|user|>the fox<|end|><|assistant|>jumps over<|end|>"
        assert text_of(corpus[index], learnt=True) == "jumps over<|end|>"
    assert corpus[0].tokens.dtype == np.int32
    assert corpus.report.sources == {"a": 3, "b": 2, "c": 2}


def test_a_question_at_the_end_does_not_make_the_answer_before_it_history(tmp_path):
    path = lines(tmp_path / "a.jsonl", chat("the fox", "jumps over", "the dog"))
    example = load(path, tokenizer=tokenizer_with(FORGETFUL))[0]
    assert text_of(example, learnt=True) == "<|think|>jumps over<|end|>"


def test_named_fields(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"chat": GOOD["messages"], "text": "the dog"})
    assert text_of(load(path, messages_field="chat")[0], learnt=True) == "jumps over<|end|>"
    other = lines(tmp_path / "b.jsonl", {"body": "the dog", **GOOD})
    assert text_of(load(other, text_field="body")[0]) == "the dog"


def test_texts_are_learnt_whole_in_pieces(tmp_path):
    text = "the quick brown fox jumps over the lazy dog"
    (tmp_path / "a.txt").write_text(text)
    corpus = load(tmp_path / "a.txt", max_length=5)
    assert "".join(text_of(corpus[i]) for i in range(len(corpus))) == text
    assert all(corpus[i].supervised.all() for i in range(len(corpus)))
    assert (corpus.lengths <= 5).all()
    rows = lines(tmp_path / "b.jsonl", {"text": text}, {"text": " "})
    report = load(rows).report
    assert report.conversations == 1
    assert report.bad["it is empty"].count == 1


REASONS = {
    "not valid JSON": '{"messages": [',
    "not a JSON object": "[1, 2]",
    "no assistant turn": chat("the fox"),
    "an empty assistant turn": chat("the fox", " "),
    "out of order (user after user)": {"messages": [*GOOD["messages"][:1], *GOOD["messages"]]},
    "out of order (assistant comes first)": {"messages": GOOD["messages"][1:]},
    "from 'pirate', an unknown role": {"messages": [{"role": "pirate", "content": "the"}]},
    "from 'bird', an unknown role": {"conversations": [{"from": "bird", "value": "the"}]},
    "something other than text": {
        "messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
    },
    "neither role and content": {"messages": [{"who": "user"}]},
    "not a list of objects": {"messages": "the fox"},
    "neither messages nor conversations nor text (found question)": {"question": "the"},
    "no assistant token lies within": chat("the lazy dog " * 30, "jumps"),
    "it is empty": {"messages": []},
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_bad_row_is_counted_with_its_place_and_not_fatal(reason, tmp_path):
    path = lines(tmp_path / "a.jsonl", GOOD, REASONS[reason], "", GOOD, REASONS[reason])
    report = load(path).report
    assert report.conversations == 2
    ((said, rows),) = report.bad.items()
    assert reason in said
    assert (rows.count, rows.first) == (2, f"{path}, line 2")
    assert any(said in line for line in report.bad.lines())


def test_tokens_outside_the_vocabulary_are_a_bad_row(tmp_path):
    path = lines(tmp_path / "a.jsonl", GOOD, chat("the", "the"))
    most = max(load(path)[1].tokens.max(), 6)
    report = load(path, vocab_size=int(most) + 1).report
    assert report.conversations == 1
    assert "outside the vocabulary" in next(iter(report.bad))


def test_nothing_left_is_an_error_that_shows_why(tmp_path):
    path = lines(tmp_path / "a.jsonl", chat("the fox"), "{", chat("the dog"))
    with pytest.raises(DataError) as caught:
        load(path)
    message = str(caught.value)
    assert "nothing to train on" in message
    assert "2 left out: it has no assistant turn (`domino data answer` lets" in message
    assert "1 left out: it is not valid JSON" in message
    assert f"{path}, line 1" in message
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(DataError, match="hold no rows"):
        load(tmp_path / "b.jsonl")


def test_prompts_alone_are_refused_with_a_hint(tmp_path):
    path = lines(tmp_path / "a.jsonl", GOOD, {"turns": ["the fox"]})
    with pytest.raises(DataError, match="domino data answer"):
        load(path)


def test_long_conversations_are_cut_and_counted(tmp_path):
    path = lines(tmp_path / "a.jsonl", GOOD, chat("the", "fox " * 40))
    corpus = load(path, max_length=20)
    assert corpus.lengths.tolist()[1] == 20
    assert corpus.report.cut == 1
    assert any("1 cut" in line for line in corpus.report.lines())


def test_a_cut_answer_is_not_ended_by_the_template(tmp_path):
    path = lines(tmp_path / "a.jsonl", GOOD, {**GOOD, "finish_reason": "length"})
    corpus = load(path)
    assert text_of(corpus[1], learnt=True) == "jumps over"
    assert corpus.lengths[0] == corpus.lengths[1] + 1


def test_folders_globs_and_limits(tmp_path):
    (tmp_path / "in").mkdir()
    lines(tmp_path / "in" / "b.jsonl", GOOD, GOOD)
    lines(tmp_path / "a.jsonl", GOOD)
    lines(tmp_path / "_settings.json", {"no": "data"})
    lines(tmp_path / ".a.jsonl.partial", "{")
    shard = {"prompts": [[1, 2]], "answers": [[3, 4]], "vocab_size": VOCAB}
    write_shard(tmp_path / "c.npz", **shard)
    assert len(load(tmp_path)) == 4
    assert load(tmp_path).report.sources == {"a": 1, "c": 1, "b": 2}
    assert not load(tmp_path).report.bad
    assert len(load(f"{tmp_path}/*.jsonl")) == 1
    assert len(load(f"{tmp_path}/**/*.jsonl", limit=2)) == 2
    assert len(load(tmp_path, limit=3)) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gone.jsonl", "there is no"),
        ("*.nothing", "nothing matches"),
        ("a.parquet", "unknown kind (.parquet)"),
        ("empty", "holds no data"),
        ("hf:", "names no data set"),
    ],
)
def test_sources_that_are_not_there(source, message, tmp_path):
    (tmp_path / "a.parquet").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        load(source if source.startswith("hf:") else tmp_path / source)
    assert message in str(caught.value)


def test_texts_need_a_tokenizer_and_shards_do_not(tmp_path):
    path = lines(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(DataError, match="without a tokenizer"):
        load(path, tokenizer=None)
    write_shard(tmp_path / "c.npz", prompts=[[1]], answers=[[3]], vocab_size=VOCAB)
    assert len(load(tmp_path / "c.npz", tokenizer=None)) == 1


@pytest.mark.parametrize("changes", [{"max_length": 1}, {"limit": 0}])
def test_impossible_wishes(changes, tmp_path):
    with pytest.raises(DataError, match=next(iter(changes))):
        load(lines(tmp_path / "a.jsonl", GOOD), **changes)
