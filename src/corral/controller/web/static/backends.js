// The page of backends: the matrix is fetched as the server words it; what a person asks for is shown as a plan first.

import { admin, allow, call, closePanel, guarded, openMenu, say } from "./acts.js";
import { $ } from "./dom.js";
import { actOn, foundLine, setUpSearch } from "./galleries.js";
import { on } from "./live.js";
import { setUpLooking } from "./looking.js";
import { start } from "./page.js";
import { refreshSoon } from "./parts.js";
import { askFirst } from "./plan.js";
import { counted } from "./words.js";

setUpLooking("backends");

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
  const { message, unchanged } = await call("POST", "/api/operations", { ...asked, ...scope });
  say(unchanged ? `${message}.` : `${message[0].toUpperCase()}${message.slice(1)}.`);
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
  const started = operations.filter(({ unchanged }) => !unchanged).length;
  const same = operations.filter(({ unchanged }) => unchanged).map(({ message }) => `${message}.`);
  const no = Object.entries(refused).map(([name, why]) => `${name}: ${why}`);
  say([`${counted(started, "upgrade", "upgrades")} started.`, ...same, ...no].join(" "), no.length > 0);
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

if (admin) {
  setUpSearch({
    kind: "backends",
    async ask(term) {
      const page = await call("GET", `/api/backends?items=20&term=${encodeURIComponent(term)}`);
      return { items: page.backends, count: page.availableBackends };
    },
    item: (entry) => foundLine(entry, [entry.gallery, entry.installed && "installed"],
      actOn("Install…", entry.name, { act: "install", backend: entry.name })),
    words: (count) => counted(count, "backend fits", "backends fit"),
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
