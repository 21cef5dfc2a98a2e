// What the fields say, or which of them cannot be read.

import { find } from "./dom.js";

export class FieldError extends Error {
  constructor(field) {
    const label = field.labels[0].firstChild.textContent.trim();
    super(`${label}: ${field.validationMessage}`);
    this.field = field;
  }
}

function number(id) {
  const field = find(id);
  const good = field.checkValidity();
  field.ariaInvalid = good ? null : "true";
  if (!good) throw new FieldError(field);
  return field.value === "" ? null : field.valueAsNumber;
}

// Parts of a request's body; what is left open is not in it.
export function sampling() {
  const all = ["temperature", "top_p", "max_tokens", "seed"].map((id) => [id, number(id)]);
  return Object.fromEntries(all.filter(([, value]) => value !== null));
}

// An answer has to leave room for its prompt.
export function fit(context) {
  const field = find("max_tokens");
  field.max = context;
  if (field.valueAsNumber > context / 2) field.value = Math.max(1, Math.floor(context / 2));
}

export function system() {
  const words = find("system").value.trim();
  return words ? [{ role: "system", content: words }] : [];
}

// Shows the field that is wrong, wherever it hides.
export function reveal(field) {
  find("settings").open = true;
  field.focus();
}
