// The engine as it runs: numbers, KV cache, ticks, sequences.

import { cellsOf, drawCells, drawLanes, drawTicks } from "./drawings.js";
import { watched } from "./models.js";
import { element, node } from "./node.js";
import { download, tell } from "./notes.js";
import { NoKeyError, ask, errorOf, eventsOf } from "./server.js";

const N_TICKS = 512; // as many as the engine keeps
const AGAIN_MS = 1000;

let view = null;
let isPaused = false;
let openChatOf = () => false;

/** Call `open(requestId)` for a sequence that is clicked; it returns true if a chat of this page asked. */
export function startEngine(open) {
  openChatOf = open;
  element("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    element("pause").textContent = isPaused ? "Go on" : "Pause";
    element("pause").setAttribute("aria-pressed", isPaused);
  });
  element("trace").addEventListener("click", () => view?.shown && download("cllm-trace.json", "application/json", traceOf(view.shownTicks)));
  for (const id of ["lanes", "ticks"]) {
    element(id).addEventListener("mousemove", (event) => view?.point(id, event));
    element(id).addEventListener("mouseleave", () => view?.point(id, null));
    element(id).addEventListener("click", (event) => view?.pick(id, event));
  }
}

/** Watch until the function that this returns is called. */
export function watchEngine() {
  const controller = new AbortController();
  watch(controller.signal);
  return () => {
    controller.abort();
    tell("", "engine");
  };
}

/** Show nothing of the engine until its next frame. */
export function forgetEngine() {
  view = null;
  for (const id of ["numbers", "slots"]) element(id).replaceChildren();
  for (const id of ["kv-events", "lanes-said", "ticks-said"]) element(id).textContent = "";
  for (const id of ["cells", "lanes", "ticks"]) element(id).width = 0;
}

