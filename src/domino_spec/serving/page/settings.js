// What the fields say, or which of them cannot be read.

import { find } from "./dom.js";
import { store } from "./store.js";

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

const KEPT = ["system", "temperature", "top_p", "max_tokens", "seed"];

// Puts back what a reload kept, or what a new page has, and keeps what is changed.
export function remember() {
  const kept = store.settings;
  for (const id of KEPT) if (typeof kept[id] === "string") find(id).value = kept[id];
  const views = [...document.querySelectorAll("input[name=view]")];
  for (const choice of views) if (choice.value === kept.view) choice.checked = true;
  const keep = () => {
    const values = Object.fromEntries(KEPT.map((id) => [id, find(id).value]));
    store.settings = { ...values, view: views.find((choice) => choice.checked).value };
  };
  for (const field of [...KEPT.map(find), ...views]) field.addEventListener("change", keep);
  find("defaults").addEventListener("click", () => {
    for (const id of KEPT) find(id).value = find(id).defaultValue;
    for (const id of KEPT) find(id).ariaInvalid = null;
    keep();
  });
}

// Shows the field that is wrong, wherever it hides.
export function reveal(field) {
  find("settings").open = true;
  field.focus();
}
