"""Training and decoding are one forward: the same logits, all anchors at once or one a cycle."""

import pytest
import torch

from domino_spec.drafter import DraftContext
from domino_spec.drafter.rollout import rollout
from tests.support.families import VOCAB, drafter_config, make_target, markov_head, random_drafter

CASES = {
    "shift": {"shift": True},
    "no-shift": {"shift": False},
    "shift, no prefix": {"shift": True, "prefix": 0},
    "no-shift, long prefix": {"shift": False, "prefix": 3},
    "dflash": {"shift": False, "head": False},
    "dflash shifted": {"shift": True, "head": False},
    "sliding": {
        "shift": True,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5,
    },
    "sliding causal": {
        "shift": False,
        "layer_types": ("sliding_attention", "sliding_attention"),
        "sliding_window": 4,
        "causal_window": True,
    },
    "reduced vocabulary": {"shift": True, "draft_vocab_size": 41},
    "markov": {"shift": True, "head": markov_head()},
    "markov, no-shift, reduced": {
        "shift": False,
        "head": markov_head(prefix=1),
        "draft_vocab_size": 41,
    },
}


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("case", CASES)
def test_block_parallel_forward_equals_cycle_by_cycle_forward(case, family):
    target = make_target(family)
    config = drafter_config(**CASES[case])
    drafter = random_drafter(config)
    generator = torch.Generator().manual_seed(7)
    rows, length = 3, 40
    # All tokens can be drafted, so that the rollout can be led along the truth.
    tokens = torch.randint(0, config.output_vocab_size, (rows, length), generator=generator)
    taps = target.forward(tokens, target.new_cache(rows), taps=config.target_layer_ids).taps

    # Anchors differ from row to row, so that the cached contexts are ragged.
    anchors = torch.tensor([[3, 9, 10, 21, 31], [1, 2, 17, 25, 30], [5, 6, 7, 8, 29]])
    with torch.no_grad():
        base, final = drafter(target, taps=taps, tokens=tokens, anchors=anchors)

        context = DraftContext(rows)
        seen = [0] * rows
        for step in range(anchors.shape[1]):
            # Feed each row's newly verified states, a different number for each.
            counts = [int(anchors[row, step]) - seen[row] for row in range(rows)]
            fed = torch.zeros(rows, max(counts), taps.shape[-1])
            for row, count in enumerate(counts):
                fed[row, :count] = taps[row, seen[row] : seen[row] + count]
            starts = torch.tensor(seen).unsqueeze(1)
            positions = starts + torch.arange(max(counts))
            context.append(drafter.context(fed, positions), counts)
            seen = [seen[row] + counts[row] for row in range(rows)]

            anchor_tokens = tokens.gather(1, anchors[:, step : step + 1]).squeeze(1)
            hidden = drafter.decode_hidden(target, anchor_tokens, context, config.max_depth)
            decoded_base = drafter.base_logits(target, hidden)
            torch.testing.assert_close(decoded_base, base[:, step], atol=1e-4, rtol=1e-4)

            decoded_final = torch.zeros_like(final[:, step])
            truth = [tokens[row, anchors[row, step] + 1 :] for row in range(rows)]

            def follow_truth(index, logits, ids, out=decoded_final, truth=truth):
                out[:, index] = logits
                return torch.stack([row[index] for row in truth])

            rollout(
                drafter, target, hidden=hidden, anchor_tokens=anchor_tokens, choose=follow_truth
            )
            torch.testing.assert_close(decoded_final, final[:, step], atol=1e-4, rtol=1e-4)
        if config.head is not None:
            assert (base - final).abs().max() > 0.1, "the head does nothing: the test is blind"


def test_packed_documents_do_not_see_each_other():
    target = make_target("llama")
    drafter = random_drafter(drafter_config(shift=True))
    first = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    second = torch.randint(0, VOCAB, (1, 15), generator=torch.Generator().manual_seed(2))
    taps = [target.forward(t, target.new_cache(1), taps=(1, 3, 5)).taps for t in (first, second)]
    with torch.no_grad():
        alone = drafter(target, taps=taps[1], tokens=second, anchors=torch.tensor([[2, 6]]))[1]
        packed = drafter(
            target,
            taps=torch.cat(taps, dim=1),
            tokens=torch.cat((first, second), dim=1),
            anchors=torch.tensor([[14, 18]]),
            positions=torch.cat((torch.arange(12), torch.arange(15))).unsqueeze(0),
            documents=torch.tensor([[0] * 12 + [1] * 15]),
        )[1]
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)
