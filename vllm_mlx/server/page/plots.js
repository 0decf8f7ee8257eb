// Lines over time, as plain SVG. Knows no status: series come with names and points.

import { element, svg } from "./dom.js";

const WIDTH = 600, HEIGHT = 170, LEFT = 46, TOP = 8, BOTTOM = 20;
const MAX_SPAN_S = 300, MIN_SPAN_S = 30;

export class Plot {
  constructor(target, names, unit) {
    this.target = target;
    this.unit = unit;
    this.series = names.map((name) => ({ name, points: [] }));
  }

  // One value for each name; null leaves a gap.
  add(time, values) {
    this.series.forEach((line, index) => {
      line.points.push([time, values[index]]);
      while (line.points[0][0] < time - MAX_SPAN_S) line.points.shift();
    });
    this.draw(time);
  }

  draw(now) {
    const values = this.series.flatMap((line) => line.points.map((point) => point[1])).filter((value) => value !== null);
    const top = nice(Math.max(1, ...values));
    const span = Math.max(MIN_SPAN_S, now - this.series[0].points[0][0]);
    const x = (time) => LEFT + (WIDTH - LEFT) * (1 - (now - time) / span);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    const marks = [0, 0.5, 1].map((part) => svg("g", {},
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(top * part), y2: y(top * part) }),
      svg("text", { x: LEFT - 6, y: y(top * part) + 4, "text-anchor": "end" }, short(top * part))));
    const lines = this.series.map((line, index) => svg("path", { class: `s${index}`, fill: "none", d: trace(line.points, x, y) }));
    const latest = this.series.map((line) => `${line.name} ${short(line.points.at(-1)?.[1])}`);
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `Last ${Math.round(span)} seconds, ${this.unit}: ${latest.join(", ")}` },
      ...marks, ...lines,
      svg("text", { x: LEFT, y: HEIGHT - 4 }, `${Math.round(span)} s ago`), svg("text", { x: WIDTH, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
      ...(values.length ? [] : [svg("text", { class: "none", x: WIDTH / 2, y: HEIGHT / 2 }, "Nothing measured yet")]));
    const legend = element("ul", { class: "legend" }, ...latest.map((text, index) => element("li", {}, element("span", { class: `swatch s${index}` }), text)));
    this.target.replaceChildren(picture, legend);
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

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value) ?? value;
}

function short(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(1)}k`;
  return value >= 10 || value === 0 ? value.toFixed(0) : value.toPrecision(2);
}
