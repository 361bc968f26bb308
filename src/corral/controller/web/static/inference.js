// Requests to models. The token that opens /v1 lives in a variable of this module and nowhere else; the cookie is not
// sent there, and would open nothing.

import { call } from "./acts.js";

const RENEW_MS = 45_000; // before it expires: a request may wait for a model
const UNUSUAL_MS = 700; // without a first token: then the reason is worth showing
let token = "";
let expiresAt = 0; // performance.now()
let renewal = null;

export function dropToken() {
  token = "";
}

async function freshToken() {
  if (token && performance.now() < expiresAt - RENEW_MS) return token;
  renewal ??= call("POST", "/api/playground/token").finally(() => (renewal = null));
  const made = await renewal;
  token = made.token;
  expiresAt = performance.now() + made.expires_in_s * 1_000;
  return token;
}

/** A response of `/v1`. Throws the gateway's own sentence. */
async function request(path, body, signal) {
  for (let tried = 0; ; tried += 1) {
    const headers = { Authorization: `Bearer ${await freshToken()}`, "Content-Type": "application/json" };
    const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), credentials: "omit", signal });
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => ({}));
    // Another tab may have had the clock wrong, or this one slept: once more with a new token.
    if (answer.status === 401 && !tried) {
      dropToken();
      continue;
    }
    const words = told.error?.message ?? told.error ?? `Corral answered ${answer.status}.`;
    throw Object.assign(new Error(words), { status: answer.status, id: answer.headers.get("x-request-id") ?? "" });
  }
}

export async function ask(path, body, signal) {
  const answer = await request(path, body, signal);
  return { id: answer.headers.get("x-request-id") ?? "", told: await answer.json() };
}

/** `onPiece` is called with each event of the stream; the request's id comes before the first. */
export async function stream(path, body, signal, onBegin, onPiece) {
  const answer = await request(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  onBegin(answer.headers.get("x-request-id") ?? "");
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const piece = JSON.parse(data);
      if (piece.error) throw new Error(piece.error.message ?? String(piece.error));
      onPiece(piece);
    }
  }
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function read(path, signal) {
  const answer = await fetch(path, { signal }).catch(() => null);
  return answer?.ok ? answer.json() : null;
}

/** What the gateway tells of a request, about a second after it. Null: nothing came. */
export async function receiptOf(id) {
  return id ? read(`/api/playground/requests/${encodeURIComponent(id)}?wait_s=8`) : null;
}

/** Says what a cold model waits for, until `signal` ends it. */
export async function followLoad(model, signal, tell) {
  let since = 0;
  await pause(UNUSUAL_MS);
  while (!signal.aborted) {
    const query = new URLSearchParams({ model, since, wait_s: since ? 8 : 0 });
    const status = await read(`/api/playground/load?${query}`, signal);
    if (signal.aborted) return;
    if (!status || status.version === since) await pause(UNUSUAL_MS);
    since = status?.version ?? 0;
    if (status) tell(status);
  }
}

export async function listModels() {
  const answer = await fetch("/api/playground/models");
  if (answer.status === 401) location.assign("/login?why=ended");
  if (!answer.ok) throw new Error("The models could not be listed. Reload the page.");
  return answer.json();
}
