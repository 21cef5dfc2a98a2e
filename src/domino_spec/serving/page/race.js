// What a race showed, in words. Nothing here touches the page.

import { count, fixed, rate, seconds } from "./dom.js";

// Closer than this is no victory.
const DRAW = 1.05;

const times = (value) => `${fixed(value, value < 10 ? 2 : 0)}×`;

function timing(domino, plain) {
  const [d, p] = [domino.tally.elapsed, plain.tally.elapsed];
  const took = `Domino took ${seconds(d)}, plain decoding ${seconds(p)}`;
  if (p / d >= DRAW) return `${took}: ${times(p / d)}.`;
  if (d / p >= DRAW) return `Plain decoding won. ${took}: Domino ran at ${times(p / d)}.`;
  return `A draw. ${took}.`;
}

// Rates over the time in which both were writing, so that both had the same share of the machine.
function rates(domino, plain) {
  const [a, b] = [domino.tally, plain.tally];
  const from = Math.max(a.marks[0][0], b.marks[0][0]);
  const to = Math.min(a.ended, b.ended);
  const mine = a.between(from, to);
  const theirs = b.between(from, to);
  if (!(to > from) || !(mine + theirs)) {
    return "They were never writing at the same time, so there are no rates to compare.";
  }
  const pace = (tokens) => rate((1000 * tokens) / (to - from));
  const ratio = theirs ? `: ${times(mine / theirs)}` : "";
  return (
    `While both were writing (${seconds(to - from)}), Domino made ${pace(mine)} tokens ` +
    `a second and plain decoding ${pace(theirs)}${ratio}.`
  );
}

function alone(domino, plain) {
  const [d, p] = [domino.tally.ended, plain.tally.ended];
  const last = d < p ? "plain decoding" : "Domino";
  return `For the last ${seconds(Math.abs(d - p))} ${last} had the machine to itself.`;
}

function texts(domino, plain) {
  const [a, b] = [domino.ids, plain.ids];
  const at = a.findIndex((id, i) => id !== b[i]);
  if (at < 0 && a.length === b.length) {
    return `The texts are identical (${count(a.length, "token", "tokens")}).`;
  }
  const parted = at < 0 ? a.length : at;
  const piece = (lane) =>
    parted < lane.pieces.length ? JSON.stringify(lane.pieces[parted]) : "the end";
  const uneven =
    a.length === b.length
      ? ""
      : ` They wrote ${a.length} and ${b.length} tokens, so the rates compare better than the times.`;
  return (
    `The texts part at token ${parted}: Domino has ${piece(domino)}, plain decoding ` +
    `${piece(plain)}.${uneven}`
  );
}

// Sentences; `seed` is what both were given.
export function verdict(domino, plain, seed) {
  for (const lane of [domino, plain]) {
    if (lane.state === "failed") return [`No result: ${lane.name} failed.`];
  }
  if (domino.state === "stopped" || plain.state === "stopped") {
    return ["No result: the race was stopped."];
  }
  if (!domino.ids.length || !plain.ids.length) return ["No result: an answer is empty."];
  return [
    timing(domino, plain),
    rates(domino, plain),
    alone(domino, plain),
    texts(domino, plain),
    `Both had the seed ${seed}.`,
  ];
}
