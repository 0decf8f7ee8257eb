// Follows the server's status and displays it. The chat and the drawing of the cache have their own files.

import { drawCache, showDisk } from "./cache.js";
import { showReading, startChat, useModels } from "./chat.js";
import { showConnect } from "./connect.js";
import { byId, bytes, count, element, readingOf, seconds, share } from "./dom.js";
import { decades, Plot } from "./plots.js";
import { events, json } from "./server.js";
import { Table } from "./table.js";

const CACHE_EVERY_MS = 5000;
const RETRY_MS = 2000;
const FEW_REPLIES = 10;
const MAX_NAME = 28, LARGE_TILES = 5;
const MEMORY = [["weights", "Weights"], ["live", "Running replies"], ["cache", "Prefix cache"], ["transient", "Reserved for one step"], ["media", "Encoded images"], ["image", "Reserved for images"], ["free", "Free"], ["lacking", "Unavailable"]];

const OTHERS = "other key";
const WAITS = { disk: ", reads disk", model: ", waits for the model" };
const CLIENT = ["Client", "The name that the program gives itself."], ENDPOINT = ["Endpoint", "The path of the API, below /v1/.", null, endpoint];

const modelsTable = new Table("models", [
  ["Model", "The name by which requests ask for it. The first model answers requests that name none.", "name", (model) => model.name],
  ["Weights", "Ready: the weights are in memory. Leaving and loading: they are on their way. Pinned: they leave for no other model.", null, (model, cell) => { cell.classList.toggle("why", model.cause !== null); return whereabouts(model) + (model.pinned ? ", pinned" : ""); }],
  ["Memory", "The memory that the weights take now.", "number", (model) => (model.weights_bytes ? bytes(model.weights_bytes) : "–")],
  ["Running", "Replies whose prompt is being computed or whose text is being written.", "number", (model) => count(model.running)],
  ["Waiting", "Replies that wait until the weights, a place and memory are there.", "number", (model) => count(model.waiting)],
  ["Tokens/s", "Tokens of replies that were written, per second of the last ten.", "number", (model) => model.generation_tps.toFixed(1)],
  ["Finished", "Requests that ended since the start, in any way.", "number", (model) => count(model.total_requests_processed)],
  ["Cached", "The share of all tokens of its prompts that came from the prefix cache.", "number", (model) => share(model.total_cached_tokens / Math.max(1, model.total_prompt_tokens))],
  ["Last used", "The time since its last request.", "number", (model) => (model.running + model.waiting ? "now" : seconds(model.last_used_s))],
  ["Last load", "How long it took to bring the weights back, the last time.", "number", (model) => (model.load_s ? seconds(model.load_s) : "–")],
]);

const requestsTable = new Table("requests", [
  [...CLIENT, null, (request, cell) => titled(cell, request.client ? `${request.client}\n${request.id}` : request.id, request.request_id === null ? OTHERS : clientName(request))],
  ENDPOINT,
  ["Model", null, "several name", (request) => request.model],
  ["Phase", "Queued: it waits for a place. Prefill: its prompt is computed. Generation: its reply is written.", null, (request) => request.phase + (WAITS[request.waits_for] ?? "")],
  ["Progress", "How much of the prompt is computed, or of the longest reply that is allowed is written.", null, showProgress],
  ["Prompt", "The tokens of the prompt.", "number", (request) => count(request.prompt_tokens)],
  ["Cached", "The share of the prompt that came from the prefix cache.", "number", (request) => share(request.cached_tokens / request.prompt_tokens) + fromDisk(request)],
  ["Reply", "The tokens that are written, of the most that are allowed.", "number", (request) => `${count(request.completion_tokens)} of ${count(request.max_tokens)}`],
  ["Tokens/s", "The speed at which this reply is written.", "number", (request) => request.tokens_per_second.toFixed(1)],
  ["Elapsed", "The time since the request arrived.", "number", (request) => seconds(request.elapsed_s)],
  ["Action", null, null, showCancel],
], (request) => request.id);

