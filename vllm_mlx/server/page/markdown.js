// Renders the Markdown of a reply as elements, while it arrives. All text is inserted as text, links lead to http(s) only,
// and images are links, so that no reply runs anything or makes the browser ask another server.

import { copyButton } from "./copy.js";
import { element } from "./dom.js";

const MAX_DEPTH = 8; // of lists, quotes and emphasis in each other; deeper ones stay text
const MAX_INLINE = 20_000; // characters of a paragraph; longer ones stay text
const FENCE = /^ {0,3}(`{3,}|~{3,})(?![`~])([^`]*)$/, HEADING = /^ {0,3}(#{1,6})\s+(.+)$/, RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])(\s+|$)(.*)$/, QUOTE = /^ {0,3}> ?/, DASHES = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const INLINE = [ // each has bounded repetitions, so that no text takes long
  [/\\([!-/:-@[-`{-~])/y, ([, char]) => char],
  [/(`{1,8})(?!`)(.{1,400}?)(?<!`)\1(?!`)/sy, ([, , code]) => element("code", {}, code.replace(/^ (.*[^ ].*) $/s, "$1"))],
  [/!?\[([^[\]]{0,500})\]\(\s*<?(https?:\/\/[^\s<>()]{1,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,200}){0,4})>?(?:\s+"[^"]{0,200}")?\s*\)/iy, ([, text, url]) => link(url, isAddress(text) ? url : text.replace(/[`*]/g, ""))],
  [/<(https?:\/\/[^\s<>]{1,2000})>/iy, ([, url]) => link(url, url)],
  [/https?:\/\/[^\s<>"'`*\])]{1,2000}(?<![.,;:!?])/iy, ([url]) => link(url, url)],
  [/\*\*(?=\S)(.{1,400}?)(?<=\S)\*\*(?!\*)/sy, ([, text], depth) => element("strong", {}, ...inline(text, depth + 1))],
  [/(?<!\w)__(?=\S)(.{1,400}?)(?<=\S)__(?!\w)/sy, ([, text], depth) => element("strong", {}, ...inline(text, depth + 1))],
  [/\*(?=[^\s*])((?:[^*]|\*\*[^*]{1,500}\*\*){1,400}?)(?<=\S)\*(?!\*)/y, ([, text], depth) => element("em", {}, ...inline(text, depth + 1))],
  [/(?<!\w)_(?=[^\s_])([^_]{1,2000})(?<=\S)_(?!\w)/y, ([, text], depth) => element("em", {}, ...inline(text, depth + 1))],
  [/~~(?=\S)(.{1,400}?)(?<=\S)~~/sy, ([, text], depth) => element("del", {}, ...inline(text, depth + 1))],
];
const MARKS = /[\\`![<*_~]|https?:/gi; // where one of them may begin

// Displays a growing text in `target`. Blocks that stay the same keep their elements, and with them focus and selection.
export function markdownView(target) {
  let shown = [];
  return (text) => {
    const blocks = blocksOf(text.split(/\r?\n/));
    const same = blocks.findIndex((lines, index) => lines.join("\n") !== shown[index]);
    const kept = same < 0 ? blocks.length : same;
    while (target.childNodes.length > kept) target.lastChild.remove();
    target.append(...blocks.slice(kept).map((lines) => rendered(lines, 0)));
    shown = blocks.map((lines) => lines.join("\n"));
  };
}

// Divides lines into blocks: each is a heading, a rule, a list, a quote, a table, a paragraph, or code.
function blocksOf(lines) {
  const blocks = [];
  for (let start = 0; start < lines.length;) {
    if (!lines[start].trim()) { start += 1; continue; }
    const end = endOf(lines, start);
    blocks.push(lines.slice(start, end));
    start = end;
  }
  return blocks;
}

function endOf(lines, start) {
  const fence = FENCE.exec(lines[start])?.[1];
  let end = start + 1;
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence)) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[start]) || RULE.test(lines[start])) return end;
  if (QUOTE.test(lines[start])) return until(lines, end, (line) => !QUOTE.test(line));
  if (ITEM.test(lines[start])) return endOfList(lines, start);
  if (isTable(lines, start)) return until(lines, end, (line) => !line.includes("|"));
  return until(lines, end, (line, at) => !line.trim() || [FENCE, HEADING, RULE, QUOTE].some((form) => form.test(line)) || /^\s*(?:[-*+]|1[.)])\s+\S/.test(line) || isTable(lines, at));
}

const closes = (line, fence) => line.trim().length >= fence.length && [...line.trim()].every((char) => char === fence[0]);
const isTable = (lines, at) => lines[at].includes("|") && (lines[at + 1] ?? "").includes("|") && DASHES.test(lines[at + 1].trim());
const indentOf = (line) => line.length - line.trimStart().length;

function until(lines, at, ends) {
  while (at < lines.length && !ends(lines[at], at)) at += 1;
  return at;
}

// A list goes on with items of its kind, with what is indented, and, directly below, with text.
function endOfList(lines, start) {
  const [, indent, number] = ITEM.exec(lines[start]);
  let end = start + 1;
  for (let at = end; at < lines.length; at += 1) {
    const item = ITEM.exec(lines[at]), isBlank = !lines[at].trim();
    if (isBlank) continue;
    const goesOn = indentOf(lines[at]) > indent.length || (item ? (item[2] === undefined) === (number === undefined) && !RULE.test(lines[at])
      : end === at && ![FENCE, HEADING, RULE, QUOTE].some((form) => form.test(lines[at])));
    if (!goesOn) break;
    end = at + 1;
  }
  return end;
}

function rendered(lines, depth) {
  const [first] = lines, text = lines.join("\n");
  const fence = FENCE.exec(first), heading = HEADING.exec(first);
  if (fence) return code(lines.slice(1, lines.length > 1 && closes(lines.at(-1), fence[1]) ? -1 : undefined), indentOf(first), fence[2].trim().split(/\s/, 1)[0]);
  if (heading) return element("h4", { class: `level${heading[1].length}` }, ...inline(heading[2].trim().replace(/ #+$/, "")));
  if (RULE.test(first)) return element("hr");
  if (depth < MAX_DEPTH && QUOTE.test(first)) return element("blockquote", {}, ...inner(lines.map((line) => line.replace(QUOTE, "")), depth));
  if (depth < MAX_DEPTH && ITEM.test(first)) return list(lines, depth);
  if (isTable(lines, 0)) return table(lines);
  return element("p", {}, ...inline(text.trim()));
}

const inner = (lines, depth) => blocksOf(lines).map((block) => rendered(block, depth + 1));

function code(lines, indent, language) {
  const text = lines.map((line) => line.slice(Math.min(indent, indentOf(line)))).join("\n");
  return element("div", { class: "code" }, element("div", { class: "bar-of-code" }, element("span", {}, language || "code"), copyButton(() => text, "Copy the code")),
    element("pre", { tabindex: "0" }, element("code", {}, text)));
}

function list(lines, depth) {
  const [, indent, number] = ITEM.exec(lines[0]), items = [];
  let width = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && indentOf(line) <= indent.length) {
      items.push([item[4]]);
      width = line.length - item[4].length;
    } else items.at(-1).push(line.slice(Math.min(width, indentOf(line))));
  }
  return element(number === undefined ? "ul" : "ol", number === undefined ? {} : { start: number }, ...items.map((item) => {
    const [head, ...rest] = inner(item, depth);
    return element("li", {}, ...(head?.tagName === "P" ? head.childNodes : head ? [head] : []), ...rest); // its text needs no paragraph
  }));
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => inline(cell.trim().replaceAll("\\|", "|")));
  const [head, , ...rows] = lines;
  return element("div", { class: "scroll", tabindex: "0" }, element("table", {},
    element("thead", {}, element("tr", {}, ...cells(head).map((cell) => element("th", { scope: "col" }, ...cell)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row).map((cell) => element("td", {}, ...cell)))))));
}

const isAddress = (text) => !text.trim() || /:\/\/|^\s*www\./i.test(text); // it could name another place than the link leads to
const link = (url, text) => element("a", { href: url, rel: "noopener noreferrer", target: "_blank" }, text);

// Returns the nodes of a text within a block.
function inline(text, depth = 0) {
  if (depth > MAX_DEPTH || text.length > MAX_INLINE) return [text];
  const nodes = [];
  let from = 0, at = 0;
  while ((at = next(text, at)) < text.length) {
    const [match, make] = matched(text, at);
    if (!match) { at += 1; continue; }
    if (at > from) nodes.push(text.slice(from, at));
    nodes.push(make(match, depth));
    from = at += match[0].length;
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

function next(text, at) {
  MARKS.lastIndex = at;
  return MARKS.exec(text)?.index ?? text.length;
}

function matched(text, at) {
  for (const [form, make] of INLINE) {
    form.lastIndex = at;
    const match = form.exec(text);
    if (match) return [match, make];
  }
  return [null, null];
}
