/**
 * An answer's tokens on the page: one span each, marked by origin, and moved among by arrow keys.
 *
 * What the model writes only ever becomes `textContent`. Lines between fences of ``` are put into a
 * block of code with the spans they are made of; the rest stays as it was written.
 */

/** Where a token may come from, in the order of the legend. */
export const ORIGINS = {
  agreed: "drafted here, and the large model's own pick",
  tolerated: "drafted here, not the large model's pick, and let pass by the rule",
  corrected: "the large model's, in place of what was drafted",
  filled: "the large model's, where no draft was there in time",
  drafted: "drafted here and judged by no one",
};

const FENCE = "```";

/** What a fence begins. */
const NEXT = { text: "opening", code: "closing" };

/** The tokens of one answer. `spans[i]` is token i; `index` gives it back. */
export class Tokens {
  constructor() {
    this.element = document.createElement("div");
    this.element.className = "text";
    this.element.role = "group";
    this.element.ariaLabel = "Answer; arrow keys go from token to token";
    /** @type {HTMLSpanElement[]} */
    this.spans = [];
    this._decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this._line = "";
    this._onLine = [];
    /** @type {"text" | "opening" | "code" | "closing"} */
    this._part = "text";
    this._block = this._begin("div");
  }

  /** @param {import("./tale.js").Token[]} tokens */
  add(tokens) {
    for (const token of tokens) {
      const text = this._decoder.decode(new Uint8Array(token.bytes), { stream: true });
      const span = document.createElement("span");
      span.className = `token ${token.origin}${text ? "" : " partial"}`;
      span.textContent = text;
      span.dataset.index = this.spans.length;
      span.tabIndex = this.spans.length ? -1 : 0;
      this.spans.push(span);
      this._place(span, text);
    }
  }

  /** No more will come; a character that was begun stays broken. */
  end() {
    const rest = this._decoder.decode();
    if (!rest) return;
    const last = this.spans.at(-1);
    last.append(rest);
    last.classList.remove("partial");
  }

  /** Put a span where it belongs, by the lines that it ends and begins. */
  _place(span, text) {
    this._block.append(span);
    const [head, ...lines] = text.split("\n");
    this._write(head, span);
    for (const line of lines) {
      this._endLine();
      this._write(line, span);
    }
  }

  _write(text, span) {
    if (!text) return;
    this._line += text;
    this._onLine.push(span);
    if (!NEXT[this._part] || !this._line.trimStart().startsWith(FENCE)) return;
    this._block = this._begin("div", "fence");
    this._block.append(...this._onLine);
    this._part = NEXT[this._part];
  }

  _endLine() {
    this._line = "";
    this._onLine = [];
    if (this._part === "opening") [this._part, this._block] = ["code", this._begin("pre")];
    if (this._part === "closing") [this._part, this._block] = ["text", this._begin("div")];
  }

  _begin(kind, name = "") {
    const block = Object.assign(document.createElement(kind), { className: name });
    this.element.append(block);
    return block;
  }
}

/**
 * Let keys and pointers choose tokens in `log`, and `show` the chosen one (null: none).
 *
 * One token of an answer can be tabbed to; arrow keys move on from it, up and down by lines.
 *
 * @param {HTMLElement} log @param {(span: HTMLSpanElement | null) => void} show
 */
export function watchTokens(log, show) {
  const tokenOf = (target) => target.closest?.(".token") ?? null;
  const focused = () => tokenOf(document.activeElement);
  log.addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse" && !event.buttons) show(tokenOf(event.target) ?? focused());
  });
  log.addEventListener("pointerleave", () => show(focused()));
  log.addEventListener("click", (event) => {
    if (getSelection().isCollapsed) tokenOf(event.target)?.focus({ preventScroll: true });
  });
  log.addEventListener("focusin", (event) => {
    const span = tokenOf(event.target);
    if (span) rove(span);
    show(span);
  });
  log.addEventListener("focusout", () => show(null));
  log.addEventListener("keydown", (event) => {
    const span = tokenOf(event.target);
    if (event.key === "Escape") show(null);
    const next = span && neighbour(span, event.key);
    if (!next || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    next.focus();
  });
}

/** Let `span` be the one of its answer that can be tabbed to. */
function rove(span) {
  for (const other of span.closest(".text").querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  span.tabIndex = 0;
}

/** The token that a key leads to from `span`, if it leads to one. */
function neighbour(span, key) {
  const all = [...span.closest(".text").querySelectorAll(".token")];
  const at = all.indexOf(span);
  switch (key) {
    case "ArrowRight": return all[at + 1];
    case "ArrowLeft": return all[at - 1];
    case "Home": return all[0];
    case "End": return all.at(-1);
    case "ArrowDown": return onNextLine(span, all.slice(at + 1));
    case "ArrowUp": return onNextLine(span, all.slice(0, at).reverse());
    default: return null;
  }
}

/** Of `others`, in reading order away from `span`, the nearest one on the next line. */
function onNextLine(span, others) {
  const here = span.getBoundingClientRect();
  const middle = (here.left + here.right) / 2;
  let best = null;
  for (const other of others) {
    const place = other.getBoundingClientRect();
    if (Math.abs(place.bottom - here.bottom) < here.height / 2) continue;
    if (best && Math.abs(place.bottom - best.bottom) > place.height / 2) break; // a line further
    const off = Math.abs((place.left + place.right) / 2 - middle);
    if (!best || off < best.off) best = { other, off, bottom: place.bottom };
  }
  return best?.other;
}
