// The models of the server: which one answers and is watched, and the download of another.

import { element, node } from "./node.js";
import { errorOf, linesOf } from "./server.js";

const CHOICES = ["model-name", "watched"]; // of the chat, of the engine view
let reconnect = async () => {};
let isOne = true; // the server has one model

/** Call `connect()` after the models have changed, and `watch()` after another one is to be watched. */
export function startModels(connect, watch) {
  reconnect = connect;
  element("watched").addEventListener("change", watch);
  element("show-models").addEventListener("click", openModels);
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
  const names = Object.keys(models ?? {});
  for (const id of CHOICES) {
    const chosen = element(id).value;
    const options = names.map((name) => new Option(id === "watched" ? `${name} (${models[name]})` : name, name, false, name === chosen));
    element(id).replaceChildren(...options);
    element(id).parentElement.hidden = isOne;
  }
  const known = isOne ? [[model, "loaded"]] : Object.entries(models);
  element("models-here").replaceChildren(...known.map(([name, status]) => node("li", {}, `${name}: ${status}`)));
}

/** Return what follows a path of the server, so that the watched model answers. */
export function watched() {
  const name = element("watched").value;
  return name && `?model=${encodeURIComponent(name)}`;
}

function askAsAdmin(path, body) {
  const headers = { "content-type": "application/json", authorization: `Bearer ${element("admin-key").value.trim()}` };
  return fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
}

async function pull(name) {
  const bar = element("pull-progress");
  element("pull-start").disabled = true;
  try {
    say("Asking the hub …");
    const response = await askAsAdmin("api/pull", { model: name });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const { error, total, completed } of linesOf(response)) {
      if (error) throw new Error(error);
      if (!total) continue;
      bar.hidden = false;
      [bar.max, bar.value] = [total, completed];
      say(`${megabytes(completed)} of ${megabytes(total)} MB`);
    }
    await use(name);
  } catch (error) {
    say(`${error.message}. A download that was interrupted continues where it ended.`.replace("..", "."));
  } finally {
    bar.hidden = true;
    element("pull-start").disabled = false;
  }
}

/** Let a model answer that has been downloaded: the only one of the server, or one more. */
async function use(name) {
  if (isOne) {
    say("Loading it beside the present model …");
    const response = await askAsAdmin("admin/reload", { model: name });
    if (!response.ok) throw new Error(await errorOf(response));
  }
  await reconnect();
  if (!isOne) element("model-name").value = name;
  say(isOne ? `${name} answers from now on.` : `${name} is loaded by its first message.`);
}

function say(text) {
  element("pull-said").textContent = text;
}

function megabytes(n) {
  return (n / 1e6).toFixed(n < 1e8 ? 1 : 0);
}
