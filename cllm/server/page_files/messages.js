// Messages of a chat as nodes.  Only what has changed is drawn again, and what is far from view stays plain text.

import { isCut, isWritten } from "./answers.js";
import { preview } from "./files.js";
import { markdown } from "./markdown.js";
import { folded, node, onEnter } from "./node.js";
import { copy } from "./notes.js";
import { toolsByName } from "./settings.js";
import { path } from "./tree.js";

const N_AT_ONCE = 12; // the last messages, drawn with the chat
const N_PER_TASK = 200; // rows of a long chat that are added in one task
const NEAR = "1200px";
const UNENDED = ["stopped", "lost", "length"];
const BUSY_SHARE = 4; // drawing takes at most a fifth of the time

/** Shows chats in a box, and calls `act` of { edit, send, again, choose, goOn, giveResults } with a message. */
export class Messages {
  constructor(box, act) {
    this.box = box;
    this.act = act;
    this.chat = null;
    this.nOpened = 0;
    this.nRows = Infinity; // of the chat, from its end on, that are drawn
    this.editing = null; // id of the message that is being edited
    this.typed = new Map(); // texts of the fields for edits, by the id of the message, and for results
    this.unfolded = new Set(); // ids of answers whose reasoning is open
    this.drawn = new Map(); // id: { element, key, fill }
    this.isDue = false;
    this.wantsEnd = false;
    this.freeAt = 0;
    this.near = new IntersectionObserver((entries) => this.come(entries), { root: box, rootMargin: NEAR });
  }

  /** Show a chat from its end; `editing` is the id of a message that is being edited. */
  open(chat, editing = null) {
    this.chat = chat;
    this.editing = editing;
    this.near.disconnect();
    this.drawn.clear();
    this.box.replaceChildren();
    this.grow(++this.nOpened, N_PER_TASK);
    this.box.scrollTop = this.box.scrollHeight;
  }

  /** Draw the last `nRows` of the chat, and then more of them, until all are there.  What is in view stays there. */
  grow(number, nRows) {
    if (number !== this.nOpened) return; // another chat has been opened
    const isAll = nRows >= this.chat.messages.length;
    this.nRows = isAll ? Infinity : nRows;
    const fromEnd = this.wantsEnd ? 0 : this.box.scrollHeight - this.box.scrollTop;
    this.draw(true);
    this.box.scrollTop = this.box.scrollHeight - fromEnd;
    if (!isAll) setTimeout(() => this.grow(number, nRows + N_PER_TASK));
  }

  /** Let the message with an id be edited, or none; the text of another edit is dropped. */
  edit(id) {
    this.typed.delete(this.editing);
    this.editing = id;
  }

  /** Draw what has changed, soon. */
  drawSoon() {
    if (this.isDue) return;
    this.isDue = true;
    const draw = () => {
      this.isDue = false;
      if (this.chat.messages.length) this.draw(); // otherwise another chat has been opened, which has none
    };
    setTimeout(() => requestAnimationFrame(draw), Math.max(0, this.freeAt - performance.now()));
  }

  /** Show the end at the next drawing, wherever the reader is. */
  showEnd() {
    this.wantsEnd = true;
  }

  draw(isGrowing = false) {
    const began = performance.now();
    const isAtEnd = this.wantsEnd || this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 60;
    this.wantsEnd = false;
    const focused = this.focused();
    const nShown = this.box.children.length;
    const shown = rowsOf(this.chat).slice(-this.nRows);
    const elements = shown.map((row, index) => this.elementOf(row, shown.length - index <= N_AT_ONCE, index === shown.length - 1));
    patch(this.box, elements);
    this.focusAgain(focused, isGrowing ? this.box.children.length - nShown : 0);
    if (isAtEnd) this.box.scrollTop = this.box.scrollHeight;
    const now = performance.now();
    this.freeAt = now + BUSY_SHARE * (now - began);
  }

  /** Return where the focus is: in which message, and on which button; null if it is elsewhere. */
  focused() {
    const { activeElement } = document;
    const index = [...this.box.children].indexOf(activeElement.closest("#messages > *"));
    return index < 0 ? null : { index, name: nameOfButton(activeElement), element: activeElement };
  }

  /** Focus what has replaced the part that had the focus; `nBefore` rows have come before all others. */
  focusAgain(focused, nBefore) {
    if (!focused || focused.element.isConnected) return;
    const buttons = [...(this.box.children[focused.index + nBefore]?.querySelectorAll("button:enabled") ?? [])];
    (buttons.find((each) => nameOfButton(each) === focused.name) ?? this.box).focus({ preventScroll: true });
  }

