// The models of the server: which one answers and is watched, and the download of another.

import { element, node } from "./node.js";
import { askAsAdmin, errorOf, linesOf } from "./server.js";
import { local } from "./storage.js";

const CHOSEN = "cllm.model"; // the model that was chosen last, of several

let reconnect = async () => {};
let isOne = true; // the server has one model

/** Call `connect()` to show which models there are now, and `watch()` after another one is to be watched. */
export function startModels(connect, watch) {
  reconnect = connect;
  element("watched").addEventListener("change", watch);
  element("model-name").addEventListener("change", () => local.set(CHOSEN, element("model-name").value));
  element("show-models").addEventListener("click", openModels);
  element("models").addEventListener("close", () => (element("admin-key").value = ""));
  element("pull").addEventListener("submit", (event) => {
    event.preventDefault();
    pull(element("pull-name").value.trim());
  });
}

/** Open the dialog with the models and the download. */
export function openModels() {
  element("models").showModal();
  reconnect();
}

/** Show which models there are, after `health` of the server. */
export function showModels({ model, models }) {
  isOne = !models;
  const known = isOne ? [[model, "loaded"]] : Object.entries(models);
  element("models-here").replaceChildren(...known.map(([name, status]) => node("li", {}, `${name}: ${status}`)));
  const names = isOne ? [] : known.map(([name]) => name);
  offer("model-name", names, [], local.get(CHOSEN));
  // Without a choice, the first loaded model is shown.
  offer("watched", ["", ...names], ["the first loaded one"]);
}

function offer(id, values, texts, wanted) {
  const chosen = values.includes(wanted) ? wanted : element(id).value;
  element(id).replaceChildren(...values.map((value, index) => new Option(texts[index] ?? value, value, false, value === chosen)));
  element(id).parentElement.hidden = isOne;
}

/** Return what follows a path of the server, so that the watched model answers. */
export function watched() {
  const name = element("watched").value;
  return name && `?model=${encodeURIComponent(name)}`;
}

async function pull(name) {
  const bar = element("pull-progress");
  const key = element("admin-key").value.trim();
  let end = "";
  element("pull-start").disabled = true;
  element("pull-cancel").hidden = false;
  element("pull-cancel").onclick = () => answered("api/pull", key, undefined, "DELETE").catch((error) => say(sentence(error)));
  say("Downloading …");
  try {
    if (!/^[\x21-\x7e]+$/.test(key)) throw new Error("A key has letters, digits and signs of ASCII");
    let pulled = null;
    const lines = linesOf(await answered("api/pull", key, { model: name }));
    end = " The download goes on at the server, or continues where it ended.";
    for await (const line of lines) {
      if (line.error) end = "";
      if (line.error) throw new Error(line.error);
      if (line.status === "success") pulled = line.model;
      if (!line.total) continue;
      bar.hidden = false;
      [bar.max, bar.value] = [line.total, line.completed];
      element("pull-bytes").textContent = `${megabytes(line.completed)} of ${megabytes(line.total)} MB`;
    }
    if (!pulled) throw new Error("The connection to the server is lost");
    end = "";
    hideCancel();
    await use(pulled, key);
  } catch (error) {
    say(sentence(error) + end);
  } finally {
    bar.hidden = true;
    element("pull-bytes").textContent = "";
    element("pull-start").disabled = false;
    hideCancel();
  }
}

function hideCancel() {
  const hadFocus = document.activeElement === element("pull-cancel");
  element("pull-cancel").hidden = true;
  if (hadFocus) element("pull-name").focus();
}

const sentence = (error) => `${error.message.replace(/\.$/, "")}.`;

async function answered(path, key, body, method) {
  const response = await askAsAdmin(path, key, body, method);
  if (!response.ok) throw new Error(await errorOf(response));
  return response;
}

/** Let a model answer that has been downloaded: the only one of the server, or one more. */
async function use(name, key) {
  if (isOne) {
    say("Loading it beside the present model …");
    await answered("admin/reload", key, { model: name });
  }
  await reconnect();
  if (!isOne) {
    element("model-name").value = name;
    local.set(CHOSEN, name);
  }
  say(isOne ? `${name} answers from now on.` : `${name} is loaded by its first message.`);
}

function say(text) {
  element("pull-said").textContent = text;
}

function megabytes(n) {
  return (n / 1e6).toFixed(n < 1e8 ? 1 : 0);
}
