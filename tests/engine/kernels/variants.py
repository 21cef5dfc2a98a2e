"""Which kernels Triton compiles anew when only the size of a batch or the depth changes.

Cycles run as in production, over a model that has shapes but no memory, and every launch is
answered by the key under which Triton would look for its compiled kernel: types, constants, what it
found out about each number (1, or divisible by 16) and each pointer, warps and stages.

python -m tests.engine.kernels.variants smollm2-135m --compile

prints how many variants each kernel has, what tells them apart and, with `--compile`, the seconds
that compiling them for an sm_90 takes here. This needs a process that does not interpret kernels.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.forked import ask

BATCHES = (1, 2, 4, 8, 16, 32)
DEPTHS = (0, 1, 2, 3, 5, 7, 11, 15)
PLANS: dict[str, dict[str, bool]] = {
    "greedy": {},
    "sampled": {"sampled": True},
    "filtered": {"sampled": True, "filtered": True},
}
_LAYERS = 8
"""Of the target: variants do not depend on how many there are, but the drafter captures five."""
_SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}  # fmt: skip
_SMOLLM2_HEAD = {"emb_dim": 192, "gru_hidden_dim": 512, "pure_draft_prefix_len": 1}

Key = tuple[tuple[str, str], ...]
"""What Triton compiles a kernel for, by argument or option."""
Cycle = tuple[str, int, int]
"""A plan's name, the batch and the depth."""


@dataclass
class Recorded:
    """Variants by kernel: the cycles that launch each, and the seconds its compilation took."""

    cycles: dict[str, dict[Key, list[Cycle]]] = field(default_factory=lambda: defaultdict(dict))
    seconds: dict[tuple[str, Key], float] = field(default_factory=dict)

    def of(self, *, plan: str, batch: int, depth: int) -> set[tuple[str, Key]]:
        """What one cycle launches."""
        cycle = (plan, batch, depth)
        return {
            (kernel, key)
            for kernel, keys in self.cycles.items()
            for key, used in keys.items()
            if cycle in used
        }

    def differing(self, kernel: str) -> dict[str, list[str]]:
        """Arguments that tell a kernel's variants apart, with what they were."""
        found: dict[str, set[str]] = defaultdict(set)
        for key in self.cycles[kernel]:
            for name, value in key:
                found[name].add(value)
        return {name: sorted(values) for name, values in found.items() if len(values) > 1}


def recorded(
    shape: str, *, plans: Sequence[str], depths: Sequence[int], candidates: int | None = None
) -> Recorded:
    """In a process of its own, cycles of all BATCHES."""
    result = Recorded()
    for kernel, key, cycles in ask(__name__, "record_flat", shape, candidates, plans, depths):
        result.cycles[kernel][tuple(map(tuple, key))] = [tuple(cycle) for cycle in cycles]
    return result


