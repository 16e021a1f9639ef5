// The list of chats: found by words, with marks for those that are being answered, or were in the meantime.

import { isBusy } from "./answers.js";
import { element, node } from "./node.js";
import * as store from "./store.js";

const WAIT_MS = 150; // after a key, before the search

/** Shows heads of chats, and calls `act` of { open, remove } with a head. */
export class List {
  constructor(act) {
    this.act = act;
    this.heads = [];
    this.current = "";
    this.unread = new Set();
    this.found = null; // ids, while something is searched for
    let waiting = null;
    element("search").addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => this.search(element("search").value.trim()), WAIT_MS);
    });
  }

  async search(text) {
    const found = text ? new Set(await store.search(text)) : null;
    if (text !== element("search").value.trim()) return; // there is a newer search
    this.found = found;
    this.draw();
  }

  /** Read the heads again and draw them. */
  async refresh() {
    this.heads = await store.heads();
    if (this.found) await this.search(element("search").value.trim());
    else this.draw();
  }

  draw() {
    const shown = this.heads.filter(({ id }) => !this.found || this.found.has(id));
    const { activeElement } = document;
    const focused = activeElement.closest("#chats > li");
    const place = [...element("chats").children].indexOf(focused);
    const rows = shown.map((head) => this.row(head));
    element("chats").replaceChildren(...rows);
    if (focused) {
      const row = rows.find(({ dataset }) => dataset.id === focused.dataset.id) ?? rows[Math.min(place, rows.length - 1)];
      (row?.querySelector(`button.${activeElement.className}`) ?? element("new-chat")).focus();
    }
    element("no-chats").hidden = !this.found || shown.length > 0;
  }

  row(head) {
    const { id, title } = head;
    const mark = isBusy(id) ? ["●", "is being answered"] : this.unread.has(id) ? ["•", "has a new answer"] : null;
    const isShown = id === this.current;
    return node(
      "li",
      { "data-id": id },
      node(
        "button",
        { class: "open", dir: "auto", "aria-current": isShown && "true", title, onclick: () => this.act.open(head) },
        mark && node("span", { class: "mark", role: "img", "aria-label": mark[1] }, mark[0]),
        title,
      ),
      node("button", { class: "delete", "aria-label": `Delete ${title}`, onclick: () => this.act.remove(head) }, "×"),
    );
  }
}
