// The end of the conversation stays in sight while it grows, unless the reader scrolled away from it.

import { everyFrame } from "./dom.js";

const NEAR = 120;
const page = document.documentElement;
let following = true;

const atEnd = () => page.scrollHeight - scrollY - innerHeight < NEAR;
const toEnd = everyFrame(() => {
  if (following) scrollTo({ top: page.scrollHeight, behavior: "instant" });
});

// Only a reader moves up; a page that grew is not one that was left, nor one that shrank.
let last = 0;
let height = 0;
addEventListener(
  "scroll",
  () => {
    const shrank = page.scrollHeight < height;
    if (scrollY < last - 2 && !shrank) following = atEnd();
    else if (atEnd()) following = true;
    last = scrollY;
    height = page.scrollHeight;
  },
  { passive: true },
);

export const follow = {
  keep: toEnd,
  jump() {
    following = true;
    last = 0; // what was hidden for it moves the page too
    toEnd();
  },
  // A race is read from its headline, and does not grow.
  pin(element) {
    requestAnimationFrame(() => element.scrollIntoView({ block: "start", behavior: "instant" }));
  },
};
