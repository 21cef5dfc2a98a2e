from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from domino_spec.api import DominoDecoder
from domino_spec.data import load_corpus, read_shard
from domino_spec.data.answer import (
    Answer,
    AnswerProgress,
    AnswerSettings,
    LocalAnswerer,
    Request,
    answer_prompts,
    estimate,
)
from domino_spec.data.chat import NO_TURN
from domino_spec.data.prompts import PromptRow, PromptSet, read_prompts
from domino_spec.engine import sizes
from domino_spec.errors import DataError
from tests.data.decoders import VOCAB, contents, prompt_set, tiny_decoder
from tests.support.families import drafter_config, random_drafter

SETTINGS = AnswerSettings(max_new_tokens=12, temperatures=(0.0, 0.7, 1.0), part_size=4)


def run(folder, prompts, answerer=None, settings=SETTINGS, **identity):
    answerer = answerer or LocalAnswerer(tiny_decoder(), batch_size=3)
    return answer_prompts(prompts, answerer, folder, settings, vocab_size=VOCAB, identity=identity)


def rows_of(folder) -> list[tuple[list[int], int, float]]:
    rows = []
    for path in sorted(folder.glob("*.npz")):
        shard = read_shard(path)
        ends = np.cumsum(shard.lengths)
        for end, length, prompt, temperature in zip(
            ends, shard.lengths, shard.prompt_lengths, shard.temperatures, strict=True
        ):
            rows.append(
                (shard.tokens[end - length : end].tolist(), int(prompt), float(temperature))
            )
    return rows


class Scripted:
    """Answers from a script, remembers what it was asked, and may fail."""

    def __init__(self, script=None, *, fails_at: int | None = None) -> None:
        self.asked: list[str] = []
        self.script = script or (lambda request: [9, 10, 11, 2])
        self.fails_at = fails_at

    def prompt_tokens(self, messages):
        return 3

    def answer(self, next_request):
        while (request := next_request()) is not None:
            if len(self.asked) == self.fails_at:
                raise KeyboardInterrupt
            self.asked.append(request.messages[-1]["content"])
            tokens = self.script(request)
            yield request, Answer([3, 4, 5], tokens, "x" * len(tokens), tokens[-1] == 2)


def test_answers_are_the_targets_own_at_their_temperatures(tmp_path):
    prompts, decoder = prompt_set(10), tiny_decoder()
    done = run(tmp_path / "out", prompts)
    rows = rows_of(tmp_path / "out")
    assert done.answered + sum(done.dropped.values()) == done.done == 10
    assert {temperature for *_, temperature in rows} == {0.0, np.float16(0.7), 1.0}
    greedy = {tuple(tokens): cut for tokens, cut, temperature in rows if temperature == 0}
    for row in prompts.rows:
        messages = [{"role": "user", "content": row.turns[0]}]
        plain = decoder.generate(messages, max_new_tokens=12)
        whole = (*plain.prompt_tokens, *plain.tokens)
        if whole in greedy:
            assert greedy.pop(whole) == len(plain.prompt_tokens)
    assert not greedy


def test_what_is_drawn_depends_on_neither_batch_nor_engine(monkeypatch, tmp_path):
    prompts, plain = prompt_set(9), tiny_decoder()
    settings = SETTINGS.model_copy(update={"part_size": 9})

    def answerer(size, engine="fast"):
        monkeypatch.setitem(sizes.MOST_PLAIN, "cpu", size)
        decoder = DominoDecoder(plain.target, None, plain.tokenizer, engine=engine)
        return LocalAnswerer(decoder, batch_size=size)

    for size, engine in ((8, "fast"), (2, "fast"), (1, "reference"), (4, "reference")):
        run(tmp_path / str(size), prompts, answerer(size, engine), settings)
        assert rows_of(tmp_path / str(size)) == rows_of(tmp_path / "8")
    run(tmp_path / "other", prompts, answerer(8), settings.model_copy(update={"seed": 1}))
    assert rows_of(tmp_path / "other") != rows_of(tmp_path / "8")


