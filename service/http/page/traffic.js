// A small live chart of requests and latency, from the differences of /metrics.

import { by, draw } from "./dom.js";
import { rate, seconds } from "./format.js";
import { between, histogram, quantile, total } from "./metrics.js";

const KEPT = 60; // points: two minutes
const FEWEST = 20; // the chart is as wide as so many, until there are more
const WIDE = 300;
const HIGH = 64;

export class Traffic {
  #points = [];
  #before = null;

  // A look at /metrics, at a moment in seconds.
  take(text, now) {
    const after = { ...histogram(text), now };
    if (this.#before) this.#add(this.#before, after);
    this.#before = after;
  }

  // Nothing is known of the time until the next look.
  pause() {
    this.#before = null;
  }

  refuse(text) {
    this.pause();
    by("traffic-hint").textContent = text;
    by("traffic-hint").hidden = false;
  }

  #add(before, after) {
    const came = between(before, after);
    if (!came) return;
    this.#points.push({
      rate: total(came) / (after.now - before.now),
      p50: quantile(came, 0.5),
      p99: quantile(came, 0.99),
    });
    this.#points = this.#points.slice(-KEPT);
    this.#show();
  }

  #show() {
    const latest = this.#points.at(-1);
    const said = (value) => (value === null ? "-" : seconds(value));
    by("rate").textContent = rate(latest.rate);
    by("p50").textContent = said(latest.p50);
    by("p99").textContent = said(latest.p99);
    by("traffic-hint").hidden = true;
    const most = (name) => Math.max(...this.#points.map((point) => point[name] ?? 0));
    const [busiest, slowest] = [most("rate"), most("p99")];
    this.#chart(
      "rate-chart",
      [
        ["area", "rate"],
        ["", "rate"],
      ],
      busiest,
      `Requests per second: now ${rate(latest.rate)}, at most ${rate(busiest)}`,
    );
    this.#chart(
      "latency-chart",
      [
        ["", "p50"],
        ["dashed", "p99"],
      ],
      slowest,
      slowest
        ? `Latency: now p50 ${said(latest.p50)}, p99 ${said(latest.p99)}; most ${seconds(slowest)}`
        : "No requests yet",
    );
  }

  #chart(id, lines, most, name) {
    const chart = by(id);
    chart.setAttribute("aria-label", name);
    if (this.#points.length < 2) return;
    chart.replaceChildren(
      ...lines.map(([className, what]) =>
        draw("path", {
          class: className,
          d: path(
            this.#points.map((point) => point[what]),
            most || 1,
            className === "area",
          ),
        }),
      ),
    );
  }
}

// Gaps where there is no value; the newest is on the right.
export function path(values, most, closed) {
  const room = Math.max(FEWEST, values.length);
  const x = (at) => (((room - values.length + at) * WIDE) / (room - 1)).toFixed(1);
  const y = (value) => (HIGH - 2 - (value / most) * (HIGH - 6)).toFixed(1);
  let text = "";
  values.forEach((value, at) => {
    if (value === null) return;
    const joined = at && values[at - 1] !== null;
    if (closed && !joined) text += `M${x(at)} ${HIGH}L${x(at)} ${y(value)}`;
    else text += `${joined ? "L" : "M"}${x(at)} ${y(value)}`;
    if (closed && (at === values.length - 1 || values[at + 1] === null))
      text += `L${x(at)} ${HIGH}Z`;
    // A single point would be invisible.
    else if (!joined && (values[at + 1] ?? null) === null) text += `h0.1`;
  });
  return text;
}
