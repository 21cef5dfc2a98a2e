"""Both routes on vLLM's V2 model runner, its Triton kernels interpreted: seconds a test.

Run with the Python of an environment that has vLLM's CPU build; see `v2_on_cpu`.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_spec.checkpoints import export_drafter, save_drafter
from domino_spec.drafter import DominoHeadConfig, DraftModel
from domino_spec.targets import Target, load_target
from tests.engines.vllm.job import CACHE_BYTES
from tests.engines.vllm.pairs import (
    HIDDEN,
    VOCAB,
    knowing_drafter,
    save_bigram_target,
    save_knowing_drafter,
    save_random_drafter,
    table_answer,
)
from tests.engines.vllm.reference import assert_nearly_ours, reference_blocks
from tests.engines.vllm.test_families import HYBRID_DRAFTER, HYBRIDS, OTHER_LAYERS, save_target
from tests.support.forks import Forks

pytest.importorskip("vllm")
pytest.importorskip("triton")
if not importlib.import_module("vllm.platforms").current_platform.is_cpu():
    pytest.skip("vLLM's CPU build only: others run these kernels compiled", allow_module_level=True)

FORKS = Forks("tests.engines.vllm.v2_job")
BLOCK = 8
PROMPTS = [[1, 2, 3], [5] * 9, [7], list(range(10, 30))]
SPECULATORS = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}


def run_v2(
    target: Path,
    drafter: Path,
    *,
    method: str,
    drafts: int,
    prompts: list[list[int]] = PROMPTS,
    max_tokens: int = 33,
    temperature: float = 0.0,
    max_num_seqs: int = 8,
    engine: dict[str, Any] | None = None,
    **speculative: object,
) -> dict[str, Any]:
    """Answer prompts in a process of its own."""
    job = {
        "target": str(target),
        "speculative": {
            "method": method,
            "model": str(drafter),
            "num_speculative_tokens": drafts,
            **speculative,
        },
        "prompts": prompts,
        "max_tokens": max_tokens,
        "sampling": {"temperature": temperature},
        "max_num_seqs": max_num_seqs,
        "engine": engine or {},
    }
    result = FORKS.run(job)
    assert {block["speculator"] for block in result["blocks"]} == {SPECULATORS[method]}
    print(f"{method}: {result['accepted']} of {result['drafted']} drafts accepted")
    return result


def for_dspark(folder: Path, **fields: object) -> Path:
    """Say in config.json what vLLM's DSpark speculator wants to read."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["Qwen3DSparkModel"], **fields}
    path.write_text(json.dumps(config))
    return folder


NO_SHIFT = {"sample_from_anchor": False, "dspark_bonus_anchor": True}


def table_answers(prompts: list[list[int]], count: int) -> list[list[int]]:
    return [table_answer(prompt, count) for prompt in prompts]


def change_lm_head(target: Path, change: Any) -> None:
    """Rewrite the saved target's output weights."""
    path = target / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = change(tensors["lm_head.weight"]).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def bigram(tmp_path: Path) -> Path:
    return save_bigram_target(tmp_path / "target")


# A drafter that knows the target: whatever vLLM throws away, we have put in the wrong place -------


@pytest.mark.parametrize(("shift_label", "prefix_len"), [(True, 1), (False, 0)])
def test_dflash_accepts_every_draft(
    tmp_path: Path, bigram: Path, shift_label: bool, prefix_len: int
) -> None:
    drafter = save_knowing_drafter(
        tmp_path / "draft", shift_label=shift_label, prefix_len=prefix_len
    )
    result = run_v2(bigram, drafter, method="dflash", drafts=BLOCK - 1)
    assert result["answers"] == table_answers(PROMPTS, 33)
    assert result["accepted"] == result["drafted"] == 4 * 4 * 7


@pytest.mark.parametrize(
    ("shift_label", "prefix_len", "drafts"),
    [(True, 1, BLOCK), (False, 0, BLOCK - 1)],
    ids=["shift", "no-shift"],
)
def test_dspark_accepts_every_draft_of_our_export(
    tmp_path: Path, bigram: Path, shift_label: bool, prefix_len: int, drafts: int
) -> None:
    knowing = knowing_drafter(shift_label=shift_label, prefix_len=prefix_len)
    drafter = export_drafter(knowing, tmp_path / "draft", to="vllm-dspark", dtype=torch.float32)
    count = 1 + 4 * (drafts + 1)
    result = run_v2(bigram, drafter, method="dspark", drafts=drafts, max_tokens=count)
    assert result["answers"] == table_answers(PROMPTS, count)
    assert result["accepted"] == result["drafted"] == 4 * 4 * drafts


def test_dspark_refuses_a_layout_that_only_other_versions_read(
    tmp_path: Path, bigram: Path
) -> None:
    drafter = save_knowing_drafter(tmp_path / "draft", shift_label=False, prefix_len=0)
    for_dspark(drafter, dspark_bonus_anchor=True)
    with pytest.raises(AssertionError, match="must say sample_from_anchor False"):
        run_v2(bigram, drafter, method="dspark", drafts=BLOCK - 1)


