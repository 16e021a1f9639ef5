// LaTeX in Markdown, for markdown-it: $…$ and \(…\) in a line, $$…$$ and \[…\] as a block of its own.

const PAIRS = [
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];
const N_LINES_MAX = 100; // of a block

/** Add the rules to a parser; their tokens are "formula", with the LaTeX as content and its source as info. */
export function formulas(parser) {
  parser.inline.ruler.before("escape", "formula", inline);
  parser.block.ruler.before("paragraph", "formula", block, { alt: ["paragraph"] });
}

function push(state, latex, source, isDisplay) {
  const token = state.push("formula", "", 0);
  token.content = latex;
  token.info = source;
  token.block = isDisplay;
  return token;
}

function inline(state, isSilent) {
  const { src, pos, posMax } = state;
  const mark = src[pos];
  if (mark !== "$" && mark !== "\\") return false;
  const pair = PAIRS.find(([open]) => src.startsWith(open, pos));
  if (!pair) return false;
  const [open, close, isDisplay] = pair;
  const start = pos + open.length;
  const end = endOf(src, start, close, posMax);
  if (end < 0) return false;
  const latex = src.slice(start, end);
  // A dollar is money unless it touches the formula, and the one that closes it stands before no digit.
  if (open === "$" && (/^\s|\s$/.test(latex) || /\d/.test(src[end + 1] ?? ""))) return false;
  if (!latex.trim()) return false;
  if (!isSilent) push(state, latex, src.slice(pos, end + close.length), isDisplay);
  state.pos = end + close.length;
  return true;
}

/** Return the index where a formula ends, or -1; search at most 2,000 characters, so that many beginnings cost little. */
function endOf(text, start, close, most) {
  const near = text.slice(start, Math.min(most, start + 2000));
  let end = near.indexOf(close);
  while (end > 0 && close[0] === "$" && near[end - 1] === "\\") end = near.indexOf(close, end + 1);
  return end < 0 ? -1 : start + end;
}

function block(state, first, last, isSilent) {
  const start = state.bMarks[first] + state.tShift[first];
  const pair = PAIRS.find(([open, , isDisplay]) => isDisplay && state.src.startsWith(open, start));
  if (!pair || state.sCount[first] - state.blkIndent >= 4) return false;
  const [open, close] = pair;
  const lines = [];
  for (let line = first; line < Math.min(last, first + N_LINES_MAX); line++) {
    if (line > first && state.sCount[line] < state.blkIndent) return false; // the list item or quote ends
    const begin = line === first ? start + open.length : state.bMarks[line] + state.tShift[line];
    const text = state.src.slice(begin, state.eMarks[line]);
    const end = text.indexOf(close);
    if (end >= 0 && text.slice(end + close.length).trim()) return false;
    lines.push(end < 0 ? text : text.slice(0, end));
    if (end < 0) continue;
    if (isSilent) return true;
    const latex = lines.join("\n");
    const token = push(state, latex, `${open}${latex}${close}`, true);
    token.map = [first, line + 1];
    state.line = line + 1;
    return true;
  }
  return false;
}
