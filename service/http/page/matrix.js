// Which expert holds which class, as a picture of ranges, with a cursor and a table.

import { by, make } from "./dom.js";
import { count, plural, range } from "./format.js";
import { isAbort, json } from "./server.js";

const ROWS = 200;
const COLUMNS = 400;
const FAINTEST = 0.3; // of a cell that is not empty

export class Matrix {
  #model = null;
  #matrix = null;
  #rowOf = []; // by expert
  #at = null; // the cursor: row and column
  #shown = null; // the expert whose row is marked
  #asking = null;

  constructor({ failed, openExpert }) {
    this.openExpert = openExpert;
    this.field = by("field");
    by("order").addEventListener("change", () => this.#load().catch(failed));
    this.field.addEventListener("pointermove", (event) => this.#pointAt(event));
    this.field.addEventListener("pointerdown", (event) => this.#pointAt(event));
    this.field.addEventListener("click", () => this.#open());
    this.field.addEventListener("keydown", (event) => this.#move(event));
    this.field.addEventListener("focus", () => this.#at ?? this.#moveTo(0, 0));
    by("matrix-table").addEventListener("toggle", () => this.#fillTable());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  async show(model) {
    this.#model = model;
    await this.#load();
  }

  mark(expert) {
    this.#shown = expert;
    const row = this.#rowOf[expert];
    by("row-mark").hidden = row === undefined;
    if (row === undefined) return;
    const rows = this.#matrix.counts.length;
    by("row-mark").style.top = `${(100 * row) / rows}%`;
    by("row-mark").style.height = `${100 / rows}%`;
  }

  // Every cell in the accent's colour, the fuller the stronger.
  paint() {
    if (!this.#matrix) return;
    const { counts } = this.#matrix;
    const canvas = by("cells");
    [canvas.width, canvas.height] = [counts[0].length, counts.length];
    const context = canvas.getContext("2d");
    context.fillStyle = getComputedStyle(canvas).color;
    counts.forEach((row, r) =>
      row.forEach((held, c) => {
        if (!held) return;
        context.globalAlpha = FAINTEST + (1 - FAINTEST) * (held / this.#room(r, c));
        context.fillRect(c, r, 1, 1);
      }),
    );
  }

  async #load() {
    this.#asking?.abort();
    const asking = (this.#asking = new AbortController());
    const model = this.#model;
    const asked = `matrix?rows=${ROWS}&columns=${COLUMNS}&order=${by("order").value}`;
    try {
      const matrix = await json(`${model.path}/${asked}`, { signal: asking.signal });
      this.#take(matrix, model);
    } catch (error) {
      if (isAbort(error)) return;
      by("cell").textContent = error.message;
      throw error;
    }
  }

  #take(matrix, model) {
    this.#matrix = matrix;
    this.#rowOf = [];
    matrix.counts.forEach((_, row) => {
      for (const expert of this.#expertsOf(row)) this.#rowOf[expert] = row;
    });
    this.#at = null;
    by("cell-mark").hidden = true;
    by("last-class").textContent = `class ${count(model.n_classes - 1)}`;
    by("cell").textContent = this.#summary(model);
    this.paint();
    this.mark(this.#shown);
    this.#fillTable();
  }

  #summary(model) {
    const held = this.#matrix.counts.flat().reduce((sum, value) => sum + value, 0);
    const copies = (held / model.n_classes).toFixed(2);
    const who = `${plural(model.n_experts, "expert")} hold ${plural(held, "class", "classes")}`;
    return `${who} between them: ${copies} copies of each on average.`;
  }

  #expertsOf(row) {
    const { experts, expert_edges: edges } = this.#matrix;
    return experts.slice(edges[row], edges[row + 1]);
  }

  #room(row, column) {
    const { expert_edges: experts, class_edges: classes } = this.#matrix;
    return (experts[row + 1] - experts[row]) * (classes[column + 1] - classes[column]);
  }

  #pointAt(event) {
    if (!this.#matrix) return;
    const box = this.field.getBoundingClientRect();
    const { counts } = this.#matrix;
    const place = (share, number) => Math.max(0, Math.min(number - 1, Math.floor(share * number)));
    this.#moveTo(
      place((event.clientY - box.top) / box.height, counts.length),
      place((event.clientX - box.left) / box.width, counts[0].length),
    );
  }

  #move(event) {
    if (!this.#matrix) return;
    if (event.key === "Enter") return this.#open();
    const { counts } = this.#matrix;
    const [row, column] = this.#at ?? [0, 0];
    const far = event.shiftKey ? 10 : 1;
    const to = {
      ArrowUp: [row - far, column],
      ArrowDown: [row + far, column],
      ArrowLeft: [row, column - far],
      ArrowRight: [row, column + far],
      Home: [row, 0],
      End: [row, counts[0].length - 1],
      PageUp: [row - 10, column],
      PageDown: [row + 10, column],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    const within = (value, most) => Math.max(0, Math.min(most - 1, value));
    this.#moveTo(within(to[0], counts.length), within(to[1], counts[0].length));
  }

  #moveTo(row, column) {
    if (!this.#matrix) return;
    this.#at = [row, column];
    const { counts, class_edges: classes } = this.#matrix;
    const experts = this.#expertsOf(row);
    const mark = by("cell-mark");
    mark.hidden = false;
    mark.style.top = `${(100 * row) / counts.length}%`;
    mark.style.left = `${(100 * column) / counts[0].length}%`;
    mark.style.height = `${100 / counts.length}%`;
    mark.style.width = `${100 / counts[0].length}%`;
    const [first, last] = [classes[column], classes[column + 1] - 1];
    const who = experts.length === 1 ? `Expert ${experts[0]}` : `Experts ${listed(experts)}`;
    by("cell").textContent =
      `${who}, ${first === last ? "class" : "classes"} ${range(first, last)}: ` +
      `${count(counts[row][column])} of ${count(this.#room(row, column))} held.`;
  }

  #open() {
    if (this.#at) this.openExpert(this.#expertsOf(this.#at[0])[0]);
  }

  #fillTable() {
    const place = by("matrix-table").querySelector("div");
    if (!by("matrix-table").open || !this.#matrix) return place.replaceChildren();
    const { counts } = this.#matrix;
    const head = ["Expert", "Classes held", "From", "To"];
    const rows = counts.map((row, r) => {
      const held = row.reduce((sum, value) => sum + value, 0);
      return make(
        "tr",
        {},
        make("th", { scope: "row", textContent: listed(this.#expertsOf(r)) }),
        ...[count(held), ...this.#ends(row)].map((text) => make("td", { textContent: text })),
      );
    });
    place.replaceChildren(
      make(
        "table",
        {},
        make(
          "thead",
          {},
          make("tr", {}, ...head.map((text) => make("th", { scope: "col", textContent: text }))),
        ),
        make("tbody", {}, ...rows),
      ),
    );
  }

  // The first and the last range that are not empty.
  #ends(row) {
    const { class_edges: classes } = this.#matrix;
    const first = row.findIndex(Boolean);
    if (first < 0) return ["-", "-"];
    const last = row.findLastIndex(Boolean);
    return [`class ${count(classes[first])}`, `class ${count(classes[last + 1] - 1)}`];
  }
}

const listed = (experts) =>
  experts.length > 6
    ? `${experts.slice(0, 5).join(", ")} and ${experts.length - 5} more`
    : experts.join(", ");
