// Chats: kept in this browser, answered by the server, several answers side by side.

import { markdown, node } from "./markdown.js";
import { contentOf, hasPictures, pickPictures, picturesOf, preview, setPictures, textOf } from "./pictures.js";
import { ask, errorOf, eventsOf } from "./server.js";

const CHATS = "cllm.chats";
const SETTINGS = "cllm.settings";
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "n", "reasoning_effort", "schema", "tools"];
const element = (id) => document.getElementById(id);

let chats = [];
let current = null;
const removed = new Set(); // which another tab may still have
let running = null; // { controller } of the answers that are being written

export function startChat() {
  chats = read(CHATS, []);
  current = chats[0] ?? begin();
  const settings = read(SETTINGS, {});
  for (const name of FIELDS) {
    if (settings[name] !== undefined) element(name).value = settings[name];
    element(name).addEventListener("change", keepSettings);
  }
  element("new-chat").addEventListener("click", () => open(begin()));
  element("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  element("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  element("stop").addEventListener("click", stop);
  addEventListener("storage", (event) => {
    // Another tab has changed them; what is written here stays here.
    if (event.key === CHATS && !running) {
      chats = read(CHATS, []);
      current = chats.find((chat) => chat.id === current.id) ?? chats[0] ?? begin();
      draw();
    }
  });
  draw();
}

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function keep() {
  // Of two tabs each keeps the chats of the other.
  const others = read(CHATS, []).filter((chat) => chat.id !== current.id && !removed.has(chat.id));
  chats = current.messages.length ? [current, ...others] : others;
  try {
    localStorage.setItem(CHATS, JSON.stringify(chats));
  } catch {
    element("status").textContent = "This browser has no room for more chats.";
  }
}

function keepSettings() {
  localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(FIELDS.map((name) => [name, element(name).value]))));
}

function begin() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: [] };
}

function open(chat) {
  stop();
  current = chat;
  draw();
  element("prompt").focus();
}

function remove(chat) {
  removed.add(chat.id);
  if (chat === current) current = chats.find((other) => other !== chat) ?? begin();
  keep();
  draw();
}

function titleOf(chat) {
  if (!chat.messages.length) return "New chat";
  return textOf(chat.messages[0].content).slice(0, 60) || (picturesOf(chat.messages[0].content)[0]?.startsWith("data:audio/") ? "A recording" : "A picture");
}

// --- What is asked --------------------------------------------------------------------------
function send() {
  const text = element("prompt").value;
  if (running || !(text.trim() || hasPictures())) return;
  const content = contentOf(text, pickPictures());
  element("prompt").value = "";
  current.messages.push({ role: "user", content });
  keep();
  answer();
}

/** Write an answer to the chat as it is. */
async function answer() {
  let settings;
  try {
    settings = settingsOf();
  } catch (error) {
    current.messages.push({ role: "assistant", chosen: 0, variants: [{ content: "", error: error.message }] });
    keep();
    draw();
    return;
  }
  const chat = current;
  const messages = asked(chat, settings.system);
  const variants = Array.from({ length: settings.n }, () => ({ content: "", reasoning: "", calls: [] }));
  chat.messages.push({ role: "assistant", chosen: 0, variants });
  const controller = new AbortController();
  running = { controller };
  draw();
  try {
    await Promise.all(
      variants.map((variant, index) => {
        const seed = settings.seed === undefined ? {} : { seed: settings.seed + index };
        return write(variant, { ...settings.body, ...seed, messages }, controller.signal);
      }),
    );
  } finally {
    running = null;
  }
  const shown = current;
  current = chat;
  keep();
  current = shown;
  draw();
}

/** What the settings say; throws what is wrong with them. */
function settingsOf() {
  const number = (name) => (element(name).value === "" ? undefined : Number(element(name).value));
  const json = (name, what) => {
    const text = element(name).value.trim();
    try {
      return text ? JSON.parse(text) : undefined;
    } catch (error) {
      throw new Error(`${what}: ${error.message}`);
    }
  };
  const schema = json("schema", "JSON schema");
  const body = {
    model: element("model-name").value || element("model").textContent || undefined,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    reasoning_effort: element("reasoning_effort").value || undefined,
    tools: json("tools", "Tools"),
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema } },
  };
  const n = Math.min(8, Math.max(1, number("n") ?? 1));
  return { body, n, seed: number("seed"), system: element("system").value };
}

/** The messages as the server takes them. */
function asked(chat, system) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of chat.messages) {
    if (message.role !== "assistant") messages.push(message);
    else {
      const { content, calls } = message.variants[message.chosen];
      messages.push(calls?.length ? { role: "assistant", content, tool_calls: calls } : { role: "assistant", content });
    }
  }
  return messages;
}

async function write(variant, body, signal) {
  const began = performance.now();
  let nTokens = 0;
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      nTokens = event.usage?.completion_tokens ?? nTokens;
      const choice = event.choices[0];
      if (!choice) continue;
      take(variant, choice.delta);
      if (variant.first === undefined && Object.values(choice.delta).some((value) => value && value !== "assistant"))
        variant.first = performance.now() - began;
      if (choice.finish_reason) variant.end = choice.finish_reason;
      drawSoon();
    }
  } catch (error) {
    if (signal.aborted) variant.end = "stopped";
    else variant.error = error.message;
  }
  variant.seconds = (performance.now() - began) / 1000;
  variant.nTokens = nTokens;
}

