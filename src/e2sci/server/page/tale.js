/**
 * What one answer has told so far: its tokens, and how each came to stand there. Plain data, which
 * the views draw; nothing here knows of the page.
 *
 * Times are ms from the request's start, at the edge.
 *
 * @typedef {{position: number, id: number, text: string, bytes: number[], origin: string}} Token
 * @typedef {{position: number, draft: number, draft_text: string, js: number | null,
 *   tv: number | null, p: number, threshold: number | null, credit: number | null,
 *   accepted: boolean, pass: number}} Judged
 * @typedef {{token: string, logprob: number, top_logprobs: {token: string, logprob: number}[]}} Score
 * @typedef {"flying" | "accepted" | "partly" | "dropped"} Fate
 * @typedef {{ms: number, branch: number, start: number, tokens: number, from: number,
 *   end: number | null, kept: number, fate: Fate, lane: number}} Flight
 */

const ROLLING_MS = 1000;

/** Rules that go by a threshold. What the others are told of one is not theirs. */
export const THRESHOLDED = ["fuzzy", "elastic"];

export class Tale {
  /** @param {string} [accept] the acceptance rule */
  constructor(accept = "") {
    this._thresholded = THRESHOLDED.includes(accept);
    this.text = "";
    /** @type {Token[]} */
    this.tokens = [];
    /** @type {Score[]} of the tokens, in the same order; they may come later */
    this.scores = [];
    /** @type {Map<number, Judged>} by position */
    this.judged = new Map();
    /** @type {Flight[]} */
    this.flights = [];
    /** @type {{ms: number, own: number}[]} */
    this.fills = [];
    /** @type {{ms: number, rate: number}[]} tokens/s over the last second */
    this.speed = [];
    /** @type {{ms: number, bytes: number}[]} */
    this.uplink = [];
    /** @type {object | null} running totals, the latest */
    this.figures = null;
    /** @type {object | null} of the whole answer, at its end */
    this.stats = null;
    this.seed = null;
    this.ms = 0;
    this.firstMs = null;
    this.accepted = 0;
    this.rejected = 0;
    /** @type {Object<string, number>} tokens by origin */
    this.origins = {};
    this._times = [];
    /** @type {Flight[]} */
    this._flying = [];
    this._lanes = [];
  }

  /**
   * Take the next chunk of the stream.
   * @param {object} chunk
   * @returns {{tokens: Token[], notice: string | null}} what is new in it
   */
  hear(chunk) {
    const [choice] = chunk.choices;
    this.text += choice?.delta?.content ?? "";
    this.scores.push(...(choice?.logprobs?.content ?? []));
    const told = chunk.e2sci ?? {};
    if (told.stats) this._end(told);
    if (told.ms === undefined) return { tokens: [], notice: null };
    this.ms = told.ms;
    for (const record of told.judged ?? []) {
      const threshold = this._thresholded ? record.threshold : null;
      this.judged.set(record.position, { ...record, threshold });
    }
    if (told.tokens?.length) this._commit(told.tokens);
    this._fly(told.windows ?? [], told.verdicts ?? []);
    if (told.figures) {
      this.figures = told.figures;
      this.uplink.push({ ms: told.ms, bytes: told.figures.uplink_bytes });
    }
    return { tokens: told.tokens ?? [], notice: told.notice ?? null };
  }

  /** Nothing more will come; what still flies comes too late. */
  close() {
    this._settle(() => "dropped", this.ms);
  }

  /** Tokens/s of the cloud alone, as it said of its own passes; null if it did not. */
  get alone() {
    const ms = this.figures?.cloud_ms;
    return ms ? 1000 / ms : null;
  }

  /** Tokens/s from the first token on. */
  get rate() {
    const seconds = (this.ms - this.firstMs) / 1000;
    return this.tokens.length > 1 && seconds > 0 ? (this.tokens.length - 1) / seconds : null;
  }

  _end({ stats, seed }) {
    [this.stats] = stats;
    this.seed = seed;
  }

  _commit(tokens) {
    this.firstMs ??= this.ms;
    this.tokens.push(...tokens);
    for (const { origin } of tokens) {
      this.origins[origin] = (this.origins[origin] ?? 0) + 1;
      this._times.push(this.ms);
    }
    while (this._times[0] <= this.ms - ROLLING_MS) this._times.shift();
    const seconds = Math.min(ROLLING_MS, this.ms - this.firstMs) / 1000;
    if (seconds >= 0.2) this.speed.push({ ms: this.ms, rate: this._times.length / seconds });
  }

  /** Windows and verdicts in the order they happened. */
  _fly(windows, verdicts) {
    const all = [
      ...windows.map((window) => ({ ms: window.ms, take: () => this._send(window) })),
      ...verdicts.map((verdict) => ({ ms: verdict.ms, take: () => this._judge(verdict) })),
    ];
    for (const event of all.sort((a, b) => a.ms - b.ms)) event.take();
  }

  /** A window goes. One of a newer branch says that what still flies of older ones is lost. */
  _send(window) {
    if (!window.tokens) return; // a rest: it only says that none will come
    this._settle((flight) => flight.branch !== window.branch && fateOf(flight), window.ms);
    const last = this.flights.at(-1)?.ms ?? window.ms;
    const drafting = (this.figures?.draft_ms ?? Infinity) * window.tokens;
    const free = this._lanes.findIndex((other) => other.end !== null && other.end <= window.ms);
    const lane = free < 0 ? this._lanes.length : free;
    const from = Math.max(last, window.ms - drafting);
    const flight = { ...window, from, end: null, kept: 0, fate: "flying", lane };
    this._lanes[lane] = flight;
    this.flights.push(flight);
    this._flying.push(flight);
  }

  /**
   * A verdict comes. It may judge several windows, or a part of one; the cloud's own tokens may be
   * just those that were drafted meanwhile, or differ, which ends the branch.
   */
  _judge({ ms, branch, start, accepted, rejected, own }) {
    this.accepted += accepted;
    this.rejected += rejected ? 1 : 0;
    if (!accepted && !rejected && own) this.fills.push({ ms, own });
    const judged = start + accepted;
    const fault = rejected ? judged : this._corrected(judged, judged + own);
    const reached = fault ?? judged + own;
    this._settle((flight) => {
      if (flight.branch !== branch) return false;
      flight.kept = Math.max(flight.kept, Math.min(reached - flight.start, flight.tokens));
      return (fault !== null || flight.kept === flight.tokens) && fateOf(flight);
    }, ms);
  }

  /** Where the cloud's own tokens from `from` on, before `to`, put a draft token right. */
  _corrected(from, to) {
    const last = this.tokens.findLast((each) => each.position < to && each.origin === "corrected");
    return last && last.position >= from ? last.position : null;
  }

  /** Windows that `fate` gives one end here. @param {(flight: Flight) => Fate | false} fate */
  _settle(fate, ms) {
    this._flying = this._flying.filter((flight) => {
      const known = fate(flight);
      if (known) Object.assign(flight, { fate: known, end: ms });
      return !known;
    });
  }
}

/** What became of a window by the tokens that were kept of it. @returns {Fate} */
function fateOf({ kept, tokens }) {
  return kept === tokens ? "accepted" : kept ? "partly" : "dropped";
}
