// A page that shows what the server wrote, in the frame that all pages share.

import { start } from "./page.js";

start();
