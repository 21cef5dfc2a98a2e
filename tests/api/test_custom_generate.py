"""`model.generate` with Domino inside gives what it gives without, with everything people pass."""

import pytest
import torch
import transformers as tf

from domino_spec import RECIPE, DominoDecoder, DominoGenerate, Provenance, save_drafter
from domino_spec.api import MismatchWarning, UselessDrafterWarning
from domino_spec.errors import InputError
from tests.support.families import make_model, random_drafter, random_prompts
from tests.support.tokens import small_tokenizer


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3")


@pytest.fixture(scope="module")
def domino():
    return DominoGenerate(random_drafter())


def left_padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def both(model, domino, inputs, **options):
    options = {"pad_token_id": 0, "do_sample": False, **options}
    torch.manual_seed(0)
    plain = model.generate(**inputs, **options)
    torch.manual_seed(0)
    return plain, model.generate(**inputs, custom_generate=domino, **options)


@pytest.mark.parametrize("lengths", [(6,), (6, 2, 9)])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 24},
        {"max_length": 30},
        {"max_new_tokens": 24, "repetition_penalty": 1.4},
        {"max_new_tokens": 24, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 24, "min_new_tokens": 9, "eos_token_id": [5, 17, 33, 60]},
        {"max_new_tokens": 24, "bad_words_ids": [[7], [9, 11]]},
        {"generation_config": tf.GenerationConfig(max_new_tokens=11, repetition_penalty=1.2)},
        {"max_new_tokens": 24, "eos_token_id": list(range(5, 14))},
    ],
    ids=lambda o: "+".join(o),
)
def test_equal_to_plain_generate(model, domino, lengths, options):
    plain, found = both(model, domino, left_padded(random_prompts(lengths)), **options)
    assert torch.equal(plain, found)
    assert domino.stats.acceptance.cycles > 0
    assert domino.stats.engine == "fast"


def test_own_processors_and_criteria(model, domino):
    class Even(tf.LogitsProcessor):
        def __call__(self, ids, scores):
            scores = scores.clone()
            scores[:, 1::2] = -torch.inf
            return scores

    class SeenTwice(tf.StoppingCriteria):
        def __call__(self, ids, scores, **_):
            last = ids[:, -1:]
            return (ids[:, :-1] == last).sum(-1) >= 2

    plain, found = both(
        model,
        domino,
        left_padded(random_prompts((5, 8))),
        max_new_tokens=40,
        logits_processor=tf.LogitsProcessorList([Even()]),
        stopping_criteria=tf.StoppingCriteriaList([SeenTwice()]),
        eos_token_id=None,
    )
    # Transformers goes on padding a row after its criterion held only where an eos is set.
    for row in range(2):
        width = found.shape[1]
        kept = found[row] != 0
        assert torch.equal(plain[row, :width][kept], found[row][kept])
    alone_plain, alone = both(
        model,
        domino,
        left_padded(random_prompts((5,))),
        max_new_tokens=40,
        logits_processor=tf.LogitsProcessorList([Even()]),
        stopping_criteria=tf.StoppingCriteriaList([SeenTwice()]),
        eos_token_id=None,
    )
    assert torch.equal(alone_plain, alone)


class Collector(tf.generation.streamers.BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("route", ["callable", "recipe"])
def test_streamers_get_every_token(model, domino, route):
    inputs = left_padded(random_prompts((6,)))
    collector = Collector()
    extra = {"custom_generate": domino}
    if route == "recipe":
        extra = {"custom_generate": RECIPE, "trust_remote_code": True, "draft": domino}
    found = model.generate(
        **inputs, max_new_tokens=15, do_sample=False, pad_token_id=0, streamer=collector, **extra
    )
    assert collector.tokens == found[0].tolist()
    assert collector.ended


def test_text_streamer_prints_the_text(model, domino, capsys):
    tokenizer = small_tokenizer()
    streamer = tf.TextStreamer(tokenizer, skip_prompt=True)
    found = model.generate(
        **left_padded(random_prompts((6,))), max_new_tokens=15, do_sample=False, pad_token_id=0,
        streamer=streamer, custom_generate=domino,
    )  # fmt: skip
    assert capsys.readouterr().out.strip() == tokenizer.decode(found[0, 6:]).strip()


def test_stop_strings_through_the_recipe(model, domino):
    tokenizer = small_tokenizer()
    inputs = left_padded(random_prompts((6,)))
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=30, do_sample=False)[0, 6:])
    options = {
        "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0,
        "stop_strings": [text[8:10]], "tokenizer": tokenizer,
    }  # fmt: skip
    plain = model.generate(**inputs, **options)
    found = model.generate(
        **inputs, **options, custom_generate=RECIPE, trust_remote_code=True, draft=domino
    )
    assert torch.equal(plain, found)
    assert plain.shape[1] < 36
    # The same when the model's own generation config names them.
    model.generation_config.stop_strings = options.pop("stop_strings")
    try:
        found = model.generate(
            **inputs, **options, custom_generate=RECIPE, trust_remote_code=True, draft=domino
        )
        assert torch.equal(plain, found)
        assert model.generation_config.stop_strings == [text[8:10]]
    finally:
        model.generation_config.stop_strings = None


