"""Deliberate faults: each is put into a copy of the tree, and the tests named for it must fail.

python -m benchmarks.mutations --out records/mutations.jsonl

A fault is one changed line of one package, as it might be written by mistake. One that its
tests miss says that a test is missing. The tests are run without any fault first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from domino_spec.records import append_record, environment

ROOT = Path(__file__).parents[1]
_FAILED = 1
"""pytest's exit status where tests failed; others say that they could not run at all."""

_HANGS = 300
"""Seconds after which tests are taken to hang: a slot that is never freed is waited for."""


@dataclass(frozen=True)
class Mutation:
    """One fault: `old`, which stands once in the package, becomes `new`."""

    name: str
    package: str
    old: str
    new: str
    tests: str

    def file(self, root: Path) -> Path:
        """Where it is put."""
        folder = root / "src" / "domino_spec"
        found = [
            path
            for path in (*(folder / self.package).rglob("*.py"), folder / f"{self.package}.py")
            if path.is_file() and self.old in path.read_text(encoding="utf-8")
        ]
        if len(found) != 1 or found[0].read_text(encoding="utf-8").count(self.old) != 1:
            raise SystemExit(
                f"{self.name}: {self.old!r} stands in {[p.name for p in found]} of {self.package}; "
                "expected one place. Write the fault anew for the code as it is."
            )
        return found[0]