# Sampled drafts ------------------------------------------------------------------------------


def test_dspark_samples_what_it_knows(tmp_path: Path, bigram: Path) -> None:
    change_lm_head(bigram, lambda weight: 4.0 * weight)  # nothing but the table has a chance
    drafter = save_knowing_drafter(tmp_path / "draft", shift_label=True, prefix_len=1)
    result = run_v2(
        bigram,
        for_dspark(drafter),
        method="dspark",
        drafts=BLOCK,
        max_tokens=28,
        temperature=1.0,
        draft_sample_method="probabilistic",
    )
    assert result["answers"] == table_answers(PROMPTS, 28)
    assert result["accepted"] == result["drafted"] == 4 * 3 * BLOCK


SAMPLES = 200


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_sampled_answers_follow_the_target(tmp_path: Path, bigram: Path, method: str) -> None:
    generator = torch.Generator().manual_seed(5)
    soft = torch.randn(VOCAB, HIDDEN, generator=generator) * 1.5 * HIDDEN**-0.5
    change_lm_head(bigram, lambda _: soft)
    _, drafter = save_random_drafter(tmp_path / "sharp", seed=3)
    assert drafter.head is not None
    with torch.no_grad():  # a flat drafter: half of its drafts are accepted, often of rare tokens
        drafter.backbone.norm.weight.mul_(0.5)
        drafter.head.output_weight.mul_(1 / 16)
    folder = save_drafter(drafter, tmp_path / "draft", dtype=torch.float32)
    if method == "dspark":
        for_dspark(folder)
    result = run_v2(
        bigram,
        folder,
        method=method,
        drafts=2,
        prompts=[[3, 1]] * SAMPLES,
        max_tokens=3,
        temperature=1.0,
        max_num_seqs=SAMPLES,
        draft_sample_method="probabilistic",
    )
    assert 0.1 < result["accepted"] / result["drafted"] < 0.9  # both ways to a token are taken

    answers = torch.tensor(result["answers"])
    after = next_token_probabilities(load_target(bigram).target)
    second = torch.bincount(answers[:, 1], minlength=VOCAB)
    expected = SAMPLES * after[1] @ after
    before, drawn = answers[:, :-1].flatten(), answers[:, 1:].flatten()
    quarter = likelihood_quarters(after)[before]  # [steps, VOCAB]
    steps = torch.bincount(quarter.gather(1, drawn.unsqueeze(1)).squeeze(1), minlength=4)
    expected_steps = (
        torch.zeros(4).double().index_add(0, quarter.flatten(), after[before].flatten())
    )
    chances = chance_of(second, expected), chance_of(steps, expected_steps)
    print(f"chance of the second tokens {chances[0]:.3f}, of all steps {chances[1]:.3f}")
    assert min(chances) > 1e-3
    # The same measure sees a wrong distribution: that of the tokens one step earlier.
    assert chance_of(second, SAMPLES * after[1]) < 1e-6


def next_token_probabilities(target: Target) -> torch.Tensor:
    """Of each token, given each: the layers do nothing, so one token is context enough."""
    tokens = torch.arange(VOCAB).unsqueeze(1)
    logits = target.forward(tokens, target.new_cache(VOCAB)).logits[:, 0]
    return logits.double().softmax(dim=-1)


def likelihood_quarters(after: torch.Tensor) -> torch.Tensor:
    """For each token, which quarter of each row's mass it is in, the likeliest tokens first.

    Few cells for all steps together: a residual that is drawn wrongly favours rare tokens.
    """
    ranked, order = after.sort(descending=True)
    quarters = (4 * ranked.cumsum(dim=-1)).clamp(max=3.999).long()
    return torch.empty_like(order).scatter(1, order, quarters)


