// Settings of the requests, and presets: settings of sampling under a name.

import { element } from "./node.js";
import { offer } from "./notes.js";
import { local } from "./storage.js";

const SETTINGS = "cllm.settings";
const PRESETS = "cllm.presets";
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const FIELDS = [...SAMPLING, "system", "n", "reasoning_effort", "schema", "tools"];
const BUILT_IN = { "The model's": {}, Precise: { temperature: "0" }, Varied: { temperature: "1.1", min_p: "0.05" } };

/** Return the object that is kept under a name; an empty one without it. */
function read(name) {
  try {
    return Object(JSON.parse(local.get(name)));
  } catch {
    return {};
  }
}

const keep = () => local.set(SETTINGS, JSON.stringify(valuesOf(FIELDS)));
const valuesOf = (names) => Object.fromEntries(names.map((name) => [name, element(name).value]));

/** Show the settings of the last visit, and keep them when they change. */
export function startSettings() {
  const settings = read(SETTINGS);
  for (const name of FIELDS) {
    if (settings[name] !== undefined) element(name).value = settings[name];
    element(name).addEventListener("change", () => {
      keep();
      showPresets();
    });
  }
  element("preset").addEventListener("change", () => use(element("preset").value));
  element("keep-preset").addEventListener("click", keepPreset);
  element("drop-preset").addEventListener("click", dropPreset);
  showPresets();
}

const isPreset = ([, values]) => values !== null && typeof values === "object";
const presets = () => ({ ...BUILT_IN, ...Object.fromEntries(Object.entries(read(PRESETS)).filter(isPreset)) });

/** List the presets, and choose the one whose values the settings have. */
function showPresets() {
  const now = valuesOf(SAMPLING);
  const isNow = (preset) => SAMPLING.every((name) => (preset[name] ?? "") === now[name]);
  const all = presets();
  const chosen = Object.keys(all).find((name) => isNow(all[name]));
  element("preset").replaceChildren(
    ...Object.keys(all).map((name) => new Option(name, name, false, name === chosen)),
    ...(chosen === undefined ? [new Option("own values", "", false, true)] : []),
  );
  element("keep-preset").disabled = chosen !== undefined;
  element("drop-preset").disabled = chosen === undefined || Object.hasOwn(BUILT_IN, chosen);
}

function use(name) {
  const preset = presets()[name];
  if (!preset) return;
  for (const field of SAMPLING) element(field).value = preset[field] ?? "";
  keep();
  showPresets();
}

function keepPreset() {
  const name = prompt("Name of the preset")?.trim();
  if (!name || Object.hasOwn(BUILT_IN, name)) return;
  local.set(PRESETS, JSON.stringify({ ...read(PRESETS), [name]: valuesOf(SAMPLING) }));
  showPresets();
}

function dropPreset() {
  const before = read(PRESETS);
  const { [element("preset").value]: dropped, ...others } = before;
  local.set(PRESETS, JSON.stringify(others));
  showPresets();
  offer("The preset is deleted.", "Undo", () => {
    local.set(PRESETS, JSON.stringify(before));
    showPresets();
  });
}

/** Return the offered tools by name; none if the setting cannot be read. */
export function toolsByName() {
  try {
    const tools = JSON.parse(element("tools").value || "[]");
    return new Map(tools.map((tool) => [tool.function?.name, tool.function]));
  } catch {
    return new Map();
  }
}

/** Return what the settings say: { body, n, seed, system }; throw what is wrong with them. */
export function settingsOf() {
  const number = (name) => {
    const { labels, validity, validationMessage, value } = element(name);
    if (validity.badInput) throw new Error(`${labels[0].textContent.trim()}: ${validationMessage}`);
    return value === "" ? undefined : Number(value);
  };
  const json = (name, what) => {
    const text = element(name).value.trim();
    try {
      return text ? JSON.parse(text) : undefined;
    } catch (error) {
      throw new Error(`${what}: ${error.message}`);
    }
  };
  const schema = json("schema", "JSON schema");
  const body = {
    model: element("model-name").value || element("model").textContent || undefined,
    ...Object.fromEntries(SAMPLING.filter((name) => name !== "seed").map((name) => [name, number(name)])),
    reasoning_effort: element("reasoning_effort").value || undefined,
    tools: json("tools", "Tools"),
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema } },
  };
  return { body, n: Math.min(8, Math.max(1, number("n") ?? 1)), seed: number("seed"), system: element("system").value };
}
