"""Weight-only targets decode on the engine as in the reference loop, for every format.

On a CPU in float32, where both loops multiply the very values that numbers and scales stand for.
Once with the kernels, in Triton's interpreter: tests/engine/kernels/test_weight_only.py.
"""

import pytest
import torch

from domino_spec.engine.engine import Engine
from domino_spec.engine.kernels.packing import Parts
from domino_spec.engine.models import load_model
from domino_spec.engine.weights import nbytes
from domino_spec.quantization import ScaledWeight
from domino_spec.quantization.modules import QuantizedLinear, quantized_weights
from domino_spec.targets import Target, probe_target
from domino_spec.targets.weight_only import round_model
from tests.engine.runs import make_engine, own, run_engine, run_reference
from tests.support.families import drafter_config, make_model, random_drafter, random_prompts
from tests.support.quantized_checkpoints import write_checkpoint
from tests.targets.test_weight_only import load_as_it_is

NEW = 8
PROMPTS = random_prompts([9, 1])
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "accept": "coupled"}
FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
FORMS = ("awq", "gptq", "gptq-8", "fp8-block", "compressed")  # each other is held as one of these
ROUNDED = {"int8": "granite", "int4": "olmo2", "fp8": "mistral"}


def target_of(model) -> Target:
    target = Target(model, name="tiny")
    probe_target(target)
    return target


def made(form, folder) -> Target:
    """A checkpoint of some family in this form, or a model rounded when loaded."""
    if form in ROUNDED:
        return target_of(round_model(make_model(ROUNDED[form]), form, "tiny", torch.device("cpu")))
    family = FAMILIES[FORMS.index(form)]
    leave = ("q_proj",) if form == "gptq" else ()  # a joined product of a plain and two others
    write_checkpoint(folder, make_model(family), form, leave=leave)
    return target_of(load_as_it_is(folder))


@pytest.mark.parametrize("form", [*FORMS, *ROUNDED])
def test_the_engine_says_what_the_reference_loop_says(tmp_path, form):
    target = made(form, tmp_path / "model")
    drafter = random_drafter(drafter_config())
    plain, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW)
    assert run_reference(target, drafter, PROMPTS, max_new_tokens=NEW)[0] == plain
    engine = make_engine(target, drafter)
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW)[0] == plain
    sampled, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW, **SAMPLED)
    assert run_engine(engine, PROMPTS, max_new_tokens=NEW, **SAMPLED)[0] == sampled
    mixed = isinstance(engine.target.layers[0].qkv, Parts)
    assert mixed == (form == "gptq")


def test_what_is_read_together_lies_together_and_once():
    """A step's floor is of the bytes as they are stored; a second engine joins nothing anew."""
    target = target_of(round_model(make_model("qwen3"), "int4", "tiny", torch.device("cpu")))
    before = sum(weight.nbytes for weight in quantized_weights(target.model).values())
    first = load_model(target, slots=2, capacity=32)
    joined = [(layer.qkv, layer.gate_up) for layer in first.layers]
    assert all(isinstance(weight, ScaledWeight) for pair in joined for weight in pair)
    norms = [value for layer in first.layers for value in vars(layer).values()
             if isinstance(value, torch.Tensor)]  # fmt: skip
    assert first.nbytes == before + nbytes(norms) + nbytes([first.lm_head])
    held = {w.values.untyped_storage().data_ptr() for w in quantized_weights(target.model).values()}
    read = [w for layer in first.layers for w in vars(layer).values() if type(w) is ScaledWeight]
    assert {weight.values.untyped_storage().data_ptr() for weight in read} == held
    again = load_model(target, slots=2, capacity=32)
    for layer, (qkv, gate_up) in zip(again.layers, joined, strict=True):
        assert layer.qkv is qkv
        assert layer.gate_up is gate_up


def test_the_lm_head_may_be_quantised_too_and_drafters_read_it(tmp_path):
    """Also rows of it, for a reduced vocabulary."""
    target = target_of(make_model("llama"))
    weight = ScaledWeight.quantize(target.lm_head.weight, "int8")
    target.model.lm_head = QuantizedLinear(weight)
    target = target_of(target.model)
    tokens = torch.arange(0, target.vocab_size, 2)
    drafter = random_drafter(drafter_config(draft_vocab_size=len(tokens)))
    drafter.draft_tokens.copy_(tokens)
    plain, counts, _ = run_reference(target, drafter, PROMPTS, max_new_tokens=NEW)
    engine = make_engine(target, drafter)
    found, own_counts, _ = run_engine(engine, PROMPTS, max_new_tokens=NEW)
    assert found == plain
    assert own_counts.committed == counts.committed


def test_attention_need_not_be_of_each_token_alone():
    """That is for products that round what they read."""
    target = target_of(round_model(make_model("llama"), "fp8", "tiny", torch.device("cpu")))
    engine = Engine(own(target), None, capacity=32)
    assert not engine.target.shape.batch_invariant
