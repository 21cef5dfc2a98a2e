// One exchange: what was said, the answer or the two of a race, and what can be done with it.

import { Answer } from "./answer.js";
import { CANNOT_COPY, button, copied, make } from "./dom.js";
import { verdict } from "./race.js";

const PHASES = [
  ["Racing: with drafts first…", "Then the same prompt without. Each runs alone, so that neither slows the other."],
  ["Racing: now without drafts…", "The same prompt and the same seed, a token at a time."],
  ["Both, side by side", "A replay at their true times. Stop skips to the end."],
];

export class Turn {
  constructor(said, { race, expected, retry, tell }) {
    this.said = said;
    this.race = race;
    this.seed = null;
    this.element = make("li", "turn");
    const lanes = make("div", race ? "lanes race" : "lanes");
    this.answers = race
      ? [
          new Answer({ name: "With drafts", speculate: true, expected }),
          new Answer({ name: "Without drafts", speculate: false, expected }),
        ]
      : [new Answer({ name: "Answer", expected })];
    lanes.append(...this.answers.map((answer) => answer.element));
    this.headline = make("div", "headline");
    this.result = make("div", "verdict");
    this.result.hidden = true;
    this.actions = make("div", "actions");
    this.actions.append(
      button("Copy", "", async ({ currentTarget }) => {
        currentTarget.disabled = true;
        tell((await copied(this.text)) ? "Copied." : CANNOT_COPY);
        currentTarget.disabled = false;
      }),
      button("Retry", "retry", () => retry(this)),
    );
    this.actions.hidden = true;
    const you = make("div", "said");
    you.append(make("h2", "unseen", "You"), make("p", "", said));
    this.element.append(you);
    if (race) this.element.append(this.headline);
    this.element.append(lanes, this.result, this.actions);
  }

  // What the conversation goes on with.
  get text() {
    return this.answers.find((answer) => answer.text)?.text ?? "";
  }

  get failure() {
    return this.answers.find((answer) => answer.error)?.error ?? null;
  }

  begin(expected, seed) {
    this.seed = seed;
    this.element.classList.add("running");
    this.actions.hidden = true;
    this.result.hidden = true;
    for (const answer of this.answers) {
      answer.expected = expected;
      answer.reset();
      if (this.race) answer.say("Its run comes next.");
    }
  }

  // Which part of a race it is: 0 and 1 are the runs, 2 is the replay.
  phase(which) {
    const [headline, words] = PHASES[which];
    this.headline.replaceChildren(make("h3", "", headline), make("p", "soft", words));
  }

  // When one run is through, the bars measure what it wrote, not what it might have.
  ended(answer) {
    if (!this.race || answer.state !== "done") return;
    for (const each of this.answers) {
      each.expected = Math.min(each.expected, answer.tally.tokens);
      each.refresh();
    }
  }

  get comparable() {
    return this.race && this.answers.every((answer) => answer.state === "done");
  }

  // Says in words how it went.
  end() {
    this.element.classList.remove("running");
    this.actions.hidden = false;
    this.actions.firstElementChild.hidden = this.text === "";
    if (!this.race) return this.outcome();
    const [headline, first, ...sentences] = verdict(...this.answers, this.seed);
    this.headline.replaceChildren(make("h3", "", headline), make("p", "soft", first));
    this.result.replaceChildren(...sentences.map((words) => make("p", "", words)));
    this.result.hidden = !sentences.length;
    return [`${headline}.`, first, ...sentences].join(" ");
  }

  outcome() {
    const [answer] = this.answers;
    if (answer.error) return ""; // said where it is shown
    return `${answer.state === "stopped" ? "Stopped. " : ""}${answer.summary}.`;
  }

  get kept() {
    const { said, race, seed, answers } = this;
    return { said, race, seed, answers: answers.map((answer) => answer.kept) };
  }

  // What was kept, as it was; throws what cannot be read.
  static restore({ said, race, seed, answers }, options) {
    const readable = typeof said === "string" && typeof race === "boolean" && Array.isArray(answers);
    if (!readable || answers.length !== 1 + race) throw new TypeError("no turn");
    const turn = new Turn(said, { ...options, race, expected: 1 });
    turn.seed = seed;
    turn.answers.forEach((answer, i) => answer.restore(answers[i]));
    turn.end();
    return turn;
  }
}
