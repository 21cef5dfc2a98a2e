// Markdown as a tree of [tag, attributes, children]; text is a string. Nothing here touches the page.
//
// A dialect for what models write: CommonMark's common parts, tables, no HTML, no underlined headings.
// Every text is read in linear time, and no tree is deeper than DEEPEST lists and 2 × OPENED marks.
// `open` says that the text is still being written: a mark that has only begun is not shown yet.

const DEEPEST = 8; // lists and quotes inside each other
const OPENED = 16; // marks of emphasis that wait for their end
const COLUMNS = 64;
const LONGEST_URL = 1000;

const FENCE = /^(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^(#{1,6})(?:[ \t]+(.*))?$/;
const MARKER = /^(?:[-*+]|(\d{1,9})[.)])(?=[ \t]|$)/;
const DASHES = /^:?-+:?$/;
const TASK = /^\[([ xX])\](?=[ \t])/;
const BEGUN = /^[ \t>]*(?:[-*_]{1,2}|[+|]|\d{1,9}[.)]?|#{1,6}|[`~]{1,2})?[ \t]*$/;

// The blocks of a text: where each begins, and its node.
export function parse(text, open = false) {
  const lines = text.split("\n").map((line) => (line.endsWith("\r") ? line.slice(0, -1) : line));
  const starts = [];
  let offset = 0;
  for (const line of text.split("\n")) {
    starts.push(offset);
    offset += line.length + 1;
  }
  return blocks(lines, 0, open).map(({ start, node }) => ({ start: starts[start], node }));
}

// --- Blocks --------------------------------------------------------------------------------------

const blank = (line) => line.trim() === "";

function indentOf(line) {
  let columns = 0;
  for (const c of line) {
    if (c === " ") columns += 1;
    else if (c === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

function dedent(line, columns) {
  let at = 0;
  for (let found = 0; found < columns && (line[at] === " " || line[at] === "\t"); at += 1) {
    found += line[at] === " " ? 1 : 4 - (found % 4);
  }
  return line.slice(at);
}

function isRule(body) {
  const marks = body.length < 200 ? body.replace(/[ \t]/g, "") : "";
  return marks.length > 2 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

function blocks(lines, depth, open) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (blank(lines[at])) {
      at += 1;
      continue;
    }
    const [node, next] = block(lines, at, depth, open);
    if (node) found.push({ start: at, node });
    at = next;
  }
  return found;
}

function block(lines, at, depth, open) {
  const body = lines[at].trimStart();
  const last = open && at === lines.length - 1;
  let match = FENCE.exec(body);
  if (match) return fence(lines, at, match, open);
  if (last && BEGUN.test(body)) return [null, at + 1];
  match = HEADING.exec(body);
  if (match) return [heading(match, last), at + 1];
  if (isRule(body)) return [["hr", null, []], at + 1];
  if (depth < DEEPEST) {
    if (body[0] === ">") return quote(lines, at, depth, open);
    if (MARKER.test(body)) return list(lines, at, depth, open);
  }
  return table(lines, at, open) ?? paragraph(lines, at, depth, open);
}

// Whether a line ends the paragraph that it follows.
function interrupts(lines, at, depth, open) {
  const body = lines[at].trimStart();
  if (FENCE.test(body) || HEADING.test(body) || isRule(body)) return true;
  if (depth < DEEPEST) {
    if (body[0] === ">") return true;
    const marker = MARKER.exec(body);
    if (marker && (marker[1] === undefined || marker[1] === "1")) return true;
  }
  if (open && at === lines.length - 1 && BEGUN.test(body)) return true;
  return isTable(lines, at, open);
}

function paragraph(lines, at, depth, open) {
  let next = at + 1;
  while (next < lines.length && !blank(lines[next]) && !interrupts(lines, next, depth, open)) next += 1;
  const text = lines.slice(at, next).map((line) => line.trim()).join("\n");
  return [["p", null, inline(text, open && next === lines.length)], next];
}

function heading([, marks, rest = ""], open) {
  let text = rest.trimEnd();
  if (text.endsWith("#")) {
    let end = text.length;
    while (text[end - 1] === "#") end -= 1;
    if (end === 0 || text[end - 1] === " ") text = text.slice(0, end).trimEnd();
  }
  // The page has two levels above it.
  return [`h${Math.min(6, marks.length + 2)}`, null, inline(text, open)];
}

function fence(lines, at, [, marks, info], open) {
  const indent = indentOf(lines[at]);
  const mark = marks[0];
  const closes = (line) => {
    const body = line.trim();
    return body.length >= marks.length && body === mark.repeat(body.length);
  };
  let next = at + 1;
  while (next < lines.length && !closes(lines[next])) next += 1;
  const code = lines.slice(at + 1, next).map((line) => dedent(line, indent));
  if (next === lines.length && code.length) {
    const end = code.at(-1).trim();
    if (end === "" || (open && end === mark.repeat(end.length))) code.pop();
  }
  const language = info.trim().split(/\s/, 1)[0].slice(0, 30);
  const head = [
    ["span", null, [language || "code"]],
    ["button", { type: "button", class: "copy" }, ["Copy"]],
  ];
  const body = ["pre", { tabindex: "0" }, [["code", null, code.length ? [code.join("\n")] : []]]];
  return [["figure", { class: "code" }, [["figcaption", null, head], body]], next + 1];
}

function quote(lines, at, depth, open) {
  let next = at;
  const inner = [];
  for (; next < lines.length; next += 1) {
    const body = lines[next].trimStart();
    if (body[0] !== ">") break;
    inner.push(body.slice(body[1] === " " ? 2 : 1));
  }
  const found = blocks(inner, depth + 1, open && next === lines.length);
  return [["blockquote", null, found.map(({ node }) => node)], next];
}

const kindOf = (marker) => marker.replace(/\d+/, "");

function list(lines, at, depth, open) {
  const base = indentOf(lines[at]);
  const [first, number] = MARKER.exec(lines[at].trimStart());
  const items = [];
  let next = at;
  while (next < lines.length) {
    const body = lines[next].trimStart();
    const marker = indentOf(lines[next]) < base + 2 ? MARKER.exec(body) : null;
    if (!marker || kindOf(marker[0]) !== kindOf(first) || isRule(body)) break;
    const content = body.slice(marker[0].length);
    const inner = [content.trimStart()];
    const width = indentOf(lines[next]) + marker[0].length + 1;
    next = itemLines(lines, next + 1, inner, { base, width, depth, open });
    items.push(item(blocks(inner, depth + 1, open && next === lines.length)));
    const more = pastBlank(lines, next);
    if (more < lines.length && MARKER.test(lines[more].trimStart())) next = more;
  }
  const start = number === undefined || number === "1" ? null : { start: number };
  return [[number === undefined ? "ul" : "ol", start, items], next];
}

function pastBlank(lines, at) {
  let next = at;
  while (next < lines.length && blank(lines[next])) next += 1;
  return next;
}

// The lines of an item after its first; where they end.
function itemLines(lines, at, inner, { base, width, depth, open }) {
  let next = at;
  while (next < lines.length) {
    if (blank(lines[next])) {
      const more = pastBlank(lines, next);
      if (more === lines.length || indentOf(lines[more]) < base + 2) break;
      for (; next < more; next += 1) inner.push("");
    }
    const line = lines[next];
    if (indentOf(line) >= base + 2) inner.push(dedent(line, width));
    else if (MARKER.test(line.trimStart()) || interrupts(lines, next, depth, open)) break;
    else inner.push(line.trimStart()); // a paragraph that goes on without its indent
    next += 1;
  }
  return next;
}

function item(found) {
  const nodes = found.map(({ node }) => node);
  if (nodes[0]?.[0] !== "p") return ["li", null, nodes];
  const [[, , text], ...rest] = nodes;
  const task = typeof text[0] === "string" ? TASK.exec(text[0]) : null;
  if (task) text[0] = `${task[1] === " " ? "☐" : "☑"}${text[0].slice(3)}`;
  return ["li", task && { class: "task" }, [...text, ...rest]];
}

// --- Tables --------------------------------------------------------------------------------------

function cells(line) {
  const body = line.trim();
  const found = [];
  let cell = "";
  for (let at = body[0] === "|" ? 1 : 0; at < body.length; at += 1) {
    if (body[at] === "\\" && body[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (body[at] === "|" && found.length < COLUMNS) {
      found.push(cell.trim());
      cell = "";
    } else cell += body[at];
  }
  if (cell.trim() || !found.length) found.push(cell.trim());
  return found;
}

function alignments(line) {
  if (!/^[\s|:-]+$/.test(line) || !line.includes("-")) return null;
  const found = cells(line);
  if (!found.every((cell) => DASHES.test(cell))) return null;
  return found.map((cell) => (cell.endsWith(":") ? (cell[0] === ":" ? "center" : "right") : null));
}

// While it is written, a line that begins with a bar is taken for the head of a table.
function isTable(lines, at, open) {
  if (!lines[at].includes("|")) return false;
  const left = lines.length - at;
  const begins = open && left <= 2 && lines[at].trimStart()[0] === "|";
  if (begins && (left === 1 || /^[\s|:-]*$/.test(lines[at + 1]))) return true;
  const found = left > 1 ? alignments(lines[at + 1]) : null;
  return found !== null && found.length === cells(lines[at]).length;
}

function table(lines, at, open) {
  if (!isTable(lines, at, open)) return null;
  const aligned = (at + 1 < lines.length && alignments(lines[at + 1])) || [];
  const head = cells(lines[at]);
  const row = (tag, line, last) =>
    ["tr", null, cells(line).slice(0, head.length).map((cell, column, all) =>
      [tag, aligned[column] ? { class: aligned[column] } : null,
        inline(cell, last && column === all.length - 1)])];
  let next = at + 2;
  const rows = [];
  for (; next < lines.length && lines[next].includes("|"); next += 1) {
    rows.push(row("td", lines[next], open && next === lines.length - 1));
  }
  const parts = [["thead", null, [row("th", lines[at], open && at === lines.length - 1)]]];
  if (rows.length) parts.push(["tbody", null, rows]);
  const attributes = { class: "table", role: "region", "aria-label": "Table", tabindex: "0" };
  return [["div", attributes, [["table", null, parts]]], Math.min(next, lines.length)];
}

// --- Inline --------------------------------------------------------------------------------------

const SPECIAL = /[\\`*_~[!<]|https?:\/\//g;
const ESCAPED = /[!-'*-/:-@\\^-`{-~]/; // not ( and [, with which formulas begin
const URL_TEXT = new RegExp(`https?://[^\\s<>"'\`|*]{1,${LONGEST_URL}}`, "y");
const AUTOLINK = new RegExp(`<(https?://[^\\s<>]{1,${LONGEST_URL}})>`, "y");
const BREAK = /<br ?\/?>/iy;
const TITLE = /\s{1,9}(?:"[^"\n]{0,300}"|'[^'\n]{0,300}')?\s{0,9}\)/y;
const WORD = /[\p{L}\p{N}]/u;
const PUNCTUATION = /[\p{P}\p{S}]/u;

// An address that may be followed, or null.
export function safe(address) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(address)) return null; // what is relative leads to this server
  try {
    return new URL(address).href;
  } catch {
    return null;
  }
}

const link = (href, children) => [
  "a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, children,
];

// Where runs of backticks begin, by their length.
function backticks(text) {
  const found = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!found.has(run.length)) found.set(run.length, { starts: [], next: 0 });
    found.get(run.length).starts.push(index);
  }
  return found;
}

// For each bracket that opens, the one that closes it.
function brackets(text) {
  const [found, waiting] = [new Map(), []];
  for (const { 0: c, index } of text.matchAll(/\\.|[[\]]/g)) {
    if (c === "[") waiting.push(index);
    else if (c === "]" && waiting.length) found.set(waiting.pop(), index);
  }
  return found;
}

// The address after "](": it and where its parenthesis ends, or null.
function destination(text, from) {
  let depth = 0;
  const end = Math.min(text.length, from + LONGEST_URL);
  for (let at = from; at < end; at += 1) {
    const c = text[at];
    if (c === "(") depth += 1;
    else if (c === ")" && depth) depth -= 1;
    else if (c === ")") return [text.slice(from, at), at + 1];
    else if (c === " " || c === "\n") {
      TITLE.lastIndex = at;
      return TITLE.test(text) ? [text.slice(from, at), TITLE.lastIndex] : null;
    }
  }
  return null;
}

function bareUrl(text, at) {
  if (at && WORD.test(text[at - 1])) return null;
  URL_TEXT.lastIndex = at;
  let [found] = URL_TEXT.exec(text) ?? [""];
  while (found && ".,;:!?)]}".includes(found.at(-1)) && !(found.endsWith(")") && found.includes("("))) {
    found = found.slice(0, -1);
  }
  return safe(found) ? found : null;
}

// A run of marks at a place: whether it may open and close emphasis.
function flanks(text, at, length) {
  const [before, after] = [text[at - 1] ?? " ", text[at + length] ?? " "];
  const [gapBefore, gapAfter] = [/\s/.test(before), /\s/.test(after)];
  const [signBefore, signAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
  const left = !gapAfter && (!signAfter || gapBefore || signBefore);
  const right = !gapBefore && (!signBefore || gapAfter || signAfter);
  if (text[at] !== "_") return [left, right];
  return [left && (!right || signBefore), right && (!left || signAfter)];
}

function add(children, node) {
  if (typeof node === "string" && typeof children.at(-1) === "string") children[children.length - 1] += node;
  else if (node !== "") children.push(node);
}

class Marks {
  constructor() {
    this.stack = [{ mark: "", length: 0, children: [] }];
    this.waiting = { "*": 0, _: 0, "~": 0 };
  }

  add(node) {
    add(this.stack.at(-1).children, node);
  }

  // What one waiting mark holds becomes plain text of `into`.
  give(frame, into) {
    this.waiting[frame.mark] -= 1;
    add(into.children, frame.mark.repeat(frame.length));
    for (const child of frame.children) add(into.children, child);
  }

  open(mark, length, run) {
    this.stack.push({ mark, length, run, children: [] });
    this.waiting[mark] += 1;
    if (this.stack.length > OPENED + 1) this.give(...this.stack.splice(1, 1), this.stack[0]);
  }

  // How much of a closing run found nothing to close. As in CommonMark, a run that could open too
  // does not end one whose length and its own make a multiple of three: **a*b**.
  close(mark, length, both) {
    let left = length;
    const odd = (run) =>
      (run.both || both) && (run.length + length) % 3 === 0 && (run.length % 3 || length % 3);
    while (left && this.waiting[mark]) {
      const at = this.stack.findLastIndex((frame) => frame.mark === mark && !odd(frame.run));
      if (at < 0) break;
      const frame = this.stack[at];
      for (const inner of this.stack.splice(at + 1)) this.give(inner, frame);
      left -= this.wrap(frame, left);
    }
    return left;
  }

  wrap(frame, most) {
    const used = Math.min(2, most, frame.length);
    const node = [frame.mark === "~" ? "del" : used === 2 ? "strong" : "em", null, frame.children];
    frame.length -= used;
    frame.children = [node];
    if (!frame.length) {
      this.stack.pop();
      this.waiting[frame.mark] -= 1;
      this.add(node);
    }
    return used;
  }

  end(open) {
    while (open && this.stack.length > 1) {
      const frame = this.stack.at(-1);
      if (frame.children.length) this.wrap(frame, 2);
      else this.stack.pop();
    }
    const [root, ...rest] = this.stack;
    for (const frame of rest) this.give(frame, root);
    return root.children;
  }
}

export function inline(source, open = false, links = true) {
  let text = source;
  if (open) {
    let end = text.length;
    while ("*_`~[".includes(text[end - 1] ?? " ")) end -= 1;
    text = text.slice(0, end);
  }
  const marks = new Marks();
  const codes = text.includes("`") ? backticks(text) : null;
  const pairs = links && text.includes("](") ? brackets(text) : null;
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    marks.add(text.slice(at, found?.index ?? text.length));
    if (!found) break;
    at = found.index;
    const c = text[at];
    let next = null;
    if (c === "\\") next = escape(text, at, marks);
    else if (c === "`") next = code(text, at, marks, codes, open);
    else if (c === "*" || c === "_" || c === "~") next = emphasis(text, at, marks);
    else if (c === "[" || text[at + 1] === "[") next = pairs && reference(text, at, marks, pairs, open);
    else if (c === "<") next = angle(text, at, marks, links);
    else if (c === "h" && links) {
      const address = bareUrl(text, at);
      if (address) {
        marks.add(link(safe(address), [address]));
        next = at + address.length;
      }
    }
    if (next === null) marks.add(c);
    at = next ?? at + 1;
  }
  return marks.end(open);
}

function escape(text, at, marks) {
  const c = text[at + 1] ?? "";
  marks.add(ESCAPED.test(c) ? c : `\\${c}`);
  return at + 2;
}

function code(text, at, marks, codes, open) {
  let end = at;
  while (text[end] === "`") end += 1;
  const run = codes.get(end - at);
  while (run.starts[run.next] < end) run.next += 1;
  const close = run.starts[run.next];
  if (close === undefined && !open) {
    marks.add(text.slice(at, end));
    return end;
  }
  let inner = text.slice(end, close).replaceAll("\n", " ");
  if (inner.startsWith(" ") && inner.endsWith(" ") && inner.trim()) inner = inner.slice(1, -1);
  marks.add(["code", null, [inner]]);
  return close === undefined ? text.length : close + end - at;
}

function emphasis(text, at, marks) {
  const c = text[at];
  let end = at;
  while (text[end] === c) end += 1;
  let length = end - at;
  if (length <= 3 && (c !== "~" || length === 2)) {
    const [opens, closes] = flanks(text, at, length);
    const run = { length, both: opens && closes };
    if (closes) length = marks.close(c, length, opens);
    if (opens && length) {
      marks.open(c, length, run);
      return end;
    }
  }
  marks.add(c.repeat(length));
  return end;
}

// A link, or an image, which is a link too: the page loads nothing from elsewhere.
function reference(text, at, marks, pairs, open) {
  const begin = text[at] === "!" ? at + 1 : at;
  const close = pairs.get(begin);
  if (close === undefined || text[close + 1] !== "(") return null;
  const label = () => {
    const found = inline(text.slice(begin + 1, close), false, false);
    return found.length ? found : ["link"];
  };
  const to = destination(text, close + 2);
  if (!to) {
    if (!open || /[\s)]/.test(text.slice(close + 2, close + 2 + LONGEST_URL))) return null;
    for (const child of label()) marks.add(child);
    return text.length;
  }
  const href = safe(to[0]);
  if (!href) return null; // shown as it was written
  marks.add(link(href, label()));
  return to[1];
}

function angle(text, at, marks, links) {
  BREAK.lastIndex = at;
  if (BREAK.test(text)) {
    marks.add(["br", null, []]);
    return BREAK.lastIndex;
  }
  AUTOLINK.lastIndex = at;
  const found = links ? AUTOLINK.exec(text) : null;
  const href = found && safe(found[1]);
  if (!href) return null;
  marks.add(link(href, [found[1]]));
  return AUTOLINK.lastIndex;
}
