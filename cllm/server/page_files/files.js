// Files for a message: chosen, pasted or dropped.  Pictures are made smaller; texts are read.  They are shown above the
// message until it is sent.  A file is { kind, name, url } or, of the kind "text", { kind, name, text }.

import { element, node } from "./node.js";
import { tell } from "./notes.js";

const SIDE = 1536; // pixels of the longer side of a picture
const KEPT_BYTES = 256 * 1024; // a picture up to this size stays as it is
const KEPT_TYPES = ["image/png", "image/jpeg", "image/webp"];
const AUDIO_BYTES = 3 * 1024 * 1024; // of a recording, which stays as it is
const TEXT_BYTES = 1024 * 1024;
const MESSAGE_BYTES = 16 * 1024 * 1024; // of all files of a message
const AUDIO_NAMES = /\.(wav|flac|mp3|ogg|oga|aif|aiff)$/i;
const N_MAX = 16; // of one message
const NAMES = { image: "picture", audio: "recording", text: "text" };

let kinds = ["text"]; // that the model takes
let message = newMessage(); // the one that is being written

function newMessage() {
  return { files: [], read: Promise.resolve() }; // `read` ends when those that were added are in `files`
}

/** Accept text files by button, paste and drop. */
export function takeFiles() {
  const chooser = element("file-chooser");
  element("add-file").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    add(chooser.files);
    chooser.value = ""; // the same file may be chosen again
  });
  element("prompt").addEventListener("paste", (event) => {
    const { files, types } = event.clipboardData;
    // Word and Excel add a picture of the text.  Finder adds the names of its files, but no HTML.
    const isText = ["text/plain", "text/html"].every((type) => types.includes(type));
    if (!files.length || isText) return;
    event.preventDefault();
    add(files);
  });
  const place = element("chat");
  place.addEventListener("dragover", (event) => place.classList.toggle("dropping", carriesFiles(event)));
  place.addEventListener("dragleave", () => place.classList.remove("dropping"));
  place.addEventListener("drop", (event) => {
    place.classList.remove("dropping");
    add(event.dataTransfer.files);
  });
  // The browser would open a file that is dropped beside the chat, and leave the page.
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => carriesFiles(event) && event.preventDefault());
  takeKinds([]);
}

const carriesFiles = ({ dataTransfer }) => [...dataTransfer.types].includes("Files");

/** Accept pictures or recordings, too: "image", "audio". */
export function takeKinds(media) {
  kinds = [...media, "text"];
  const named = kinds.map((kind) => NAMES[kind]).join(" or ");
  element("add-file").setAttribute("aria-label", `Add a ${named}`);
  element("add-file").title = `Add a ${named}; pasting and dropping work too`;
}

/** True if the message that is being written has files. */
export const hasFiles = () => message.files.length > 0;

/** Return a promise that the files that were added to the message are read. */
export const filesAreRead = () => message.read;

/** Return what the message that is being written has: { files, read }.  The next one begins without files. */
export function pickFiles() {
  const picked = message;
  setFiles();
  return picked;
}

/** Continue a message whose files were picked; those that are still being read will be added to it. */
export function setFiles(picked = newMessage()) {
  message = picked;
  draw();
}

function draw() {
  const { files } = message;
  const remove = (index) => {
    message.files = files.filter((_, other) => other !== index);
    draw();
    element("prompt").focus();
  };
  element("files").replaceChildren(
    ...files.map((file, index) => {
      const name = `${NAMES[file.kind]} ${index + 1}`;
      return node(
        "li",
        {},
        preview(file, name[0].toUpperCase() + name.slice(1)),
        node("button", { type: "button", "aria-label": `Remove ${name}`, onclick: () => remove(index) }, "×"),
      );
    }),
  );
}

/** Add files, after those that are being read.  The list is copied: the browser empties it after the event. */
function add(list) {
  const [chosen, mine] = [[...list], message];
  mine.read = mine.read.then(() => take(chosen, mine));
}

async function take(chosen, mine) {
  for (const file of chosen) {
    let taken;
    try {
      taken = { name: file.name || "pasted", ...(await contentOf(file)) };
    } catch {
      const kind = kindOf(file);
      const why = kinds.includes(kind) ? `is ${LIMITS[kind]}` : `is a ${NAMES[kind]}, and this model takes none`;
      tell(`${file.name || "This file"} ${why}.`);
      continue;
    }
    const nBytes = [...mine.files, taken].reduce((sum, one) => sum + (one.url ?? one.text).length, 0);
    if (nBytes > MESSAGE_BYTES) {
      tell(`The files of a message have at most ${MESSAGE_BYTES / 1024 / 1024} MB.`);
      return;
    }
    if (mine.files.length >= N_MAX) {
      tell(`A message has at most ${N_MAX} files.`);
      return;
    }
    tell("");
    mine.files = [...mine.files, taken];
    if (mine === message) draw();
  }
}

const LIMITS = {
  image: "no picture that this browser can read",
  audio: `no recording of at most ${AUDIO_BYTES / 1024 / 1024} MB`,
  text: `no text of at most ${TEXT_BYTES / 1024 / 1024} MB`,
};

function kindOf(file) {
  if (AUDIO_NAMES.test(file.name) || file.type.startsWith("audio/")) return "audio";
  return file.type.startsWith("image/") ? "image" : "text";
}

/** Return kind and content of a file; throw if the model takes no such file. */
async function contentOf(file) {
  const kind = kindOf(file);
  if (!kinds.includes(kind)) throw new TypeError(file.type);
  if (kind === "text") {
    if (file.size > TEXT_BYTES) throw new RangeError(file.size);
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new TypeError("a file of bytes");
    return { kind, text };
  }
  if (kind === "image") return { kind, url: await smaller(file) };
  if (file.size > AUDIO_BYTES) throw new RangeError(file.size);
  return { kind, url: (await read(file)).replace(/^data:(?!audio\/)[^;,]*/, "data:audio/ogg") };
}

/** Return a picture as a data: URL, smaller if it is large. */
async function smaller(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= KEPT_BYTES && KEPT_TYPES.includes(file.type)) {
    bitmap.close();
    return read(file);
  }
  const canvas = node("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is transparent: JPEG has no such parts
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** Return a file as a node: a picture to look at, a recording to play, a text to open. */
export function preview(file, label) {
  if (file.kind === "text")
    return node("details", { class: "file" }, node("summary", { "aria-label": `${label}: ${file.name}` }, file.name), node("pre", {}, file.text));
  return file.kind === "audio"
    ? node("audio", { src: file.url, controls: true, "aria-label": label })
    : node("img", { src: file.url, alt: label });
}

// --- What the server takes --------------------------------------------------------------------

/** Return a text and files as the content of a message of the API. */
export function asContent(text, attached = []) {
  if (!attached.length) return text;
  const parts = attached.map(partOf);
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

function partOf({ kind, name, url, text }) {
  if (kind === "text") {
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([marks]) => marks.length + 1)));
    return { type: "text", text: `${name}:\n${fence}\n${text}\n${fence}\n` };
  }
  if (kind === "image") return { type: "image_url", image_url: { url } };
  const [head, data] = url.split(",", 2);
  const format = head.match(/^data:audio\/(?:x-)?([a-z0-9]+)/i)?.[1] ?? "wav";
  return { type: "input_audio", input_audio: { data, format: format === "mpeg" ? "mp3" : format } };
}
