"""GGUF targets: converted once, kept, and the same as what Transformers makes of the file."""

import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
import transformers as tf

from domino_spec.api.prompts import encode_prompt
from domino_spec.errors import TargetError
from domino_spec.targets import load as conversions
from domino_spec.targets import load_config, load_target, load_tokenizer
from domino_spec.targets.gguf_config import complete_config
from domino_spec.targets.gguf_metadata import gguf_metadata, gguf_shape, gguf_tensors
from domino_spec.targets.support import static_rope_limit
from tests.support import vocabularies
from tests.support.ggufs import LAYERS, write_gguf


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def file(original, tmp_path, monkeypatch):
    """A copy, and a cache of its own."""
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conversions, "_not_kept", set())
    return Path(shutil.copy2(original, tmp_path / "tiny.gguf"))


@pytest.fixture
def conversion_count(monkeypatch):
    """How often the file was parsed for its weights."""
    calls = []
    load = tf.AutoModelForCausalLM.from_pretrained

    def counted(place, **options):
        calls.extend([place] if "gguf_file" in options else [])
        return load(place, **options)

    monkeypatch.setattr(tf.AutoModelForCausalLM, "from_pretrained", counted)
    return lambda: len(calls)


def entries(file: Path) -> list[Path]:
    return sorted((file.parent / "cache" / "gguf").iterdir())


@pytest.mark.parametrize(
    ("device", "asked", "found"),
    [
        ("cpu", None, torch.float32),
        ("cuda", None, torch.bfloat16),
        ("cuda", "auto", torch.bfloat16),
        ("cuda", "float32", torch.float32),
    ],
)
def test_float32_of_a_conversion_is_not_taken_for_the_files_own_type(device, asked, found):
    """A GPU would compute in float32, ten times slower, what was four bits a weight."""
    resolved = conversions._resolved_dtype
    assert resolved(asked, "model.gguf", torch.device(device)) == found
    folder = resolved(asked, "folder", torch.device(device))
    assert folder == ("auto" if device == "cuda" and asked in (None, "auto") else found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_model_as_transformers_reads(file, dtype):
    own = tf.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    with pytest.warns(conversions.ConversionNotice, match=r"tiny\.gguf .* done once"):
        loaded = load_target(file, dtype=dtype)
    model = loaded.target.model
    assert list(model.state_dict()) == list(own.state_dict())
    for name, weight in own.state_dict().items():
        assert weight.dtype == model.state_dict()[name].dtype
        assert torch.equal(weight, model.state_dict()[name]), name
    tokens = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(own(tokens).logits, model(tokens).logits)
    assert model.generation_config.to_dict() == own.generation_config.to_dict()
    assert loaded.source == str(file)
    assert loaded.target.name == str(file)


@pytest.mark.parametrize(
    ("name", "stored", "reason"),
    [
        ("tiny", {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0},
         r"rotary positions .*llama\.rope\.scaling\.type longrope.*expected linear or yarn"),
        ("tiny", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
                  "llama.rope.scaling.yarn_log_multiplier": 0.5},
         r"\(llama\.rope\.scaling\.yarn_log_multiplier 0\.5\); expected linear or yarn"),
        ("tiny", {"llama.rope.scaling.attn_factor": 1.5},
         r"\(llama\.rope\.scaling\.attn_factor 1\.5\); expected linear or yarn"),
        ("tiny", {"llama.attention.sliding_window": 16},
         r"sliding window of 16 tokens .*of llama cannot .*all 128 positions"),
        ("tiny", {"llama.attention.sliding_window": 128}, None),
        ("mistral", {"llama.attention.sliding_window": 16}, 16),
        ("mistral", {}, None),
    ],
)  # fmt: skip
def test_what_a_configuration_cannot_hold_is_refused_by_name(
    tmp_path, monkeypatch, name, stored, reason
):
    """Mistral has a window, whose default in Transformers is that of its first version."""
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf", name=name, metadata=stored)
    if isinstance(reason, str):
        with pytest.raises(TargetError, match=reason):
            load_config(file, weights=False)
    else:
        assert getattr(load_config(file, weights=False), "sliding_window", None) == reason


def test_long_and_short_factors_are_longropes(tmp_path):
    file = write_gguf(
        tmp_path / "phi.gguf",
        metadata={"llama.rope.scaling.original_context_length": 32,
                  "llama.rope.scaling.attn_factor": 1.25},
        factors={"rope_factors_short": [1.0, 2.0], "rope_factors_long": [3.0, 4.0]},
    )  # fmt: skip
    config = tf.Phi3Config(hidden_size=16, num_attention_heads=4, max_position_embeddings=128)
    complete_config(config, file, *gguf_tensors(file))
    config = tf.Phi3Config.from_dict(config.to_dict())
    assert config.rope_parameters == {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
        "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0], "factor": 4.0,
        "attention_factor": 1.25, "original_max_position_embeddings": 32,
    }  # fmt: skip
    assert static_rope_limit(config) == 32


def test_the_same_tokenizer_as_transformers_reads(file):
    own = tf.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    kept = load_tokenizer(file)
    text = "the quick <|end|> brown fox,  falls"
    assert kept.encode(text) == own.encode(text)
    assert kept.get_vocab() == own.get_vocab()
    assert kept.special_tokens_map == own.special_tokens_map
    assert kept.chat_template == own.chat_template


