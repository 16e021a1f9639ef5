// What the page says besides answers: a line that stays, one with an action, and texts for screen readers.

import { element, node } from "./node.js";

const SHOWN_MS = 10_000;

let leaving = null;
const told = new Map(); // last line of each source

/** Show a line in the header; a source removes its own with "", and leaves those of others. */
export function tell(text, source = "page") {
  const shown = element("status").textContent;
  if (text ? shown !== text : shown && shown === told.get(source)) element("status").textContent = text;
  told.set(source, text);
}

/** Show a line over the page for ten seconds, with a button that does `act`. */
export function offer(text, action, act) {
  clearTimeout(leaving);
  const close = () => element("offer").replaceChildren();
  const button = node("button", { onclick: () => (close(), act()) }, action);
  element("offer").replaceChildren(node("p", {}, text, button));
  leaving = setTimeout(close, SHOWN_MS);
}

/** Say a text to a screen reader. */
export function announce(text) {
  element("announced").textContent = text;
}

/** Copy a text.  Over plain http from another machine the browser has no clipboard for scripts. */
export async function copy(text, button) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text);
    said(button, "Copied");
  } catch {
    said(button, "Not copied");
  }
}

function copySelected(text) {
  const field = node("textarea", { class: "hidden", readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  if (!isCopied) throw new Error("the browser copies nothing");
}

function said(button, text) {
  button.textContent = text;
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/** Save a text as a file. */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  node("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
