// The page of requests: nobody counts them as they come, so they are fetched every few seconds while somebody looks. The
// first time soon: gateways report the requests under way once somebody has looked.

import { isOpen } from "./live.js";
import { start } from "./page.js";
import { refresh } from "./parts.js";

const EVERY_MS = 3_000;
const FIRST_MS = 800;

const look = () => document.hidden || !isOpen() || refresh();
setTimeout(look, FIRST_MS);
setInterval(look, EVERY_MS);
start();
