// The experts as bars: upwards how many classes they hold, downwards how much traffic they get.

import { by, make } from "./dom.js";
import { count, percent, plural } from "./format.js";

const NARROWEST = 11; // pixels
const WIDEST = 44;
const ON_TOUCH = 16;

export class Bars {
  #bars = []; // by expert
  #order = []; // experts as they stand
  #columns = 1;
  #shares = [];
  chosen = null;
  #now = 0; // the expert that Tab comes to

  constructor(open) {
    this.open = open;
    this.place = by("bars");
    by("sort").addEventListener("change", () => this.#sort());
    by("window").addEventListener("change", () => this.#update());
    this.place.addEventListener("keydown", (event) => this.#move(event));
    this.place.addEventListener("click", (event) => this.#clicked(event.target.closest("button")));
    new ResizeObserver(() => this.#arrange()).observe(this.place);
  }

  show(experts) {
    this.experts = experts;
    this.recent = null;
    this.chosen = null;
    this.#now = 0;
    this.most = Math.max(...experts.map(({ classes }) => classes));
    this.place.classList.toggle("many", experts.length > 200);
    this.place.classList.toggle("lots", experts.length > 500);
    this.#bars = experts.map(({ expert, classes }) => {
      const up = make("span", { className: "up" }, make("i"));
      up.style.height = `${(100 * classes) / this.most}%`;
      return make(
        "button",
        { type: "button", tabIndex: -1, "data-expert": expert, "aria-pressed": "false" },
        up,
        make("span", { className: "down" }, make("i")),
      );
    });
    this.#update();
    this.#sort();
  }

  // The same experts after some more traffic; `recent` has the rows of the last minute.
  follow(experts, recent) {
    this.experts = experts;
    this.recent = recent;
    this.#update();
    if (by("sort").value === "traffic" && !this.place.matches(":focus-within, :hover"))
      this.#sort();
  }

  mark(expert) {
    for (const bar of this.#bars)
      bar.classList.toggle("chosen", bar.dataset.expert === String(expert));
    this.chosen = expert;
    this.#describe();
  }

  press(expert) {
    for (const bar of this.#bars)
      bar.setAttribute("aria-pressed", bar.dataset.expert === String(expert));
    if (expert !== null) this.#point(expert);
  }

  #clicked(bar) {
    if (bar) this.open(Number(bar.dataset.expert));
  }

  #update() {
    const rows =
      by("window").value === "start" ? this.experts.map(({ rows }) => rows) : this.recent;
    const all = (rows ?? []).reduce((sum, value) => sum + value, 0);
    this.#shares = this.experts.map((_, expert) => (all ? rows[expert] / all : 0));
    const most = Math.max(...this.#shares) || 1;
    this.#bars.forEach((bar, expert) => {
      const share = this.#shares[expert];
      bar.querySelector(".up i").style.opacity = share / most;
      bar.querySelector(".down i").style.height = `${(100 * share) / most}%`;
    });
    this.busiest = all ? most : null;
    this.#describe();
  }

  #describe() {
    const recent = by("window").value === "start" ? "" : " of the last minute";
    this.#bars.forEach((bar, expert) => {
      const { classes } = this.experts[expert];
      const share =
        this.busiest === null ? "no traffic" : `${percent(this.#shares[expert])} of rows`;
      const text = `Expert ${expert}: ${plural(classes, "class", "classes")}, ${share}${recent}`;
      const name = expert === this.chosen ? `${text}, chosen by the last answer` : text;
      bar.setAttribute("aria-label", name);
      bar.title = name;
    });
    by("bars-legend").replaceChildren(
      make("span", { textContent: `up: classes held, at most ${count(this.most)}` }),
      make("span", {
        textContent:
          this.busiest === null
            ? `down and shade: share of rows; none${recent || " yet"}`
            : `down and shade: share of rows${recent}, at most ${percent(this.busiest)}`,
      }),
      ...(this.chosen === null
        ? []
        : [make("span", { textContent: `▾ chosen last: ${this.chosen}` })]),
    );
  }

  #sort() {
    const by_ = {
      number: () => 0,
      classes: (a, b) => this.experts[b].classes - this.experts[a].classes,
      traffic: (a, b) => this.#shares[b] - this.#shares[a],
    }[by("sort").value];
    this.#order = this.#bars.map((_, expert) => expert).sort((a, b) => by_(a, b) || a - b);
    const focused = this.place.contains(document.activeElement) ? document.activeElement : null;
    this.place.replaceChildren(...this.#order.map((expert) => this.#bars[expert]));
    this.#point(focused ? this.#now : this.#order[0]);
    focused?.focus();
    this.#arrange();
  }

  // Rows of equal length, each bar wide enough to be hit.
  #arrange() {
    const number = this.#bars.length;
    if (!number) return;
    const narrowest = matchMedia("(pointer: coarse)").matches ? ON_TOUCH : NARROWEST;
    const most = Math.max(1, Math.floor(this.place.clientWidth / (number > 500 ? 8 : narrowest)));
    this.#columns = Math.ceil(number / Math.ceil(number / most));
    this.place.style.gridTemplateColumns = `repeat(${this.#columns}, minmax(0, ${WIDEST}px))`;
    const step = this.place.clientWidth / this.#columns >= 28 ? 1 : 10;
    this.#order.forEach((expert, at) => {
      this.#bars[expert].querySelector(".tick")?.remove();
      if ((at % this.#columns) % step === 0 && number <= 500) {
        this.#bars[expert].append(
          make("span", { className: "tick", textContent: expert, "aria-hidden": "true" }),
        );
      }
    });
  }

  #point(expert) {
    this.#bars[this.#now]?.setAttribute("tabindex", "-1");
    this.#now = expert;
    this.#bars[expert]?.setAttribute("tabindex", "0");
  }

  #move(event) {
    const at = this.#order.indexOf(this.#now);
    const last = this.#order.length - 1;
    const to = {
      ArrowLeft: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at - this.#columns,
      ArrowDown: at + this.#columns,
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to < 0 || to > last) return;
    this.#point(this.#order[to]);
    this.#bars[this.#now].focus();
  }
}
