// One answer as it comes: its dominoes, its text, its counters, and what went wrong with it.

import { NOTHING, count, everyFrame, fixed, make, percent, rate, seconds, view } from "./dom.js";
import { Formatted } from "./format.js";
import { pack, unpack } from "./store.js";
import { Tally } from "./tally.js";
import { Row } from "./tiles.js";

const COUNTERS = [
  ["acceptance length", (tally) => fixed(tally.perCycle, 2), "Tokens gained per cycle; 1 without drafts"],
  ["tokens per second", (tally) => rate(tally.perSecond), "After the first token"],
  ["tokens", (tally) => String(tally.tokens), "Words and pieces of words"],
  ["cycles", (tally) => String(tally.cycles), "How often the target was run after the prompt"],
  ["from drafts", (tally) => percent(tally.drafted), "Of the answer, what the drafter had guessed"],
  ["acceptance rate", (tally) => percent(tally.acceptance), "Of the drafter’s guesses, those that were right"],
];

const SETTLED = 1000; // milliseconds after which nothing falls any more

const FINISHES = { length: "Cut off at the most tokens that were allowed.", stop: "" };
const ENDS = ["done", "stopped", "failed"];

export class Answer {
  // `speculate` null leaves it to the server; a race says it of both answers.
  constructor({ name, speculate = null, expected }) {
    this.name = name;
    this.speculate = speculate;
    this.expected = expected;
    this.element = make("section", `lane ${speculate === false ? "plain" : "domino"}`);
    this.element.ariaLabel = name;
    this.look = everyFrame(() => this.refresh());
    this.reset();
  }

  // The request is sent now.
  start(now = performance.now()) {
    this.state = "waiting";
    this.tally.start(now);
    this.say("Reading the prompt…");
  }

  reset() {
    this.state = "queued"; // then waiting, writing, and one of ENDS
    this.error = null;
    this.text = "";
    this.ids = [];
    this.pieces = [];
    this.tally = new Tally();
    this.record = []; // [milliseconds since the request, chunk]
    this.row = new Row(this.name);
    this.words = make("div", "words");
    this.reasoning = make("p", "reasoning soft");
    this.reasoning.append(""); // one text, which grows
    this.reasoning.hidden = true;
    this.formatted = new Formatted();
    this.note = make("p", "note soft");
    this.words.append(this.row.element, this.reasoning, this.formatted.element);
    this.counters = make("dl", "counters");
    this.values = COUNTERS.map(([label, , meaning]) => {
      const pair = make("div");
      pair.title = meaning;
      const value = make("dd", "", NOTHING);
      pair.append(make("dt", "", label), value);
      this.counters.append(pair);
      return value;
    });
    this.element.replaceChildren(...(this.speculate === null ? [] : [this.head()]), this.words, this.note, this.counters);
  }

  head() {
    const head = make("header", "head");
    this.bar = make("progress");
    this.bar.max = this.expected;
    this.bar.value = 0;
    this.bar.ariaLabel = `${this.name}: tokens written`;
    this.clock = make("span", "clock", seconds(0));
    this.speed = make("span", "speed", `${NOTHING} tokens/s`);
    const line = make("p");
    line.append(make("strong", "", this.name), this.clock, this.speed);
    head.append(line, this.bar);
    return head;
  }

  get running() {
    return this.state === "waiting" || this.state === "writing";
  }

  // What the server sent: kept, for a replay and for a reload.
  hear(chunk) {
    const now = performance.now();
    this.record.push([now - this.tally.started, chunk]);
    this.take(chunk, now);
  }

  // Begin anew, at `now`. Called with milliseconds since then, what is returned shows all that had
  // come by that time of the run, and says whether that is everything.
  replay(now) {
    const { record } = this;
    const total = this.tally.elapsed;
    let next = 0;
    this.reset();
    this.record = record;
    this.start(now);
    return (at) => {
      for (; next < record.length && record[next][0] <= at; next += 1) {
        const [after, chunk] = record[next];
        this.take(chunk, now + after);
      }
      if (this.running && next === record.length && at >= total) this.end("done", now + total);
      this.look();
      return !this.running;
    };
  }

  take(chunk, now) {
    const { content, reasoning_content: reasoning } = chunk.choices?.[0]?.delta ?? {};
    const finish = chunk.choices?.[0]?.finish_reason;
    if (chunk.domino?.tokens.length) {
      if (this.state === "waiting") this.say("");
      this.state = "writing";
      this.tally.block(chunk.domino, now);
      this.row.add(chunk.domino);
      for (const token of chunk.domino.tokens) {
        this.ids.push(token.id);
        this.pieces.push(token.text);
      }
    }
    if (reasoning) {
      this.reasoning.firstChild.appendData(reasoning);
      this.reasoning.hidden = false;
    }
    if (content) this.text += content;
    if (finish) {
      this.tally.end(now); // the usage may come a little later
      this.say(FINISHES[finish] ?? `The server ended it: ${finish}.`);
    }
    if (chunk.usage) this.tally.usage = chunk.usage;
    this.look();
  }

  end(state, now = performance.now()) {
    this.tally.end(now);
    this.state = state;
    this.counters.hidden = !this.ids.length;
    setTimeout(() => this.row.settle(), SETTLED);
    if (state === "stopped") this.say(this.tally.started === null ? "Not run." : "Stopped.");
    if (state === "done" && !this.ids.length) this.say("The answer is empty.");
    this.refresh();
  }

  fail(error, now = performance.now()) {
    this.error = error;
    this.end("failed", now);
    this.say(error.words ?? error.message, "error");
  }

  say(words, className = "soft") {
    this.note.className = `note ${className}`;
    this.note.textContent = words;
  }

  refresh() {
    COUNTERS.forEach(([, read], i) => {
      const text = read(this.tally);
      if (this.values[i].textContent !== text) this.values[i].textContent = text;
    });
    if (view.text) this.formatted.show(this.text, this.running);
    if (this.speculate === null) return;
    this.clock.textContent = seconds(this.tally.elapsed);
    this.speed.textContent = `${rate(this.tally.perSecond)} tokens/s`;
    this.bar.max = Math.max(this.expected, this.tally.tokens, 1);
    this.bar.value = this.tally.tokens;
    if (this.running) this.words.scrollTop = this.words.scrollHeight;
  }

  // For a reload; one that is still written is one that was stopped.
  get kept() {
    return {
      state: ENDS.includes(this.state) ? this.state : "stopped",
      total: this.tally.started === null ? null : Math.round(this.tally.elapsed * 10) / 10,
      error: this.error && (this.error.words ?? this.error.message),
      record: this.record.map(pack),
    };
  }

  restore({ state, total, error, record }) {
    if (!ENDS.includes(state) || !(total === null || Number.isFinite(total))) throw new TypeError("state");
    if (total !== null) this.start(0);
    for (const packed of record) {
      const [after, chunk] = unpack(packed, this.ids.length);
      this.record.push([after, chunk]);
      this.take(chunk, after);
    }
    if (state === "failed") this.fail({ message: String(error) }, total ?? 0);
    else this.end(state, total ?? 0);
    this.row.settle();
  }

  // In a word, for those who cannot see it.
  get summary() {
    const { tokens, cycles } = this.tally;
    return `${this.name}: ${count(tokens, "token", "tokens")} in ${count(cycles, "cycle", "cycles")}`;
  }
}