@contextmanager
def _recording(found: Recorded, cycle: list[Cycle], *, compiles: bool) -> Iterator[None]:
    """Launches are noted for the last of `cycle`, and nothing runs."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tests.engine.kernels.sm90 import Driver

    driver.set_active(Driver())

    def launch(self: Any, _grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            binder = self.device_caches[0][4]
            _, kinds, options = binder(*args, **kwargs, debug=False, instrumentation_mode="")
            names = (param.name for param in self.params)
            key = tuple(
                (name, " ".join(map(str, kind))) for name, kind in zip(names, kinds, strict=True)
            ) + tuple((name, str(value)) for name, value in options.items())
            where = f"{self.__module__.rsplit('.', 1)[1]}.{self.__name__}"
            if compiles and key not in found.cycles[where]:
                start = time.perf_counter()
                self.run(*args, grid=None, warmup=True, **kwargs)
                found.seconds[where, key] = time.perf_counter() - start
            used = found.cycles[where].setdefault(key, [])
            if cycle[-1] not in used:
                used.append(cycle[-1])

        return run

    JITFunction.__getitem__ = launch
    yield


def _engine(shape: str, candidates: int | None) -> Any:
    """An engine without memory, which takes the kernels' ways."""
    import torch
    import transformers

    from domino_spec.drafter import DominoHeadConfig, DraftModel
    from domino_spec.drafters import BlockDrafter
    from domino_spec.engine import models, shapes
    from domino_spec.engine.cache import PAGE
    from domino_spec.engine.engine import Engine
    from domino_spec.targets import Target

    known = {**shapes.SHAPES, "smollm2-135m": _SMOLLM2}
    values = {**known[shape], "num_hidden_layers": _LAYERS}
    config = transformers.AutoConfig.for_model(
        values.pop("model_type"), **values, eos_token_id=None, bos_token_id=None
    )
    draft_config = shapes.drafter_config(config)
    if shape == "smollm2-135m":
        draft_config = replace(draft_config, head=DominoHeadConfig(**_SMOLLM2_HEAD))
    for name, module in list(sys.modules.items()):
        if name.startswith("domino_spec.engine.kernels.") and hasattr(module, "usable"):
            module.usable = lambda _tensor: True  # type: ignore[attr-defined]
    models.unsupported_reason = lambda _target: None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        drafter = DraftModel(draft_config).to(torch.bfloat16).eval()
    return Engine(
        Target(model.eval(), name=shape), BlockDrafter(drafter, candidates=candidates),
        slots=max(BATCHES), capacity=4096, page=PAGE, graphs=False, pack=False,
    )  # fmt: skip


def record(
    shape: str,
    *,
    candidates: int | None,
    plans: Sequence[str],
    depths: Sequence[int],
    compiles: bool = False,
) -> Recorded:
    """In this process, which launches no kernel afterwards."""
    import torch

    from domino_spec.engine.model_runner import Plan

    engine = _engine(shape, candidates)
    found, cycle = Recorded(), [("", 0, 0)]
    with _recording(found, cycle, compiles=compiles):
        for batch, depth, plan in itertools.product(BATCHES, depths, plans):
            cycle.append((plan, batch, depth))
            slots = torch.empty(batch, dtype=torch.long, device="meta")
            engine.runner.run_cycle(slots, Plan(depth, **PLANS[plan]))
    return found


def record_flat(
    shape: str, candidates: int | None, plans: Sequence[str], depths: Sequence[int]
) -> list[tuple[str, Key, list[Cycle]]]:
    """The same as JSON has it."""
    found = record(shape, candidates=candidates, plans=plans, depths=depths)
    return [(n, k, used) for n, keys in found.cycles.items() for k, used in keys.items()]


def table(found: Recorded) -> str:
    """Kernels with their variants, those of one batch, what tells them apart, and seconds."""
    lines = []
    for kernel, keys in sorted(found.cycles.items()):
        batches = [
            sum(any(b == batch for _, b, _ in used) for used in keys.values()) for batch in BATCHES
        ]
        spent = sum(s for (name, _), s in found.seconds.items() if name == kernel)
        lines.append(f"{kernel:34} {len(keys):4} variants, by batch {batches}, {spent:6.2f} s")
        lines.extend(f"    {n}: {', '.join(v)}" for n, v in found.differing(kernel).items())
    total = sum(map(len, found.cycles.values()))
    lines.append(f"{'all':34} {total:4} variants, {sum(found.seconds.values()):.2f} s")
    for batch in BATCHES if found.seconds else ():
        firsts = defaultdict(float)
        for (name, key), seconds in found.seconds.items():
            _, first, depth = found.cycles[name][key][0]
            if first == batch:
                firsts[depth] += seconds
        text = " ".join(f"{depth}:{firsts[depth]:.2f}" for depth in DEPTHS)
        lines.append(f"first compiled at batch {batch:2}: {sum(firsts.values()):6.2f} s = {text}")
    return "\n".join(lines)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("--candidates", type=int)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS))
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = empty
        found = record(
            options.shape,
            candidates=options.candidates,
            plans=options.plans,
            depths=options.depths,
            compiles=options.compile,
        )
    print(table(found))


if __name__ == "__main__":
    main()
