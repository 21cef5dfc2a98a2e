// One answer as it comes: its dominoes, its text, its counters, and what went wrong with it.

import { NOTHING, count, everyFrame, fixed, make, percent, rate, seconds } from "./dom.js";
import { Tally } from "./tally.js";
import { Row } from "./tiles.js";

const COUNTERS = [
  ["acceptance length", (tally) => fixed(tally.perCycle, 2)],
  ["tokens per second", (tally) => rate(tally.perSecond)],
  ["tokens", (tally) => String(tally.tokens)],
  ["cycles", (tally) => String(tally.cycles)],
  ["from drafts", (tally) => percent(tally.drafted)],
  ["acceptance rate", (tally) => percent(tally.acceptance)],
];

const SETTLED = 1000; // milliseconds after which nothing falls any more

const FINISHES = { length: "Cut off at the most tokens that were allowed.", stop: "" };

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
    this.say("Prefill…");
  }

  reset() {
    this.state = "queued"; // then waiting, writing, and done, stopped or failed
    this.error = null;
    this.text = "";
    this.ids = [];
    this.pieces = [];
    this.tally = new Tally();
    this.record = []; // of a race: [milliseconds since the request, chunk]
    this.row = new Row(this.name);
    this.words = make("div", "words");
    const text = make("p", "text");
    this.node = document.createTextNode("");
    text.append(this.node);
    this.note = make("p", "note soft");
    this.words.append(this.row.element, text);
    this.counters = make("dl", "counters");
    this.values = COUNTERS.map(([label]) => {
      const pair = make("div");
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

  // What the server sent, for a replay too.
  hear(chunk) {
    const now = performance.now();
    if (this.speculate !== null) this.record.push([now - this.tally.started, chunk]);
    this.take(chunk, now);
  }

  // Begin anew, at `now`. Called with milliseconds since then, what is returned shows all that had
  // come by that time of the run, and says whether that is everything.
  replay(now) {
    const { record } = this;
    const total = this.tally.elapsed;
    let next = 0;
    this.reset();
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
    const content = chunk.choices?.[0]?.delta?.content;
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
    if (content) {
      this.text += content;
      this.node.appendData(content);
    }
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
    if (state === "stopped") this.say("Stopped.");
    if (state === "done" && !this.ids.length) this.say("The answer is empty.");
    this.refresh();
  }

  skip() {
    this.end("stopped");
    this.say("Not run.");
  }

  fail(error) {
    this.error = error;
    this.end("failed");
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
    if (this.speculate === null) return;
    this.clock.textContent = seconds(this.tally.elapsed);
    this.speed.textContent = `${rate(this.tally.perSecond)} tokens/s`;
    this.bar.max = Math.max(this.expected, this.tally.tokens, 1);
    this.bar.value = this.tally.tokens;
    this.words.scrollTop = this.words.scrollHeight;
  }

  // In a word, for those who cannot see it.
  get summary() {
    const { tokens, cycles } = this.tally;
    return `${this.name}: ${count(tokens, "token", "tokens")} in ${count(cycles, "cycle", "cycles")}`;
  }
}
