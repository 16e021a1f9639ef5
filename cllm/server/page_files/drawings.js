// Canvases: which cells are whose, which positions are shared, what the ticks were made of.

const LANE = 14; // pixels of a sequence
const GAP = 3;
const LABEL = 44;
const TICK = 3;
const STRIPE = 4; // pixels between two stripes of an image

/** A canvas with as many pixels as it is shown with, cleared. */
function pen(canvas, height) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== across || canvas.height !== down) {
    [canvas.width, canvas.height] = [across, down];
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Whose an extent is: "own", "shared", "cached". */
function kindOf([, , , holders], slots) {
  if (holders.every((seqId) => slots[seqId].state === "cached")) return "cached";
  return holders.length > 1 ? "shared" : "own";
}

/** Return the cells of each kind; each extent counts once, however many hold it. */
export function cellsOf(extents, slots) {
  const sums = { own: 0, shared: 0, cached: 0 };
  for (const extent of extents) sums[kindOf(extent, slots)] += extent[1] - extent[0];
  return sums;
}

/** All cells as one bar. */
export function drawCells(canvas, extents, slots, nCells) {
  const { context, width, height } = pen(canvas, 18);
  context.fillStyle = colour("free");
  context.fillRect(0, 0, width, height);
  const sums = cellsOf(extents, slots);
  let x = 0;
  for (const [kind, n] of Object.entries(sums)) {
    const wide = (width * n) / nCells;
    context.fillStyle = colour(kind);
    context.fillRect(x, 0, wide, height);
    x += wide;
  }
  const free = nCells - sums.own - sums.shared - sums.cached;
  canvas.setAttribute("aria-label", `Of ${nCells} cells: ${sums.own} of one request, ${sums.shared} shared, ${sums.cached} cached, ${free} free`);
}

/** A lane for each sequence, positions from left to right; what is shared stands in the lane of each holder.
 * The lane of `pointed`, and what it shares, stand out.  Returns a function from a point to { slot, extent }. */
export function drawLanes(canvas, extents, slots, pointed = null) {
  const busy = slots.filter((slot) => slot.state !== "free");
  const lanes = new Map(busy.map((slot, index) => [slot.seq_id, index]));
  const { context, width } = pen(canvas, Math.max(1, busy.length) * (LANE + GAP) + GAP);
  const last = Math.max(1, ...extents.map((extent) => extent[1]));
  const unit = (width - LABEL - GAP) / last;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  for (const slot of busy) {
    context.fillStyle = colour("soft");
    context.fillText(`seq ${slot.seq_id}`, 4, GAP + lanes.get(slot.seq_id) * (LANE + GAP) + LANE / 2);
  }
  for (const extent of extents) {
    const [start, end, , holders] = extent;
    context.fillStyle = colour(kindOf(extent, slots));
    context.globalAlpha = pointed === null || holders.includes(pointed) ? 1 : 0.35;
    for (const seqId of holders) {
      const y = GAP + lanes.get(seqId) * (LANE + GAP);
      context.fillRect(LABEL + start * unit, y, Math.max(1, (end - start) * unit - 0.5), LANE);
    }
    if (holders.length > 1) {
      // One stretch of cells, in several lanes.
      const ys = holders.map((seqId) => lanes.get(seqId) * (LANE + GAP));
      context.fillRect(LABEL + end * unit - 2, GAP + Math.min(...ys), 1.5, Math.max(...ys) - Math.min(...ys) + LANE);
    }
  }
  context.globalAlpha = 1;
  // Light stripes: rows of media.
  context.fillStyle = colour("back");
  let nRows = 0;
  for (const slot of busy) {
    const y = GAP + lanes.get(slot.seq_id) * (LANE + GAP);
    for (const [start, end] of slot.media) {
      nRows += end - start;
      for (let x = start * unit; x < end * unit; x += STRIPE) context.fillRect(LABEL + x, y + 2, 1, LANE - 4);
    }
  }
  const shared = extents.filter((extent) => extent[3].length > 1).reduce((sum, extent) => sum + extent[1] - extent[0], 0);
  canvas.setAttribute("aria-label", `${busy.length} sequences, the longest of ${last} positions; ${shared} positions are shared${nRows ? `; ${nRows} rows of media` : ""}`);
  return (x, y) => {
    const slot = busy[Math.floor((y - GAP / 2) / (LANE + GAP))];
    const position = (x - LABEL) / unit;
    const extent = slot && extents.find(([start, end, , holders]) => start <= position && position < end && holders.includes(slot.seq_id));
    return slot && { slot, extent };
  };
}

/** Rows of each tick upwards on a square-root scale, so that few rows are seen beside many; its time downwards.
 * Returns a function from a point to its tick. */
export function drawTicks(canvas, ticks) {
  const { context, width, height } = pen(canvas, 140);
  const shown = ticks.slice(-Math.floor(width / TICK));
  const middle = Math.floor(height / 2);
  const mostRows = Math.max(1, ...shown.map((tick) => tick[0] + tick[1] + tick[2]));
  const longest = Math.max(1e-6, ...shown.map((tick) => tick[3] + tick[4] + tick[5]));
  const rows = ["decode", "prompt", "draft"].map(colour);
  const times = ["t-plan", "t-decode", "t-sample"].map(colour);
  shown.forEach((tick, index) => {
    const x = width - (shown.length - index) * TICK;
    const height = (n) => (middle - 14) * Math.sqrt(n / mostRows);
    let n = 0;
    for (let part = 0; part < 3; part++) {
      const [low, high] = [height(n), height((n += tick[part]))];
      context.fillStyle = rows[part];
      context.fillRect(x, middle - 1 - high, TICK - 1, high - low);
    }
    let y = middle + 1;
    for (let part = 0; part < 3; part++) {
      const tall = ((middle - 14) * tick[3 + part]) / longest;
      context.fillStyle = times[part];
      context.fillRect(x, y, TICK - 1, tall);
      y += tall;
    }
  });
  context.fillStyle = colour("soft");
  context.font = "11px system-ui, sans-serif";
  context.fillText(`${mostRows} rows`, 4, 10);
  context.fillText(`${(1000 * longest).toFixed(1)} ms`, 4, height - 4);
  canvas.setAttribute("aria-label", `The latest ${shown.length} ticks: ${mostRows} rows at most, ${(1000 * longest).toFixed(1)} ms at most`);
  return (x) => shown[Math.floor((x - width) / TICK) + shown.length];
}
