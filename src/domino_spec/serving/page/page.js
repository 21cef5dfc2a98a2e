// The page itself: who may be pressed when, and the conversation.

import { chat, facts } from "./api.js";
import { CANNOT_COPY, button, copied, find, make, view } from "./dom.js";
import { follow } from "./follow.js";
import { askForKey } from "./key.js";
import { FieldError, fit, remember, reveal, sampling, system } from "./settings.js";
import { store } from "./store.js";
import { watch } from "./tip.js";
import { Turn } from "./turn.js";

// Of the race on the empty page: long enough to tell, short enough to wait for.
const RACE_TOKENS = 200;
const COPIED = 1500; // milliseconds for which a button says so

const prompt = find("prompt");
const list = find("turns");
const examples = document.querySelectorAll(".example");
let server = null;
let turns = [];
let stopper = null; // of the answer that is being written

// --- What is said to the person -------------------------------------------------------------

const tell = (words) => {
  find("status").textContent = words;
};

function notice(words, ...buttons) {
  const box = find("notice");
  box.hidden = !words;
  box.replaceChildren(...(words ? [make("p", "", words), ...buttons] : []));
}

function explain(error) {
  notice(error.words ?? error.message, button("Try again", "", meet));
}

// --- The server -----------------------------------------------------------------------------

async function meet() {
  try {
    server = await facts();
  } catch (error) {
    if (error.status === 401 && (await askForKey())) return meet();
    find("facts").textContent = "No server";
    explain(error);
    return;
  }
  notice("");
  const { model, slots, context, version } = server;
  find("facts").replaceChildren(...introduction(server));
  find("facts").title = `${slots} slots, ${context} tokens of context, domino-spec ${version}`;
  document.title = `${model} · Domino`;
  if (context) fit(context);
  ready();
}

// Who answers, who helps, and on what.
function introduction({ model, draft, speculates, device, dtype }) {
  const name = (words) => make("b", "", words.split("/").at(-1)); // of a folder its last part
  const machine = /^cuda/.test(device) ? "a GPU" : device === "cpu" ? "a CPU" : device;
  const where = ` Running on ${machine}${dtype ? ` in ${dtype}` : ""}.`;
  if (!speculates) {
    const why = draft ? "Its drafter is switched off" : "It has no drafter";
    return [name(model), ` answers. ${why}, so it writes one token at a time.${where}`];
  }
  const drafter = draft ? [name(draft), " guesses"] : ["A drafter guesses"];
  return [name(model), " answers. ", ...drafter, ` its next words, which only makes it faster.${where}`];
}

const canRace = () => Boolean(server?.speculates);

function ready() {
  const busy = stopper !== null;
  find("send").disabled = busy;
  find("race").disabled = busy || !canRace();
  find("first-race").hidden = Boolean(server) && !canRace();
  for (const example of examples) example.disabled = busy;
  find("stop").hidden = !busy;
  find("clear").disabled = !turns.length;
  const why = find("why-no-race");
  why.hidden = !server || canRace();
  why.textContent = server?.draft
    ? "No race: this server runs without speculation."
    : "No race: this server has no drafter, so all decoding is plain.";
  find("welcome").hidden = turns.length > 0;
  list.classList.toggle("busy", busy);
}

// --- Asking -----------------------------------------------------------------------------------

// Turns without an answer are left out: a chat template wants the two in turns.
function messages(turn) {
  const before = turns.slice(0, turns.indexOf(turn)).filter((old) => old.text);
  return [
    ...system(),
    ...before.flatMap((old) => [
      { role: "user", content: old.said },
      { role: "assistant", content: old.text },
    ]),
    { role: "user", content: turn.said },
  ];
}

async function listen(turn, answer, body, signal) {
  const { speculate } = answer;
  // Racers compute the whole prompt: a prefix that one finds in the caches is no merit of drafts.
  const domino = { blocks: true, ...(speculate === null ? {} : { speculate, reuse: false }) };
  answer.start();
  try {
    for await (const chunk of chat({ ...body, domino }, signal)) {
      answer.hear(chunk);
      if (!turn.race) follow.keep();
    }
    answer.end("done");
  } catch (error) {
    if (signal.aborted) answer.end("stopped");
    else answer.fail(error);
  }
  turn.ended(answer);
}

// Both runs of a race from their beginning, as they came; a stop goes to their end at once.
async function replay(turn, signal) {
  const begun = performance.now();
  const shows = turn.answers.map((answer) => answer.replay(begun));
  const due = () => (signal.aborted ? Infinity : performance.now() - begun);
  while (!shows.map((show) => show(due())).every(Boolean)) {
    await new Promise((resolve) => setTimeout(resolve, 16));
  }
}

