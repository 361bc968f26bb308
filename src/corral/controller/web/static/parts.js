// The parts of a page that the server words: fetched again when something changed, and put over what is there.

import { $, make, patch } from "./dom.js";
import { isOpen, lost, on, signIn } from "./live.js";
import { setClock, tick } from "./words.js";

const REST_MS = 1_000;
const ASK_NODES_MS = 15_000;
const after = [];

/** A part at one address. The main one of a page is what its own script shows; others are small, as the strip is. */
export class Part {
  #waiting = 0;
  #restUntil = 0;
  #turns = 0; // an answer that was overtaken by a later one is old news

  /** `onFailed`: told of an answer that is an error; without it the connection counts as lost. */
  constructor(address, onFailed = lost) {
    this.address = address;
    this.onFailed = onFailed;
  }

  /** At most once a second, and never more than a fifth of the server's time: a large fleet's parts take a while. */
  refreshSoon() {
    this.#waiting ||= setTimeout(() => this.refresh(), Math.max(200, this.#restUntil - performance.now()));
  }

  async refresh() {
    clearTimeout(this.#waiting);
    this.#waiting = 0;
    const began = performance.now();
    this.#restUntil = began + REST_MS;
    // Not under somebody's pressed mouse button: the click would hit nothing.
    if ($("button:active, a:active")) return this.refreshSoon();
    const turn = ++this.#turns;
    try {
      const answer = await fetch(this.address, { signal: AbortSignal.timeout(10_000) });
      if (answer.status === 401) return signIn();
      if (!answer.ok) return this.onFailed(answer);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      this.#restUntil = performance.now() + Math.max(REST_MS, 4 * (performance.now() - began));
      if (turn === this.#turns) draw(next);
    } catch {
      lost();
    }
  }
}

/** A part below the main one, for which nodes are asked: fetched less often, and an error is shown in its place. */
export class AskedPart extends Part {
  constructor(address, id) {
    super(address, async (answer) => {
      const words = await answer.json().then(({ error }) => error.message).catch(() => `Corral answered ${answer.status}`);
      $(`#${id}`).replaceChildren(make("p", { className: "quiet", textContent: `${words}.` }));
    });
    setInterval(() => document.hidden || !isOpen() || this.refresh(), ASK_NODES_MS);
  }
}

const main = new Part(document.body.dataset.part);

/** Called after parts were drawn anew. */
export const onDrawn = (tell) => after.push(tell);
export const refresh = () => main.refresh();
export const refreshSoon = () => main.refreshSoon();

/** From now on, and at once, the parts at this address. */
export async function lookAt(address) {
  main.address = address;
  await main.refresh();
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