  elementOf(row, isNear, isLast) {
    const { id } = row.message;
    const key = JSON.stringify([row.all.map(stateOf), row.siblings.length, isLast, this.editing === id]);
    const before = this.drawn.get(id);
    if (before?.key === key) return before.element;
    const element = before?.element ?? node("article", { "aria-label": nameOf(row.message) });
    element.className = `message ${row.message.role === "assistant" ? "assistant" : "user"}${row.all.length > 1 ? " several" : ""}`;
    const fill = () => patch(element, this.partsOf(row, isLast));
    if (isNear || before?.isFilled) {
      fill();
      this.drawn.set(id, { element, key, isFilled: true });
    } else {
      element.replaceChildren(node("p", { class: "plain" }, row.message.content));
      this.drawn.set(id, { element, key, isFilled: false, fill });
      element.dataset.id = id;
      this.near.observe(element);
    }
    return element;
  }

  /** Draw messages that have come near. */
  come(entries) {
    for (const { target, isIntersecting } of entries) {
      const drawn = this.drawn.get(target.dataset.id);
      if (!isIntersecting || !drawn) continue;
      this.near.unobserve(target);
      if (!drawn.isFilled) drawn.fill();
      drawn.isFilled = true;
    }
  }

  partsOf(row, isLast) {
    if (row.message.role === "assistant") return this.partsOfAnswer(row, isLast);
    const { message } = row;
    if (this.editing === message.id) return [this.editor(message)];
    return [
      node(
        "p",
        { class: "who" },
        nameOf(message),
        node(
          "span",
          { class: "tools" },
          message.role === "user" && node("button", { onclick: () => this.act.edit(message) }, "Edit"),
          ...this.branches(row),
        ),
      ),
      node(
        "div",
        { class: "text" },
        shownFiles(message),
        message.content,
      ),
    ];
  }

  partsOfAnswer(row, isLast) {
    const isRunning = row.all.some(isWritten);
    const hasQuestion = row.message.parent !== ""; // a chat of a file may begin with an answer
    return [
      node(
        "p",
        { class: "who" },
        "Model",
        node(
          "span",
          { class: "tools" },
          hasQuestion && !isRunning && node("button", { onclick: () => this.act.again(row.message) }, "Regenerate"),
          ...this.branches(row),
        ),
      ),
      node("div", { class: "variants" }, ...row.all.map((answer) => this.answer(answer, row, isLast, isRunning))),
    ];
  }

  /** The buttons that go to the versions beside a message. */
  branches({ message, siblings, all }) {
    if (siblings.length < 2 || all.length === siblings.length) return [];
    const index = siblings.indexOf(message);
    const go = (step) => this.act.choose(siblings[index + step]);
    return [
      node("button", { "aria-label": "Earlier version", disabled: index === 0, onclick: () => go(-1) }, "‹"),
      node("span", {}, `${index + 1}/${siblings.length}`),
      node("button", { "aria-label": "Later version", disabled: index === siblings.length - 1, onclick: () => go(1) }, "›"),
    ];
  }

  answer(answer, { message, all }, isLast, isRunning) {
    const isSeveral = all.length > 1;
    const isChosen = answer === message;
    const { calls = [] } = answer;
    return node(
      "div",
      { class: `variant${isChosen ? " chosen" : ""}` },
      answer.reasoning ? this.thought(answer) : null,
      ...markdown(answer.content),
      isWritten(answer) && !answer.content && !answer.reasoning ? node("p", { class: "waits" }, "…") : null,
      ...calls.map((call) => folded(`Calls ${call.function.name}`, call.function.arguments)),
      isLast && isChosen && calls.length && !isRunning && !UNENDED.includes(answer.end) ? this.results(answer) : null,
      answer.error ? node("p", { class: "error", role: "alert" }, answer.error) : null,
      node(
        "p",
        { class: "facts tools" },
        factsOf(answer),
        answer.content ? node("button", { onclick: (event) => copy(answer.content, event.target) }, "Copy") : null,
        isLast && isChosen && isCut(answer) ? node("button", { onclick: () => this.act.goOn(answer) }, "Continue") : null,
        isSeveral && !isChosen ? node("button", { onclick: () => this.act.choose(answer) }, "Go on with this one") : null,
      ),
    );
  }

