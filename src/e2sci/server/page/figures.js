/** The strip of figures beside the charts, the legend with its counts, and a line for each answer. */

import { ORIGINS } from "./tokens.js";

/** A number in few digits, or a dash. */
const short = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
const share = (part, whole) => (whole ? part / whole : NaN);

/** @param {HTMLElement} list a <dl> @param {import("./tale.js").Tale} tale */
export function showFigures(list, tale) {
  const figures = tale.figures ?? {};
  const tokens = tale.tokens.length;
  const alone = tale.alone ? `cloud ≈ ${short(tale.alone)}` : "";
  const rows = [
    ["tokens/s", short(tale.rate ?? NaN), alone],
    ["first token", short(tale.firstMs ?? NaN, 0), "ms"],
    ["accepted", short(100 * share(tale.accepted, tale.accepted + tale.rejected)), "% of judged"],
    ["passes", short(share(figures.passes, tokens), 2), "a token"],
    ["uplink", short(share(figures.uplink_bytes, tokens)), "B a token"],
    ["round trip", short(figures.rtt_ms ?? NaN), "ms"],
    ["mode", figures.mode ?? "–", figures.drafting === false ? "the draft rests" : ""],
  ];
  list.replaceChildren(...rows.map(([name, value, unit]) => {
    const row = document.createElement("div");
    for (const [kind, text] of [["dt", name], ["dd", value], ["dd", unit]]) {
      row.append(Object.assign(document.createElement(kind), { textContent: text }));
    }
    return row;
  }));
}

/** An answer in a line. @param {import("./tale.js").Tale} tale */
export function summary(tale) {
  const tokens = tale.tokens.length;
  const parts = [`${tokens} tokens`];
  if (tale.rate) parts.push(`${short(tale.rate)} tokens/s`);
  if (tale.accepted + tale.rejected) {
    parts.push(`${short(100 * share(tale.accepted, tale.accepted + tale.rejected), 0)} % accepted`);
  }
  if (tale.figures?.passes) parts.push(`${short(share(tale.figures.passes, tokens), 2)} passes a token`);
  if (tale.seed !== null) parts.push(`seed ${tale.seed}`);
  return parts.join(" · ");
}

/** The legend: counts by origin, and a filter of the log. */
export class Legend {
  /** @param {HTMLElement} element @param {HTMLElement} log */
  constructor(element, log) {
    this._log = log;
    this._counts = {};
    for (const [origin, title] of Object.entries(ORIGINS)) {
      const button = Object.assign(document.createElement("button"), { type: "button", title });
      const name = Object.assign(document.createElement("span"), { textContent: origin });
      name.className = `token ${origin}`;
      this._counts[origin] = Object.assign(document.createElement("b"), { textContent: "0" });
      button.ariaPressed = "false";
      button.append(name, " ", this._counts[origin]);
      button.addEventListener("click", () => this._press(button));
      button.dataset.origin = origin;
      element.append(button);
    }
    this._buttons = [...element.children];
  }

  /** @param {Iterable<import("./tale.js").Tale>} tales of the whole conversation */
  count(tales) {
    for (const [origin, place] of Object.entries(this._counts)) {
      const count = [...tales].reduce((sum, tale) => sum + (tale.origins[origin] ?? 0), 0);
      place.textContent = count;
    }
  }

  _press(button) {
    button.ariaPressed = button.ariaPressed === "true" ? "false" : "true";
    const only = this._buttons.filter((each) => each.ariaPressed === "true");
    if (only.length) this._log.dataset.only = only.map((each) => each.dataset.origin).join(" ");
    else delete this._log.dataset.only;
  }
}
