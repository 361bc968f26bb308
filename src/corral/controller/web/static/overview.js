// The start page: all of it is drawn by the server and fetched again when something changed, and every few seconds,
// because requests raise no event.

import { setUpAttention } from "./attention.js";
import { isOpen, on } from "./live.js";
import { start } from "./page.js";
import { refresh, refreshSoon } from "./parts.js";

const EVERY_MS = 5_000;

for (const kind of ["operation", "operation-removed", "node-removed"]) on(kind, refreshSoon);
setInterval(() => document.hidden || !isOpen() || refresh(), EVERY_MS);
setUpAttention();
start();