  thought(answer) {
    const { id, thought, reasoning } = answer;
    const title = thought === undefined ? "Reasoning" : `Reasoning, ${thought.toFixed(1)} s`;
    const note = (event) => (event.target.open ? this.unfolded.add(id) : this.unfolded.delete(id));
    return folded(title, reasoning, { open: this.unfolded.has(id), ontoggle: note });
  }

  /** Fields for the results of the tools that an answer calls, for the model to go on with. */
  results(answer) {
    const tools = toolsByName();
    const fields = answer.calls.map((call, index) => this.field(`${answer.id} ${index}`, "", { rows: 2, "aria-label": `Result of ${call.function.name}` }));
    const give = () => this.act.giveResults(answer, fields.map((field) => field.value));
    const parts = answer.calls.map((call, index) => {
      const tool = tools.get(call.function.name);
      return node("div", {}, tool ? drawnTool(tool) : null, fields[index]);
    });
    return node("div", { class: "results" }, ...parts, node("button", { onclick: give }, "Give the results"));
  }

  /** Return a field with what was typed into it before another chat was shown, or with `text`. */
  field(key, text, attributes) {
    const made = node("textarea", { dir: "auto", oninput: () => this.typed.set(key, made.value), ...attributes });
    made.value = this.typed.get(key) ?? text;
    return made;
  }

  editor(message) {
    const field = this.field(message.id, message.content, { rows: 4, "aria-label": "Edited message" });
    const send = () => this.act.send(message, field.value);
    onEnter(field, send);
    setTimeout(() => field.focus());
    return node(
      "div",
      { class: "editor" },
      shownFiles(message),
      field,
      node("p", { class: "tools" }, node("button", { onclick: send }, "Send as a new version"), node("button", { onclick: () => this.act.edit(null) }, "Cancel")),
    );
  }
}

/** Return the rows of a chat: shown messages, with `all` answers that stand side by side until the chat goes on. */
function rowsOf(chat) {
  const rows = path(chat);
  return rows.map(({ message, siblings }, index) => {
    const together = index === rows.length - 1 && message.group ? siblings.filter((each) => each.group === message.group) : [message];
    return { message, siblings, all: together };
  });
}

const stateOf = (message) => [message.id, message.version, isWritten(message)];

const nameOfButton = (button) => button.getAttribute("aria-label") ?? button.textContent;

function nameOf({ role, name }) {
  if (role === "tool") return `Result of ${name ?? "the tool"}`;
  return role === "assistant" ? "Model" : "You";
}

/** Return the files of a message; null without any. */
function shownFiles({ files }) {
  if (!files?.length) return null;
  return node("div", { class: "shown" }, ...files.map((file, index) => preview(file, `File ${index + 1} of the message`)));
}

/** Return the description and the parameters of a tool as a node. */
function drawnTool({ name, description, parameters }) {
  return folded(description || name, JSON.stringify(parameters ?? {}, null, 2));
}

function factsOf(answer) {
  const facts = [];
  const ends = { length: "cut: no more tokens", lost: "interrupted" };
  if (answer.end && answer.end !== "stop" && answer.end !== "tool_calls") facts.push(ends[answer.end] ?? answer.end);
  else if (!answer.end && !isWritten(answer)) facts.push("interrupted");
  const ofAll = answer.nAnswers > 1 ? ` of ${answer.nAnswers} answers` : "";
  if (answer.nTokens && answer.seconds) facts.push(`${answer.nTokens} tokens${ofAll}, ${(answer.nTokens / answer.seconds).toFixed(1)} a second`);
  if (answer.first !== undefined) facts.push(`first after ${answer.first.toFixed(0)} ms`);
  return facts.join(" · ");
}

/** Make `wanted` the children of a node; what equals them stays, with its selection and its focus. */
function patch(parent, wanted) {
  wanted.forEach((each, index) => {
    const present = parent.childNodes[index];
    if (present === each) return;
    if (!present) parent.append(each);
    else if (wanted.includes(present) || each.parentNode === parent) parent.insertBefore(each, present);
    else if (isSame(present, each)) patch(present, [...each.childNodes]);
    else if (!present.isEqualNode(each)) present.replaceWith(each);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

/** True if a part may stay and get the other's children: it has no listeners, or the same ones. */
function isSame(present, each) {
  if (present.nodeName !== each.nodeName || present.className !== each.className) return false;
  return each.nodeName === "DETAILS" || /^variants?\b/.test(each.className);
}
