// The chat: one is shown, any number are answered; all are kept in this browser.

import { answer, busyChat, chatOf, goOn, isBusy, noteElsewhere, onAnswers, stop, writingOf } from "./answers.js";
import { filesAreRead, hasFiles, pickFiles, setFiles, takeFiles } from "./files.js";
import { List } from "./list.js";
import { Messages } from "./messages.js";
import { element, isComposing, onEnter } from "./node.js";
import { announce, download, offer, tell } from "./notes.js";
import { settingsOf, startSettings } from "./settings.js";
import * as store from "./store.js";
import { add, asMarkdown, choose, fromFile, merge, newChat, path, until } from "./tree.js";
import { welcome } from "./welcome.js";

const FILE = "cllm-chats"; // what a file of chats is called, and says that it is

const narrow = matchMedia("(max-width: 45rem)"); // as in page.css
const drafts = new Map(); // id of a chat: what is being written there, { text, files, editing }
const removed = new Set();
let fresh = newChat(); // the one without messages
let current = fresh;
let nShown = 0; // chats: one that is read late is not shown over a later one
let model = {};
let list;
let messages;

export async function startChat() {
  startSettings();
  takeFiles();
  list = new List({ open: (head) => openChat(head.id), remove });
  messages = new Messages(element("messages"), { edit, send: sendEdited, again, choose: chosen, goOn: continued, giveResults });
  onAnswers(answered, keep);
  store.onChange(changedElsewhere);
  listen();
  show(fresh);
  await store.start();
  await list.refresh();
  const isUntouched = current === fresh && !fresh.messages.length && !element("prompt").value && !hasFiles();
  if (list.heads.length && isUntouched) await openChat(list.heads[0].id);
  else draw(); // the first view says if chats are kept
  // Before the style sheet has come, no field takes the focus.
  if (document.activeElement === document.body) element("prompt").focus({ preventScroll: true });
}

/** Note what the server says of its model. */
export function setModel(health) {
  model = health;
  if (!current.messages.length) drawWelcome();
}

/** Open the chat that a request answers; return false if it is none of this page. */
export function openChatOf(requestId) {
  const chat = chatOf(requestId);
  if (chat) openChat(chat.id);
  return chat !== undefined;
}

function listen() {
  element("new-chat").addEventListener("click", () => {
    if (fresh.messages.length) fresh = newChat();
    show(fresh);
  });
  element("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  onEnter(element("prompt"), send);
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]") || element("view-chat").hidden || isComposing(event)) return;
    if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      showList(true);
      element("search").focus();
    }
    // In such a field, Escape is the browser's: it clears a search and closes a list.
    if (event.key !== "Escape" || event.target.closest("input, select")) return;
    if (narrow.matches && !element("list").hidden) showList(false);
    else if (messages.editing) edit(null);
    else stop(current);
  });
  element("stop").addEventListener("click", () => stop(current));
  element("rename").addEventListener("click", rename);
  element("save-markdown").addEventListener("click", () => download(`${fileName()}.md`, "text/markdown", asMarkdown(current)));
  element("save-json").addEventListener("click", () => save(fileName(), [current]));
  element("export").addEventListener("click", async () => save(FILE, await store.loadAll()));
  element("import").addEventListener("click", () => element("import-file").click());
  element("import-file").addEventListener("change", () => {
    importFrom(element("import-file").files[0]);
    element("import-file").value = "";
  });
  element("show-list").addEventListener("click", () => showList(element("list").hidden));
  narrow.addEventListener("change", () => showList(!narrow.matches));
  showList(!narrow.matches);
}

/** Show or hide the list of chats: on a phone it covers the chat. */
function showList(isShown) {
  element("list").hidden = !isShown;
  element("show-list").setAttribute("aria-expanded", isShown);
}

// --- Which chat --------------------------------------------------------------------------------
async function openChat(id) {
  if (narrow.matches) showList(false);
  const number = ++nShown;
  if (id === current.id) return;
  let chat;
  try {
    chat = busyChat(id) ?? (await store.load(id));
  } catch (error) {
    tell(`The chat cannot be read: ${error.message}.`);
    return;
  }
  if (number !== nShown) return;
  if (chat) show(chat);
  else await list.refresh();
}

function show(chat) {
  nShown++;
  drafts.set(current.id, { text: element("prompt").value, files: pickFiles(), editing: messages.editing });
  current = chat;
  const draft = drafts.get(chat.id) ?? { text: "" };
  element("prompt").value = draft.text;
  setFiles(draft.files);
  if (narrow.matches) showList(false);
  list.current = chat.id;
  list.unread.delete(chat.id);
  messages.open(chat, draft.editing);
  draw();
  element("prompt").focus({ preventScroll: true });
}

/** Keep a chat; say so if the browser has no room for it. */
async function keep(chat) {
  if (removed.has(chat.id)) return;
  try {
    await store.keep(chat, writingOf(chat));
    tell("", "keep");
  } catch (error) {
    const isFull = error?.name === "QuotaExceededError";
    tell(isFull ? "This browser has no room for more: export chats, then delete some." : `The chat is not kept: ${error?.message}.`, "keep");
  }
}

async function remove(head) {
  const chat = busyChat(head.id) ?? (head.id === current.id ? current : await store.load(head.id));
  stop({ id: head.id });
  removed.add(head.id);
  await store.remove(head.id);
  await list.refresh();
  if (head.id === current.id) await leave();
  if (!chat) return; // another tab has deleted it
  offer(`“${head.title}” is deleted.`, "Undo", async () => {
    removed.delete(head.id);
    await keep(chat);
    await list.refresh();
    show(chat);
  });
}