def test_scores_and_logits_of_one_row(model, domino):
    plain, found = both(
        model, domino, left_padded(random_prompts((6,))), max_new_tokens=12,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
        repetition_penalty=1.3,
    )  # fmt: skip
    assert torch.equal(plain.sequences, found.sequences)
    assert len(found.scores) == len(plain.scores)
    torch.testing.assert_close(found.scores, plain.scores, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.logits, plain.logits, atol=1e-4, rtol=1e-4)


def test_sampling_is_seeded_by_torch(model, domino):
    inputs = left_padded(random_prompts((6, 4)))
    options = {"max_new_tokens": 20, "do_sample": True, "top_p": 0.9, "temperature": 0.8}

    def once(seed):
        torch.manual_seed(seed)
        return model.generate(**inputs, custom_generate=domino, pad_token_id=0, **options).tolist()

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_num_return_sequences(model, domino):
    found = model.generate(
        **left_padded(random_prompts((6,))), custom_generate=domino, do_sample=True,
        num_return_sequences=3, max_new_tokens=10, pad_token_id=0,
    )  # fmt: skip
    assert found.shape[0] == 3
    assert len({tuple(row) for row in found.tolist()}) > 1


def test_a_decoder_or_a_folder_can_be_the_draft(model, tmp_path):
    save_drafter(random_drafter(), tmp_path / "draft")
    inputs = left_padded(random_prompts((6,)))
    for draft in (tmp_path / "draft", DominoDecoder(model, random_drafter())):
        plain, found = both(model, DominoGenerate(draft), inputs, max_new_tokens=10)
        assert torch.equal(plain, found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams is 2"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    ],
)
def test_what_cannot_work_is_refused_by_name(model, domino, options, words):
    call = {"max_new_tokens": 4, "pad_token_id": 0, "custom_generate": domino, **options}
    with pytest.raises(InputError, match=words):
        model.generate(**left_padded(random_prompts((6,))), **call)


def test_other_methods_and_positions_are_refused(model, domino):
    inputs = left_padded(random_prompts((6,), seed=1))
    call = {"max_new_tokens": 4, "pad_token_id": 0, "custom_generate": domino}
    shifted = torch.arange(20, 26).unsqueeze(0)
    with pytest.raises(InputError, match="position_ids"):
        model.generate(**inputs, **call, position_ids=shifted)
    usual = torch.arange(6).unsqueeze(0)
    assert model.generate(**inputs, **call, position_ids=usual).shape == (1, 10)
    with pytest.raises(InputError, match="penalty_alpha"):
        model.generate(**inputs, **call, penalty_alpha=0.6, top_k=4)
    # Transformers wants the quantiser installed before it asks us.
    config = tf.GenerationConfig(cache_implementation="quantized")
    with pytest.raises(InputError, match="quantized"):
        domino(model, inputs["input_ids"], tf.LogitsProcessorList(), None, config)


def test_a_streamer_for_a_batch_is_refused(model, domino):
    with pytest.raises(InputError, match="streamer takes one sequence, found 2"):
        model.generate(
            **left_padded(random_prompts((6, 3))), max_new_tokens=4, pad_token_id=0,
            custom_generate=domino, streamer=Collector(),
        )  # fmt: skip


