// The question and its answer: bars of probabilities, the chosen expert, and the recall dial.

import { by, make, options } from "./dom.js";
import { gate, named, plural, probability, seconds } from "./format.js";
import * as problems from "./problems.js";
import { Questions } from "./questions.js";
import { isAbort, json } from "./server.js";
import { Unreadable } from "./vectors.js";

const MOST_EXPERTS = 8;
const ANSWERS = [1, 3, 5, 10, 20, 50, 100];
const USUAL_ANSWERS = 10;
// How a row was answered, if an exact answer was asked for or the server promises a recall.
const RUNGS = {
  sparse: "Its experts were enough.",
  escalated: "All classes were scanned, since its experts might have missed some.",
  exact: "All classes were scanned: these are the output layer's own.",
};

const RESCORED = "The output layer ranked what its experts found.";
// What more experts do: with learned rows, the scores of two experts are not quite alike.
const DIAL = {
  fidelity: "More never lose an answer, at a higher cost.",
  accuracy: "More find more, at a higher cost, and may rank worse.",
  rescored:
    "More find more, at a higher cost, and may rank worse; Rescore has the output layer rank.",
};

export class Ask {
  #model = null;
  #questions;
  #asking = null;
  #asked = false; // once asked, what is changed is asked again by itself

  // `chosen` hears of the gate's choice, `open` of an expert or class to be shown.
  constructor({ failed, chosen, openExpert, openClass }) {
    Object.assign(this, { failed, chosen, openExpert, openClass });
    this.#questions = new Questions(() => this.#again());
    by("dial").addEventListener("input", () => {
      by("dial-value").textContent = by("dial").value;
      this.#again();
    });
    for (const [one, other] of [
      ["exact", "rescore"],
      ["rescore", "exact"],
    ]) {
      by(one).addEventListener("change", () => {
        if (by(one).checked) by(other).checked = false;
        this.#setDial();
        this.#again();
      });
    }
    by("k").addEventListener("change", () => this.#again());
    by("vector").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.ask();
    });
    by("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
  }

  async show(model) {
    this.#asking?.abort();
    this.#model = model;
    this.#asked = false;
    this.#empty();
    const dial = by("dial");
    dial.max = Math.min(MOST_EXPERTS, model.n_experts);
    const canRescore = model.can_exact && model.objective === "accuracy";
    this.#offer("exact", model.can_exact);
    this.#offer("rescore", canRescore);
    by("dial-hint").textContent = DIAL[canRescore ? "rescored" : model.objective];
    this.#setDial();
    by("dial-value").textContent = dial.value;
    const counts = ANSWERS.filter((k) => k <= model.n_classes);
    const before = Number(by("k").value) || USUAL_ANSWERS;
    options(
      by("k"),
      counts.map((k) => [k, k]),
      Math.max(...counts.filter((k) => k <= before)),
    );
    await this.#questions.show(model);
  }

  async ask() {
    this.#asked = true;
    this.#asking?.abort();
    const asking = (this.#asking = new AbortController());
    const model = this.#model;
    const [exact, rescore] = [by("exact").checked, by("rescore").checked];
    const [k, experts] = [Number(by("k").value), exact ? 1 : Number(by("dial").value)];
    const how = rescore ? { rescore } : {};
    by("answer").classList.add("old");
    try {
      const question = await this.#questions.body(k, exact ? { exact } : { experts, ...how });
      const began = performance.now();
      const answer = await this.#post(model, question, asking.signal);
      const took = (performance.now() - began) / 1000;
      const isMore = exact || experts > 1;
      const before = isMore ? await this.#withOne(model, k, how, asking.signal) : answer;
      if (asking.signal.aborted) return;
      problems.clear(by("ask-problem"));
      this.#showAnswer(answer, took, before, rescore ? RESCORED : RUNGS[answer.rungs?.[0]]);
    } catch (error) {
      if (asking.signal.aborted || isAbort(error)) return;
      this.#empty();
      problems.show(by("ask-problem"), error, model);
      if (!(error instanceof Unreadable)) this.failed(error);
    }
  }

  async #withOne(model, k, how, signal) {
    return this.#post(model, await this.#questions.body(k, { experts: 1, ...how }), signal);
  }

  #post(model, { query, type, body }, signal) {
    return json(`${model.path}/topk${query}`, { method: "POST", type, body, signal });
  }

  #again() {
    if (this.#asked) this.ask();
  }

  #offer(name, possible) {
    by(`${name}-field`).hidden = !possible;
    if (!possible) by(name).checked = false;
  }

  // Exact answers search all classes, so there is nothing to dial.
  #setDial() {
    by("dial").disabled = this.#model.n_experts === 1 || by("exact").checked;
  }

  #empty() {
    problems.clear(by("ask-problem"));
    by("answer").hidden = true;
    by("no-answer").hidden = this.#asked;
    this.chosen(null);
  }

  #showAnswer(answer, took, before, way) {
    const [classes] = answer.classes;
    const labels = answer.labels?.[0] ?? [];
    const shares = answer.log_probs[0].map(Math.exp);
    const known = new Set(before.classes[0]);
    const [expert] = answer.experts;
    by("answer").hidden = false;
    by("answer").classList.remove("old");
    by("no-answer").hidden = true;
    const open = make("button", {
      type: "button",
      className: "link",
      textContent: `expert ${expert}`,
    });
    open.addEventListener("click", () => this.openExpert(expert));
    by("answer-said").replaceChildren(
      "The gate chose ",
      open,
      ` with ${gate(answer.gates[0])}. Answered in ${seconds(took)}.`,
      ...(way ? [` ${way}`] : []),
    );
    by("answer-bars").replaceChildren(
      ...classes.map((id, at) => this.#bar(id, labels[at], shares[at], !known.has(id))),
    );
    const found = classes.filter((id) => !known.has(id)).length;
    by("answer-new").hidden = before === answer;
    by("answer-new").textContent = found
      ? `${plural(found, "class", "classes")} that one expert alone would not have found.`
      : "One expert alone would have found the same classes.";
    this.chosen(expert);
  }

  #bar(id, label, share, isNew) {
    const name = make("button", {
      type: "button",
      className: "link name",
      textContent: named(label, id),
    });
    name.addEventListener("click", () => this.openClass(id));
    const length = make("span", { className: "length" });
    length.style.width = `${100 * Math.min(1, share)}%`;
    return make(
      "li",
      { "data-class": id },
      make(
        "span",
        {},
        name,
        ...(label === undefined ? [] : [make("span", { className: "id", textContent: ` ${id}` })]),
        ...(isNew ? [make("span", { className: "badge", textContent: "new" })] : []),
      ),
      make("span", { className: "share", textContent: probability(share) }),
      make("span", { className: "track", "aria-hidden": "true" }, length),
    );
  }
}
