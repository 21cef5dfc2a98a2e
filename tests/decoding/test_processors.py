"""Processors see what plain decoding would show them: each position once, committed tokens only."""

import pytest
import torch
import transformers as tf
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from domino_spec.decoding import SamplingParams, decode, make_sampler
from domino_spec.decoding.processors import for_sequence, split_warpers
from domino_spec.errors import InputError
from tests.support.drafters import Adversarial, Good, Oracle
from tests.support.families import VOCAB, make_target, random_prompts
from tests.support.runs import make_sequences, run

NEW, DEPTH = 30, 7


class Recorder(tf.LogitsProcessor):
    """Stateful: its bias depends on every call so far, so one call too many changes the output."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        token = (7 * len(self.seen) + int(input_ids[0, -1])) % VOCAB
        scores = scores.clone()
        scores[:, token] += 4.0
        return scores


def plain_with(target, prompt, processors):
    ids = torch.tensor([prompt])
    output = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
        eos_token_id=None, pad_token_id=0, logits_processor=tf.LogitsProcessorList(processors),
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", [Oracle, Good, Adversarial])
@pytest.mark.parametrize("rows", [1, 4])
def test_stateful_processor_sees_each_committed_position_once(kind, rows):
    target = make_target("qwen2")
    prompts = random_prompts((4, 11, 6, 2))[:rows]
    answers = [plain_with(target, prompt, [Recorder()]) for prompt in prompts]
    params = SamplingParams(max_new_tokens=NEW)
    made = make_sequences(prompts, params)
    recorders = []
    for sequence in made:
        sequence.sampler = make_sampler(sequence)
        sequence.sampler.processors = for_sequence([Recorder()], sequence.index, rows)
        recorders.append(sequence.sampler.processors[0])
    for _ in decode(target, kind(answers, depth=DEPTH, vocab=VOCAB), made):
        pass
    assert [sequence.output for sequence in made] == answers
    for recorder, prompt, answer in zip(recorders, prompts, answers, strict=True):
        assert recorder.seen == [prompt + answer[:count] for count in range(NEW)]


@pytest.mark.parametrize(
    "processors",
    [
        [tf.RepetitionPenaltyLogitsProcessor(1.7)],
        [tf.NoRepeatNGramLogitsProcessor(2)],
        [tf.MinNewTokensLengthLogitsProcessor(3, 10, [5, 6, 7])],
        [tf.SequenceBiasLogitsProcessor({(5, 6): 5.0, (9,): -9.0})],
        [PrefixConstrainedLogitsProcessor(lambda _b, ids: [int(ids[-1]) // 2, 9, 40], 1)],
    ],
    ids=lambda chain: type(chain[0]).__name__,
)
def test_any_transformers_processor(processors):
    target = make_target("llama")
    prompts = random_prompts((3, 3))
    answers = [plain_with(target, prompt, processors) for prompt in prompts]
    found, _ = run(
        target,
        Good(answers, depth=DEPTH, vocab=VOCAB),
        prompts,
        max_new_tokens=NEW,
        processors=processors,
    )
    assert found == answers


def test_rows_do_not_share_state():
    recorder = Recorder()
    first, second = (for_sequence([recorder], row, 2)[0] for row in range(2))
    first.seen.append([1])
    assert second.seen == []
    assert recorder.seen == []


def test_models_inside_a_processor_are_shared_not_copied():
    class WithModel(tf.LogitsProcessor):
        def __init__(self, model):
            self.model = model
            self.calls = []

    model = torch.nn.Linear(2, 2)
    copy = for_sequence([WithModel(model)], 1, 2)[0]
    assert copy.model is model


def test_a_model_deep_inside_a_processor_is_shared_too():
    class WithDict(tf.LogitsProcessor):
        def __init__(self, model):
            self.parts = {"models": [model]}

    model = torch.nn.Linear(2, 2)
    assert for_sequence([WithDict(model)], 1, 2)[0].parts["models"][0] is model


def test_prefix_function_is_told_its_row():
    asked = []

    def allowed(batch, ids):
        asked.append(batch)
        return [1]

    for row in range(2):
        own = for_sequence([PrefixConstrainedLogitsProcessor(allowed, 1)], row, 2)
        own(torch.tensor([[5]]), torch.zeros(1, VOCAB))
    assert asked == [0, 1]


HEAT, TOP_K, TOP_P = (
    tf.TemperatureLogitsWarper(0.7),
    tf.TopKLogitsWarper(5),
    tf.TopPLogitsWarper(0.9),
)
OTHER = tf.SuppressTokensLogitsProcessor([5])
KEEPS_TWO = tf.TopPLogitsWarper(0.9, min_tokens_to_keep=2)


@pytest.mark.parametrize(("chain", "rest", "fields"), [
    ([OTHER, HEAT, TOP_K, TOP_P], [OTHER], {"temperature": 0.7, "top_k": 5, "top_p": 0.9}),
    ([HEAT, OTHER, TOP_P], [HEAT, OTHER], {"top_p": 0.9}),
    ([HEAT, TOP_P, TOP_K], [HEAT, TOP_P], {"top_k": 5}),  # another order
    ([TOP_K, TOP_K], [TOP_K], {"top_k": 5}),
    ([HEAT, KEEPS_TWO], [HEAT, KEEPS_TWO], {}),
    ([TOP_P, OTHER], [TOP_P, OTHER], {}),
])  # fmt: skip
def test_cut_offs_at_the_end_are_parameters_and_the_chain_is_the_same(chain, rest, fields):
    assert split_warpers(chain) == (rest, fields)
    params = SamplingParams(processors=rest, **{"temperature": 1.0, **fields})
    torch.manual_seed(0)
    scores = 3 * torch.randn(2, VOCAB)
    wanted = tf.LogitsProcessorList(chain)(None, scores.clone())
    assert torch.equal(params.all_processors(0)(None, scores.clone()), wanted)


def test_processors_tied_to_the_batch_are_refused_by_name():
    tied = tf.generation.logits_process.EncoderRepetitionPenaltyLogitsProcessor(
        1.5, torch.tensor([[1], [2]])
    )
    with pytest.raises(InputError, match="EncoderRepetitionPenaltyLogitsProcessor"):
        for_sequence([tied], 0, 2)
    assert list(for_sequence([tied], 0, 1)) == [tied]
