/**
 * The edge server by fetch: what it is, and an answer as it is written.
 *
 * Whatever goes wrong becomes a `Trouble` with one line for people. Paths are relative, so that
 * the page also works behind a proxy that puts it below a directory.
 */

const KEY = "e2sci.key";

/** Something went wrong. `status`: HTTP's, 0 without an answer; `code`: the server's own. */
export class Trouble extends Error {
  /** @param {string} message @param {{status?: number, code?: string | null}} [more] */
  constructor(message, { status = 0, code = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Keep the key for as long as this tab is open. @param {string} key */
export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** What the server is and offers. @returns {Promise<object>} */
export async function info() {
  return (await answered("e2sci/info", {})).json();
}

/**
 * The chunks of a chat, as they come.
 *
 * @param {object} body of /v1/chat/completions
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<object>}
 */
export async function* chunks(body, signal) {
  const response = await answered("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw told(chunk.error, response.status);
    yield chunk;
  }
  throw new Trouble("The answer broke off: the edge server has gone.");
}

/** A response that is no error. */
async function answered(path, { headers = {}, ...options }) {
  const key = sessionStorage.getItem(KEY);
  const more = key ? { Authorization: `Bearer ${key}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers, ...more } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The edge server does not answer. Is `e2sci serve` still running?");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({ error: null }));
  throw told(error ?? { message: `the server says ${response.status}` }, response.status,
    response.headers.get("Retry-After"));
}

/** The server's own line, with what it means in front. */
function told({ message, code }, status, after = null) {
  const place = {
    busy: "All places are taken",
    limited: "The key's limit is reached",
    invalid_api_key: "No entry",
    cloud_unreachable: "No cloud answers",
    cloud_lost: "The cloud is lost",
  }[code];
  const wait = after ? ` (in ${after} s)` : "";
  const words = place ? `${place}: ${message}` : message[0].toUpperCase() + message.slice(1);
  return new Trouble(words + wait, { status, code });
}

/** The data of server-sent events. A line may come in pieces. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true, value: "" }; // the connection broke, which is an end without [DONE]
      });
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
