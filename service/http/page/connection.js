// Whether the server answers. While it does not, a banner says so and it is asked again and again.

import { by } from "./dom.js";

const DELAYS = [1000, 2000, 4000, 5000]; // milliseconds; the last one is kept

export class Connection {
  #timer = 0;
  #failures = 0;

  constructor(again) {
    this.again = again;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.#failures) this.#retry(0);
    });
  }

  get isUp() {
    return this.#failures === 0;
  }

  lost(text) {
    this.#retry(DELAYS[Math.min(this.#failures, DELAYS.length - 1)]);
    this.#failures += 1;
    this.say(`${text} This page goes on by itself as soon as it can.`);
  }

  found() {
    clearTimeout(this.#timer);
    this.#failures = 0;
    this.say("");
  }

  say(text) {
    if (by("banner").textContent !== text) by("banner").textContent = text;
    by("banner").hidden = !text;
  }

  #retry(delay) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      if (!document.hidden) this.again();
    }, delay);
  }
}