async function watch(signal) {
  while (!signal.aborted) {
    try {
      const response = await ask(`live${watched()}`, { signal });
      if (!response.ok) throw new Error(await errorOf(response));
      view = new View();
      for await (const frame of eventsOf(response)) view.take(frame);
    } catch (error) {
      if (!signal.aborted) tell(error.message, "engine");
      if (error instanceof NoKeyError) return;
    }
    if (!signal.aborted) await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

/** Return ticks as a trace that Perfetto and Chromium's tracing page read. */
function traceOf(ticks) {
  const events = ticks.flatMap(([decode, prompt, draft, ...times]) => {
    const [began] = times.splice(3, 1);
    let at = began;
    return ["plan", "decode", "sample"].map((name, index) => {
      const event = { name, ph: "X", pid: 1, tid: 1, ts: 1e6 * at, dur: 1e6 * times[index], args: { decode, prompt, draft } };
      at += times[index];
      return event;
    });
  });
  return JSON.stringify({ displayTimeUnit: "ms", traceEvents: events });
}

class View {
  constructor() {
    this.before = null;
    this.number = 0;
    this.ticks = [];
    this.events = [];
    this.places = {}; // what stands where in the drawings
    this.pointed = null; // seq_id under the mouse
    this.shown = null; // frame
    this.shownTicks = [];
  }

  take(frame) {
    if (frame.number <= this.number) return;
    this.number = frame.number;
    tell(frame.status === "ready" ? "" : (frame.reason ?? frame.status), "engine");
    if (!frame.slots) return;
    this.ticks = [...this.ticks, ...frame.ticks].slice(-N_TICKS);
    if (!isPaused || !this.shown) this.show(frame);
    this.before = frame;
  }

  show(frame) {
    this.tell(frame);
    this.showNumbers(frame);
    this.shown = frame;
    this.shownTicks = this.ticks;
    this.draw();
    this.showSlots(frame);
  }

  /** Draw the frame that is shown: the last one, or the one at which the view was paused. */
  draw() {
    const { extents, slots, statistics } = this.shown;
    drawCells(element("cells"), extents, slots, statistics.n_kv_cells);
    this.places.lanes = drawLanes(element("lanes"), extents, slots, this.pointed);
    this.places.ticks = drawTicks(element("ticks"), this.shownTicks);
  }

  /** Say what is under the mouse. */
  point(id, event) {
    const found = event && this.places[id]?.(event.offsetX, event.offsetY);
    element(`${id}-said`).textContent = found ? (id === "lanes" ? this.said(found) : saidTick(found)) : "";
    const pointed = id === "lanes" && found ? found.slot.seq_id : null;
    if (pointed === this.pointed) return;
    this.pointed = pointed;
    this.draw();
    for (const row of element("slots").rows) row.classList.toggle("pointed", row.dataset.seqId === String(pointed));
  }

  said({ slot, extent }) {
    const parts = [`seq ${slot.seq_id}, ${stateOf(slot)}`];
    if (slot.request_id) parts.push(`request ${slot.request_id}`);
    if (extent) {
      parts.push(`positions ${extent[0]} to ${extent[1]}`);
      if (extent[3].length > 1) parts.push(`shared by ${extent[3].map((seqId) => `seq ${seqId}`).join(", ")}`);
    }
    return parts.join(" · ");
  }

  /** Open the chat that a sequence answers, if it is one of this page. */
  pick(id, event) {
    const found = this.places[id]?.(event.offsetX, event.offsetY);
    if (found?.slot?.request_id && !openChatOf(found.slot.request_id)) tell("No chat of this page asked for it.");
  }

  /** What was done to make room, in words. */
  tell(frame) {
    if (!this.before) return;
    const [now, before] = [frame.statistics, this.before.statistics];
    const said = [
      [now.n_preemptions - before.n_preemptions, "preempted"],
      [now.n_swaps - before.n_swaps, "swapped to host memory"],
      [now.n_evictions - before.n_evictions, "cached prefixes evicted"],
      [now.n_restarts - before.n_restarts, "restarts after a crash"],
    ].filter(([n]) => n > 0);
    const time = new Date().toLocaleTimeString();
    this.events.unshift(...said.map(([n, what]) => `${time} ${n} ${what}`));
    this.events.length = Math.min(this.events.length, 3);
    element("kv-events").textContent = this.events.join(" · ");
  }

  showNumbers(frame) {
    const now = frame.statistics;
    const before = this.before ?? frame;
    const seconds = frame.now - before.now;
    const rate = (name) => (seconds > 0 ? ((now[name] - before.statistics[name]) / seconds).toFixed(0) : "–");
    const ms = (values) => (values.length ? values.map((value) => (1000 * value).toFixed(1)).join(" / ") : "–");
    const percent = (n) => `${n} (${((100 * n) / now.n_kv_cells).toFixed(0)} %)`;
    const mebibytes = (n) => `${(n / 2 ** 20).toFixed(0)} MiB`;
    const cells = cellsOf(frame.extents, frame.slots);
    const tenants = new Map();
    for (const { tenant } of frame.slots) if (tenant) tenants.set(tenant, (tenants.get(tenant) ?? 0) + 1);
    const devices = frame.devices.length ? frame.devices.join(", ") : "CPU";
    const told = {
      "tokens/s": rate("n_output_tokens"),
      "prompt tokens/s": rate("n_prefill_tokens"),
      "ticks/s": rate("n_ticks"),
      running: now.n_running,
      waiting: frame.n_waiting ? `${frame.n_waiting}, oldest ${frame.oldest_waiting_s.toFixed(1)} s` : "0",
      "reader has stopped": now.n_paused,
      "first token p50 / p99 ms": ms(frame.ttft_s),
      "between tokens p50 / p99 ms": ms(frame.itl_s),
      "cells of requests": percent(cells.own + cells.shared),
      "cells cached": percent(cells.cached),
      "cached in host memory / on disk": `${mebibytes(now.n_prefix_bytes_host)} / ${mebibytes(now.n_prefix_bytes_disk)}`,
      "prompt tokens shared": now.n_cached_tokens,
      "preempted / evicted": `${now.n_preemptions} / ${now.n_evictions}`,
      [frame.has_process ? "process of its own, restarts" : "restarts"]: now.n_restarts,
      devices,
    };
    if (tenants.size) told.tenants = [...tenants].map(([name, n]) => `${name}: ${n}`).join(", ");
    element("numbers").replaceChildren(
      ...Object.entries(told).map(([what, value]) => node("div", {}, node("dt", {}, what), node("dd", {}, String(value)))),
    );
  }

  showSlots(frame) {
    const before = new Map(this.before?.slots.map((slot) => [slot.request_id, slot]));
    const seconds = frame.now - (this.before?.now ?? frame.now);
    const rows = frame.slots.filter((slot) => slot.state !== "free");
    element("slots").replaceChildren(
      ...rows.map((slot) => {
        const last = slot.request_id && before.get(slot.request_id);
        const speed = last && seconds > 0 ? ((slot.n_output - last.n_output) / seconds).toFixed(0) : "–";
        const values = slot.request_id
          ? [slot.seq_id, stateOf(slot), slot.tenant ? `${slot.request_id}, ${slot.tenant}` : slot.request_id, slot.n_prompt, slot.n_cached, slot.n_output, speed, `${slot.age_s.toFixed(1)} s`]
          : [slot.seq_id, `${slot.state}, ${slot.n_computed} positions`, "", "", "", "", "", ""];
        return node("tr", { "data-seq-id": slot.seq_id, class: slot.seq_id === this.pointed && "pointed" }, ...values.map((value) => node("td", {}, String(value))));
      }),
    );
  }
}

/** Return what a sequence does, in words. */
function stateOf({ state, waits_for }) {
  return waits_for === null || waits_for === undefined ? state : `waits for the prefix of seq ${waits_for}`;
}

function saidTick([decode, prompt, draft, plan, computed, sample]) {
  const ms = (seconds) => `${(1000 * seconds).toFixed(1)} ms`;
  return `${decode} tokens, ${prompt} of prompts, ${draft} guesses · plan ${ms(plan)}, llama.cpp ${ms(computed)}, sample ${ms(sample)}`;
}
