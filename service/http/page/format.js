// Numbers for readers.

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(number);

export const plural = (number, one, several = `${one}s`) =>
  `${count(number)} ${number === 1 ? one : several}`;

export const percent = (share) => `${(100 * share).toFixed(share >= 0.0995 ? 1 : 2)}%`;

export const accuracy = (share) => `${(100 * share).toFixed(2)}%`;

export const times = (ratio) => `${ratio >= 99.95 ? ratio.toFixed(0) : ratio.toFixed(1)}×`;

export function probability(value) {
  if (value >= 0.00005) return `${(100 * value).toFixed(2)}%`;
  return value > 0 ? value.toExponential(1) : "0";
}

export function gate(value) {
  return value > 0.9995 && value < 1 ? value.toFixed(6) : value.toFixed(3);
}

export function seconds(value) {
  if (value < 0.001) return `${(1e6 * value).toFixed(0)} µs`;
  if (value < 0.1) return `${(1e3 * value).toFixed(1)} ms`;
  if (value < 1) return `${(1e3 * value).toFixed(0)} ms`;
  return `${value.toFixed(1)} s`;
}

export const rate = (perSecond) =>
  perSecond < 10 ? perSecond.toFixed(1) : count(Math.round(perSecond));

export const range = (first, last) =>
  first === last ? count(first) : `${count(first)} to ${count(last)}`;

// An empty name would be invisible.
export const named = (label, id) =>
  label === null || label === undefined ? `Class ${id}` : label.trim() || "(no name)";
