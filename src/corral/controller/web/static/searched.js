// The page of what was found; the field itself is on every page.

import { start } from "./page.js";

start();