def requests_of(lengths):
    """A source of requests whose answers have these lengths."""
    settings = AnswerSettings()
    requests = [
        Request(
            index,
            [{"role": "user", "content": "the fox" + " dog" * index}],
            dataclasses.replace(settings.params(1.0, index), max_new_tokens=length),
        )
        for index, length in enumerate(lengths)
    ]
    left = iter(requests)
    return lambda: next(left, None)


def endless(monkeypatch):
    """A target that never ends a turn itself."""
    plain = tiny_decoder()
    decoder = DominoDecoder(plain.target, None, plain.tokenizer)
    monkeypatch.setattr(DominoDecoder, "eos_token_ids", frozenset())
    monkeypatch.setattr("domino_spec.data.answer.find_turn", lambda *a: NO_TURN)
    return decoder


def test_slots_that_come_free_are_taken_by_the_next_requests(monkeypatch):
    monkeypatch.setitem(sizes.MOST_PLAIN, "cpu", 2)
    decoder, asked, running = endless(monkeypatch), [], []
    source = requests_of([12, 2, 2, 2, 2])

    def next_request():
        asked.append(source())
        return asked[-1]

    for request, answer in LocalAnswerer(decoder, batch_size=1).answer(next_request):
        running.append((request.index, len(answer.tokens), len([a for a in asked if a])))
    assert [index for index, *_ in running] == [1, 2, 3, 4, 0]
    assert [count for _, count, _ in running] == [2, 2, 2, 2, 12]
    assert running[0][2] <= 4  # two run, two wait
    assert decoder.engine.size.slots == 2


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_out_of_memory_halves_the_batch_and_loses_nothing(engine, monkeypatch):
    lengths = [3, 9, 4, 7, 5, 6, 8]
    wanted = {
        r.index: a for r, a in LocalAnswerer(endless(monkeypatch)).answer(requests_of(lengths))
    }
    plain = tiny_decoder()
    decoder = DominoDecoder(plain.target, None, plain.tokenizer, engine=engine)
    real, batches = DominoDecoder.run, []

    def run(self, sequences, stats=None, *, more=None):
        """Fails in the midst of whatever has more than two sequences."""
        if more is None:
            batches.append(len(sequences))
        for count, output in enumerate(real(self, sequences, stats, more=more)):
            yield output
            if count == 5 and (more is not None or len(sequences) > 2):
                raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(DominoDecoder, "run", run)
    found = LocalAnswerer(decoder, batch_size=6).answer(requests_of(lengths))
    assert {request.index: answer for request, answer in found} == wanted
    assert max(batches) > 2 >= batches[-1]
    monkeypatch.setattr(DominoDecoder, "run", lambda *a, **k: _raises())
    with pytest.raises(DataError, match="ran out of memory with a single sequence"):
        list(LocalAnswerer(decoder, batch_size=2).answer(requests_of([3, 3])))


def _raises():
    raise torch.OutOfMemoryError("full")
    yield


def test_greedy_answers_are_the_same_with_a_drafter(tmp_path):
    settings = AnswerSettings(max_new_tokens=12)
    prompts = prompt_set(5)
    run(tmp_path / "plain", prompts, settings=settings)
    plain = tiny_decoder()
    drafter = random_drafter(drafter_config())
    fast = DominoDecoder(plain.target, drafter, plain.tokenizer)
    run(tmp_path / "fast", prompts, LocalAnswerer(fast, batch_size=3), settings)
    assert rows_of(tmp_path / "plain") == rows_of(tmp_path / "fast")


