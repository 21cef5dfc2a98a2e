"""The process that grammars are compiled in first."""

import pytest

from domino_spec.errors import InputError
from domino_spec.grammars import Grammar, Vocabulary
from domino_spec.grammars.sandbox import GrammarSandbox
from tests.support.tokens import small_tokenizer


def test_a_process_that_died_while_idle_is_replaced():
    """Without, the next grammar would be refused for a death that it did not cause."""
    tokenizer = small_tokenizer()
    vocabulary = Vocabulary.of(tokenizer, rows=len(tokenizer), ends=[tokenizer.eos_token_id])
    sandbox = GrammarSandbox(lambda: vocabulary)
    try:
        sandbox.check(Grammar.regex("a+"))
        first = sandbox._process
        with pytest.raises(InputError, match="regular expression cannot be compiled"):
            sandbox.check(Grammar.regex("(a"))
        assert sandbox._process is first, "a wrong grammar is no reason to start anew"
        first.kill()
        first.wait()
        sandbox.check(Grammar.regex("b+"))
        assert sandbox._process is not first
    finally:
        sandbox.close()
    assert sandbox._process is None
