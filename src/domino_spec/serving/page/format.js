// Markdown in the page, as it is written. Nodes are made and changed, never markup.

import { make } from "./dom.js";
import { parse } from "./markdown.js";

// Of the time, what reading the same end again may take.
const SHARE = 1 / 5;

function build([tag, attributes, children]) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
  patch(element, children);
  return element;
}

const fits = (node, [tag, attributes]) =>
  node?.localName === tag && (node.getAttribute("class") ?? "") === (attributes?.class ?? "");

// Makes what follows `node` in `parent` these children. What is the same stays: a selection, a scroll,
// the button that is being pressed.
function patch(parent, children, node = parent.firstChild) {
  let old = node;
  for (const child of children) {
    const next = old?.nextSibling ?? null;
    if (typeof child === "string") {
      if (old?.nodeType !== Node.TEXT_NODE) parent.insertBefore(document.createTextNode(child), old);
      else {
        if (child.startsWith(old.data)) old.appendData(child.slice(old.data.length));
        else old.data = child;
        old = next;
      }
    } else if (!fits(old, child)) {
      const made = build(child);
      if (old) old.replaceWith(made);
      else parent.append(made);
      old = next;
    } else {
      const attributes = child[1] ?? {};
      for (const name of old.getAttributeNames()) if (!(name in attributes)) old.removeAttribute(name);
      for (const [name, value] of Object.entries(attributes)) {
        if (old.getAttribute(name) !== value) old.setAttribute(name, value);
      }
      patch(old, child[2]);
      old = next;
    }
  }
  while (old) {
    const next = old.nextSibling;
    old.remove();
    old = next;
  }
}

export class Formatted {
  constructor() {
    this.element = make("div", "text");
    this.shown = null;
    this.from = 0; // all blocks but the last are read once
    this.blocks = 0;
    this.rest = 0; // milliseconds, until which nothing is read again
  }

  // `open`: more will follow.
  show(text, open) {
    const state = `${open}${text.length}`;
    const now = performance.now();
    if (state === this.shown || (open && now < this.rest)) return;
    this.shown = state;
    if (!open) this.from = this.blocks = 0;
    const found = parse(text.slice(this.from), open);
    patch(this.element, found.map(({ node }) => node), this.element.childNodes[this.blocks] ?? null);
    if (found.length > 1) {
      this.blocks += found.length - 1;
      this.from += found.at(-1).start;
    }
    const end = performance.now();
    this.rest = end + (end - now) * (1 / SHARE - 1);
  }
}
