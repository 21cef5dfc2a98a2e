"""Adapts a drafter to a real fine-tune of its target, and measures what each stage brings.

    python -m benchmarks.adapt TARGET DRAFTER --run FOLDER --sets gsm8k.jsonl ...

1. PEFT makes the fine-tune: a LoRA, kept as an adapter and merged. It learns conversations (any
   that `domino train` reads), by default the docstrings of Python's standard library: text by
   people, in another register than a chat model's.
2. Adapter and merged model are compared: weights, and greedy texts from the engine.
3. `domino adapt` adapts the drafter to the adapter, with prompts that the fine-tune makes up.
4. `domino train` trains a drafter from random weights, as for a model without any: on more answers
   of the fine-tune's, to prompts that it makes up by another seed (`domino data`). Prompts that
   were given are answered once, for both.

Each stage leaves a record. The drafters are measured on held-out prompts of step 3, on those of
conversations that were kept from the fine-tune, and on --sets. The same command, repeated, begins
with the stage that was interrupted.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import math
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.sweep import measure
from benchmarks.sweep_sets import Sets, answers_to, held_out_set, load_sets
from domino_spec.api import DominoDecoder
from domino_spec.checkpoints import load_drafter
from domino_spec.checkpoints.files import PREFIX
from domino_spec.cli.adapt import ADAPT_FILE
from domino_spec.cli.main import app
from domino_spec.data import Corpus, load_corpus
from domino_spec.evaluation import PromptSet, Protocol, corpus_prompts
from domino_spec.records import append_record, environment
from domino_spec.targets import LoadedTarget, default_device, load_target
from domino_spec.training.adapt import TEMPERATURES
from domino_spec.training.config import CONFIG_FILE, read_settings
from domino_spec.training.evaluate import split_held_out
from domino_spec.training.observers import LOG_FILE, read_log

RANK, ALPHA, RATE, WARMUP = 16, 32, 5e-4, 10
SHORTEST, LONGEST = 160, 2000
"""Characters of a docstring."""
SHOWN = 3
LIBRARY = "docstrings of Python's standard library, asked for by name"
_PLACES = {"target", "data", "out", "init"}
_NO_DOCSTRINGS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo"}


def docstrings(library: Path) -> Iterator[tuple[str, str]]:
    """Questions about the classes and functions of a library, and what their docstrings say."""
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if _NO_DOCSTRINGS & set(parts):
            continue
        module = ".".join(parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            said = ast.get_docstring(node) or ""
            if SHORTEST <= len(said) <= LONGEST:
                yield f"What is `{_signature(node)}` of Python's module `{module}`?", said


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"


def write_docstrings(file: Path) -> Path:
    """As a file of conversations."""
    rows = []
    for question, said in docstrings(Path(sysconfig.get_path("stdlib"))):
        user = {"role": "user", "content": question}
        rows.append(json.dumps({"messages": [user, {"role": "assistant", "content": said}]}))
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


def learn(model: Any, corpus: Corpus, *, steps: int, batch: int, length: int) -> list[float]:
    """LoRA on every token of the conversations, the user's too; the loss of each step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    draw = torch.Generator().manual_seed(0)
    order: list[int] = []
    losses: list[torch.Tensor] = []
    for step in range(steps):
        while len(order) < batch:
            order += torch.randperm(len(corpus), generator=draw).tolist()
        taken, order = order[:batch], order[batch:]
        texts = [torch.from_numpy(corpus[i].tokens[:length]).long() for i in taken]
        tokens = pad_sequence(texts, batch_first=True)  # [batch, longest]
        labels = pad_sequence(texts, batch_first=True, padding_value=-100)
        mask = labels.ne(-100).long()
        where = model.device
        loss = model(
            input_ids=tokens.to(where), attention_mask=mask.to(where), labels=labels.to(where)
        ).loss
        loss.backward()
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimiser.param_groups:
            group["lr"] = RATE * min((step + 1) / WARMUP, cosine)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.detach())
        if step % 50 == 0 or step == steps - 1:
            print(f"  fine-tuning, step {step}: loss {loss.item():.3f}", flush=True)
    return torch.stack(losses).tolist()


