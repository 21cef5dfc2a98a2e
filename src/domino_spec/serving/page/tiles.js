// A committed block as a row of dominoes. Blocks are only ever added: a long answer stays smooth.

import { fixed, make } from "./dom.js";

const SYMBOLS = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };
const NAMES = { " ": "space", "\n": "line break", "\t": "tab", "\r": "carriage return" };
const PART = "◌";
// Paragraphs of tiles, so that the browser lays out the last one only.
const ROOMY = 24;
const FULL = 96;
// Milliseconds: between two falling blocks, and after which one has fallen.
const PAUSE = 80;
const FALL = 600;
const BRANCHES = 2; // of those that lost at a place, how many are seen at once

const tokens = new WeakMap();
export const tokenOf = (tile) => tokens.get(tile);

export const KINDS = {
  draft: "guessed by the drafter, accepted by the target",
  own: "the target’s own token",
  first: "first token, from reading the prompt; nothing was guessed",
};

function kindOf(token, cycle) {
  if (cycle === 0) return "first";
  return token.accepted ? "draft" : "own";
}

// What the tile shows: spaces inside words as they are, everything else invisible as a symbol.
export function shown(text) {
  if (text === "") return PART;
  const blank = text.trim() === "";
  if (blank && text.length > 4 && new Set(text).size === 1) {
    return `${SYMBOLS[text[0]] ?? "␣"}×${text.length}`;
  }
  return text.replace(/[\n\t\r]/g, (c) => SYMBOLS[c]).replace(/ /g, blank ? "␣" : " ");
}

function spoken(text) {
  if (text === "") return "part of a character";
  if (text.trim() === "") return [...text].map((c) => NAMES[c] ?? "blank").join(", ");
  return null;
}

export function probability(value) {
  if (typeof value !== "number") return "not told";
  if (value > 0.9995) return "over 99.9 %";
  return value < 0.0005 ? "under 0.1 %" : `${fixed(100 * value, 1)} %`;
}

// One to six dots, as on a domino.
const pips = (value) =>
  typeof value === "number" ? ` p${Math.min(6, Math.max(1, Math.ceil(6 * value)))}` : "";

function tileOf(token, cycle) {
  const kind = kindOf(token, cycle);
  const tile = make("button", `tile ${kind}${pips(token.probability)}`, shown(token.text));
  tile.type = "button";
  tile.tabIndex = -1;
  const name = spoken(token.text);
  if (name) tile.ariaLabel = name;
  tokens.set(tile, { ...token, cycle, kind });
  return tile;
}

// A tile and, under it, what the drafter's tree had guessed for the same place and the target refused.
function placeOf(token, cycle) {
  const tile = tileOf(token, cycle);
  if (!token.lost?.length) return tile;
  document.documentElement.dataset.branches = ""; // the legend tells of them
  const fork = make("span", "fork");
  fork.ariaHidden = "true"; // the tile tells of all of them
  fork.append(...token.lost.slice(0, BRANCHES).map((branch) => make("s", "", shown(branch).trim())));
  const more = token.lost.length - BRANCHES;
  if (more > 0) fork.append(make("span", "", `+${more}`));
  const place = make("span", "place");
  place.append(tile, fork);
  return place;
}

export class Row {
  constructor(name) {
    this.element = make("div", "dominoes");
    this.element.role = "group";
    this.element.ariaLabel = `${name} as dominoes; arrow keys walk the tiles`;
    this.stretch = null;
    this.broken = false;
    this.falling = []; // [block, since]
  }

  add({ cycle, tokens: committed }) {
    if (!committed.length) return;
    const block = make("span", "block");
    block.role = "group";
    block.ariaLabel = cycle === 0 ? "after the prompt" : `cycle ${cycle}`;
    block.append(...committed.map((token) => placeOf(token, cycle)));
    const size = this.stretch?.childElementCount ?? FULL;
    if (size >= FULL || (this.broken && size >= ROOMY)) {
      const first = this.stretch === null;
      this.stretch = make("div", "stretch");
      this.element.append(this.stretch);
      if (first) block.querySelector(".tile").tabIndex = 0;
    }
    this.stretch.append(block);
    this.broken = committed.some((token) => token.text.includes("\n"));
    this.fall(block);
  }

  // Every moving tile is a layer of its own: of a fast answer's blocks only some are seen to fall.
  fall(block) {
    const now = performance.now();
    if (now - (this.falling.at(-1)?.[1] ?? 0) < PAUSE) return;
    const [done, still] = [[], []];
    for (const one of this.falling) (now - one[1] > FALL ? done : still).push(one);
    for (const [old] of done) old.classList.remove("fresh");
    block.classList.add("fresh");
    this.falling = [...still, [block, now]];
  }

  // Nothing falls twice: a class left behind would start again whenever the view changes.
  settle() {
    for (const [block] of this.falling) block.classList.remove("fresh");
    this.falling = [];
  }
}
