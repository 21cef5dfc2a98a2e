// Elements and numbers as text. Whatever a model wrote goes through textContent, never as markup.

export const find = (id) => document.getElementById(id);

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

export function button(text, className, action) {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", action);
  return element;
}

export async function copied(text) {
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

export const CANNOT_COPY = "This browser does not let the page copy.";

// Dominoes or text: which of the two is seen.
export const view = {
  get text() {
    return document.documentElement.dataset.view === "text";
  },
  show(name) {
    document.documentElement.dataset.view = name;
  },
};

export const NOTHING = "–";

export function fixed(value, digits) {
  return value === null || !Number.isFinite(value) ? NOTHING : value.toFixed(digits);
}

export const rate = (perSecond) => fixed(perSecond, perSecond < 1000 ? 1 : 0);

export const seconds = (milliseconds) =>
  `${fixed(milliseconds / 1000, milliseconds < 10_000 ? 2 : 1)} s`;

export const percent = (share) =>
  Number.isFinite(share) ? `${fixed(100 * share, 0)} %` : NOTHING;

export const count = (number, one, many) => `${number} ${number === 1 ? one : many}`;

// Runs at most once a frame however often it is called: what is only looked at need not be fresher.
export function everyFrame(action) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      action();
    });
  };
}
