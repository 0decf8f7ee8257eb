// Draws the prefix cache in memory and on disk: one line per stored conversation; runs of tokens that several share span
// their lines. Both drawings have the same scale. Also displays the figures of the disk.

import { bytes, byId, count, element, seconds, share, svg } from "./dom.js";
import { Table } from "./table.js";

const MIN_WIDTH = 240, ROW = 16, MAX_ROWS = 200;
const table = new Table("cache-rows", [
  ["Run", null, "number", (entry) => entry.node_id],
  ["Follows", null, "number", (entry) => entry.parent_id ?? "–"],
  ["Tokens", null, null, (entry) => `${count(entry.start)} to ${count(entry.end)}`],
  ["Size", null, "number", (entry) => bytes(sizeOf(entry))],
  ["Uses", null, "number", (entry) => count(entry.hits)],
  ["Last used", null, "number", (entry) => `${seconds(entry.age_s)} ago`],
]);

export function drawCache({ data, disk, others, cache }) {
  const [held, kept] = [laidOut(data), laidOut(disk)];
  const longest = Math.max(1, ...data.map((entry) => entry.end), ...disk.map((entry) => entry.end));
  const paths = cache.entry_count === 1 ? "1 conversation" : `${count(cache.entry_count)} conversations`;
  byId("cache-summary").textContent = cache.enabled
    ? `${paths}, ${data.length === 1 ? "1 run" : `${count(data.length)} runs`} of tokens, ${bytes(cache.current_memory_mb * 1e6)} of ${bytes(cache.max_memory_mb * 1e6)}. ` +
      (others.num_entries ? `Other keys have ${count(others.num_tokens)} tokens of it, ${bytes(others.num_bytes)}, which are not drawn. ` : "") +
      "Each line is a conversation; a run that several share spans their lines. Recently used runs are darker; an orange edge marks a snapshot of recurrent state."
    : "The prefix cache is off.";
  byId("cache").replaceChildren(...(data.length ? [drawing(held, longest, "cache")] : []));
  byId("disk").replaceChildren(...(disk.length ? [drawing(kept, longest, "disk")] : []));
  table.show(data.slice(0, MAX_ROWS));
}

function laidOut(entries) {
  const nodes = new Map(entries.map((entry) => [entry.node_id, { ...entry, children: [] }]));
  for (const node of nodes.values()) nodes.get(node.parent_id)?.children.push(node);
  const roots = [...nodes.values()].filter((node) => !nodes.has(node.parent_id));
  return { nodes: [...nodes.values()], rows: roots.reduce((row, root) => place(root, row), 0) };
}

// A node spans the rows of what follows it.
function place(node, row) {
  node.row = row;
  const end = node.children.reduce((next, child) => place(child, next), row);
  node.end_row = Math.max(end, row + 1);
  return node.end_row;
}

function drawing({ nodes, rows }, longest, id) {
  const width = Math.max(MIN_WIDTH, byId(id).clientWidth);  // so that text keeps its size
  const x = (tokens) => (tokens / longest) * width;
  const height = Math.min(rows, MAX_ROWS) * ROW;
  const visible = nodes.filter((node) => node.row < MAX_ROWS);
  const boxes = visible.flatMap((node) => {
    const strength = Math.max(0.25, 1 / (1 + node.age_s / 300));
    const box = { x: x(node.start), y: node.row * ROW, height: (node.end_row - node.row) * ROW - 1 };
    const rect = svg("rect", { ...box, width: Math.max(1, x(node.end) - x(node.start)), opacity: strength.toFixed(2) }, svg("title", {}, describe(node)));
    const state = node.state_bytes ? [svg("rect", { ...box, class: "state", x: Math.max(0, x(node.end) - 3), width: 3 })] : [];
    return [rect, ...state];
  });
  return svg("svg", {
    viewBox: `0 0 ${width} ${height + 16}`, role: "img",
    "aria-label": `${rows} stored conversations, the longest of ${Math.max(...nodes.map((node) => node.end))} tokens${id === "cache" ? "; the table below has the same data" : ", on disk"}`,
  }, ...boxes, svg("text", { x: 0, y: height + 13 }, "0"), svg("text", { x: width, y: height + 13, "text-anchor": "end" }, `${count(longest)} tokens`));
}

const sizeOf = (node) => node.segment_bytes + node.state_bytes;

function describe(node) {
  const users = node.children.length > 1 ? `, shared by ${node.end_row - node.row}` : "";
  return `Tokens ${count(node.start)} to ${count(node.end)}, ${bytes(sizeOf(node))}, used ${count(node.hits)} times, last ${seconds(node.age_s)} ago${users}`;
}

export function showDisk({ enabled, disk, hits_by_tier: hits }) {
  byId("disk-section").hidden = !enabled;
  byId("disk-summary").textContent = disk === null ? "Nothing is kept on disk, so cached state ends with the server."
    : disk.off_reason !== null ? `Nothing is kept on disk: ${disk.off_reason}`
    : `Conversations are kept in ${disk.folder} and are found again after a restart.`;
  byId("disk-summary").classList.toggle("bad", disk !== null && disk.off_reason !== null);
  byId("disk-bars").hidden = disk === null;
  if (disk === null) return;
  fill("disk-held", disk.used_bytes, disk.max_bytes, `${count(disk.num_records)} records, ${of(disk.used_bytes, disk.max_bytes)}`);
  fill("disk-written", disk.written_today_bytes, disk.daily_bytes, `Written today: ${of(disk.written_today_bytes, disk.daily_bytes)}` +
    (disk.num_waiting_bytes ? `, ${bytes(disk.num_waiting_bytes)} wait to be written` : ""));
  const facts = [
    `Replies with a prefix from memory: ${count(hits.memory)}`, `from disk: ${count(hits.disk)}`,
    `read: ${count(disk.tokens_read)} tokens, ${bytes(disk.bytes_read)}`,
    ...(disk.reads_not_made ? [`computed instead, which was faster: ${count(disk.reads_not_made)}`] : []),
    ...(disk.num_damaged ? [`damaged records removed: ${count(disk.num_damaged)}`] : []),
  ];
  byId("disk-facts").replaceChildren(...facts.map((fact) => element("li", {}, fact)));
}

const of = (part, whole) => `${bytes(part)} of ${bytes(whole)}`;

function fill(id, part, whole, text) {
  const full = whole ? Math.min(1, part / whole) : 0;
  const piece = element("span", { class: "s0" });
  piece.style.width = `${100 * full}%`;
  byId(id).replaceChildren(piece);
  byId(id).setAttribute("aria-label", `${text}, ${share(full)}`);
  byId(`${id}-text`).textContent = text;
}
