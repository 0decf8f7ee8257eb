// Draws lines over time, as plain SVG. Knows no status: series have names and points.

import { element, svg } from "./dom.js";

const MIN_WIDTH = 240, HEIGHT = 170, LEFT = 46, TOP = 8, BOTTOM = 20;
const MAX_SPAN_S = 600, MIN_SPAN_S = 30;

export class Plot {
  // `scale`: linear or decades; `write` formats a value.
  constructor(target, names, { unit, scale = linear, write = short }) {
    this.target = target;
    this.unit = unit;
    this.scale = scale;
    this.write = write;
    this.series = names.map((name) => ({ name, points: [] }));
  }

  // Adds one value for each name; null leaves a gap. Values that are not later than the last are ignored.
  add(time, values) {
    if (time <= (this.series[0].points.at(-1)?.[0] ?? 0)) return;
    this.series.forEach((line, index) => {
      line.points.push([time, values[index]]);
      while (line.points[0][0] < time - MAX_SPAN_S) line.points.shift();
    });
  }

  draw() {
    const now = this.series[0].points.at(-1)?.[0];
    if (now === undefined) return;
    const values = this.series.flatMap((line) => line.points.map((point) => point[1])).filter((value) => value !== null);
    const { ticks, share } = this.scale(values);
    const width = Math.max(MIN_WIDTH, this.target.clientWidth);  // so that text keeps its size
    const span = Math.max(MIN_SPAN_S, now - this.series[0].points[0][0]);
    const x = (time) => LEFT + (width - LEFT) * (1 - (now - time) / span);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - share(value));
    const marks = ticks.map((tick) => svg("g", {},
      svg("line", { class: "grid", x1: LEFT, x2: width, y1: y(tick), y2: y(tick) }),
      svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, this.write(tick))));
    const lines = this.series.map((line, index) => svg("path", { class: `s${index}`, fill: "none", d: trace(line.points, x, y) }));
    const latest = this.series.map((line) => `${line.name} ${this.write(line.points.at(-1)?.[1] ?? null)}`);
    const chart = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `Last ${ago(span)}, ${this.unit}: ${latest.join(", ")}` },
      ...marks, ...lines,
      svg("text", { x: LEFT, y: HEIGHT - 4 }, `${ago(span)} ago`), svg("text", { x: width, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
      ...(values.length ? [] : [svg("text", { class: "none", x: width / 2, y: HEIGHT / 2 }, "Nothing measured yet")]));
    const legend = element("ul", { class: "legend" }, ...latest.map((text, index) => element("li", {}, element("span", { class: `swatch s${index}` }), text)));
    this.target.replaceChildren(chart, legend);
  }
}

function trace(points, x, y) {
  let path = "", isOpen = false;
  for (const [time, value] of points) {
    if (value !== null) path += `${isOpen ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    isOpen = value !== null;
  }
  return path;
}

const ago = (span) => (span < 120 ? `${Math.round(span)} s` : `${Math.round(span / 60)} min`);

// A scale: its ticks, and where between the first (0) and the last (1) a value lies.
export function linear(values) {
  const top = nice(Math.max(1, ...values));
  return { ticks: [0, top / 2, top], share: (value) => value / top };
}

export function decades(values) {
  const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0.01, 1];
  const first = Math.floor(Math.log10(Math.max(low, 1e-4)));
  const last = Math.max(first + 1, Math.ceil(Math.log10(high)));
  const ticks = Array.from({ length: last - first + 1 }, (_, index) => 10 ** (first + index));
  return { ticks, share: (value) => (Math.log10(Math.max(value, ticks[0])) - first) / (last - first) };
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value) ?? value;
}

function short(value) {
  if (value === null) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(1)}k`;
  return value >= 10 || value === 0 ? value.toFixed(0) : value.toPrecision(2);
}
