// Keeps the page live: rows follow /api/events, what needs a person is fetched as the server words it.
// The server has drawn the page before this runs; the script only changes what changes. Text is set as text,
// never as markup: names and labels come from other machines.

const $ = (selector, root = document) => root.querySelector(selector);
const { role, csrf } = document.body.dataset;
const admin = role === "admin";
document.documentElement.classList.add("js");
if (location.search === "?again") history.replaceState(null, "", "/"); // the detour of a link from another site

// ---- Words: the same as web/words.py, which drew the page; a test compares them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function usedOf(used, total) {
  if (!total) return "–";
  let step = 0;
  while (step < UNITS.length - 1 && total >= 1024 ** (step + 1)) step += 1;
  const short = (count) => {
    const value = count / 1024 ** step;
    const tenths = value < 10 ? 10 : 1;
    return String(Math.floor(value * tenths + 0.5) / tenths);
  };
  return `${short(used)} / ${short(total)} ${UNITS[step]}`;
}

let skew = 0; // the server's clock minus ours, in ms: laptops are minutes off, and "3 s ago" must not be

const setClock = () => (skew = Date.parse($("#facts").dataset.now) - Date.now());

function ago(stamp) {
  const at = Date.parse(stamp);
  if (!(at > -62e12)) return "never"; // no stamp, or Go's year one
  const seconds = Math.max(0, Math.floor((Date.now() + skew - at) / 1000));
  if (seconds >= 172800) return `${Math.floor(seconds / 86400)} d ago`;
  if (seconds >= 7200) return `${Math.floor(seconds / 3600)} h ago`;
  return seconds >= 60 ? `${Math.floor(seconds / 60)} min ago` : `${seconds} s ago`;
}

