// Markdown as nodes.  The parser takes time in proportion to the text, and nests to a limit.  What has too many
// parts stays text.

import { code, formula } from "./code.js";
import MarkdownIt from "./markdown-it.js";
import { formulas } from "./latex.js";
import { node } from "./node.js";
import { copy } from "./notes.js";

const LINKS = /^(https?:|mailto:)/i;
const N_CHARACTERS_MAX = 200_000; // it is parsed again with each token
const N_PARTS_MAX = 20_000;
const TASK = /^\[([ xX])\] /;
const parser = new MarkdownIt({ html: false, linkify: false, maxNesting: 50 });
parser.use(formulas);
parser.validateLink = (address) => LINKS.test(address);

/** The nodes of a text; of one that cannot be rendered, the text. */
export function markdown(text) {
  if (text.length > N_CHARACTERS_MAX) return [node("pre", {}, text)];
  try {
    const tokens = parser.parse(text, {});
    const nParts = tokens.reduce((n, token) => n + 1 + (token.children?.length ?? 0), 0);
    if (nParts <= N_PARTS_MAX) return nodesOf(tokens);
  } catch (error) {
    console.warn("an answer is shown as plain text:", error);
  }
  return [node("pre", {}, text)];
}

/** The nodes of tokens, which open and close them. */
function nodesOf(tokens) {
  const open = [document.createDocumentFragment()];
  const put = (each) => open.at(-1).append(each);
  const take = (token) => {
    if (token.nesting === 1) open.push(opened(token));
    else if (token.nesting === -1) {
      const closed = open.pop();
      put(closed);
    } else if (token.type === "inline") {
      const [first] = token.children;
      if (open.at(-2)?.nodeName === "LI" && first?.type === "text")
        first.content = first.content.replace(TASK, (_, mark) => (mark === " " ? "☐ " : "☑ "));
      token.children.forEach(take);
    } else put(leaf(token));
  };
  tokens.forEach(take);
  return [...open[0].childNodes];
}

function opened(token) {
  switch (token.type) {
    case "paragraph_open":
      return token.hidden ? document.createDocumentFragment() : node("p");
    case "heading_open":
      return node(`h${Math.min(6, Number(token.tag.slice(1)) + 2)}`);
    case "ordered_list_open":
      return node("ol", { start: token.attrGet("start") ?? undefined });
    case "s_open":
      return node("del");
    case "link_open":
      return node("a", { href: token.attrGet("href"), rel: "noreferrer noopener", target: "_blank" });
    case "th_open":
    case "td_open":
      return cell(token);
    default:
      return node(token.tag);
  }
}

/** Return a cell of a table; the policy of the page allows no attribute with a style. */
function cell(token) {
  const made = node(token.tag);
  made.style.textAlign = token.attrGet("style")?.split(":")[1] ?? "";
  return made;
}

function leaf(token) {
  switch (token.type) {
    case "code_inline":
      return node("code", {}, token.content);
    case "fence":
    case "code_block":
      return block(token.content.replace(/\n$/, ""), token.info.trim().split(/\s/)[0].toLowerCase());
    case "formula":
      return formula(token.content, token.info, token.block);
    case "hr":
      return node("hr");
    case "hardbreak":
      return node("br");
    case "softbreak":
      return "\n";
    case "image": // which its server would learn of
      return `![${token.content}](${token.attrGet("src")})`;
    default:
      return token.content;
  }
}

/** A block of code with its language and a button that copies it. */
function block(text, language) {
  return node(
    "div",
    { class: "code" },
    node(
      "p",
      { class: "tools" },
      node("span", {}, language),
      node("button", { type: "button", onclick: (event) => copy(text, event.target) }, "Copy"),
    ),
    node("pre", { tabindex: "0" }, code(text, language)),
  );
}
