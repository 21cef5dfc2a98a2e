"""The target's own answers: made once, kept under a key that tells targets and settings apart."""

import dataclasses

import numpy as np
import pytest
import torch

from domino_spec.errors import InputError
from domino_spec.evaluation import Continuations, continue_prompts, fingerprint
from domino_spec.evaluation import continuations as module
from domino_spec.targets import Target
from tests.support.families import make_model, make_target, plain_greedy, random_prompts

LENGTHS = (5, 9, 3, 12)


@pytest.fixture
def target():
    return make_target("llama")


def test_they_are_plain_decoding_in_order_whatever_the_batch(target):
    prompts = random_prompts(LENGTHS)
    expected = tuple(tuple(plain_greedy(target.model, prompt, 9)) for prompt in prompts)
    for batch_size in (1, 3, 8):
        made = continue_prompts(target, prompts, eos=(), max_new_tokens=9, batch_size=batch_size)
        assert made.answers == expected
        assert made.prompts == tuple(map(tuple, prompts))


def test_they_end_with_the_end_of_the_sequence(target):
    prompts = random_prompts(LENGTHS)
    free = continue_prompts(target, prompts, eos=(), max_new_tokens=9)
    end = free.answers[1][4]
    made = continue_prompts(target, prompts, eos={end}, max_new_tokens=9)
    for whole, cut in zip(free.answers, made.answers, strict=True):
        length = whole.index(end) + 1 if end in whole else 9
        assert cut == whole[:length]


def test_drawn_answers_depend_on_the_seed_alone(target):
    prompts = random_prompts(LENGTHS)

    def drawn(seed, batch_size):
        return continue_prompts(
            target, prompts, eos=(), max_new_tokens=9, temperature=1.0, seed=seed,
            batch_size=batch_size,
        ).answers  # fmt: skip

    assert drawn(1, 1) == drawn(1, 4) != drawn(2, 4)


def test_equal_prompts_draw_apart(target):
    drawn = continue_prompts(target, [[5, 6]] * 3, eos=(), max_new_tokens=9, temperature=1.0)
    assert len(set(drawn.answers)) == 3


def test_what_was_saved_comes_back(tmp_path, target):
    made = continue_prompts(target, random_prompts(LENGTHS), eos=(), max_new_tokens=9)
    path = tmp_path / "new" / "some.npz"
    made.save(path)
    assert Continuations.load(path) == made
    assert made.key
    assert made.select([2, 0]).answers == (made.answers[2], made.answers[0])


def test_a_folder_keeps_them(tmp_path, target, monkeypatch):
    prompts = random_prompts(LENGTHS)
    options = {"eos": (2,), "max_new_tokens": 9, "folder": tmp_path, "name": "some"}
    made = continue_prompts(target, prompts, **options)
    (path,) = tmp_path.glob("some-*.npz")

    def refuse(*_, **__):
        raise AssertionError("made again")

    monkeypatch.setattr(module, "decode_prompts", refuse)
    assert continue_prompts(target, prompts, **options) == made
    for change in ({"eos": ()}, {"max_new_tokens": 8}, {"temperature": 1.0}, {"seed": 1}):
        with pytest.raises(AssertionError, match="made again"):
            continue_prompts(target, prompts, **{**options, **change})
    with pytest.raises(AssertionError, match="made again"):
        continue_prompts(target, prompts[:-1], **options)
    dataclasses.replace(made, key="another").save(path)
    with pytest.raises(AssertionError, match="made again"):
        continue_prompts(target, prompts, **options)


def test_a_fingerprint_is_the_weights_not_the_name(target):
    model = make_model("llama")
    assert fingerprint(Target(model, name="elsewhere")) == fingerprint(target)
    assert fingerprint(Target(make_model("llama", seed=1))) != fingerprint(target)
    with torch.no_grad():
        model.model.layers[-1].mlp.up_proj.weight.view(-1)[0] += 1
    assert fingerprint(Target(model)) != fingerprint(target)
    assert fingerprint(Target(make_model("llama").bfloat16())) != fingerprint(target)
    other = make_model("llama")
    other.config.rms_norm_eps = 0.1
    assert fingerprint(Target(other)) != fingerprint(target)


def test_other_files_are_named(tmp_path):
    with pytest.raises(InputError, match="gone.npz does not hold continuations"):
        Continuations.load(tmp_path / "gone.npz")
    np.savez(tmp_path / "shard.npz", tokens=np.arange(3))
    with pytest.raises(InputError, match="expected a file that Continuations.save wrote"):
        Continuations.load(tmp_path / "shard.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(InputError, match="does not hold continuations"):
        Continuations.load(tmp_path / "text.npz")


def test_answers_must_make_sense():
    with pytest.raises(InputError, match="continuation 1 has 1 prompt tokens and 0 answer"):
        Continuations(prompts=((1,), (2,)), answers=((3,), ()), max_new_tokens=4)
    with pytest.raises(InputError, match="at most 1 in the answer"):
        Continuations(prompts=((1,),), answers=((3, 4),), max_new_tokens=1)
