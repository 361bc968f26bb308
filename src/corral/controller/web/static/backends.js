// The page of backends: the matrix is fetched as the server words it; what a person asks for is shown as a plan first.

import { admin, allow, call, closePanel, guarded, openMenu, openPanel, say } from "./acts.js";
import { $, make } from "./dom.js";
import { on } from "./live.js";
import { start } from "./page.js";
import { lookAt, refreshSoon } from "./parts.js";
import { askFirst } from "./plan.js";
import { counted } from "./words.js";

// ---- Looking: which columns are shown is in the address, so that a reload shows the same.

const find = $("#find");

let typing = 0;

/** What the field says counts, not what it said when the link was drawn. */
async function look(wanted) {
  clearTimeout(typing);
  const words = find.elements.find.value;
  if (words.trim()) wanted.set("find", words);
  else wanted.delete("find");
  const query = wanted.size ? `?${wanted}` : "";
  history.replaceState(null, "", `/fleet/backends${query}`);
  await lookAt(`/page/backends${query}`);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-look]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  look(new URL(link.href).searchParams);
});

find.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    const wanted = new URLSearchParams(location.search);
    wanted.delete("at"); // from the first of those that fit
    look(wanted);
  }, 200);
});
find.addEventListener("submit", (event) => event.preventDefault());

for (const kind of ["operation", "operation-removed", "node-removed"]) on(kind, refreshSoon);

const statuses = new Map(); // of nodes: their heartbeats are no reason to draw anything

on("node", ({ id, status, name }) => {
  if (statuses.get(id) === `${status} ${name}`) return;
  statuses.set(id, `${status} ${name}`);
  refreshSoon();
});

// ---- What may be done with what is there

const VERBS = { upgrade: "Upgrade", rollback: "Roll back", delete: "Delete", install: "Install" };

async function ask(kind, body, title = `${VERBS[kind]} ${body.backend ?? body.name ?? body.uri}?`) {
  const asked = { kind, ...body };
  const plan = (scope) => call("POST", "/api/operations?plan=true", { ...asked, ...scope }).then((told) => [told]);
  const scope = await askFirst({ title, verb: VERBS[kind], danger: kind === "delete", spreads: kind === "install", plan });
  if (!scope) return false;
  const { message } = await call("POST", "/api/operations", { ...asked, ...scope });
  say(`${message[0].toUpperCase()}${message.slice(1)}.`);
  return true;
}

async function upgradeAll() {
  const names = Object.keys(await call("GET", "/api/backends/upgrades"));
  const plan = (scope) => Promise.all(names.map((backend) =>
    call("POST", "/api/operations?plan=true", { kind: "upgrade", backend, ...scope })
      .catch((error) => ({ backend, nodes: [], notes: [error.message] }))));
  const scope = await askFirst({ title: "Upgrade all?", verb: "Upgrade all", danger: false, spreads: false, plan });
  if (!scope) return;
  const { operations, refused } = await call("POST", "/api/backends/upgrades/apply", scope);
  const no = Object.entries(refused).map(([name, why]) => `${name}: ${why}`);
  say([`${counted(operations.length, "upgrade", "upgrades")} started.`, ...no].join(" "), no.length > 0);
}

allow({
  "backend-menu"({ backend, may }, button) {
    const allowed = { ...Object.fromEntries(may.split(" ").map((act) => [act, true])), "install-more": true };
    openMenu(button, allowed, { backend });
  },
  upgrade: ({ backend }) => ask("upgrade", { backend }),
  rollback: ({ backend }) => ask("rollback", { backend }),
  delete: ({ backend }) => ask("delete", { backend }),
  "install-more": ({ backend }) => ask("install", { backend }),
  install: ({ backend }) => ask("install", { backend }),
  "upgrade-all": upgradeAll,
  async check() {
    const found = await call("POST", "/api/backends/upgrades/check?wait=true");
    refreshSoon();
    say(`${counted(Object.keys(found).length, "build has", "builds have")} something newer.`);
  },
  "close-install": () => closePanel($("#install")),
});

// ---- Installing something new

let searches = 0; // an answer that was overtaken by a later one is old news

async function search() {
  const mine = ++searches;
  const term = encodeURIComponent($("#term").value.trim());
  try {
    const page = await call("GET", `/api/backends?items=20&term=${term}`);
    if (mine === searches) drawFound(page);
  } catch (error) {
    if (mine === searches) $("#found-words").textContent = error.message;
  }
}

function drawFound({ backends, availableBackends: count }) {
  const more = count > backends.length ? ` The first ${backends.length} are shown.` : "";
  $("#found-words").textContent = `${counted(count, "backend fits", "backends fit")}.${more}`;
  $("#found").replaceChildren(...backends.map((entry) => {
    const name = make("strong", { textContent: entry.name });
    const about = make("span", { className: "about", textContent: entry.description, title: entry.description });
    const tags = [entry.gallery, entry.installed && "installed"].filter(Boolean)
      .map((textContent) => make("span", { className: "tag", textContent }));
    const button = make("button", { type: "button" }, "Install…", make("span", { className: "unseen", textContent: ` ${entry.name}` }));
    Object.assign(button.dataset, { act: "install", backend: entry.name });
    return make("li", {}, make("div", {}, name, " ", ...tags, about), button);
  }));
}

if (admin) {
  let pause = 0;
  $("#add").addEventListener("click", () => {
    openPanel($("#install"), $("#term"));
    search();
  });
  $("#term").addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(search, 200);
  });
  $("#own").addEventListener("submit", (event) => {
    event.preventDefault();
    const { uri, name, alias } = event.target.elements;
    const body = { uri: uri.value.trim(), name: name.value.trim(), alias: alias.value.trim() };
    const title = `Install ${body.name || body.uri}?`;
    guarded(event.submitter, async () => (await ask("install", body, title)) && event.target.reset());
  });
}
start();