def test_criteria_see_scores_and_keep_their_own_state(model, domino):
    class Counting(tf.StoppingCriteria):
        """Stops a row after its own sixth token, and looks at the scores."""

        def __init__(self):
            self.calls = 0

        def __call__(self, ids, scores, **_):
            self.calls += 1
            assert scores is None or len(scores) == self.calls
            return torch.full((ids.shape[0],), self.calls >= 6)

    for lengths, extra in (((6, 3), {}), ((6,), {"output_scores": True})):
        plain, found = (
            model.generate(
                **left_padded(random_prompts(lengths)), max_new_tokens=30, pad_token_id=0,
                do_sample=False, eos_token_id=None, return_dict_in_generate=True,
                stopping_criteria=tf.StoppingCriteriaList([Counting()]), **extra, **method,
            ).sequences
            for method in ({}, {"custom_generate": domino})
        )  # fmt: skip
        assert torch.equal(plain, found)


def test_guidance_with_a_batch_of_negative_prompts_is_refused(model, domino):
    inputs = left_padded(random_prompts((6, 6)))
    with pytest.raises(InputError, match="UnbatchedClassifierFreeGuidance"):
        model.generate(
            **inputs, max_new_tokens=4, pad_token_id=0, custom_generate=domino,
            guidance_scale=1.5, negative_prompt_ids=inputs["input_ids"].flip(1),
        )  # fmt: skip


def test_guidance_of_one_row(model, domino):
    inputs = left_padded(random_prompts((6,)))
    plain, found = both(
        model, domino, inputs, max_new_tokens=12, guidance_scale=1.5,
        negative_prompt_ids=inputs["input_ids"].flip(1),
    )  # fmt: skip
    assert torch.equal(plain, found)


def test_a_useless_drafter_is_reported_here_too(model, domino):
    with pytest.warns(UselessDrafterWarning, match="alignment"):
        model.generate(
            **left_padded(random_prompts((6,))), max_new_tokens=120, pad_token_id=0,
            do_sample=False, eos_token_id=None, custom_generate=domino,
        )  # fmt: skip


def test_provenance_is_checked_here_too(model, tmp_path):
    save_drafter(random_drafter(), tmp_path / "d", provenance=Provenance(training_length=10**6))
    with pytest.warns(MismatchWarning, match="training length"):
        model.generate(
            **left_padded(random_prompts((6,))), max_new_tokens=2, pad_token_id=0,
            custom_generate=DominoGenerate(tmp_path / "d"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: DominoGenerate(None), "the draft is NoneType"),
        (lambda d: DominoGenerate(d, depth=2), "decoder's own"),
        (lambda d: DominoGenerate(random_drafter(), shift_label=True), "already has it"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(model, make, words):
    decoder = DominoDecoder(model, random_drafter())
    with pytest.raises(InputError, match=words):
        make(decoder)


def test_running_past_the_context_is_transformers_own_affair(model, domino):
    """Plain generate only warns there; rotary positions go on."""
    inputs = left_padded(random_prompts((250,)))
    plain, found = both(model, domino, inputs, max_new_tokens=20, eos_token_id=None)
    assert torch.equal(plain, found)
    assert found.shape == (1, 270)


def test_scores_of_a_batch_are_refused(model, domino):
    with pytest.raises(InputError, match="one sequence at a time"):
        model.generate(
            **left_padded(random_prompts((6, 3))), max_new_tokens=4, pad_token_id=0,
            custom_generate=domino, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip


def test_a_filled_cache_is_refused(model, domino):
    inputs = left_padded(random_prompts((6,)))
    cache = model(**inputs, use_cache=True).past_key_values
    longer = torch.cat((inputs["input_ids"], torch.tensor([[5]])), dim=1)
    with pytest.raises(InputError, match="past_key_values"):
        model.generate(
            longer, past_key_values=cache, max_new_tokens=4, pad_token_id=0, custom_generate=domino
        )


def test_embeddings_as_input_are_refused(model, domino):
    embeds = torch.randn(1, 4, 32)
    with pytest.raises(InputError, match="input_ids"):
        model.generate(
            inputs_embeds=embeds, max_new_tokens=4, pad_token_id=0, custom_generate=domino
        )


def test_another_model_is_refused(model, domino):
    model.generate(
        **left_padded(random_prompts((4,))),
        max_new_tokens=2,
        pad_token_id=0,
        custom_generate=domino,
    )
    other = make_model("qwen3", seed=1)
    with pytest.raises(InputError, match="another model"):
        other.generate(
            **left_padded(random_prompts((4,))),
            max_new_tokens=2,
            pad_token_id=0,
            custom_generate=domino,
        )