function take(variant, delta) {
  variant.content += delta.content ?? "";
  variant.reasoning += delta.reasoning_content ?? "";
  for (const piece of delta.tool_calls ?? []) {
    const call = (variant.calls[piece.index] ??= { id: piece.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }
}

function stop() {
  running?.controller.abort();
}

/** Forget a message and all behind it. */
function cut(index) {
  stop();
  current.messages.splice(index);
}

// --- What is shown --------------------------------------------------------------------------
let isDue = false;

/** Draw at the next frame, once. */
function drawSoon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    drawMessages({ lastOnly: true });
  });
}

function draw() {
  element("chats").replaceChildren(
    ...(current.messages.length && !chats.includes(current) ? [current, ...chats.filter((chat) => chat.id !== current.id)] : chats).map((chat) =>
      node(
        "li",
        {},
        node("button", { "aria-current": chat.id === current.id && "true", onclick: () => open(chat) }, titleOf(chat)),
        node("button", { "aria-label": `Delete ${titleOf(chat)}`, onclick: () => remove(chat) }, "×"),
      ),
    ),
  );
  element("send").hidden = Boolean(running);
  element("stop").hidden = !running;
  drawMessages({ lastOnly: false });
}

function drawMessages({ lastOnly }) {
  const box = element("messages");
  const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  const last = current.messages.length - 1;
  if (lastOnly && box.children.length === last + 1 && last >= 0) box.lastChild.replaceWith(drawn(current.messages[last], last));
  else box.replaceChildren(...current.messages.map(drawn));
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

function drawn(message, index) {
  if (message.role === "assistant") return drawnAnswer(message, index);
  const who = message.role === "tool" ? `Result of ${message.name ?? "the tool"}` : "You";
  return node(
    "div",
    { class: "message user" },
    node(
      "p",
      { class: "who" },
      who,
      node("span", { class: "tools" }, message.role === "user" && node("button", { onclick: () => edit(index) }, "Edit")),
    ),
    node(
      "div",
      { class: "text" },
      node(
        "div",
        { class: "shown" },
        ...picturesOf(message.content).map((url, number) => preview(url, `File ${number + 1} of the message`)),
      ),
      textOf(message.content),
    ),
  );
}

function edit(index) {
  element("prompt").value = textOf(current.messages[index].content);
  setPictures(picturesOf(current.messages[index].content));
  cut(index);
  keep();
  draw();
  element("prompt").focus();
}

function drawnAnswer(message, index) {
  const isLast = index === current.messages.length - 1;
  const isSeveral = message.variants.length > 1;
  const again = () => {
    cut(index);
    answer();
  };
  return node(
    "div",
    { class: `message assistant${isSeveral ? " several" : ""}` },
    node(
      "p",
      { class: "who" },
      "Model",
      node("span", { class: "tools" }, running && isLast ? null : node("button", { onclick: again }, "Regenerate")),
    ),
    node("div", { class: "variants" }, ...message.variants.map((variant, number) => drawnVariant(message, variant, number, isLast))),
  );
}

function drawnVariant(message, variant, number, isLast) {
  const isSeveral = message.variants.length > 1;
  const choose = () => {
    message.chosen = number;
    keep();
    draw();
  };
  return node(
    "div",
    { class: `variant${message.chosen === number ? " chosen" : ""}` },
    variant.reasoning ? node("details", {}, node("summary", {}, "Reasoning"), node("pre", {}, variant.reasoning)) : null,
    ...markdown(variant.content),
    ...(variant.calls ?? []).map((call) => drawnCall(call)),
    isLast && !running && variant.calls?.length && message.chosen === number ? results(variant) : null,
    variant.error ? node("p", { class: "error", role: "alert" }, variant.error) : null,
    node(
      "p",
      { class: "facts tools" },
      factsOf(variant),
      variant.content ? node("button", { onclick: () => navigator.clipboard.writeText(variant.content) }, "Copy") : null,
      isSeveral && message.chosen !== number ? node("button", { onclick: choose }, "Go on with this one") : null,
    ),
  );
}

function drawnCall(call) {
  return node(
    "details",
    {},
    node("summary", {}, `Calls ${call.function.name}`),
    node("pre", {}, call.function.arguments),
  );
}

/** What the tools are to have said, for the model to go on with. */
function results(variant) {
  const fields = variant.calls.map((call) => node("textarea", { rows: 2, "aria-label": `Result of ${call.function.name}` }));
  const give = () => {
    variant.calls.forEach((call, index) =>
      current.messages.push({ role: "tool", tool_call_id: call.id, name: call.function.name, content: fields[index].value }),
    );
    answer();
  };
  return node("div", {}, ...fields, node("button", { onclick: give }, "Give the results"));
}

function factsOf(variant) {
  if (variant.seconds === undefined) return "";
  const facts = [];
  if (variant.end && variant.end !== "stop") facts.push(variant.end === "length" ? "cut: no more tokens" : variant.end);
  if (variant.nTokens) facts.push(`${variant.nTokens} tokens, ${(variant.nTokens / variant.seconds).toFixed(1)} a second`);
  if (variant.first !== undefined) facts.push(`first after ${variant.first.toFixed(0)} ms`);
  return facts.join(" · ");
}
