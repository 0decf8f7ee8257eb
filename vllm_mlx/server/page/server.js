// Requests to the server that sent this page, with the API key if it asks for one.

import { byId } from "./dom.js";

const KEY = "vllm-mlx-key";
let asking = null;

export const usesKey = () => sessionStorage.getItem(KEY) !== null;

export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(KEY) === key) await (asking ??= askForKey(key ? "The server no longer accepts this tab's key." : ""));
  }
}

// Shows the dialog until the server accepts a key, or the user closes it.
function askForKey(reason) {
  const dialog = byId("key-dialog"), field = byId("key");
  sessionStorage.removeItem(KEY);
  field.value = "";
  dialog.showModal();
  byId("key-error").textContent = reason;
  byId("key-form").onsubmit = async (event) => {
    event.preventDefault();
    byId("key-error").textContent = "";
    const key = field.value.trim(), fault = await faultOf(key);
    if (!fault) {
      sessionStorage.setItem(KEY, key);
      dialog.close();
    } else {
      byId("key-error").textContent = fault;
      field.select();
    }
  };
  return new Promise((done) => {
    dialog.addEventListener("close", () => { asking = null; done(); }, { once: true });
  });
}

async function faultOf(key) {
  try {
    const { status } = await fetch("/v1/status/history", { headers: { authorization: `Bearer ${key}` } });
    return status === 401 ? "The server refused this key. Check it and try again." : "";
  } catch {
    return "This key could not be checked: the server does not answer, or the key has characters that cannot be sent.";
  }
}

export async function json(path, options) {
  const response = await request(path, options);
  const body = await response.json();
  if (!response.ok) throw new Error(messageOf(body) ?? `The server answered ${response.status}.`);
  return body;
}

const messageOf = (body) => body?.error?.message ?? body?.message;

// Yields {event, data} of a stream of server-sent events; data is text.
export async function* events(path, options) {
  const response = await request(path, options);
  if (!response.ok) throw new Error(messageOf(await response.json()) ?? `The server answered ${response.status}.`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const fields = part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trim()]);
      const data = fields.filter(([name]) => name === "data").map(([, value]) => value).join("\n");
      if (data) yield { event: fields.find(([name]) => name === "event")?.[1] ?? "message", data };
    }
  }
}