/** Show another chat than the current one, which is deleted. */
async function leave() {
  if (list.heads.length) await openChat(list.heads[0].id);
  else show((fresh = newChat()));
}

async function rename() {
  const title = prompt("Name of the chat", current.title)?.trim();
  if (!title) return;
  Object.assign(current, { title, isNamed: true });
  await keepAndList();
}

/** Take over what another tab has added to the chat that is shown; leave one that it has deleted. */
async function changedElsewhere({ id, writing, isRemoved }) {
  noteElsewhere(writing, draw);
  if (isRemoved) {
    removed.add(id);
    stop({ id });
  } else removed.delete(id); // it may have been restored
  await list.refresh();
  if (isRemoved && id === current.id) await leave();
  const stored = id === current.id && (await store.load(id));
  if (!stored || id !== current.id) return;
  merge(current, stored);
  draw();
}

async function keepAndList() {
  const chat = current;
  chat.updated = Date.now();
  draw();
  await keep(chat);
  await list.refresh();
}

// --- Files of chats ------------------------------------------------------------------------------
const fileName = () => current.title.replace(/[^\p{L}\p{N} ._-]/gu, "").trim() || "chat";

function save(name, chats) {
  const texts = chats.map((chat, index) => `${index ? "," : ""}${JSON.stringify(chat)}`);
  download(`${name}.json`, "application/json", `{"format":"${FILE}","version":1,"chats":[`, ...texts, "]}");
}

async function importFrom(file) {
  try {
    const { format, chats } = JSON.parse(await file.text());
    if (format !== FILE) throw new TypeError("this file has no chats of cllm's page");
    const taken = chats.map(fromFile);
    await store.keepAll(taken);
    tell(taken.length === 1 ? "1 chat is imported." : `${taken.length} chats are imported.`);
    if (taken.length) show(taken[0]);
  } catch (error) {
    tell(`${file.name}: ${error.message}.`);
  }
  await list.refresh();
}

// --- What is asked --------------------------------------------------------------------------------
/** Answer a message `n` times, or say what is wrong with the settings. */
function ask(message) {
  let settings;
  try {
    settings = settingsOf();
  } catch (error) {
    add(current, message.id, { role: "assistant", end: "lost", error: error.message });
    keepAndList();
    return;
  }
  answer(current, message, settings);
  keepAndList();
}

const lastOf = (chat) => path(chat).at(-1)?.message;

/** Send what is written, or another text, with the files.  What is written stays if another chat is shown meanwhile. */
async function send(text) {
  const chat = current;
  await filesAreRead();
  const content = text ?? element("prompt").value;
  if (chat !== current || isBusy(chat.id) || !(content.trim() || hasFiles())) return;
  if (text === undefined) element("prompt").value = "";
  messages.showEnd();
  ask(add(chat, lastOf(chat)?.id ?? "", { role: "user", content, files: pickFiles().files }));
}

function sendEdited(message, text) {
  messages.edit(null);
  stop(current);
  element("prompt").focus({ preventScroll: true });
  ask(add(current, message.parent, { role: "user", content: text, files: message.files }));
}

function again(message) {
  stop(current);
  ask(until(current, message).at(-2));
}

function chosen(message) {
  choose(current, message);
  keepAndList();
}

function continued(message) {
  try {
    goOn(current, message, settingsOf());
  } catch (error) {
    tell(error.message);
  }
  draw();
}

function giveResults(message, results) {
  let last = message;
  message.calls.forEach((call, index) => {
    last = add(current, last.id, { role: "tool", tool_call_id: call.id, name: call.function.name, content: results[index] });
  });
  ask(last);
}

function edit(message) {
  messages.edit(message?.id ?? null);
  draw();
}

/** Note that answers have grown, or ended with `ended` as the first of them. */
function answered(chat, ended) {
  const isOver = ended && !isBusy(chat.id);
  if (chat === current) {
    messages.drawSoon();
    if (isOver) announce(ended.error ?? (ended.end === "stopped" ? "The answer was stopped." : "The answer is complete."));
  } else if (isOver) list.unread.add(chat.id);
  if (isOver || chat === current) drawButtons();
  if (isOver) list.refresh();
}

// --- What is shown ---------------------------------------------------------------------------------
function draw() {
  if (current.messages.length) messages.draw();
  else drawWelcome();
  element("chat-name").textContent = current.title;
  element("chat-tools").hidden = !current.messages.length;
  drawButtons();
  list.draw();
}

function drawButtons() {
  const isRunning = isBusy(current.id);
  const [hidden, shown] = isRunning ? ["send", "stop"] : ["stop", "send"];
  const hadFocus = document.activeElement === element(hidden);
  element(hidden).hidden = true;
  element(shown).hidden = false;
  // Not to the other button: the next space of a writer would press it.  On a phone, the keyboard stays away.
  if (hadFocus) element(narrow.matches ? "messages" : "prompt").focus({ preventScroll: true });
}

function drawWelcome() {
  const drawnFor = JSON.stringify([model.model, model.modalities, store.isForgetful()]);
  // A button of it may have the focus, or get it back from a dialog.
  if (document.getElementById("welcome")?.dataset.drawnFor === drawnFor) return;
  const attach = (text) => {
    element("prompt").value ||= text;
    element("file-chooser").click();
  };
  const drawn = welcome(model, store.isForgetful(), send, attach);
  drawn.dataset.drawnFor = drawnFor;
  element("messages").replaceChildren(drawn);
}
