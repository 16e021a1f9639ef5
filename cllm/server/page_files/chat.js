// The chat: one is shown, any number are answered; all are kept in this browser.

import { answer, busyChat, chatOf, goOn, isBusy, isWriting, noteElsewhere, onAnswers, stop, writingOf } from "./answers.js";
import { hasFiles, pickFiles, setFiles, takeFiles } from "./files.js";
import { List } from "./list.js";
import { Messages } from "./messages.js";
import { element, onEnter } from "./node.js";
import { announce, download, offer, tell } from "./notes.js";
import { settingsOf, startSettings } from "./settings.js";
import * as store from "./store.js";
import { add, asMarkdown, choose, fromFile, merge, newChat, path, until } from "./tree.js";
import { welcome } from "./welcome.js";

const FILE = "cllm-chats"; // what a file of chats is called, and says that it is

const narrow = matchMedia("(max-width: 45rem)"); // as in page.css
const drafts = new Map(); // id of a chat: what is being written there
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
  await store.start();
  await list.refresh();
  const isUntouched = current === fresh && !element("prompt").value && !hasFiles();
  if (list.heads.length && isUntouched) await openChat(list.heads[0].id);
  if (current === fresh) show(fresh);
}

/** Note what the server says of its model. */
export function setModel(health) {
  model = health;
  if (messages && !current.messages.length) drawWelcome();
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
    if (document.querySelector("dialog[open]") || element("view-chat").hidden) return;
    if (event.key === "Escape" && narrow.matches && !element("list").hidden) showList(false);
    else if (event.key === "Escape" && messages.editing) edit(null);
    else if (event.key === "Escape") stop(current);
    else if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      showList(true);
      element("search").focus();
    }
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
  if (id === current.id) return;
  const number = ++nShown;
  const chat = busyChat(id) ?? (await store.load(id));
  if (number !== nShown) return;
  if (chat) show(chat);
  else await list.refresh();
}

function show(chat) {
  nShown++;
  drafts.set(current.id, { text: element("prompt").value, files: pickFiles() });
  current = chat;
  const draft = drafts.get(chat.id) ?? { text: "", files: [] };
  element("prompt").value = draft.text;
  setFiles(draft.files);
  if (narrow.matches) showList(false);
  list.current = chat.id;
  list.unread.delete(chat.id);
  messages.open(chat);
  draw();
  element("prompt").focus({ preventScroll: true });
}

/** Keep a chat; say so if the browser has no room for it. */
async function keep(chat) {
  if (removed.has(chat.id)) return;
  try {
    await store.keep(chat, writingOf(chat));
  } catch (error) {
    const isFull = error?.name === "QuotaExceededError";
    tell(isFull ? "This browser has no room for more: export chats, then delete some." : `The chat is not kept: ${error?.message}.`);
  }
}

async function remove(head) {
  const chat = busyChat(head.id) ?? (head.id === current.id ? current : await store.load(head.id));
  stop({ id: head.id });
  removed.add(head.id);
  await store.remove(head.id);
  await list.refresh();
  if (head.id === current.id) {
    if (list.heads.length) await openChat(list.heads[0].id);
    else show(fresh = newChat());
  }
  if (!chat) return; // another tab has deleted it
  offer(`“${head.title}” is deleted.`, "Undo", async () => {
    removed.delete(head.id);
    await keep(chat);
    await list.refresh();
    show(chat);
  });
}

async function rename() {
  const title = prompt("Name of the chat", current.title)?.trim();
  if (!title) return;
  Object.assign(current, { title, isNamed: true });
  await keepAndList();
}

/** Take over what another tab has added to the chat that is shown. */
async function changedElsewhere(id, writing) {
  noteElsewhere(writing);
  await list.refresh();
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
  download(`${name}.json`, "application/json", JSON.stringify({ format: FILE, version: 1, chats }));
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

function send() {
  const text = element("prompt").value;
  if (isBusy(current.id) || !(text.trim() || hasFiles())) return;
  element("prompt").value = "";
  sendText(text);
}

function sendText(text) {
  messages.showEnd();
  ask(add(current, lastOf(current)?.id ?? "", { role: "user", content: text, files: pickFiles() }));
}

function sendEdited(message, text) {
  messages.editing = null;
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
  messages.editing = message?.id ?? null;
  draw();
}

/** Note that an answer has grown or ended. */
function answered(chat, written) {
  const isOver = !isWriting(written) && !isBusy(chat.id);
  if (chat === current) {
    messages.drawSoon();
    if (isOver) announce(written.error ?? (written.end === "stopped" ? "The answer was stopped." : "The answer is complete."));
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
  const attach = (text) => {
    element("prompt").value = text;
    element("file-chooser").click();
  };
  element("messages").replaceChildren(welcome(model, store.isForgetful(), sendText, attach));
}
