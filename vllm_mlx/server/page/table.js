// A table, of which each column is declared once: [its name, its meaning, its class, how it is read].

import { byId, element } from "./dom.js";

export class Table {
  // Reading an item returns the text of its cell, or fills the cell. Rows stay while their key does, and so does the focus.
  constructor(id, columns, keyOf = (_, number) => number) {
    Object.assign(this, { columns, keyOf, rows: new Map(), body: element("tbody", { id }) });
    const heads = columns.map(([name, meaning, kind]) => element("th", { scope: "col", class: kind, title: meaning }, name));
    byId(`${id}-table`).prepend(element("table", {}, element("thead", {}, element("tr", {}, ...heads)), this.body));
  }

  show(items) {
    const keyed = new Map(items.map((item, number) => [this.keyOf(item, number), item]));
    for (const [key, row] of this.rows) if (!keyed.has(key)) { row.remove(); this.rows.delete(key); }
    for (const [key, item] of keyed) {
      const cells = () => this.columns.map(([name, , kind]) => element("td", { "data-name": name.toLowerCase(), class: kind }));
      if (!this.rows.has(key)) this.rows.set(key, this.body.appendChild(element("tr", { "data-id": key }, ...cells())));
      this.columns.forEach(([, , , read], at) => {
        const cell = this.rows.get(key).children[at], text = read(item, cell);
        if (text !== undefined) cell.textContent = text;
      });
    }
  }
}
