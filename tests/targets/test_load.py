"""Every way a target comes in: plain, sharded, off-loaded, adapted, quantised."""

import importlib.util
import json
import platform

import pytest
import safetensors.torch
import torch
import transformers as tf

from domino_spec.api import DominoDecoder
from domino_spec.audit import ReferenceWay, audit_greedy
from domino_spec.checkpoints import save_drafter
from domino_spec.drafters import BlockDrafter
from domino_spec.errors import TargetError
from domino_spec.targets import Target, load_target, probe_target
from domino_spec.targets.place import require_target
from tests.support.drafters import Good
from tests.support.families import (
    CONFIGS,
    LAYERS,
    VOCAB,
    drafter_config,
    make_model,
    plain_greedy,
    random_drafter,
    random_prompts,
    randomise,
)
from tests.support.lazy import LazyModule
from tests.support.runs import run
from tests.support.tokens import small_tokenizer

peft = LazyModule("peft")
NEW = 25


def assert_exact(target, model, *, drafter=None):
    """Scripted and real drafts both give the model's own greedy tokens, in a ragged batch."""
    prompts = random_prompts((5, 9, 2))
    answers = [plain_greedy(model, prompt, NEW) for prompt in prompts]
    proposers = [Good(answers, depth=7, vocab=VOCAB)]
    if drafter is not None:
        proposers.append(BlockDrafter(drafter).with_depth(7))
    for proposer in proposers:
        found, _ = run(target, proposer, prompts, max_new_tokens=NEW)
        assert found == answers
    return answers


@pytest.fixture
def folder(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "plain")
    small_tokenizer().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_plain_folder(folder):
    loaded = load_target(folder)
    assert loaded.tokenizer is not None
    assert loaded.target.dtype == torch.float32
    assert_exact(loaded.target, loaded.target.model, drafter=random_drafter())


def test_sharded_folder(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_target(tmp_path)
    assert_exact(loaded.target, make_model("qwen3"), drafter=random_drafter())


def test_stored_type_is_overridden_on_a_cpu(tmp_path):
    make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_target(tmp_path).target.dtype == torch.float32
    assert load_target(tmp_path, dtype="bfloat16").target.dtype == torch.bfloat16


@pytest.mark.slow
def test_device_map_with_off_loaded_layers(folder, tmp_path):
    """Layers, embedding and lm_head whose weights are elsewhere until they run."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{i}": "cpu" if i % 2 else "disk" for i in range(LAYERS)}
    places["lm_head"] = "disk"
    model = tf.AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=str(tmp_path / "offload"), dtype=torch.float32
    )
    target = Target(model)
    probe_target(target)
    reduced = random_drafter(drafter_config(draft_vocab_size=30))
    for drafter in (random_drafter(), reduced):
        answers = assert_exact(target, model, drafter=drafter)
    assert answers[0] == plain_greedy(make_model("llama"), random_prompts((5,))[0], NEW)


def test_active_lora_adapter_is_part_of_the_target():
    base = make_model("llama")
    (prompt,) = random_prompts((5,))
    without = plain_greedy(base, prompt, NEW)
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "down_proj", "embed_tokens", "lm_head"],
        init_lora_weights=False,
    )  # fmt: skip
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, config).eval()
    target = Target(adapted)
    probe_target(target)
    answers = assert_exact(target, adapted, drafter=random_drafter())
    assert answers[0] != without, "the adapter changes nothing: the test is blind"
    # The drafter's logits go through the adapted lm_head too, for a reduced vocabulary as well.
    hidden, some = torch.randn(2, 32), torch.tensor([4, 9])
    with torch.no_grad():
        torch.testing.assert_close(target.logits(hidden), target.lm_head(hidden))
        torch.testing.assert_close(target.logits(hidden, some), target.logits(hidden)[:, some])


@pytest.fixture
def adapter(folder, tmp_path):
    """A LoRA's folder, which names its base model."""
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )  # fmt: skip
    torch.manual_seed(0)
    peft.get_peft_model(make_model("llama"), config).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({**stated, "base_model_name_or_path": str(folder)}))
    return tmp_path / "adapter"


def test_an_adapters_folder_is_merged_into_its_base_model(adapter, folder):
    tokens = torch.tensor(random_prompts((9,)))
    base = make_model("llama")
    with torch.no_grad():
        without = base(tokens).logits
        wanted = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()(tokens).logits
    loaded = load_target(adapter)
    with torch.no_grad():
        found = loaded.target.model(tokens).logits
    assert found.equal(wanted)
    assert not torch.allclose(found, without), "the adapter changes nothing: the test is blind"
    assert loaded.tokenizer is not None, "the base model's"
    assert DominoDecoder(loaded.target, None).unsupported_reason() is None, "the engine runs it"
    with torch.no_grad():
        assert load_target(adapter, base=str(folder)).target.model(tokens).logits.equal(wanted)
    with pytest.raises(TargetError, match="is no adapter: it has no adapter_config.json"):
        load_target(folder, base=str(folder))


