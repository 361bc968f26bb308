// What every page of the fleet does: time that passes, and the strip of what goes on.

import { $, make } from "./dom.js";
import { connect, on } from "./live.js";
import { wordsOf, whatOf, stateOf } from "./opwords.js";
import { setClock, tick } from "./words.js";

const SHOWN = 3;
const work = new Map(); // operations that have not ended
let frame = 0;

function drawSoon() {
  frame ||= requestAnimationFrame(draw);
}

function draw() {
  frame = 0;
  const newest = [...work.values()].sort((a, b) => (a.created_at + a.jobID < b.created_at + b.jobID ? 1 : -1));
  const items = newest.slice(0, SHOWN).map((view) => {
    const words = view.state === "under_way" ? `${view.progress} %` : wordsOf(view);
    const pill = make("span", { className: `pill ${stateOf(view)}`, textContent: words });
    return make("a", { href: `/fleet/operations#op-${view.jobID}` }, `${whatOf(view)} `, pill);
  });
  const rest = newest.length - items.length;
  if (rest > 0) items.push(make("a", { href: "/fleet/operations", textContent: `and ${rest} more` }));
  $("#work ul").replaceChildren(...items.map((item) => make("li", {}, item)));
  $("#work").hidden = !items.length;
}

export function start() {
  document.documentElement.classList.add("js");
  // The detour of a link from another site.
  if (location.search === "?again") history.replaceState(null, "", location.pathname);
  on("operation", (view) => {
    if (view.finished_at || view.dismissed) work.delete(view.jobID);
    else work.set(view.jobID, view);
    drawSoon();
  });
  on("operation-removed", ({ id }) => {
    work.delete(id);
    drawSoon();
  });
  on("ready", ({ operations }) => {
    for (const id of work.keys()) if (!operations.has(id)) work.delete(id);
    drawSoon();
  });
  setClock($("#facts").dataset.now);
  connect();
  setInterval(() => document.hidden || tick(), 1_000);
}
