from __future__ import annotations

import json

import pytest

from domino_spec.cli.render import TokenWriter
from tests.cli import tiny


def test_two_turns_are_one_conversation(domino, target, draft):
    result = domino("chat", target, "--draft", draft, "-n", 8, stdin="hello\nmore\n/stats\n/exit\n")
    assert result.exit_code == 0, result.output
    speeds = [line for line in result.stderr.splitlines() if "acceptance length" in line]
    assert len(speeds) == 3  # two answers and /stats
    assert speeds[2].startswith("16 tokens")
    assert "accepted by position" in result.stderr
    assert "\x1b[" not in result.output
    fresh = domino("chat", target, "--draft", draft, "-n", 8, stdin="more\n")
    assert fresh.exit_code == 0  # the end of stdin leaves
    assert not result.stdout.endswith(fresh.stdout)  # the second turn saw the first


def test_clear_starts_again(domino, target, draft):
    twice = domino("chat", target, "--draft", draft, "-n", 8, stdin="hello\n/clear\nhello\n")
    once = domino("chat", target, "--draft", draft, "-n", 8, stdin="hello\n")
    assert twice.stdout == once.stdout * 2
    assert "a new conversation" in twice.stderr


def test_an_answer_is_what_generate_gives(domino, target, draft):
    chat = domino("chat", target, "--draft", draft, "-n", 8, "--system", "be brief", stdin="hello")
    run = domino("generate", target, "hello", "-n", 8, "--system", "be brief", "--json")
    assert chat.stdout.rstrip("\n") == json.loads(run.stdout)["generations"][0]["text"].rstrip("\n")


def test_commands(domino, target):
    result = domino("chat", target, stdin="/help\n\n/stats\n/fly away\n/exit\nnever read\n")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "decoding plainly: no --draft was given" in result.stderr
    assert "/clear" in result.stderr
    assert "0 tokens" in result.stderr
    assert "error: there is no command /fly" in result.stderr


def test_a_conversation_that_no_longer_fits_is_a_line(domino, target, draft):
    lines = "x " * tiny.CONTEXT + "\nhello\n"
    result = domino("chat", target, "--draft", draft, "-n", 250, stdin=lines)
    assert result.exit_code == 0
    assert "no longer fits the target's context of 256; /clear" in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout.strip()  # the next, shorter one was answered, cut to the room left


def test_a_target_without_a_chat_template_is_refused(domino, base_target):
    result = domino("chat", base_target, stdin="hello\n")
    assert result.exit_code == 1
    assert "no chat template" in result.stderr


def test_interrupting_an_answer_keeps_the_conversation(domino, target, monkeypatch):
    write = TokenWriter.write
    interrupted = []

    def interrupt_once(self, token):
        write(self, token)
        if self.tokens == 3 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr(TokenWriter, "write", interrupt_once)
    result = domino("chat", target, "-n", 8, "--ignore-eos", stdin="hello\nmore\n")
    assert result.exit_code == 0
    assert "interrupted" in result.stderr
    assert "3 tokens in" in result.stderr
    assert "8 tokens in" in result.stderr


@pytest.mark.parametrize("end", ["/exit\n", ""])
def test_leaving_at_once(domino, target, end):
    assert domino("chat", target, stdin=end).exit_code == 0
