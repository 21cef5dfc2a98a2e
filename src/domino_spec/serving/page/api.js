// The server's answers: what it serves, and a chat as a stream of chunks.

import { key } from "./key.js";

export class ServerError extends Error {
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }

  // Everything the server said, for a person.
  get words() {
    const wait = Number(this.retryAfter);
    if (this.retryAfter === null || !Number.isFinite(wait)) return this.message;
    const after = wait === 1 ? "1 second" : `${wait} seconds`;
    return `${this.message} Try again in ${after}.`;
  }
}

const GONE = "The server cannot be reached. Is it still running?";
const CUT = "The connection ended before the answer did. What came so far is above.";

async function ask(path, options) {
  const headers = { ...options.headers };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServerError(GONE);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const { status } = response;
  const text = await response.text().catch(() => "");
  let message = null;
  try {
    message = JSON.parse(text).error?.message;
  } catch {
    // Not ours: a proxy's page, say.
  }
  message ||= `The server answered ${status} ${response.statusText}: ${text.slice(0, 200)}`.trim();
  return new ServerError(message, { status, retryAfter: response.headers.get("Retry-After") });
}

export async function facts() {
  const response = await ask("v1/domino", { method: "GET" });
  return response.json();
}

// Yields every chunk; ends at [DONE]; throws what the server said went wrong.
export async function* chat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? "The answer broke off.");
    yield chunk;
  }
  throw new ServerError(CUT);
}

// Server-sent events: the data of each, however the network cut the bytes.
export async function* events(stream, signal) {
  // Read by hand: a pipe in between would drop what it holds when the connection breaks.
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let pending = "";
  let lines = [];
  try {
    while (true) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw new ServerError(CUT);
      }
      if (part.done) return;
      const found = (pending + decoder.decode(part.value, { stream: true })).split("\n");
      pending = found.pop();
      for (const raw of found) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) lines.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && lines.length) {
          yield lines.join("\n");
          lines = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
