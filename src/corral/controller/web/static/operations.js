// The page of operations: a line each as the stream tells, and in those a person opened a line per node. What has ended
// is fetched as the server words it.

import { allow, call, openMenu, say, sure } from "./acts.js";
import { $, make, partsOf, setText, setWords } from "./dom.js";
import { on } from "./live.js";
import {
  STATUSES, amountOf, countsOf, doingOf, handleOf, hasEnded, noteOf, pillOf, stateOf, titleOf, totalOf, whatOf, whereOf,
  wordsOf,
} from "./opwords.js";
import { start } from "./page.js";
import { onDrawn, refreshSoon } from "./parts.js";
import { ago, until } from "./words.js";

const SIFTED_FROM = 20; // nodes; fewer are seen at a glance
const MANY = 100; // nodes; more are drawn once a second, which is as often as anybody reads so many
const list = $("#operations");
const known = new Map(); // id → { view, article, parts, nodes, only, later }
const changed = new Map(); // id → its latest view, or null when it is gone
const drawn = new Map([...list.children].map((article) => [article.dataset.id, article])); // by the server
let frame = 0;

function change(id, view) {
  changed.set(id, view);
  frame ||= requestAnimationFrame(flush);
}

function flush() {
  frame = 0;
  for (const [id, view] of changed) {
    if (view === null) {
      (known.get(id)?.article ?? drawn.get(id))?.remove();
      known.delete(id);
      drawn.delete(id);
      continue;
    }
    // One that had ended before anybody looked is in the history.
    if (!known.has(id) && !drawn.has(id) && view.finished_at) continue;
    const entry = known.get(id) ?? enter(id);
    const before = entry.view;
    entry.view = view;
    draw(entry);
    if (!before) place(entry);
    if (before && stateOf(before) !== stateOf(view)) moved(view);
  }
  changed.clear();
  sift();
}

function enter(id) {
  const article = drawn.get(id) ?? $("#operation").content.firstElementChild.cloneNode(true);
  drawn.delete(id);
  const entry = { article, parts: partsOf(article), nodes: new Map(), only: "", later: 0 };
  for (const line of entry.parts.nodes.children) entry.nodes.set(line.dataset.node, { line, parts: partsOf(line, "n") });
  entry.parts.details.addEventListener("toggle", () => entry.parts.details.open && drawNodes(entry));
  known.set(id, entry);
  return entry;
}

/** The newest first. */
function place({ article, view }) {
  if (article.parentNode) return;
  const isNewer = ({ view: other }) => view.created_at + view.jobID > other.created_at + other.jobID;
  const next = [...list.children].find((other) => known.has(other.dataset.id) && isNewer(known.get(other.dataset.id)));
  list.insertBefore(article, next ?? null);
}

function moved(view) {
  refreshSoon();
  $("#spoken").textContent = `${whatOf(view)} ${whereOf(view)}: ${wordsOf(view)}.`; // only turns, never each percent
}

// ---- One operation

function draw(entry) {
  const { view, article, parts } = entry;
  const state = stateOf(view);
  const moving = !view.finished_at;
  article.id = `op-${view.jobID}`;
  article.dataset.id = view.jobID;
  article.dataset.state = state;
  setText(parts.what, whatOf(view));
  setText(parts.where, whereOf(view));
  setText(parts.pill, wordsOf(view));
  parts.pill.className = `pill ${state}`;
  drawBar(parts, view.progress, moving);
  setWords(parts.message, view.message === "completed" ? "" : view.message);
  setWords(parts.error, view.error ?? "");
  parts.asked.setAttribute("datetime", view.created_at);
  setText(parts.asked, ago(view.created_at));
  setWords(parts.by, view.created_by ? ` by ${view.created_by}` : "");
  setText(parts.handle, handleOf(view));
  setText(parts.counts, countsOf(view.counts));
  if (parts.more) drawLevers(parts, view, moving);
  drawDetails(entry);
}

function drawBar(parts, percentage, moving) {
  const percent = Math.floor(percentage);
  parts.bar.value = percent;
  parts.bar.hidden = parts.percent.hidden = !moving;
  setText(parts.percent, `${percent} %`);
}

function drawLevers(parts, view, moving) {
  parts.retry.hidden = !(view.counts?.error > 0 || view.outcome === "cancelled");
  parts.cancel.hidden = !moving;
  for (const lever of ["retry", "cancel"]) setText(parts[`${lever}-name`], ` ${whatOf(view)}`);
  parts.more.dataset.cancel = moving ? "yes" : "";
  parts.more.dataset.dismiss = view.settled || !moving ? "yes" : "";
  parts.more.setAttribute("aria-label", `More for ${whatOf(view)}`);
}

function drawDetails(entry) {
  const { details } = entry.parts;
  const single = totalOf(entry.view) === 1;
  if (details.classList.contains("single") !== single) {
    details.classList.toggle("single", single);
    if (!details.classList.length) details.removeAttribute("class");
    if (single) details.open = true; // there is nothing to fold
  }
  if (!details.open) return;
  if (totalOf(entry.view) <= MANY) drawNodes(entry);
  else entry.later ||= setTimeout(() => drawNodes(entry), 1_000);
}

// ---- Its nodes, while it is open

function drawNodes(entry) {
  if (!entry.view) return;
  clearTimeout(entry.later);
  entry.later = 0;
  const { view, nodes, parts } = entry;
  const gone = new Set(nodes.keys());
  const lines = (view.nodes ?? []).map((node) => {
    gone.delete(node.node_id);
    return drawNode(entry, node);
  });
  for (const id of gone) {
    nodes.get(id).line.remove();
    nodes.delete(id);
  }
  // In name order already; moved only if somebody new has come between.
  lines.forEach((line, spot) => parts.nodes.children[spot] === line || parts.nodes.insertBefore(line, parts.nodes.children[spot]));
  if (parts.details.lastElementChild !== parts.nodes) parts.details.lastElementChild.remove(); // "and 800 more"
  drawSift(entry);
}

