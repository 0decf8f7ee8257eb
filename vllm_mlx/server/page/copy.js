// Buttons that copy a text. Knows nothing of what is copied.

import { element } from "./dom.js";

const SAID_MS = 2000;

// `text` gives what is copied when the button is pressed.
export function copyButton(text, label) {
  const button = element("button", { type: "button", class: "copy", "aria-label": label, title: label, onclick: async () => {
    const isDone = await copied(text());
    said.textContent = isDone ? "Copied" : "Press Ctrl+C or ⌘C";
    setTimeout(() => { said.textContent = "Copy"; }, SAID_MS);
  } });
  const said = element("span", { "aria-live": "polite" }, "Copy");
  button.append(said);
  return button;
}

// Browsers have a clipboard only for pages from this machine or over https. Elsewhere a selected field is copied.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement;
    const field = element("textarea", { class: "away", "aria-hidden": "true", readonly: "" });
    field.value = text;
    document.body.append(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return isDone;
  }
}