function note(node) {
  if (node.status === "pending") return "waits for approval";
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

// ---- One row

function drawAmount(parts, name, total, free, warned) {
  const meter = parts[name];
  const used = Math.max(0, total - free);
  meter.max = total || 1;
  meter.value = used;
  meter.hidden = !total;
  if (warned && total && used * 100 >= total * 90) meter.className = "full";
  else meter.removeAttribute("class");
  parts[`${name}-words`].textContent = usedOf(used, total);
}

function drawLabels(list, labels) {
  const words = Object.keys(labels).sort().map((key) => (labels[key] ? `${key}=${labels[key]}` : key));
  const rest = words.slice(3);
  const chip = (textContent, title) => Object.assign(document.createElement("li"), { textContent, title });
  list.replaceChildren(...words.slice(0, 3).map((word) => chip(word, word)));
  if (rest.length) list.append(Object.assign(chip(`+${rest.length}`, rest.join(", ")), { className: "more" }));
}

function draw(entry) {
  const { node, row, parts } = entry;
  const words = {
    name: node.name,
    kind: node.compat ? "LocalAI" : "",
    pill: node.status,
    note: note(node),
    platform: node.platform || "–",
    gpu: gpu(node),
    seen: ago(node.last_heartbeat),
    version: node.version || "–",
  };
  const titles = { pill: node.status_reason ?? "", note: words.note, gpu: node.capability ?? "" };
  for (const part in words) if (parts[part].textContent !== words[part]) parts[part].textContent = words[part];
  for (const part in titles) if (parts[part].title !== titles[part]) parts[part].title = titles[part];
  for (const part of ["kind", "note"]) parts[part].hidden = !words[part];
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
let told = new Set(); // ids told since the last `ready`: whoever is missing then is gone
let frame = 0;

function enter(row) {
  const parts = {};
  for (const part of row.querySelectorAll("[data-f]")) parts[part.dataset.f] = part;
  return { row, parts };
}

const drawn = new Map([...table.rows].map((row) => [row.dataset.id, row])); // by the server, not yet told of

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

function place(entry) {
  let low = 0;
  let high = order.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (order[middle].node.name < entry.node.name) low = middle + 1;
    else high = middle;
  }
  order.splice(low, 0, entry);
  table.insertBefore(entry.row, order[low + 1]?.row ?? null);
}

function everythingTold({ nodes: expected }) {
  for (const id of [...nodes.keys(), ...changed.keys(), ...drawn.keys()]) if (!told.has(id)) change(id, null);
  const present = told.size;
  told = new Set();
  // A removal can fall out of an overfull stream. Then the numbers differ: start over.
  if (present !== expected) return lost();
  live();
  $(".pager")?.remove();
}

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

// ---- Above the table: fetched as the server words it, at most once a second

let refreshing = 0;
let refreshedAt = -1_000;
let turns = 0; // an answer that was overtaken by a later one is old news

function refreshSoon() {
  refreshing ||= setTimeout(refresh, Math.max(200, refreshedAt + 1_000 - performance.now()));
}

async function refresh() {
  clearTimeout(refreshing);
  refreshing = 0;
  refreshedAt = performance.now();
  // Not under somebody's pressed mouse button: the click would hit nothing.
  if ($("#attention:active")) return refreshSoon();
  const turn = ++turns;
  try {
    const answer = await fetch("/page/overview", { signal: AbortSignal.timeout(10_000) });
    if (answer.status === 401) return signIn();
    if (!answer.ok) return lost();
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (turn !== turns) return;
    const focused = document.activeElement?.id;
    const before = $("#attention-line").textContent;
    for (const part of ["#facts", "#attention"]) $(part).replaceWith(document.adoptNode($(part, next)));
    if (focused && document.activeElement?.id !== focused) document.getElementById(focused)?.focus();
    const line = $("#attention-line").textContent;
    if (line !== before) $("#spoken").textContent = line;
    setClock();
    tick();
  } catch {
    lost();
  }
}

function tick() {
  for (const time of document.querySelectorAll("time[data-ago]")) {
    const words = ago(time.getAttribute("datetime"));
    if (time.textContent !== words) time.textContent = words;
  }
}

// ---- The stream. Every way of losing it ends in lost(): one place that waits, asks who we are and tries again.

let stream = null;
let waitMs = 0;
let retry = 0;

function connect() {
  clearTimeout(retry);
  stream?.close();
  told = new Set();
  stream = new EventSource("/api/events");
  stream.addEventListener("node", ({ data }) => {
    const view = JSON.parse(data);
    told.add(view.id);
    change(view.id, view);
  });
  stream.addEventListener("node-removed", ({ data }) => {
    const { id } = JSON.parse(data);
    told.delete(id);
    change(id, null);
  });
  stream.addEventListener("changed", refreshSoon);
  stream.addEventListener("ready", ({ data }) => everythingTold(JSON.parse(data)));
  stream.onerror = lost;
}

function live() {
  waitMs = 0;
  document.body.classList.remove("stale");
  $("#lost").hidden = true;
}

function lost() {
  if (!stream) return; // already waiting
  stream.close();
  stream = null;
  document.body.classList.add("stale");
  $("#lost").hidden = false;
  waitMs = Math.min(10_000, (waitMs || 250) * 2);
  retry = setTimeout(reconnect, waitMs * (0.5 + Math.random() / 2)); // jitter: a whole office comes back at once
}

async function reconnect() {
  try {
    // EventSource does not say why it failed; this does.
    const answer = await fetch("/api/me", { signal: AbortSignal.timeout(10_000) });
    if (answer.status === 401) return signIn();
  } catch {
    // Not reachable: connecting fails too, and waits longer.
  }
  connect();
  refreshSoon();
}

function signIn() {
  location.assign("/login?why=ended");
}

// A browser opens six connections to one server: tabs nobody looks at give theirs back.
let hiding = 0;

function rest() {
  clearTimeout(retry);
  stream?.close();
  stream = null;
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(rest, 30_000);
  else if (!stream) reconnect();
});

// ---- What an admin may do. The server checks again: a viewer's page merely has no buttons.

let hush = 0;

function say(text, bad = false) {
  const said = $("#said");
  said.textContent = text;
  said.classList.toggle("bad", bad);
  said.hidden = false;
  clearTimeout(hush);
  hush = setTimeout(() => (said.hidden = true), bad ? 10_000 : 4_000);
}

async function call(method, path, body) {
  const headers = { "X-CSRF-Token": csrf, ...(body && { "Content-Type": "application/json" }) };
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body) }).catch(() => {
    throw new Error("Corral does not answer. Look again in a moment whether it happened.");
  });
  if (answer.status === 401) signIn();
  const message = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(message.error?.message ?? `Corral answered ${answer.status}.`);
  return message;
}

const nodePath = (id, verb = "") => `/api/nodes/${encodeURIComponent(id)}${verb}`;