const ranksTable = new Table("ranks", [
  ["Rank", "Rank 0 is this server; the others are workers.", null, (rank) => rank.rank],
  ["Host", null, null, (rank) => rank.host],
  ["Memory", "Memory as MLX counts it, and the limit beyond which cached state leaves.", "number", (rank) => `${bytes(rank.active_bytes)} of ${bytes(rank.limit_bytes)}`],
  ["Plan", "The last step that this Mac has carried out.", "number", (rank) => count(rank.plan)],
  ["Behind", "Steps that have reached this Mac and are not carried out, and how long it has worked on the first of them.", "number", (rank) => (rank.lag_plans ? `${count(rank.lag_plans)}, ${seconds(rank.lag_s)}` : "0")],
  ["Time of a sum", "A sum over all Macs, as it was measured at start. Each token waits for two in every layer.", "number", (rank) => `${(rank.sum_s * 1000).toFixed(2)} ms`],
]);

const repliesTable = new Table("replies", [
  ["When", null, null, (reply) => clock(reply.time)],
  [...CLIENT, null, (reply, cell) => titled(cell, `${reply.client ?? ""}\n${reply.request_id ?? ""}`.trim(), clientName(reply))],
  ENDPOINT,
  ["Model", null, "several name", (reply, cell) => titled(cell, reply.model, reply.served_by)],
  ["Prompt", "The tokens of the prompt.", "number", (reply) => count(reply.prompt_tokens)],
  ["Expected", "The tokens that an earlier prompt of the same conversation leads one to expect in the cache.", "number", (reply) => count(reply.expected_tokens)],
  ["Cached", "The tokens that came from the prefix cache.", "number", (reply) => count(reply.cached_tokens) + fromDisk(reply)],
  ["Reply", "The tokens that were written.", "number", (reply) => count(reply.completion_tokens)],
  ["Tokens/s", "The speed at which they were written, after the first.", "number", (reply) => reply.tokens_per_s?.toFixed(1) ?? "–"],
  ["Time to first token", "The time from the request to its first token.", "number", (reply) => seconds(reply.ttft_s)],
  ["Time", "The time from the request to the end of the reply.", "number", (reply) => seconds(reply.duration_s)],
  ["End", "Why the reply ended. Left: the client closed the connection before the end.", null, (reply) => reply.finish.replaceAll("_", " ")],
  ["Why not cached", "Why fewer tokens were cached than expected.", "why", (reply) => reply.why ?? ""],
]);

const throughput = new Plot(byId("throughput"), ["generation", "prefill"], { unit: "tokens per second" });
const latency = new Plot(byId("latency"), ["between tokens, p50", "between tokens, p99", "to first token, p50"], { unit: "seconds", scale: decades, write: seconds });

let isShown = false, showsAllReplies = false, last = null;

function show(status) {
  last = status;
  if (!isShown) start(status);
  showConnect(status);
  const { inter_token_s: gap, ttft_s: ttft, queue_s: queue } = status.latency;
  plot(status.time, status, gap.p50, gap.p99, ttft.p50);
  throughput.draw();
  latency.draw();
  showHead(status);
  showTiles(status, gap, ttft, queue);
  showReading(status.requests, status.models);
  modelsTable.show(status.models);
  requestsTable.show(status.requests.map((request, number) => ({ ...request, id: request.request_id ?? `${OTHERS} ${number + 1}` })));
  byId("no-requests").hidden = status.requests.length > 0;
  showMemory(status.memory);
  ranksTable.show(status.ranks ?? []);
  byId("ranks-section").hidden = !status.ranks;
  showDisk(status.cache);
  showReplies(status.last_replies, status.other_replies);
  showErrors(status.last_errors);
}

// Only now is there anything to display.
function start(status) {
  isShown = true;
  for (const place of [document.querySelector("main"), byId("links")]) place.hidden = false;
  byId("connect").open = status.total_requests_processed === 0;
  followCache();
}

function plot(time, { generation_tps: replies, prompt_tps: prompts }, ...waits) {
  throughput.add(time, [replies, prompts]);
  latency.add(time, waits);
}

async function showPast() {
  const { data } = await json("/v1/status/history");
  for (const sample of data) plot(sample.time, sample, sample.inter_token_p50_s, sample.inter_token_p99_s, sample.ttft_p50_s);
}

function showHead({ model, models, served_model_names: names, architecture, build, images, model_facts: facts, uptime_s: uptime }) {
  document.body.classList.toggle("one-model", models.length === 1);
  byId("model").title = model ?? "";
  byId("model").textContent = models.length !== 1 ? models.map(({ name }) => name).join(", ") || "No model was asked for yet"
    : `${models[0].name} · ${architecture} · ${count(facts.max_model_len)} tokens of context${models[0].state === "ready" ? "" : ` · ${whereabouts(models[0])}`}`;
  byId("build").textContent = `vllm-mlx ${build.version}, MLX ${build.mlx} on ${build.device}, Python ${build.python}, ${build.platform}; up ${seconds(uptime)}`;
  byId("images-field").hidden = !images.enabled;
  useModels(names);
}

