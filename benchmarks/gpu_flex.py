"""FlexAttention compiled on a GPU against the dense mask: outputs and gradients.

python -m benchmarks.gpu_flex
"""

from __future__ import annotations

import torch

from domino_spec.drafter import DominoHeadConfig, DrafterConfig, DraftModel
from domino_spec.records import append_record, environment


def config(**changes: object) -> DrafterConfig:
    """A drafter in SmolLM2's shape, two layers deep."""
    values = {
        "hidden_size": 576, "intermediate_size": 1536, "num_layers": 2, "num_heads": 9,
        "num_kv_heads": 3, "head_dim": 64, "vocab_size": 1000, "num_target_layers": 30,
        "target_layer_ids": (1, 8, 14), "mask_token_id": 16, "block_size": 16, "shift_label": True,
        "head": DominoHeadConfig(gru_hidden_dim=64, emb_dim=32, pure_draft_prefix_len=1),
    }  # fmt: skip
    return DrafterConfig(**{**values, **changes})


def run(
    drafter: DraftModel, *, compiled: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states of many blocks in packed rows, and all gradients of their weighted sum."""
    device = torch.device("cuda")
    drafter = drafter.to(device, dtype)
    generator = torch.Generator().manual_seed(0)
    rows, length, count = 3, 512, 64
    shape = drafter.config
    captured = torch.randn(rows, length, 3 * shape.hidden_size, generator=generator)
    documents = (torch.arange(length) // 200).expand(rows, -1).to(device)
    positions = (torch.arange(length) % 200).expand(rows, -1).to(device)
    anchors = torch.stack(
        [torch.randperm(length, generator=generator)[:count].sort().values for _ in range(rows)]
    ).to(device)
    embeddings = torch.randn(rows, count * shape.block_size, shape.hidden_size, generator=generator)
    weight = torch.randn(embeddings.shape, generator=generator).to(device, dtype)
    drafter.zero_grad()
    layers = list(drafter.backbone.layers)
    if compiled:
        drafter.backbone.attention = "flex"
        for layer in layers:
            layer.__dict__["forward"] = torch.compile(layer.forward, dynamic=False)
    hidden = drafter.backbone(
        embeddings.to(device, dtype),
        anchors=positions.gather(1, anchors),
        context=drafter.context(captured.to(device), positions),
        context_positions=positions,
        anchor_documents=documents.gather(1, anchors),
        context_documents=documents,
    )
    (hidden * weight).sum().backward()
    gradients = [
        p.grad.float().clone() for p in drafter.backbone.parameters() if p.grad is not None
    ]
    drafter.backbone.attention = "dense"
    for layer in layers:
        layer.__dict__.pop("forward", None)
    return hidden.detach().float(), gradients


def main() -> None:
    """Print and record the largest relative differences."""
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("records/flex.jsonl"))
    out = parser.parse_args().out
    for name, changes in {
        "full": {},
        "sliding": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 64},
    }.items():
        drafter = DraftModel.untrained(config(**changes))
        exact, exact_gradients = run(drafter, compiled=False, dtype=torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            dense, dense_gradients = run(drafter, compiled=False, dtype=dtype)
            flex, flex_gradients = run(drafter, compiled=True, dtype=dtype)

            def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
                pairs = zip(found, wanted, strict=True)
                return max(float((f - w).norm() / w.norm()) for f, w in pairs)

            record = {
                "layers": name,
                "dtype": str(dtype).removeprefix("torch."),
                "dense_output_error": worst([dense], [exact]),
                "flex_output_error": worst([flex], [exact]),
                "dense_gradient_error": worst(dense_gradients, exact_gradients),
                "flex_gradient_error": worst(flex_gradients, exact_gradients),
            }
            print(record)
            append_record(out, {**record, "environment": environment()})


if __name__ == "__main__":
    main()
