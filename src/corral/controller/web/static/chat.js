// The chat of the playground: one model or two beside each other, with what each answer took.

import { say } from "./acts.js";
import * as conversations from "./conversations.js";
import { $, make, setText } from "./dom.js";
import { readImages } from "./images.js";
import { followLoad, receiptOf, stream } from "./inference.js";
import { markdown } from "./markdown.js";
import { duration } from "./receiptwords.js";
import { addCalls, awaitsResults, callBlocks, isAnswered, messagesOfCalls, readTools, resultForm, setUpEditor } from "./tools.js";

const DRAW_MS = 80;
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"];
const form = $("#ask-model");
const settings = $("#settings");
let current = null; // the conversation that is shown
let columns = [];
let running = null; // AbortController of the answers under way
let images = []; // data URLs that go with the next question
let checkTools = () => {};

// Settings.

function readSettings() {
  const found = {};
  for (const name of NUMBERS) {
    const value = settings.elements[name].value.trim();
    if (value !== "") found[name] = Number(value);
  }
  const stop = settings.elements.stop.value.split("\n").filter(Boolean);
  if (stop.length) found.stop = stop;
  const tools = readTools(settings.elements.tools.value);
  if (tools) found.tools = tools;
  return found;
}

function keptSettings() {
  return Object.fromEntries([...new FormData(settings)]);
}

function showSettings(kept) {
  for (const field of settings.elements) if (field.name) field.value = kept[field.name] ?? "";
  checkTools();
}

// Messages as the API takes them.

function messagesOf(thread) {
  const system = settings.elements.system.value.trim();
  const said = thread.filter((each) => !each.failed).flatMap((each) => {
    const { role, text, images } = each;
    if (isAnswered(each)) return messagesOfCalls(each);
    return {
      role,
      content: images?.length
        ? [{ type: "text", text }, ...images.map((url) => ({ type: "image_url", image_url: { url } }))]
        : text,
    };
  });
  return system ? [{ role: "system", content: system }, ...said] : said;
}

// What is shown.