MUTATIONS = (
    # decoding
    Mutation(
        "the reference loop keeps one position too few of a verified block",
        "decoding",
        "kept = [each.accepted + 1 for each in outputs]",
        "kept = [max(1, each.accepted) for each in outputs]",
        "tests/golden",
    ),
    Mutation(
        "a block goes on after a token that stops the sequence",
        "decoding",
        "if sequence.finish_reason or child is None:",
        "if child is None:",
        "tests/decoding",
    ),
    Mutation(
        "noise is of the seed alone, not of the position",
        "decoding",
        "for number in (seeds, positions):",
        "for number in (seeds, seeds):",
        "tests/golden",
    ),
    Mutation(
        "a rejected draft is drawn again from the target and not from the residual",
        "decoding",
        "left = (p - q).clamp(min=0)\n",
        "left = p\n",
        "tests/decoding/test_sampling.py",
    ),
    Mutation(
        "block verification forgets what the drafts before are worth",
        "engine",
        "scale = torch.where(by_block.unsqueeze(1) & ~last, joint, 1.0)",
        "scale = torch.ones_like(joint)",
        "tests/engine/test_accept.py",
    ),
    Mutation(
        "drafts that are rejected and resampled share the target's noise",
        "engine",
        "self.rules >= REJECTION, salted(self.seeds, starts, DRAFTS), self.seeds",
        "self.rules < 0, salted(self.seeds, starts, DRAFTS), self.seeds",
        "tests/engine/test_accept.py",
    ),
    Mutation(
        "one draft too many is counted as accepted",
        "decoding",
        "self.accepted[position] += position < accepted",
        "self.accepted[position] += position <= accepted",
        "tests/decoding",
    ),
    Mutation(
        "a sequence gets one token more than it may",
        "decoding",
        "LENGTH if sequence.remaining <= 0 else None",
        "LENGTH if sequence.remaining < 0 else None",
        "tests/decoding",
    ),
    Mutation(
        "the end-of-sequence token is looked for in the first token alone",
        "decoding",
        "EOS if sequence.output[-1] in ends else None",
        "EOS if sequence.output[0] in ends else None",
        "tests/decoding",
    ),
    # targets
    Mutation(
        "rejected positions of a shorter sequence are not rolled back",
        "targets",
        "for offset in range(count if length != start else 0)",
        "for offset in range(0)",
        "tests/targets tests/decoding",
    ),
    Mutation(
        "capped logits are not scaled back",
        "targets",
        "torch.tanh(logits / self.logit_softcap) * self.logit_softcap",
        "torch.tanh(logits / self.logit_softcap)",
        "tests/targets",
    ),
    Mutation(
        "rows of the lm_head are kept although its weights were written",
        "targets",
        " or self._reduced[1] != state:",
        ":",
        "tests/targets",
    ),
    # drafter
    Mutation(
        "a block sees the context at its own anchor",
        "drafter",
        "before = (key < context) & (position < anchor)",
        "before = (key < context) & (position <= anchor)",
        "tests/drafter",
    ),
    Mutation(
        "a window is one position too wide",
        "drafter",
        "near = distance.abs() < self.size",
        "near = distance.abs() <= self.size",
        "tests/drafter",
    ),
    Mutation(
        "the head corrects one draft too late",
        "drafter",
        "            if index >= head.prefix_len:\n                logits =",
        "            if index > head.prefix_len:\n                logits =",
        "tests/drafter",
    ),
    Mutation(
        "the head reads the anchor again and again",
        "drafter",
        "state = head.step(token, state, embed)",
        "state = head.step(anchor_tokens.to(hidden.device), state, embed)",
        "tests/drafter",
    ),
    # engine
    Mutation(
        "drafts after the first rejected one are accepted",
        "engine",
        "(chosen[:, :-1] == block[:, 1:]).cumprod(dim=1).sum(dim=1)",
        "(chosen[:, :-1] == block[:, 1:]).sum(dim=1)",
        "tests/engine/test_engine.py",
    ),
    Mutation(
        "drafts do not wait for what plain steps deferred",
        "engine",
        "self.update_draft_cache()\n        sampler = ",
        "sampler = ",
        "tests/engine/test_deferred_updates.py",
    ),
    Mutation(
        "a slot is not freed when its sequence leaves",
        "engine",
        "self.free.append(slot)\n        self._prompts.pop(slot, None)",
        "self._prompts.pop(slot, None)",
        "tests/engine/test_engine.py tests/engine/test_scheduler.py",
    ),
    Mutation(
        "the whole prompt is taken from the cache, its last token included",
        "engine",
        "most = max(0, len(prompt) // _ID - 1)",
        "most = len(prompt) // _ID",
        "tests/engine/test_reuse.py",
    ),
    Mutation(
        "prompts that fill up a prefill shape are written into a sequence's slot",
        "engine",
        "slots = [*(part.slot for part in parts), *[spare] * more, *odd]",
        "slots = [*(part.slot for part in parts), *[0] * more, *odd]",
        "tests/engine/test_prefill.py",
    ),
    Mutation(
        "what is remembered of a slot includes the token that is not in it",
        "decoding",
        "return self.prompt[: self.computed] + self.output[:-1]",
        "return self.prompt[: self.computed] + self.output",
        "tests/engine/test_reuse.py",
    ),
    Mutation(
        "prompt chunks of a step are not limited together",
        "engine",
        "left -= chunk.count",
        "left -= 0",
        "tests/engine/test_scheduler.py tests/engine/test_prefill.py",
    ),
    Mutation(
        "a repeated token is counted twice",
        "engine",
        "counts.scatter_add_(1, block[:, place : place + 1], once)",
        "counts.scatter_add_(1, block[:, place : place + 1], 2 * once)",
        "tests/engine/test_penalties.py",
    ),
    Mutation(
        "rejected drafts count as repeated",
        "engine",
        "kept = (places <= accepted.unsqueeze(1)).to(self.counts.dtype)",
        "kept = (places <= accepted.unsqueeze(1) + 1).to(self.counts.dtype)",
        "tests/engine/test_penalties.py",
    ),
    Mutation(
        "a grammar goes on from drafts that were only looked at",
        "grammars",
        "self._state.rollback(walked)",
        "pass",
        "tests/engine/test_constrained.py",
    ),
    Mutation(
        "a grammar's mask is that of the position before",
        "grammars",
        "self.fill(masks[place + 1])",
        "masks[place + 1] = masks[place]",
        "tests/engine/test_constrained.py",
    ),
    Mutation(
        "drafts are accepted beyond the last mask",
        "engine",
        "reach = None if masks.reach is None else self.slots.send(masks.reach)",
        "reach = None",
        "tests/engine/test_constrained.py",
    ),
    Mutation(
        "drafts are accepted beyond what a sequence verified",
        "engine",
        "reach = reach if lengths is None else lengths.verified",
        "reach = reach",
        "tests/engine/test_verify_lengths.py",
    ),
    Mutation(
        "so are those of sequences that share a cycle with drawn drafts",
        "engine",
        "agree = agree if lengths is None else agree.minimum(lengths)",
        "agree = agree",
        "tests/engine/test_verify_lengths.py",
    ),
    Mutation(
        "all drafts count as verified where lengths differ",
        "engine",
        "deep, ranks = row[places + 1] if budget else launch.plan.depth, None",
        "deep, ranks = launch.plan.depth, None",
        "tests/engine/test_verify_lengths.py",
    ),
    # kernels
    Mutation(
        "the commit kernel believes the place that has no draft",
        "engine",
        "refused = (tokens != drafts) | (place >= end)",
        "refused = (tokens != drafts) | (place > end)",
        "tests/engine/kernels/test_commit.py",
    ),
    Mutation(
        "the attention kernel's window is one key too wide",
        "engine",
        "tl.abs(position[:, None] - spot[None, :]) < window",
        "tl.abs(position[:, None] - spot[None, :]) <= window",
        "tests/engine/kernels/test_attention.py",
    ),
    Mutation(
        "the attention kernel joins splits without their weights",
        "engine",
        "mix = tl.sum(part * weight[:, :, None], axis=0)",
        "mix = tl.sum(part, axis=0)",
        "tests/engine/kernels/test_attention.py",
    ),
    Mutation(
        "the kernel that chooses reads past the vocabulary",
        "engine",
        "inside = column < vocabulary\n        where = logits",
        "inside = column <= vocabulary\n        where = logits",
        "tests/engine/kernels/test_choose.py",
    ),
    # api
    Mutation(
        "a stream drops what its text still holds at the end",
        "api",
        "piece += text.finish()",
        "text.finish()",
        "tests/api/test_decoder.py",
    ),
    Mutation(
        "an engine is kept although weights were written",
        "api",
        "if self._engine is None or state != self._weights:",
        "if self._engine is None:",
        "tests/api/test_decoder_engine.py",
    ),
    # training
    Mutation(
        "labels are shifted by one",
        "training",
        "index = places.unsqueeze(-1) + 1 + draft",
        "index = places.unsqueeze(-1) + draft",
        "tests/training/test_blocks.py",
    ),
    Mutation(
        "the first draft is weighed as the second",
        "training",
        "weights = torch.exp(-drafts / gamma)",
        "weights = torch.exp(-(drafts + 1) / gamma)",
        "tests/training/test_blocks.py",
    ),
    Mutation(
        "the base logits' loss keeps its full weight",
        "training",
        "loss = lam * loss_base + (1 - lam) * loss_final",
        "loss = loss_base + (1 - lam) * loss_final",
        "tests/training/test_loss.py",
    ),
    Mutation(
        "a resumed run forgets the optimiser's state",
        "training",
        "trainer.optimiser.load_state_dict(state.optimiser)",
        "trainer.optimiser.load_state_dict(trainer.optimiser.state_dict())",
        "tests/training/test_resume.py",
    ),
    Mutation(
        "anchors do not depend on the seed",
        "training",
        "mixed = (seed * 1_000_003 + step) * 1_009",
        "mixed = step * 1_009",
        "tests/training/test_blocks.py",
    ),
    Mutation(
        "the warm-up begins at nothing",
        "training",
        "return self.learning_rate * (step + 1) / warmup",
        "return self.learning_rate * step / warmup",
        "tests/training/test_schedule.py",
    ),
    Mutation(
        "gradients of scaled weights are not scaled",
        "training",
        "if scale is None else parameter.grad / scale",
        "if scale is None else parameter.grad.float()",
        "tests/training/test_masters.py",
    ),
    Mutation(
        "a channel that was silent gets enormous steps",
        "training",
        "return torch.maximum(size, floor).flatten()",
        "return size.flatten()",
        "tests/training/test_parts.py",
    ),
    Mutation(
        "a fresh drafter is certain of the mask",
        "training",
        ".abs().max() > 1:",
        ".abs().max() > 1e9:",
        "tests/training/test_parts.py",
    ),
    Mutation(
        "a captured step reads weights that have moved",
        "training",
        "self.learn.release()",
        "pass",
        "tests/training/test_learning.py",
    ),
    Mutation(
        "a captured step keeps labels of the step before",
        "training",
        "mine[count:].zero_()",
        "pass",
        "tests/training/test_learning.py",
    ),
    Mutation(
        "a captured step keeps the first step's rows of the lm_head",
        "training",
        "self.target.forget_lm_head_rows()  # to gather them is part of the graph",
        "pass",
        "tests/training/test_learning.py",
    ),
    Mutation(
        "labels outside the softmax count",
        "training",
        "counts &= torch.isin(labels, vocabulary.tokens)",
        "pass",
        "tests/training/test_vocabulary.py",
    ),
    Mutation(
        "a GGUF file's conversion decides its type on a GPU",
        "targets",
        'torch.bfloat16 if is_gguf(source) else "auto"',
        'torch.bfloat16 if not is_gguf(source) else "auto"',
        "tests/targets/test_gguf.py",
    ),
    Mutation(
        "a hook goes on after a rejected draft",
        "engine",
        "and drafts[index][place : place + 1] == [tokens[index]]",
        "and bool(drafts[index][place : place + 1])",
        "tests/engine/test_hooks.py",
    ),
    # data
    Mutation(
        "positions go on from one packed conversation to the next",
        "data",
        "positions[number, first:] = counting[: self.length - first]",
        "positions[number, :] = counting",
        "tests/data/test_packing.py",
    ),
    Mutation(
        "prompts are learnt with the answers",
        "data",
        "spans.append((len(opening), len(turn)))",
        "spans.append((0, len(turn)))",
        "tests/data",
    ),
    Mutation(
        "every process trains on the same rows",
        "data",
        "rows[self.rank * self.rows : (self.rank + 1) * self.rows]",
        "rows[: self.rows]",
        "tests/data/test_packing.py",
    ),
    # checkpoints
    Mutation(
        "captured layers are written in another order",
        "checkpoints",
        '"target_layer_ids": list(config.target_layer_ids),',
        '"target_layer_ids": list(config.target_layer_ids)[::-1],',
        "tests/checkpoints",
    ),
    Mutation(
        "a drafter for vLLM keeps the name that vLLM serves without its head",
        "checkpoints",
        'config["architectures"] = [DOMINO_ARCHITECTURE]',
        "pass",
        "tests/checkpoints/test_exports.py",
    ),
    Mutation(
        "rows of six bits lose their last bytes",
        "checkpoints",
        "6: 3 * -(-columns // 4)",
        "6: 3 * (columns // 4)",
        "tests/checkpoints",
    ),
    # evaluation
    Mutation(
        "drafts are compared with the token before",
        "evaluation",
        "truth = answers.unfold(1, depth, 1)[:, index + 1]",
        "truth = answers.unfold(1, depth, 1)[:, index]",
        "tests/evaluation/test_simulate.py",
    ),
    Mutation(
        "drafts after a sequence's end count as offered",
        "evaluation",
        "offered = accepted if ended else min(width, room)",
        "offered = min(width, room)",
        "tests/evaluation/test_simulate.py",
    ),
    # bench
    Mutation(
        "speedups are the wrong way round",
        "bench",
        "_speeds(unit, name, base, prefill=prefill)",
        "_speeds(unit, base, name, prefill=prefill)",
        "tests/bench",
    ),
    Mutation(
        "answers that differ are counted as the same",
        "bench",
        'same=sum(row["differs_at"] is None for row in compared)',
        "same=len(compared)",
        "tests/bench",
    ),
    # audit
    Mutation(
        "a bug passes for a near-tie",
        "audit",
        'if gap < 2 * spread:\n            return difference("tie"',
        'if gap < 2e9 * spread:\n            return difference("tie"',
        "tests/audit/test_greedy.py",
    ),
    Mutation(
        "text after the end-of-sequence token is not noticed",
        "audit",
        "if position == max_new_tokens or (position and text.tokens[position - 1] in eos):",
        "if position == max_new_tokens:",
        "tests/audit/test_greedy.py",
    ),
    # doctor
    Mutation(
        "a tokenizer with one id too many passes",
        "doctor",
        "highest < facts.vocab_size",
        "highest <= facts.vocab_size",
        "tests/doctor/test_doctor.py",
    ),
    # serving
    Mutation(
        "a client that hangs up leaves its sequences running",
        "serving",
        "            self._cancel(self.sequences)",
        "            pass",
        "tests/serving/test_async_engine.py tests/serving/test_openai.py",
    ),
    Mutation(
        "a stream drops its last text",
        "serving",
        "pieces = self._take(self._stream.finish())",
        "pieces = self._take('')",
        "tests/serving/test_completions.py tests/serving/test_openai.py",
    ),
    Mutation(
        "the queue takes one request more than it says",
        "serving",
        "if over > self._max_queue:",
        "if over > self._max_queue + 1:",
        "tests/serving/test_async_engine.py",
    ),
    # load
    Mutation(
        "a 95th percentile of a few samples is shown",
        "load",
        "enough = len(found) * (1 - share) > 1 - 1e-9",
        "enough = True",
        "tests/load",
    ),
    Mutation(
        "the time to the first token leaves out the wait in the client",
        "load",
        'record["first"] - record["scheduled"]]',
        'record["first"] - record["sent"]]',
        "tests/load",
    ),
    # report
    Mutation(
        "the page does not escape what tables hold",
        "report",
        "Environment(autoescape=True,",
        "Environment(autoescape=False,",
        "tests/report",
    ),
    # drafters
    Mutation(
        "prompt lookup takes the earliest match",
        "drafters",
        "longer = torch.where(same, places, 0).amax(dim=1, keepdim=True)",
        "longer = torch.where(same, places, 0).amax(dim=1, keepdim=True).clamp(max=2)",
        "tests/drafters/test_lookup.py",
    ),
    # plugins
    Mutation(
        "a reduced vocabulary's offsets are taken for ids",
        "plugins",
        "self.draft_tokens.copy_(tokens)",
        "self.draft_tokens.copy_(offsets)",
        "tests/engines/vllm/test_settings.py",
    ),
)


