// Counts of one answer while it comes. The prompt's own token is in no cycle, as in the library.

export class Tally {
  constructor() {
    this.tokens = 0;
    this.cycles = 0;
    this.committed = 0; // in cycles
    this.accepted = 0;
    this.usage = null;
    this.started = null; // when the request was sent
    this.ended = null;
    this.marks = []; // [milliseconds, tokens so far] of every block
  }

  start(now = performance.now()) {
    this.started = now;
  }

  block({ cycle, tokens }, now) {
    this.tokens += tokens.length;
    if (cycle > 0) {
      this.cycles += 1;
      this.committed += tokens.length;
      this.accepted += tokens.filter((token) => token.accepted).length;
    }
    this.marks.push([now, this.tokens]);
  }

  end(now = performance.now()) {
    this.ended ??= now;
  }

  get elapsed() {
    return this.started === null ? 0 : (this.ended ?? performance.now()) - this.started;
  }

  get perCycle() {
    return this.cycles ? this.committed / this.cycles : null;
  }

  // After the first block: the prefill is not decoding.
  get perSecond() {
    if (this.marks.length < 2) return null;
    const [[from, before]] = this.marks;
    const [to, all] = this.marks.at(-1);
    return to > from ? (1000 * (all - before)) / (to - from) : null;
  }

  // Of the tokens written in cycles, how many the drafter had right.
  get drafted() {
    return this.committed ? this.accepted / this.committed : null;
  }

  // Of the drafts that were verified; only the server knows the rejected ones, and tells at the end.
  get acceptance() {
    const details = this.usage?.completion_tokens_details;
    if (!details) return null;
    const verified = details.accepted_prediction_tokens + details.rejected_prediction_tokens;
    return verified ? details.accepted_prediction_tokens / verified : null;
  }
}
