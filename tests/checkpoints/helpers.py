"""Builders of tiny checkpoints, whole and broken, and of full-sized ones without data."""

from __future__ import annotations

import copy
import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from domino_spec.checkpoints import save_drafter
from domino_spec.drafter import DominoHeadConfig, DrafterConfig, DraftModel
from domino_spec.drafter.rollout import rollout

HIDDEN, VOCAB, BLOCK = 16, 48, 4
MASK = 47
HEAD = DominoHeadConfig(gru_hidden_dim=12, emb_dim=6, pure_draft_prefix_len=1)


def tiny_config(**changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "max_position_embeddings": 64,
        "vocab_size": VOCAB,
        "num_target_layers": 8,
        "target_layer_ids": (1, 4, 6),
        "mask_token_id": MASK,
        "block_size": BLOCK,
        "shift_label": True,
        "head": HEAD,
    }
    return DrafterConfig(**{**values, **changes})


def tiny_drafter(
    *, seed: int = 0, draft_tokens: Tensor | None = None, **changes: Any
) -> DraftModel:
    """Every parameter random, norms included, so that a mixed-up tensor shows in the outputs."""
    if draft_tokens is not None:
        changes["draft_vocab_size"] = len(draft_tokens)
    drafter = DraftModel(tiny_config(**changes), draft_tokens)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return drafter.eval()


def with_parameters_as(drafter: DraftModel, dtype: torch.dtype) -> DraftModel:
    """Cast the weights alone: the rotary frequencies stay exact, as they do on loading."""
    for parameter in drafter.parameters():
        parameter.data = parameter.data.to(dtype)
    return drafter


class TinyTarget:
    """A target's embedding and lm_head."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.table = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.out = torch.randn(VOCAB, HIDDEN, generator=generator)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def logits(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        out = self.out if tokens is None else self.out[tokens]
        return hidden @ out.to(hidden.dtype).T


@torch.no_grad()
def outputs(drafter: DraftModel) -> tuple[Tensor, Tensor, Tensor]:
    """Base logits, final logits and drafts on a fixed input: all of the drafter's paths."""
    target, length = TinyTarget(), 9
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (2, length), generator=generator)
    captured = torch.randn(
        2, length, len(drafter.config.target_layer_ids) * HIDDEN, generator=generator
    )
    anchors = torch.tensor([[3, 6], [4, 5]])
    base, final = drafter(target, captured=captured, tokens=tokens, anchors=anchors)
    hidden = torch.randn(2, 3, HIDDEN, generator=generator).to(drafter.dtype)
    drafts = rollout(drafter, target, hidden=hidden, anchor_tokens=tokens[:, 0])
    return base, final, drafts


def assert_same_drafter(found: DraftModel, expected: DraftModel) -> None:
    """Equal tensors and equal outputs, bit for bit."""
    found_state, expected_state = found.state_dict(), expected.state_dict()
    assert set(found_state) == set(expected_state)
    for name, tensor in expected_state.items():
        assert found_state[name].dtype == tensor.dtype, name
        assert torch.equal(found_state[name], tensor), name
    for ours, theirs in zip(outputs(found), outputs(expected), strict=True):
        assert torch.equal(ours, theirs)


# A checkpoint as plain values, to be bent and written -----------------------------------------


class Raw:
    """A config and tensors as they lie in files."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config = config
        self.tensors = tensors

    @property
    def section(self) -> dict[str, Any]:
        section: dict[str, Any] = self.config["dflash_config"]
        return section

    def rename(self, old: str, new: str) -> Raw:
        """Replace a prefix of tensor names."""
        self.tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in self.tensors.items()
        }
        return self

    def write(self, folder: Path, *, file: str = "model.safetensors") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / file, metadata={"format": "pt"})
        return folder

    def write_shards(self, folder: Path, *parts: dict[str, Tensor], index: bool = True) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        weight_map: dict[str, str] = {}
        for number, part in enumerate(parts, start=1):
            file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        if index:
            write_index(folder, weight_map)
        return folder

    def halves(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        names = sorted(self.tensors)
        middle = len(names) // 2
        return (
            {name: self.tensors[name] for name in names[:middle]},
            {name: self.tensors[name] for name in names[middle:]},
        )


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def raw_public(drafter: DraftModel, folder: Path) -> Raw:
    """What `save_drafter` writes, without our own block."""
    save_drafter(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["domino_spec"]
    return Raw(config, load_file(folder / "model.safetensors"))


def raw_speculators(drafter: DraftModel, folder: Path) -> Raw:
    """The same drafter as the speculators project lays it out."""
    public = raw_public(drafter, folder)
    config, head = drafter.config, drafter.config.head
    layer_config = copy.deepcopy(public.config)
    for name in ("architectures", "block_size", "num_target_layers", "dflash_config"):
        del layer_config[name]
    layer_config.pop("draft_vocab_size", None)
    values: dict[str, Any] = {
        "architectures": ["DominoSpeculator" if head else "DFlashSpeculator"],
        "speculators_model_type": "domino" if head else "dflash",
        "speculators_config": {
            "algorithm": "domino",
            "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer_config,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.output_vocab_size,
        "sample_from_anchor": config.shift_label,
        "sliding_window_non_causal": not config.causal_window,
    }
    if head:
        values |= {
            "gru_hidden_dim": head.gru_hidden_dim,
            "logits_correction_emb_dim": head.emb_dim,
            "pure_draft_prefix_len": head.pure_draft_prefix_len,
        }
    raw = Raw(values, public.tensors)
    for module in ("prefix_gru.", "embed_proj."):
        raw.rename(module, f"logits_correction.{module}")
    raw.tensors |= {
        "embed_tokens.weight": torch.zeros(config.vocab_size, config.hidden_size),
        "lm_head.weight": torch.zeros(config.output_vocab_size, config.hidden_size),
        "verifier_lm_head.weight": torch.zeros(config.vocab_size, config.hidden_size),
        "verifier_norm.weight": torch.zeros(config.hidden_size),
        "t2d": torch.zeros(config.vocab_size, dtype=torch.bool),
    }
    return raw


# Real shapes, no data -------------------------------------------------------------------------


def qwen3_8b_config(*, head: bool) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        vocab_size=151936,
        num_target_layers=36,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151669,
        block_size=16,
        shift_label=head,
        head=DominoHeadConfig(gru_hidden_dim=1024, emb_dim=256, pure_draft_prefix_len=1)
        if head
        else None,
    )


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A bf16 safetensors file whose data is a hole: gigabytes long, kilobytes on disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
