// What went wrong, in the server's words, and what to do about it.

import { make } from "./dom.js";
import { count } from "./format.js";

const ADVICE = {
  "wrong-width": (model) => `This model takes ${count(model.hidden_size)} numbers a row.`,
  "malformed-npy": () => "Save the rows with numpy.save, as float32.",
  "wrong-dtype": () => "Convert it first: rows.astype('float32').",
  "wrong-layout": () => "Save numpy.ascontiguousarray(rows), with one or two dimensions.",
  "not-finite": () => "Replace the number, and ask again.",
  "k-out-of-range": () => "Choose fewer answers.",
  "experts-out-of-range": () => "Search fewer experts.",
  "body-too-large": () => "Save fewer rows into the file.",
  "queue-full": () => "The server is busy: ask again in a moment.",
  "too-many-bytes": () => "The server is busy: ask again in a moment.",
  "too-many-searches": () => "The server is busy: search again in a moment.",
  "deadline-exceeded": () => "The server is busy: ask again in a moment.",
  "engine-failed": () => "The server's log says why.",
  "version-not-found": () => "Choose another version.",
  "model-not-found": () => "Choose another model.",
  forbidden: () => "Use a key with more scopes.",
};

export function show(place, error, model) {
  const advice = ADVICE[error.slug];
  place.replaceChildren(
    make("p", { textContent: error.message }),
    ...(advice ? [make("p", { className: "advice", textContent: advice(model) })] : []),
  );
  place.hidden = false;
}

export function clear(place) {
  place.replaceChildren();
  place.hidden = true;
}
