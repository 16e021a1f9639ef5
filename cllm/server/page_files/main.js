// The page: two views, one of them shown.

import { openChatOf, setModel, startChat } from "./chat.js";
import { forgetEngine, startEngine, watchEngine } from "./engine.js";
import { takeKinds } from "./files.js";
import { showModels, startModels } from "./models.js";
import { element } from "./node.js";
import { tell } from "./notes.js";
import { ask, errorOf, onGone, onModel, setPings } from "./server.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
let stopWatching = null;

function show(tab) {
  for (const each of tabs) {
    const isShown = each === tab;
    each.setAttribute("aria-selected", isShown);
    each.tabIndex = isShown ? 0 : -1;
    element(each.getAttribute("aria-controls")).hidden = !isShown;
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
const showAddressed = () => show(tabs[location.hash === "#engine" ? 1 : 0]);
addEventListener("hashchange", showAddressed);
showAddressed();
startChat();
startEngine((requestId) => {
  const isOurs = openChatOf(requestId);
  if (isOurs) show(element("tab-chat"));
  return isOurs;
});

element("show-about").addEventListener("click", async () => {
  element("about").showModal();
  element("licences").textContent ||= await (await ask("page/licences.txt")).text();
});

const AGAIN_MS = 1000;

/** Wait until the server is ready, and return its health. */
async function ready() {
  for (;;) {
    let health = {};
    try {
      const response = await ask("health");
      const isOurs = response.headers.get("content-type")?.includes("json"); // a proxy answers with a page
      health = isOurs ? await response.json() : { reason: await errorOf(response) };
    } catch (error) {
      health.reason = error.message;
    }
    tell(health.status === "ok" ? "" : (health.reason ?? health.status ?? ""), "health");
    if (health.status === "ok") return health;
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

let connecting = null;

/** Wait for the server, and show which models it has. */
function connect() {
  connecting ??= connected().finally(() => (connecting = null));
  return connecting;
}

async function connected() {
  const health = await ready();
  setPings(health.ping_interval_s);
  element("model").textContent = health.model ?? "";
  showModels(health);
  // With several models, the server rejects files for one that takes none.
  takeKinds(["image", "audio"].filter((kind) => health.models || health.modalities?.includes(kind)));
  setModel(health);
}

/** Watch another model; what was shown of the last one disappears. */
function watchAnew() {
  forgetEngine();
  stopWatching?.();
  stopWatching = null;
  look();
}

startModels(connect, watchAnew);
onGone(connect);
onModel((name) => {
  const shown = element("model").textContent; // nothing if the server has several
  if (shown && name !== shown) connect();
});
await connect();
