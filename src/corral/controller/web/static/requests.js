// The page of requests: nobody counts them as they come, so they are fetched every few seconds while somebody looks.

import { isOpen } from "./live.js";
import { start } from "./page.js";
import { refresh } from "./parts.js";

const EVERY_MS = 3_000;

setInterval(() => document.hidden || !isOpen() || refresh(), EVERY_MS);
start();
