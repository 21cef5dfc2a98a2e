"""Public AWQ, GPTQ and FP8 checkpoints, rounding for GPUs, and what is refused by name."""

import json

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from domino_spec.errors import TargetError
from domino_spec.quantization import QuantizedWeight, ScaledWeight
from domino_spec.quantization.modules import QuantizedLinear, quantized_weights
from domino_spec.targets import load, load_target
from domino_spec.targets.load import load_config
from domino_spec.targets.quantized import QuantizationNotice, check_quantize
from domino_spec.targets.weight_only import load_quantized, read_scheme, round_model
from tests.support.families import CONFIGS, make_model
from tests.support.quantized_checkpoints import FORMATS, write_checkpoint

CPU = torch.device("cpu")


def load_as_it_is(folder, *, dtype=torch.float32, device=CPU):
    """As on CUDA: numbers and scales of the files, whatever the device."""
    config = load_config(folder)
    scheme = read_scheme(config, str(folder), CPU)
    return load_quantized(
        str(folder), config, scheme, name=str(folder), options={}, device=device, dtype=dtype
    )


@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoints_numbers_are_read_as_they_are(tmp_path, form):
    plain = make_model("qwen2")
    values = write_checkpoint(tmp_path, plain, form, leave=("v_proj", "layers.1.mlp"))
    model = load_as_it_is(tmp_path, dtype=torch.bfloat16)
    found = quantized_weights(model)
    assert found.keys() == values.keys()
    for name, weight in found.items():
        assert type(weight) is ScaledWeight
        torch.testing.assert_close(weight.dequantize(), values[name], rtol=1e-6, atol=1e-9)
    kept = dict(model.named_parameters())
    assert not any(parameter.is_meta for parameter in kept.values())
    for name, parameter in kept.items():
        assert torch.equal(parameter, plain.get_parameter(name).bfloat16()), name
    assert "model.layers.1.mlp.up_proj.weight" in kept
    stored = sum(weight.nbytes for weight in found.values())
    assert stored < sum(2 * weight.shape[0] * weight.shape[1] for weight in found.values())


def test_as_many_scales_as_rows_may_be_of_blocks(tmp_path):
    config = CONFIGS["llama"]()
    config.num_hidden_layers, config.intermediate_size = 1, 32 * 32
    plain = tf.AutoModelForCausalLM.from_config(config)
    values = write_checkpoint(tmp_path, plain, "fp8-block")
    wide = quantized_weights(load_as_it_is(tmp_path))["model.layers.0.mlp.down_proj"]
    assert wide.scales.numel() == wide.shape[0]
    torch.testing.assert_close(wide.dequantize(), values["model.layers.0.mlp.down_proj"])


@pytest.mark.parametrize("form", ["awq", "gptq-8", "fp8-block"])
def test_on_a_cpu_they_run_in_blocks_and_what_is_lost_is_said(tmp_path, form, monkeypatch):
    begun = []
    monkeypatch.setattr(load, "compile_ahead", lambda: begun.append(form))
    values = write_checkpoint(tmp_path, make_model("llama"), form)
    lost = {"awq": "zero point rounded to float16", "gptq-8": "its 8-bit numbers"}
    kind = "Q4_1" if form == "awq" else "Q8_0"
    said = rf"({form.partition('-')[0]}).*{kind}: .*{lost.get(form, '8 bits in blocks of 32')}"
    with pytest.warns(QuantizationNotice, match=said):
        target = load_target(tmp_path, device="cpu").target
    assert begun == [form]
    assert target.dtype == torch.float32
    assert {w.kind for n, w in quantized_weights(target.layers).items()} == {kind}
    assert target.lm_head.weight.kind == "Q8_0"
    step = {"awq": 2e-3, "gptq-8": 1e-6, "fp8-block": 1e-2}[form]
    for name, weight in quantized_weights(target.model).items():
        assert type(weight) is QuantizedWeight
        if name in values:
            apart = (weight.dequantize() - values[name]).abs().max()
            assert apart <= step * values[name].abs().max()