def chance_of(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The p-value of a chi-square test; cells that expect fewer than 5 are one."""
    large = expected >= 5
    observed = torch.cat((counts[large], counts[~large].sum().unsqueeze(0))).double()
    wanted = torch.cat((expected[large], expected[~large].sum().unsqueeze(0))).double()
    distance = ((observed - wanted) ** 2 / wanted.clamp(min=1e-9)).sum()
    freedom = torch.tensor(float(len(wanted) - 1), dtype=torch.double)
    return float(torch.special.gammaincc(freedom / 2, distance / 2))


# Random drafters: the drafts must be those of our own decoder, block by block -----------------


@pytest.mark.parametrize(
    ("method", "drafts", "shift_label", "prefix_len", "candidates", "vocabulary"),
    [
        ("dflash", BLOCK - 1, True, 1, None, None),
        ("dflash", BLOCK - 1, False, 2, None, 40),
        ("dspark", BLOCK, True, 1, None, None),
        ("dspark", BLOCK - 1, False, 0, None, 40),
        ("dspark", BLOCK, True, 2, 16, None),
    ],
    ids=["dflash", "dflash-no-shift-reduced", "dspark", "dspark-no-shift-reduced", "dspark-topk"],
)
def test_drafts_are_ours(
    tmp_path: Path,
    method: str,
    drafts: int,
    shift_label: bool,
    prefix_len: int,
    candidates: int | None,
    vocabulary: int | None,
) -> None:
    folder, drafter = save_random_drafter(
        tmp_path / "draft",
        seed=3,
        shift_label=shift_label,
        head=DominoHeadConfig(
            emb_dim=VOCAB, gru_hidden_dim=VOCAB, pure_draft_prefix_len=prefix_len
        ),
        draft_vocab_size=vocabulary,
    )
    if method == "dspark":
        fields = {} if shift_label else NO_SHIFT
        for_dspark(folder, **fields, **({"dspark_draft_topk": candidates} if candidates else {}))
    assert_drafts_are_ours(
        tmp_path, folder, drafter, PROMPTS, method=method, drafts=drafts, candidates=candidates
    )


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 16


@pytest.mark.parametrize(
    ("method", "drafts", "layer_types"),
    [("dflash", BLOCK - 1, (SLIDING, SLIDING)), ("dspark", BLOCK, (FULL, SLIDING))],
    ids=["dflash", "dspark, one layer"],
)
def test_drafts_beyond_a_sliding_window(
    tmp_path: Path, method: str, drafts: int, layer_types: tuple[str, ...]
) -> None:
    """Training gives every layer a window by default; the V1 runner takes no mix of layers."""
    folder, drafter = save_random_drafter(
        tmp_path / "draft",
        seed=3,
        head=DominoHeadConfig(emb_dim=VOCAB, gru_hidden_dim=VOCAB, pure_draft_prefix_len=1),
        layer_types=layer_types,
        sliding_window=WINDOW,
    )
    if method == "dspark":
        for_dspark(folder)
    prompts = [LONG, LONG[:29]]
    assert_drafts_are_ours(tmp_path, folder, drafter, prompts, method=method, drafts=drafts)


LONG = [(7 * place + place // 9) % 60 for place in range(40)]
"""A prompt that no window holds."""


def assert_drafts_are_ours(
    tmp_path: Path,
    folder: Path,
    drafter: DraftModel,
    prompts: list[list[int]],
    *,
    method: str,
    drafts: int,
    candidates: int | None = None,
) -> None:
    saved = save_bigram_target(tmp_path / "target", lively=True)
    result = run_v2(saved, folder, method=method, drafts=drafts, prompts=prompts, max_tokens=6)
    target = load_target(saved).target
    compared = 0
    for prompt, answer in enumerate(result["answers"]):
        tokens = prompts[prompt] + answer
        assert answer == greedy_answer(target, prompts[prompt], len(answer))
        first = len(prompts[prompt])
        ours = reference_blocks(
            target, drafter, tokens, first=first, depth=drafts, candidates=candidates
        )
        for position, block in blocks_of(result, prompt, len(tokens)).items():
            assert block == ours[position - first], (prompt, position)
            compared += 1
    print(f"{compared} blocks of {drafts} drafts are equal to ours")
    assert compared >= 4 * len(prompts)


def blocks_of(result: dict[str, Any], prompt: int, length: int) -> dict[int, list[int]]:
    """By the anchor's position; none past the end, drafted before vLLM saw the end."""
    return {
        block["position"]: [block["anchor"], *block["drafts"]]
        for block in result["blocks"]
        if block["prompt"] == prompt and block["position"] < length
    }


def test_drafts_after_linear_attention(tmp_path: Path) -> None:
    """With a window too, and with prefix caching, as this runner has them by default."""
    saved = tmp_path / "target"
    save_target(HYBRIDS["qwen3_next"](), saved, torch.bfloat16)
    draft, drafter = save_random_drafter(
        tmp_path / "draft", **HYBRID_DRAFTER, layer_types=(SLIDING,) * 2, sliding_window=WINDOW
    )
    result = run_v2(
        saved,
        draft,
        method="dflash",
        drafts=BLOCK - 1,
        prompts=[LONG],
        max_tokens=12,
        engine={"dtype": "bfloat16", "kv_cache_memory_bytes": 128 * CACHE_BYTES},
    )
    tokens = LONG + result["answers"][0]
    blocks = blocks_of(result, 0, len(tokens))
    assert len(blocks) > 9
    assert_nearly_ours(
        blocks,
        target=load_target(saved, device="cpu", dtype=torch.float32).target,
        drafter=drafter,
        tokens=tokens,
        first=len(LONG),
        depth=BLOCK - 1,
        other_layers=OTHER_LAYERS,
    )


def greedy_answer(target: Target, prompt: list[int], count: int) -> list[int]:
    """Plain decoding, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        output = target.forward(torch.tensor([tokens]), target.new_cache(1), keep=[len(tokens) - 1])
        tokens.append(int(output.logits[0, -1].argmax()))
    return tokens[len(prompt) :]
