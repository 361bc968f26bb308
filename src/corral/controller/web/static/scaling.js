// How many replicas of a model there should be, and where.

import { call, guarded } from "./acts.js";
import { $ } from "./dom.js";

/** Returns what asks; `tell` says what came of it. */
export function setUpScaling(tell) {
  const dialog = $("#scale");
  const form = $("#scale-form");
  const { how, min, max, selector } = form.elements;
  const wrong = $("#scale-error");
  let model = "";

  // Whoever writes into a field means its choice.
  for (const field of [min, max]) field.addEventListener("input", () => (how.value = "some"));
  selector.addEventListener("input", () => how.value === "auto" && (how.value = "some"));
  $("[data-close]", dialog).addEventListener("click", () => dialog.close());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    guarded(event.submitter, async () => {
      wrong.hidden = true;
      try {
        await save();
      } catch (error) {
        wrong.textContent = error.message;
        wrong.hidden = false;
      }
    });
  });

  async function save() {
    let words = "as many as requests need";
    if (how.value === "auto") {
      await call("DELETE", `/api/nodes/scheduling/${encodeURIComponent(model)}`).catch((error) => {
        if (error.status !== 404) throw error; // it has none: that is what was asked for
      });
    } else {
      const all = how.value === "all";
      await call("POST", "/api/nodes/scheduling", {
        model_name: model,
        node_selector: labelsOf(selector.value),
        min_replicas: all ? 0 : numberOf(min),
        max_replicas: all ? 0 : numberOf(max),
        spread_all: all,
      });
      words = all ? "one on every node" : `${numberOf(min)} to ${numberOf(max) || "any number of"} replicas`;
    }
    dialog.close();
    tell({ message: `${model}: ${words}` });
  }

  return (name, schedule) => {
    model = name;
    form.reset();
    wrong.hidden = true;
    const now = schedule ? JSON.parse(schedule) : null;
    $("#scale-title").textContent = `Replicas of ${name}`;
    how.value = now ? (now.all ? "all" : "some") : "auto";
    if (now) [min.value, max.value, selector.value] = [now.min, now.max, now.selector];
    dialog.showModal();
    $("input:checked", form)?.focus();
  };
}

function numberOf(field) {
  if (!field.value.trim()) return 0;
  return field.valueAsNumber;
}

/** `a=b,c=d` as a mapping; the server says which labels it takes. */
function labelsOf(text) {
  const pairs = text.split(",").map((pair) => pair.trim()).filter(Boolean);
  if (!pairs.length) return null;
  return Object.fromEntries(pairs.map((pair) => {
    const spot = pair.indexOf("=");
    if (spot < 1) throw new Error(`${pair}: write labels as key=value, with commas between them.`);
    return [pair.slice(0, spot).trim(), pair.slice(spot + 1).trim()];
  }));
}
