// One exchange: what was said, the answer or the two of a race, and what can be done with it.

import { Answer } from "./answer.js";
import { button, make } from "./dom.js";
import { verdict } from "./race.js";

const ALONE =
  "The runs follow each other, so that neither slows the other, and both compute the whole prompt. " +
  "Then they are replayed side by side, at their true times.";

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Not allowed outside https and this machine: the old way.
    const area = make("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

export class Turn {
  constructor(said, { race, expected, retry, tell }) {
    this.said = said;
    this.race = race;
    this.element = make("li", "turn");
    const lanes = make("div", race ? "lanes race" : "lanes");
    this.answers = race
      ? [
          new Answer({ name: "Domino", speculate: true, expected }),
          new Answer({ name: "Plain decoding", speculate: false, expected }),
        ]
      : [new Answer({ name: "Answer", expected })];
    lanes.append(...this.answers.map((answer) => answer.element));
    this.result = make("div", "verdict");
    this.result.hidden = true;
    this.actions = make("div", "actions");
    this.actions.append(
      button("Copy", "", async ({ currentTarget }) => {
        currentTarget.disabled = true;
        tell((await copied(this.text)) ? "Copied." : "This browser does not let the page copy.");
        currentTarget.disabled = false;
      }),
      button("Retry", "retry", () => retry(this)),
    );
    this.actions.hidden = true;
    const you = make("div", "said");
    you.append(make("h2", "unseen", "You"), make("p", "", said));
    this.element.append(you);
    if (race) this.element.append(make("p", "soft alone", ALONE));
    this.element.append(lanes, this.result, this.actions);
  }

  // What the conversation goes on with.
  get text() {
    return this.answers.find((answer) => answer.text)?.text ?? "";
  }

  get failure() {
    return this.answers.find((answer) => answer.error)?.error ?? null;
  }

  begin(expected) {
    this.actions.hidden = true;
    this.result.hidden = true;
    for (const answer of this.answers) {
      answer.expected = expected;
      answer.reset();
      if (this.race) answer.say("Its run comes next.");
    }
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
  end(seed) {
    this.actions.hidden = false;
    this.actions.firstElementChild.hidden = this.text === "";
    if (!this.race) return this.outcome();
    const sentences = verdict(...this.answers, seed);
    this.result.replaceChildren(...sentences.map((words) => make("p", "", words)));
    this.result.hidden = false;
    return sentences.join(" ");
  }

  outcome() {
    const [answer] = this.answers;
    if (answer.error) return ""; // said where it is shown
    return `${answer.state === "stopped" ? "Stopped. " : ""}${answer.summary}.`;
  }
}
