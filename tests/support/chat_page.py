"""Driving the chat page: what is typed, what it shows, and the script its server follows."""

from __future__ import annotations

from tests.support.chat_server import Scene

PHONE, DESK = 360, 1100
MET = "document.title.includes('tiny-target')"
LAST = ".turn:last-child"
ENDED = f"document.querySelector('{LAST} .actions:not([hidden])') && document.title"
EVIL = '<img src=x onerror="document.title=1"><script>1</script>'
FALL = Scene(
    [
        [("When", False, 0.71)],
        [(" one", True, 0.98), (" falls", True, 0.9), (",", False, 0.5)],
        [("\n\n", False, 0.2)],
        [("the", True, 0.99996), (" ", True, 0.4), ("", True, 0.0001), ("é", False, 0.6)],
        [(EVIL, True, 0.3), ("<|im_end|>", True, 0.8)],
    ],
    rejected=7,
)
WRITTEN = "".join(t for block in FALL.blocks for t, _, _ in block).removesuffix("<|im_end|>")
HOLDING = Scene(FALL.blocks, rejected=7, hold_after=2, hold_plain_after=2)
TILES = f"""[...document.querySelectorAll('{LAST} .block')].map((block) =>
  [...block.querySelectorAll('.tile')].map((tile) =>
    [tile.classList[1], tile.classList[2], tile.textContent]))"""
PARAGRAPHS = WRITTEN.split("\n\n")


def counters(tab, lane=".domino"):
    return tab.ask(
        f"Object.fromEntries([...document.querySelectorAll('{LAST} {lane} .counters > div')]"
        ".map((e) => [e.querySelector('dt').textContent, e.querySelector('dd').textContent]))"
    )


def said(tab, selector):
    return tab.ask(f"document.querySelector({selector!r})?.textContent ?? null")


def paragraphs(tab, lane=".domino"):
    """An answer as text; the view of before comes back."""
    return tab.ask(
        f"""(() => {{
          const [was] = document.querySelectorAll('input[name=view]:checked');
          document.querySelector('input[value=text]').click();
          const found = [...document.querySelectorAll('{LAST} {lane} .text > *')];
          was.click();
          return found.map((e) => e.textContent);
        }})()"""
    )


def copied(tab, button=f"{LAST} .actions button"):
    """What a button puts on the clipboard."""
    return tab.ask(
        f"""new Promise((resolve) => {{
          navigator.clipboard.writeText = async (text) => resolve(text);
          document.querySelector('{button}').click();
        }})"""
    )


def write(tab, prompt):
    tab.ask("document.getElementById('prompt').focus()")
    tab.type(prompt)


def send(tab, prompt):
    write(tab, prompt)
    tab.press("Enter")
    tab.until(ENDED)


def race(tab, prompt):
    write(tab, prompt)
    tab.click("#race")


def verdict(tab):
    """The headline of a race that ended, and its sentences."""
    tab.until(ENDED)
    shown = f"{LAST} .headline > *, {LAST} .verdict:not([hidden]) p"
    return tab.ask(f"[...document.querySelectorAll('{shown}')].map((e) => e.innerText)")