@pytest.mark.parametrize("format", ["shards", "jsonl"])
@pytest.mark.parametrize("fails_at", [0, 2, 5, 8])
def test_a_stopped_run_goes_on_to_the_same_end(fails_at, format, tmp_path):
    settings = AnswerSettings(part_size=3, format=format)
    prompts = prompt_set(10)
    whole = Scripted()
    run(tmp_path / "whole", prompts, whole, settings)
    stopped = Scripted(fails_at=fails_at)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", prompts, stopped, settings)
    before = contents(tmp_path / "parts")
    rest = Scripted()
    done = run(tmp_path / "parts", prompts, rest, settings)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert done.answered == done.done == 10
    finished = fails_at // 3 * 3
    assert rest.asked == whole.asked[finished:]  # nothing of a finished part again
    assert all(contents(tmp_path / "parts")[name] == data for name, data in before.items())
    again = Scripted()
    assert run(tmp_path / "parts", prompts, again, settings).answered == 10
    assert not again.asked


def test_a_part_without_its_note_or_a_half_written_one_is_done_again(tmp_path):
    settings = AnswerSettings(part_size=5)
    run(tmp_path, prompt_set(10), Scripted(), settings)
    wanted = contents(tmp_path)
    (tmp_path / "part-00001.npz").rename(tmp_path / ".part-00001.npz.partial")
    again = Scripted()
    run(tmp_path, prompt_set(10), again, settings)
    assert len(again.asked) == 5
    assert contents(tmp_path) == wanted


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"settings": AnswerSettings(part_size=3, seed=1)}, "seed 0, now it is 1"),
        ({"settings": AnswerSettings(part_size=4)}, "part_size 3"),
        ({"settings": AnswerSettings(part_size=3, temperatures=(0.0, 1.0))}, "temperatures"),
        ({"prompts": prompt_set(9)}, "prompts"),
        ({"target": "another"}, 'target "one"'),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(changes, named, tmp_path):
    values = {"prompts": prompt_set(10), "settings": AnswerSettings(part_size=3), "target": "one"}
    run(tmp_path, answerer=Scripted(), **values)
    with pytest.raises(DataError, match="was begun with") as caught:
        run(tmp_path, answerer=Scripted(), **{**values, **changes})
    assert named in str(caught.value)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(DataError, match=r"already holds thesis.txt"):
        run(tmp_path, prompt_set(1), Scripted())
    with pytest.raises(DataError, match="is a file"):
        run(tmp_path / "thesis.txt", prompt_set(1), Scripted())


def test_loops_are_dropped_and_counted_also_after_going_on(tmp_path):
    script = lambda request: [9] * 20 if request.messages[-1]["content"].endswith("a") else [9, 2]  # noqa: E731
    prompts = PromptSet([PromptRow((text,)) for text in ("xa", "b", "ya", "c")])
    for _ in range(2):
        done = run(tmp_path, prompts, Scripted(script), AnswerSettings(part_size=2))
        assert (done.answered, dict(done.dropped)) == (2, {"the answer is a loop": 2})
    assert [tokens for tokens, *_ in rows_of(tmp_path)] == [[3, 4, 5, 9, 2]] * 2


