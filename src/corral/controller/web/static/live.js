// The stream of changes. Every way of losing it ends in lost(): one place that waits, asks who we are and tries again.

import { $ } from "./dom.js";

const listeners = {};

/** node, node-removed, operation, operation-removed, changed; `ready` when all of the present has been told, with the
 *  ids told; `back` when the connection is tried again after a loss. */
export function on(kind, tell) {
  (listeners[kind] ??= []).push(tell);
}

function tell(kind, told) {
  for (const listener of listeners[kind] ?? []) listener(told);
}

let stream = null;
let waitMs = 0;
let retry = 0;
let nodes = new Set(); // ids told since the last `ready`: whoever is missing then is gone
let operations = new Set();

export const isOpen = () => stream !== null;

export function connect() {
  clearTimeout(retry);
  stream?.close();
  [nodes, operations] = [new Set(), new Set()];
  stream = new EventSource("/api/events?rows=false");
  const heard = (kind, note) => stream.addEventListener(kind, ({ data }) => {
    const told = JSON.parse(data);
    note?.(told);
    tell(kind, told);
  });
  heard("node", ({ id }) => nodes.add(id));
  heard("node-removed", ({ id }) => nodes.delete(id));
  heard("operation", ({ jobID }) => operations.add(jobID));
  heard("operation-removed", ({ id }) => operations.delete(id));
  heard("changed");
  stream.addEventListener("ready", ({ data }) => everythingTold(JSON.parse(data)));
  stream.onerror = lost;
}

function everythingTold({ nodes: expected }) {
  const present = { nodes, operations };
  [nodes, operations] = [new Set(), new Set()];
  tell("ready", present);
  // A removal can fall out of an overfull stream. Then the numbers differ: start over.
  if (present.nodes.size !== expected) return lost();
  waitMs = 0;
  document.body.classList.remove("stale");
  $("#lost").hidden = true;
}

export function lost() {
  if (!stream) return; // already waiting
  stream.close();
  stream = null;
  document.body.classList.add("stale");
  $("#lost").hidden = false;
  waitMs = Math.min(10_000, (waitMs || 250) * 2);
  retry = setTimeout(reconnect, waitMs * (0.5 + Math.random() / 2)); // jitter: a whole office comes back at once
}

async function reconnect() {
  try {
    // EventSource does not say why it failed; this does.
    const answer = await fetch("/api/me", { signal: AbortSignal.timeout(10_000) });
    if (answer.status === 401) return signIn();
  } catch {
    // Not reachable: connecting fails too, and waits longer.
  }
  connect();
  tell("back");
}

export function signIn() {
  location.assign("/login?why=ended");
}

// A browser opens six connections to one server: tabs nobody looks at give theirs back.
let hiding = 0;

function rest() {
  clearTimeout(retry);
  stream?.close();
  stream = null;
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(rest, 30_000);
  else if (!stream) reconnect();
});
