// Creates elements and formats numbers. All text is inserted as text: nothing here parses markup.

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

export function bytes(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(2)} GB`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} MB`;
  return `${(value / 1e3).toFixed(1)} kB`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

const MAX_READINGS = 64;
const readings = new Map(); // of each request, by its id: the first tokens that were seen of its prompt, and when

// How far a prompt is read, how fast since the first look, and how long it will take.
export function readingOf({ request_id: id, prompt_tokens: all, computed_tokens: done, elapsed_s: now }) {
  if (!readings.has(id)) readings.set(id, { done, now });
  if (readings.size > MAX_READINGS) readings.delete(readings.keys().next().value);
  const first = readings.get(id), rate = (done - first.done) / (now - first.now);
  const speed = id && rate > 0 ? ` · ${count(Math.round(rate))}/s · ${seconds((all - done) / rate)} left` : "";
  return `${count(done)} of ${count(all)}${speed}`;
}

export const count = (value) => Number(value).toLocaleString("en-US");
export const share = (value) => `${Math.round(value * 100)} %`;
