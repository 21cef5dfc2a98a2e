"""The demo's own prompts: one of each kind of work."""

from __future__ import annotations

PROMPTS = (
    "A baker sells 14 loaves in the morning and twice as many in the afternoon. Each loaf costs "
    "3 dollars. How much money does the baker take that day? Think step by step.",
    "Write a Python function count_vowels(text) that returns how many vowels a string has.",
    "Explain in a few sentences why the sky looks blue during the day and red at sunset.",
    "Rewrite this sentence so that it sounds polite: Send me the report now, you are late again.",
    "List five things to pack for a rainy weekend in the mountains.",
    "Translate into plain words: The committee deferred its deliberations pending further review.",
)
