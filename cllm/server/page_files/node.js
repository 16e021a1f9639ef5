// Nodes of the page.  Every piece of text becomes a text node: what looks like HTML is shown, not obeyed.

/** Return a node with what is in it: texts, nodes. */
export function node(tag, attributes = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...inside.filter((each) => each !== null && each !== undefined && each !== false));
  return made;
}
