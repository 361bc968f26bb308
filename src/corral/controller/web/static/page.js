// What every page of the fleet does: time that passes, and the strip of what goes on.

import { $ } from "./dom.js";
import { connect, on } from "./live.js";
import { Part } from "./parts.js";
import { setUpSearch } from "./search.js";
import { setClock, tick } from "./words.js";

export function start() {
  document.documentElement.classList.add("js");
  // The detour of a link from another site.
  if (location.search === "?again") history.replaceState(null, "", location.pathname);
  const strip = new Part("/page/work");
  for (const kind of ["operation", "operation-removed", "ready"]) on(kind, () => strip.refreshSoon());
  setUpSearch();
  setClock($("#facts").dataset.now);
  connect();
  setInterval(() => document.hidden || tick(), 1_000);
}
