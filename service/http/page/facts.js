// What the model is, in a row of numbers, and which of its versions are not served.

import { by, make } from "./dom.js";
import { accuracy, count, times } from "./format.js";

export function show(model) {
  const facts = [
    ["Classes", count(model.n_classes)],
    ["Hidden size", count(model.hidden_size)],
    ["Experts", count(model.n_experts)],
    ["Accuracy", model.accuracy === null ? null : accuracy(model.accuracy)],
    ["Speedup trained", times(model.trained_flops_speedup)],
    ["Speedup live", model.flops_speedup === null ? null : times(model.flops_speedup)],
  ];
  by("facts").replaceChildren(
    ...facts.map(([name, value]) =>
      make(
        "div",
        {},
        make("dt", { textContent: name }),
        make("dd", {
          className: value === null ? "none" : "",
          textContent: value ?? missing(name),
        }),
      ),
    ),
  );
}

const missing = (name) => (name === "Speedup live" ? "no traffic yet" : "not known");

export function refused(info) {
  const text = info.found
    .filter(({ state }) => state === "refused" || state === "loading")
    .map(
      ({ version, state, reason }) =>
        `Version ${version} is ${state}${reason ? `: ${reason}` : "."}`,
    )
    .join(" ");
  by("refused").textContent = text;
  by("refused").hidden = !text;
}