def test_an_adapter_that_cannot_be_merged_is_refused(adapter, folder, monkeypatch):
    path = adapter / "adapter_config.json"
    stated = json.loads(path.read_text())
    for named, words in (
        ("./gone", r"base model of the adapter .* no model at \./gone.*--base"),
        (None, "names no base model; name it with base"),
        (str(adapter), "is an adapter itself"),
    ):
        path.write_text(json.dumps({**stated, "base_model_name_or_path": named}))
        with pytest.raises(TargetError, match=words):
            load_target(adapter)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(TargetError, match=r"needs peft to be merged; pip install .*\[train\]"):
        require_target(adapter, base=str(folder))


def test_prompt_tuning_is_refused_by_name(folder, tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(make_model("llama"), config)
    with pytest.raises(TargetError, match="PROMPT_TUNING.*virtual tokens"):
        Target(model)
    model.save_pretrained(tmp_path / "prompt")
    with pytest.raises(TargetError, match="PROMPT_TUNING.*virtual tokens"):
        load_target(tmp_path / "prompt", base=str(folder))


def test_four_bit_target(tmp_path):
    if platform.machine() == "x86_64":
        assert importlib.util.find_spec("bitsandbytes"), "the dev extra brings it here"
    pytest.importorskip("bitsandbytes")
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        eos_token_id=2,
    )  # fmt: skip
    model = randomise(tf.AutoModelForCausalLM.from_config(config), 0.12)
    model.save_pretrained(tmp_path)
    quantised = tf.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=tf.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
        dtype=torch.float32,
    )
    assert type(quantised.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    target = Target(quantised)
    probe_target(target)
    # The quantiser's kernels round by shape, so tokens may differ, but only where they tie.
    same = 0
    for prompt in random_prompts((5, 9, 2, 14, 7)):
        answer = plain_greedy(quantised, prompt, NEW)
        for proposer in (
            Good([answer], depth=7, vocab=VOCAB),
            BlockDrafter(random_drafter(drafter_config(hidden_size=128))).with_depth(7),
        ):
            way = ReferenceWay(target, proposer)
            audit = audit_greedy(target, way, [prompt], max_new_tokens=NEW, eos=())
            same += not audit.differences
            assert audit.count("tie") == len(audit.differences)
    assert same >= 5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_missing_tokenizer_is_none(tmp_path, family):
    """Also where Transformers would make up an empty one."""
    make_model(family).save_pretrained(tmp_path)
    assert load_target(tmp_path).tokenizer is None


def test_missing_weights_are_an_error_not_random_numbers(folder):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        load_target(folder)


def test_tied_weights_are_not_missing(tmp_path):
    config = CONFIGS["qwen2"]()
    config.tie_word_embeddings = True
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    target = load_target(tmp_path).target
    assert target.lm_head.weight is target.embedding.weight


def test_a_drafter_is_no_target(tmp_path):
    save_drafter(random_drafter(), tmp_path / "draft")
    with pytest.raises(TargetError, match="is a drafter.*--draft"):
        load_target(tmp_path / "draft")


def test_files_that_are_no_models(tmp_path):
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(TargetError, match="is a file, but not a GGUF one"):
        load_target(tmp_path / "note.txt")
    with pytest.raises(TargetError, match="no such folder"):
        load_target("./nowhere/at/all")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"dtype": "float23"}, "dtype is 'float23'"),
        ({"attn_implementation": "telepathy"}, "could not be loaded"),
    ],
)
def test_bad_options_are_named(folder, options, words):
    with pytest.raises(TargetError, match=words):
        load_target(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(folder):
    with pytest.raises(TargetError, match="no CUDA GPU"):
        load_target(folder, device="cuda")


def test_a_broken_tokenizer_is_not_a_missing_one(folder):
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(TargetError, match=r"tokenizer of .*tokenizer\.json.*could not be read"):
        load_target(folder)


def test_an_empty_name():
    with pytest.raises(TargetError, match="name is empty"):
        load_target("")


def test_broken_folder(tmp_path):
    with pytest.raises(TargetError, match="could not be loaded|no model at"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(TargetError, match="could not be loaded"):
        load_target(tmp_path)


def test_hub_ids_come_from_the_local_cache(tmp_path, monkeypatch):
    """The real hub code on a cache as a download leaves it."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--org--tiny"
    snapshot = repo / "snapshots" / revision
    make_model("llama").save_pretrained(snapshot)
    small_tokenizer().save_pretrained(snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    loaded = load_target("org/tiny")
    assert loaded.revision == revision
    assert loaded.tokenizer is not None
