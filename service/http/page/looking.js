// Looks at the server every couple of seconds, as long as somebody sees the page.

const PAUSE = 2000; // milliseconds
const SHARE = 20; // a slow server is left alone for so many times as long as it took

export class Looking {
  #timer = 0;
  #look;

  constructor(look, resumed) {
    this.#look = look;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(this.#timer);
      if (document.hidden) return;
      resumed();
      this.#turn();
    });
  }

  start() {
    clearTimeout(this.#timer);
    this.#turn();
  }

  async #turn() {
    if (document.hidden) return;
    const began = performance.now();
    await this.#look();
    const took = performance.now() - began;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#turn(), Math.max(PAUSE, SHARE * took));
  }
}
