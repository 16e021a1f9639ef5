// The server that the page came from: requests with the key, and server-sent events.

import { element } from "./node.js";
import { session } from "./storage.js";

const KEY = "cllm.key";
const GONE = "The server does not answer. It may have stopped, or this machine has lost the network.";
const N_SILENT = 3; // keep-alives that do not come before a stream counts as lost

/** Ask; with the key, if there is one, and with a question for it if there has to be. */
export async function ask(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers };
    const key = session.get(KEY);
    if (key) headers.authorization = `Bearer ${key}`;
    const response = await answerTo(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (key !== session.get(KEY)) continue; // another request has been given one
    await askForKey(key ? await errorOf(response) : "");
    options.signal?.throwIfAborted();
  }
}

/** Ask as the operator of the server, with the admin key. */
export function askAsAdmin(path, key, body, method = "POST") {
  const headers = { "content-type": "application/json", authorization: `Bearer ${key}` };
  return answerTo(path, { method, headers, body: JSON.stringify(body) });
}

let gone = () => {};

/** Call `heard()` when the server does not answer. */
export function onGone(heard) {
  gone = heard;
}

async function answerTo(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    gone();
    throw new Error(GONE);
  }
}

/** The key that the server asks for was not given. */
export class NoKeyError extends Error {
  constructor() {
    super("This server asks for an API key.");
  }
}

let asking = null; // several requests are rejected at once, and ask once

function askForKey(problem) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = element("key-dialog");
    element("key-problem").textContent = problem && `The key was not accepted: ${problem}.`;
    dialog.onclose = () => {
      asking = null;
      if (dialog.returnValue !== "use") return reject(new NoKeyError());
      const key = element("key").value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) return resolve(askForKey("it may have letters, digits and signs of ASCII"));
      session.set(KEY, key);
      resolve();
    };
    dialog.returnValue = "";
    dialog.showModal();
  });
  return asking;
}

/** Return the message of an answer that is an error. */
export async function errorOf(response) {
  try {
    const { error } = await response.json();
    return error.message ?? error; // on Ollama's routes it is a text
  } catch {
    return `${response.status} ${response.statusText}`.trim();
  }
}

let silentMs = 0; // the longest silence of a stream; 0: any

/** Note after how many seconds without output the server sends a keep-alive; 0: never. */
export function setPings(seconds = 0) {
  silentMs = Math.min(2 ** 31 - 1, 1000 * N_SILENT * seconds); // a timer waits no longer
}

let model = ""; // of the last event that names one
let heardModel = () => {};

/** Call `heard(name)` when the events of an answer name another model than the ones before. */
export function onModel(heard) {
  heardModel = heard;
}

/** Yield the data of the events of an answer, as they come; throw if one of them is an error. */
export async function* eventsOf(response) {
  for await (const event of partsOf(response, "\n\n", silentMs)) {
    if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
    const data = JSON.parse(event.slice(6));
    if (data.error) throw new Error(data.error.message);
    if (data.model && data.model !== model) heardModel((model = data.model));
    yield data;
  }
}

/** Yield the lines of an answer, which are JSON, as they come. */
export async function* linesOf(response) {
  for await (const line of partsOf(response, "\n")) yield JSON.parse(line);
}

async function* partsOf(response, end, longest = 0) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const piece = await pieceOf(reader, longest);
      if (piece.done) return;
      text += piece.value;
      const parts = text.split(end);
      text = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection ends with its reader
  }
}

/** Read a piece; throw if the connection is lost, or silent for longer than `longest` milliseconds. */
async function pieceOf(reader, longest) {
  let waiting;
  const silence = new Promise((_, reject) => {
    if (longest) waiting = setTimeout(() => reject(new Error("silent")), longest);
  });
  try {
    return await Promise.race([reader.read(), silence]);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    gone();
    throw new Error("The connection to the server is lost.");
  } finally {
    clearTimeout(waiting);
  }
}
