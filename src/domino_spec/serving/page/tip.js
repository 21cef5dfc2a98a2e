// What a tile has to tell: for the mouse, a finger and the keyboard alike.

import { everyFrame, find, make } from "./dom.js";
import { KINDS, probability, tokenOf } from "./tiles.js";

const GAP = 6;
const tip = find("tip");
let tile = null;

function tell(token) {
  const line = (name, value) => {
    const row = make("div");
    row.append(make("dt", "", name), make("dd", "", value));
    return row;
  };
  const list = make("dl");
  list.append(
    line("Position", String(token.position)),
    line("Token", String(token.id)),
    line("Probability", probability(token.probability)),
    line("Cycle", String(token.cycle)),
  );
  const text = make("code", "", token.text === "" ? "part of a character" : JSON.stringify(token.text));
  tip.replaceChildren(text, make("p", token.kind, KINDS[token.kind]), list);
  if (!token.lost?.length) return;
  const others = make("ul");
  others.append(...token.lost.map((branch) => make("li", "", JSON.stringify(branch))));
  tip.append(make("p", "others", "Also guessed here, and refused:"), others);
}

function place() {
  if (!tile) return;
  const box = tile.getBoundingClientRect();
  if (!tile.isConnected || box.width === 0 || box.bottom < 0 || box.top > innerHeight) return hide();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(GAP, box.left + box.width / 2 - width / 2), innerWidth - width - GAP);
  const above = box.top - height - GAP;
  tip.style.left = `${Math.max(GAP, left)}px`;
  tip.style.top = `${above >= GAP ? above : box.bottom + GAP}px`;
}

export function show(which) {
  const token = tokenOf(which);
  if (!token) return;
  tile?.removeAttribute("aria-describedby");
  tile = which;
  tell(token);
  tip.hidden = false;
  tile.setAttribute("aria-describedby", "tip");
  place();
}

export function hide() {
  tile?.removeAttribute("aria-describedby");
  tile = null;
  tip.hidden = true;
}

const tileAt = (event) => event.target.closest?.(".dominoes .tile") ?? null;

// From a tile to its neighbour, over the borders of blocks and stretches.
const ENDS = { nextElementSibling: "firstElementChild", previousElementSibling: "lastElementChild" };

function blockBeside(block, way) {
  return block[way] ?? block.parentElement[way]?.[ENDS[way]] ?? null;
}

// A tile with branches is one of two in its place.
const placeOf = (tile) => tile.closest(".place") ?? tile;
const tileIn = (place) => (place?.matches(".place") ? place.firstElementChild : place) ?? null;
const blockOf = (tile) => tile.closest(".block");

function tileBeside(from, way) {
  return tileIn(placeOf(from)[way] ?? blockBeside(blockOf(from), way)?.[ENDS[way]]);
}

function neighbour(from, key) {
  const row = from.closest(".dominoes");
  switch (key) {
    case "ArrowRight": return tileBeside(from, "nextElementSibling");
    case "ArrowLeft": return tileBeside(from, "previousElementSibling");
    case "ArrowDown": return tileIn(blockBeside(blockOf(from), "nextElementSibling")?.firstElementChild);
    case "ArrowUp": return tileIn(blockBeside(blockOf(from), "previousElementSibling")?.firstElementChild);
    case "Home": return row.querySelector(".tile");
    case "End": return tileIn(row.lastElementChild.lastElementChild.lastElementChild);
    default: return undefined;
  }
}

function walk(event) {
  const from = tileAt(event);
  if (!from || event.ctrlKey || event.altKey || event.metaKey) return;
  const to = neighbour(from, event.key);
  if (to === undefined) return;
  event.preventDefault();
  if (to) to.focus();
}

// One tab stop an answer: where the walk left off.
function stopHere(which) {
  const row = which.closest(".dominoes");
  for (const old of row.querySelectorAll('.tile[tabindex="0"]')) old.tabIndex = -1;
  which.tabIndex = 0;
}

export function watch(region) {
  region.addEventListener("pointerover", (event) => {
    const which = tileAt(event);
    if (which && event.pointerType === "mouse") show(which);
  });
  region.addEventListener("pointerout", (event) => {
    if (event.pointerType !== "mouse" || !tile) return;
    const held = document.activeElement;
    if (held?.matches(".dominoes .tile:focus-visible")) show(held);
    else hide();
  });
  region.addEventListener("focusin", (event) => {
    const which = tileAt(event);
    if (!which) return;
    stopHere(which);
    show(which);
  });
  region.addEventListener("focusout", (event) => {
    if (tileAt(event)) hide();
  });
  region.addEventListener("keydown", walk);
  document.addEventListener("click", (event) => {
    const which = tileAt(event);
    if (which) show(which);
    else hide();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });
  const again = everyFrame(place);
  document.addEventListener("scroll", again, { capture: true, passive: true });
  addEventListener("resize", again);
}
