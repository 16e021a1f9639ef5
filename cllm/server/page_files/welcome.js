// What a chat shows before its first message: what this model can do, and how another is loaded.

import { openModels } from "./models.js";
import { node } from "./node.js";

const TINY = "cllm-tiny"; // the model in the package
const OF_TINY = ["What can you do?", "37+58=", "reverse:streams", "count:98..112", "repeat:你好 🙂"];
const OF_OTHERS = [
  "Explain list comprehensions in Python with three examples.",
  "Compare TCP and UDP in a table.",
  "Derive the solutions of ax² + bx + c = 0.",
];
const WITH = { image: "What do you see in this picture?", audio: "Write down what is said in this recording." };

/** Return the nodes for a model; `ask(text)` sends a text, `attach(text)` lets a file be chosen for it. */
export function welcome({ model, modalities = [] }, isForgetful, ask, attach) {
  const isTiny = model === TINY;
  const chip = (text, act) => node("button", { onclick: act }, text);
  return node(
    "div",
    { id: "welcome" },
    node("h2", {}, model ? `Ask ${model}` : "Ask the model"),
    isTiny
      ? node("p", {}, "This is the small model that comes with cllm. It knows a few tasks by heart and nothing of the world: it is made for tests and first steps.")
      : null,
    node(
      "p",
      { class: "chips" },
      ...(isTiny ? OF_TINY : OF_OTHERS).map((text) => chip(text, () => ask(text))),
      ...modalities.filter((kind) => kind in WITH).map((kind) => chip(WITH[kind], () => attach(WITH[kind]))),
    ),
    node("p", { class: "soft" }, "Another model: ", node("code", {}, "cllm serve -m FILE.gguf"), " or ", node("code", {}, "cllm serve -m hf:USER/REPO:Q4_K_M"), "."),
    node("p", { class: "chips" }, chip("Download another …", openModels)),
    node("p", { class: "soft" }, isForgetful ? "This browser keeps no chats: they end with this tab." : "Chats stay in this browser."),
  );
}
