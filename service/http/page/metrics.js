// What the chart needs of /metrics: the histogram of top-k requests, all routes together.

const BUCKET = "dss_http_request_seconds_bucket{";
const ASKED = /route="[^"]*\/(topk|infer)"/;

// Upper ends of buckets, ascending, and how many requests took at most as long.
export function histogram(text) {
  const counts = new Map();
  for (const line of text.split("\n")) {
    if (!line.startsWith(BUCKET) || !ASKED.test(line)) continue;
    const end = /le="([^"]+)"/.exec(line)[1];
    const bound = end === "+Inf" ? Infinity : Number(end);
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  const bounds = [...counts.keys()].sort((a, b) => a - b);
  return { bounds, counts: bounds.map((bound) => counts.get(bound)) };
}

// What came between two looks; null if the server has begun to count anew.
export function between(before, after) {
  const known = new Map(before.bounds.map((bound, at) => [bound, before.counts[at]]));
  const counts = after.counts.map((value, at) => value - (known.get(after.bounds[at]) ?? 0));
  if (counts.some((value) => value < 0)) return null;
  return { bounds: after.bounds, counts };
}

export const total = ({ counts }) => counts.at(-1) ?? 0;

// As Prometheus estimates it: requests lie evenly in their bucket. Null without any request.
export function quantile({ bounds, counts }, share) {
  const all = counts.at(-1) ?? 0;
  if (!all) return null;
  const wanted = share * all;
  const at = counts.findIndex((value) => value >= wanted);
  const low = at ? bounds[at - 1] : 0;
  if (bounds[at] === Infinity) return low;
  const under = at ? counts[at - 1] : 0;
  return low + ((bounds[at] - low) * (wanted - under)) / (counts[at] - under);
}
