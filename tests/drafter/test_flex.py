"""FlexAttention and the dense mask are one rule in two forms."""

import pytest
import torch

from domino_spec.drafter.masks import FLEX_BLOCK, BlockLayout, Window, dense_mask, visibility
from tests.support.families import drafter_config, random_drafter


def layout_with_documents() -> BlockLayout:
    documents = torch.tensor([[0] * 5 + [1] * 7 + [-1] * 2, [0] * 14])
    positions = torch.tensor([[*range(5), *range(9)], [*range(14)]])
    anchors = torch.tensor([[1, 4, 6, 11], [0, 5, 6, 13]])
    return BlockLayout(
        anchors=positions.gather(1, anchors),
        block_size=3,
        context_positions=positions,
        anchor_documents=documents.gather(1, anchors),
        context_documents=documents,
    )


@pytest.mark.parametrize(("window", "causal"), [(None, False), (2, False), (4, True)])
def test_the_dense_form_is_the_rule_spelled_out(window, causal):
    layout = layout_with_documents()
    rule = None if window is None else Window(window)
    mask = dense_mask(layout, window=rule, causal=causal)[:, 0]
    context = layout.context_positions.shape[1]
    for row in range(2):
        for query in range(layout.queries):
            block, slot = divmod(query, 3)
            anchor = int(layout.anchors[row, block])
            for key in range(layout.keys):
                if key < context:
                    position = int(layout.context_positions[row, key])
                    seen = position < anchor and bool(
                        layout.context_documents[row, key] == layout.anchor_documents[row, block]
                    )
                    seen = seen and (window is None or anchor + slot - position < window)
                else:
                    other, other_slot = divmod(key - context, 3)
                    seen = other == block
                    if window is not None:
                        seen = seen and abs(slot - other_slot) < window
                        seen = seen and not (causal and other_slot > slot)
                assert bool(mask[row, query, key]) == seen, (row, query, key)


@pytest.mark.parametrize("sliding", [False, True])
def test_flex_attention_gives_the_dense_masks_result(sliding):
    """More slots than one tile, so that whole tiles are skipped."""
    config = drafter_config(
        **(
            {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 6}
            if sliding
            else {}
        )
    )
    drafter = random_drafter(config)
    generator = torch.Generator().manual_seed(1)
    rows, length, count = 2, 150, 40
    captured = torch.randn(
        rows, length, len(config.target_layer_ids) * config.hidden_size, generator=generator
    )
    documents = torch.cat((torch.zeros(rows, 70), torch.ones(rows, 80)), dim=1).long()
    positions = torch.cat((torch.arange(70), torch.arange(80))).expand(rows, -1)
    anchors = torch.stack(
        [torch.randperm(length, generator=generator)[:count].sort().values for _ in range(rows)]
    )
    embeddings = torch.randn(
        rows, count * config.block_size, config.hidden_size, generator=generator
    )
    assert embeddings.shape[1] > FLEX_BLOCK

    def run() -> torch.Tensor:
        with torch.no_grad():
            return drafter.backbone(
                embeddings,
                anchors=positions.gather(1, anchors),
                context=drafter.context(captured, positions),
                context_positions=positions,
                anchor_documents=documents.gather(1, anchors),
                context_documents=documents,
            )

    dense = run()
    drafter.backbone.attention = "flex"
    torch.testing.assert_close(run(), dense, atol=1e-5, rtol=1e-5)


def test_the_rule_is_what_flex_is_given():
    layout = layout_with_documents()
    rule = visibility(layout)
    one = torch.tensor(0)
    assert bool(rule(one, one, one, torch.tensor(0)))  # before the anchor
    assert not bool(rule(one, one, one, torch.tensor(1)))  # the anchor's own state
