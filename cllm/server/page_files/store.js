// Chats in this browser: IndexedDB has a head of each chat for the list, and its body with all messages.

import { fromOldChat } from "./tree.js";

const OLD = "cllm.chats"; // in localStorage, before there was a database
const MODES = { read: "readonly", write: "readwrite" };
const tabs = new BroadcastChannel("cllm.chats");

let database = null; // a promise
let memory = null; // heads and bodies, if the browser keeps nothing

/** Open the database; move chats of an earlier page into it. */
async function opened() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("cllm", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("heads", { keyPath: "id" });
      request.result.createObjectStore("bodies", { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return database;
}

/** Run `work` on the two stores in one transaction; return the result of the request that it makes last. */
async function transact(mode, work) {
  const transaction = (await opened()).transaction(["heads", "bodies"], MODES[mode]);
  const request = work(transaction.objectStore("heads"), transaction.objectStore("bodies"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error ?? request?.error);
  });
}

const headOf = ({ id, title, updated }) => ({ id, title, updated });

/** Return the heads of all chats, the latest first.  Without a database, chats last as long as the page. */
export async function heads() {
  let all;
  try {
    if (localStorage.getItem(OLD)) {
      await keepAll(JSON.parse(localStorage.getItem(OLD)).map(fromOldChat));
      localStorage.removeItem(OLD);
    }
    all = await transact("read", (heads) => heads.getAll());
  } catch (error) {
    console.warn("chats are not kept:", error);
    memory ??= new Map();
    all = [...memory.values()].map(headOf);
  }
  return all.sort((one, other) => other.updated - one.updated);
}

/** True if chats end with the page. */
export const isForgetful = () => memory !== null;

/** Return a chat; undefined if another tab has removed it. */
export async function load(id) {
  return memory ? memory.get(id) : transact("read", (_, bodies) => bodies.get(id));
}

/** Return all chats. */
export async function loadAll() {
  return memory ? [...memory.values()] : transact("read", (_, bodies) => bodies.getAll());
}

/** Keep a chat as it is now, and tell other tabs.  Throws if the browser has no room for it. */
export const keep = (chat) => keepAll([chat]);

export async function keepAll(chats) {
  if (memory) chats.forEach((chat) => memory.set(chat.id, chat));
  else {
    await transact("write", (heads, bodies) => {
      for (const chat of chats) {
        heads.put(headOf(chat));
        bodies.put(chat);
      }
    });
  }
  chats.forEach((chat) => tabs.postMessage({ id: chat.id }));
}

/** Remove a chat. */
export async function remove(id) {
  if (memory) memory.delete(id);
  else {
    await transact("write", (heads, bodies) => {
      heads.delete(id);
      bodies.delete(id);
    });
  }
  tabs.postMessage({ id });
}

/** Return the ids of the chats whose title or messages contain a text, in any case. */
export async function search(text) {
  const sought = text.toLowerCase();
  const contains = (chat) =>
    chat.title.toLowerCase().includes(sought) || chat.messages.some((message) => message.content.toLowerCase().includes(sought));
  if (memory) return [...memory.values()].filter(contains).map((chat) => chat.id);
  const found = [];
  await transact("read", (_, bodies) => {
    bodies.openCursor().onsuccess = ({ target: { result: cursor } }) => {
      if (!cursor) return;
      if (contains(cursor.value)) found.push(cursor.key);
      cursor.continue();
    };
  });
  return found;
}

/** Call `heard(id)` when another tab has changed or removed a chat. */
export function onChange(heard) {
  tabs.addEventListener("message", ({ data }) => heard(data.id));
}
