"""Quantised targets: a GGUF file's own blocks, or rounded ones, and what is refused."""

import copy
import math
import re
import warnings
from collections import Counter

import pytest
import torch
import transformers as tf

from domino_spec.engine import models as engine_models
from domino_spec.errors import TargetError
from domino_spec.quantization import QuantizedWeight, compiled
from domino_spec.quantization.compiled import kernel
from domino_spec.quantization.modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    quantized_weights,
)
from domino_spec.targets import load_target, quantized
from domino_spec.targets.gguf_metadata import gguf_tensors
from domino_spec.targets.load import ConversionNotice
from domino_spec.targets.quantized import KernelNotice, QuantizationNotice, multiplied_kinds
from tests.support import vocabularies
from tests.support.families import CONFIGS, make_model
from tests.support.ggufs import HEADS, HIDDEN, LAYERS, write_gguf
from tests.support.quantized_checkpoints import write_checkpoint
from tests.support.tokens import small_tokenizer

MIXED = {
    "attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_1", "ffn_gate": "Q4_1", "ffn_up": "Q4_1",
    "ffn_down": "Q5_0", "output": "Q4_0",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    kernel()  # compiled once, into the cache that tests share
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("architecture", "leave_out"), [("llama", ""), ("qwen2", "output"), ("qwen3", "")]
)
def test_the_files_blocks_are_what_a_conversion_unpacks(tmp_path, architecture, leave_out):
    """Bit for bit, also where llama.cpp stores the rows of queries and keys in another order."""
    file = write_gguf(
        tmp_path / "tiny.gguf", architecture=architecture, leave_out=leave_out, kinds=MIXED
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConversionNotice)  # nothing is unpacked on the way
        kept = load_target(file, quantize="keep", device="cpu")
    unpacked = load_target(file, device="cpu")
    model, expected = kept.target.model, unpacked.target.model.state_dict()
    blocks = quantized_weights(model)
    found = {f"{name}.weight": weight.dequantize() for name, weight in blocks.items()}
    found |= dict(model.named_parameters())
    if leave_out:
        assert model.lm_head.weight is model.model.embed_tokens.weight
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    kinds = Counter(weight.kind for weight in blocks.values())
    assert kinds["Q4_0"] == LAYERS + (not leave_out)
    assert kinds["Q4_1"] == 3 * LAYERS
    assert kept.tokenizer.get_vocab() == unpacked.tokenizer.get_vocab()
    assert kept.tokenizer.chat_template == unpacked.tokenizer.chat_template
    assert model.generation_config.to_dict() == unpacked.target.model.generation_config.to_dict()


