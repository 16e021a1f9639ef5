// The page: two views, one of them shown.

import { startChat } from "./chat.js";
import { watchEngine } from "./engine.js";
import { takePictures } from "./pictures.js";
import { ask } from "./server.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
let stopWatching = null;

function show(tab) {
  for (const each of tabs) {
    const isShown = each === tab;
    each.setAttribute("aria-selected", isShown);
    each.tabIndex = isShown ? 0 : -1;
    document.getElementById(each.getAttribute("aria-controls")).hidden = !isShown;
  }
  history.replaceState(null, "", tab.id === "tab-engine" ? "#engine" : "#chat");
  look();
}

/** Watch the engine while the view is visible. */
function look() {
  const isSeen = location.hash === "#engine" && !document.hidden;
  if (isSeen) stopWatching ??= watchEngine();
  else {
    stopWatching?.();
    stopWatching = null;
  }
}

for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
    other.focus();
    show(other);
  });
}
document.addEventListener("visibilitychange", look);
show(tabs[location.hash === "#engine" ? 1 : 0]);
startChat();

const status = document.getElementById("status");
const AGAIN_MS = 1000;

/** Wait until the server is ready, and return its health. */
async function ready() {
  let shown = null;
  for (;;) {
    let health = {};
    try {
      health = await (await ask("health")).json();
    } catch {
      health.reason = "The server does not answer.";
    }
    const text = health.status === "ok" ? "" : (health.reason ?? health.status ?? "");
    if (text !== shown) status.textContent = shown = text;
    if (health.status === "ok") return health;
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

const health = await ready();
document.getElementById("model").textContent = health.model ?? "";
const names = Object.keys(health.models ?? {});
document.getElementById("model-name").append(...names.map((name) => new Option(name)));
document.getElementById("model-choice").hidden = !names.length;
// With several models, the server rejects files for one that takes none.
const kinds = ["image", "audio"].filter((kind) => names.length || health.modalities?.includes(kind));
if (kinds.length) takePictures(kinds);
