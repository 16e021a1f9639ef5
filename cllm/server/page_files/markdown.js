// Markdown as nodes.  Every piece of text becomes a text node: what looks like HTML is shown, not obeyed.

import { lexer } from "./marked.js";

const LINKS = /^(https?:|mailto:)/i;
const PLAIN = { strong: "strong", em: "em", del: "del", codespan: "code", br: "br", hr: "hr" };

/** A node with what is in it: texts, nodes. */
export function node(tag, attributes = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...inside.filter((each) => each !== null && each !== undefined && each !== false));
  return made;
}

/** The nodes of a text. */
export function markdown(text) {
  return lexer(text).flatMap(block);
}

function inner(token) {
  return token.tokens ? token.tokens.flatMap(block) : [token.text ?? token.raw];
}

function block(token) {
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "heading":
      return [node(`h${Math.min(6, token.depth + 2)}`, {}, ...inner(token))];
    case "paragraph":
      return [node("p", {}, ...inner(token))];
    case "blockquote":
      return [node("blockquote", {}, ...inner(token))];
    case "code":
      return [node("pre", {}, node("code", {}, token.text))];
    case "list": {
      const items = token.items.map((item) => node("li", {}, ...inner(item)));
      return [token.ordered ? node("ol", { start: token.start }, ...items) : node("ul", {}, ...items)];
    }
    case "escape":
      return [token.text];
    case "checkbox":
      return [token.checked ? "☑ " : "☐ "];
    case "table":
      return [table(token)];
    case "link":
      return LINKS.test(token.href)
        ? [node("a", { href: token.href, rel: "noreferrer noopener", target: "_blank" }, ...inner(token))]
        : [token.raw];
    case "text":
      return inner(token);
    default:
      if (token.type in PLAIN) return [node(PLAIN[token.type], {}, ...(token.text ? inner(token) : []))];
      return [token.raw]; // HTML, pictures, what is not known
  }
}

function table(token) {
  const row = (cells, tag) => node("tr", {}, ...cells.map((cell) => node(tag, {}, ...inner(cell))));
  return node(
    "table",
    {},
    node("thead", {}, row(token.header, "th")),
    node("tbody", {}, ...token.rows.map((cells) => row(cells, "td"))),
  );
}
