// A chat as a tree of messages: an edit or another answer is a branch beside the earlier one.
//
// A chat is { id, title, isNamed, updated, messages, chosen }.  A message is { id, parent, role, content, … };
// `parent` is the id of the message before it, or "".  `chosen` maps a parent to the child that is shown.
// Answers have { reasoning, calls, error, end, seconds, first, thought, nTokens, model, group }: answers of one
// question that were asked for together have the same `group`.

import { picturesOf, textOf } from "./files.js";

const ROOT = "";

export const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

/** Return an empty chat. */
export const newChat = () => ({ id: newId(), title: "New chat", isNamed: false, updated: Date.now(), messages: [], chosen: {} });

/** Return the messages that follow each message, in the order in which they were made. */
function children(chat) {
  const found = new Map();
  for (const message of chat.messages) {
    if (!found.has(message.parent)) found.set(message.parent, []);
    found.get(message.parent).push(message);
  }
  return found;
}

/** Return the shown messages, first to last, each with all that stand beside it: [{ message, siblings }]. */
export function path(chat) {
  const after = children(chat);
  const shown = [];
  for (let parent = ROOT; after.has(parent); parent = shown.at(-1).message.id) {
    const siblings = after.get(parent);
    const message = siblings.find((each) => each.id === chat.chosen[parent]) ?? siblings.at(-1);
    shown.push({ message, siblings });
  }
  return shown;
}

/** Return the messages from the first to this one. */
export function until(chat, message) {
  const byId = new Map(chat.messages.map((each) => [each.id, each]));
  const before = [];
  for (let each = message; each; each = byId.get(each.parent)) before.unshift(each);
  return before;
}

/** Add a message after the one with the id `parent`, and show it; return it. */
export function add(chat, parent, message) {
  const added = { id: newId(), parent, content: "", ...message };
  chat.messages.push(added);
  chat.chosen[parent] = added.id;
  if (!chat.isNamed && parent === ROOT) chat.title = titleOf(added);
  return added;
}

/** Show a message and, after it, what was shown last. */
export function choose(chat, message) {
  chat.chosen[message.parent] = message.id;
  if (!chat.isNamed && message.parent === ROOT) chat.title = titleOf(message);
}

/** Remove a message and all after it; return what `restore` needs. */
export function cut(chat, message) {
  const gone = new Set([message.id]);
  for (const each of chat.messages) if (gone.has(each.parent)) gone.add(each.id);
  const before = { messages: chat.messages, chosen: { ...chat.chosen } };
  chat.messages = chat.messages.filter((each) => !gone.has(each.id));
  if (chat.chosen[message.parent] === message.id) delete chat.chosen[message.parent];
  return before;
}

function titleOf({ content, files = [] }) {
  const text = content.trim().split("\n")[0].slice(0, 60);
  return text || { image: "A picture", audio: "A recording" }[files[0]?.kind] || files[0]?.name || "New chat";
}

/** Return a chat of a page before there were branches. */
export function fromOldChat(old) {
  const chat = { ...newChat(), id: old.id };
  let parent = ROOT;
  for (const message of old.messages ?? []) {
    if (message.role === "assistant") {
      const group = newId();
      const answers = message.variants.map((variant) => add(chat, parent, { role: "assistant", end: "stop", ...variant, group }));
      const chosen = answers[message.chosen] ?? answers[0];
      choose(chat, chosen);
      parent = chosen.id;
    } else {
      const files = picturesOf(message.content);
      parent = add(chat, parent, { ...message, content: textOf(message.content), files }).id;
    }
  }
  return chat;
}

/** Return a chat of a file, with an id of its own; throws if it is none. */
export function fromFile(chat) {
  const isText = (value) => typeof value === "string";
  const isMessage = (each) => each && [each.id, each.parent, each.role, each.content].every(isText);
  if (!chat || !isText(chat.title) || !Array.isArray(chat.messages) || !chat.messages.every(isMessage))
    throw new TypeError("this file has no chats of cllm's page");
  return { ...newChat(), title: chat.title, isNamed: true, updated: chat.updated ?? Date.now(), messages: chat.messages, chosen: chat.chosen ?? {} };
}

/** Return the shown messages as Markdown. */
export function asMarkdown(chat) {
  const named = { user: "You", assistant: "Model", tool: "Result of the tool" };
  const told = path(chat).map(({ message: { role, content, files = [], calls = [] } }) => {
    const parts = [`## ${named[role] ?? role}`, ...files.map((file) => `*${file.name}*`), content];
    parts.push(...calls.map((call) => `\`${call.function.name}(${call.function.arguments})\``));
    return parts.filter(Boolean).join("\n\n");
  });
  return `# ${chat.title}\n\n${told.join("\n\n")}\n`;
}