async function approve(ids) {
  const outcomes = await Promise.allSettled(ids.map((id) => call("POST", nodePath(id, "/approve"))));
  refreshSoon();
  const failed = outcomes.find((outcome) => outcome.status === "rejected");
  if (failed) throw failed.reason;
  say(ids.length === 1 ? `${outcomes[0].value.name} is approved.` : `${ids.length} nodes are approved.`);
}

async function sure(title, text, verb, danger) {
  const dialog = $("#confirm");
  $("#confirm-title").textContent = title;
  $("#confirm-text").textContent = text;
  $("#confirm-yes").textContent = verb;
  $("#confirm-yes").classList.toggle("danger", danger);
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  return dialog.returnValue === "yes";
}

const ACTS = {
  approve: ({ id }) => approve([id]),
  // Those listed under the button, never one that came since the person read the list.
  "approve-all": () => approve([...document.querySelectorAll("#attention [data-act=approve]")].map((b) => b.dataset.id)),
  async drain({ id, name }) {
    const text = "It finishes what it is doing and gets no new work until somebody resumes it.";
    if (await sure(`Drain ${name}?`, text, "Drain", false)) await call("POST", nodePath(id, "/drain"));
  },
  resume: ({ id }) => call("POST", nodePath(id, "/resume")),
  async delete({ id, name }) {
    const text = "It is forgotten and its credentials end at once. To come back it needs a new join line.";
    if (await sure(`Delete ${name}?`, text, "Delete", true)) await call("DELETE", nodePath(id));
  },
  menu(_, button) {
    const row = button.closest("tr");
    const { id, status } = row.dataset;
    const menu = $("#menu");
    const may = {
      approve: status === "pending",
      drain: !["pending", "draining"].includes(status),
      resume: ["draining", "offline"].includes(status),
      delete: true,
    };
    for (const item of menu.children) {
      item.hidden = !may[item.dataset.act];
      Object.assign(item.dataset, { id, name: $(".name", row).textContent });
    }
    menu.showPopover();
    const spot = button.getBoundingClientRect();
    menu.style.left = `${Math.max(8, spot.right - menu.offsetWidth)}px`;
    menu.style.top = `${Math.min(spot.bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
    $("button:not([hidden])", menu).focus();
  },
  async copy(_, button) {
    // Plain HTTP has no clipboard API, so there the line is selected and copied the old way.
    getSelection().selectAllChildren($("#join-command"));
    const copied = navigator.clipboard
      ? await navigator.clipboard.writeText($("#join-command").textContent).then(() => true, () => false)
      : document.execCommand("copy");
    button.textContent = copied ? "Copied" : "Press Ctrl+C";
  },
  "close-join"() {
    $("#join").hidden = $("#join-line").hidden = true;
    $("#join-command").textContent = ""; // a secret is not left lying in the page
    $("#add").setAttribute("aria-expanded", "false");
    $("#add").focus();
  },
};

async function join(form) {
  const asked = { uses: form.uses.valueAsNumber, ttl_s: Number(form.ttl_s.value), pre_approved: form.pre_approved.checked };
  const { secret, join_command: told } = await call("POST", "/api/tokens", asked);
  const line = told || `corral join ${location.origin} --token ${secret}`;
  $("#join-command").textContent = line;
  $("#join-line").hidden = false;
  $("#join-hint").hidden = !/\/\/(localhost|127\.|\[::1\])/.test(line);
  $("[data-act=copy]").textContent = "Copy";
}

async function guarded(button, work) {
  if (button.ariaBusy) return; // not `disabled`: that would take the focus away
  button.ariaBusy = "true";
  await work().catch((error) => say(error.message, true));
  button.ariaBusy = null;
}

if (admin) {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-act]");
    if (!button) return;
    if (button.closest("#menu")) $("#menu").hidePopover();
    guarded(button, async () => ACTS[button.dataset.act](button.dataset, button));
  });
  $("#add").addEventListener("click", () => {
    $("#join").hidden = false;
    $("#add").setAttribute("aria-expanded", "true");
    $("#join-form button").focus();
  });
  $("#join-form").addEventListener("submit", (event) => {
    event.preventDefault();
    guarded(event.submitter, () => join(event.target.elements));
  });
}

setClock();
connect();
setInterval(() => document.hidden || tick(), 1_000);
setInterval(() => document.hidden || !stream || refresh(), 15_000); // also finds a stream that is dead but not closed
