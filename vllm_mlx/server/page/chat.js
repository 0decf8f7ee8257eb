// A chat with a served model: streamed, as Markdown, with images and folded reasoning. Keeps the conversation in this page only.

import { byId, count, element, readingOf, share } from "./dom.js";
import { markdownView } from "./markdown.js";
import { events } from "./server.js";

const DRAW_EVERY_MS = 40, REST = 4; // drawing a long reply takes at most a fifth of the time
const NEAR_PX = 60;

let conversation = [];
let running = null; // AbortController of the running reply
let waiting = null; // the line that says how far the prompt of that reply is, until its first token

export function useModels(names) {
  const field = byId("chat-model"), chosen = field.value;
  byId("model-field").hidden = names.length < 2;
  if ([...field.options].map(({ value }) => value).join() === names.join()) return;
  field.replaceChildren(...names.map((name) => element("option", {}, name)));
  if (names.includes(chosen)) field.value = chosen;
}

export function startChat() {
  byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  byId("images").addEventListener("change", async () => byId("attached").replaceChildren(...(await attachedImages()).map(imageElement)));
}

// The prompt of this chat is the only one that is read, or which one it is cannot be told.
export function showReading(requests, models) {
  const loading = models.find(({ name, state }) => name === byId("chat-model").value && state === "loading");
  if (waiting && loading) waiting.textContent = `Loading the model, ${share(loading.progress)}`;
  const read = requests.filter(({ phase, path }) => phase === "prefill" && path === "/v1/chat/completions");
  if (waiting && read.length === 1) waiting.textContent = `Reading the prompt, ${readingOf(read[0])}`;
}

function clear() {
  running?.abort();
  conversation = [];
  byId("messages").replaceChildren();
  byId("prompt").focus();
}

const imageElement = (url) => element("img", { src: url, alt: "Attached image" });

function attachedImages() {
  return Promise.all([...byId("images").files].map((file) => new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  })));
}

async function send() {
  const text = byId("prompt").value.trim();
  if (running || (!text && !byId("images").files.length)) return;
  running = new AbortController();
  setBusy(true);
  const images = await attachedImages();
  const content = images.length ? [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }] : text;
  conversation.push({ role: "user", content });
  addMessage("user", "You", text, images);
  byId("prompt").value = "";
  byId("images").value = "";
  byId("attached").replaceChildren();
  await reply(addMessage("assistant", "Model", "", []));
  running = null;
  setBusy(false);
}

async function reply(view) {
  const message = { role: "assistant", content: "" };
  const mine = conversation;
  let reasoning = "", usage = null, fault = null, firstMs = null;
  waiting = view.note("Reading the prompt, …");
  try {
    const body = { model: byId("chat-model").value, messages: conversation, stream: true, stream_options: { include_usage: true } };
    const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: running.signal };
    for await (const { data } of events("/v1/chat/completions", options)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const delta = chunk.choices[0]?.delta ?? {};
      reasoning += delta.reasoning_content ?? "";
      message.content += delta.content ?? "";
      if (firstMs === null && (reasoning || message.content)) {
        firstMs = performance.now();
        stopWaiting();
      }
      view.update(message.content, reasoning);
    }
  } catch (error) {
    fault = error;
  }
  stopWaiting();
  view.finish();
  if (fault) view.note(fault.name === "AbortError" ? "Stopped." : fault.message, fault.name !== "AbortError");
  if (reasoning) message.reasoning_content = reasoning;
  if (message.content || reasoning) mine.push(message);
  else mine.pop();
  if (usage) view.note(receipt(usage) + speed(usage.completion_tokens - 1, firstMs));
}

function stopWaiting() {
  waiting?.remove();
  waiting = null;
}

function speed(tokens, firstMs) {
  return firstMs === null || tokens < 1 ? "" : `, ${((1000 * tokens) / Math.max(1, performance.now() - firstMs)).toFixed(1)} tokens/s`;
}

function receipt(usage) {
  const cached = usage.prompt_tokens_details.cached_tokens;
  const why = usage.cache_shortfall?.detail;
  return `${count(usage.prompt_tokens)} prompt tokens, ${share(cached / usage.prompt_tokens)} of them cached${why ? ` (${why})` : ""}; ${count(usage.completion_tokens)} of reply`;
}

function addMessage(role, name, text, images) {
  const words = element("div", { class: "text" }, text);
  const reasoningText = element("div", { class: "text" });
  const fold = element("details", { hidden: "" }, element("summary", {}, "Reasoning"), reasoningText);
  const article = element("article", { class: role }, element("h3", {}, name), fold, words, ...images.map(imageElement));
  const log = byId("messages"), show = markdownView(words);
  log.append(article);
  log.scrollTop = log.scrollHeight;
  let content = "", reasoning = "";
  const drawing = paced(() => following(log, () => {
    show(content);
    reasoningText.textContent = reasoning;
    fold.hidden = !reasoning;
  }));
  return {
    update(...texts) {
      [content, reasoning] = texts;
      drawing.later();
    },
    finish: () => drawing.now(),
    note(line, isBad = false) {
      const place = element("p", { class: isBad ? "bad" : "muted" }, line);
      following(log, () => article.append(place));
      return place;
    },
  };
}

// Stays at the end of what grows, unless the user has scrolled up to read.
function following(log, change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

// Calls `draw` soon, and so rarely that a long reply leaves most of the time to everything else.
function paced(draw) {
  let timer = null, tookMs = 0;
  const now = () => {
    clearTimeout(timer);
    timer = null;
    const began = performance.now();
    draw();
    tookMs = performance.now() - began;
  };
  return { now, later: () => { timer ??= setTimeout(now, Math.max(DRAW_EVERY_MS, REST * tookMs)); } };
}

function setBusy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
  byId("messages").setAttribute("aria-busy", String(isBusy));
}
