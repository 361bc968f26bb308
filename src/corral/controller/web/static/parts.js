// The parts of a page that the server words: fetched again when something changed, and put over what is there.

import { $, patch } from "./dom.js";
import { isOpen, lost, on, signIn } from "./live.js";
import { setClock, tick } from "./words.js";

const REST_MS = 1_000;
const after = [];
let where = document.body.dataset.part;
let waiting = 0;
let restUntil = 0;
let turns = 0; // an answer that was overtaken by a later one is old news

/** Called after the parts were drawn anew. */
export const onDrawn = (tell) => after.push(tell);

/** At most once a second, and never more than a fifth of the server's time: a large fleet's parts take a while. */
export function refreshSoon() {
  waiting ||= setTimeout(refresh, Math.max(200, restUntil - performance.now()));
}

/** From now on, and at once, the parts at this address. */
export async function lookAt(address) {
  where = address;
  await refresh();
}

export async function refresh() {
  clearTimeout(waiting);
  waiting = 0;
  const began = performance.now();
  restUntil = began + REST_MS;
  // Not under somebody's pressed mouse button: the click would hit nothing.
  if ($("button:active, a:active")) return refreshSoon();
  const turn = ++turns;
  try {
    const answer = await fetch(where, { signal: AbortSignal.timeout(10_000) });
    if (answer.status === 401) return signIn();
    if (!answer.ok) return lost();
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    restUntil = performance.now() + Math.max(REST_MS, 4 * (performance.now() - began));
    if (turn !== turns) return;
    draw(next);
  } catch {
    lost();
  }
}

function draw(next) {
  const focused = document.activeElement?.id;
  for (const part of [...next.body.children]) {
    const old = part.id && document.getElementById(part.id);
    if (old) patch(old, document.adoptNode(part));
  }
  if (focused && document.activeElement?.id !== focused) document.getElementById(focused)?.focus();
  setClock($("#facts").dataset.now);
  tick();
  for (const tell of after) tell();
}

on("changed", refreshSoon);
on("back", refreshSoon);
setInterval(() => document.hidden || !isOpen() || refresh(), 15_000); // also finds a stream that is dead but not closed
