/**
 * The timeline: what was under way when. On top when the edge drafted; below it each window from
 * when it was sent to its verdict, in as many rows as there were in flight at once; at the bottom
 * the tokens that the cloud wrote by itself. Bars of both kinds above each other are the overlap
 * that pipelining is about.
 */

/** What became of a window: its colour by name, its pattern, and its name. */
const FATES = {
  accepted: ["agreed", "", "accepted"],
  partly: ["tolerated", "/", "partly"],
  dropped: ["corrected", "x", "dropped"],
  flying: ["soft", ".", "in flight"],
};

const THICK = 0.85; // of a row

/**
 * @param {import("./tale.js").Tale} tale @param {[number, number]} range seconds that are shown
 * @param {Object<string, string>} color by name
 * @returns {{traces: object[], layout: object, words: string}}
 */
export function drawTimeline(tale, range, color) {
  const [from, to] = range.map((each) => each * 1000);
  const shown = tale.flights.filter((each) => each.from <= to && (each.end ?? tale.ms) >= from);
  const rows = Math.max(2, ...shown.map((each) => each.lane + 1));
  const traces = Object.entries(FATES).map(([fate, look]) => {
    const flights = shown.filter((each) => each.fate === fate);
    return bars(flights, look, color, tale.ms);
  });
  traces.unshift(drafting(shown, color));
  traces.push(fills(tale, from, to, rows + 1, color));
  const labels = { tickvals: [0, (rows + 1) / 2, rows + 1], ticktext: ["draft", "in flight", "fill"] };
  const layout = {
    height: 96 + 13 * rows,
    barmode: "overlay",
    margin: { l: 58, r: 8, t: 22, b: 30 },
    xaxis: { range, title: { text: "seconds", standoff: 4 } },
    yaxis: { range: [rows + 1.7, -0.7], showgrid: false, zeroline: false, ...labels },
    showlegend: true,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", itemwidth: 30, entrywidth: 52 },
  };
  return { traces, layout, words: words(tale) };
}

/** Windows of one fate. */
function bars(flights, [name, shape, fate], color, now) {
  const end = (flight) => flight.end ?? now;
  return {
    type: "bar",
    orientation: "h",
    width: THICK,
    name: fate,
    y: flights.map((each) => each.lane + 1),
    base: flights.map((each) => each.ms / 1000),
    x: flights.map((each) => (end(each) - each.ms) / 1000),
    marker: {
      color: color[name],
      opacity: 0.85,
      pattern: { shape, fillmode: "overlay", fgcolor: color.panel, size: 5, solidity: 0.3 },
    },
    hovertext: flights.map((each) =>
      `${each.tokens} tokens from ${each.start}<br>${fate}, ${each.kept} kept<br>${Math.round(end(each) - each.ms)} ms`),
    hoverinfo: "text",
  };
}

/** When the edge drafted what was sent. */
function drafting(flights, color) {
  return {
    type: "bar",
    orientation: "h",
    width: THICK,
    name: "drafting",
    y: flights.map(() => 0),
    base: flights.map((each) => each.from / 1000),
    x: flights.map((each) => (each.ms - each.from) / 1000),
    marker: { color: color.drafted, opacity: 0.6, line: { width: 0 } },
    hovertext: flights.map((each) => `${each.tokens} tokens drafted`),
    hoverinfo: "text",
    showlegend: false,
  };
}

/** What the cloud wrote without a draft. */
function fills(tale, from, to, row, color) {
  const shown = tale.fills.filter((each) => each.ms >= from && each.ms <= to);
  return {
    type: "scatter",
    mode: "markers",
    name: "fill",
    x: shown.map((each) => each.ms / 1000),
    y: shown.map(() => row),
    marker: { symbol: "line-ns", size: 11, line: { width: 2, color: color.filled } },
    hovertext: shown.map((each) => `${each.own} of the cloud's own`),
    hoverinfo: "text",
    showlegend: false,
  };
}

function words({ flights, fills }) {
  if (!flights.length && !fills.length) return "No windows yet";
  const counted = Object.entries(FATES)
    .map(([fate, [, , name]]) => [flights.filter((each) => each.fate === fate).length, name])
    .filter(([count]) => count)
    .map(([count, name]) => `${count} ${name}`);
  return `${flights.length} windows: ${counted.join(", ")}; ${fills.length} fills by the cloud`;
}
