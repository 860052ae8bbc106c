// Finds classes by name or id, and shows which experts hold them.

import { by, make } from "./dom.js";
import { count, named, plural } from "./format.js";
import { isAbort, json } from "./server.js";

const LIMIT = 20;
const PAUSE = 250; // milliseconds without a key stroke

export class Classes {
  #model = null;
  #asking = null;
  #timer = 0;

  constructor({ failed, openExpert }) {
    Object.assign(this, { failed, openExpert });
    by("search").addEventListener("input", () => {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#search(), PAUSE);
    });
    by("search-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#search();
    });
  }

  show(model) {
    this.#model = model;
    by("search-label").textContent = model.labels
      ? "Name or id"
      : "Id: this model's classes have no names";
    if (by("search").value) this.#search();
    else this.#clear();
  }

  // A class that was chosen elsewhere on the page.
  async open(id) {
    clearTimeout(this.#timer);
    by("search").value = id;
    const { found, signal } = this.#asked(`classes/${id}`);
    await this.#report(async () => this.#list([await found], false), signal);
  }

  async #search() {
    clearTimeout(this.#timer);
    const text = by("search").value.trim();
    if (!text) return this.#clear();
    const { found, signal } = this.#asked(
      `classes?limit=${LIMIT}&search=${encodeURIComponent(text)}`,
    );
    await this.#report(async () => {
      const { classes, more } = await found;
      this.#list(classes, more);
    }, signal);
  }

  #asked(what) {
    this.#asking?.abort();
    this.#asking = new AbortController();
    const { signal } = this.#asking;
    by("search-said").textContent = "Searching…";
    return { found: json(`${this.#model.path}/${what}`, { signal }), signal };
  }

  async #report(work, signal) {
    try {
      await work();
    } catch (error) {
      if (signal.aborted || isAbort(error)) return;
      by("found").replaceChildren();
      by("search-said").textContent = error.message;
      this.failed(error);
    }
  }

  #clear() {
    this.#asking?.abort();
    by("found").replaceChildren();
    by("search-said").textContent = "Shows the experts that hold it.";
  }

  #list(classes, more) {
    const first = more
      ? `The first ${count(classes.length)} of more.`
      : `${plural(classes.length, "class", "classes")} found.`;
    by("search-said").textContent = classes.length ? first : "No class found.";
    by("found").replaceChildren(...classes.map((found) => this.#item(found)));
  }

  #item({ id, label, experts }) {
    const links = experts.map((expert) => {
      const open = make("button", {
        type: "button",
        className: "link",
        textContent: expert,
        "aria-label": `Expert ${expert}`,
      });
      open.addEventListener("click", () => this.openExpert(expert));
      return open;
    });
    const held = experts.length === 1 ? "in expert" : `in ${count(experts.length)} experts`;
    return make(
      "li",
      {},
      make("span", { className: "name", textContent: named(label, id) }),
      make("span", { className: "id", textContent: label === null ? "" : id }),
      make("span", { className: "in" }, experts.length ? held : "in no expert", ...links),
    );
  }
}