function drawNode(entry, node) {
  let own = entry.nodes.get(node.node_id);
  if (!own) {
    const line = $("#node-line").content.firstElementChild.cloneNode(true);
    own = { line, parts: partsOf(line, "n") };
    entry.nodes.set(node.node_id, own);
  }
  const { line, parts } = own;
  const told = JSON.stringify(node);
  if (own.told === told) return line;
  own.told = told;
  const ended = hasEnded(node);
  const at = doingOf(node, entry.view.kind);
  line.dataset.node = node.node_id;
  line.dataset.status = node.status;
  setText(parts.name, node.node_name);
  setText(parts.pill, pillOf(node));
  parts.pill.className = `pill ${node.status}`;
  parts.pill.title = titleOf(node);
  drawBar(parts, node.percentage, !ended);
  setText(parts.amount, amountOf(node));
  setText(parts.at, at);
  parts.at.title = at;
  const note = noteOf(node);
  setText(parts.note, note);
  parts.next.hidden = !node.next_retry_at;
  parts["retry-at"].setAttribute("datetime", node.next_retry_at ?? "");
  setText(parts["retry-at"], until(node.next_retry_at));
  parts.why.hidden = !note && !node.next_retry_at;
  if (parts.retry) {
    parts.retry.hidden = node.status !== "error";
    parts.cancel.hidden = ended;
    for (const lever of ["retry", "cancel"]) {
      parts[lever].dataset.node = node.node_id;
      setText(parts[`${lever}-name`], ` on ${node.node_name}`);
    }
  }
  return line;
}

/** With many nodes: only those that fail, or move. */
function drawSift(entry) {
  const { view, parts, nodes } = entry;
  const counts = view.counts ?? {};
  if (totalOf(view) <= SIFTED_FROM) return;
  parts.sift.hidden = false;
  for (const status of ["", ...Object.keys(STATUSES)]) {
    let chip = $(`[data-only="${status}"]`, parts.sift);
    if (!chip) {
      chip = make("button", { type: "button", onclick: () => choose(entry, status) }, `${STATUSES[status] ?? "all"} `, make("b"));
      chip.dataset.only = status;
      parts.sift.append(chip);
    }
    const count = status ? counts[status] ?? 0 : totalOf(view);
    setText($("b", chip), String(count));
    chip.hidden = !count && status !== entry.only;
    chip.ariaPressed = String(status === entry.only);
  }
  for (const { line } of nodes.values()) {
    const fits = !entry.only || line.dataset.status === entry.only;
    if (line.hidden === fits) line.hidden = !fits;
  }
}

function choose(entry, status) {
  entry.only = status;
  drawSift(entry);
}

function sift() {
  $("#empty").hidden = known.size + drawn.size > 0;
  for (const past of document.querySelectorAll("#history [data-job]")) past.hidden = known.has(past.dataset.job);
}

// ---- What may be done

const path = (id, verb, node) =>
  `/api/operations/${encodeURIComponent(id)}/${verb}${node ? `?node=${encodeURIComponent(node)}` : ""}`;

async function steer(id, verb, node) {
  const { message } = await call("POST", path(id, verb, node));
  const name = known.get(id)?.nodes.get(node)?.parts.name.textContent;
  say(`${message[0].toUpperCase()}${(name ? message.replace(node, name) : message).slice(1)}.`);
}

/** Which operation, and on which of its nodes, a button is about. */
function about(data, button) {
  const id = button.closest(".op")?.dataset.id ?? data.id;
  const { node = "" } = data;
  const entry = known.get(id);
  return { id, node, what: entry ? whatOf(entry.view) : "", name: entry?.nodes.get(node)?.parts.name.textContent ?? "" };
}

allow({
  async retry(data, button) {
    const { id, node } = about(data, button);
    await steer(id, "retry", node);
  },
  async cancel(data, button) {
    const { id, node, what, name } = about(data, button);
    const text = node
      ? "Transfers to this node stop and the operation skips it. The other nodes continue."
      : "Transfers stop and the operation's rule is withdrawn: earlier rules apply again, also on nodes that are done.";
    const title = node ? `Cancel ${what} on ${name}?` : `Cancel ${what}?`;
    // Two buttons that say cancel would be one riddle.
    if (await sure(title, text, node ? "Stop it there" : "Stop it", true)) await steer(id, "cancel", node);
  },
  "op-menu"(data, button) {
    openMenu(button, { withdraw: data.cancel, dismiss: data.dismiss }, { id: about(data, button).id });
  },
  async withdraw({ id }) {
    const text = "The operation's rule is withdrawn. Running nodes finish, no other node starts, and earlier rules apply again.";
    if (await sure(`Withdraw ${whatOf(known.get(id).view)}?`, text, "Withdraw")) await steer(id, "withdraw");
  },
  dismiss: ({ id }) => steer(id, "dismiss"),
  repeat: ({ id }) => steer(id, "retry"),
  async forget() {
    if (!(await sure("Clear the history?", "The list of ended operations is emptied. Installed backends do not change.", "Forget"))) return;
    await call("DELETE", "/api/operations/history");
    refreshSoon();
  },
});

on("operation", (view) => change(view.jobID, view.dismissed ? null : view));
on("operation-removed", ({ id }) => {
  change(id, null);
  refreshSoon();
});
on("ready", ({ operations }) => {
  for (const id of [...known.keys(), ...changed.keys(), ...drawn.keys()]) if (!operations.has(id)) change(id, null);
});
onDrawn(sift);
start();
