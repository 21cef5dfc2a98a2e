"""Structured outputs: grammars, and matchers that say which tokens may follow; no PyTorch."""

from domino_spec.grammars.grammar import Grammar
from domino_spec.grammars.matcher import CompiledGrammar, GrammarCompiler, Matcher, Vocabulary

__all__ = ["CompiledGrammar", "Grammar", "GrammarCompiler", "Matcher", "Vocabulary"]