// Where the weights of a model are.
function whereabouts({ state, progress, cause }) {
  return `${state}${progress === null ? "" : ` ${share(progress)}`}${state === "failed" ? `: ${cause}` : ""}`;
}

function showTiles(status, gap, ttft, queue) {
  document.title = status.num_running ? `${count(status.num_running)} running · ${status.generation_tps.toFixed(0)}/s – vllm-mlx` : "vllm-mlx";
  const tiles = [
    ["Writing, tokens/s", status.generation_tps.toFixed(1), "Tokens of replies that were written, of all requests together, per second of the last ten."],
    ["Reading, tokens/s", status.prompt_tps.toFixed(0), "Tokens of prompts that were computed, per second of the last ten. Cached tokens do not count."],
    ["Running", count(status.num_running), "Replies whose prompt is being computed or whose text is being written."],
    ["Cached", share(status.total_cached_tokens / Math.max(1, status.total_prompt_tokens)), "The share of all tokens of prompts since the start that came from the prefix cache and took no time."],
    ["Memory free", bytes(status.memory.free_bytes), "What is left of the budget for running replies and the prefix cache."],
    ["Waiting", count(status.num_waiting), "Replies that wait until a place and memory are free."],
    ["Cached prompt tokens", count(status.total_cached_tokens), "The number of tokens of prompts that came from the prefix cache."],
    ["Time to first token, p50", seconds(ttft.p50), "Half of the replies of the last minute began sooner than this after their request."],
    ["Time between tokens, p50", seconds(gap.p50), "Half of the tokens of the last minute came sooner than this after the one before."],
    ["Time between tokens, p99", seconds(gap.p99), "All but one in a hundred tokens came sooner than this: the pauses that one notices are longer."],
    ["Time in the queue, p99", seconds(queue.p99), "All but one in a hundred requests of the last minute waited less than this for a place."],
    ["Stalls", count(status.stalls.total), `Pauses within a reply, since the start, of more than ${seconds(status.stalls.threshold_s)}.`],
    ["Finished requests", count(status.total_requests_processed), "Requests that ended since the start, in any way."],
    ...(status.drafts.num_drafts ? [["Tokens a pass with drafts", status.drafts.tokens_per_pass.toFixed(1) + (status.drafts.parked ? " (parked)" : ""), "How many tokens of a reply one forward pass gave, where tokens were guessed ahead. Parked: guessing does not pay at the moment."]] : []),
    ...(status.total_encoded_inputs ? [["Texts encoded", count(status.total_encoded_inputs), `Texts whose vectors or scores were computed since the start, ${count(status.total_encoded_tokens)} tokens.`]] : []),
    ...(status.ahead_tokens.computed ? [["Tokens computed ahead", count(status.ahead_tokens.computed), `Tokens of next prompts that were computed between two questions; ${count(status.ahead_tokens.used)} were of use so far.`]] : []),
  ];
  const tile = ([name, value, meaning]) => element("div", { title: meaning }, element("dt", {}, name), element("dd", {}, value));
  byId("tiles").replaceChildren(...tiles.slice(0, LARGE_TILES).map(tile));
  byId("more-tiles").replaceChildren(...tiles.slice(LARGE_TILES).map(tile));
  if (byId("meanings").childElementCount !== 2 * tiles.length) byId("meanings").replaceChildren(...tiles.flatMap(([name, , meaning]) => [element("dt", {}, name), element("dd", {}, meaning)]));
}

function fromDisk({ tier }) {
  return tier === "disk" ? " (disk)" : "";
}

function showProgress(request, cell) {
  const bar = cell.querySelector("progress") ?? cell.appendChild(element("progress", { max: 1, "aria-label": `Progress of ${request.id}` }));
  const words = cell.querySelector("small") ?? cell.appendChild(element("small", { class: "muted" }));
  bar.value = request.progress;
  words.textContent = request.phase === "prefill" ? readingOf(request) : "";
}

function showCancel({ id, request_id: own }, cell) {
  if (own === null || cell.firstChild) return;
  const button = element("button", { type: "button", "aria-label": `Cancel ${id}`, onclick: () => cancel(id, button) }, "Cancel");
  cell.append(button);
}

