// Answers that are being written, of any number of chats at once.

import { asContent } from "./files.js";
import { ask, errorOf, eventsOf } from "./server.js";
import { add, newId, until } from "./tree.js";

const KEPT_EVERY_MS = 2000; // an answer that is being written, so that a reload loses little

const ELSEWHERE_MS = 2 * KEPT_EVERY_MS; // after this time without a word, another tab no longer writes

const running = new Map(); // answer: { chat, controller }
const elsewhere = new Map(); // id of an answer: when another tab last said that it writes it
let changed = () => {};
let keepChat = async () => {};

/** Call `onChange(chat, answer)` for each piece and each end of an answer, and `keep(chat)` from time to time. */
export function onAnswers(onChange, keep) {
  changed = onChange;
  keepChat = keep;
}

/** True if an answer is being written. */
export const isWriting = (answer) => running.has(answer);

/** Return the ids of the answers of a chat that are being written here. */
export const writingOf = (chat) => [...running].filter(([, each]) => each.chat === chat).map(([{ id }]) => id);

/** Note the ids of answers that another tab writes. */
export function noteElsewhere(ids) {
  ids.forEach((id) => elsewhere.set(id, performance.now()));
}

/** True if an answer of a chat is being written. */
export const isBusy = (id) => busyChat(id) !== undefined;

/** Return a chat with this id of which an answer is being written; undefined without one. */
export const busyChat = (id) => [...running.values()].find(({ chat }) => chat.id === id)?.chat;

/** Return the chat that a request of the engine answers; undefined if it is none of this page. */
export function chatOf(requestId) {
  for (const [written, { chat }] of running) if (requestId === written.request) return chat;
}

/** True if an answer ended before the model ended it, so that it can be continued. */
export function isCut(answer) {
  if (answer.role !== "assistant" || isWriting(answer) || answer.calls?.length) return false;
  if (!answer.end && performance.now() - (elsewhere.get(answer.id) ?? -ELSEWHERE_MS) < ELSEWHERE_MS) return false;
  return answer.end !== "stop" && Boolean(answer.content || answer.reasoning);
}

/** Stop the answers of a chat. */
export function stop(chat) {
  for (const each of running.values()) if (each.chat.id === chat.id) each.controller.abort();
}

/** Write `n` answers after a message; return when all have ended. */
export async function answer(chat, message, { body, n, seed, system }) {
  const messages = asked(chat, message, system);
  const group = newId();
  const answers = Array.from({ length: n }, () =>
    add(chat, message.id, { role: "assistant", reasoning: "", calls: [], model: body.model, group }),
  );
  chat.chosen[message.id] = answers[0].id;
  await Promise.all(
    answers.map((each, index) => write(chat, each, { ...body, seed: seed === undefined ? undefined : seed + index, messages })),
  );
}

/** Go on with an answer that was cut. */
export async function goOn(chat, cut, { body, seed, system }) {
  const messages = asked(chat, cut, system);
  delete cut.end;
  delete cut.error;
  await write(chat, cut, { ...body, seed, messages, continue_final_message: true, add_generation_prompt: false });
}

/** Return the messages from the first to this one as the server takes them. */
function asked(chat, last, system) {
  const before = system.trim() ? [{ role: "system", content: system }] : [];
  const isSaid = ({ role, content, reasoning, calls }) => role !== "assistant" || content || reasoning || calls?.length;
  return [...before, ...until(chat, last).filter(isSaid).map(asMessage)];
}

function asMessage({ role, content, files, calls, reasoning, tool_call_id, name, end }) {
  if (role === "user") return { role, content: asContent(content, files) };
  if (role === "tool") return { role, tool_call_id, name, content };
  const isUnended = end !== "stop" && !calls?.length; // to be continued from its thought on
  return {
    role,
    content,
    ...(calls?.length ? { tool_calls: calls } : {}),
    ...(isUnended && reasoning && !content ? { reasoning_content: reasoning } : {}),
  };
}

async function write(chat, written, body) {
  const controller = new AbortController();
  running.set(written, { chat, controller });
  changed(chat, written);
  const began = performance.now();
  const before = { nTokens: written.nTokens ?? 0, seconds: written.seconds ?? 0 };
  const keeping = setInterval(() => keepChat(chat), KEPT_EVERY_MS);
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    written.request = response.headers.get("x-request-id");
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) {
        written.nTokens = before.nTokens + event.usage.completion_tokens;
        written.seconds = before.seconds + (performance.now() - began) / 1000;
      }
      const choice = event.choices[0];
      if (!choice) continue;
      take(written, choice.delta, performance.now() - began);
      if (choice.finish_reason) written.end = choice.finish_reason;
      changed(chat, written);
    }
    written.end ??= "lost";
  } catch (error) {
    if (controller.signal.aborted) written.end = "stopped";
    else {
      written.end = "lost";
      written.error = error.message;
    }
  } finally {
    clearInterval(keeping);
    running.delete(written);
    chat.updated = Date.now();
    await keepChat(chat);
    changed(chat, written);
  }
}

function take(written, delta, now) {
  if (delta.content || delta.reasoning_content || delta.tool_calls) written.first ??= now;
  if (delta.content && written.reasoning) written.thought ??= now / 1000;
  written.content += delta.content ?? "";
  written.reasoning = (written.reasoning ?? "") + (delta.reasoning_content ?? "");
  written.calls ??= [];
  for (const piece of delta.tool_calls ?? []) {
    const call = (written.calls[piece.index] ??= { id: piece.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }
}
