// The page of one model. The server draws it; files and the scheduler's view are parts of their own, because the nodes
// are asked for them.

import { call, say } from "./acts.js";
import { $ } from "./dom.js";
import { isOpen, on } from "./live.js";
import { setUpModelActs } from "./modelacts.js";
import { start } from "./page.js";
import { AskedPart, refresh, refreshSoon } from "./parts.js";

const EVERY_MS = 5_000;
const { model } = $("#files").dataset;
const parts = ["files", "why"].map(
  (name) => new AskedPart(`/page/${name}?model=${encodeURIComponent(model)}`, `${name}-told`),
);

setUpModelActs({
  onDeleted: () => location.assign("/fleet/models"),
  async stage() {
    await call("POST", `/api/models/${encodeURIComponent(model)}/stage`, {});
    say("The files are on their way; the operation is in the list.");
    parts[0].refreshSoon();
  },
});
for (const kind of ["operation", "operation-removed", "node-removed"]) on(kind, refreshSoon);
setInterval(() => document.hidden || !isOpen() || refresh(), EVERY_MS);
start();
parts.forEach((part) => part.refresh());
