/**
 * The card beside a token: where it came from, by which numbers, and what else the target had in
 * mind. `Facts` are looked up when it is shown, since scores come after their tokens.
 *
 * @typedef {{token: import("./tale.js").Token, judged: import("./tale.js").Judged | undefined,
 *   score: import("./tale.js").Score | undefined}} Facts
 */

import { ORIGINS } from "./tokens.js";

const GAP = 8;

export class Card {
  /** @param {HTMLElement} element a manual popover */
  constructor(element) {
    this._element = element;
    this._span = null;
    addEventListener("scroll", () => this._span && this._place(), { capture: true, passive: true });
  }

  /** @param {HTMLSpanElement} span @param {Facts} facts */
  show(span, facts) {
    if (this._span === span) return;
    this.hide();
    this._span = span;
    span.classList.add("chosen");
    span.setAttribute("aria-describedby", this._element.id);
    this._element.replaceChildren(...contents(facts));
    this._element.showPopover();
    this._place();
  }

  hide() {
    if (!this._span) return;
    this._span.classList.remove("chosen");
    this._span.removeAttribute("aria-describedby");
    this._span = null;
    this._element.hidePopover();
  }

  /** Below the token, or above where there is no room. */
  _place() {
    const token = this._span.getClientRects()[0] ?? this._span.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this._element;
    const room = document.documentElement.clientWidth - width - GAP;
    const below = token.bottom + GAP;
    const top = below + height < innerHeight ? below : token.top - GAP - height;
    this._element.style.left = `${Math.max(GAP, Math.min(token.left, room))}px`;
    this._element.style.top = `${Math.max(GAP, top)}px`;
  }
}

/** @param {Facts} facts */
function contents({ token, judged, score }) {
  const parts = [
    made("p", "what", made("code", "", visible(token.text)), made("b", token.origin, token.origin)),
    made("p", "why", ORIGINS[token.origin] ?? ""),
  ];
  if (judged && judged.draft !== token.id) {
    const line = made("p", "why", "The draft was ", made("code", "", visible(judged.draft_text)), ".");
    parts.push(line);
  }
  parts.push(figures(token, judged));
  if (score?.top_logprobs.length) parts.push(alternatives(score));
  return parts;
}

/** What the judgement went by. */
function figures(token, judged) {
  const rows = [["position", token.position]];
  if (judged) {
    rows.push(
      ["threshold", unless(judged.threshold, "none", " nats")],
      ["divergence, JS", unless(judged.js, "not sent", " nats")],
      ["distance, TV", unless(judged.tv, "not sent")],
      ["credit", unless(judged.credit, "none")],
      ["p of the draft", percent(judged.p)],
      ["pass", judged.pass],
    );
  }
  return made("dl", "", ...rows.flatMap(([name, value]) => [made("dt", "", name), made("dd", "", value)]));
}

/** The target's best tokens with their probabilities; the one that stands here among them. */
function alternatives(score) {
  const best = score.top_logprobs.map((each) => ({ ...each, here: each.token === score.token }));
  if (!best.some((each) => each.here)) best.push({ ...score, here: true });
  const rows = best.map(({ token, logprob, here }) => {
    const bar = made("span", "bar");
    bar.style.width = `${100 * Math.exp(logprob)}%`;
    const row = made("li", here ? "here" : "", made("code", "", visible(token)), made("i", "", bar),
      made("span", "", percent(Math.exp(logprob))));
    return row;
  });
  return made("div", "", made("p", "why", "The large model had in mind"), made("ol", "", ...rows));
}

const unless = (value, none, unit = "") => (value === null ? none : value.toFixed(3) + unit);
const percent = (p) => (p > 0 && p < 0.001 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`);
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

/** An element with a class and contents. Texts stay texts. */
function made(kind, name, ...inside) {
  const element = document.createElement(kind);
  if (name) element.className = name;
  element.append(...inside.map((each) => (each instanceof Node ? each : String(each))));
  return element;
}
