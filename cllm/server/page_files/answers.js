// Answers that are being written, of any number of chats at once.

import { asContent } from "./files.js";
import { ask, errorOf, eventsOf } from "./server.js";
import { add, newId, until } from "./tree.js";

const KEPT_EVERY_MS = 2000; // an answer that is being written, so that a reload loses little

const ELSEWHERE_MS = 2 * KEPT_EVERY_MS; // after this time without a word, another tab no longer writes

const running = new Map(); // answer: the request that it belongs to, { chat, controller, id }
const elsewhere = new Map(); // id of an answer that another tab writes: the timer after which it counts as silent
let changed = () => {};
let keepChat = async () => {};

/** Call `onChange(chat)` for each piece of an answer, `onChange(chat, answer)` when those that were asked for together have
 * ended, with the first of them, and `keep(chat)` from time to time. */
export function onAnswers(onChange, keep) {
  changed = onChange;
  keepChat = keep;
}

/** True if an answer is being written, here or by another tab. */
export const isWritten = (answer) => running.has(answer) || (!answer.end && elsewhere.has(answer.id));

/** Return the ids of the answers of a chat that are being written here. */
export const writingOf = (chat) => [...running].filter(([, each]) => each.chat === chat).map(([{ id }]) => id);

/** Note the ids of answers that another tab writes; call `silent()` when it has not done so for some time. */
export function noteElsewhere(ids, silent) {
  for (const id of ids) {
    clearTimeout(elsewhere.get(id));
    const forget = () => {
      elsewhere.delete(id);
      silent();
    };
    elsewhere.set(id, setTimeout(forget, ELSEWHERE_MS));
  }
}

/** True if an answer of a chat is being written. */
export const isBusy = (id) => busyChat(id) !== undefined;

/** Return a chat with this id of which an answer is being written; undefined without one. */
export const busyChat = (id) => [...running.values()].find(({ chat }) => chat.id === id)?.chat;

/** Return the chat that a request of the engine answers; undefined if it is none of this page. */
export function chatOf(requestId) {
  const [id] = requestId.split("/"); // what follows is the number of one of several answers
  return [...running.values()].find((request) => request.id === id)?.chat;
}

/** True if an answer ended before the model ended it, so that it can be continued. */
export function isCut(answer) {
  if (answer.role !== "assistant" || isWritten(answer) || answer.calls?.length) return false;
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
    add(chat, message.id, { role: "assistant", reasoning: "", calls: [], model: body.model, group, nAnswers: n }),
  );
  chat.chosen[message.id] = answers[0].id;
  await write(chat, answers, { ...body, seed, messages });
}

/** Go on with an answer that was cut. */
export async function goOn(chat, cut, { body, seed, system }) {
  const messages = asked(chat, cut, system);
  delete cut.end;
  delete cut.error;
  await write(chat, [cut], { ...body, seed, messages, continue_final_message: true, add_generation_prompt: false });
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

/** Write answers by one request: browsers have six connections to a server, for all tabs together. */
async function write(chat, answers, body) {
  const controller = new AbortController();
  const request = { chat, controller, id: null };
  const touch = (each) => (each.version = (each.version ?? 0) + 1);
  const end = (fields) => answers.filter((each) => !each.end).forEach((each) => Object.assign(each, fields));
  for (const each of answers) {
    running.set(each, request);
    touch(each);
  }
  changed(chat);
  const began = performance.now();
  const keeping = setInterval(() => keepChat(chat), KEPT_EVERY_MS);
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...body, n: answers.length, stream: true, stream_options: { include_usage: true } }),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    request.id = response.headers.get("x-request-id");
    for await (const event of eventsOf(response)) {
      const ms = performance.now() - began;
      for (const choice of event.choices) {
        take(answers[choice.index], choice, ms);
        touch(answers[choice.index]);
      }
      if (event.usage) answers.forEach((each) => count(each, event.usage.completion_tokens, ms / 1000));
      changed(chat);
    }
    end({ end: "lost" });
  } catch (error) {
    end(controller.signal.aborted ? { end: "stopped" } : { end: "lost", error: error.message });
  } finally {
    clearInterval(keeping);
    for (const each of answers) {
      running.delete(each);
      touch(each);
    }
    chat.updated = Date.now();
    await keepChat(chat);
    changed(chat, answers[0]);
  }
}

/** Add a piece to an answer. */
function take(written, { delta, finish_reason }, ms) {
  if (delta.content || delta.reasoning_content || delta.tool_calls) written.first ??= ms;
  if (delta.content && written.reasoning) written.thought ??= ms / 1000;
  written.content += delta.content ?? "";
  written.reasoning = (written.reasoning ?? "") + (delta.reasoning_content ?? "");
  written.calls ??= [];
  for (const piece of delta.tool_calls ?? []) {
    const call = (written.calls[piece.index] ??= { id: piece.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  }
  if (finish_reason) written.end = finish_reason;
}

/** Add what a request has taken; an answer that was continued had several. */
function count(written, nTokens, seconds) {
  written.nTokens = (written.nTokens ?? 0) + nTokens;
  written.seconds = (written.seconds ?? 0) + seconds;
}