def test_kinds_that_are_not_multiplied_are_rounded_and_named(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", kinds={"attn_v": "F16", "ffn_down": "BF16"})
    said = r"tiny\.gguf has .*\(3 × BF16, 3 × F16\); expected Q4_0, .*Q6_K.* rounded to Q8_0"
    with pytest.warns(QuantizationNotice, match=said):
        kept = load_target(file, quantize="keep", device="cpu").target.model
    expected = load_target(file, device="cpu").target.model.model.layers[1].self_attn.v_proj.weight
    found = kept.model.layers[1].self_attn.v_proj.weight
    assert torch.equal(found.tiles, QuantizedWeight.quantize(expected, "Q8_0").tiles)


def test_files_that_are_multiplied_as_they_are(tmp_path, monkeypatch):
    def found(**options):
        return multiplied_kinds(write_gguf(tmp_path / "tiny.gguf", **options))

    assert found(factors={"rope_freqs": [1.0, 2.0]}, kinds=MIXED) == [
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    ]  # fmt: skip
    assert found(kinds={"attn_v": "F16"}) == []
    assert found(factors={"blk.0.ffn_gate_inp": [1.0]}) == []  # experts, of a Mixtral
    assert found(vocabulary=vocabularies.gemma3(images=False)) == []
    monkeypatch.setenv("DOMINO_KERNELS", "off")
    assert found() == []


@pytest.mark.parametrize(("quantize", "kind"), [("int8", "Q8_0"), ("int4", "Q4_1")])
@pytest.mark.parametrize("tied", [False, True])
def test_any_weights_are_rounded_on_request(tmp_path, quantize, kind, tied):
    config = CONFIGS["qwen2"]()
    config.tie_word_embeddings = tied
    model = tf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    target = load_target(tmp_path / "model", quantize=quantize, device="cpu").target
    assert target.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in target.model.parameters())
    assert type(target.embedding) is QuantizedEmbedding
    assert type(target.lm_head) is QuantizedLinear
    assert (target.lm_head.weight is target.embedding.weight) == tied
    own = model.model.layers[2].mlp.down_proj.weight
    found = target.layers[2].mlp.down_proj.weight
    assert torch.equal(found.tiles, QuantizedWeight.quantize(own.float(), kind).tiles)
    assert torch.equal(
        target.layers[2].self_attn.q_proj.bias, model.model.layers[2].self_attn.q_proj.bias.float()
    )
    vocabulary = QuantizedWeight.quantize(model.lm_head.weight.float(), "Q8_0")
    assert torch.equal(target.lm_head.weight.tiles, vocabulary.tiles)
    kinds = " and ".join(sorted({kind, "Q8_0"}))
    path = kernel().instructions
    assert target.dtype_name == f"float32 ({kinds} weights, multiplied by {path})"


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("llama", {"quantize": "keep"}, "is no GGUF file; expected one.* Use int8 or int4"),
        ("llama", {"quantize": "int8", "dtype": "bfloat16"}, "dtype is bfloat16; expected float32"),
        ("llama", {"quantize": "int8", "device_map": "auto"}, "device_map is .auto.; expected"),
        ("llama", {"quantize": "int8", "attn_implementation": "sdpa"}, "'sdpa'; expected none"),
        ("llama", {"quantize": "int2"}, "'int2'; expected keep, int8, int4 or fp8"),
        ("granite", {"quantize": "int4"}, "is a granite; expected llama, mistral, olmo2, qwen2"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantised_is_refused_by_name(tmp_path, family, options, reason):
    make_model(family).save_pretrained(tmp_path / "model")
    with pytest.raises(TargetError, match=reason):
        load_target(tmp_path / "model", **{"device": "cpu", **options})


@pytest.fixture
def _no_kernel(monkeypatch):
    monkeypatch.setattr(compiled, "_found", lambda: "no C compiler is there")
    kernel.cache_clear()
    yield
    kernel.cache_clear()


@pytest.mark.usefixtures("_no_kernel")
@pytest.mark.parametrize("quantize", ["keep", "int4", "awq"])
def test_without_a_kernel_a_target_is_unpacked_to_float32(tmp_path, quantize):
    """Then it is any float32 target, to the bit that of its blocks' values."""
    source, given = tmp_path / "model", {"device": "cpu", "quantize": quantize}
    if quantize == "keep":
        source = write_gguf(tmp_path / "tiny.gguf", kinds=MIXED, leave_out="output")
    elif quantize == "awq":
        source.mkdir()
        write_checkpoint(source, make_model("qwen2"), "awq")
        given = {"device": "cpu"}
    else:
        make_model("qwen2").save_pretrained(source)
    said = r"unpacked to float32, 0\.00 GB instead of 0\.00.* \(no C compiler is there\)"
    with pytest.warns(KernelNotice, match=said):
        target = load_target(source, **given).target
    assert not quantized_weights(target.model)
    assert re.fullmatch(r"float32 \(Q4_.* Q8_0 weights, unpacked\)", target.dtype_name)
    assert type(target.lm_head) is torch.nn.Linear
    assert target.model.config._attn_implementation == "sdpa"
    tied = target.lm_head.weight is target.embedding.weight
    assert tied == (quantize == "keep")
    assert engine_models.unsupported_reason(target) is None
    if quantize == "keep":
        expected = load_target(source, device="cpu").target.model.state_dict()
    else:
        with pytest.MonkeyPatch.context() as patch:  # what would have been unpacked
            patch.setattr(quantized, "unpack_weights", lambda model: None)
            blocks = load_target(source, **given).target.model
        expected = {n: w.dequantize() for n, w in quantized_weights(blocks).items()}
        expected = {f"{name}.weight": values for name, values in expected.items()}
        expected |= dict(blocks.named_parameters())
    found = target.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in found.items())


