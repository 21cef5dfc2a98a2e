from __future__ import annotations

import copy
import json

import pytest

from domino_spec.api import DominoDecoder
from domino_spec.data import synth
from domino_spec.data.chat import find_turn
from domino_spec.data.generation import BatchGenerator
from domino_spec.data.synth import SynthSettings, normalised, synthesise
from domino_spec.decoding import Sequence as Decoded
from domino_spec.engine import sizes
from domino_spec.errors import DataError
from tests.data.decoders import contents, tiny_decoder
from tests.data.test_chat import CHATML, tokenizer_with
from tests.support.families import make_target
from tests.support.tokens import small_tokenizer

END = 2


def texts_in(folder) -> list[str]:
    rows = [
        json.loads(line)
        for path in sorted(folder.glob("part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert all(row["messages"][0]["role"] == "user" for row in rows)
    return [row["messages"][0]["content"] for row in rows]


@pytest.fixture
def drawing(monkeypatch):
    """Candidates from a script, by their seeds; what was drawn is remembered."""
    tokenizer = small_tokenizer()
    drawn: list[int] = []

    def use(texts: list[str | tuple[list[int], str]], settings: SynthSettings) -> list[int]:
        def generate(self, next_prompt):
            """The last one ends first: the order of candidates is not that of their ends."""
            while prompts := list(iter(next_prompt, None)):
                for prompt in reversed(prompts):
                    assert tokenizer.decode(prompt.tokens) == "<|user|>"
                    assert prompt.params == settings.params(prompt.index)
                    drawn.append(prompt.index)
                    text = texts[drawn[-1]] if drawn[-1] < len(texts) else "dog"
                    if isinstance(text, str):
                        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                        text = [*ids, END], "eos"
                    sequence = Decoded(prompt.tokens, prompt.params, index=prompt.index)
                    sequence.output, sequence.finish_reason = text
                    yield sequence

        monkeypatch.setattr(BatchGenerator, "generate", generate)
        return drawn

    return use


CANDIDATES = [
    "the quick fox",
    "the  quick fox",
    "a domino falls",
    "dog",
    "fox " * 30,
    ([30] * 3 + list(range(20, 60)), "length"),
    ([20, 21, 22, 3, 23, END], "eos"),
    "the quick fox ",
    "over the dog",
    "over the lazy dog",
    "then the next one falls",
]


def test_repeats_loops_and_the_rest_are_dropped(drawing, tmp_path):
    settings = SynthSettings(part_size=4, min_tokens=3)
    drawing(CANDIDATES, settings)
    done = synthesise(tiny_decoder(), tmp_path, settings, count=5, batch_size=2)
    assert texts_in(tmp_path) == [
        "the quick fox",
        "a domino falls",
        "over the dog",
        "over the lazy dog",
        "then the next one falls",
    ]
    assert dict(done.dropped) == {
        "repeated": 2,
        "too short": 1,
        "loops": 1,
        "too long": 1,
        "with special tokens": 1,
    }


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_a_larger_count_adds_to_a_smaller_one(batch, drawing, tmp_path):
    settings = SynthSettings(part_size=4, min_tokens=3)
    drawn = drawing(CANDIDATES, settings)
    synthesise(tiny_decoder(), tmp_path, settings, count=1, batch_size=batch)
    assert texts_in(tmp_path) == ["the quick fox"]
    drawn.clear()
    done = synthesise(tiny_decoder(), tmp_path, settings, count=5, batch_size=batch)
    assert min(drawn) == 1  # the first is not drawn again
    assert len(texts_in(tmp_path)) == 5
    assert texts_in(tmp_path)[-1] == "then the next one falls"
    assert (done.prompts, done.candidates, done.dropped["repeated"]) == (5, 11, 2)
    drawn.clear()
    synthesise(tiny_decoder(), tmp_path, settings, count=5)
    assert not drawn


def test_a_stopped_run_goes_on_to_the_same_end(tmp_path):
    settings = SynthSettings(max_tokens=16, part_size=16)
    synthesise(tiny_decoder(), tmp_path / "whole", settings, count=4, batch_size=8)

    def stop(progress):
        if progress.candidates == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesise(
            tiny_decoder(), tmp_path / "parts", settings, count=4, batch_size=8, on_progress=stop
        )
    assert not tiny_decoder().engine.busy
    assert (tmp_path / "parts" / "part-00000.jsonl").exists()
    synthesise(tiny_decoder(), tmp_path / "parts", settings, count=4, batch_size=8)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert len(set(texts_in(tmp_path / "whole"))) == 4
    with pytest.raises(DataError, match="begun with seed 0"):
        synthesise(tiny_decoder(), tmp_path / "parts", SynthSettings(
            max_tokens=16, part_size=16, seed=1), count=4)  # fmt: skip


def test_what_is_drawn_depends_on_neither_batch_nor_engine(monkeypatch, tmp_path):
    settings = SynthSettings(max_tokens=10, part_size=12)
    for batch, slots, engine in ((12, 12, "fast"), (5, 2, "fast"), (3, 2, "reference")):
        monkeypatch.setitem(sizes.MOST_PLAIN, "cpu", slots)
        decoder = DominoDecoder(make_target("llama"), None, small_tokenizer(), engine=engine)
        told = []
        synthesise(
            decoder, tmp_path / str(batch), settings, count=1, batch_size=batch,
            on_progress=lambda progress, told=told: told.append(progress.candidates),
        )  # fmt: skip
        assert told == list(range(len(told)))  # as each one ends
        if engine == "fast":
            assert decoder.engine.size.slots == slots
            assert not decoder.engine.busy
        assert contents(tmp_path / str(batch)) == contents(tmp_path / "12")


def test_a_target_that_has_nothing_to_say_is_given_up(drawing, monkeypatch, tmp_path):
    settings = SynthSettings(part_size=8, min_tokens=3)
    drawing(["the quick fox"] * 200, settings)
    monkeypatch.setattr(synth, "_FRUITLESS", 40)
    with pytest.raises(DataError, match=r"no new prompt in 40 candidates .40 repeated.; 1 are in"):
        synthesise(tiny_decoder(), tmp_path, settings, count=2, batch_size=8)


def test_normalised_texts():
    assert normalised(" What\tIS ﬁne? ") == "what is fine?"


def test_a_turns_frame_is_read_off_the_template():
    tokenizer = tokenizer_with(CHATML)
    user = find_turn(tokenizer, "user")
    assert (user.opening, user.end_ids, user.end_text) == ("<|user|>", {END}, "")
    steered = find_turn(tokenizer, "user", system="the fox")
    assert steered.opening == "<|system|>the fox<|end|> <|user|>"
    assistant = find_turn(tokenizer, "assistant")
    assert assistant.opening.endswith("<|end|> <|assistant|>")
    worded = tokenizer_with("{% for m in messages %}[INST]{{ m['content'] }} [/INST]{% endfor %}")
    assert find_turn(worded, "user").end_text == "[/INST]"
    deaf = tokenizer_with("{{ messages | length }}")
    with pytest.raises(DataError, match="does not repeat a user message"):
        find_turn(deaf, "user")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens is 9"),
        ({"part_size": 0}, "part_size is 0"),
        ({"top_p": 2.0}, "top_p is 2.0"),
    ],
)
def test_impossible_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        SynthSettings(**changes)


def test_impossible_counts(tmp_path):
    with pytest.raises(DataError, match="count is 0"):
        synthesise(tiny_decoder(), tmp_path, SynthSettings(), count=0)


def test_a_base_model_writes_the_openings_of_texts(monkeypatch, tmp_path):
    plain = copy.copy(small_tokenizer())
    plain.chat_template = None
    fox, dog = (plain(text, add_special_tokens=False)["input_ids"] for text in ("the fox", "dog"))
    outputs = [(fox, "length"), ([*dog, END], "eos"), (dog, "length")]

    def generate(self, next_prompt):
        while (prompt := next_prompt()) is not None:
            assert plain.decode(prompt.tokens) == "<|bos|>"
            sequence = Decoded(prompt.tokens, prompt.params, index=prompt.index)
            sequence.output, sequence.finish_reason = outputs[prompt.index % len(outputs)]
            yield sequence

    monkeypatch.setattr(BatchGenerator, "generate", generate)
    decoder = DominoDecoder(make_target("llama"), None, plain)
    settings = SynthSettings(min_tokens=1, max_tokens=8)
    done = synthesise(decoder, tmp_path, settings, count=2, batch_size=1)
    assert texts_in(tmp_path) == ["the fox", "dog"]
    assert dict(done.dropped) == {"with nothing to continue": 1}
