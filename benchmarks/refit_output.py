"""Fits a head's output weight anew on a CPU while everything else of the drafter stays as it is.

With the rest frozen the loss is convex in that weight, and a label needs only its activation and
the logits of a few candidates: both are computed once, then many epochs cost little.

    python -m benchmarks.refit_output DRAFTER OUT --target TARGET --data SHARDS... --labels 2000000
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from domino_spec.checkpoints import load_drafter, save_drafter
from domino_spec.data import PackedBatches, load_corpus
from domino_spec.drafter import DraftModel
from domino_spec.targets import Target, load_target, read
from domino_spec.training import TrainConfig
from domino_spec.training.blocks import plan_blocks, step_noise
from domino_spec.training.evaluate import split_held_out

BASE_CANDIDATES, TEACHER_CANDIDATES, RANDOM_CANDIDATES = 40, 24, 64
GAMMA, ANCHORS, LENGTH, ROWS = 5.0, 192, 1024, 2


@dataclass
class Features:
    """What the output weight sees of each label."""

    activation: Tensor  # [labels, rank]
    tokens: Tensor  # [labels, candidates]: the drafter's best and the target's best
    base: Tensor  # [labels, candidates]
    teacher: Tensor  # [labels, candidates]
    weight: Tensor  # [labels]
    draft: Tensor  # [labels]


@torch.no_grad()
def collect(
    drafter: DraftModel, target: Target, batches: PackedBatches, *, labels: int
) -> Features:
    """Activations and candidates of labels after random anchors."""
    head = drafter.head
    assert head is not None
    parts: list[tuple[Tensor, ...]] = []
    count, step, began = 0, 0, time.perf_counter()
    depth = drafter.config.max_depth
    while count < labels:
        batch = batches.next()
        noise = step_noise(1, step, (batch.tokens.shape[0], batch.tokens.shape[1]))
        step += 1
        blocks = plan_blocks(batch, anchors=ANCHORS, depth=depth, gamma=GAMMA, noise=noise, chunk=1)
        reading = read(
            target, blocks.tokens, capture_layers=drafter.config.target_layer_ids,
            positions=blocks.positions, documents=blocks.documents,
        )  # fmt: skip
        hidden = drafter.block_hidden(
            target,
            captured=reading.captured,
            tokens=blocks.tokens,
            anchors=blocks.anchors,
            positions=blocks.positions,
            documents=blocks.documents,
        ).flatten(0, 2)
        states = drafter.prefix_states(target, blocks.tokens, blocks.anchors).flatten(0, 2)
        # Late drafts weigh little: every second one is enough, counted twice.
        late = blocks.drafts >= depth // 2
        chosen = (blocks.drafts >= head.prefix_len) & (~late | (torch.rand(len(late)) < 0.5))
        slots, sources = blocks.slots[chosen], blocks.sources[chosen]
        kept = hidden[slots]
        activation = head.activation(head.project_hidden(kept), states[slots])
        teacher_at = torch.unique(sources, return_inverse=True)
        teacher = drafter.base_logits(target, reading.hidden.flatten(0, 1)[teacher_at[0]])
        best_teacher = teacher.topk(TEACHER_CANDIDATES, dim=-1).indices[teacher_at[1]]
        base = drafter.base_logits(target, kept)
        tokens = torch.cat((base.topk(BASE_CANDIDATES, dim=-1).indices, best_teacher), dim=1)
        tokens, _ = tokens.sort(dim=1)
        twice = torch.cat((torch.zeros(len(tokens), 1, dtype=torch.bool),
                           tokens[:, 1:] == tokens[:, :-1]), dim=1)  # fmt: skip
        found = base.gather(1, tokens).masked_fill(twice, -1e4)
        wanted = teacher[teacher_at[1]].gather(1, tokens).masked_fill(twice, -1e4)
        weights = blocks.weights[chosen] * (1 + late[chosen].float())
        parts.append(
            (activation.bfloat16(), tokens.int(), found.half(), wanted.half(), weights,
             blocks.drafts[chosen])
        )  # fmt: skip
        count += len(tokens)
        if step % 5 == 0:
            print(
                f"{count} labels, {count / (time.perf_counter() - began):.0f} a second", flush=True
            )
    return Features(*(torch.cat(column) for column in zip(*parts, strict=True)))


def fit(
    features: Features,
    lm_head: Tensor,
    *,
    rank: int,
    epochs: int,
    rate: float,
    rest_share: float,
    batch: int,
) -> Tensor:
    """Adam on the softmax over candidates and a few random tokens, against the target's.

    The weight is the target's lm_head times a small matrix plus a rest: what is true of all
    tokens is learnt from all labels, the rest holds what is a token's own.
    """
    shared = torch.zeros(lm_head.shape[1], rank)
    rest = torch.zeros(lm_head.shape[0], rank)
    shared.grad, rest.grad = torch.zeros_like(shared), torch.zeros_like(rest)
    # The rest has far more numbers than there are labels for: it moves slowly, or it overfits.
    groups = [{"params": [shared], "share": 1.0}, {"params": [rest], "share": rest_share}]
    optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    count = len(features.weight)
    held_out = min(20_000, count // 10)
    steps = epochs * ((count - held_out) // batch)
    step = 0
    for epoch in range(epochs):
        order = torch.randperm(count - held_out) + held_out
        total = 0.0
        for start in range(0, len(order) - batch + 1, batch):
            for group in optimiser.param_groups:
                group["lr"] = group["share"] * rate * (1 - step / steps)
            part = order[start : start + batch]
            rest.grad.zero_()
            total += _gradient(features, part, lm_head @ shared + rest, rest.grad)
            torch.mm(lm_head.T, rest.grad, out=shared.grad)
            optimiser.step()
            step += 1
        loss, accuracy = _check(features, torch.arange(held_out), lm_head @ shared + rest)
        print(
            f"epoch {epoch + 1}: loss {total * batch / len(order):.4f}, held out {loss:.4f}, "
            f"accuracy by draft {[round(a, 3) for a in accuracy[:8]]}",
            flush=True,
        )
    return lm_head @ shared + rest


@torch.no_grad()
def _gradient(features: Features, part: Tensor, weight: Tensor, grad: Tensor) -> float:
    activation = features.activation[part].float()
    tokens = features.tokens[part].long()
    truth = features.teacher[part].float().softmax(-1)
    base = features.base[part].float()
    rows = weight[tokens]  # [n, candidates, rank]
    logits = base + torch.einsum("nkr,nr->nk", rows, activation)
    random = torch.randint(0, weight.shape[0], (RANDOM_CANDIDATES,))
    # What a random token's base logit would be is not kept: it is below all candidates.
    floor = base.masked_fill(base < -1e3, 1e4).amin(-1, keepdim=True)
    others = floor + activation @ weight[random].T
    share = torch.cat((logits, others), dim=1).softmax(-1)
    by = share.clone()
    by[:, : tokens.shape[1]] -= truth
    scale = features.weight[part] / features.weight[part].sum()
    by *= scale.unsqueeze(1)
    update = by[:, : tokens.shape[1]].unsqueeze(-1) * activation.unsqueeze(1)
    grad.index_add_(0, tokens.flatten(), update.flatten(0, 1))
    grad.index_add_(0, random, by[:, tokens.shape[1] :].T @ activation)
    loss = -(truth * logits.log_softmax(-1)).sum(-1)
    return float((loss * scale).sum())


@torch.no_grad()
def _check(features: Features, part: Tensor, weight: Tensor) -> tuple[float, list[float]]:
    losses, hits = [], []
    for piece in part.split(1024):
        tokens = features.tokens[piece].long()
        activation = features.activation[piece].float()
        logits = features.base[piece].float()
        logits = logits + torch.einsum("nkr,nr->nk", weight[tokens], activation)
        teacher = features.teacher[piece].float()
        losses.append(-(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1))
        hits.append(logits.argmax(-1) == teacher.argmax(-1))
    right, drafts = torch.cat(hits).float(), features.draft[part]
    accuracy = [float(right[drafts == j].mean()) for j in range(1, int(drafts.max()) + 1)]
    return float(torch.cat(losses).mean()), accuracy


def main() -> None:
    """Collect, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--labels", type=int, default=2_000_000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--rest-share", type=float, default=0.25, help="of the rate")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--features", type=Path, help="keep what was collected here")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    drafter = load_drafter(arguments.drafter, dtype=torch.bfloat16).drafter
    assert drafter.head is not None
    loaded = load_target(arguments.target, dtype=torch.float32, device="cpu")
    lm_head = loaded.target.lm_head.weight.detach().clone()
    assert isinstance(lm_head, Tensor)
    if arguments.features and arguments.features.is_file():
        features = Features(**torch.load(arguments.features))
    else:
        loaded.target.model.to(torch.bfloat16)
        corpus = load_corpus(
            arguments.data, tokenizer=loaded.tokenizer, vocab_size=loaded.target.vocab_size
        )
        training = split_held_out(corpus, TrainConfig.model_fields["held_out"].default)[0]
        batches = PackedBatches(training, rows=ROWS, length=LENGTH, seed=11, pad_token=0)
        features = collect(drafter, loaded.target, batches, labels=arguments.labels)
        if arguments.features:
            torch.save(vars(features), arguments.features)
    rank = drafter.head.output_weight.shape[1]
    weight = fit(
        features, lm_head, rank=rank, epochs=arguments.epochs, rate=arguments.rate,
        rest_share=arguments.rest_share, batch=arguments.batch,
    )  # fmt: skip
    with torch.no_grad():
        drafter.head.output_weight.copy_(weight)
    print(save_drafter(drafter, arguments.out, dtype=torch.bfloat16))


if __name__ == "__main__":
    main()