@torch.no_grad()
def test_a_tokens_logits_do_not_depend_on_what_shares_its_forward(tmp_path):
    """To the bit, in the reference loop too: a block, single steps and a ragged batch."""
    file = write_gguf(tmp_path / "tiny.gguf")
    target = load_target(file, quantize="keep", device="cpu").target
    assert target.batch_refusal is None
    tokens = torch.arange(3, 23).unsqueeze(0)
    whole = target.forward(tokens, target.new_cache(1)).logits
    one, cache = [], target.new_cache(1)
    for token in tokens[0]:
        one.append(target.forward(token.view(1, 1), cache).logits)
        cache.commit([1])
    assert torch.equal(torch.cat(one, dim=1), whole)
    both = target.new_cache(2)
    target.forward(tokens[:, :10].expand(2, -1), both)
    both.commit([10, 6])
    block = torch.stack((tokens[0, 10:14], tokens[0, 6:10]))
    found = target.forward(block, both).logits
    assert torch.equal(found, torch.stack((whole[0, 10:14], whole[0, 6:10])))


def test_a_file_that_lacks_weights_is_refused(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", leave_out="blk.1.ffn_up")
    with pytest.raises(TargetError, match=r"lacks 1 weights .*layers\.1\.mlp\.up_proj\.weight"):
        load_target(file, quantize="keep", device="cpu")


_BROKEN = {
    "cut off": r"has [\d,]+ bytes and output_norm\.weight lies at bytes .*download it again",
    "of another type": r"blk\.1\.attn_v\.weight in type 99, which .* gguf package does not know",
    "split": r"file 1 of 3 of a split GGUF; .*llama-gguf-split --merge.*-00001-of-00003\.gguf",
}


@pytest.mark.parametrize("quantize", ["keep", None])
@pytest.mark.parametrize("broken", _BROKEN)
def test_a_file_that_cannot_be_read_says_why(tmp_path, broken, quantize):
    split = {"split.no": 0, "split.count": 3} if broken == "split" else None
    file = write_gguf(tmp_path / "tiny.gguf", metadata=split)
    held = bytearray(file.read_bytes())
    if broken == "cut off":
        held = held[: gguf_tensors(file)[1]["output_norm.weight"].start + 8]
    elif broken == "of another type":
        name = b"blk.1.attn_v.weight"
        held[held.index(name) + len(name) + 4 + 2 * 8] = 99  # after the count and two dimensions
    file.write_bytes(held)
    with pytest.raises(TargetError, match=_BROKEN[broken]):
        load_target(file, quantize=quantize, device="cpu")


_ORIGINAL = 80
_LINEAR = {"rope_type": "linear", "factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": _ORIGINAL}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": _ORIGINAL}  # fmt: skip


def _as_llama_cpp_stores(rope):
    """Keys of llama.cpp, and for Llama 3 the factors that its converter computes."""
    if rope["rope_type"] != "llama3":
        stored = {"type": rope["rope_type"], "factor": rope["factor"]}
        if "original_max_position_embeddings" in rope:
            stored["original_context_length"] = rope["original_max_position_embeddings"]
        return {"metadata": {f"llama.rope.scaling.{key}": stored[key] for key in stored}}
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for i in range(HIDDEN // HEADS // 2):
        turns = _ORIGINAL / (2 * math.pi * 10000.0 ** (2 * i * HEADS / HIDDEN))
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    assert factors[0] < factors[1] < factors[2]
    return {"factors": {"rope_freqs": factors}}


@pytest.mark.parametrize("rope", [_LINEAR, _YARN, _LLAMA3], ids=lambda rope: rope["rope_type"])
def test_rope_scaling_of_a_file_is_that_of_a_configuration(tmp_path, rope):
    """Converted and in its own blocks; Transformers leaves it out."""
    file = write_gguf(tmp_path / "tiny.gguf", **_as_llama_cpp_stores(rope))
    kept = load_target(file, quantize="keep", device="cpu").target
    target = load_target(file, device="cpu").target
    config = copy.deepcopy(target.config)
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    expected = tf.AutoModelForCausalLM.from_config(config).eval()
    expected.load_state_dict(target.model.state_dict())
    tokens = torch.arange(3, 60).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(target.model(tokens).logits, expected(tokens).logits)
    assert torch.equal(kept.model.model.rotary_emb.inv_freq, target.model.model.rotary_emb.inv_freq)
    assert engine_models.unsupported_reason(kept) is None
    assert kept.static_rope_limit is None
