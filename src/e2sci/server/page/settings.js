/**
 * The switches: what the next question asks for. Their first values are the server's own; what is
 * changed here is kept in this browser. Those that don't apply are disabled, and say why.
 */

import { THRESHOLDED } from "./tale.js";

const KEPT = "e2sci.settings";

/** What the choices mean. Modes and rules have different names. */
const WORDS = {
  auto: "Whatever pays, by what is measured meanwhile.",
  pipelined: "The small model drafts on while the large one checks.",
  sync: "Draft, wait for the verdict, draft.",
  cloud: "The large model alone.",
  draft: "The small model alone.",
  strict: "The large model's own text, token for token.",
  rejection: "Another text than the large model's own, from the same distribution.",
  fuzzy: "Accepts where the two models are close.",
  elastic: "Accepts below a threshold that follows the credit.",
  typical: "Accepts what the large model might have said.",
};

const TOLERANT = ["fuzzy", "elastic", "typical"];
const COST = "This changes the large model's text: it lets pass what that would not have written, and "
  + "may cost accuracy. How much is measured on the page “Results” of the documentation.";

/** Of our own options, those that a request names if they apply. */
const OWN = ["mode", "gamma", "accept", "measure", "threshold", "budget", "window"];
const USUAL = ["temperature", "seed", "max_tokens"];

export class Settings {
  /** @param {HTMLFormElement} form @param {() => void} changed */
  constructor(form, changed) {
    this._form = form;
    this._changed = changed;
    this._defaults = null;
    form.addEventListener("input", () => this._take());
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      this._put(this._defaults ?? {});
      localStorage.removeItem(KEPT);
      this._apply();
    });
  }

  /** What the server offers is known. @param {object} info of /e2sci/info */
  offer({ modes, accepts, measures, defaults }) {
    if (this._defaults) return;
    this._defaults = defaults;
    const lists = { mode: modes, accept: accepts, measure: measures };
    for (const [name, values] of Object.entries(lists)) {
      this._form[name].replaceChildren(...values.map((value) => new Option(value, value)));
    }
    this._put({ ...defaults, ...JSON.parse(localStorage.getItem(KEPT) ?? "{}") });
    this._apply();
  }

  /** Whether everything is filled in as it should be; if not, the browser says what is not. */
  get valid() {
    return this._form.reportValidity();
  }

  /** A request's fields. @returns {object} */
  get request() {
    const fields = { ...this._values(USUAL), logprobs: true, top_logprobs: 5 };
    const own = this._values(OWN);
    if (own.mode === "draft") delete fields.logprobs, delete fields.top_logprobs;
    return { ...fields, e2sci: { ...own, trace: true } };
  }

  /** In a few words. */
  get summary() {
    const { mode, accept, threshold } = this._values(OWN);
    return [mode, accept, threshold === undefined ? null : `T ${threshold}`].filter(Boolean).join(" · ");
  }

  /** Values that apply and are filled in. */
  _values(names) {
    const inputs = names.map((name) => this._form[name]).filter((each) => !each.disabled && each.value);
    return Object.fromEntries(
      inputs.map((each) => [each.name, each.type === "number" ? each.valueAsNumber : each.value]),
    );
  }

  _put(values) {
    for (const name of [...OWN, ...USUAL]) this._form[name].value = values[name] ?? "";
    for (const list of this._form.querySelectorAll("select")) {
      if (list.selectedIndex < 0) list.selectedIndex = 0; // what was wanted is not offered
    }
  }

  _take() {
    const kept = [...OWN, ...USUAL].map((name) => [name, this._form[name].value]);
    localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(kept)));
    this._apply();
  }

  /** Enable what applies, and say why the rest doesn't. */
  _apply() {
    const mode = this._form.mode.value;
    const accept = this._form.accept.value;
    const alone = { cloud: "the large model", draft: "the small model" }[mode];
    const judged = alone && `Mode ${mode} is ${alone} alone: nothing is judged`;
    const compares = THRESHOLDED.includes(accept);
    const reasons = {
      gamma: mode !== "auto" && "Only mode auto weighs the cloud's time",
      accept: judged,
      measure: judged || (!compares && `Rule ${accept} measures no divergence`),
      threshold: judged || (!compares && `Rule ${accept} has no threshold`),
      budget: judged || (accept !== "elastic" && "Only rule elastic keeps a budget"),
      window: alone && `Mode ${mode} is ${alone} alone: there are no windows`,
    };
    for (const [name, reason] of Object.entries(reasons)) {
      const input = this._form[name];
      input.disabled = Boolean(reason);
      input.parentElement.title = input.title = reason || "";
    }
    this._say("about-mode", WORDS[mode]);
    this._say("about-accept", judged ? "" : WORDS[accept]);
    this._say("tolerant", !judged && TOLERANT.includes(accept) ? COST : "");
    this._changed();
  }

  _say(id, text) {
    const place = this._form.querySelector(`#${id}`);
    place.textContent = text;
    place.hidden = !text;
  }
}
