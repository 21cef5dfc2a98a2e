"""Transformers' linear layers and embedding over quantised weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_spec.quantization.compiled import kernel
from domino_spec.quantization.scaled import ScaledWeight
from domino_spec.quantization.weight import QuantizedWeight


class QuantizedLinear(nn.Module):
    """`nn.Linear` whose weight stays in few bits."""

    def __init__(
        self, weight: QuantizedWeight | ScaledWeight, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.rounds = True
        """Whether products round what they read; else they are in float32, slow, to compare."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., columns] -> [..., rows]."""
        if not self.rounds:
            return F.linear(x, self.weight.dequantize(), self.bias)
        return self.weight.linear(x, self.bias)

    def extra_repr(self) -> str:
        """As `nn.Linear` does, with the kind of blocks."""
        return f"{self.in_features}, {self.out_features}, kind={self.weight.kind}"


class QuantizedEmbedding(nn.Module):
    """`nn.Embedding` whose rows are dequantised as they are looked up."""

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.weight = weight
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids of any shape -> [..., columns] in float32."""
        return self.weight.dequantize(tokens)

    def extra_repr(self) -> str:
        """As `nn.Embedding` does, with the kind of blocks."""
        return f"{self.num_embeddings}, {self.embedding_dim}, kind={self.weight.kind}"


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight | ScaledWeight]:
    """The quantised weights of a model by their modules' names, a tied one once."""
    found: dict[int, tuple[str, QuantizedWeight | ScaledWeight]] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            found.setdefault(id(module.weight), (name, module.weight))
    return dict(found.values())


def unpack_weights(model: Any) -> None:
    """PyTorch's own modules instead, over float32 values of the weights; tied ones stay tied."""
    model.unpacked_weights = f"{weights_in_words(model)}, unpacked"
    unpacked: dict[int, nn.Parameter] = {}
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if not isinstance(module, QuantizedLinear | QuantizedEmbedding):
                continue
            rows, columns = module.weight.shape
            plain: nn.Module
            with torch.device("meta"):
                if isinstance(module, QuantizedLinear):
                    plain = nn.Linear(columns, rows, bias=False)
                    plain.register_parameter("bias", module.bias)
                else:
                    plain = nn.Embedding(rows, columns)
            if id(module.weight) not in unpacked:
                values = nn.Parameter(module.weight.dequantize(), requires_grad=False)
                unpacked[id(module.weight)] = values
            plain.register_parameter("weight", unpacked[id(module.weight)])
            setattr(parent, name, plain)


def weights_in_words(model: nn.Module) -> str | None:
    """Such as "Q4_1 and Q8_0 weights, multiplied by AVX2"; None where nothing is quantised."""
    weights = quantized_weights(model).values()
    if not weights:
        return getattr(model, "unpacked_weights", None)
    kinds = " and ".join(sorted({weight.kind for weight in weights}))
    in_blocks = any(isinstance(weight, QuantizedWeight) for weight in weights)
    compiled = kernel() if in_blocks else None
    how = "" if compiled is None else f", multiplied by {compiled.instructions}"
    return f"{kinds} weights{how}"
