// Nodes of the page.  Every piece of text becomes a text node: what looks like HTML is shown, not obeyed.

/** Return the node with an id. */
export const element = (id) => document.getElementById(id);

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

/** Return a text that is folded under a title. */
export const folded = (title, text, attributes = {}) => node("details", attributes, node("summary", {}, title), node("pre", {}, text));

/** True if a key belongs to an input method, which composes a text.  Safari says so of the last Enter by its code alone. */
export const isComposing = (event) => event.isComposing || event.keyCode === 229;

/** Call `send()` when Enter is pressed in a field; Shift-Enter begins a line. */
export function onEnter(field, send) {
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
    event.preventDefault();
    send();
  });
}
