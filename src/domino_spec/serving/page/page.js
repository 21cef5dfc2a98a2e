// The page itself: who may be pressed when, and the conversation.

import { chat, facts } from "./api.js";
import { button, find, make } from "./dom.js";
import { follow } from "./follow.js";
import { askForKey } from "./key.js";
import { FieldError, fit, reveal, sampling, system } from "./settings.js";
import { watch } from "./tip.js";
import { Turn } from "./turn.js";

const prompt = find("prompt");
const list = find("turns");
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
  const { model, device, slots, context, version } = server;
  const parts = [model, words(server), device];
  find("facts").textContent = parts.filter(Boolean).join(" · ");
  find("facts").title = `${slots} slots, ${context} tokens of context, domino-spec ${version}`;
  document.title = `${model} · Domino`;
  if (context) fit(context);
  ready();
}

function words({ draft, speculates }) {
  if (!speculates) return draft ? "speculation is off" : "no drafter";
  return draft ? `drafts by ${draft}` : "with drafts";
}

const canRace = () => Boolean(server?.speculates);

function ready() {
  const busy = stopper !== null;
  find("send").disabled = busy;
  find("race").disabled = busy || !canRace();
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
      follow.keep();
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
    follow.keep();
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
  tell("Writing…");
  turn.begin(settings.max_tokens ?? server.context);
  follow.jump();
  const clock = turn.race ? setInterval(() => turn.answers.forEach((a) => a.running && a.look()), 100) : 0;
  for (const answer of turn.answers) {
    if (controller.signal.aborted || turn.failure) answer.skip();
    else await listen(turn, answer, body, controller.signal);
  }
  clearInterval(clock);
  if (turn.comparable) {
    tell("Replaying both…");
    await replay(turn, controller.signal);
  }
  const words = turn.end(seeded.seed);
  stopper = null;
  const onStop = document.activeElement === find("stop");
  ready();
  if (onStop) prompt.focus({ preventScroll: true });
  follow.keep();
  tell(words);
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

async function send(race) {
  const said = prompt.value.trim();
  if (stopper) return;
  if (!said) return prompt.focus();
  const settings = settingsOrComplain();
  if (!settings || (race && !canRace())) return;
  if (!server) await meet();
  if (!server || stopper) return;
  notice("");
  const turn = new Turn(said, { race, expected: settings.max_tokens ?? server.context, retry: again, tell });
  turns.push(turn);
  list.append(turn.element);
  prompt.value = "";
  await run(turn, settings);
}

function again(turn) {
  const settings = stopper ? null : settingsOrComplain();
  if (!settings) return;
  notice("");
  run(turn, settings);
}

function clear() {
  stopper?.abort();
  const old = turns;
  turns = [];
  list.replaceChildren();
  notice(
    "The conversation was cleared.",
    button("Undo", "", () => {
      turns = [...old, ...turns];
      list.prepend(...old.map((turn) => turn.element));
      notice("");
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
for (const choice of document.querySelectorAll("input[name=view]")) {
  choice.addEventListener("change", () => {
    document.documentElement.dataset.view = choice.value;
  });
  if (choice.checked) document.documentElement.dataset.view = choice.value; // kept over a reload
}

find("settings").open = matchMedia("(min-width: 900px)").matches;
watch(list);
ready();
meet();