def test_converted_once_for_config_tokenizer_and_weights(file, conversion_count):
    load_config(file)
    load_tokenizer(file)
    load_target(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error", conversions.ConversionNotice)
        load_target(file, dtype="bfloat16")
    assert conversion_count() == 1
    assert len(entries(file)) == 1


@pytest.mark.parametrize("damage", ["truncated", "deleted", "other config", "no manifest"])
def test_a_damaged_entry_is_made_again(file, conversion_count, damage):
    load_config(file)
    (entry,) = entries(file)
    if damage == "truncated":
        os.truncate(entry / "model.safetensors", 100)
    elif damage == "deleted":
        (entry / "model.safetensors").unlink()
    elif damage == "other config":
        (entry / "config.json").write_text("{}")
    else:
        (entry / "conversion.json").unlink()
    assert load_config(file).num_hidden_layers == LAYERS
    assert conversion_count() == 2
    assert entries(file) == [entry]


def test_a_changed_file_gets_a_new_entry(file, conversion_count):
    before = load_target(file).target.lm_head.weight.clone()
    (entry,) = entries(file)
    write_gguf(file, seed=1)
    after = load_target(file).target.lm_head.weight
    assert conversion_count() == 2
    assert not torch.equal(before, after)
    (other,) = entries(file)  # nothing can ask for the old one again
    assert other != entry


def test_two_processes_convert_at_once(file, conversion_count):
    """The one that finishes second takes the other's entry."""
    first = conversions.converted(file, lambda folder: _write(folder, "first"))
    shutil.rmtree(first)

    def convert(folder: Path) -> None:
        _write(folder, "second")
        conversions.converted(file, lambda inner: _write(inner, "meanwhile"))

    entry = conversions.converted(file, convert)
    assert (entry / "config.json").read_text() == "meanwhile"
    assert entries(file) == [entry]


def _write(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)


def test_a_cache_that_cannot_be_written(file, conversion_count, monkeypatch):
    blocked = file.parent / "blocked"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("DOMINO_CACHE", str(blocked))
    with pytest.warns(conversions.ConversionNotice, match="cannot be kept.*DOMINO_CACHE"):
        loaded = load_target(file)
    assert loaded.tokenizer is not None
    assert conversion_count() == 1


def test_a_disk_that_is_full(file, monkeypatch):
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.warns(conversions.ConversionNotice, match="No space left on device"):
        assert conversions.converted(file, full) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error", conversions.ConversionNotice)
        assert conversions.converted(file, full) is None, "tried once a process"
    assert entries(file) == []


def test_missing_weights_are_not_kept_as_random_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    broken = write_gguf(tmp_path / "broken.gguf", leave_out="blk.1.ffn_up")
    with pytest.raises(TargetError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        load_target(broken)
    assert entries(broken) == []


# A BOS before every prompt, if the file says so.

_SILENT = "{% for m in messages %}{{ m.content }}{% endfor %}"  # writes no BOS
_FAMILIES = {"gemma3": vocabularies.gemma3(images=False), "llama3": vocabularies.llama3()}


@pytest.fixture(params=["kept", "not kept"])
def load_vocabulary(request, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    if request.param == "not kept":
        cache.write_text("a file where a folder should be")
    monkeypatch.setenv("DOMINO_CACHE", str(cache))
    monkeypatch.setattr(conversions, "_not_kept", set())

    def load(vocabulary, **changes):
        changed = replace(vocabulary, **changes)
        return load_tokenizer(write_gguf(tmp_path / "bos.gguf", vocabulary=changed))

    return load


def _prompts(tokenizer) -> list[list[int]]:
    """A text and a chat, as every command encodes them."""
    return [encode_prompt(p, tokenizer) for p in ("he", [{"role": "user", "content": "he"}])]


@pytest.mark.parametrize("template", ["its own", _SILENT])
@pytest.mark.parametrize("family", _FAMILIES)
def test_a_file_that_asks_for_a_bos_gets_one(load_vocabulary, family, template):
    vocabulary = _FAMILIES[family]
    own = vocabulary.template if template == "its own" else template
    bos = vocabulary.id(vocabulary.bos)
    for tokens in _prompts(load_vocabulary(vocabulary, template=own, add_bos=True)):
        assert tokens[0] == bos
        assert len(tokens) > 1
        assert tokens.count(bos) == 1


@pytest.mark.parametrize("add_bos", [False, None])
@pytest.mark.parametrize("family", _FAMILIES)
def test_a_file_that_asks_for_no_bos_gets_none(load_vocabulary, family, add_bos):
    vocabulary = _FAMILIES[family]
    tokenizer = load_vocabulary(vocabulary, template=_SILENT, add_bos=add_bos)
    for tokens in _prompts(tokenizer):
        assert tokens
        assert vocabulary.id(vocabulary.bos) not in tokens


def test_a_bos_is_asked_for_but_none_is_named(load_vocabulary):
    tokenizer = load_vocabulary(vocabularies.qwen2_5(padding=8), template=_SILENT, add_bos=True)
    text, chat = _prompts(tokenizer)
    assert text == chat == [vocabularies.qwen2_5().id("he")]


def test_metadata_are_those_of_the_gguf_package(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", vocabulary=vocabularies.gemma3(images=True))
    fields = gguf.GGUFReader(file).fields
    expected = {name: fields[name].contents() for name in fields if not name.startswith("GGUF.")}
    arrays = {name: len(value) for name, value in expected.items() if isinstance(value, list)}
    assert gguf_metadata(file) == expected | arrays
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(TargetError, match=r"cut\.gguf ends inside its metadata"):
        gguf_metadata(cut)


@pytest.mark.parametrize("vocabulary", [None, vocabularies.qwen2_5(), vocabularies.llama3()])
def test_the_shape_of_the_metadata_is_that_of_the_configuration(file, vocabulary):
    write_gguf(file, vocabulary=vocabulary)
    shape, config = gguf_shape(file), load_config(file)
    assert shape == {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
    }
