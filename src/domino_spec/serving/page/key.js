// The API key: asked for when the server wants one, held in this variable and nowhere else.

import { find } from "./dom.js";

export const key = { value: "" };

let asking = null;

// Resolves to whether a key was given. Who asks while the dialog is open gets the same answer.
export function askForKey() {
  if (asking) return asking;
  const dialog = find("key");
  const field = find("key-value");
  // What the server says is for those who write programs.
  find("key-why").textContent = key.value ? "It does not know the key it was given." : "";
  field.value = "";
  asking = new Promise((resolve) => {
    let given = false;
    const take = (event) => {
      event.preventDefault();
      given = field.value.trim() !== "";
      if (given) dialog.close();
    };
    const cancel = () => dialog.close();
    const form = find("key-form");
    form.addEventListener("submit", take);
    find("key-cancel").addEventListener("click", cancel);
    dialog.addEventListener(
      "close",
      () => {
        form.removeEventListener("submit", take);
        find("key-cancel").removeEventListener("click", cancel);
        if (given) key.value = field.value.trim();
        field.value = "";
        asking = null;
        resolve(given);
      },
      { once: true },
    );
  });
  dialog.showModal();
  return asking;
}