def test_a_tied_lm_head_stays_tied(tmp_path):
    plain = make_model("llama")
    plain.config.tie_word_embeddings = True
    plain.tie_weights()
    write_checkpoint(tmp_path, plain, "fp8-block")
    model = load_as_it_is(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.warns(QuantizationNotice):
        target = load_target(tmp_path, device="cpu").target
    assert target.lm_head.weight is target.embedding.weight


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("awq", {"bits": 3}, "AWQ of 3 bits; expected 4 bits"),
        ("awq", {"version": "gemv"}, "AWQ packed for 'gemv'; expected version gemm"),
        ("gptq", {"bits": 2}, "GPTQ of 2 bits; expected 4 or 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "GPTQ stored as 'marlin'"),
        ("gptq", {"dynamic": {"-:lm_head": {}}}, "settings a module"),
        ("fp8-tensor", {"activation_scheme": "static"}, "static activation scales"),
        ("fp8-block", {"weight_block_size": None}, "found scales of .* weight_block_size"),
        ("fp8-block", {"weight_block_size": [32, 48]}, "blocks of .* multiples of 32"),
        (
            "compressed",
            {"config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": {}}}},
            "2 groups; expected one",
        ),
        (
            "packed",
            {"config_groups": {"a": {"weights": {"num_bits": 2, "type": "int"}}}},
            "2 bits of type int.*expected 4 or 8 whole bits scaled by group or channel",
        ),
        (
            "compressed",
            {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}},
            "4 bits of type float.*expected 8-bit floats",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, form, changes, words):
    write_checkpoint(tmp_path, make_model("llama"), form, **changes)
    with pytest.raises(TargetError, match=words):
        load_target(tmp_path, device="cpu")


def test_families_that_need_no_package_are_named_where_one_is_missing(tmp_path):
    write_checkpoint(tmp_path, make_model("granite"), "awq")
    words = r"is awq of a granite, .* package .*; expected llama, mistral, olmo2, qwen2, qwen3, "
    with pytest.raises(TargetError, match=words):
        load_target(tmp_path, device="cpu")


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        (
            "gptq",
            lambda t: t.update(
                {k: v.flip(0) for k, v in t.items() if k.endswith("down_proj.g_idx")}
            ),
            r"activation order \(desc_act, model.layers.0.mlp.down_proj.g_idx\).*Use a revision",
        ),
        (
            "fp8-tensor",
            lambda t: t.update({"model.layers.0.mlp.up_proj.input_scale": torch.ones(1)}),
            "static activation scales",
        ),
        (
            "fp8-tensor",
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scale"),
            "up_proj .*no weight_scale, expected",
        ),
        ("awq", lambda t: t.pop("model.layers.1.mlp.up_proj.scales"), "lacks 1 weights.*scales"),
        (
            "awq",
            lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(64)}),
            "has a bias in its files; expected none",
        ),
    ],
)
def test_files_that_are_not_what_they_state_are_refused(tmp_path, form, change, words):
    write_checkpoint(tmp_path, make_model("llama"), form)
    rewrite(tmp_path, change)
    with pytest.raises(TargetError, match=words):
        load_target(tmp_path, device="cpu")


def test_quantize_and_a_quantised_checkpoint_exclude_each_other(tmp_path):
    write_checkpoint(tmp_path, make_model("llama"), "awq")
    with pytest.raises(TargetError, match="is quantised already; expected plain weights"):
        load_target(tmp_path, device="cpu", quantize="int8")
    with pytest.raises(TargetError, match="dtype is bfloat16; expected float32"):
        load_target(tmp_path, device="cpu", dtype="bfloat16")


@pytest.mark.parametrize(
    ("quantize", "device", "words"),
    [
        ("fp8", "cpu", "device is cpu; expected a CUDA GPU.*Use int8 or int4"),
        ("keep", "cuda", "device is cuda; expected a CPU, where alone GGUF's"),
        ("int8", "mps", "device is mps; expected one CPU or CUDA GPU"),
    ],
)
def test_what_runs_nowhere_near_is_refused_by_name(quantize, device, words):
    with pytest.raises(TargetError, match=words):
        check_quantize(
            quantize, "model", device=torch.device(device), dtype=None, device_map=None,
            attn_implementation=None, is_gguf=False, is_adapter=False,
        )  # fmt: skip


@pytest.mark.parametrize(("kind", "apart"), [("int8", 0.005), ("int4", 0.08), ("fp8", 0.04)])
def test_any_layers_are_rounded_for_a_gpu(kind, apart):
    """To nearest; embedding and lm_head keep their type and values."""
    plain = make_model("qwen2").bfloat16()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    model = round_model(plain, kind, "tiny", CPU)
    found = quantized_weights(model)
    assert len(found) == 7 * 3
    for name, weight in found.items():
        assert weight.kind == kind
        own = before[f"{name}.weight"].float()
        assert (weight.dequantize() - own).abs().max() <= apart * own.abs().max()
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight, before["model.embed_tokens.weight"])
    attention = model.model.layers[1].self_attn
    assert type(attention.q_proj) is QuantizedLinear
    assert torch.equal(attention.q_proj.bias, before["model.layers.1.self_attn.q_proj.bias"])
    assert json.dumps(model.config.to_dict())
