// Chats in this browser: IndexedDB has a head of each chat for the list, and its body with all messages.

import { fromOldChat, merge } from "./tree.js";

const OLD = "cllm.chats"; // in localStorage, before there was a database
const MODES = { read: "readonly", write: "readwrite" };
const tabs = channel();

let database = null; // a promise
let hasDatabase = true;
const held = new Map(); // chats that are not in the database: there is none, or it had no room

/** Return the channel to other tabs; one without an end if the browser denies it, as Firefox does with all site data. */
function channel() {
  try {
    return new BroadcastChannel("cllm.chats");
  } catch {
    return new MessageChannel().port1;
  }
}

/** Open the database, again if the browser has closed it. */
async function opened() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("cllm", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("heads", { keyPath: "id" });
      request.result.createObjectStore("bodies", { keyPath: "id" });
    };
    request.onsuccess = () => {
      const { result } = request;
      result.onclose = () => (database = null);
      result.onversionchange = () => {
        result.close();
        database = null;
      };
      resolve(result);
    };
    request.onerror = () => reject(request.error);
  });
  return database;
}

/** Run `work` on the two stores in one transaction; return the result of the request that it makes last. */
async function transact(mode, work) {
  const transaction = (await opened()).transaction(["heads", "bodies"], MODES[mode]);
  let request = null;
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.failure ?? transaction.error);
  });
  request = work(transaction.objectStore("heads"), transaction.objectStore("bodies"));
  return ended;
}

/** Put a chat into the stores, with what another tab has added to it; no head without its body. */
function put(heads, bodies, chat) {
  bodies.get(chat.id).onsuccess = ({ target: { result, transaction } }) => {
    try {
      if (result) merge(chat, result);
      heads.put(headOf(chat));
      bodies.put(chat);
    } catch (error) {
      transaction.failure = error;
      transaction.abort();
    }
  };
}

const headOf = ({ id, title, updated }) => ({ id, title, updated });

/** Prepare the database.  Without one that can be read, chats last as long as the page. */
export async function start() {
  try {
    await transact("read", (heads) => heads.getAll());
  } catch (error) {
    console.warn("chats are not kept:", error);
    hasDatabase = false;
    return;
  }
  try {
    const old = localStorage.getItem(OLD);
    if (old) await keepAll(JSON.parse(old).map(fromOldChat));
    localStorage.removeItem(OLD);
  } catch (error) {
    console.warn("the chats of an earlier page stay where they are:", error);
  }
}

/** Return what `ask` requests of the database, without that of held chats. */
async function stored(ask) {
  const all = hasDatabase ? await transact("read", ask) : [];
  return all.filter(({ id }) => !held.has(id));
}

/** Return the heads of all chats, the latest first. */
export async function heads() {
  const all = [...(await stored((heads) => heads.getAll())), ...[...held.values()].map(headOf)];
  return all.sort((one, other) => other.updated - one.updated);
}

/** True if chats end with the page. */
export const isForgetful = () => !hasDatabase;

/** Return a chat; undefined if another tab has removed it. */
export async function load(id) {
  return held.get(id) ?? (hasDatabase ? transact("read", (_, bodies) => bodies.get(id)) : undefined);
}

/** Return all chats. */
export async function loadAll() {
  return [...(await stored((_, bodies) => bodies.getAll())), ...held.values()];
}

/** Keep a chat with what another tab has added to it, and tell other tabs which of its answers are being written.
 * Throws if the browser has no room for it; the chat then lasts as long as the page. */
export const keep = (chat, writing = []) => keepAll([chat], writing);

/** Keep several chats. */
export async function keepAll(chats, writing = []) {
  let isKept = false;
  try {
    if (hasDatabase) await transact("write", (heads, bodies) => chats.forEach((chat) => put(heads, bodies, chat)));
    isKept = hasDatabase;
  } finally {
    for (const chat of chats) isKept ? held.delete(chat.id) : held.set(chat.id, chat);
  }
  chats.forEach(({ id }) => tabs.postMessage({ id, writing }));
}

/** Remove a chat. */
export async function remove(id) {
  held.delete(id);
  if (hasDatabase) {
    await transact("write", (heads, bodies) => {
      heads.delete(id);
      bodies.delete(id);
    });
  }
  tabs.postMessage({ id, writing: [], isRemoved: true });
}

/** Return the ids of the chats whose title or messages contain a text, in any case. */
export async function search(text) {
  const sought = text.toLowerCase();
  const contains = (chat) =>
    chat.title.toLowerCase().includes(sought) || chat.messages.some((message) => message.content.toLowerCase().includes(sought));
  const found = [...held.values()].filter(contains).map((chat) => chat.id);
  if (!hasDatabase) return found;
  await transact("read", (_, bodies) => {
    bodies.openCursor().onsuccess = ({ target: { result: cursor } }) => {
      if (!cursor) return;
      if (contains(cursor.value)) found.push(cursor.key);
      cursor.continue();
    };
  });
  return found;
}

/** Call `heard({ id, writing, isRemoved })` when another tab has changed or removed a chat; it writes the answers `writing`. */
export function onChange(heard) {
  tabs.addEventListener("message", ({ data }) => {
    if (data.isRemoved) held.delete(data.id);
    heard(data);
  });
}
