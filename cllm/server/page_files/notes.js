// What the page says besides answers: a line in the header, one with an action, and texts for screen readers.

import { element, node } from "./node.js";

const SHOWN_MS = 10_000;

const PAGE = "page"; // the source of lines that end by themselves

let leaving = null;
let ending = null;
const told = new Map(); // line of each source, the latest last

/** Show the latest line of all sources in the header.  A source removes its own with ""; that of the page ends after ten seconds. */
export function tell(text, source = PAGE) {
  if (source === PAGE) {
    clearTimeout(ending);
    if (text) ending = setTimeout(tell, SHOWN_MS, "");
  }
  if (text === (told.get(source) ?? "")) return;
  told.delete(source);
  if (text) told.set(source, text);
  const latest = [...told.values()].at(-1) ?? "";
  if (element("status").textContent !== latest) element("status").textContent = latest;
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
  const { activeElement } = document;
  const field = node("textarea", { class: "hidden", readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  activeElement.focus({ preventScroll: true });
  if (!isCopied) throw new Error("the browser copies nothing");
}

function said(button, text) {
  button.textContent = text;
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/** Save texts, one after the other, as a file: together they may be longer than a string can be. */
export function download(name, type, ...texts) {
  const address = URL.createObjectURL(new Blob(texts, { type }));
  node("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
