// Operations in words: the same as web/operations.py, which drew the page; a test compares what the two draw.

import { counted, size, usedOf } from "./words.js";

const STATES = { under_way: "under way", waiting: "waiting", failing: "failing" };
const OUTCOMES = { completed: "done", cancelled: "cancelled", failed: "failed" };
export const STATUSES = {
  success: "done",
  downloading: "under way",
  running_on_worker: "worker busy",
  error: "failing",
  queued: "waiting",
  skipped: "skipped",
  superseded: "superseded",
  withdrawn: "withdrawn",
  cancelled: "cancelled",
};
const ENDED = new Set(["success", "skipped", "superseded", "withdrawn", "cancelled"]);
const SOURCES_SHOWN = 3;
const WRONG_DATA = "wrong data from ";
const BUSY = "The node did not answer in time and most likely still works on it. Its next report decides.";

export const hasEnded = (node) => ENDED.has(node.status);
export const stateOf = (view) => (view.finished_at && view.outcome) || view.state;
export const wordsOf = (view) => OUTCOMES[stateOf(view)] ?? STATES[stateOf(view)] ?? stateOf(view);
export const whatOf = ({ kind, backend }) => `${kind === "rollback" ? "roll back" : kind} ${backend}`;

export function whereOf({ scope, scope_value: value }) {
  if (scope === "node") return `on ${value}`;
  if (scope === "controller") return "to the controller";
  return scope === "selector" ? `on nodes with ${value}` : "on every node";
}

export const totalOf = (view) =>
  Object.values(view.counts ?? {}).reduce((sum, count) => sum + count, 0) || (view.nodes ?? []).length;

export const handleOf = (view) =>
  view.scope === "controller" ? "the controller" : counted(totalOf(view), "node", "nodes");

export function countsOf(counts = {}) {
  return Object.keys(STATUSES).filter((status) => counts[status])
    .map((status) => `${counts[status]} ${STATUSES[status]}`).join(" · ");
}

export const pillOf = (node) => STATUSES[node.status] ?? node.status;
export const titleOf = (node) => (node.status === "running_on_worker" ? BUSY : "");

export function doingOf(node, kind) {
  const phase = ["downloading", "running_on_worker"].includes(node.status) ? node.phase : "";
  if (phase) return [phase, node.file_name, sourcesOf(node)].filter(Boolean).join(" · ");
  return node.status === "success" && kind !== "delete" ? node.version ?? "" : "";
}

function sourcesOf({ sources = {} }) {
  const total = Object.values(sources).reduce((sum, received) => sum + received, 0);
  if (!total) return "";
  const ranked = Object.entries(sources).sort(([a, most], [b, least]) => least - most || (a < b ? -1 : 1));
  const shares = ranked.slice(0, SOURCES_SHOWN).map(([name, received]) => `${name} ${Math.floor((100 * received) / total)} %`);
  return `from ${shares.join(", ")}`;
}

/** The reason or the result, and which sources sent wrong data. */
export function noteOf({ error, note, bad_sources: bad = [] }) {
  const words = error || note || "";
  if (!bad.length || words.includes(WRONG_DATA)) return words;
  return [words, WRONG_DATA + bad.join(", ")].filter(Boolean).join("; ");
}

export function amountOf(node) {
  const { current_bytes: current = 0, total_bytes: total = 0, rate = 0 } = node;
  if (hasEnded(node) || (!current && !total)) return "";
  const words = total ? usedOf(current, total) : size(current);
  return rate >= 1 ? `${words}, ${size(Math.floor(rate))}/s` : words;
}
