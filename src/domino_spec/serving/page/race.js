// What a race showed, in words. Nothing here touches the page.

import { count, fixed, rate, seconds } from "./dom.js";

// Closer than this is no victory.
const DRAW = 1.05;

const times = (value) => `${fixed(value, value < 10 ? 2 : 0)}×`;

function timing(domino, plain) {
  const [d, p] = [domino.tally.elapsed, plain.tally.elapsed];
  const took = `Domino took ${seconds(d)}, plain decoding ${seconds(p)}`;
  if (p / d >= DRAW) return `${took}: a speedup of ${times(p / d)}.`;
  if (d / p >= DRAW) return `Plain decoding won. ${took}: a speedup of ${times(p / d)}.`;
  return `A draw. ${took}.`;
}

// After each one's first token: the time of the prefill is in the total above.
function rates(domino, plain) {
  const [mine, theirs] = [domino.tally.perSecond, plain.tally.perSecond];
  if (!mine || !theirs) return "An answer is too short for a rate.";
  return (
    `After the first token Domino wrote ${rate(mine)} tokens per second and plain decoding ` +
    `${rate(theirs)}: ${times(mine / theirs)}.`
  );
}

function texts(domino, plain) {
  const [a, b] = [domino.ids, plain.ids];
  const at = a.findIndex((id, i) => id !== b[i]);
  if (at < 0 && a.length === b.length) {
    return `The texts are identical (${count(a.length, "token", "tokens")}).`;
  }
  const parted = at < 0 ? a.length : at;
  const piece = (answer) =>
    parted < answer.pieces.length ? JSON.stringify(answer.pieces[parted]) : "the end";
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
  for (const answer of [domino, plain]) {
    if (answer.state === "failed") return [`No result: ${answer.name} failed.`];
  }
  if (domino.state === "stopped" || plain.state === "stopped") {
    return ["No result: the race was stopped."];
  }
  if (!domino.ids.length || !plain.ids.length) return ["No result: an answer is empty."];
  return [
    timing(domino, plain),
    rates(domino, plain),
    texts(domino, plain),
    `Both had the seed ${seed}.`,
  ];
}