def domino(*words: Any) -> int:
    """A command of `domino`, in this process: its exit code."""
    print("domino", *words, flush=True)
    return int(app([str(word) for word in words], standalone_mode=False) or 0)


def course(log: list[dict[str, Any]]) -> dict[str, Any]:
    """How often a run saw its data, and what it measured on its way."""
    measured = [report for report in log if "tokens_per_cycle" in report]
    return {
        "epochs": max(report.get("epoch", 0) for report in log),
        "curve": [{n: report[n] for n in ("step", "tokens_per_cycle")} for report in measured],
    }


class Demonstration:
    """One fine-tune and its drafters."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        run: Path = arguments.run
        self.adapter, self.merged = run / "adapter", run / "merged"
        self.adapted, self.full = run / "adapted", run / "full"
        self.data = arguments.data or [str(run / "conversations.jsonl")]
        run.mkdir(parents=True, exist_ok=True)

    def all(self) -> None:
        """Every stage that is not done, a record each; the longest comes last."""
        base, before = self.arguments.target, self.arguments.drafter
        stages: dict[str, Callable[[], dict[str, Any]]] = {
            "fine-tune": self.fine_tune,
            "texts": self.compare_texts,
            "domino adapt": self.adapt,
            "base, drafter before": lambda: self.measure("base", base, before),
            "fine-tune, drafter before": lambda: self.measure("fine-tune", self.adapter, before),
            "fine-tune, drafter adapted": lambda: self.measure(
                "fine-tune", self.adapter, self._told()["drafter"]
            ),
            "domino train": self.train,
            "fine-tune, drafter trained": lambda: self.measure(
                "fine-tune", self.merged, self.full / "drafter"
            ),
        }
        for name, stage in stages.items():
            done = self.arguments.run / f"{name.replace(', ', '-').replace(' ', '-')}.json"
            if done.exists():
                continue
            print(f"{name} ...", flush=True)
            began = time.perf_counter()
            values = {**stage(), "wall_seconds": time.perf_counter() - began}
            record = {
                "stage": name,
                "target": Path(base).name,
                "drafter": Path(before).name.removeprefix(PREFIX),
                **{key: round(v, 4) if isinstance(v, float) else v for key, v in values.items()},
                "environment": environment(),
            }
            append_record(self.arguments.records, record)
            append_record(done, record)
            print(f"{name}: {values}", flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def fine_tune(self) -> dict[str, Any]:
        """A LoRA in a folder of its own, and merged into the target."""
        arguments = self.arguments
        if not arguments.data:
            write_docstrings(Path(self.data[0]))
        loaded = self._load(arguments.target)
        training, held_out = self._conversations(loaded)
        config = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(loaded.target.model, config)
        model.peft_config["default"].base_model_name_or_path = str(arguments.target)
        settings = {name: getattr(arguments, name) for name in ("steps", "batch", "length")}
        began = time.perf_counter()
        losses = learn(model, training, **settings)
        seconds = time.perf_counter() - began
        model.save_pretrained(self.adapter, save_embedding_layers=False)
        merged = model.merge_and_unload()
        merged.save_pretrained(self.merged)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(self.merged)
        few = max(1, len(losses) // 20)
        return {
            "data": [Path(file).name for file in arguments.data or [LIBRARY]],
            "conversations": {"trained": len(training), "held_out": len(held_out)},
            "settings": {**settings, "rank": RANK, "alpha": ALPHA, "learning_rate": RATE},
            "peft": peft.__version__,
            "dtype": str(loaded.target.dtype),
            "loss": [sum(part) / few for part in (losses[:few], losses[-few:])],
            "seconds": seconds,
        }

    def compare_texts(self) -> dict[str, Any]:
        """Whether adapter and merged model write the same; how the base model writes instead."""
        sources = {
            "base": self.arguments.target, "adapter": self.adapter, "merged": self.merged,
        }  # fmt: skip
        texts: dict[str, list[str]] = {}
        kinds: dict[str, Counter[str]] = {}
        weights: dict[str, dict[str, torch.Tensor]] = {}
        for name, source in sources.items():
            loaded = self._load(source)
            prompts = [list(p) for p in self._own_prompts(loaded).prompts[: self.arguments.texts]]
            decoder = DominoDecoder.from_pretrained(loaded, None, engine="fast")
            done = decoder.generate(prompts, max_new_tokens=self.arguments.text_tokens)
            texts[name] = [str(generation.text) for generation in done]
            kinds[name] = Counter(Protocol().outcome(generation.tokens) for generation in done)
            weights[name] = loaded.target.model.state_dict()
        return {
            "texts": len(texts["adapter"]),
            "as_adapter": {
                name: sum(a == b for a, b in zip(texts["adapter"], texts[name], strict=True))
                for name in ("merged", "base")
            },
            "weights_equal": all(
                torch.equal(weight, weights["merged"][name])
                for name, weight in weights["adapter"].items()
            ),
            "answers": kinds,
            "samples": {name: [text[:300] for text in texts[name][:SHOWN]] for name in texts},
        }

    def adapt(self) -> dict[str, Any]:
        """By the command, which makes prompts and answers itself and goes on where it stopped."""
        arguments = self.arguments
        words: list[Any] = [
            "adapt", arguments.drafter, "--target", self.adapter, "--out", self.adapted,
            "--seconds", arguments.seconds, "--force", "--resume",
            "--max-new-tokens", arguments.answer_tokens,
        ]  # fmt: skip
        if arguments.answers:
            words += ["--limit", arguments.answers]
        for file in arguments.prompts or ():
            words += ["--prompts", file]
        code = domino(*words, *self._changes())
        if code not in (0, 3):
            raise SystemExit(f"domino adapt failed with exit code {code}")
        told = self._told()
        return {
            "kept": "the new drafter" if code == 0 else "the old drafter: the new one is worse",
            **{n: told[n] for n in ("before", "after", "own_target", "steps", "seconds")},
            **self._trained(self.adapted),
        }

    def train(self) -> dict[str, Any]:
        """From random weights with the default recipe."""
        arguments = self.arguments
        answers = self.adapted / "answers"
        if arguments.prompts is None:
            prompts, answers = arguments.run / "prompts", arguments.run / "answers"
            self._do("data", "synth", self.merged, "-o", prompts, "-n", arguments.full_answers,
                     "--seed", 1, "--quiet")  # fmt: skip
            temperatures = [word for t in TEMPERATURES for word in ("-t", t)]
            self._do("data", "answer", self.merged, prompts, "-o", answers, "--quiet",
                     "-n", arguments.answer_tokens, *temperatures)  # fmt: skip
        self._do(
            "train", self.merged, "--data", answers, "--out", self.full, "--max-seconds",
            arguments.full_seconds, "--no-tensorboard", *self._changes(),
        )  # fmt: skip
        last = {k: v for report in read_log(self.full / LOG_FILE) for k, v in report.items()}
        return {
            "after": last.get("tokens_per_cycle"),
            "steps": last["step"],
            "seconds": last["training_seconds"],
            **self._trained(self.full),
        }

    def measure(self, name: str, source: str | Path, draft: str | Path) -> dict[str, Any]:
        """Acceptance lengths of a drafter on all sets, with this target's own answers."""
        loaded = self._load(source)
        target = loaded.target
        sets = self._sets(loaded, str(self.arguments.run / f"answers-{name}"))
        layers = target.num_layers
        drafter = load_drafter(
            draft, dtype=target.dtype, num_target_layers=layers, any_kind=True
        ).drafter
        return {
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "answers": {  # those used say how much a figure is worth
                prompts.name: Counter(map(Protocol().outcome, answers.answers))
                for prompts, answers in sets
            },
            "acceptance_length": measure(drafter.to(target.device), loaded, sets),
        }

    # Inside -----------------------------------------------------------------------------------

    def _do(self, *words: Any) -> None:
        if code := domino(*words):
            raise SystemExit(f"domino {words[0]} failed with exit code {code}")

    def _load(self, source: str | Path) -> LoadedTarget:
        """In the type of training, so that merging rounds the same everywhere."""
        device = default_device()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return load_target(source, device=device, dtype=dtype)

    def _conversations(self, loaded: LoadedTarget) -> tuple[Corpus, Corpus]:
        """What the fine-tune learns and what is kept from it."""
        return split_held_out(self._corpus(self.data, loaded), self.arguments.limit)

    def _corpus(self, data: list[str], loaded: LoadedTarget, **options: Any) -> Corpus:
        vocab_size = loaded.target.vocab_size
        return load_corpus(data, tokenizer=loaded.tokenizer, vocab_size=vocab_size, **options)

    def _own_prompts(self, loaded: LoadedTarget) -> PromptSet:
        longest = Protocol().longest_for(loaded.target)
        return corpus_prompts("fine-tune", self._conversations(loaded)[1], longest=longest)

    def _sets(self, loaded: LoadedTarget, folder: str) -> Sets:
        """The same prompts for every target, with its own answers, kept in the folder."""
        settings = read_settings(self.adapted / CONFIG_FILE)
        answered = self._corpus(
            list(settings["data"]), loaded, max_length=settings["length"]
        )  # as training reads them, which decides what is held out
        own = self._own_prompts(loaded)
        most = Protocol().max_new_tokens
        return [
            *load_sets(self.arguments.sets, folder, loaded, self.arguments.limit),
            held_out_set(answered, loaded, settings["held_out"], folder),
            (own, answers_to(own.name, own.prompts, loaded, folder, max_new_tokens=most)),
        ]

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.adapted / ADAPT_FILE).read_text(encoding="utf-8"))
        return told

    def _changes(self) -> list[str]:
        return [word for each in self.arguments.set for word in ("--set", each)]

    def _trained(self, folder: Path) -> dict[str, Any]:
        settings = read_settings(folder / CONFIG_FILE)
        return {
            "settings": {n: v for n, v in settings.items() if n not in _PLACES},
            **course(read_log(folder / LOG_FILE)),
        }


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="a folder or a GGUF file")
    parser.add_argument("drafter", help="of this target; any that domino adapt takes")
    parser.add_argument("--run", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--data", nargs="+", help="conversations for the fine-tune")
    parser.add_argument("--sets", nargs="*", default=[], help="JSON lines of turns")
    parser.add_argument("--limit", type=int, default=64, help="prompts a set")
    parser.add_argument("--steps", type=int, default=300, help="of the fine-tune")
    parser.add_argument("--batch", type=int, default=32, help="conversations of such a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a conversation")
    parser.add_argument("--texts", type=int, default=32, help="to compare")
    parser.add_argument("--text-tokens", type=int, default=128)
    parser.add_argument("--answers", type=int, help="prompts to adapt with; unset: the command's")
    parser.add_argument("--full-answers", type=int, default=24000, help="prompts to train with")
    parser.add_argument("--answer-tokens", type=int, default=512)
    parser.add_argument("--prompts", nargs="+", help="prompts instead of made-up ones")
    parser.add_argument("--seconds", type=float, default=60.0, help="of adapting")
    parser.add_argument("--full-seconds", type=float, default=150.0, help="from random weights")
    parser.add_argument("--set", nargs="*", default=[], help="settings of training, NAME=VALUE")
    parser.add_argument("--records", type=Path, default=Path("records/adapt.jsonl"))
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """All stages."""
    torch._dynamo.config.recompile_limit = 64
    Demonstration(parse(words)).all()


if __name__ == "__main__":
    main()
