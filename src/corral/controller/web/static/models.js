// The page of models: the list is fetched as the server words it; what is asked of a model goes through the admin API.

import { admin, allow, call, closePanel, guarded, respond } from "./acts.js";
import { $ } from "./dom.js";
import { actOn, foundLine, setUpSearch } from "./galleries.js";
import { setUpFollowed } from "./followed.js";
import { isOpen, on } from "./live.js";
import { setUpLooking } from "./looking.js";
import { path, sentence, setUpModelActs, tell } from "./modelacts.js";
import { start } from "./page.js";
import { refresh, refreshSoon } from "./parts.js";
import { setUpUse } from "./use.js";
import { counted } from "./words.js";

const LOOK_MS = 3_000; // how busy replicas are raises no counter
const FOUND = 30;

setUpLooking("models");
for (const kind of ["node-removed", "operation-removed"]) on(kind, refreshSoon);
setInterval(() => document.hidden || !isOpen() || !$(".replicas") || refresh(), LOOK_MS);

const showFiles = setUpFollowed("files", (model) => `Where the files of ${model} are`);
respond({ why: setUpFollowed("why", (model) => `Where ${model} goes, and why`), use: setUpUse(), files: showFiles });
setUpModelActs({
  async stage(_, button) {
    const { model } = button.closest("dialog").dataset;
    try {
      await call("POST", path(model, "/stage"), {});
      await showFiles({ model });
    } catch (error) {
      $("#files-words").textContent = error.message; // what is said on the page is behind the dialog
    }
  },
});
allow({ "close-install": () => closePanel($("#install")) });
if (admin) setUpInstalling();

function setUpInstalling() {
  const search = setUpSearch({
    kind: "models",
    async ask(term) {
      const found = await call("GET", `/api/models/available?term=${encodeURIComponent(term)}`);
      return { items: found.slice(0, FOUND), count: found.length };
    },
    item(entry) {
      const nodes = entry.fits_on ?? [];
      const fits = nodes.length ? `fits on: ${nodes.join(", ")}` : entry.fit_note;
      const tags = [entry.gallery, entry.backend, entry.size, fits, entry.installed && "installed"];
      const act = entry.installed ? [] : [actOn("Install", entry.name, { act: "install", model: entry.id })];
      return foundLine(entry, tags, ...act);
    },
    words: (count) => counted(count, "model fits", "models fit"),
  });
  allow({
    async install({ model }) {
      tell(await call("POST", "/api/models", { model, fetch: true }));
      await search();
    },
  });
  const form = $("#own");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const wrong = $("#own-error");
    guarded(event.submitter, async () => {
      wrong.hidden = true;
      try {
        tell(await call("POST", "/api/models", { text: form.elements.text.value, fetch: true }));
        form.reset();
      } catch (error) {
        wrong.textContent = sentence(error.message);
        wrong.hidden = false;
        form.elements.text.focus();
      }
    });
  });
}

start();
