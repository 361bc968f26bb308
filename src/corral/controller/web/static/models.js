// The page of models: the list is fetched as the server words it; what is asked of a model goes through the admin API.

import { admin, allow, call, closePanel, guarded, openMenu, respond, say, sure } from "./acts.js";
import { $ } from "./dom.js";
import { setUpEditing } from "./definitions.js";
import { actOn, foundLine, setUpSearch } from "./galleries.js";
import { setUpFollowed } from "./followed.js";
import { isOpen, on } from "./live.js";
import { setUpLooking } from "./looking.js";
import { start } from "./page.js";
import { refresh, refreshSoon } from "./parts.js";
import { setUpScaling } from "./scaling.js";
import { setUpUse } from "./use.js";
import { counted } from "./words.js";

const LOOK_MS = 3_000; // how busy replicas are raises no counter
const FOUND = 30;

setUpLooking("models");
for (const kind of ["node-removed", "operation-removed"]) on(kind, refreshSoon);
setInterval(() => document.hidden || !isOpen() || !$(".replicas") || refresh(), LOOK_MS);

const path = (model, verb = "") => `/api/models/${encodeURIComponent(model)}${verb}`;
const lineOf = (model) => [...document.querySelectorAll(".model")].find((line) => line.dataset.model === model);
const sentence = (words) => `${words}${/[.!?]$/.test(words) ? "" : "."}`;

function tell({ message, notes = [], pending_cleanup: pending }) {
  const words = [message, ...notes];
  if (pending) words.push("Replicas of the previous definition still serve; they stop by themselves");
  say(words.map(sentence).join(" "), notes.length > 0);
  refreshSoon();
}

const edit = setUpEditing(path, tell);
const showFiles = setUpFollowed("files", (model) => `Where the files of ${model} are`);
respond({ why: setUpFollowed("why", (model) => `Where ${model} goes, and why`), use: setUpUse(), files: showFiles, definition: edit });

allow({
  "model-menu"({ model, may }, button) {
    const given = Object.fromEntries(may.split(" ").map((act) => [act, true]));
    openMenu(button, { requests: true, files: true, delete: given.edit, ...given }, { model });
  },
  async load({ model }) {
    const told = await call("POST", path(model, "/load"));
    if (told.state === "failed") {
      const wait = told.retry_after_s > 0 ? ` The next attempt is possible in ${Math.ceil(told.retry_after_s)} s.` : "";
      throw new Error(`${model} failed a moment ago: ${sentence(told.error || "no reason was reported")}${wait}`);
    }
    say(told.state === "loaded" ? `${model} is ready.` : `${model} is being loaded.`);
    refreshSoon();
  },
  async unload({ model }) {
    const text = "Its replicas finish their requests and stop. The next request loads the model again.";
    if (!(await sure(`Unload ${model}?`, text, "Unload"))) return;
    tell(await call("POST", path(model, "/unload")));
  },
  async delete({ model }) {
    const text = "The model and its schedule are deleted; requests for it are refused. Its replicas finish their requests first.";
    if (!(await sure(`Delete ${model}?`, text, "Delete", true))) return;
    try {
      tell(await call("DELETE", path(model)));
    } catch (error) {
      if (error.status !== 409) throw error;
      if (await sure(`Delete ${model} anyway?`, sentence(error.message), "Delete", true)) {
        tell(await call("DELETE", path(model, "?force=true")));
      }
    }
  },
  async stage(_, button) {
    const { model } = button.closest("dialog").dataset;
    try {
      await call("POST", path(model, "/stage"), {});
      await showFiles({ model });
    } catch (error) {
      $("#files-words").textContent = error.message; // what is said on the page is behind the dialog
    }
  },
  requests: ({ model }) => location.assign(`/fleet/requests?model=${encodeURIComponent(model)}`),
  "close-install": () => closePanel($("#install")),
});

if (admin) {
  const scale = setUpScaling(tell);
  allow({ scale: ({ model }) => scale(model, lineOf(model)?.dataset.schedule ?? ""), edit });
  setUpInstalling();
}

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
