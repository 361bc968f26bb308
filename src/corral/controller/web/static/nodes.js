// The page of nodes: rows follow the stream, what needs a person is fetched as the server words it. The server has drawn
// the page before this runs; the script only changes what changes.

import { allow, call, openMenu, sure } from "./acts.js";
import { setUpAttention } from "./attention.js";
import { $, make, partsOf, setText, setWords } from "./dom.js";
import { on } from "./live.js";
import { setUpJoining } from "./join.js";
import { start } from "./page.js";
import { refreshSoon } from "./parts.js";
import { ago, usedOf } from "./words.js";

// ---- One row, as web/rows.py decides it; a test compares them.

function note(node) {
  if (node.status === "pending") return "waits for approval";
  if (node.status === "offline") return node.status_reason ?? "";
  if (node.ingress_error) return node.ingress_error;
  if (node.bus_down) return "cannot reach the bus: no new work";
  return node.status === "healthy" ? "" : node.status_reason ?? "";
}

function gpu(node) {
  const names = new Map();
  for (const device of node.devices ?? []) {
    const name = device.name || device.vendor;
    names.set(name, (names.get(name) ?? 0) + 1);
  }
  if (names.size) return [...names].map(([name, count]) => (count > 1 ? `${count} × ${name}` : name)).join(", ");
  return node.total_vram ? node.gpu_vendor || "GPU" : "CPU only";
}

function drawAmount(parts, name, total, free, warned) {
  const meter = parts[name];
  const used = Math.max(0, total - free);
  meter.max = total || 1;
  meter.value = used;
  meter.hidden = !total;
  if (warned && total && used * 100 >= total * 90) meter.className = "full";
  else meter.removeAttribute("class");
  parts[`${name}-words`].textContent = total ? usedOf(used, total) : "–";
}

function drawLabels(list, labels) {
  const words = Object.keys(labels).sort().map((key) => (labels[key] ? `${key}=${labels[key]}` : key));
  const rest = words.slice(3);
  list.replaceChildren(...words.slice(0, 3).map((word) => make("li", { textContent: word, title: word })));
  if (rest.length) list.append(make("li", { textContent: `+${rest.length}`, title: rest.join(", "), className: "more" }));
}

function draw(entry) {
  const { node, row, parts } = entry;
  const words = {
    name: node.name,
    pill: node.status,
    platform: node.platform || "–",
    gpu: gpu(node),
    seen: ago(node.last_heartbeat),
    version: node.version || "–",
  };
  const titles = { pill: node.status_reason ?? "", note: note(node), gpu: node.capability ?? "" };
  for (const part in words) setText(parts[part], words[part]);
  for (const part in titles) if (parts[part].title !== titles[part]) parts[part].title = titles[part];
  const href = `/nodes/${encodeURIComponent(node.name)}`;
  if (parts.name.getAttribute("href") !== href) parts.name.setAttribute("href", href);
  setWords(parts.kind, node.compat ? "LocalAI" : "");
  setWords(parts.note, titles.note);
  row.dataset.id = node.id;
  row.dataset.status = node.status;
  parts.pill.className = `pill ${node.status}`;
  parts.seen.setAttribute("datetime", node.last_heartbeat);
  parts.more?.setAttribute("aria-label", `Actions for ${node.name}`);
  // Free VRAM is reported no higher than the budget, so the budget is the whole.
  const vram = Math.min(node.vram_budget_bytes || node.total_vram, node.total_vram);
  drawAmount(parts, "vram", vram, node.available_vram, false);
  drawAmount(parts, "ram", node.total_ram, node.available_ram, true);
  drawAmount(parts, "disk", node.total_disk, node.available_disk, true);
  const labels = JSON.stringify(node.labels ?? {});
  if (labels !== entry.labels) drawLabels(parts.labels, node.labels ?? {});
  entry.labels = labels;
  entry.haystack = [node.name, node.status, node.platform, words.gpu, node.capability, labels.replaceAll('":"', "=")]
    .join(" ").toLowerCase();
}

// ---- The table: events mark nodes as changed, one animation frame draws them all.

const table = $("#nodes tbody");
const nodes = new Map(); // id → { node, row, parts, labels, haystack }
const changed = new Map(); // id → its latest view, or null when it is gone
const order = []; // entries by name
const drawn = new Map([...table.rows].map((row) => [row.dataset.id, row])); // by the server, not yet told of
let frame = 0;

function change(id, view) {
  changed.set(id, view);
  frame ||= requestAnimationFrame(flush);
}

