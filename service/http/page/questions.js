// Where the question's vector comes from: a sample of the bundle, a pasted vector, or a file.

import { by, options } from "./dom.js";
import { count, plural } from "./format.js";
import * as npy from "./npy.js";
import { json } from "./server.js";
import { Unreadable, numbers } from "./vectors.js";

const MOST_SAMPLES = 64;
const LARGEST = 8 * 2 ** 20; // bytes of a file that is sent as it is
const FILE_HINT = "float32, float16 or float64 in C order: one row, or several.";

const sizes = ({ rows, width }) => `${plural(rows, "row")} of ${plural(width, "number")}`;
const hasFiles = (event) => event.dataTransfer.types.includes("Files");

export class Questions {
  #samples = [];
  #file = null;
  #npy = null;

  constructor(changed) {
    this.changed = changed;
    for (const radio of this.#radios())
      radio.addEventListener("change", () => this.#choose(radio.value));
    by("sample").addEventListener("change", changed);
    by("row").addEventListener("input", changed);
    by("file").addEventListener("change", (event) => {
      if (event.target.files.length) this.take(event.target.files[0]);
    });
    this.#acceptDrops(by("ask"));
  }

  get source() {
    return this.#radios().find((radio) => radio.checked).value;
  }

  async show(model) {
    by("vector-hint").textContent =
      `${plural(model.hidden_size, "number")}: a JSON array, or split by commas or spaces.`;
    const { samples, total } = await json(`${model.path}/samples?limit=${MOST_SAMPLES}`);
    this.#samples = samples;
    options(
      by("sample"),
      samples.map((_, at) => [at, `Row ${at}`]),
    );
    by("sample-label").textContent =
      total > samples.length
        ? `Sample of the bundle: the first ${samples.length} of ${count(total)}`
        : "Sample of the bundle";
    by("no-samples").hidden = samples.length > 0;
    by("from-sample").querySelector(".field").hidden = samples.length === 0;
  }

  // What to send. Rows of numbers go as JSON; a file goes as it is, as far as it can.
  // `how` is {experts}, {experts, rescore: true} or {exact: true}.
  async body(k, how) {
    if (this.source === "file") {
      return {
        query: `?${new URLSearchParams({ k, ...how })}`,
        type: "application/x-npy",
        body: await this.#fileBody(),
      };
    }
    const inputs = [this.source === "sample" ? this.#sample() : numbers(by("vector").value)];
    return { query: "", type: "application/json", body: JSON.stringify({ inputs, k, ...how }) };
  }

  async take(file) {
    this.#file = file;
    this.#npy = await npy.read(file).catch(() => null);
    const found = this.#npy;
    by("file-row").hidden = !found || found.rows === 1;
    by("row").max = found ? found.rows - 1 : 0;
    by("row").value = 0;
    by("file-facts").textContent = found
      ? `${file.name}: ${found.dtype}, ${sizes(found)}.`
      : `${file.name}: not rows of floats as far as this page can tell.`;
    this.#choose("file");
    this.changed();
  }

  #sample() {
    const row = this.#samples[by("sample").value];
    if (!row)
      throw new Unreadable(
        "This model's bundle carries no samples: paste a vector or choose a file.",
      );
    return row;
  }

  async #fileBody() {
    if (!this.#file) throw new Unreadable("There is no file yet: choose or drop one first.");
    if (!this.#npy && this.#file.size > LARGEST) {
      throw new Unreadable(`${this.#file.name} is no .npy file of float rows.`);
    }
    const number = Number(by("row").value);
    if (this.#npy && !(Number.isInteger(number) && number >= 0 && number < this.#npy.rows)) {
      throw new Unreadable(`The file has the rows 0 to ${count(this.#npy.rows - 1)}.`);
    }
    try {
      return await (this.#npy ? npy.row(this.#npy, number) : this.#file.arrayBuffer());
    } catch {
      throw new Unreadable(`${this.#file.name} cannot be read any more: choose it again.`);
    }
  }

  #radios() {
    return [...document.getElementsByName("source")];
  }

  #choose(source) {
    for (const radio of this.#radios()) {
      radio.checked = radio.value === source;
      by(`from-${radio.value}`).hidden = !radio.checked;
    }
    if (source === "file" && !this.#file) by("file-facts").textContent = FILE_HINT;
  }

  #acceptDrops(panel) {
    const over = (event, state) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      by("drop").classList.toggle("over", state);
      if (state) this.#choose("file");
    };
    panel.addEventListener("dragover", (event) => over(event, true));
    panel.addEventListener("dragleave", (event) => over(event, false));
    panel.addEventListener("drop", (event) => {
      over(event, false);
      if (event.dataTransfer.files.length) this.take(event.dataTransfer.files[0]);
    });
    // A file that misses the panel must not take the page away.
    for (const name of ["dragover", "drop"]) {
      window.addEventListener(name, (event) => hasFiles(event) && event.preventDefault());
    }
  }
}
