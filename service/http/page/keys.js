// The API key, asked for when the server wants one, and kept in this tab only.

import { by } from "./dom.js";
import { key } from "./server.js";

const PRINTABLE = /^[\x21-\x7e]+$/; // what a header may carry

export class Keys {
  // `changed` is called when there is another key, or none any more.
  constructor(changed) {
    by("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = by("key-text").value.trim();
      if (!PRINTABLE.test(text))
        return this.#say("A key has letters, digits and signs, and no spaces.");
      key.set(text);
      changed();
    });
    by("forget").addEventListener("click", () => {
      key.forget();
      changed();
    });
  }

  // The server has refused: without a key it asks for one, with a key it says what is wrong.
  ask(error) {
    const refused = key.get() !== "";
    key.forget();
    by("forget").hidden = true;
    by("key").hidden = false;
    this.#say(refused ? error.message : "");
    by("key-text").value = "";
    by("key-text").focus();
  }

  accepted() {
    by("key").hidden = true;
    by("key-text").value = "";
    by("forget").hidden = key.get() === "";
  }

  #say(text) {
    by("key-problem").textContent = text;
    by("key-problem").hidden = !text;
  }
}
