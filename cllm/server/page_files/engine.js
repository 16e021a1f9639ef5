// The engine as it runs: numbers, KV cache, ticks, sequences.

import { drawCells, drawLanes, drawTicks } from "./drawings.js";
import { node } from "./node.js";
import { ask, errorOf, eventsOf } from "./server.js";

const N_TICKS = 400; // that are drawn
const AGAIN_MS = 1000;
const element = (id) => document.getElementById(id);

/** Watch until the function that this returns is called. */
export function watchEngine() {
  const controller = new AbortController();
  watch(controller.signal);
  return () => controller.abort();
}

async function watch(signal) {
  while (!signal.aborted) {
    try {
      const response = await ask("live", { signal });
      if (!response.ok) throw new Error(await errorOf(response));
      const view = new View();
      for await (const frame of eventsOf(response)) view.show(frame);
    } catch (error) {
      if (!signal.aborted) element("status").textContent = `No connection: ${error.message}`;
    }
    if (!signal.aborted) await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

class View {
  constructor() {
    this.before = null;
    this.number = 0;
    this.ticks = [];
    this.events = [];
  }

  show(frame) {
    if (frame.number <= this.number) return;
    this.number = frame.number;
    element("status").textContent = frame.status === "ready" ? "" : (frame.reason ?? frame.status);
    if (!frame.slots) return;
    this.ticks = [...this.ticks, ...frame.ticks].slice(-N_TICKS);
    this.tell(frame);
    this.showNumbers(frame);
    const { statistics: now } = frame;
    drawCells(element("cells"), frame.extents, frame.slots, now.n_kv_cells);
    drawLanes(element("lanes"), frame.extents, frame.slots);
    drawTicks(element("ticks"), this.ticks);
    this.showSlots(frame);
    this.before = frame;
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
    const told = {
      "tokens/s": rate("n_output_tokens"),
      "prompt tokens/s": rate("n_prefill_tokens"),
      "ticks/s": rate("n_ticks"),
      running: now.n_running,
      waiting: frame.n_waiting ? `${frame.n_waiting}, oldest ${frame.oldest_waiting_s.toFixed(1)} s` : "0",
      "reader has stopped": now.n_paused,
      "first token p50 / p99 ms": ms(frame.ttft_s),
      "between tokens p50 / p99 ms": ms(frame.itl_s),
      "cells of requests": percent(now.n_kv_cells_used),
      "cells cached": percent(now.n_kv_cells_cached),
      "prompt tokens shared": now.n_cached_tokens,
      "preempted / evicted": `${now.n_preemptions} / ${now.n_evictions}`,
    };
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
          ? [slot.seq_id, slot.state, slot.request_id, slot.n_prompt, slot.n_cached, slot.n_output, speed, `${slot.age_s.toFixed(1)} s`]
          : [slot.seq_id, `${slot.state}, ${slot.n_computed} positions`, "", "", "", "", "", ""];
        return node("tr", {}, ...values.map((value) => node("td", {}, String(value))));
      }),
    );
  }
}
