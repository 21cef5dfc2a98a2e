"""EAGLE-3: one layer that reads a token and a feature, and goes on with its own features.

At position p it reads the feature of token p, fused from the target's captured hidden states, and
the embedding of token p + 1; it predicts token p + 2. Where the target has not been yet, its own
output at that position takes the feature's place. Training unrolls the same steps (`Eagle3.unroll`)
from many positions at once, over the true tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from domino_spec.drafter.backbone import (
    DraftMLP,
    KeyValue,
    Rotary,
    RotaryPositions,
    initialise_layers,
    rotate,
)
from domino_spec.drafter.config import Eagle3Config
from domino_spec.drafter.model import DraftModule, TargetVocabulary

NextTokens = Callable[[int, Tensor], Tensor]
"""(step, its output states [batch, starts, hidden]) -> tokens to read [batch, starts]."""


class Eagle3Layer(nn.Module):
    """Llama's layer with queries, keys and values from [embedding ; feature], both normed."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.input_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.q_proj = nn.Linear(2 * hidden, heads, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, hidden, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(hidden, config.intermediate_size)

    def join(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """What is projected, [batch, n, 2 * hidden]."""
        return torch.cat((self.input_layernorm(embeddings), self.hidden_norm(features)), dim=-1)

    def keys_values(self, joined: Tensor, rotary: Rotary) -> KeyValue:
        """Keys and values of these positions."""
        keys = rotate(self._heads(self.k_proj(joined)), rotary)
        return keys, self._heads(self.v_proj(joined))

    def forward(
        self,
        joined: Tensor,
        features: Tensor,
        rotary: Rotary,
        context: KeyValue,
        visible: Tensor,  # [batch, starts, context] bool
        chain: Sequence[KeyValue],  # of each step after the context, [batch, kv heads, starts, ..]
    ) -> Tensor:
        query = rotate(self._heads(self.q_proj(joined)), rotary)
        mixed = _attend(query, context, visible, chain)
        states: Tensor = features + self.o_proj(mixed.transpose(1, 2).flatten(2))
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output

    def _heads(self, states: Tensor) -> Tensor:
        # [batch, n, heads * head_dim] -> [batch, heads, n, head_dim]
        return states.view(*states.shape[:-1], -1, self.head_dim).transpose(1, 2)


def _attend(query: Tensor, context: KeyValue, visible: Tensor, chain: Sequence[KeyValue]) -> Tensor:
    """Attention of each start to what it sees of the context and to its own chain alone.

    All starts share the context, so that is one product; a chain is a few keys for each start.
    """
    keys, values = context
    batch, heads, starts, size = query.shape
    grouped = query.view(batch, keys.shape[1], -1, starts, size)  # [batch, kv heads, group, ...]
    scores = torch.einsum("rkgsd,rknd->rkgsn", grouped, keys)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    if chain:
        chain_keys, chain_values = (torch.stack(part, dim=3) for part in zip(*chain, strict=True))
        own = torch.einsum("rkgsd,rksjd->rkgsj", grouped, chain_keys)
        scores = torch.cat((scores, own), dim=-1)
    shares = torch.softmax(scores.float() * size**-0.5, dim=-1).to(values.dtype)
    mixed = torch.einsum("rkgsn,rknd->rkgsd", shares[..., : keys.shape[2]], values)
    if chain:
        later = shares[..., keys.shape[2] :]
        mixed = mixed + torch.einsum("rkgsj,rksjd->rkgsd", later, chain_values)
    return mixed.reshape(batch, heads, starts, size)


class Eagle3(DraftModule):
    """The drafter: fused hidden states in, a chain of hidden states out."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.layer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.rotary = RotaryPositions(config)

    def initialise(self, generator: torch.Generator) -> None:
        """Small normal matrices, norms of one."""
        initialise_layers(self, generator, layers=1)

    @property
    def reads(self) -> dict[str, str]:
        """The fusion of the captured states."""
        return {"fc.weight": "captured"}

    @property
    def output_norm(self) -> Tensor:
        """The final norm's weight."""
        return self.norm.weight

    def compute_buffers(self, device: torch.device) -> None:
        """The rotary frequencies, which the meta device left without values."""
        self.rotary = RotaryPositions(self.config).to(device)

    def features(self, captured: Tensor) -> Tensor:
        """Captured states [batch, n, captured layers * hidden] fused, [batch, n, hidden]."""
        fused: Tensor = self.fc(captured.to(self.device, self.dtype))
        return fused

    def context(
        self,
        target: TargetVocabulary,
        features: Tensor,  # [batch, n, hidden]
        following: Tensor,  # [batch, n]: the token after each feature's own
        positions: Tensor,  # [batch, n]
    ) -> KeyValue:
        """Keys and values of the positions whose features are the target's."""
        joined = self.layer.join(self.embed(target, following), features)
        return self.layer.keys_values(joined, self.rotary(features, positions))

    def unroll(
        self,
        target: TargetVocabulary,
        *,
        features: Tensor,  # [batch, starts, hidden]: the last the target gave, of each chain
        anchor_tokens: Tensor,  # [batch, starts]: the token after it
        positions: Tensor,  # [batch, starts]: of the features
        context: KeyValue,
        visible: Tensor,  # [batch, starts, context] bool: what each chain sees, its start included
        steps: int,
        next_tokens: NextTokens,
    ) -> Tensor:
        """Hidden states of each draft of each chain, [batch, starts, steps, hidden].

        The one forward: training starts chains all over a sequence and reads the true tokens,
        decoding starts one a sequence after the cached context and reads what it drafted. A step
        sees the context up to its chain's start and the steps of its own chain.
        """
        tokens, outputs = anchor_tokens, []
        chain: list[KeyValue] = []
        for step in range(steps):
            joined = self.layer.join(self.embed(target, tokens), features)
            rotary = self.rotary(features, positions + step)
            if step:  # the first step's keys are the context's
                chain.append(self.layer.keys_values(joined, rotary))
            features = self.layer(joined, features, rotary, context, visible, chain)
            hidden = self.norm(features)
            outputs.append(hidden)
            if step + 1 < steps:
                tokens = next_tokens(step, hidden)
        return torch.stack(outputs, dim=2)

    def forward(
        self,
        target: TargetVocabulary,
        *,
        captured: Tensor,  # [batch, n, captured layers * hidden]
        tokens: Tensor,  # [batch, n]
        anchors: Tensor,  # [batch, anchors]: indices into the sequence
        positions: Tensor,  # [batch, n]: restart with each packed document
        documents: Tensor | None = None,  # [batch, n]
        steps: int | None = None,
    ) -> Tensor:
        """Training-time test: chains from every anchor of known sequences, over true tokens.

        [batch, anchors, steps, hidden]; draft j of anchor a guesses tokens[a + 1 + j]. A chain
        starts at the token before its anchor.
        """
        last = tokens.shape[1] - 1
        following = torch.cat((tokens[:, 1:], tokens[:, -1:]), dim=1)
        features = self.features(captured)
        starts = (anchors - 1).clamp(min=0)
        begun = positions.gather(1, starts)
        visible = positions.unsqueeze(1) <= begun.unsqueeze(2)  # [batch, anchors, n]
        if documents is not None:
            own = documents.gather(1, starts).unsqueeze(2)
            visible = visible & (documents.unsqueeze(1) == own)

        def truth(step: int, _hidden: Tensor) -> Tensor:
            # A chain that runs over the end repeats the last token; such drafts have no label.
            return tokens.gather(1, (anchors + 1 + step).clamp(max=last))

        return self.unroll(
            target,
            features=features.gather(1, starts.unsqueeze(2).expand(-1, -1, features.shape[2])),
            anchor_tokens=tokens.gather(1, anchors),
            positions=begun,
            context=self.context(target, features, following, positions),
            visible=visible,
            steps=self.config.unrolled if steps is None else steps,
            next_tokens=truth,
        )
