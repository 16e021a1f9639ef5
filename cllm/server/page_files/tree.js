// A chat as a tree of messages: an edit or another answer is a branch beside the earlier one.
//
// A chat is { id, title, isNamed, updated, messages, chosen }.  A message is { id, parent, role, content, … };
// `parent` is the id of the message before it, or "".  `chosen` maps a parent to the child that is shown.
// Answers have { reasoning, calls, error, end, seconds, first, thought, nTokens, model, group, nAnswers, version }.
// Answers of one question that were asked for together have the same `group`; there are `nAnswers` of them, and
// `nTokens` is the number of tokens of all.  `version` grows with each change of an answer.

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

/** Add to a chat what another tab has stored of it: messages, and later versions of those that are here. */
export function merge(chat, stored) {
  const ours = new Map(chat.messages.map((each) => [each.id, each]));
  for (const each of stored.messages) {
    const own = ours.get(each.id);
    if (!own) chat.messages.push(each);
    else if ((each.version ?? 0) > (own.version ?? 0)) {
      Object.keys(own).forEach((name) => delete own[name]);
      Object.assign(own, each);
    }
  }
  if (stored.updated > chat.updated) Object.assign(chat, { title: stored.title, isNamed: stored.isNamed });
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

/** Return the text of a content of the API. */
function textOf(content) {
  if (!Array.isArray(content)) return content ?? "";
  return content.map((part) => part.text ?? "").join("");
}

/** Return the pictures and recordings of a content of the API. */
function picturesOf(content) {
  if (!Array.isArray(content)) return [];
  return content.flatMap((part) => {
    if (part.image_url) return [{ kind: "image", name: "picture", url: part.image_url.url }];
    if (!part.input_audio) return [];
    const { data, format } = part.input_audio;
    return [{ kind: "audio", name: "recording", url: `data:audio/${format === "mp3" ? "mpeg" : format};base64,${data}` }];
  });
}

const ROLES = ["user", "assistant", "tool"];
const isText = (value) => typeof value === "string";
const isMissingOr = (test) => (value) => value === undefined || test(value);

/** True if a value may be a field of a message. */
const FIELDS = {
  content: isText,
  role: (value) => ROLES.includes(value),
  files: isMissingOr((files) => Array.isArray(files) && files.every(isFile)),
  calls: isMissingOr((calls) => Array.isArray(calls) && calls.every(isCall)),
  reasoning: isMissingOr(isText),
  error: isMissingOr(isText),
  end: isMissingOr(isText),
  group: isMissingOr(isText),
  name: isMissingOr(isText),
  model: isMissingOr(isText),
  tool_call_id: isMissingOr(isText),
  nTokens: isMissingOr(Number.isFinite),
  nAnswers: isMissingOr(Number.isFinite),
  seconds: isMissingOr(Number.isFinite),
  first: isMissingOr(Number.isFinite),
  thought: isMissingOr(Number.isFinite),
};

const isFile = (file) => file && isText(file.name) && (file.kind === "text" ? isText(file.text) : isText(file.url) && file.url.startsWith("data:"));
const isCall = (call) => call && isText(call.id) && isText(call.function?.name) && isText(call.function?.arguments);

/** Return a chat of a file, with an id of its own and no other fields than ours; throw if it is none. */
export function fromFile({ title, updated, messages, chosen } = {}) {
  const known = new Set([ROOT]); // so that every message comes after an earlier one
  const isMessage = (each) => {
    if (!isText(each?.id) || known.has(each.id) || !known.has(each.parent)) return false;
    known.add(each.id);
    return Object.entries(FIELDS).every(([name, test]) => test(each[name]));
  };
  if (!isText(title) || !Array.isArray(messages) || !messages.every(isMessage))
    throw new TypeError("this file has no chats of cllm's page");
  const ours = messages.map((each) => {
    const fields = Object.keys(FIELDS).filter((name) => each[name] !== undefined);
    return { id: each.id, parent: each.parent, ...Object.fromEntries(fields.map((name) => [name, each[name]])) };
  });
  const isChoice = ([parent, child]) => known.has(parent) && known.has(child);
  return {
    ...newChat(),
    title,
    isNamed: true,
    updated: Number.isFinite(updated) ? updated : Date.now(),
    messages: ours,
    chosen: Object.fromEntries(Object.entries(chosen ?? {}).filter(isChoice)),
  };
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
