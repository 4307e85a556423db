/**
 * The live charts of the answer that is looked at. The chart library is large, so it is fetched
 * behind the first paint. Nothing is drawn more than eight times a second, or in more than a fifth
 * of the time on a slow machine, nor where it can't be seen.
 */

import { drawTimeline } from "./timeline.js";

const REDRAW_MS = 125;
const REST = 4; // times what drawing took
const MOST_POINTS = 600;

/** @returns {Promise<object>} the chart library */
function library() {
  return new Promise((resolve, reject) => {
    const script = Object.assign(document.createElement("script"), { src: "page/plotly.min.js" });
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("the charts can't be loaded"));
    document.head.append(script);
  });
}

export class Charts {
  /** @param {HTMLElement} pane a <details> with the elements to draw in */
  constructor(pane) {
    this._pane = pane;
    this._tale = null;
    this._plotly = null;
    this._waits = false;
    this._dirty = false;
    this._pause = REDRAW_MS;
    this._at = pane.querySelector("#at");
    this._span = pane.querySelector("#span");
    for (const each of [this._at, this._span]) each.addEventListener("input", () => this.touch());
    pane.addEventListener("toggle", () => this.touch());
    document.addEventListener("visibilitychange", () => this.touch());
    new ResizeObserver(() => this.touch()).observe(pane);
  }

  /** Fetch the library. Behind the first paint, please. */
  async load() {
    this._plotly = await library();
    this.touch();
  }

  /** Look at another answer. @param {import("./tale.js").Tale} tale */
  show(tale) {
    this._tale = tale;
    this._at.value = this._at.max;
    this.touch();
  }

  /** Something has changed. */
  touch() {
    this._dirty = true;
    if (this._waits || !this._plotly) return;
    this._waits = true;
    setTimeout(() => requestAnimationFrame(() => this._draw()), this._pause);
  }

  _draw() {
    this._waits = false;
    if (!this._dirty || !this._tale || !this._pane.open || document.hidden) return;
    this._dirty = false;
    const began = performance.now();
    const look = this._look();
    this._timeline(look);
    for (const [id, chart] of Object.entries(CHARTS)) {
      const { traces, layout, words } = chart(this._tale, look.color);
      this._react(id, traces, layout, words, look);
    }
    this._pause = Math.min(Math.max(REDRAW_MS, REST * (performance.now() - began)), 1000);
  }

  /** The timeline shows some seconds, which end where the slider stands: at its right end, now. */
  _timeline(look) {
    const end = this._tale.ms / 1000;
    const follows = Number(this._at.value) === Number(this._at.max);
    this._at.max = end.toFixed(2);
    if (follows) this._at.value = this._at.max;
    const span = Number(this._span.value) || Math.max(end, 1);
    const until = Math.max(span, Number(this._at.value));
    this._at.disabled = span >= end;
    const drawn = drawTimeline(this._tale, [until - span, until], look.color);
    this._react("timeline", drawn.traces, drawn.layout, drawn.words, look);
  }

  _react(id, traces, layout, words, { ink, line, font }) {
    const element = this._pane.querySelector(`#${id}`);
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: false, fixedrange: true };
    const whole = {
      height: 150,
      margin: { l: 44, r: 8, t: 6, b: 30 },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { color: ink, family: font, size: 11 },
      showlegend: false,
      hovermode: "closest",
      dragmode: false,
      ...layout,
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
    };
    this._plotly.react(element, traces, whole, { displayModeBar: false, responsive: true });
    element.ariaLabel = words;
  }

  /** The page's own colours, as they are in this theme. */
  _look() {
    const probe = this._pane.appendChild(document.createElement("i"));
    const color = (name) => {
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color;
    };
    const names = ["agreed", "tolerated", "corrected", "filled", "drafted", "soft", "line", "panel"];
    const colors = Object.fromEntries(names.map((name) => [name, color(name)]));
    const font = getComputedStyle(probe).fontFamily;
    probe.remove();
    return { color: colors, ink: colors.soft, line: colors.line, font };
  }
}

/** The charts by the element they are drawn in. */
const CHARTS = {
  speed(tale, color) {
    const points = thinned(tale.speed);
    const x = points.map((each) => each.ms / 1000);
    const rates = { x, y: points.map((each) => each.rate), name: "now", line: { color: color.agreed, width: 2 } };
    const traces = [line(rates)];
    const alone = tale.alone;
    if (alone) {
      const dashed = { color: color.filled, dash: "dash", width: 1.5 };
      traces.push(line({ x: [0, tale.ms / 1000], y: [alone, alone], name: "cloud alone", line: dashed }));
    }
    const last = points.at(-1)?.rate;
    const words = last
      ? `${last.toFixed(1)} tokens a second${alone ? `; the cloud alone ${alone.toFixed(1)}` : ""}`
      : "No tokens yet";
    return { traces, layout: keyed({ xaxis: seconds(), yaxis: { rangemode: "tozero" } }), words };
  },

  credit(tale, color) {
    const points = thinned([...tale.judged.values()]);
    const x = points.map((each) => each.position);
    const of = (name) => points.map((each) => each[name]);
    const any = (name) => points.some((each) => each[name] !== null);
    const traces = [
      line({ x, y: of("credit"), name: "credit", line: { color: color.agreed, width: 2 } }),
      line({ x, y: of("threshold"), name: "threshold", visible: any("threshold"),
        line: { color: color.corrected, dash: "dash", width: 1.5 } }),
      { x, y: of("js"), visible: any("js"), name: "JS", mode: "markers", type: "scatter",
        marker: { size: 4, color: points.map((each) => (each.accepted ? color.tolerated : color.corrected)),
          symbol: points.map((each) => (each.accepted ? "circle" : "x")) } },
    ];
    const last = points.at(-1);
    const words = last ? `Credit ${number(last.credit)}, threshold ${number(last.threshold)} nats` : "Nothing judged yet";
    const xaxis = { title: { text: "position", standoff: 4 } };
    return { traces, layout: keyed({ xaxis, yaxis: { range: [0, 1.05] } }), words };
  },

  uplink(tale, color) {
    const points = thinned(tale.uplink);
    const bytes = points.map((each) => each.bytes);
    const shape = { color: color.drafted, width: 2, shape: "hv" };
    const traces = [line({ x: points.map((each) => each.ms / 1000), y: bytes, name: "bytes", line: shape })];
    const words = points.length ? `${bytes.at(-1)} bytes went up` : "Nothing sent yet";
    return { traces, layout: { height: 120, xaxis: seconds(), yaxis: { rangemode: "tozero", ticksuffix: " B" } }, words };
  },
};

const line = (trace) => ({ type: "scatter", mode: "lines", ...trace });
const number = (value) => (value === null ? "none" : value.toFixed(2));
const seconds = () => ({ title: { text: "seconds", standoff: 4 }, rangemode: "tozero" });
const keyed = (layout) => ({
  ...layout, showlegend: true, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
  margin: { l: 44, r: 8, t: 22, b: 30 },
});

/** Not more points than can be told apart, the last one included. */
function thinned(points) {
  const step = Math.ceil(points.length / MOST_POINTS);
  return step < 2 ? points : points.filter((_, i) => (points.length - 1 - i) % step === 0);
}
