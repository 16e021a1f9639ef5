// Values besides chats that the browser keeps.  If it denies that, or has no room, they last as long as the page.

function storage(kind) {
  const held = new Map(); // values that the browser has not taken
  return {
    get(name) {
      try {
        return held.get(name) ?? window[kind].getItem(name);
      } catch {
        return null;
      }
    },
    set(name, value) {
      try {
        window[kind].setItem(name, value);
        held.delete(name);
      } catch {
        held.set(name, value);
      }
    },
  };
}

export const session = storage("sessionStorage"); // of this tab
export const local = storage("localStorage"); // of all tabs