async function run(turn, settings) {
  const controller = new AbortController();
  const seeded = turn.race ? { seed: Math.floor(Math.random() * 2 ** 31), ...settings } : settings;
  const body = {
    model: server?.model,
    messages: messages(turn),
    ...seeded,
    stream: true,
    stream_options: { include_usage: true },
  };
  stopper = controller;
  const pressed = document.activeElement;
  ready();
  // A button that is switched off drops the focus; the one to press next takes it.
  if (pressed instanceof HTMLButtonElement) find("stop").focus();
  tell(turn.race ? "Racing…" : "Writing…");
  turn.begin(settings.max_tokens ?? server.context, seeded.seed);
  if (!turn.race) follow.jump();
  const clock = turn.race ? setInterval(() => turn.answers.forEach((a) => a.running && a.look()), 100) : 0;
  for (const [number, answer] of turn.answers.entries()) {
    if (controller.signal.aborted || turn.failure) {
      answer.end("stopped");
      continue;
    }
    turn.phase(number);
    if (turn.race && !number) follow.pin(turn.headline);
    await listen(turn, answer, body, controller.signal);
  }
  clearInterval(clock);
  if (turn.comparable) {
    tell("Replaying both…");
    turn.phase(2);
    await replay(turn, controller.signal);
  }
  const words = turn.end();
  stopper = null;
  const onStop = document.activeElement === find("stop");
  ready();
  if (onStop) prompt.focus({ preventScroll: true });
  if (turn.race) follow.pin(turn.headline);
  else follow.keep();
  tell(words);
  keep();
  const { failure } = turn;
  if (failure?.status === 401 && (await askForKey())) {
    if (!server) await meet();
    if (turns.includes(turn) && !stopper) again(turn);
  }
}

function settingsOrComplain() {
  try {
    return sampling();
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    notice(error.message);
    reveal(error.field);
    return null;
  }
}

// An example brings its own words; what was typed meanwhile stays.
async function send(race, { example = null, most = Infinity } = {}) {
  const said = example ?? prompt.value.trim();
  if (stopper) return;
  if (!said) return prompt.focus();
  const settings = settingsOrComplain();
  if (settings && most < (settings.max_tokens ?? Infinity)) settings.max_tokens = most;
  if (!settings || (race && !canRace())) return;
  if (!server) await meet();
  if (!server || stopper) return;
  notice("");
  const turn = new Turn(said, { race, expected: settings.max_tokens ?? server.context, ...able });
  turns.push(turn);
  list.append(turn.element);
  if (example === null) prompt.value = "";
  await run(turn, settings);
}

function again(turn) {
  const settings = stopper ? null : settingsOrComplain();
  if (!settings) return;
  notice("");
  run(turn, settings);
}

// --- What a reload keeps ----------------------------------------------------------------------

const able = { retry: again, tell };

let leaving = false;

function keep() {
  if (!leaving) store.turns = turns.map((turn) => turn.kept);
}

function restore() {
  for (const kept of store.turns) {
    try {
      turns.push(Turn.restore(kept, able));
    } catch {
      // Not written by this page: as if it had not been there.
    }
  }
  list.append(...turns.map((turn) => turn.element));
  if (turns.length) follow.jump();
}

function clear() {
  stopper?.abort();
  const old = turns;
  turns = [];
  list.replaceChildren();
  keep();
  notice(
    "The conversation was cleared.",
    button("Undo", "", () => {
      turns = [...old, ...turns];
      list.prepend(...old.map((turn) => turn.element));
      notice("");
      keep();
      ready();
      prompt.focus();
    }),
  );
  ready();
  prompt.focus();
}

// --- Keys and buttons ------------------------------------------------------------------------

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(false);
});
find("race").addEventListener("click", () => send(true));
find("stop").addEventListener("click", () => stopper?.abort());
find("clear").addEventListener("click", clear);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(false);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !find("key").open) stopper?.abort();
});
for (const example of examples) {
  const race = example.id === "race-example";
  const words = race ? find("race-prompt") : example;
  example.addEventListener("click", () =>
    send(race, { example: words.textContent.trim().replace(/\s+/g, " "), ...(race ? { most: RACE_TOKENS } : {}) }));
}
list.addEventListener("click", async ({ target }) => {
  const pressed = target.closest?.(".copy");
  if (!pressed) return;
  const done = await copied(pressed.closest("figure").querySelector("code").textContent);
  tell(done ? "Copied." : CANNOT_COPY);
  if (!done) return;
  pressed.textContent = "Copied";
  setTimeout(() => {
    pressed.textContent = "Copy";
  }, COPIED);
});
// The browser cuts the answer's connection when it leaves the page; it was not the server.
for (const event of ["beforeunload", "pagehide"]) {
  addEventListener(event, () => {
    if (stopper) keep();
    leaving = true;
  });
}
addEventListener("pageshow", () => {
  leaving = false;
});

remember();
for (const choice of document.querySelectorAll("input[name=view]")) {
  choice.addEventListener("change", () => {
    view.show(choice.value);
    for (const turn of turns) for (const answer of turn.answers) answer.refresh();
  });
  if (choice.checked) view.show(choice.value);
}
restore();

find("settings").open = matchMedia("(min-width: 900px)").matches;
// On a phone the focus would bring the keyboard over what there is to read.
if (matchMedia("(min-width: 700px)").matches) prompt.focus({ preventScroll: true });
watch(list);
ready();
meet();
