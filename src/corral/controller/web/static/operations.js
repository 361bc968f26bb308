// The page of operations. The server renders it: which of its nodes an open operation shows is in the address.

import { allow, call, openMenu, say, sure } from "./acts.js";
import { $ } from "./dom.js";
import { on } from "./live.js";
import { start } from "./page.js";
import { lookAt, onDrawn, refreshSoon } from "./parts.js";

const part = new URL(document.body.dataset.part, location); // shows also what ended since this page was opened
const spoken = new Map(); // operation → what was last said of it
let asked = tokens().join(" ");

/** What is open: `op-12`, or with the nodes that a chip or "next" chose. One node alone is shown anyway. */
function tokens() {
  const open = [...document.querySelectorAll(".op > details[open]:not(.single)")];
  return open.map((details) => details.dataset.opened || details.parentNode.dataset.id);
}

async function look() {
  const wanted = tokens();
  if (asked === wanted.join(" ")) return;
  asked = wanted.join(" ");
  part.searchParams.delete("open");
  for (const token of wanted) part.searchParams.append("open", token);
  const shown = new URLSearchParams(wanted.map((token) => ["open", token]));
  history.replaceState(null, "", shown.size ? `?${shown}` : location.pathname);
  await lookAt(`${part.pathname}${part.search}`);
}

document.addEventListener("toggle", look, true); // it does not bubble
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-open]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  link.closest("details").dataset.opened = link.dataset.open;
  look();
});

/** Only turns are read aloud, never each percent. */
function speak() {
  for (const { dataset } of document.querySelectorAll(".op")) {
    const before = spoken.get(dataset.id);
    spoken.set(dataset.id, dataset.spoken);
    if (before && before !== dataset.spoken) $("#spoken").textContent = dataset.spoken;
  }
}

// ---- What may be done

const path = (id, verb, node) =>
  `/api/operations/${encodeURIComponent(id)}/${verb}${node ? `?node=${encodeURIComponent(node)}` : ""}`;

async function steer(id, verb, node, name) {
  const { message } = await call("POST", path(id, verb, node));
  say(`${message[0].toUpperCase()}${(name ? message.replace(node, name) : message).slice(1)}.`);
  refreshSoon();
}

/** Which operation, and on which of its nodes, a button is about. */
function about(data, button) {
  const { id, what } = button.closest(".op").dataset;
  const { node = "" } = data;
  return { id, node, what, name: node && $(".name", button.closest("li")).textContent };
}

const ROLLOUT_ACTS = {
  pause: ["Nodes that switch now finish, no further node begins. A build that turns out to be worse is still taken back.", false],
  resume: ["The rollout continues where it was.", false],
  promote: ["The soaks end now, and the other nodes follow.", false],
  abort: ["Nodes that have switched return to their previous version.", true],
};

const TRIAL_ACTS = {
  pause: ["The new revision keeps its share of the requests. If it turns out to be worse, the model still returns to the old one.", false],
  resume: ROLLOUT_ACTS.resume,
  promote: ["The soak ends now: the new revision gets all requests, and the old replicas stop.", false],
  abort: ["The model returns to its previous revision.", true],
};

allow({
  async retry(data, button) {
    const { id, node, name } = about(data, button);
    await steer(id, "retry", node, name);
  },
  async cancel(data, button) {
    const { id, node, what, name } = about(data, button);
    const text = node
      ? "Transfers to this node stop and the operation skips it. The other nodes continue."
      : "Transfers stop and the operation's rule is withdrawn: earlier rules apply again, also on nodes that are done.";
    const title = node ? `Cancel ${what} on ${name}?` : `Cancel ${what}?`;
    // Two buttons that say cancel would be one riddle.
    if (await sure(title, text, node ? "Stop it there" : "Stop it", true)) await steer(id, "cancel", node, name);
  },
  "op-menu"(data, button) {
    const { id, what } = about(data, button);
    openMenu(button, { withdraw: data.cancel, dismiss: data.dismiss }, { id, what });
  },
  async withdraw({ id, what }) {
    const text = "The operation's rule is withdrawn. Running nodes finish, no other node starts, and earlier rules apply again.";
    if (await sure(`Withdraw ${what}?`, text, "Withdraw")) await steer(id, "withdraw");
  },
  dismiss: ({ id }) => steer(id, "dismiss"),
  repeat: ({ id }) => steer(id, "retry"),
  async rollout({ id, verb, what, of }) {
    const [text, danger] = (of === "model" ? TRIAL_ACTS : ROLLOUT_ACTS)[verb];
    const name = verb[0].toUpperCase() + verb.slice(1);
    if (!(await sure(`${name} ${what}?`, text, name, danger))) return;
    const { message } = await call("POST", `/api/rollouts/${encodeURIComponent(id)}/${verb}`);
    say(`${message[0].toUpperCase()}${message.slice(1)}.`);
    refreshSoon();
  },
  async forget() {
    if (!(await sure("Clear the history?", "The list of ended operations is emptied. Installed backends do not change.", "Forget"))) return;
    await call("DELETE", "/api/operations/history");
    refreshSoon();
  },
});

for (const kind of ["operation", "operation-removed", "ready"]) on(kind, refreshSoon);
onDrawn(() => {
  speak();
  look(); // one that had a single node stays open when it gets more
});
speak();
start();