function facts(receipt) {
  const words = [];
  if (receipt.served_by) words.push(`${receipt.served_by} answered`);
  if (receipt.queue_ms >= 0.5) words.push(`queued ${duration(receipt.queue_ms)}`);
  if (receipt.load_ms >= 0.5) words.push(`loading ${duration(receipt.load_ms)}`);
  if (receipt.first_byte_ms) words.push(`first token ${duration(receipt.first_byte_ms)}`);
  words.push(`total ${duration(receipt.total_ms)}`);
  const seconds = (receipt.total_ms - receipt.first_byte_ms) / 1000;
  if (receipt.completion_tokens) {
    words.push(`${receipt.prompt_tokens || "–"} → ${receipt.estimated ? "~" : ""}${receipt.completion_tokens} tokens`);
    if (receipt.first_byte_ms && receipt.completion_tokens > 1 && seconds > 0) {
      words.push(`${((receipt.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
  }
  if (receipt.resumed) words.push(`resumed ${receipt.resumed === 1 ? "once" : "twice"}`);
  if (receipt.tries > 1) words.push(`${receipt.tries} tries`);
  return words.join(" · ");
}

/** The node is a link for those who see the pages of the fleet. */
function receiptLine(receipt) {
  const line = make("p", { className: "receipt quiet" });
  if (receipt.node) {
    const inside = document.body.dataset.role === "inference"
      ? receipt.node
      : make("a", { href: `/nodes/${encodeURIComponent(receipt.node)}`, textContent: receipt.node });
    line.append("node ", inside, " · ");
  }
  line.append(facts(receipt));
  return line;
}

/** `onResults`: what happens with the results of the calls of this message; without it nobody is asked for them. */
function drawMessage(message, element, onResults) {
  const inside = [];
  const asked = $("form.results", element); // what was typed there stays, and the focus
  const focused = asked?.contains(document.activeElement) ? document.activeElement : null;
  if (message.images?.length) {
    inside.push(make("div", { className: "images" }, ...message.images.map((src) => make("img", { src, alt: "Attached image" }))));
  }
  if (message.reasoning) {
    const open = $("details", element)?.open ?? false;
    inside.push(make("details", { className: "reasoning", open }, make("summary", { textContent: "Reasoning" }), markdown(message.reasoning)));
  }
  const text = make("div", { className: "text" });
  if (message.role === "user") text.textContent = message.text;
  else text.append(markdown(message.text));
  if (message.text) inside.push(text);
  for (const called of message.calls ?? []) inside.push(...callBlocks(called));
  if (onResults && awaitsResults(message)) inside.push(asked ?? resultForm(message, onResults));
  if (message.failed) inside.push(make("p", { className: "wrong", textContent: message.failed }));
  if (message.note) inside.push(make("p", { className: "quiet wait", textContent: message.note }));
  if (message.receipt) inside.push(receiptLine(message.receipt));
  element.replaceChildren(...inside);
  focused?.focus();
}

function addMessage(column, message, onResults) {
  const who = make("span", { className: "unseen", textContent: message.role === "user" ? "You: " : "Answer: " });
  const body = make("div");
  const element = make("article", { className: `said ${message.role}` }, who, body);
  column.log.append(element);
  drawMessage(message, body, onResults);
  column.log.scrollTop = column.log.scrollHeight;
  return body;
}

function showThreads() {
  columns.forEach((column, index) => {
    column.log.replaceChildren();
    const thread = current.threads[index] ?? [];
    for (const message of thread) addMessage(column, message, message === thread.at(-1) ? takeResults(current, column, thread) : null);
    column.empty.hidden = Boolean(current.threads[index]?.length);
  });
}

// One answer.

async function answer(column, thread, model, parameters, signal, onResults) {
  const message = { role: "assistant", text: "" };
  const body = { model, messages: messagesOf(thread), ...parameters };
  thread.push(message);
  const element = addMessage(column, message);
  const loading = new AbortController();
  const began = performance.now();
  let drawn = 0;
  let frame = 0;
  let id = "";
  let done = false;
  const draw = () => {
    frame = 0;
    drawn = performance.now();
    const atEnd = column.log.scrollHeight - column.log.scrollTop - column.log.clientHeight < 60;
    drawMessage(message, element, done && message === thread.at(-1) ? onResults : null);
    if (atEnd) column.log.scrollTop = column.log.scrollHeight;
  };
  const drawSoon = () => (frame ||= setTimeout(draw, Math.max(0, DRAW_MS - (performance.now() - drawn))));
  const note = (words) => {
    message.note = words;
    drawSoon();
  };
  signal.addEventListener("abort", () => loading.abort());
  column.log.setAttribute("aria-busy", "true");
  note("Waiting for the model…");
  followLoad(model, loading.signal, (status) => {
    const done = status.progress ? ` · ${Math.round(status.progress)} %` : "";
    note(`${status.message || `The model is ${status.state}`}${done} · ${duration(performance.now() - began)}`);
  });
  try {
    await stream("/v1/chat/completions", body, signal, (told) => (id = told), (piece) => {
      const delta = piece.choices?.[0]?.delta;
      if (!delta) return;
      if (delta.content || delta.reasoning_content || delta.reasoning || delta.tool_calls) {
        loading.abort();
        delete message.note;
      }
      message.text += delta.content ?? "";
      const thought = delta.reasoning_content ?? delta.reasoning;
      if (thought) message.reasoning = (message.reasoning ?? "") + thought;
      addCalls(message, delta.tool_calls);
      drawSoon();
    });
  } catch (error) {
    if (signal.aborted) message.stopped = true;
    else message.failed = error.message;
    id ||= error.id ?? "";
  }
  loading.abort();
  clearTimeout(frame);
  message.note = message.stopped ? "Stopped." : !message.failed && !message.text && !message.calls && !message.reasoning ? "The answer is empty." : undefined;
  done = true;
  draw();
  column.log.removeAttribute("aria-busy");
  return async () => {
    const receipt = await receiptOf(id);
    if (!receipt) return;
    message.receipt = receipt;
    draw();
  };
}

async function send(text) {
  const parameters = readSettings();
  const asked = columns.map((column) => column.select.value);
  if (asked.some((model) => !model)) throw new Error("Choose a model first.");
  const shown = current; // another conversation may be opened meanwhile
  shown.title ||= text.slice(0, 80) || "An image";
  shown.models = asked;
  const question = { role: "user", text, ...(images.length && { images }) };
  for (const form of document.querySelectorAll("#columns form.results")) form.remove(); // the person goes on without them
  columns.forEach((column, index) => {
    (shown.threads[index] ??= []).push({ ...question });
    column.empty.hidden = true;
    addMessage(column, question);
  });
  showImages([]);
  await answerAll(shown, columns.map((column, index) => [column, shown.threads[index], asked[index]]), parameters);
}

/** What happens with the results that a person types for the calls of the last message. */
function takeResults(shown, column, thread) {
  return (results) => {
    try {
      if (running) throw new Error("An answer is under way: wait for its end, or stop it.");
      const parameters = readSettings();
      const message = thread.at(-1);
      message.calls.forEach((called, at) => (called.result = results[at]));
      drawMessage(message, column.log.lastElementChild.lastElementChild);
      answerAll(shown, [[column, thread, column.select.value]], parameters).catch((error) => say(error.message, true));
    } catch (error) {
      say(error.message, true);
    }
  };
}

async function answerAll(shown, places, parameters) {
  running = new AbortController();
  form.classList.add("running");
  const finished = places.map(([column, thread, model]) => answer(column, thread, model, parameters, running.signal, takeResults(shown, column, thread)));
  const receipts = await Promise.all(finished);
  form.classList.remove("running");
  running = null;
  keepCurrent(shown);
  await Promise.all(receipts.map((receipt) => receipt()));
  keepCurrent(shown);
}

function keepCurrent(conversation) {
  conversation.settings = keptSettings();
  if (!conversations.keep(conversation)) say("This conversation is too large to be kept in the browser.", true);
  showList();
}

// Conversations.

function showList() {
  const items = conversations.list().map((each) => {
    const open = make("button", { type: "button", className: "open", textContent: each.title });
    open.addEventListener("click", () => openConversation(each.id));
    if (each.id === current?.id) open.setAttribute("aria-current", "true");
    const remove = make("button", { type: "button", className: "remove", textContent: "×", ariaLabel: `Delete the conversation ${each.title}` });
    remove.addEventListener("click", () => {
      conversations.forget(each.id);
      if (each.id === current.id) begin();
      else showList();
    });
    return make("li", {}, open, remove);
  });
  $("#kept").replaceChildren(...items);
  $("#none-kept").hidden = items.length > 0;
}

function begin() {
  running?.abort();
  current = { id: crypto.randomUUID?.() ?? String(Math.random()), title: "", threads: [], models: [] };
  showThreads();
  showList();
}

function openConversation(id) {
  running?.abort();
  current = structuredClone(conversations.find(id));
  showSettings(current.settings ?? {});
  setColumns(current.models.length || 1);
  columns.forEach((column, index) => choose(column.select, current.models[index]));
  showThreads();
  showList();
  keepAddress();
  $("#kept-box").open = matchMedia("(min-width: 1100px)").matches;
}

// Models and columns.

function choose(select, model) {
  if (model && [...select.options].some((option) => option.value === model)) select.value = model;
}

function setColumns(count) {
  all.forEach((column, index) => (column.box.hidden = index >= count));
  columns = all.slice(0, count);
  $("#beside").setAttribute("aria-pressed", String(count === 2));
  $("#columns").classList.toggle("two", count === 2);
}

function keepAddress() {
  const wanted = new URLSearchParams(location.search);
  wanted.delete("beside");
  columns.forEach((column, index) => column.select.value && wanted.set(index ? "beside" : "model", column.select.value));
  history.replaceState(null, "", `/playground${wanted.size ? `?${wanted}` : ""}`);
}

function showImages(next) {
  images = next;
  $("#attached").replaceChildren(...next.map((src, index) => {
    const remove = make("button", { type: "button", textContent: "×", ariaLabel: `Remove image ${index + 1}` });
    remove.addEventListener("click", () => showImages(images.filter((each) => each !== src)));
    return make("li", {}, make("img", { src, alt: `Image ${index + 1}` }), remove);
  }));
}

const attach = (files) => readImages(files).then((read) => showImages([...images, ...read]), (error) => say(error.message, true));

let all = [];

export function setUpChat() {
  all = [...document.querySelectorAll("#columns > section")].map((box) => ({
    box,
    log: $(".log", box),
    empty: $(".empty", box),
    select: $("select", box),
  }));
  columns = all.slice(0, 1);
  checkTools = setUpEditor(settings.elements.tools);
  const wanted = new URLSearchParams(location.search);
  setColumns(wanted.get("beside") ? 2 : 1);
  all.forEach(({ select }) => select.addEventListener("change", keepAddress));
  $("#beside").addEventListener("click", () => {
    setColumns(columns.length === 2 ? 1 : 2);
    showThreads();
    keepAddress();
  });
  $("#new").addEventListener("click", () => {
    begin();
    form.elements.text.focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = form.elements.text.value.trim();
    if (running || (!text && !images.length)) return;
    form.elements.text.value = "";
    send(text).catch((error) => {
      form.elements.text.value = text;
      say(error.message, true);
    });
  });
  $("#stop").addEventListener("click", () => running?.abort());
  form.elements.text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  form.elements.text.addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) attach(event.clipboardData.files);
  });
  form.addEventListener("dragover", (event) => event.preventDefault());
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    attach(event.dataTransfer.files);
  });
  $("#image").addEventListener("change", ({ target }) => {
    attach(target.files);
    target.value = "";
  });
  $("#kept-box").open = matchMedia("(min-width: 1100px)").matches;
  begin();
}

/** The models changed, or were listed for the first time. */
export function showChatModels(models) {
  const wanted = new URLSearchParams(location.search);
  all.forEach(({ box, select }, index) => {
    choose(select, select.dataset.seen ? "" : wanted.get(index ? "beside" : "model"));
    select.dataset.seen = "yes";
    const model = models.find((each) => each.name === select.value);
    const about = !model ? "" : model.ready ? `ready × ${model.ready}` : "cold: the first answer loads it";
    setText($(".about", box), about);
  });
}
