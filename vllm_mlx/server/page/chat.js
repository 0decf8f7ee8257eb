// A chat with the served model: streamed, with images and folded reasoning. Keeps the conversation in this page only.

import { byId, count, element, share } from "./dom.js";
import { events, json } from "./server.js";

let conversation = [];
let running = null; // AbortController of the running reply
let model = null;

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
  let reasoning = "", usage = null;
  try {
    model ??= (await json("/v1/models")).data[0].id;
    const body = { model, messages: conversation, stream: true, stream_options: { include_usage: true } };
    const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: running.signal };
    for await (const { data } of events("/v1/chat/completions", options)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const delta = chunk.choices[0]?.delta ?? {};
      reasoning += delta.reasoning_content ?? "";
      message.content += delta.content ?? "";
      view.update(message.content, reasoning);
    }
  } catch (error) {
    view.note(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
  }
  if (reasoning) message.reasoning_content = reasoning;
  if (message.content || reasoning) mine.push(message);
  else mine.pop();
  if (usage) view.note(receipt(usage));
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
  const log = byId("messages");
  log.append(article);
  const follow = () => { log.scrollTop = log.scrollHeight; };
  follow();
  return {
    update(content, reasoning) {
      words.textContent = content;
      reasoningText.textContent = reasoning;
      fold.hidden = !reasoning;
      follow();
    },
    note(line, isBad = false) {
      article.append(element("p", { class: isBad ? "bad" : "muted" }, line));
      follow();
    },
  };
}

function setBusy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
  byId("messages").setAttribute("aria-busy", String(isBusy));
}
