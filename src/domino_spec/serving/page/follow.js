// The end of the conversation stays in sight while it grows, unless the reader scrolled away from it.

import { everyFrame } from "./dom.js";

const NEAR = 120;
const page = document.documentElement;
let following = true;

const atEnd = () => page.scrollHeight - scrollY - innerHeight < NEAR;
const toEnd = everyFrame(() => {
  if (following) scrollTo({ top: page.scrollHeight, behavior: "instant" });
});

// Only a reader moves up; a page that grew is not one that was left.
let last = 0;
addEventListener(
  "scroll",
  () => {
    if (scrollY < last - 2) following = atEnd();
    else if (atEnd()) following = true;
    last = scrollY;
  },
  { passive: true },
);

export const follow = {
  keep: toEnd,
  jump() {
    following = true;
    toEnd();
  },
  // A race is read from its headline, and does not grow.
  pin(element) {
    requestAnimationFrame(() => element.scrollIntoView({ block: "start", behavior: "instant" }));
  },
};
