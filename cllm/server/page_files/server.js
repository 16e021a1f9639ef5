// The server that the page came from: requests with the key, and server-sent events.

const KEY = "cllm.key";

/** Ask; with the key, if there is one, and with a question for it if there has to be. */
export async function ask(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers };
    const key = sessionStorage.getItem(KEY);
    if (key) headers.authorization = `Bearer ${key}`;
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    await askForKey();
  }
}

let asking = null; // several requests are refused at once, and ask once

function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    dialog.onclose = () => {
      sessionStorage.setItem(KEY, document.getElementById("key").value.trim());
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

/** The message of an answer that is an error. */
export async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

/** The data of the events of an answer, as they come. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ") && event !== "data: [DONE]") yield JSON.parse(event.slice(6));
    }
  }
}