def run_tests(tree: Path, tests: list[str]) -> int:
    """pytest's exit status in a tree; tests that hang have failed."""
    path = os.pathsep.join([str(tree / "src"), str(tree)])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            check=False,
            timeout=_HANGS,
        )
    except subprocess.TimeoutExpired:
        return _FAILED
    return done.returncode


def copied(root: Path) -> Path:
    """What git knows of the tree, elsewhere."""
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    return root


def caught(mutation: Mutation, tree: Path) -> bool:
    """Whether its tests fail with the fault in the tree, which is mended afterwards."""
    path = mutation.file(tree)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        status = run_tests(tree, mutation.tests.split())
    finally:
        path.write_text(whole, encoding="utf-8")
    if status not in (0, _FAILED):
        raise SystemExit(f"{mutation.name}: its tests could not run (pytest says {status}).")
    return status == _FAILED


def main() -> None:
    """Every fault, or those whose names contain a word."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="a part of a name, a package or a test's path")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trust", action="store_true", help="the tests pass without a fault")
    options = parser.parse_args()
    wanted = [m for m in MUTATIONS if options.only in f"{m.name} {m.package} {m.tests}"]
    for mutation in wanted:
        mutation.file(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            trees.put(copied(Path(folder, str(job))))

        def judge(mutation: Mutation) -> bool:
            tree = trees.get()
            try:
                return caught(mutation, tree)
            finally:
                trees.put(tree)

        tests = sorted({test for mutation in wanted for test in mutation.tests.split()})
        if not options.trust and run_tests(Path(folder, "0"), tests):
            raise SystemExit(f"the tests fail without any fault: {' '.join(tests)}")
        missed = 0
        with ThreadPoolExecutor(options.jobs) as pool:
            for mutation, found in zip(wanted, pool.map(judge, wanted), strict=True):
                missed += not found
                print(f"{'caught' if found else 'MISSED'}  {mutation.package}: {mutation.name}")
                if options.out is not None:
                    record = {**asdict(mutation), "caught": found, "environment": environment()}
                    append_record(options.out, record)
    print(f"{len(wanted) - missed} of {len(wanted)} caught")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
