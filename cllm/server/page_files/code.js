// Code with colours and formulas, by libraries that are loaded when a text has some.

import { node } from "./node.js";

const N_CODE_MAX = 8_000; // characters of a block that gets colours
const N_LINE_MAX = 500; // some languages take time in proportion to the square of a line
const N_FORMULA_MAX = 2_000;
const N_KEPT = 200_000; // characters whose results are kept: a text that grows is drawn again and again
const FORMULAS = { throwOnError: true, maxExpand: 200, maxSize: [20, 100], trust: false };

/** A library, loaded at the first use; what waits for it is drawn again then. */
class Library {
  constructor(load) {
    this.load = load;
    this.loaded = null;
    this.isAsked = false;
    this.waiting = [];
    this.kept = new Map();
    this.nKept = 0;
  }

  /** Fill `place` with what `make(library)` returns; leave its text if that fails. */
  fill(place, key, make) {
    if (!this.loaded) {
      this.waiting.push([place, key, make]);
      if (!this.isAsked) this.ask();
      return;
    }
    if (!this.kept.has(key)) {
      this.kept.set(key, this.made(make));
      this.nKept += key.length;
      for (const oldest of this.kept.keys()) {
        if (this.nKept <= N_KEPT) break;
        this.kept.delete(oldest);
        this.nKept -= oldest.length;
      }
    }
    const made = this.kept.get(key);
    if (made) place.replaceChildren(made.cloneNode(true));
  }

  made(make) {
    try {
      return make(this.loaded);
    } catch {
      return null; // LaTeX with an error, for example
    }
  }

  async ask() {
    this.isAsked = true;
    try {
      this.loaded = (await this.load()).default;
    } catch (error) {
      console.warn("shown as plain text:", error);
      this.isAsked = false; // the server may come back
    }
    const waiting = this.waiting.splice(0);
    if (this.loaded) for (const [place, key, make] of waiting) this.fill(place, key, make);
  }
}

const highlighter = new Library(() => import("./highlight.js"));
const formulas = new Library(() => import("./temml.js"));

/** Emitter of highlight.js that builds nodes. */
class Emitter {
  constructor() {
    this.root = document.createDocumentFragment();
    this.open = [this.root];
  }

  addText(text) {
    this.open.at(-1).append(text);
  }

  openNode(name) {
    const part = node("span", { class: `code-${name.split(".")[0]}` });
    this.open.at(-1).append(part);
    this.open.push(part);
  }

  closeNode() {
    if (this.open.length > 1) this.open.pop();
  }

  startScope(name) {
    this.openNode(name);
  }

  endScope() {
    this.closeNode();
  }

  __addSublanguage(emitter) {
    this.open.at(-1).append(emitter.root);
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

/** Return a node of code, in the colours of its language. */
export function code(text, language) {
  const place = node("code", {}, text);
  const isShort = text.length <= N_CODE_MAX && text.split("\n").every((line) => line.length <= N_LINE_MAX);
  if (language && isShort)
    highlighter.fill(place, `${language}\n${text}`, (library) => {
      if (!library.getLanguage(language)) return null;
      library.configure({ __emitter: Emitter });
      return library.highlight(text, { language, ignoreIllegals: true })._emitter.root;
    });
  return place;
}

/** Return a node of a formula in LaTeX; its source is shown if it cannot be drawn.  `\label` and `\ref` name no nodes:
 * the page finds its own by their ids. */
export function formula(latex, source, isDisplay) {
  const place = node("span", { class: isDisplay ? "formula display" : "formula" }, source);
  if (latex.length <= N_FORMULA_MAX)
    formulas.fill(place, `${isDisplay} ${latex}`, (library) => {
      const box = document.createElement("span");
      library.render(latex, box, { ...FORMULAS, displayMode: isDisplay });
      for (const each of box.querySelectorAll("[id], [href]")) ["id", "href"].forEach((name) => each.removeAttribute(name));
      return box;
    });
  return place;
}
