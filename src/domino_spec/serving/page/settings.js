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

// Parts of a request's body.
export function sampling() {
  const seed = number("seed");
  return {
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    ...(seed === null ? {} : { seed }),
  };
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
