from __future__ import annotations

import json

import pytest

from domino_spec import targets
from domino_spec.bench import runner
from domino_spec.errors import TargetError
from tests.support.ggufs import write_gguf

PROMPT = "what is the answer"


def document(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_text_goes_to_stdout_and_statistics_to_stderr(domino, target, draft):
    result = domino("generate", target, "--draft", draft, "--prompt", PROMPT, "-n", 12)
    expected = document(domino("generate", target, "-p", PROMPT, "-n", 12, "--json"))
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == expected["generations"][0]["text"].rstrip("\n")
    assert "12 tokens in" in result.stderr
    assert "acceptance length" in result.stderr
    assert "accepted by position" in result.stderr
    assert "prefill" in result.stderr
    assert "loading target" in result.stderr


def test_quiet_leaves_the_text_alone(domino, target, draft):
    result = domino("generate", target, PROMPT, "--draft", draft, "-n", 5, "-q")
    assert result.exit_code == 0
    assert result.stderr == ""


def test_speculation_gives_the_tokens_of_plain_decoding(domino, target, draft):
    arguments = ("generate", target, "--draft", draft, "-p", PROMPT, "-n", 40, "--json")
    drafted = document(domino(*arguments))
    plain = document(domino(*arguments, "--no-speculate"))
    assert drafted["speculate"]
    assert drafted["depth"] == 7
    assert not plain["speculate"]
    assert drafted["generations"][0]["tokens"] == plain["generations"][0]["tokens"]
    assert drafted["run"]["offered"]
    assert drafted["run"]["tokens_per_second"] > 0


def test_answers_follow_a_grammar(domino, target, draft, tmp_path):
    arguments = ("generate", target, "--draft", draft, "-p", PROMPT, "-n", 40, "--json")
    chosen = document(domino(*arguments, "--choice", "the fox", "--choice", "the dog"))
    assert chosen["generations"][0]["text"] in ("the fox", "the dog")
    file = tmp_path / "grammar.lark"
    file.write_text('start: "a"{3} "b"')
    assert document(domino(*arguments, "--grammar", file))["generations"][0]["text"] == "aaab"
    both = domino(*arguments, "--grammar", file, "--regex", "a")
    assert "--grammar and --regex are given together; give one." in both.output
    missing = domino(*arguments, "--json-schema", tmp_path / "none.json")
    assert "none.json cannot be read" in missing.output


def test_without_a_drafter_it_says_that_it_decodes_plainly(domino, target):
    result = domino("generate", target, PROMPT, "-n", 3)
    assert "decoded plainly: no --draft was given" in result.stderr
    assert "acceptance length 1.00" in result.stderr


def test_several_prompts_are_a_batch(domino, target, draft):
    together = document(
        domino("generate", target, "one", "-p", "two", "--draft", draft, "-n", 9, "--json")
    )
    assert [answer["prompt"] for answer in together["generations"]] == ["one", "two"]
    for answer in together["generations"]:
        alone = document(domino("generate", target, answer["prompt"], "-n", 9, "--json"))
        assert answer["tokens"] == alone["generations"][0]["tokens"]
    shown = domino("generate", target, "one", "two", "--draft", draft, "-n", 9)
    assert shown.exit_code == 0
    assert "1/2 · one" in shown.stdout
    assert "2/2 · two" in shown.stdout
    assert "18 tokens in" in shown.stderr


def test_prompts_from_stdin_and_from_files(domino, target, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n", encoding="utf-8")
    results = [
        document(domino("generate", target, PROMPT, "-n", 6, "--json")),
        document(domino("generate", target, "-", "-n", 6, "--json", stdin=PROMPT + "\n")),
        document(domino("generate", target, "--prompt-file", file, "-n", 6, "--json")),
    ]
    assert len({str(result["generations"][0]["tokens"]) for result in results}) == 1


def test_raw_text_skips_the_chat_template(domino, target, base_target):
    chat = document(domino("generate", target, PROMPT, "-n", 2, "--json"))
    system = document(domino("generate", target, PROMPT, "--system", "s", "-n", 2, "--json"))
    raw = document(domino("generate", target, PROMPT, "--raw", "-n", 2, "--json"))
    base = document(domino("generate", base_target, PROMPT, "-n", 2, "--json"))
    counts = [run["generations"][0]["prompt_tokens"] for run in (chat, system, raw, base)]
    assert counts[1] > counts[0] > counts[2] == counts[3]
    noted = domino("generate", base_target, PROMPT, "-n", 2)
    assert "no chat template" in noted.stderr


def test_sampling_options_reach_the_decoder(domino, target, draft):
    flags = (
        "--temperature 1.5 --top-k 50 --top-p 0.95 --min-p 0.01 --repetition-penalty 1.2 "
        "--presence-penalty 0.3 --frequency-penalty -0.1"
    )
    arguments = ("generate", target, PROMPT, "--draft", draft, "-n", 20, "--json", *flags.split())
    runs = [
        document(domino(*arguments, "--seed", seed, "--accept", "match"))["generations"][0][
            "tokens"
        ]
        for seed in (3, 3, 4)
    ]
    assert runs[0] == runs[1] != runs[2]
    plain = document(domino(*arguments, "--seed", 3, "--accept", "match", "--no-speculate"))
    assert plain["generations"][0]["tokens"] == runs[0]


def test_depth_candidates_and_alignment(domino, target, draft, dflash):
    run = document(
        domino("generate", target, PROMPT, "--draft", draft, "--depth", 8, "--candidates", 4,
               "--shift-label", "-n", 10, "--json")
    )  # fmt: skip
    assert run["depth"] == 8
    assert document(domino("generate", target, PROMPT, "--draft", dflash, "-n", 10, "--json"))


def test_stop_strings_end_the_text(domino, target, draft):
    whole = document(domino("generate", target, PROMPT, "-n", 30, "--ignore-eos", "--json"))
    text = whole["generations"][0]["text"]
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable() and c not in text[:3])
    cut = document(
        domino("generate", target, PROMPT, "--draft", draft, "-n", 30, "--ignore-eos", "--json",
               "--stop", "never written", "--stop", stop)
    )["generations"][0]  # fmt: skip
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == text[: text.index(stop)]


@pytest.mark.filterwarnings("default:only .* tokens a cycle")
def test_a_useless_drafter_is_one_warning_line_after_the_text(domino, target, draft):
    arguments = ("generate", target, PROMPT, "--draft", draft, "-n", 70, "--ignore-eos",
                 "--depth", 7)  # fmt: skip
    result = domino(*arguments)
    assert result.stderr.count("warning:") == 1
    assert "UserWarning" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
    assert "alignment" in line
    machine = domino(*arguments, "--json")
    assert len(document(machine)["warnings"]) == 1
    assert "warning:" in machine.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_load(domino, target, draft, dtype):
    run = domino("generate", target, PROMPT, "--draft", draft, "-n", 3, "--dtype", dtype, "--json")
    assert document(run)["generations"][0]["tokens"]


def test_thinking_is_told_to_the_template(domino, tmp_path):
    from tests.cli import tiny

    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = tiny.TEMPLATE + "{% if enable_thinking %}think{% endif %}"
    folder = tiny.save_target(tmp_path / "thinker", tokenizer=tokenizer)
    counts = [
        document(domino("generate", folder, PROMPT, "-n", 1, "--json", *flags))["generations"][0][
            "prompt_tokens"
        ]
        for flags in ((), ("--no-thinking",), ("--thinking",))
    ]
    assert counts[0] == counts[1] < counts[2]


_GENERATE = ("generate", "{file}", PROMPT)
_FEW = ("--prompts", "chat", "--limit", 2)


@pytest.mark.parametrize(
    ("arguments", "kinds", "quantize"),
    [
        (_GENERATE, {}, "keep"),
        (("audit", "{file}", "--draft", "lookup"), {}, "keep"),
        (("bench", "{file}", *_FEW), {}, "keep"),
        (("doctor", "{file}", "--draft", "lookup"), {}, "keep"),
        (("eval", "{file}", "--draft", "lookup", "--decode", *_FEW), {}, "keep"),
        (("serve", "{file}", "--port", 0), {}, "keep"),
        (("data", "answer", "{file}", "{prompts}", "--out", "{out}"), {}, None),
        ((*_GENERATE, "--dtype", "float32"), {}, None),
        ((*_GENERATE, "--attn-implementation", "sdpa"), {}, None),
        ((*_GENERATE, "--quantize", "int8"), {}, "int8"),
        (_GENERATE, {"ffn_down": "F16"}, None),
    ],
)
def test_commands_that_decode_run_a_gguf_files_own_blocks_on_a_cpu(
    domino, tmp_path, monkeypatch, arguments, kinds, quantize
):
    given = {}

    def load_target(source, **options):
        given.update(options)
        raise TargetError("far enough")

    monkeypatch.setattr(targets, "load_target", load_target)
    monkeypatch.setattr(runner, "load_target", load_target)
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf", kinds=kinds)
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["what"]}\n')
    names = {"file": file, "prompts": tmp_path / "prompts.jsonl", "out": tmp_path / "out"}
    result = domino(*(str(argument).format(**names) for argument in arguments), "--device", "cpu")
    assert "error: far enough" in result.stderr
    assert given["quantize"] == quantize
    said = "running the file's own blocks (Q8_0); --dtype float32 runs what they unpack to"
    assert result.stderr.count(said) == (quantize == "keep")


@pytest.mark.filterwarnings("always:converting")
def test_a_gguf_target_says_once_that_it_is_converted(domino, tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    arguments = ("generate", file, "the quick brown fox", "-n", 2, "--dtype", "float32")
    first = domino(*arguments, DOMINO_CACHE=str(tmp_path / "cache"))
    assert first.exit_code == 0, first.stderr
    told = [line for line in first.stderr.splitlines() if "convert" in line]
    assert told == [
        f"converting tiny.gguf for Transformers: done once, then kept in {tmp_path}/cache/gguf."
    ]
    again = domino(*arguments, DOMINO_CACHE=str(tmp_path / "cache"))
    assert again.stdout == first.stdout
    assert "convert" not in again.stderr
