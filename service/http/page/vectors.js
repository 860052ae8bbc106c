// Reads a pasted vector: a JSON array, or numbers split by commas or spaces.

export class Unreadable extends Error {}

export function numbers(text) {
  const trimmed = text.trim();
  if (!trimmed) throw new Unreadable("There is no vector yet: paste one first.");
  const found = trimmed.startsWith("[") ? fromJson(trimmed) : fromWords(trimmed);
  if (!found.length) throw new Unreadable("The vector holds no number.");
  const wrong = found.findIndex((value) => typeof value !== "number" || !Number.isFinite(value));
  if (wrong >= 0) throw new Unreadable(`Number ${wrong + 1} of the vector is not a finite number.`);
  return found;
}

function fromJson(text) {
  let parsed;
  try {
    parsed = JSON.parse(text);
  } catch {
    throw new Unreadable("The vector begins with a bracket, but is not a JSON array.");
  }
  if (!Array.isArray(parsed[0])) return parsed;
  if (parsed.length > 1)
    throw new Unreadable(`There are ${parsed.length} rows: paste one of them.`);
  return parsed[0];
}

const fromWords = (text) =>
  text
    .split(/[\s,;]+/)
    .filter(Boolean)
    .map(Number);
