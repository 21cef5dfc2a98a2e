"""Where prompts come from."""

import json

import pytest

from domino_spec.bench.runner import names_of
from domino_spec.bench.tasks import BUILT_IN, prompts_digest, read_tasks
from domino_spec.errors import DataError, InputError
from tests.cli.tiny import make_tokenizer


def test_the_built_in_sets_are_taken_unless_others_are_named():
    tasks = read_tasks([])
    assert tuple(task.name for task in tasks) == BUILT_IN
    texts = [row.turns for task in tasks for row in task.rows]
    assert [len(task.rows) for task in tasks] == [24, 24, 24]
    assert len(set(texts)) == len(texts)
    assert len(read_tasks(["code"], limit=3)[0].rows) == 3


def test_files_of_turns_and_of_messages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the fox"}]
    (tmp_path / "mine.jsonl").write_text(
        json.dumps({"turns": ["the quick fox", "and then?"]})
        + "\n"
        + json.dumps({"messages": messages})
        + "\n"
        + json.dumps({"rows": 1})
        + "\n"
    )
    said = []
    (task,) = read_tasks(["mine.jsonl"], notice=said.append)
    assert task.name == "mine"
    assert [row.turns[0] for row in task.rows] == ["the quick fox", "the fox"]
    assert "1 left out" in said[0]
    chat = make_tokenizer()
    found = task.encoded(chat, longest=50)
    texts = [chat.decode(prompt) for prompt in found.prompts]
    assert texts[0] == "<|user|>the quick fox<|end|><|assistant|>"
    assert texts[1].startswith("<|system|>Be brief.<|end|><|user|>the fox")
    bare = make_tokenizer(template=False)
    plain = task.encoded(bare, longest=50)
    assert bare.decode(plain.prompts[0]) == "the quick fox"
    cut = task.encoded(chat, longest=len(found.prompts[0]))
    assert (cut.numbers, cut.too_long) == ((0,), 1)
    assert len({prompts_digest(each) for each in (found, plain, cut)}) == 3


def test_a_file_stands_before_a_built_in_set_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text('{"turns": ["mine"]}\n')
    with pytest.raises(InputError, match="two sets of prompts are called chat"):
        read_tasks(["chat", "chat.jsonl"])
    (task,) = read_tasks(["chat.jsonl"])
    assert len(task.rows) == 1


def test_what_cannot_be_read_is_refused():
    with pytest.raises(DataError, match=r"there is no nowhere\.jsonl"):
        read_tasks(["nowhere.jsonl"])
    with pytest.raises(InputError, match="limit is 0"):
        read_tasks([], limit=0)


def test_names_are_as_long_as_it_takes(tmp_path):
    for folder in ("one/drafter", "two/drafter", "plain"):
        (tmp_path / folder).mkdir(parents=True)
    one, two, plain = (str(tmp_path / f) for f in ("one/drafter", "two/drafter", "plain"))
    assert names_of([one, "released:smol"]) == ["drafter", "smol"]
    assert names_of([one, two]) == ["one/drafter", "two/drafter"]
    (name,) = names_of([plain])  # `plain` is taken
    assert name == f"{tmp_path.name}/plain"
    with pytest.raises(InputError, match="given twice"):
        names_of([one, one])
