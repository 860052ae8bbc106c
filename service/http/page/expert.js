// One expert: what it holds, page by page, and what it has done.

import { by, make } from "./dom.js";
import { count, named, percent, plural, seconds } from "./format.js";
import { Problem, isAbort, json } from "./server.js";

const PAGE = 50;

export class Expert {
  #model = null;
  #number = null;
  #offset = 0;
  #asking = null;

  constructor({ failed, opened }) {
    Object.assign(this, { failed, opened });
    by("previous").addEventListener("click", () => this.#turn(-PAGE));
    by("next").addEventListener("click", () => this.#turn(PAGE));
    by("expert-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (by("expert-number").value) this.open(by("expert-number").value);
    });
  }

  show(model) {
    this.#model = model;
    this.#number = null;
    by("expert-number").max = model.n_experts - 1;
    by("expert-number").value = "";
    this.#clear("Choose a bar, or enter a number.");
  }

  async open(number) {
    this.#offset = 0;
    this.#number = number;
    by("expert-number").value = number;
    await this.#load();
  }

  // What it has done, which changes with the traffic.
  follow(experts) {
    this.experts = experts;
    const found = experts[this.#number];
    if (!found || by("held").childElementCount === 0) return;
    by("expert-said").textContent = [
      plural(found.classes, "class", "classes"),
      `${plural(found.rows, "row")} so far`,
      ...(found.mean_seconds === null ? [] : [`${seconds(found.mean_seconds)} a call`]),
      `${percent(found.trained_utilization)} of training's rows`,
    ].join(" · ");
  }

  async #load() {
    this.#asking?.abort();
    const asking = (this.#asking = new AbortController());
    const number = this.#number;
    const classes = `${this.#model.path}/experts/${encodeURIComponent(number)}/classes`;
    const path = `${classes}?offset=${this.#offset}&limit=${PAGE}`;
    try {
      this.#list(await json(path, { signal: asking.signal }));
    } catch (error) {
      if (isAbort(error)) return;
      this.#number = null;
      this.#clear(error.message);
      if (!(error instanceof Problem && error.slug === "expert-not-found")) this.failed(error);
    }
  }

  #list({ expert, total, offset, classes, labels }) {
    this.#number = expert;
    by("expert-title").textContent = `Expert ${expert}`;
    by("held").replaceChildren(
      ...classes.map((id, at) =>
        make(
          "li",
          {},
          make("span", { className: "id", textContent: id }),
          make("span", { className: "name", textContent: named(labels?.[at], id) }),
        ),
      ),
    );
    by("held").tabIndex = classes.length ? 0 : -1;
    by("pages").hidden = total <= PAGE;
    by("previous").disabled = offset === 0;
    by("next").disabled = offset + classes.length >= total;
    by("page").textContent =
      `${count(offset + 1)} to ${count(offset + classes.length)} of ${count(total)}`;
    by("expert-said").textContent = total ? "" : "It holds no class.";
    if (this.experts) this.follow(this.experts);
    this.opened(expert);
  }

  async #turn(by_) {
    this.#offset = Math.max(0, this.#offset + by_);
    await this.#load();
    by("held").scrollTop = 0;
  }

  #clear(text) {
    by("expert-title").textContent = "One expert";
    by("expert-said").textContent = text;
    by("held").replaceChildren();
    by("held").tabIndex = -1;
    by("pages").hidden = true;
    this.opened(null);
  }
}
