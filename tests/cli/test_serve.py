from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from domino_spec.cli import serve as serve_module
from domino_spec.serving import config
from domino_spec.serving.backends import ServeArgs, args
from domino_spec.serving.backends.args import option
from domino_spec.settings import DraftOptions, TargetOptions
from tests.cli.test_errors import errors_of
from tests.serving.backends import fake_engine, samples

NATIVE_LACKS = {"tensor_parallel", "memory_share", "engine_python", "extra_args"}
SWITCHES = {"speculate": ["--no-speculate"], "api_keys": ["--api-key", samples.KEYS[0]]}
KEY = samples.KEYS[0]


def words(field: str) -> list[str]:
    """A field's sample on the command line."""
    value = samples.SAMPLES[field]
    if field in SWITCHES:
        return SWITCHES[field]
    if field == "extra_args":
        return ["--", *value]
    if isinstance(value, bool):
        return [option(field) if value else "--no-" + option(field).removeprefix("--")]
    if isinstance(value, tuple):
        (value,) = value
    return [option(field), str(value)]


@pytest.fixture
def served(monkeypatch):
    """What our own server was started with, in place of starting it."""
    calls: list[SimpleNamespace] = []

    def load(voice, target, target_options, draft_options, chat_options, loop_options):
        seen = target_options.model_dump(include=set(TargetOptions.model_fields))
        draft = DraftOptions(**draft_options.model_dump(include=set(DraftOptions.model_fields)))
        return (target, seen, draft, chat_options, loop_options)

    def run(decoder, settings, *, sockets, draft_name, log):
        calls.append(SimpleNamespace(decoder=decoder, settings=settings, draft_name=draft_name))
        log("listening")
        return 0

    module = ModuleType("domino_spec.serving.server")
    module.serve = run
    monkeypatch.setitem(sys.modules, "domino_spec.serving.server", module)
    monkeypatch.setattr(serve_module, "load_decoder", load)
    monkeypatch.setattr(serve_module, "require_places", lambda *_, **__: None)
    monkeypatch.setattr(config, "bind_sockets", lambda settings: [])
    monkeypatch.delenv("DOMINO_API_KEY", raising=False)
    return calls


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A vLLM on the PATH that is none, and a cache of its own."""
    place = fake_engine.make(tmp_path / "env")
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_EXIT", "0")
    monkeypatch.delenv("DOMINO_API_KEY", raising=False)
    monkeypatch.setattr(config, "bind_sockets", lambda settings: [])
    return tmp_path / "env"


@pytest.mark.parametrize("field", [f for f in ServeArgs.model_fields if f != "target"])
def test_every_option_reaches_our_own_server_or_is_refused(field, domino, served):
    basics = ["serve", "org/model", "--draft", "org/first"]
    assert domino(*basics).exit_code == 0
    result = domino(*basics, *words(field))
    if field in NATIVE_LACKS:
        assert result.exit_code == 1
        assert f"--backend native has no {option(field)}" in errors_of(result)[0]
        assert len(served) == 1
    else:
        assert result.exit_code == 0, result.output
        # The page is there unless refused: saying so changes nothing.
        assert (served[0] == served[1]) is (field == "page")


def test_our_own_server_gets_the_settings(domino, served):
    result = domino(
        "serve", "org/Model-1B", "--draft", "released:x", "--depth", 3, "--no-thinking",
        "--host", "0.0.0.0", "--port", 0, "--no-page", "--slots", 4, "--context", 512,
        "--max-prompt-tokens", 100, "--max-new-tokens", 50, "--max-choices", 2, "--max-queue", 0,
        "--max-body-bytes", 2048, "--drain-seconds", 1.5, "--api-key", "a", "--api-key", "b",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (call,) = served
    settings = call.settings
    assert (settings.model, settings.host, settings.port) == ("Model-1B", "0.0.0.0", 0)
    assert (settings.slots, settings.context, settings.max_queue) == (4, 512, 0)
    assert (settings.max_prompt_tokens, settings.max_new_tokens) == (100, 50)
    assert (settings.max_choices, settings.max_body_bytes) == (2, 2048)
    assert (settings.drain_seconds, settings.page) == (1.5, False)
    assert settings.api_keys == ("a", "b")
    target, _, draft, chat, loop = call.decoder
    assert (target, draft.draft, draft.depth, chat.thinking) == (
        "org/Model-1B", "released:x", 3, False,
    )  # fmt: skip
    assert loop.pack
    assert call.draft_name == "released:x"


def test_before_it_starts_it_says_where_what_and_to_whom(domino, served):
    text = domino("serve", "org/m", "--draft", "d", "--slots", 4).stderr
    for line in (
        "address: http://127.0.0.1:8000/v1", "model:   m", "drafter: d", "slots:   4",
        "reached: from this machine only, without a key", "listening",
    ):  # fmt: skip
        assert line in text
    assert "warning" not in text
    assert "drafter: none: --no-speculate" in (
        domino("serve", "org/m", "--draft", "d", "--no-speculate").stderr
    )
    assert served[-1].draft_name is None
    assert served[-1].decoder[2].draft is None


def test_an_open_door_is_a_warning(domino, served):
    open_door = domino("serve", "org/m", "--host", "0.0.0.0")
    assert "warning: every client that can reach 0.0.0.0 may ask" in open_door.stderr
    keyed = domino("serve", "org/m", "--host", "0.0.0.0", DOMINO_API_KEY=KEY)
    assert "warning" not in keyed.stderr
    assert "reached: from the network, with a key" in keyed.stderr
    assert KEY not in keyed.output


def test_keys_come_from_three_places(domino, served, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n\n  spaced  \nfrom-option\n")
    result = domino(
        "serve", "org/m", "--api-key", "from-option", "--api-key-file", file,
        DOMINO_API_KEY="from-environment",
    )  # fmt: skip
    assert result.exit_code == 0
    expected = ("from-option", "from-file", "spaced", "from-environment")
    assert served[0].settings.api_keys == expected
    assert "from-" not in result.output
    missing = domino("serve", "org/m", "--api-key-file", tmp_path / "gone")
    assert "cannot be read (FileNotFoundError)" in errors_of(missing)[0]
    file.write_text("#\n")
    assert "holds no key" in errors_of(domino("serve", "org/m", "--api-key-file", file))[0]


def test_missing_packages_are_told_before_anything_is_loaded(domino, served, monkeypatch):
    monkeypatch.setattr(args, "_NATIVE_PACKAGES", ("fastapi_of_tomorrow", "json"))
    result = domino("serve", "org/m")
    assert "needs fastapi_of_tomorrow" in errors_of(result)[0]
    assert "pip install 'domino-spec[serve]'" in errors_of(result)[0]
    assert not served


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(domino, served, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(serve_module, "load_decoder", lambda *_: pytest.fail("it was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = domino("serve", "org/m", "--port", other.getsockname()[1])
    assert "another program listens on port" in errors_of(result)[0]
    assert "--port" in errors_of(result)[0]


def test_a_dry_run_starts_nothing(domino, served, target, draft):
    result = domino("serve", target, "--draft", draft, "--dry-run", "--port", 9, "--api-key", KEY)
    assert result.exit_code == 0, result.output
    assert f"target:  {target} (" in result.stderr
    assert "port: 9" in result.stdout
    assert "api_keys: 1, not shown" in result.stdout
    assert KEY not in result.output
    assert not served


@pytest.mark.parametrize("backend", ["native", "vllm", "sglang"])
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (["TARGET/gone"], "no model at"),
        (["TARGET", "--draft", "TARGET/gone"], "gone"),
        (["TARGET", "--draft", "TARGET"], "drafter"),
        (["TARGET", "--port", "TAKEN"], "another program listens on port"),
        (["TARGET", "--host", "192.0.2.1"], "this machine has no address"),
    ],
    ids=["target", "draft", "not a drafter", "port", "host"],
)
def test_a_dry_run_refuses_what_would_not_start(domino, target, backend, wrong, found):
    with socket.create_server(("127.0.0.1", 0)) as none:
        free = none.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        words_ = [word.replace("TARGET", target).replace("TAKEN", taken) for word in wrong]
        port = [] if "--port" in words_ else ["--port", free]
        result = domino("serve", *words_, *port, "--backend", backend, "--dry-run")
    assert result.exit_code == 2, result.output
    assert found in errors_of(result)[0]


def test_a_dry_run_of_our_own_server_reads_the_target(domino, target, draft, tmp_path):
    encoder, bare = tmp_path / "encoder", tmp_path / "bare"
    encoder.mkdir()
    (encoder / "config.json").write_text('{"model_type": "t5", "architectures": ["T5Model"]}')
    bare.mkdir()
    shutil.copy(Path(target) / "config.json", bare)
    for words_, found in (
        ([encoder], "is an encoder-decoder"),
        ([bare], "came without a tokenizer"),
        ([target, "--context", 10**7], "the target was made for"),
        ([target, "--device", "cuda:7"], "cuda:7"),
        ([target, "--draft", draft, "--depth", 99], "depth is 99"),
    ):
        result = domino("serve", *words_, "--dry-run", "--port", 0)
        assert result.exit_code == 2, result.output
        assert found in errors_of(result)[0]
    (bare / "tokenizer.json").write_bytes((Path(target) / "tokenizer.json").read_bytes())
    result = domino("serve", bare, "--dry-run", "--port", 0)
    assert result.exit_code == 0, result.output
    assert "has no chat template" in result.stderr


def test_the_servers_exit_code_is_ours(domino, served, monkeypatch):
    monkeypatch.setattr(sys.modules["domino_spec.serving.server"], "serve", lambda *_, **__: 3)
    assert domino("serve", "org/m").exit_code == 3


def test_vllm_is_run_with_the_drafter_exported(domino, engine, target, draft):
    arguments = ["serve", target, "--draft", draft, "--backend", "vllm", "--api-key", KEY]
    result = domino(*arguments, "--slots", 4, "--", "--seed", 5)
    assert result.exit_code == 0, result.output
    given = fake_engine.given(engine)
    assert given["argv"][:2] == ["serve", target]
    assert given["argv"][-2:] == ["--seed", "5"]
    assert given["env"]["VLLM_API_KEY"] == KEY
    assert KEY not in " ".join(given["argv"]) + result.output
    assert "drafter: " + draft + ", 7 drafts a cycle" in result.stderr
    assert "slots:   4" in result.stderr
    assert "exporting" not in result.stderr  # vLLM reads what we write


def test_a_drafter_that_vllm_does_not_read_is_exported_and_told(domino, engine, target, tmp_path):
    from domino_spec.checkpoints import save_packed
    from domino_spec.drafter import DraftModel
    from tests.cli import tiny

    packed = save_packed(DraftModel.untrained(tiny.drafter_config()), tmp_path / "p", bits=8)
    arguments = ["serve", target, "--draft", packed, "--backend", "vllm"]
    dry = domino(*arguments, "--dry-run")
    assert "would be exported to" in dry.stderr
    assert not (tmp_path / "cache").exists()
    first, again = domino(*arguments), domino(*arguments)
    assert "exporting" in first.stderr
    assert "where it was exported before" in again.stderr
    (folder,) = (tmp_path / "cache" / "served").iterdir()
    assert str(folder) in dry.stdout
    assert str(folder) in " ".join(fake_engine.given(engine)["argv"])


def test_a_dry_run_shows_the_command_line(domino, engine, target, draft):
    result = domino(
        "serve", target, "--draft", draft, "--backend", "vllm", "--dry-run", "--api-key", KEY
    )
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    assert line.startswith("VLLM_NO_USAGE_STATS=1 ")
    assert "VLLM_API_KEY=***" in line
    assert f"bin/vllm serve {target} --served-model-name" in line
    assert KEY not in result.output
    assert not (engine / "given.json").exists()


def test_a_dry_run_needs_no_engine(domino, target, draft, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(config, "bind_sockets", lambda settings: [])
    arguments = ["serve", target, "--draft", draft, "--backend", "sglang"]
    result = domino(*arguments, "--dry-run")
    assert "shown as for SGLang 0.5.23: there is no SGLang here" in result.stderr
    assert result.stdout.startswith("python -m sglang.launch_server --model-path")
    real = domino(*arguments)
    assert real.exit_code == 1
    assert "no SGLang here; install it with" in errors_of(real)[0]


def test_the_engines_exit_code_is_ours(domino, engine, target, monkeypatch):
    monkeypatch.setenv("FAKE_EXIT", "5")
    assert domino("serve", target, "--backend", "vllm").exit_code == 5


def test_versions_matter_to_drafters_only(domino, tmp_path, monkeypatch, target, draft):
    place = fake_engine.make(tmp_path / "old", version="0.20.0")
    monkeypatch.setenv("FAKE_EXIT", "0")
    arguments = ["serve", target, "--backend", "vllm", "--engine-python", place / "python"]
    assert domino(*arguments).exit_code == 0
    refused = domino(*arguments, "--draft", draft)
    assert "vLLM 0.26 to 0.32" in errors_of(refused)[0]
    assert domino(*arguments, "--draft", draft, "--no-speculate").exit_code == 0


def test_another_targets_drafter_is_an_error(domino, engine, wide_target, draft):
    result = domino("serve", wide_target, "--draft", draft, "--backend", "vllm")
    assert "hidden size 32" in errors_of(result)[0]
    assert not (engine / "given.json").exists()


def test_a_stray_word_is_no_argument_of_the_backend(domino):
    assert "'stray' follows" in errors_of(domino("serve", "org/m", "stray"))[0]
