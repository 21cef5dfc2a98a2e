// What a race showed, in words. Nothing here touches the page.

import { count, fixed, rate, seconds } from "./dom.js";

// Closer than this is no difference, shorter than that no measurement.
const DRAW = 1.05;
const SHORTEST = 30;

const times = (value) => `${fixed(value, value < 10 ? 2 : 0)}×`;
const tokens = (answer) => count(answer.ids.length, "token", "tokens");

// Tokens per second from the request to the last token: an answer's length does not flatter it.
const speed = ({ ids, tally }) => (1000 * ids.length) / tally.elapsed;

function headline(drafts, plain) {
  if (Math.min(drafts.ids.length, plain.ids.length) < SHORTEST) return "Too short to tell";
  const ratio = speed(drafts) / speed(plain);
  if (ratio >= DRAW) return `${times(ratio)} as fast with drafts`;
  if (ratio > 1 / DRAW) return `No clear difference (${times(ratio)})`;
  return `Slower with drafts (${times(ratio)})`;
}

function timing(drafts, plain) {
  const both = `With drafts ${tokens(drafts)} took ${seconds(drafts.tally.elapsed)}, without drafts ` +
    `${tokens(plain)} took ${seconds(plain.tally.elapsed)}`;
  if (Math.min(drafts.ids.length, plain.ids.length) < SHORTEST) {
    return `${both}. Under ${SHORTEST} tokens chance decides: ask for a longer answer.`;
  }
  return `${both}: ${rate(speed(drafts))} against ${rate(speed(plain))} tokens per second.`;
}

function rates(drafts, plain) {
  const [mine, theirs] = [drafts.tally.perSecond, plain.tally.perSecond];
  if (!mine || !theirs) return "An answer is too short for a rate.";
  return `After the first token it was ${rate(mine)} against ${rate(theirs)} tokens per second.`;
}

function texts(drafts, plain) {
  const [a, b] = [drafts.ids, plain.ids];
  const at = a.findIndex((id, i) => id !== b[i]);
  if (at < 0 && a.length === b.length) return `The texts are identical (${tokens(drafts)}).`;
  const parted = at < 0 ? a.length : at;
  const piece = (answer) =>
    parted < answer.pieces.length ? JSON.stringify(answer.pieces[parted]) : "the end";
  return `The texts part at token ${parted}: with drafts ${piece(drafts)}, without ${piece(plain)}.`;
}

// A headline and sentences; `seed` is what both were given.
export function verdict(drafts, plain, seed) {
  for (const answer of [drafts, plain]) {
    if (answer.state === "failed") return ["No result", `The run ${answer.name.toLowerCase()} failed.`];
  }
  if (drafts.state === "stopped" || plain.state === "stopped") {
    return ["No result", "The race was stopped."];
  }
  if (!drafts.ids.length || !plain.ids.length) return ["No result", "An answer is empty."];
  return [
    headline(drafts, plain),
    timing(drafts, plain),
    rates(drafts, plain),
    texts(drafts, plain),
    `Both had the seed ${seed} and computed the whole prompt, one run after the other.`,
  ];
}
