// Pictures and recordings for a message: chosen, pasted or dropped; pictures are made smaller.  They are shown
// above the text until it is sent.

import { node } from "./markdown.js";

const SIDE = 1536; // pixels of the longer side: the browser keeps chats, and has room for 5 MB
const KEPT_BYTES = 256 * 1024; // a file up to this size stays as it is
const KEPT_TYPES = ["image/png", "image/jpeg", "image/webp"];
const AUDIO_BYTES = 3 * 1024 * 1024; // of a recording, which stays as it is
const MESSAGE_BYTES = 16 * 1024 * 1024; // of all files of a message, as data: URLs
const AUDIO_NAMES = /\.(wav|flac|mp3|ogg|oga|aif|aiff)$/i;
const ACCEPTED = { image: "image/*", audio: ".wav,.flac,.mp3,.ogg,.oga,.aif,.aiff" };
const N_MAX = 16; // of one message
const element = (id) => document.getElementById(id);

let kinds = []; // that the model takes: "image", "audio"
let pictures = []; // data: URLs
let nMessages = 0; // for which pictures were picked: a file that is read later than its message is left out

/** Take files of these kinds by button, paste and drop from now on. */
export function takePictures(taken) {
  kinds = taken;
  const chooser = element("picture-files");
  chooser.accept = kinds.map((kind) => ACCEPTED[kind]).join(",");
  element("add-picture").hidden = false;
  const named = kinds.map((kind) => (kind === "image" ? "picture" : "recording")).join(" or ");
  element("add-picture").setAttribute("aria-label", `Add a ${named}`);
  element("add-picture").title = `Add a ${named}; pasting and dropping work too`;
  element("add-picture").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    add(chooser.files);
    chooser.value = ""; // the same file may be chosen again
  });
  element("prompt").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  const place = element("chat");
  place.addEventListener("dragover", (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    place.classList.add("dropping");
  });
  place.addEventListener("dragleave", () => place.classList.remove("dropping"));
  place.addEventListener("drop", (event) => {
    place.classList.remove("dropping");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
}

/** Whether the message that is being written has pictures. */
export const hasPictures = () => pictures.length > 0;

/** The pictures of the message that is being written, which has none from then on. */
export function pickPictures() {
  const picked = pictures;
  nMessages++;
  setPictures([]);
  return picked;
}

/** Let the message that is being written have these pictures. */
export function setPictures(urls) {
  pictures = urls;
  const remove = (index) => {
    setPictures(pictures.filter((_, other) => other !== index));
    element("prompt").focus();
  };
  element("pictures").replaceChildren(
    ...pictures.map((url, index) =>
      node(
        "li",
        {},
        preview(url, `${isAudio(url) ? "Recording" : "Picture"} ${index + 1}`),
        node("button", { type: "button", "aria-label": `Remove ${isAudio(url) ? "recording" : "picture"} ${index + 1}`, onclick: () => remove(index) }, "×"),
      ),
    ),
  );
}

/** Add files.  The list is copied: the browser empties it after the event. */
async function add(list) {
  const files = [...list];
  const message = nMessages;
  for (const file of files) {
    let url;
    try {
      url = await urlOf(file);
    } catch {
      const name = file.name || "This file";
      element("status").textContent = `${name} is ${kinds.map((kind) => LIMITS[kind]).join(" and ")}.`;
      continue;
    }
    if (message !== nMessages) return;
    const nBytes = [...pictures, url].reduce((sum, one) => sum + one.length, 0);
    if (nBytes > MESSAGE_BYTES) {
      element("status").textContent = `The files of a message have at most ${MESSAGE_BYTES / 1024 / 1024} MB.`;
      return;
    }
    if (pictures.length >= N_MAX) {
      element("status").textContent = `A message has at most ${N_MAX} files.`;
      return;
    }
    element("status").textContent = "";
    setPictures([...pictures, url]);
  }
}

const LIMITS = {
  image: "no picture that this browser can read",
  audio: `no recording of at most ${AUDIO_BYTES / 1024 / 1024} MB`,
};

/** A file as a data: URL, of a picture smaller if it is large; throws if the model takes no such file. */
async function urlOf(file) {
  const kind = AUDIO_NAMES.test(file.name) || file.type.startsWith("audio/") ? "audio" : "image";
  if (!kinds.includes(kind) || (kind === "audio" && file.size > AUDIO_BYTES)) throw new TypeError(file.type);
  if (kind === "audio") return (await read(file)).replace(/^data:(?!audio\/)[^;,]*/, "data:audio/ogg");
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

// --- Contents of messages ---------------------------------------------------------------------
const isAudio = (url) => url.startsWith("data:audio/");

/** A picture to look at, or a recording to play. */
export function preview(url, label) {
  return isAudio(url)
    ? node("audio", { src: url, controls: true, "aria-label": label })
    : node("img", { src: url, alt: label });
}

/** A text, pictures and recordings as the content of a message. */
export function contentOf(text, urls) {
  if (!urls.length) return text;
  const parts = urls.map((url) => {
    if (!isAudio(url)) return { type: "image_url", image_url: { url } };
    const [head, data] = url.split(",", 2);
    const format = head.match(/^data:audio\/(?:x-)?([a-z0-9]+)/i)?.[1] ?? "wav";
    return { type: "input_audio", input_audio: { data, format: format === "mpeg" ? "mp3" : format } };
  });
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

/** The text of a content. */
export function textOf(content) {
  if (!Array.isArray(content)) return content;
  return content.map((part) => part.text ?? "").join("");
}

/** The pictures and recordings of a content. */
export function picturesOf(content) {
  if (!Array.isArray(content)) return [];
  return content.flatMap((part) => {
    if (part.image_url) return [part.image_url.url];
    if (!part.input_audio) return [];
    const { data, format } = part.input_audio;
    return [`data:audio/${format === "mp3" ? "mpeg" : format};base64,${data}`];
  });
}
