"""Small corpora, batches and runs for the trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from domino_spec.data import Batch, Corpus, load_corpus, write_shard
from domino_spec.targets import LoadedTarget, Target
from domino_spec.training import Observer, Run, TrainConfig, World, prepare
from domino_spec.training.blocks import Blocks, plan_blocks
from tests.support.pair import MASK, SIZE, bigram_target, successor


def batch_of(rows: list[list[tuple[int, int]]], *, length: int, vocab: int, seed: int = 0) -> Batch:
    """Rows of documents given as (prompt length, answer length), random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab - 1, (len(rows), length), generator=generator)
    documents = torch.full((len(rows), length), -1)
    positions = torch.arange(length).repeat(len(rows), 1)
    supervised = torch.zeros(len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        start = 0
        for document, (prompt, answer) in enumerate(row):
            end = start + prompt + answer
            documents[number, start:end] = document
            positions[number, start:] = torch.arange(length - start)
            supervised[number, start + prompt : end] = True
            start = end
        assert start <= length
    return Batch(tokens, documents, positions, supervised, conversations=sum(map(len, rows)))


def blocks_of(batch: Batch, *, anchors: int, depth: int, chunk: int = 8, **options: Any) -> Blocks:
    noise = torch.rand(batch.tokens.shape, generator=torch.Generator().manual_seed(5))
    options = {"gamma": 7.0, "noise": noise, **options}
    return plan_blocks(batch, anchors=anchors, depth=depth, chunk=chunk, **options)


def bigram_corpus(folder: Path, *, count: int = 120, table: torch.Tensor | None = None) -> Corpus:
    """Conversations that the bigram target would write itself."""
    table = (successor() if table is None else table).tolist()
    generator = np.random.default_rng(0)
    prompts, answers = [], []
    for _ in range(count):
        text = [int(generator.integers(0, SIZE - 1))]
        while len(text) < int(generator.integers(20, 50)):
            text.append(table[text[-1]])
        cut = int(generator.integers(1, 5))
        prompts.append(text[:cut])
        answers.append(text[cut:] or [table[text[-1]]] * 4)
    path = folder / "bigrams.npz"
    write_shard(path, prompts=prompts, answers=answers, vocab_size=SIZE)
    return load_corpus([str(path)], tokenizer=None, vocab_size=SIZE)


_NOT_OF = {
    "dflash": ("gru_hidden_dim", "rank"),
    "markov": ("gru_hidden_dim",),
    "medusa": ("gru_hidden_dim", "rank", "mask_token_id"),
    "eagle3": ("gru_hidden_dim", "rank", "mask_token_id", "layers"),
}


def bigram_config(out: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "target": "bigram", "data": ["bigrams.npz"], "out": str(out), "steps": 12, "length": 64,
        "batch_size": 2, "anchors": 8, "block_size": 6, "mask_token_id": MASK, "layers": 1,
        "rank": 8, "gru_hidden_dim": 16, "learning_rate": 3e-3, "log_every": 4, "eval_every": 0,
        "save_every": 4, "held_out": 8, "eval_prompts": 4, "eval_tokens": 20,
    }  # fmt: skip
    variant = changes.get("variant")
    for name in _NOT_OF.get(variant, ()):
        del values[name]
    if variant in ("medusa", "eagle3"):
        values["draft_steps"] = 4
    return TrainConfig.from_dict({**values, **changes})


def loaded_bigrams() -> LoadedTarget:
    return LoadedTarget.of(bigram_target())


ALONE = World()


class Reports:
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.trained: list[tuple[int, dict[str, Any]]] = []
        self.evaluated: list[tuple[int, dict[str, Any]]] = []

    def report(self, step: int, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.trained.append((step, values))
        elif "tokens_per_cycle" in values:
            self.evaluated.append((step, values))

    def close(self) -> None:
        pass


def ready(
    out: Path,
    corpus: Corpus,
    loaded: LoadedTarget,
    *observers: Observer,
    resume: bool = False,
    **changes: Any,
) -> Run:
    """A run on bigrams, prepared."""
    return prepare(
        bigram_config(out, **changes),
        world=ALONE,
        loaded=loaded,
        corpus=corpus,
        observers=observers,
        resume=resume,
    )


def state_of(run: Run) -> dict[str, Any]:
    """All that a run has learnt."""
    return {
        "weights": run.trainer.masters.state_dict(),
        "optimiser": run.trainer.optimiser.state_dict(),
    }


def assert_same(one: Any, two: Any, path: str = "") -> None:
    """Bit for bit."""
    assert type(one) is type(two), path
    if isinstance(one, torch.Tensor):
        assert one.equal(two), path
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), path
        for key in one:
            assert_same(one[key], two[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), path
        for index, pair in enumerate(zip(one, two, strict=True)):
            assert_same(*pair, path=f"{path}[{index}]")
    else:
        assert one == two, path


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return run.trainer.masters.state_dict()


def deep_target(layers=36, hidden=2560, vocab=50):
    """The shape of a real model, without its weights."""
    config = tf.Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=9728, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    )  # fmt: skip
    with torch.device("meta"):
        return Target(tf.AutoModelForCausalLM.from_config(config), name="deep")