function flush() {
  frame = 0;
  let moved = false; // something that the sentences above the table may be about
  for (const [id, view] of changed) {
    const entry = nodes.get(id);
    if (view === null) {
      (entry?.row ?? drawn.get(id))?.remove();
      drawn.delete(id);
      if (entry) order.splice(order.indexOf(entry), 1);
      moved = nodes.delete(id) || moved;
      continue;
    }
    moved ||= !entry || ["status", "status_reason", "ingress_error", "bus_down"].some((f) => entry.node[f] !== view[f]);
    const known = entry ?? enter(drawn.get(id) ?? $("#row").content.firstElementChild.cloneNode(true));
    known.node = view;
    draw(known);
    if (entry) continue;
    nodes.set(id, known);
    drawn.delete(id);
    place(known);
  }
  changed.clear();
  count();
  sift();
  if (moved) refreshSoon();
}

const enter = (row) => ({ row, parts: partsOf(row) });

function place(entry) {
  let low = 0;
  let high = order.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (order[middle].node.name < entry.node.name) low = middle + 1;
    else high = middle;
  }
  order.splice(low, 0, entry);
  const next = order[low + 1]?.row;
  if (!stands(entry.row, order[low - 1]?.row, next)) table.insertBefore(entry.row, spotFor(entry.node.name, next));
}

/** Before the next one that is known, and before those that were drawn and will be told of later. */
function spotFor(name, next) {
  const later = [...drawn.values()].find((row) => $(".name", row).textContent > name);
  if (!later || !next) return later ?? next ?? null;
  return later.compareDocumentPosition(next) & Node.DOCUMENT_POSITION_FOLLOWING ? later : next;
}

/** A row the server drew stays where it is: whoever moves it takes the focus out of it. */
function stands(row, before, after) {
  if (row.parentNode !== table) return false;
  const follows = !before || before.compareDocumentPosition(row) & Node.DOCUMENT_POSITION_FOLLOWING;
  return follows && (!after || after.compareDocumentPosition(row) & Node.DOCUMENT_POSITION_PRECEDING);
}

on("node", (view) => change(view.id, view));
on("node-removed", ({ id }) => change(id, null));
on("ready", ({ nodes: told }) => {
  for (const id of [...nodes.keys(), ...changed.keys(), ...drawn.keys()]) if (!told.has(id)) change(id, null);
  $(".pager")?.remove();
});

// ---- Filter

const filter = $("#filter");
const chips = [...document.querySelectorAll(".chips button")];
let onlyStatus = "";

function count() {
  const counts = {};
  for (const { node } of order) counts[node.status] = (counts[node.status] ?? 0) + 1;
  for (const chip of chips) {
    const { status } = chip.dataset;
    $("b", chip).textContent = status ? counts[status] ?? 0 : order.length;
    chip.hidden = Boolean(status) && !counts[status] && status !== onlyStatus;
  }
}

function sift() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const { row, node, haystack } of order) {
    const fits = (!onlyStatus || node.status === onlyStatus) && words.every((word) => haystack.includes(word));
    if (row.hidden === fits) row.hidden = !fits;
    shown += fits;
  }
  $("#empty").hidden = order.length + drawn.size > 0;
  $("#unfit").hidden = shown > 0 || !order.length;
}

filter.addEventListener("input", sift);
for (const chip of chips) {
  chip.addEventListener("click", () => {
    onlyStatus = chip.dataset.status;
    for (const other of chips) other.setAttribute("aria-pressed", String(other === chip));
    sift();
  });
}

// ---- What may be done

const nodePath = (id, verb = "") => `/api/nodes/${encodeURIComponent(id)}${verb}`;

allow({
  async drain({ id, name }) {
    const text = "The node finishes its requests and gets no new work until it is resumed.";
    if (await sure(`Drain ${name}?`, text, "Drain")) await call("POST", nodePath(id, "/drain"));
  },
  resume: ({ id }) => call("POST", nodePath(id, "/resume")),
  async delete({ id, name }) {
    const text = "The node is removed and its credentials end at once. To return it needs a new join line.";
    if (await sure(`Delete ${name}?`, text, "Delete", true)) await call("DELETE", nodePath(id));
  },
  menu(_, button) {
    const row = button.closest("tr");
    const { id, status } = row.dataset;
    const may = {
      approve: status === "pending",
      drain: !["pending", "draining"].includes(status),
      resume: ["draining", "offline"].includes(status),
      delete: true,
    };
    openMenu(button, may, { id, name: $(".name", row).textContent });
  },
});
setUpAttention();
setUpJoining();
start();
