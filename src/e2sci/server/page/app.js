/**
 * The page: two models write one text, and one sees how. This file joins the parts:
 *
 *   api       the server by fetch              tale      what an answer has told, as plain data
 *   chat      turns, asking, stopping          tokens    an answer's spans; card: what one shows
 *   settings  the switches                     figures   strip, legend, a line for each answer
 *   charts    live charts, with timeline       theme     the colours, before the first paint
 */

import { Trouble, info, useKey } from "./api.js";
import { Card } from "./card.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Legend, showFigures } from "./figures.js";
import { Settings } from "./settings.js";
import { Speech } from "./speech.js";
import { Tale } from "./tale.js";
import { watchTokens } from "./tokens.js";

const INFO_SECONDS = 10;
const TYPED = "e2sci.typed";

const find = (id) => document.getElementById(id);
const log = find("log");
const question = find("question");

const legend = new Legend(find("legend"), log);
const charts = new Charts(find("instruments"));
const card = new Card(find("card"));
const speech = new Speech(find("spoken"));
const settings = new Settings(find("switches"), () => {
  find("summary").textContent = settings.summary;
});
const chat = new Chat(log, {
  request: () => settings.request,
  changed: soon(() => {
    legend.count(chat.tales);
    showFigures(find("figures"), seen);
    charts.touch();
    speech.hear(chat.tales.at(-1), !chat.busy);
  }),
  look,
  busy,
  key: askForKey,
});
let seen = new Tale();

/** Look at an answer in the charts; let them be in sight, if `open`. */
function look(tale, open = false) {
  if (open) {
    find("instruments").open = true;
    find("instruments").scrollIntoView({ block: "nearest" });
  }
  seen = tale;
  showFigures(find("figures"), seen);
  charts.show(tale);
}

/** An answer is being written, or not. */
function busy(is) {
  find("send").hidden = is;
  find("stop").hidden = !is;
  find("intro").hidden = chat.turns.length > 0;
  if (!is) greet();
}

/** Not more than once a frame. */
function soon(act) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => {
      waits = false;
      act();
    });
  };
}

// ---- asking ---------------------------------------------------------------------------------

function send() {
  const text = question.value.trim();
  if (!text || chat.busy || !settings.valid) return;
  write("");
  chat.ask(text);
}

/** Put a text where one types, which is kept over a reload. */
function write(text) {
  question.value = text;
  sessionStorage.setItem(TYPED, text);
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
question.addEventListener("input", () => write(question.value));
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
find("stop").addEventListener("click", () => {
  chat.stop();
  question.focus();
});
find("new").addEventListener("click", () => {
  chat.clear();
  look(new Tale());
  find("intro").hidden = false;
  question.focus();
});
find("examples").addEventListener("click", ({ target }) => {
  if (target.type !== "button") return;
  write(target.textContent.trim());
  send();
});

// ---- tokens ---------------------------------------------------------------------------------

watchTokens(log, (span) => {
  const turn = span && chat.turns.find((each) => each.element.contains(span));
  if (!turn) return card.hide();
  const index = Number(span.dataset.index);
  const { tokens, judged, scores } = turn.tale;
  card.show(span, { token: tokens[index], judged: judged.get(tokens[index].position), score: scores[index] });
});

// ---- the server -----------------------------------------------------------------------------

let asked = null;
let keyAsked = null;

/** Who is there. A cloud that is away is looked for again. */
async function greet() {
  clearTimeout(asked);
  try {
    const { draft, model, connected, rtt_ms, ...offers } = await info();
    settings.offer(offers);
    const trip = rtt_ms === null ? "" : `, ${rtt_ms.toFixed(0)} ms away`;
    state(connected, connected ? `${draft} drafts for ${model}${trip}` : `${draft} drafts; no cloud is there`);
    if (connected) return;
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    state(false, error.message);
    if (error.status === 401) return void (await askForKey() && greet());
  }
  asked = setTimeout(greet, INFO_SECONDS * 1000);
}

function state(well, text) {
  const place = find("pair");
  place.classList.toggle("away", !well);
  if (place.textContent !== text) place.textContent = text; // or it would be read out again
}

/** Ask for a key, once for all who want one. @returns {Promise<boolean>} whether one was given */
function askForKey() {
  keyAsked ??= new Promise((resolve) => {
    const dialog = find("key");
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "use";
      if (given) useKey(find("key-text").value.trim());
      find("key-text").value = dialog.returnValue = "";
      keyAsked = null;
      resolve(given);
    }, { once: true });
    dialog.showModal();
  });
  return keyAsked;
}

// ---- the look -------------------------------------------------------------------------------

const THEMES = { "": ["◐", "as the system has them"], light: ["○", "light"], dark: ["●", "dark"] };
const root = document.documentElement;

function showTheme() {
  const [sign, words] = THEMES[root.dataset.theme ?? ""];
  find("theme").textContent = sign;
  find("theme").ariaLabel = find("theme").title = `Colours: ${words}`;
  charts.touch();
}

find("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(root.dataset.theme ?? "") + 1) % names.length];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  localStorage.setItem("e2sci.theme", next);
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);

/** Panes are open where page.css has a column for them, and fold elsewhere. */
const COLUMNS = { instruments: "(min-width: 60rem)", settings: "(min-width: 84rem)" };
for (const [id, width] of Object.entries(COLUMNS)) {
  const column = matchMedia(width);
  const unfold = () => (find(id).open = column.matches);
  column.addEventListener("change", unfold);
  unfold();
}

write(sessionStorage.getItem(TYPED) ?? "");
showTheme();
look(seen);
greet();
addEventListener("load", () => requestAnimationFrame(() => setTimeout(() => charts.load())));
