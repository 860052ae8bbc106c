// Asks the server that this page came from, and nobody else.

const KEY = "dss-key";
const PATIENCE = 15_000; // milliseconds

export class Problem extends Error {
  constructor(status, detail, slug) {
    super(detail);
    this.status = status;
    this.slug = slug;
  }
}

// The server cannot be reached, or something in front of it cannot reach it.
export class Unreachable extends Error {}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => sessionStorage.setItem(KEY, text),
  forget: () => sessionStorage.removeItem(KEY),
};

export async function ask(path, { method = "GET", body, type, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (type) headers["Content-Type"] = type;
  const signals = [AbortSignal.timeout(PATIENCE), ...(signal ? [signal] : [])];
  let response;
  let content;
  try {
    response = await fetch(path, {
      method,
      headers,
      body,
      cache: "no-store",
      signal: AbortSignal.any(signals),
    });
    content = await response.text();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Unreachable("The server does not answer.");
  }
  if (!response.ok) throw problem(response, content);
  return content;
}

export const json = async (path, asked) => JSON.parse(await ask(path, asked));

// Nobody waits for the answer any more.
export const isAbort = (error) => error.name === "AbortError";

function problem(response, content) {
  if (!(response.headers.get("Content-Type") ?? "").startsWith("application/problem+json")) {
    if (response.status >= 500) return new Unreachable("The server does not answer.");
    return new Problem(response.status, `The server answered with status ${response.status}.`, "");
  }
  const { detail, type } = JSON.parse(content);
  return new Problem(response.status, detail, type.replace("urn:dss:problem:", ""));
}
