"""The distribution of sampled texts inside vLLM, V2 runner, against enumeration.

vLLM up to 0.28 draws drafts and what replaces them from one stream. From 0.29 on it has a salt for
drafts of its own, which is left out here: the plugin's must do without it.
"""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from domino_spec.checkpoints import export_drafter
from domino_spec.decoding import SamplingParams
from domino_spec.drafter import DominoHeadConfig, DrafterConfig, DraftModel
from domino_spec.targets import load_target
from tests.engines.vllm.pairs import (
    CONSTANT,
    HIDDEN,
    SHARP,
    VOCAB,
    knowing_drafter,
    save_bigram_target,
)
from tests.support.distribution import deviations, enumerated
from tests.support.families import randomise
from tests.support.forks import Forks

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")
pytest.importorskip("triton")
if not importlib.import_module("vllm.platforms").current_platform.is_cpu():
    pytest.skip("vLLM's CPU build only: others run these kernels compiled", allow_module_level=True)

FORKS = Forks("tests.engines.vllm.v2_job")
FORMS = {"dspark": "vllm-dspark", "dflash": "vllm"}
PROMPT = [8, 9]
HOT = {"temperature": 0.8, "top_p": 0.85}
SEQUENCES = 300
"""Of a batch, all with seeds of their own: a minute of the interpreter."""


def deviations_inside(
    folder: Path, *, method: str, samples: int, length: int, **job: Any
) -> tuple[float, float]:
    """How far vLLM's texts are from the target's distribution, and the share of accepted drafts."""
    speculative = {
        "method": method,
        "model": str(folder / method),
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }
    found: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0
    for first in range(0, samples, SEQUENCES):
        result = FORKS.run(
            {
                "target": str(folder / "target"),
                "speculative": speculative,
                "prompts": [PROMPT] * min(samples - first, SEQUENCES),
                "first_seed": first,
                "max_tokens": length,
                "max_num_seqs": SEQUENCES,
                "sampling": HOT,
                **job,
            }
        )
        found.update(tuple(answer[1:]) for answer in result["answers"])
        accepted, drafted = accepted + result["accepted"], drafted + result["drafted"]
    target = load_target(folder / "target").target
    exact = enumerated(target, SamplingParams(**HOT, seed=0), PROMPT, length)
    far = deviations(found, exact)
    print(f"{method} {job}: {far:.1f} deviations, {accepted} of {drafted} drafts accepted")
    return far, accepted / drafted


# A pair made to show what replaces rejected drafts: minutes of the interpreter are few samples ----


@pytest.fixture(scope="module")
def revealing(tmp_path_factory) -> Path:
    """After each of four tokens top-p leaves two, of which the drafter proposes the likelier.

    Nearly half of its drafts are a token that top-p cuts. With the noise that chose such a draft
    the likelier token, which has just lost to it, would replace it too seldom. The first token,
    which has no draft, is certain.
    """
    folder = tmp_path_factory.mktemp("revealing")
    wanted = rolled(torch.tensor([0.06, 0.70, 0.18, 0.06]))
    drafted = rolled(torch.tensor([0.001, 0.57, 0.001, 0.428]))
    scale = HOT["temperature"] * (2 / HIDDEN) ** 0.5  # of an embedding after the last RMSNorm
    weights = torch.zeros(VOCAB, HIDDEN)
    weights[4:, CONSTANT] = -30.0 * scale  # no chance
    weights[1:4, PROMPT[-1]] = -30.0 * scale
    weights[:4, :4] = scale * wanted.log().T
    path = save_bigram_target(folder / "target") / "model.safetensors"
    save_file(load_file(path) | {"lm_head.weight": weights}, path, metadata={"format": "pt"})

    drafter = knowing_drafter(shift_label=False, prefix_len=0, block_size=3)
    table = drafter.state_dict()["head.embed_proj.2.weight"]  # [next token, last token]
    table.zero_()
    table[:4, :4] = HOT["temperature"] / SHARP * drafted.log().T
    return with_exports(folder, drafter)


def rolled(chances: torch.Tensor) -> torch.Tensor:
    """Those after token 0, and for each later one the same, one token further: [last, next]."""
    return torch.stack([chances.roll(token) for token in range(len(chances))])


def with_exports(folder: Path, drafter: DraftModel) -> Path:
    for method, form in FORMS.items():
        export_drafter(drafter, folder / method, to=form, dtype=torch.float32)
    return folder


@pytest.mark.parametrize(
    ("method", "without"),
    [
        ("dspark", ["vllm"]),
        pytest.param("dflash", ["vllm"], marks=pytest.mark.slow),
        pytest.param("dspark", [], marks=pytest.mark.slow),  # salted twice
    ],
)
def test_texts_follow_the_target(revealing, method, without):
    far, accepted = deviations_inside(
        revealing, method=method, samples=SEQUENCES, length=3, without=without
    )
    assert 0.2 < accepted < 0.8
    assert far < 4


@pytest.mark.slow  # what the test above would find, at more than a minute
@pytest.mark.parametrize("method", FORMS)
def test_without_a_salt_they_do_not(revealing, method):
    far, _ = deviations_inside(
        revealing, method=method, samples=SEQUENCES, length=3, without=["vllm", "ours"]
    )
    assert far > 5  # 8 to 9 are expected


# A random pair, whose every layer counts -------------------------------------------------------


@pytest.fixture(scope="module")
def random_pair(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    shape: dict[str, Any] = {
        "vocab_size": 12, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32,
        "max_position_embeddings": 512,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False, **shape,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    randomise(model, 0.16, seed=2).save_pretrained(folder / "target")
    drafter_config = DrafterConfig(
        num_layers=2, num_heads=2, num_kv_heads=2, num_target_layers=2, target_layer_ids=(0, 1),
        mask_token_id=11, block_size=3, shift_label=True,
        head=DominoHeadConfig(gru_hidden_dim=8, emb_dim=8, pure_draft_prefix_len=1), **shape,
    )  # fmt: skip
    drafter = DraftModel(drafter_config).eval()
    return with_exports(folder, randomise(drafter, 0.1, seed=2))


@pytest.mark.slow
@pytest.mark.parametrize("method", FORMS)
def test_texts_of_a_random_pair_follow_the_target(random_pair, method):
    far, accepted = deviations_inside(
        random_pair, method=method, samples=3 * SEQUENCES, length=4, without=["vllm"]
    )
    assert 0.1 < accepted < 0.9
    assert far < 4
