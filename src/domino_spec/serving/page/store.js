// What a reload keeps, in this browser only: the conversation and the settings, never a key.

const PLACE = `domino:${location.pathname}:`; // servers behind one address do not share it

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(PLACE + name));
  } catch {
    return null; // switched off, or not ours
  }
}

function write(name, value) {
  try {
    localStorage.setItem(PLACE + name, JSON.stringify(value));
    return true;
  } catch {
    return false; // switched off, or full
  }
}

function remove(name) {
  try {
    localStorage.removeItem(PLACE + name);
  } catch {
    // Switched off: there is nothing.
  }
}

export const store = {
  get settings() {
    const found = read("settings");
    return found && typeof found === "object" ? found : {};
  },

  set settings(values) {
    write("settings", values);
  },

  get turns() {
    const found = read("turns");
    return Array.isArray(found) ? found : [];
  },

  // Where there is not room for all, the later half is kept.
  set turns(all) {
    let kept = all;
    while (kept.length && !write("turns", kept)) kept = kept.slice(Math.ceil(kept.length / 2));
    if (!kept.length) remove("turns");
  },
};

// --- Chunks, packed: a token is a tenth of what the server sent of it --------------------------------

const rounded = (value) => (typeof value === "number" ? Number(value.toPrecision(4)) : null);

export function pack([after, { choices, domino, usage }]) {
  const [choice] = choices ?? [];
  const details = usage?.completion_tokens_details;
  const content = choice?.delta?.content ?? "";
  const reasoning = choice?.delta?.reasoning_content;
  return [
    Math.round(after * 10) / 10,
    reasoning ? [content, reasoning] : content,
    choice?.finish_reason ?? null,
    domino?.cycle ?? 0,
    (domino?.tokens ?? []).map(({ id, text, accepted, probability, lost }) =>
      [id, text, Number(accepted), rounded(probability), ...(lost?.length ? [lost] : [])]),
    ...(details ? [[details.accepted_prediction_tokens, details.rejected_prediction_tokens]] : []),
  ];
}

function check(good) {
  if (!good) throw new TypeError("what was kept cannot be read");
}

// A chunk as the server sent it; `position` is that of its first token.
export function unpack([after, said, finish, cycle, tokens, usage], position) {
  const [content, reasoning] = Array.isArray(said) ? said : [said, ""];
  check(Number.isFinite(after) && typeof content === "string" && Number.isInteger(cycle));
  check(typeof reasoning === "string");
  check(finish === null || typeof finish === "string");
  const made = tokens.map(([id, text, accepted, probability, lost = []], i) => {
    check(Number.isInteger(id) && typeof text === "string" && lost.every((one) => typeof one === "string"));
    check(probability === null || Number.isFinite(probability));
    return { id, text, accepted: accepted === 1, position: position + i, probability, lost };
  });
  const delta = { content, reasoning_content: reasoning };
  const chunk = { choices: [{ delta, finish_reason: finish }], domino: { cycle, tokens: made } };
  if (usage) {
    const [accepted, rejected] = usage;
    check(Number.isInteger(accepted) && Number.isInteger(rejected));
    const details = { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected };
    chunk.usage = { completion_tokens_details: details };
  }
  return [after, chunk];
}
