// Logs live: one stream per node, the lines in the order in which they come. Text of engines is only ever set as text.

import { $, make, setText } from "./dom.js";
import { signIn } from "./live.js";
import { start } from "./page.js";

const MOST = 5_000; // lines on the page; the download has what is on the page
const TAIL = 500;
const AGAIN_MS = 2_000;
const box = $("#lines");
const state = $("#log-state");
const find = $("#filter-lines");
const sources = [...document.querySelectorAll("#log-sources li")].map(({ dataset }) => dataset);
const waiting = []; // while paused
let words = [];
let paused = false;
let count = 0;

const fits = (text) => words.every((word) => text.toLowerCase().includes(word));

function readWords() {
  words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
}

function show(line, { node }) {
  const at = line.timestamp ?? line.at ?? "";
  const text = line.text ?? line.line ?? line.message ?? "";
  const parts = [make("time", { dateTime: at, textContent: at.slice(11, 23) })];
  if (sources.length > 1) parts.push(make("span", { className: "from", textContent: node }));
  parts.push(make("span", { className: "text", textContent: text }));
  const row = make("p", {}, ...parts);
  row.hidden = !fits(`${node} ${text}`);
  box.append(row);
  while (box.childElementCount > MOST) box.firstChild.remove();
  count += 1;
}

function put(line, source) {
  if (paused) {
    waiting.push([line, source]);
    if (waiting.length > MOST) waiting.shift();
    return say();
  }
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  show(line, source);
  if (atEnd) box.scrollTop = box.scrollHeight;
  say();
}

let saying = 0;
function say() {
  saying ||= setTimeout(() => {
    saying = 0;
    const held = paused ? `, paused, ${waiting.length} more` : "";
    setText(state, `${Math.min(count, MOST)} lines of ${[...new Set(sources.map(({ node }) => node))].join(", ")}${held}`);
  }, 200);
}

async function follow(source) {
  let tail = TAIL;
  for (;;) {
    try {
      const log = source.name ? `backend-logs/${encodeURIComponent(source.name)}` : "log"; // no name: the worker's own
      const path = `/api/nodes/${encodeURIComponent(source.node)}/${log}?follow=true&tail=${tail}`;
      const answer = await fetch(path);
      if (answer.status === 401) return signIn();
      if (answer.status === 404) return setText(state, (await answer.json()).error.message); // trying again changes nothing
      if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message ?? `Corral answered ${answer.status}.`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) if (line.trim()) put(JSON.parse(line), source);
        tail = 0;
      }
    } catch (error) {
      setText(state, `${source.node}: ${error.message} Trying again…`);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

find.addEventListener("input", () => {
  readWords();
  for (const row of box?.children ?? []) row.hidden = !fits(row.textContent);
  const wanted = new URLSearchParams(location.search);
  if (find.value) wanted.set("find", find.value);
  else wanted.delete("find");
  history.replaceState(null, "", `${location.pathname}?${wanted}`);
});
$("#pause").addEventListener("click", ({ target }) => {
  paused = !paused;
  target.setAttribute("aria-pressed", String(paused));
  setText(target, paused ? "Continue" : "Pause");
  if (!paused) for (const [line, source] of waiting.splice(0)) put(line, source);
  say();
});
$("#download").addEventListener("click", () => {
  const lines = [...(box?.children ?? [])].filter((row) => !row.hidden)
    .map((row) => [$("time", row).dateTime, $(".from", row)?.textContent, $(".text", row).textContent].filter(Boolean).join(" "));
  const href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/plain" }));
  make("a", { href, download: `${(sources[0]?.name || `worker-${sources[0]?.node}`).replaceAll(/[^\w.-]+/g, "-")}.log` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
});
readWords();
start();
sources.forEach(follow);
