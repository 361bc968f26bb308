// Tools of the playground: the editor of their definitions, the calls of a model, and the results that a person types.
// What models and people write is only ever set as text.

import { $, make, setText } from "./dom.js";

const NAME = /^[\w-]{1,64}$/;
export const EXAMPLE = [{
  type: "function",
  function: {
    name: "weather",
    description: "The weather of a city now",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

const isRecord = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function readTool(tool, at) {
  const where = `Tool ${at + 1}`;
  if (!isRecord(tool)) throw new Error(`${where}: write an object, {"type": "function", "function": {…}}.`);
  if (tool.type !== "function") throw new Error(`${where}: "type" must be "function".`);
  const made = tool.function;
  if (!isRecord(made)) throw new Error(`${where}: "function" must be an object with a name.`);
  if (typeof made.name !== "string" || !NAME.test(made.name)) {
    throw new Error(`${where}: "name" must be 1 to 64 letters, digits, _ or -.`);
  }
  if (made.description !== undefined && typeof made.description !== "string") throw new Error(`${made.name}: "description" must be a text.`);
  if (made.parameters !== undefined && (!isRecord(made.parameters) || (made.parameters.type ?? "object") !== "object")) {
    throw new Error(`${made.name}: "parameters" must be a JSON schema of type "object".`);
  }
  return made;
}

/** The list of tools that a text defines; null for no text. Throws a sentence that says what to change. */
export function readTools(text) {
  if (!text.trim()) return null;
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: this is not JSON (${error.message}).`);
  }
  if (!Array.isArray(tools)) throw new Error("Tools: write a JSON list, [ … ].");
  const names = tools.map((tool, at) => readTool(tool, at).name);
  const twice = names.find((name, at) => names.indexOf(name) !== at);
  if (twice) throw new Error(`${twice}: two tools have this name.`);
  return tools.length ? tools : null;
}

function summary(tools) {
  const words = tools.map(({ function: { name, parameters } }) => `${name}(${Object.keys(parameters?.properties ?? {}).join(", ")})`);
  return `${tools.length === 1 ? "1 tool" : `${tools.length} tools`}: ${words.join(", ")}`;
}

/** Says below the editor, while a person types, what the text defines or what is wrong with it. */
export function setUpEditor(area) {
  const told = $("#tools-told");
  const check = () => {
    try {
      const tools = readTools(area.value);
      setText(told, tools ? summary(tools) : "");
      told.classList.remove("wrong");
      area.removeAttribute("aria-invalid");
    } catch (error) {
      setText(told, error.message);
      told.classList.add("wrong");
      area.setAttribute("aria-invalid", "true");
    }
  };
  area.addEventListener("input", check);
  $("#tools-example").addEventListener("click", () => {
    area.value = JSON.stringify([...(tryRead(area.value) ?? []), ...EXAMPLE], null, 2);
    check();
    area.focus();
  });
  $("#tools-format").addEventListener("click", () => {
    const tools = tryRead(area.value);
    if (tools) area.value = JSON.stringify(tools, null, 2);
    check();
  });
  return check;
}

function tryRead(text) {
  try {
    return readTools(text);
  } catch {
    return null;
  }
}

// Calls and their results.

export const isAnswered = ({ calls }) => Boolean(calls?.length) && calls.every(({ result }) => result !== undefined);
export const awaitsResults = (message) => Boolean(message.calls?.length) && !message.failed && !message.stopped && !isAnswered(message);

/** Adds a piece of a stream to the calls of a message. */
export function addCalls(message, pieces) {
  for (const { index = 0, id, function: called } of pieces ?? []) {
    const kept = ((message.calls ??= [])[index] ??= { id: "", name: "", args: "" });
    kept.id ||= id ?? "";
    kept.name += called?.name ?? "";
    kept.args += called?.arguments ?? "";
  }
}

/** An answered message as the API takes it: the calls, then a message of role `tool` for each. */
export function messagesOfCalls({ text, calls }) {
  const idOf = (call, at) => call.id || `call_${at}`; // some engines give none
  return [
    {
      role: "assistant",
      content: text,
      tool_calls: calls.map((call, at) => ({ id: idOf(call, at), type: "function", function: { name: call.name, arguments: call.args } })),
    },
    ...calls.map((call, at) => ({ role: "tool", tool_call_id: idOf(call, at), name: call.name, content: call.result })),
  ];
}

function block(title, text, kind) {
  const head = make("div", { className: "code-head" }, make("span", { textContent: title }));
  return make("div", { className: `code ${kind}` }, head, make("pre", { tabIndex: 0 }, make("code", { textContent: text })));
}

export function callBlocks({ name, args, result }) {
  let shown = args;
  try {
    shown = JSON.stringify(JSON.parse(args), null, 2);
  } catch {
    // Still arriving, or not JSON: as it is.
  }
  const blocks = [block(`tool call: ${name || "…"}`, shown, "call")];
  if (result !== undefined) blocks.push(block(`result of ${name}`, result, "result"));
  return blocks;
}

/** A field for each call. `onResults` gets the texts in the order of the calls. */
export function resultForm({ calls }, onResults) {
  const fields = calls.map(() => make("textarea", { rows: 2, required: true, spellcheck: false, placeholder: "What the tool returns: text or JSON" }));
  const labels = calls.map(({ name }, at) => make("label", {}, `Result of ${name || `call ${at + 1}`} `, fields[at]));
  const form = make("form", { className: "results", autocomplete: "off" }, ...labels, make("button", { textContent: "Send the result and continue" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    onResults(fields.map(({ value }) => value));
  });
  return form;
}
