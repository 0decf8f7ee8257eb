// Says what the prefix cache keeps on disk: how full it is, what was written and read, and what turned it off.

import { byId, bytes, count, element, share } from "./dom.js";

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
