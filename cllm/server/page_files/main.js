// The page: two views, one of them shown.

import { startChat } from "./chat.js";
import { watchEngine } from "./engine.js";
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
const health = await (await ask("health")).json().catch(() => ({}));
status.textContent = health.status === "ok" ? "" : (health.reason ?? health.status ?? "");
document.getElementById("model").textContent = health.model ?? "";
const names = Object.keys(health.models ?? {});
document.getElementById("model-name").append(...names.map((name) => new Option(name)));
document.getElementById("model-choice").hidden = !names.length;