async function cancel(id, button) {
  button.disabled = true;
  try {
    await json(`/v1/requests/${encodeURIComponent(id)}/cancel`, { method: "POST" });
  } catch (error) {
    report(error.message, true);
  }
}

// Returns a text whose cell shows a longer one when the pointer rests on it.
function titled(cell, title, text) {
  cell.title = title ?? "";
  return text;
}

// The name and version at the beginning of a user agent. Browsers all begin with the name of a browser of old.
function clientName({ client }) {
  if (!client) return "unnamed";
  if (client.startsWith("Mozilla/")) return "browser";
  const name = client.split(/[(;,]/, 1)[0].trim() || client;
  return name.length > MAX_NAME ? `${name.slice(0, MAX_NAME)}…` : name;
}

function endpoint({ path }) {
  return path.replace(/^\/v1\//, "");
}

function showMemory(memory) {
  const parts = MEMORY.map(([key, name], index) => ({ name, index, value: memory[`${key}_bytes`] })).filter((part) => part.value > 0);
  byId("memory").setAttribute("aria-label", `Budget of ${bytes(memory.total_bytes)}: ${parts.map((part) => `${part.name} ${bytes(part.value)}`).join(", ")}`);
  byId("memory").replaceChildren(...parts.map((part) => {
    const piece = element("span", { class: `s${part.index}`, title: `${part.name}: ${bytes(part.value)}` });
    piece.style.width = `${(100 * part.value) / memory.total_bytes}%`;
    return piece;
  }));
  byId("memory-legend").replaceChildren(...parts.map((part) => element("li", {}, element("span", { class: `swatch s${part.index}` }), `${part.name} ${bytes(part.value)}`)),
    element("li", {}, `of ${bytes(memory.total_bytes)}`));
}

const clock = (time) => new Date(time * 1000).toLocaleTimeString();

function showReplies(replies, others) {
  repliesTable.show(showsAllReplies ? replies : replies.slice(0, FEW_REPLIES));
  byId("all-replies").hidden = replies.length <= FEW_REPLIES;
  byId("all-replies").textContent = showsAllReplies ? `Show the last ${FEW_REPLIES}` : `Show all ${replies.length}`;
  byId("no-replies").hidden = replies.length + others.num_replies > 0;
  byId("other-replies").hidden = !others.num_replies;
  byId("other-replies").textContent = `Other keys had ${count(others.num_replies)} of the last replies: ${count(others.prompt_tokens)} tokens of prompts, ${count(others.cached_tokens)} of them cached.`;
}

function showErrors(errors) {
  byId("errors").replaceChildren(...errors.map((error) => element("li", {}, `${clock(error.time)} `, element("code", { title: error.request_id }, `${error.status} ${error.path}`), error.client ? ` from ${clientName(error)}:` : "", ` ${error.message ?? error.code ?? ""}`)));
  byId("no-errors").hidden = errors.length > 0;
}

function report(text, isBad = false) {
  const place = byId("connection");
  if (place.textContent !== text) place.textContent = text;
  place.classList.toggle("bad", isBad);
}

async function follow() {
  for (;;) {
    try {
      await showPast();
      for await (const { event, data } of events("/v1/status/stream")) {
        if (event === "error") throw new Error(JSON.parse(data).message);
        show(JSON.parse(data));
        document.body.classList.remove("gone");
        report("Live");
      }
      report("The server ended the stream; trying again", true);
    } catch (error) {
      const isGone = error instanceof TypeError;
      document.body.classList.toggle("gone", isGone);
      report(isGone ? "The server does not answer. It may have stopped: its terminal says why" : error.message, true);
    }
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

async function followCache() {
  for (;;) {
    try {
      if (document.visibilityState === "visible") drawCache(await json("/v1/cache"));
    } catch {
      // The status stream reports what is wrong.
    }
    await new Promise((done) => setTimeout(done, CACHE_EVERY_MS));
  }
}

byId("all-replies").addEventListener("click", () => {
  showsAllReplies = !showsAllReplies;
  showReplies(last.last_replies, last.other_replies);
});
byId("to-chat").addEventListener("click", (event) => {
  event.preventDefault();
  byId("chat").scrollIntoView();
  byId("prompt").focus({ preventScroll: true });
});
byId("to-connect").addEventListener("click", () => { byId("connect").open = true; });
startChat();
follow();
