/**
 * The conversation: turns of a question and its answer. All of it is sent again with each question,
 * but for questions that got no answer. A turn that went wrong says so in one line, and can be
 * asked again.
 */

import { Trouble, chunks } from "./api.js";
import { summary } from "./figures.js";
import { Tale } from "./tale.js";
import { Tokens } from "./tokens.js";

const NEAR_END = 80;

/** A question and what became of it. */
class Turn {
  /** @param {string} question @param {HTMLElement} log */
  constructor(question, log) {
    this.question = question;
    this.element = log.appendChild(child("section", "turn"));
    this.element.append(child("p", "question", question));
  }

  /** Forget the answer, if there is one. @param {string} accept the rule of the next */
  begin(accept) {
    this.tale = new Tale(accept);
    this.tokens = new Tokens();
    this._body?.remove();
    this._body = this.element.appendChild(child("div", "answer"));
    this._foot = child("footer", "foot");
    this._body.append(this.tokens.element, this._foot);
    this._body.ariaBusy = "true";
  }

  /** @param {object} chunk of the stream */
  hear(chunk) {
    const { tokens, notice } = this.tale.hear(chunk);
    this.tokens.add(tokens);
    if (notice) this.note(notice);
  }

  /** A line below the answer. */
  note(text, kind = "notice") {
    const line = child("p", kind, text);
    this._foot.before(line);
    return line;
  }

  /** It is over, well or not. @param {HTMLElement[]} buttons */
  end(buttons) {
    this.tale.close();
    this.tokens.end();
    this._body.ariaBusy = "false";
    this._foot.append(child("span", "", this.tale.tokens.length ? summary(this.tale) : ""), ...buttons);
  }
}

export class Chat {
  /**
   * @param {HTMLElement} log
   * @param {{request: () => object, changed: () => void, look: (tale: Tale, open?: boolean) => void,
   *   busy: (is: boolean) => void, key: () => Promise<boolean>}} page what the rest of the page
   *   does: the fields of a request; answers have changed; look at one; one is being written; ask
   *   for a key
   */
  constructor(log, page) {
    this._log = log;
    this._page = page;
    /** @type {Turn[]} */
    this.turns = [];
    this._stop = null;
  }

  get busy() {
    return this._stop !== null;
  }

  get tales() {
    return this.turns.map((turn) => turn.tale);
  }

  /** Ask a new question. @param {string} question */
  ask(question) {
    const turn = new Turn(question, this._log);
    this.turns.push(turn);
    return this._write(turn);
  }

  /** Stop the answer that is being written; what there is of it stays. */
  stop() {
    this._stop?.abort();
  }

  /** Begin another conversation. */
  clear() {
    this.stop();
    for (const turn of this.turns) turn.element.remove();
    this.turns = [];
    this._page.changed();
  }

  /** The answer to a turn's question, as it comes. */
  async _write(turn) {
    const mine = (this._stop = new AbortController());
    const buttons = [];
    const body = this._body(turn);
    turn.begin(body.e2sci.accept);
    this._page.busy(true);
    this._page.look(turn.tale);
    this._toEnd();
    try {
      for await (const chunk of chunks(body, mine.signal)) {
        this._keepEnd(() => turn.hear(chunk));
        this._page.changed();
      }
    } catch (error) {
      this._keepEnd(() => this._failed(turn, error, buttons));
    } finally {
      this._keepEnd(() => turn.end([...buttons, ...this._usual(turn)]));
      if (this._stop === mine) this._stop = null;
      this._page.busy(this.busy);
      this._page.changed();
    }
  }

  _failed(turn, error, buttons) {
    if (error.name === "AbortError") {
      turn.note("Stopped.");
      return;
    }
    const known = error instanceof Trouble;
    if (!known) console.error(error);
    turn.note(known ? error.message : `The page has failed: ${error.message}`, "error").role = "alert";
    buttons.push(button("Try again", () => this._again(turn)));
    if (error.status === 401) this._page.key().then((given) => given && this._again(turn));
  }

  _again(turn) {
    if (!this.busy) this._write(turn);
  }

  /** What one can do with an answer. */
  _usual(turn) {
    if (!turn.tale.tokens.length) return [];
    const look = button("Charts", () => this._page.look(turn.tale, true));
    const copy = button("Copy", async () => {
      await navigator.clipboard.writeText(turn.tale.text);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    return navigator.clipboard ? [copy, look] : [look]; // browsers have none on insecure pages
  }

  /** The request for a turn's answer: all that was said before, and its question. */
  _body(turn) {
    const before = this.turns.slice(0, this.turns.indexOf(turn)).filter((each) => each.tale.text);
    const said = before.flatMap(({ question, tale }) => [
      { role: "user", content: question },
      { role: "assistant", content: tale.text },
    ]);
    const messages = [...said, { role: "user", content: turn.question }];
    return { messages, stream: true, ...this._page.request() };
  }

  get _scroller() {
    return this._log.scrollHeight > this._log.clientHeight ? this._log : document.scrollingElement;
  }

  /** Change the log; if its end was in sight, it stays there. */
  _keepEnd(change) {
    const { scrollHeight, scrollTop, clientHeight } = this._scroller;
    change();
    if (scrollHeight - scrollTop - clientHeight < NEAR_END) this._toEnd();
  }

  _toEnd() {
    this._scroller.scrollTop = this._scroller.scrollHeight;
  }
}

function child(kind, name, text = "") {
  return Object.assign(document.createElement(kind), { className: name, textContent: text });
}

function button(text, act) {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  made.addEventListener("click", act);
  return made;
}
