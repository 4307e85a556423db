/**
 * The answer for screen readers, in sensible steps: whole sentences, not oftener than every two
 * seconds, and the rest at its end. A live region over single tokens would be noise.
 */

const STEP_MS = 2000;
const SENTENCE = /[.!?:;\n]\s/g;

export class Speech {
  /** @param {HTMLElement} region with aria-live */
  constructor(region) {
    this._region = region;
    this._tale = null;
    this._said = 0;
    this._at = 0;
  }

  /** @param {import("./tale.js").Tale | undefined} tale @param {boolean} ended */
  hear(tale, ended) {
    if (tale !== this._tale) [this._tale, this._said] = [tale, 0];
    if (!tale) return;
    const now = performance.now();
    if (!ended && now - this._at < STEP_MS) return;
    const fresh = tale.text.slice(this._said);
    const end = ended ? fresh.length : [...fresh.matchAll(SENTENCE)].at(-1)?.index ?? 0;
    if (!end) return;
    this._region.textContent = fresh.slice(0, end + 1);
    this._said += end;
    this._at = now;
  }
}