def test_every_turn_is_answered_and_follows_the_answers_before_it(tmp_path):
    settings = AnswerSettings(max_new_tokens=20, temperatures=(1.0,), seed=3)
    prompts = prompt_set(6, turns=3)
    decoder = tiny_decoder()
    run(tmp_path / "shards", prompts, settings=settings)
    jsonl = settings.model_copy(update={"format": "jsonl"})
    assert not run(tmp_path / "lines", prompts, settings=jsonl).dropped
    (path,) = (tmp_path / "lines").glob("*.jsonl")
    chats = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(len(chat["messages"]) > 2 for chat in chats)
    expected = []
    for chat in chats:
        messages = chat["messages"]
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * (len(messages) // 2)
        assert len(messages) == 6 or chat["finish_reason"] == "length"  # a cut answer ends it
        for index in range(1, len(messages), 2):
            text = decoder.tokenizer.apply_chat_template(
                messages[:index], tokenize=False, add_generation_prompt=True
            )
            expected.append(decoder.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert [tokens[:cut] for tokens, cut, _ in rows_of(tmp_path / "shards")] == expected


def test_a_cut_answer_ends_its_conversation(tmp_path):
    script = lambda request: [9, 10] if len(request.messages) == 1 else [9, 2]  # noqa: E731
    scripted = Scripted(script)
    run(tmp_path, prompt_set(2, turns=3), scripted)
    assert "then what" not in scripted.asked
    whole = Scripted()
    run(tmp_path / "whole", prompt_set(2, turns=3), whole)
    assert whole.asked.count("then what") == 4


def test_what_was_written_can_be_trained_on(tmp_path):
    prompts = prompt_set(10)
    done = run(tmp_path / "shards", prompts, tokenizer_sha256=None)
    lines = AnswerSettings(
        max_new_tokens=12, temperatures=(0.0, 0.7, 1.0), part_size=4, format="jsonl"
    )
    run(tmp_path / "lines", prompts, settings=lines)
    tokenizer = tiny_decoder().tokenizer
    for folder in ("shards", "lines"):
        source = str(tmp_path / folder)
        corpus = load_corpus([source], tokenizer=tokenizer, vocab_size=VOCAB)
        assert len(corpus) == done.answered


def test_prompts_that_do_not_fit_are_counted(tmp_path):
    prompts = PromptSet([PromptRow(("the fox " * 200,)), PromptRow(("the fox",))])
    done = run(tmp_path, prompts)
    assert done.answered == 1
    assert "context" in next(iter(done.dropped))
    assert done.done == 2


def test_progress_and_estimate():
    prompts = prompt_set(7)
    ahead = estimate(prompts, Scripted(), AnswerSettings(max_new_tokens=10))
    assert ahead == (91, 182)


def test_progress_is_told_after_every_answer(tmp_path):
    told = []
    answer_prompts(
        prompt_set(7), LocalAnswerer(tiny_decoder(), batch_size=2), tmp_path, SETTINGS,
        vocab_size=VOCAB, identity={},
        on_progress=lambda progress: told.append((progress.done, progress.seconds_left)),
    )  # fmt: skip
    assert [done for done, _ in told] == list(range(8))
    assert told[0][1] is None
    assert told[1][1] > 0
    assert told[-1][1] == 0


def test_a_few_answers_of_many_do_not_tell_how_long_it_takes():
    progress = AnswerProgress(prompts=36_000, session_seconds=4.0, session_bytes=640)
    for answered, told in ((1, None), (31, None), (32, 4.0 / 32 * 36_000)):
        progress.session_prompts = answered
        assert progress.seconds_left == told
    assert progress.bytes_left == 640 / 32 * 36_000


def test_prompts_of_every_layout(tmp_path):
    rows = [
        {"turns": ["one", "two"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
        {"conversations": [{"from": "human", "value": "four"}, {"from": "gpt", "value": "no"},
                           {"from": "human", "value": "five"}]},
        {"prompt": "six", "source": "books"},
        {"turns": []},
        {"other": 1},
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.txt").write_text("seven\n\n eight \n")
    found = read_prompts([tmp_path], system="be brief")
    assert [(row.turns, row.system, row.source) for row in found.rows] == [
        (("one", "two"), "be brief", "a"),
        (("three",), "s", "a"),
        (("four", "five"), "be brief", "a"),
        (("six",), "be brief", "books"),
        (("seven",), "be brief", "b"),
        (("eight",), "be brief", "b"),
    ]
    assert sorted(bad.first[-6:] for bad in found.bad.values()) == ["line 5", "line 6"]
    assert len(read_prompts([tmp_path], limit=2).rows) == 2
    (tmp_path / "b.txt").write_text("\n")
    with pytest.raises(DataError, match="no prompts in"):
        read_prompts([tmp_path / "b.txt"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": ()}, "at least 1 item"),
        ({"temperatures": (-1.0,)}, "temperatures is -1.0; expected 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"part_size": 0}, "part_size is 0"),
        ({"format": "csv"}, "format is 'csv'"),
    ],
)
def test_impossible_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        AnswerSettings(**changes)
