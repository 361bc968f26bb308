// A request about backends, shown before it is made: where, and what it would do on each node.

import { $, make } from "./dom.js";
import { on } from "./live.js";
import { counted, size } from "./words.js";

const SHOWN = 100; // nodes of one plan; the words above count them all
const names = new Map(); // of the nodes, for the field that asks for one

on("node", ({ id, name }) => names.set(id, name));
on("node-removed", ({ id }) => names.delete(id));

/** Resolves to the scope (`{}`, `{node}`, `{selector}`), or to null when the person thought better of it.
 *  `plan(scope)` tells what it would do; `spreads`: whether machines that join later get it too. */
export function askFirst({ title, verb, danger, spreads, plan }) {
  const dialog = $("#ask");
  const form = $("#ask-form");
  form.reset();
  $("#ask-title").textContent = title;
  $("#ask-all").textContent = spreads ? "every node, also those that join later" : "every node that has it";
  $("#ask-yes").textContent = verb;
  $("#ask-yes").classList.toggle("danger", danger);
  $("#node-names").replaceChildren(...[...names.values()].sort().map((value) => make("option", { value })));
  return new Promise((resolve) => {
    const asking = new AbortController();
    let turns = 0;
    let scope = null;

    async function preview() {
      const mine = ++turns;
      scope = null;
      const wanted = scopeOf(form.elements);
      $("#ask-yes").disabled = true;
      $("#plan").replaceChildren();
      if (!wanted) return say("Say which.");
      say("Computing the plan…");
      try {
        const plans = await plan(wanted);
        if (mine !== turns) return;
        drawPlans(plans);
        scope = wanted;
        $("#ask-yes").disabled = !plans.some(({ nodes }) => nodes.length) && !spreads;
      } catch (error) {
        if (mine === turns) say(error.message, true);
      }
    }

    function end(answer) {
      asking.abort();
      turns += 1;
      dialog.close();
      resolve(answer);
    }

    const { signal } = asking;
    form.addEventListener("change", preview, { signal });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (scope) end(scope);
    }, { signal });
    // Whoever writes into a field means its choice.
    for (const where of ["node", "selector"]) {
      form.elements[where].addEventListener("input", () => (form.elements.where.value = where), { signal });
    }
    $("#ask-no").addEventListener("click", () => end(null), { signal });
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      end(null);
    }, { signal });
    dialog.showModal();
    $("#ask-no").focus();
    preview();
  });
}

function scopeOf({ where, node, selector }) {
  if (where.value === "all") return {};
  const field = where.value === "node" ? node : selector;
  return field.value.trim() ? { [where.value]: field.value.trim() } : null;
}

function say(text, bad = false) {
  $("#plan-words").textContent = text;
  $("#plan-words").classList.toggle("bad", bad);
}

// ---- The plan

const COLUMNS = ["Node", "What", "Build", "To fetch", "Free disk after", "Processes, or why"];

function drawPlans(plans) {
  say(plans.map((plan) => summary(plan, plans.length > 1)).join(" "));
  $("#plan").replaceChildren(...plans.flatMap((plan) => [
    ...(plans.length > 1 ? [make("h3", { textContent: plan.backend })] : []),
    ...(plan.notes ?? []).map((textContent) => make("p", { className: "quiet", textContent })),
    ...(plan.nodes?.length ? [table(plan.nodes)] : []),
    ...(plan.nodes?.length > SHOWN ? [make("p", { className: "quiet", textContent: `and ${plan.nodes.length - SHOWN} more` })] : []),
  ]));
}

function summary({ backend, nodes = [] }, named) {
  const counts = new Map();
  for (const { action, waits } of nodes) {
    const words = waits && action !== "skip" ? `${action} later` : action;
    counts.set(words, (counts.get(words) ?? 0) + 1);
  }
  const words = [...counts].map(([action, count]) => `${action} on ${count}`).join(", ") || "no node has anything to do";
  const bytes = nodes.reduce((sum, node) => sum + (node.fetch_bytes ?? 0), 0);
  const fetched = bytes ? `, ${size(bytes)} to fetch` : "";
  return `${named ? `${backend}: ` : ""}${words}${nodes.length > 1 ? ` of ${counted(nodes.length, "node", "nodes")}` : ""}${fetched}.`;
}

function table(nodes) {
  const head = make("tr", {}, ...COLUMNS.map((textContent) => make("th", { scope: "col", textContent })));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...nodes.slice(0, SHOWN).map(row)));
}

/** From what to what: by version where both are known, else by digest. */
function versionsOf(node) {
  const short = (digest) => digest?.split(":").pop().slice(0, 12);
  const told = node.version && node.installed_version;
  const [from, to] = told
    ? [node.installed_version, node.version]
    : [short(node.installed_digest), short(node.digest)];
  if (from && to && from !== to) return `${from} → ${to}`;
  return node.version || node.installed_version || to || from || "";
}

function row(node) {
  const amount = (bytes) => (bytes == null ? "–" : size(bytes));
  const does = !["skip", "nothing"].includes(node.action);
  const cells = [
    node.waits && does ? `${node.action} later` : node.action,
    [node.variant, versionsOf(node)].filter(Boolean).join(" "),
    does ? amount(node.fetch_bytes) : "–",
    does ? amount(node.disk_after_bytes) : "–",
    [node.reason, node.processes].filter(Boolean).join("; "),
  ];
  return make("tr", { className: does ? "" : "quiet" }, make("th", { scope: "row", textContent: node.node_name }),
    ...cells.map((textContent) => make("td", { textContent })));
}
