"use strict";
// The report's script. Everything that comes from a run's folder is in DATA, and reaches the page as text only.
const $ = (id) => document.getElementById(id);
/** On a page of several parts: show the one that the address names, in place of what stands before them. */
function part() {
  const asked = /^#runs=/.test(location.hash) && $(location.hash.slice(1));
  if (asked) {
    $("shown").replaceChildren(asked.content.cloneNode(true));
    $("front").hidden = true;
  }
  for (const link of document.querySelectorAll(".parts a")) {
    if (link.hash === (asked ? location.hash : "#front")) link.setAttribute("aria-current", "page");
    link.addEventListener("click", () => { if (link.hash === location.hash) scrollTo(0, 0); });
  }
  addEventListener("hashchange", () => { if (/^(|#front|#runs=.*)$/.test(location.hash)) location.reload(); });
  return $("data") ? JSON.parse($("data").textContent) : { clients: { names: [] }, methods: [], order: [], main: 0 };
}
const DATA = part();
const NAMES = DATA.clients.names, N = NAMES.length;
// Okabe and Ito's colours, the order of which every common colour blindness can tell apart; brighter on a dark page.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#777777", "#b8a200"];
const BRIGHT = ["#56b4e9", "#f0883e", "#2fc79b", "#e3a2c6", "#3f8fd0", "#f2b53a", "#a8a8a8", "#d6c53a"];
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
const dark = matchMedia("screen and (prefers-color-scheme: dark)");
const hue = (k) => (dark.matches ? BRIGHT : LIGHT)[k % LIGHT.length];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- words and numbers ----

/** A score as a person reads it. */
function score(value) {
  if (value === null || value === undefined) return "–";
  return DATA.percent ? (100 * value).toFixed(1) + " %" : Number(value.toPrecision(4)).toString();
}
/** A difference of scores, with its sign; positive is better. */
function difference(value) {
  if (value === null || value === undefined) return "–";
  const shown = DATA.percent ? (100 * value).toFixed(1) : Number(value.toPrecision(3)).toString();
  return (value > 0 ? "+" : "") + shown.replace("-", "−");
}
const metric = DATA.word ?? "", unit = DATA.percent ? "points" : metric;
const weight = (w) => (w === 0 ? "0" : w >= 0.001 ? w.toPrecision(3) : w.toExponential(1));
const several = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

/** An element with text and attributes; never markup. */
function make(tag, text = "", attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "circle", "rect", "text", "title", "g", "polygon"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  if (text !== "") node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// ---- relations ----

const TYPES = { starts: Uint32Array, to: Uint16Array, weights: Float32Array, own: Float32Array };
/** A frame with its numbers unpacked, and the links of each client in both directions. */
function unpack(frame) {
  if (frame.ready) return frame;
  for (const [key, kind] of Object.entries(TYPES)) {
    frame[key] = new kind(Uint8Array.from(atob(frame[key]), (c) => c.charCodeAt(0)).buffer);
  }
  frame.sorted = frame.weights.slice().sort();
  frame.ready = true;
  return frame;
}
/** Whom a client learns from: [other, weight], strongest first. */
function hears(frame, i) {
  const links = [];
  for (let e = frame.starts[i]; e < frame.starts[i + 1]; e++) links.push([frame.to[e], frame.weights[e]]);
  return links.sort((a, b) => b[1] - a[1]);
}
/** Who learns from a client. */
function heard(frame, j) {
  const links = [];
  for (let i = 0; i < N; i++) {
    for (let e = frame.starts[i]; e < frame.starts[i + 1]; e++) if (frame.to[e] === j) links.push([i, frame.weights[e]]);
  }
  return links.sort((a, b) => b[1] - a[1]);
}

const state = { method: DATA.main, layer: 0, round: 0, threshold: 0, client: null, hover: null, colour: "", place: "force", zoom: 1, dx: 0, dy: 0 };
const WHOLE = 200;  // clients up to which every link is in the page
const method = () => DATA.methods[state.method];
const frame = () => (method().frames ? unpack(method().frames[state.round][state.layer]) : null);

/** The links that are drawn: those at or above the threshold. */
function visible() {
  const f = frame(), links = [];
  if (!f) return links;
  for (let i = 0; i < N; i++) {
    for (let e = f.starts[i]; e < f.starts[i + 1]; e++) {
      if (f.weights[e] >= state.threshold) links.push([i, f.to[e], f.weights[e]]);
    }
  }
  return links;
}
/** The weight at a share of the selected round's weights; so a weight is kept while rounds play. */
function atQuantile(share) {
  const m = method(), f = unpack(m.frames[m.at.selected][state.layer]);
  if (!f.sorted.length) return 0;
  return f.sorted[Math.min(f.sorted.length - 1, Math.floor(share * f.sorted.length))];
}

// ---- places ----

const place = { x: new Float32Array(N), y: new Float32Array(N), left: 0 };

function onCircle() {
  DATA.order.forEach((i, k) => {
    const angle = (2 * Math.PI * k) / N;
    place.x[i] = Math.cos(angle);
    place.y[i] = Math.sin(angle);
  });
}
function onMap() {
  const at = DATA.clients.places, middle = at.reduce((sum, p) => sum + p[0], 0) / N;
  for (let i = 0; i < N; i++) {
    place.x[i] = at[i][1] * Math.cos((middle * Math.PI) / 180);
    place.y[i] = -at[i][0];
  }
}
/** Springs along the strongest links of the selected round; a few steps of a force layout, the same every time. */
function springs() {
  const m = method();
  if (!m.frames) return [];
  const f = unpack(m.frames[m.at.selected][0]), links = [];
  const most = Math.max(3, Math.min(8, Math.round(N / 6)));
  for (let i = 0; i < N; i++) {
    const strongest = hears(f, i).slice(0, most);
    for (const [j, w] of strongest) links.push([i, j, strongest[0][1] > 0 ? w / strongest[0][1] : 0]);
  }
  return links;
}
function layOut(steps) {
  const links = springs(), k = Math.sqrt(4 / N), cells = Math.max(1, Math.min(40, Math.floor(Math.sqrt(N / 3))));
  const dx = new Float32Array(N), dy = new Float32Array(N);
  for (let step = 0; step < steps; step++) {
    const heat = 0.12 * (1 - step / steps) + 0.002;
    dx.fill(0);
    dy.fill(0);
    repel(dx, dy, k, cells);
    for (const [i, j, w] of links) {
      const x = place.x[i] - place.x[j], y = place.y[i] - place.y[j], pull = (w * Math.hypot(x, y)) / k / 2;
      dx[i] -= x * pull; dy[i] -= y * pull;
      dx[j] += x * pull; dy[j] += y * pull;
    }
    for (let i = 0; i < N; i++) {
      dx[i] -= place.x[i] * 0.6; dy[i] -= place.y[i] * 0.6;
      const length = Math.hypot(dx[i], dy[i]) || 1, move = Math.min(length * 0.05, heat);
      place.x[i] += (dx[i] / length) * move;
      place.y[i] += (dy[i] / length) * move;
    }
  }
}
/** Every client pushes the others away: near ones one by one, those of a far cell of a grid together. */
function repel(dx, dy, k, cells) {
  let low = Infinity, high = -Infinity;
  for (let i = 0; i < N; i++) {
    low = Math.min(low, place.x[i], place.y[i]);
    high = Math.max(high, place.x[i], place.y[i]);
  }
  const size = (high - low) / cells || 1;
  const of = (v) => Math.min(cells - 1, Math.floor((v - low) / size));
  const members = Array.from({ length: cells * cells }, () => []);
  for (let i = 0; i < N; i++) members[of(place.y[i]) * cells + of(place.x[i])].push(i);
  const full = members.flatMap((own, c) => {
    if (!own.length) return [];
    let x = 0, y = 0;
    for (const i of own) { x += place.x[i]; y += place.y[i]; }
    return [{ own, row: Math.floor(c / cells), column: c % cells, x: x / own.length, y: y / own.length }];
  });
  const push = (i, x, y, many) => {
    const ax = place.x[i] - x, ay = place.y[i] - y, square = ax * ax + ay * ay + 1e-5;
    dx[i] += (many * k * k * ax) / square;
    dy[i] += (many * k * k * ay) / square;
  };
  for (const one of full) {
    for (const other of full) {
      const near = Math.abs(one.row - other.row) < 2 && Math.abs(one.column - other.column) < 2;
      for (const i of one.own) {
        if (near) { for (const j of other.own) if (j !== i) push(i, place.x[j], place.y[j], 1); }
        else push(i, other.x, other.y, other.own.length);
      }
    }
  }
}

// ---- colours ----

const RAMP = [[228, 236, 242], [158, 199, 224], [77, 148, 196], [20, 96, 152], [7, 48, 89]];
const GLOW = [[32, 40, 47], [28, 72, 106], [38, 122, 171], [96, 181, 226], [205, 235, 255]];
/** A colour from faint to strong, at a share from 0 to 1. */
function shade(share) {
  const ramp = dark.matches ? GLOW : RAMP, at = Math.max(0, Math.min(1, share)) * (ramp.length - 1), i = Math.min(ramp.length - 2, Math.floor(at));
  return `rgb(${ramp[i].map((c, k) => Math.round(c + (ramp[i + 1][k] - c) * (at - i))).join()})`;
}
/** From worse (orange) over none (grey) to better (blue). */
function twoSided(share) {
  const ends = share < 0 ? [230, 110, 20] : dark.matches ? [86, 180, 233] : [0, 114, 178];
  const size = Math.min(1, Math.abs(share)), none = dark.matches ? [70, 76, 82] : [205, 208, 210];
  return `rgb(${none.map((c, k) => Math.round(c + (ends[k] - c) * size)).join()})`;
}
function colourings() {
  const found = [];
  const named = (key, label, labels) => {
    const every = [...new Set(labels)].sort((a, b) => a - b);
    const index = new Map(every.map((one, k) => [one, k]));
    found.push({ key, label, of: (i) => hue(index.get(labels[i])), text: (i) => `${label.toLowerCase()} ${labels[i]}`,
      keys: every.slice(0, 12).map((one, k) => [hue(k), `${label.toLowerCase()} ${one}`]), more: every.length - 12 });
  };
  if (DATA.clients.groups) named("group", "Group", DATA.clients.groups);
  if (method().clusters) named("cluster", "Cluster", method().clusters);
  const gain = method().gain.alone;
  if (gain) {
    const sizes = gain.map((g) => Math.abs(g ?? 0)).sort((a, b) => a - b), most = sizes[Math.floor(0.9 * (N - 1))] || sizes[N - 1] || 1;
    found.push({ key: "gain", label: "Gain over the best baseline without others", of: (i) => twoSided((gain[i] ?? 0) / most), text: (i) => `${difference(gain[i])} ${unit} over ${DATA.baseline}`,
      keys: [-1, 0, 1].map((s) => [twoSided(s), s ? `${difference(s * most)} ${unit} or ${s < 0 ? "less" : "more"}` : "0"]) });
  }
  const scores = method().scores, known = scores.filter((s) => s !== null), low = Math.min(...known), high = Math.max(...known);
  found.push({ key: "score", label: `Test ${metric}`, of: (i) => shade(0.1 + 0.9 * ((scores[i] ?? low) - low) / (high - low || 1)),
    text: (i) => score(scores[i]), keys: [0, 0.5, 1].map((s) => [shade(0.1 + 0.9 * s), score(low + s * (high - low))]) });
  return found;
}
let colour = null;

// ---- drawing ----

/** A canvas for the screen's pixels, cleared: its context, width and height. */
function canvas(id, ratio) {
  const node = $(id), width = node.clientWidth || 500, height = Math.round(width * ratio), dense = window.devicePixelRatio || 1;
  if (node.width !== Math.round(width * dense) || node.height !== Math.round(height * dense)) {
    node.width = Math.round(width * dense);
    node.height = Math.round(height * dense);
    node.style.height = `${height}px`;
  }
  const pen = node.getContext("2d");
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width, height];
}
let spots = [];  // where each client is drawn
function drawNet(links) {
  const [pen, width, height] = canvas("net", 0.86);
  let l = Infinity, r = -Infinity, t = Infinity, b = -Infinity;
  for (let i = 0; i < N; i++) {
    l = Math.min(l, place.x[i]); r = Math.max(r, place.x[i]); t = Math.min(t, place.y[i]); b = Math.max(b, place.y[i]);
  }
  const edge = 28, fit = Math.min((width - 2 * edge) / (r - l || 1), (height - 2 * edge) / (b - t || 1));
  const size = Math.max(2.2, Math.min(13, 70 / Math.sqrt(N))) * (state.place === "map" ? 0.7 : 1);
  spots = Array.from({ length: N }, (_, i) => [
    width / 2 + (place.x[i] - (l + r) / 2) * fit, height / 2 + (place.y[i] - (t + b) / 2) * fit, size]);
  if (N <= WHOLE) apart();
  for (const spot of spots) {
    spot[0] = width / 2 + (spot[0] - width / 2) * state.zoom + state.dx;
    spot[1] = height / 2 + (spot[1] - height / 2) * state.zoom + state.dy;
  }
  const top = links.reduce((most, e) => Math.max(most, e[2]), 0) || 1, chosen = state.client;
  const faint = Math.min(0.9, 0.05 + 90 / (links.length + 60)), ink = css("--soft");
  pen.lineCap = "round";
  for (const [i, j, w] of links) {
    if (chosen !== null && (i === chosen || j === chosen)) continue;
    pen.globalAlpha = faint * (chosen === null ? 0.35 + 0.65 * (w / top) : 0.35);
    pen.strokeStyle = ink;
    pen.lineWidth = 0.5 + 1.8 * (w / top);
    line(pen, spots[j], spots[i]);
  }
  if (chosen !== null) {
    for (const [i, j, w] of links) {
      if (i !== chosen && j !== chosen) continue;
      pen.globalAlpha = 0.9;
      pen.strokeStyle = i === chosen ? css("--accent") : css("--lose");
      pen.setLineDash(i === chosen ? [] : [4, 4]);
      pen.lineWidth = 1 + 3 * (w / top);
      line(pen, spots[j], spots[i]);
    }
    pen.setLineDash([]);
  }
  pen.globalAlpha = 1;
  for (let i = 0; i < N; i++) dot(pen, i);
  for (const i of [state.hover, chosen]) if (i !== null) dot(pen, i);
}
/** Move dots that cover each other a little apart. */
function apart() {
  for (let round = 0; round < 40; round++) {
    let moved = false;
    for (let i = 0; i < N; i++) {
      for (let j = 0; j < i; j++) {
        const x = spots[i][0] - spots[j][0], y = spots[i][1] - spots[j][1], gap = 2.15 * spots[i][2], length = Math.hypot(x, y) || 0.01;
        if (length >= gap) continue;
        const by = (gap - length) / 2 / length, ax = (x || 0.01) * by, ay = y * by;
        spots[i][0] += ax; spots[i][1] += ay;
        spots[j][0] -= ax; spots[j][1] -= ay;
        moved = true;
      }
    }
    if (!moved) return;
  }
}
/** A link to the client that learns, from the one that it learns from, a little bent, so that both directions are seen. */
function line(pen, from, to) {
  const x = (from[0] + to[0]) / 2 + (to[1] - from[1]) * 0.1, y = (from[1] + to[1]) / 2 - (to[0] - from[0]) * 0.1;
  pen.beginPath();
  pen.moveTo(from[0], from[1]);
  pen.quadraticCurveTo(x, y, to[0], to[1]);
  pen.stroke();
}
function dot(pen, i) {
  const [x, y, size] = spots[i], chosen = i === state.client || i === state.hover, radius = chosen ? Math.max(size + 2, 7) : size;
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fillStyle = colour.of(i);
  pen.fill();
  pen.lineWidth = chosen ? 2.5 : Math.min(1.5, size / 3);
  pen.strokeStyle = chosen ? css("--ink") : css("--paper");
  pen.stroke();
  const name = NAMES[i].length > 14 ? `${NAMES[i].slice(0, 12)}…` : NAMES[i];
  if (N <= 40 && name.length <= 2 && size >= 9) {
    pen.fillStyle = light(colour.of(i)) ? "#14181c" : "#ffffff";
    pen.font = `600 ${Math.round(size)}px system-ui, sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(name, x, y + 0.5);
  } else if (chosen) {
    label(pen, name, x, y, radius);
  }
}
function label(pen, name, x, y, radius) {
  pen.font = "600 13px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "bottom";
  pen.lineWidth = 4;
  pen.strokeStyle = css("--paper");
  pen.strokeText(name, x, Math.max(18, y - radius - 4));
  pen.fillStyle = css("--ink");
  pen.fillText(name, x, Math.max(18, y - radius - 4));
}
/** Whether dark letters read better on a colour than white ones. */
function light(text) {
  const [r, g, b] = text[0] === "#" ? [1, 3, 5].map((k) => parseInt(text.slice(k, k + 2), 16)) : text.match(/\d+/g).map(Number);
  return 0.3 * r + 0.59 * g + 0.11 * b > 150;
}

const rank = new Array(N);
DATA.order.forEach((i, k) => { rank[i] = k; });
let grid = null;  // where the heat map lies
function drawHeat() {
  const f = frame();
  $("heat").parentNode.hidden = !f;
  $("net").parentNode.hidden = $("colour-box").hidden = !f && !DATA.clients.places && !method().clusters;
  document.querySelector(".views").classList.toggle("alone", !f);
  if (!f) return;
  const [pen, width, height] = canvas("heat", 0.96);
  const longest = Math.max(...NAMES.map((n) => Math.min(8, n.length))), side = Math.min(width, height) - 4;
  const named = (side - 12 - 7 * longest) / N >= 8;  // pixels that a name needs
  const margin = named ? 12 + 7 * longest : 8, cell = (side - margin) / N;
  const low = f.sorted[0] ?? 0, high = f.sorted[f.sorted.length - 1] ?? 1, whole = f.weights.length === N * (N - 1), floor = whole ? low : 0;
  grid = { margin, cell };
  pen.fillStyle = shade(0);
  pen.fillRect(margin, margin, cell * N, cell * N);
  for (let i = 0; i < N; i++) {
    for (let e = f.starts[i]; e < f.starts[i + 1]; e++) {
      pen.fillStyle = shade((f.weights[e] - floor) / (high - floor || 1));
      pen.fillRect(margin + rank[f.to[e]] * cell, margin + rank[i] * cell, Math.max(1, cell * 0.99), Math.max(1, cell * 0.99));
    }
    pen.fillStyle = css("--noise");
    pen.fillRect(margin + rank[i] * cell, margin + rank[i] * cell, Math.max(1, cell * 0.99), Math.max(1, cell * 0.99));
  }
  pen.font = `${Math.min(11, Math.floor(cell))}px system-ui, sans-serif`;
  pen.fillStyle = css("--soft");
  for (let k = 0; named && k < N; k++) axisName(pen, k, longest);
  borders(pen);
  for (const i of [state.hover, state.client]) if (i !== null) frameRow(pen, i);
  const scale = whole ? `from ${weight(low)} (faint) to ${weight(high)} (strong)` : `from 0 (faint) to ${weight(high)} (strong)`;
  const own = f.own.slice().sort();
  $("scale").textContent = `Weights ${scale}; own weights, ${own[0] === own[N - 1] ? weight(own[0]) : `${weight(own[0])} to ${weight(own[N - 1])}`}, are grey.`;
}
function axisName(pen, k, longest) {
  const { margin, cell } = grid, full = NAMES[DATA.order[k]], name = full.length > 8 ? `${full.slice(0, 7)}…` : full, at = margin + (k + 0.5) * cell;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  pen.fillText(name, margin - 6, at);
  pen.save();
  pen.translate(at, margin - 6);
  pen.textAlign = longest > 2 ? "left" : "center";
  if (longest > 2) pen.rotate(-Math.PI / 2);
  pen.fillText(name, 0, 0);
  pen.restore();
}
/** Lines between groups. */
function borders(pen) {
  const groups = DATA.clients.groups, { margin, cell } = grid;
  pen.fillStyle = css("--paper");
  for (let k = 1; groups && k < N; k++) {
    if (groups[DATA.order[k]] === groups[DATA.order[k - 1]]) continue;
    pen.fillRect(margin + k * cell - 1.5, margin, 2, cell * N);
    pen.fillRect(margin, margin + k * cell - 1.5, cell * N, 2);
  }
}
function frameRow(pen, i) {
  const { margin, cell } = grid;
  pen.strokeStyle = css("--lose");
  pen.lineWidth = 2;
  pen.strokeRect(margin, margin + rank[i] * cell - 1, cell * N, Math.max(3, cell + 1));
}

let waiting = false;
/** Draw again with the next frame of the screen. */
function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    const links = visible();
    drawNet(links);
    drawHeat();
    document.body.dataset.drawn = "yes";
    const f = frame();
    $("links").textContent = f ? `${links.length.toLocaleString("en")} of ${several(f.weights.length, "link")} shown. ${
      state.client === null ? "Choose a client to see whom it learns from." : "Solid: whom it learns from. Dashed: who learns from it."}` : "";
  });
}

// ---- the controls ----

function options(select, labels) {
  select.replaceChildren(...labels.map(([value, label]) => make("option", label, { value })));
}
function setMethod(index) {
  state.method = index;
  const m = method();
  state.layer = 0;
  options($("layer"), (m.layers ?? []).map((name, k) => [k, name]));
  $("layer-box").hidden = !m.frames || m.layers.length < 2;
  $("round-box").hidden = $("play").hidden = !m.frames || m.frames.length < 2;
  $("threshold-box").hidden = !m.frames;
  $("instead").hidden = !m.instead && !alike();
  $("instead").textContent = m.instead ?? (alike() ? `${m.label}: every client learns from all others with the same weight.` : "");
  showColumns();
  if (m.frames) {
    $("round").max = m.frames.length - 1;
    state.round = m.at.selected;
    setThreshold(startingShare());
  }
  const known = colourings();
  options($("colour"), known.map((one) => [one.key, one.label]));
  setColour(known.some((one) => one.key === state.colour) ? state.colour : known[0].key);
  setRound(state.round);
  if (state.place === "force") { onCircle(); settle(); }
  showPanel();
}
/** What is said of each client's columns, by the kind of model: see `_show_columns`. */
const COLUMNS = {
  own: {
    title: "Whose rows make its model", first: "Own rows",
    hint: "Each number is the weight of a client's own rows in a column: 1 is a coefficient of its own, 0 is the mean of all clients'. A column with several coefficients, such as a category or a curve, has their mean.",
  },
  trees: {
    title: "Which columns move its answers", first: "Its trees",
    hint: "Each number is a column's share of the variance that the splits of a client's trees make. A split counts as if it sent half of what reaches it either way.",
  },
};
/** A number for each client and column: a table of shaded cells, clients in the order of the graph. */
function showColumns() {
  const columns = method().columns, most = 300;
  $("columns").hidden = !columns;
  $("hover").hidden = $("links").hidden = !method().frames;
  if (!columns) return;
  columns.table ??= new Float32Array(Uint8Array.from(atob(columns.weights), (c) => c.charCodeAt(0)).buffer);
  const { title, hint } = COLUMNS[columns.kind];
  const shown = table(["Client", ...columns.names], DATA.order.slice(0, most).map((i) => [nameButton(i), ...columnCells(columns, i)]), title);
  $("columns").replaceChildren(make("p", `${hint}${
    N > most ? ` The first ${most} of ${N.toLocaleString("en")} clients are shown.` : ""}`, { class: "hint" }), make("div", "", { class: "wide tall" }, shown));
}
/** One client's numbers, shaded; nothing of a client whose model has none. */
function columnCells(columns, i) {
  return columns.names.map((_, c) => {
    const value = columns.table[i * columns.names.length + c];
    if (Number.isNaN(value)) return "";
    const fill = shade(value), cell = make("span", value.toFixed(2), { class: "cell" });
    cell.style.background = fill;
    cell.style.color = light(fill) ? "#14181c" : "#ffffff";
    return cell;
  });
}
/** The same of one client, beside the mean of all. */
function columnTable(columns, i) {
  const { title, first } = COLUMNS[columns.kind], cells = columnCells(columns, i), { mean, names } = columns;
  const rest = (c) => (mean ? mean[c] : 1 - columns.table[i * names.length + c]).toFixed(2);
  return make("div", "", {}, make("h4", title), table(["Column", first, "Mean of all"], names.map((name, c) => [name, cells[c], rest(c)]), title));
}
/** Whether all links have the same weight. */
function alike() {
  if (!method().frames) return false;
  const f = unpack(method().frames[method().at.selected][0]), s = f.sorted;
  return s.length === N * (N - 1) && N > 2 && s[s.length - 1] - s[0] < 1e-6 * Math.abs(s[s.length - 1]);
}
/** A threshold that leaves about three links a client. */
function startingShare() {
  const f = unpack(method().frames[method().at.selected][state.layer]);
  return alike() ? 0 : Math.max(0, 1 - (3 * N) / Math.max(1, f.weights.length));
}
function setThreshold(share) {
  $("threshold").value = 100 * share;
  state.threshold = atQuantile(share);
  $("threshold-value").textContent = weight(state.threshold);
  draw();
}
function setRound(k) {
  const m = method();
  if (m.frames) {
    state.round = k;
    $("round").value = k;
    $("round-value").textContent = `${m.at.rounds[k]}${k === m.at.selected ? ", selected by validation" : ""}`;
  }
  draw();
  showPanel();
}
function setColour(key) {
  state.colour = key;
  $("colour").value = key;
  colour = colourings().find((one) => one.key === key);
  $("legend").replaceChildren(...colour.keys.map(([fill, text]) => make("span", "", { class: "key" },
    make("svg", "", { width: 12, height: 12 }, make("circle", "", { cx: 6, cy: 6, r: 6, fill, class: "swatch" })), text)));
  for (const [k, one] of colour.keys.entries()) $("legend").children[k].querySelector("circle").style.fill = one[0];
  if (colour.more > 0) $("legend").append(make("span", `and ${colour.more} more`));
  draw();
}
/** Let the force layout run, a little in every frame of the screen. */
function settle() {
  const pieces = N > 600 ? 10 : 20, steps = N > 600 ? 60 : 260;
  if (still || N <= 300) { layOut(steps); draw(); return; }
  let done = 0;
  const go = () => {
    layOut(Math.ceil(steps / pieces));
    draw();
    if (++done < pieces && state.place === "force") setTimeout(go, 30);
  };
  go();
}
let player = null;
function play() {
  const on = player === null;
  $("play").setAttribute("aria-pressed", on);
  $("play").textContent = on ? "Stop" : "Play";
  if (!on) { clearInterval(player); player = null; return; }
  if (state.round === method().frames.length - 1) setRound(0);
  player = setInterval(() => {
    if (state.round + 1 >= method().frames.length) { play(); return; }
    setRound(state.round + 1);
  }, 450);
}

// ---- one client ----

function choose(i) {
  state.client = i;
  $("client").value = i === null ? "" : NAMES[i];
  showPanel();
  draw();
}
function nameButton(i) {
  const button = make("button", NAMES[i], { type: "button", class: "plain" });
  button.addEventListener("click", () => choose(i));
  return button;
}
function table(headings, rows, caption) {
  const head = make("tr", "", {}, ...headings.map((h) => make("th", h, { scope: "col" })));
  const body = rows.map((row) => make("tr", "", {}, ...row.map((cell) => (cell instanceof Node ? make("td", "", {}, cell) : make("td", cell)))));
  return make("table", "", { "aria-label": caption }, make("thead", "", {}, head), make("tbody", "", {}, ...body));
}
/** How alike the labels of two clients are: the share that they have in common. */
function overlap(i, j) {
  const counts = DATA.clients.counts;
  if (!counts) return null;
  const a = counts[i], b = counts[j], sums = [a, b].map((row) => row.reduce((s, v) => s + v, 0));
  return a.reduce((s, v, c) => s + Math.min(v / sums[0], b[c] / sums[1]), 0);
}
/** Kilometres between two clients on the map. */
function distance(i, j) {
  const at = DATA.clients.places, turn = Math.PI / 180;
  const [a, b] = [at[i], at[j]].map(([lat, lon]) => [lat * turn, lon * turn]);
  const h = Math.sin((b[0] - a[0]) / 2) ** 2 + Math.cos(a[0]) * Math.cos(b[0]) * Math.sin((b[1] - a[1]) / 2) ** 2;
  return 12742 * Math.asin(Math.sqrt(h));
}
/** What the method compared, of the client that learns and the one that it learns from. */
function likeness(seen, i, j) {
  seen.table ??= new Float32Array(Uint8Array.from(atob(seen.values), (c) => c.charCodeAt(0)).buffer);
  const value = seen.table[i * N + j];
  return Number.isFinite(value) ? Number(value.toPrecision(3)).toString().replace("-", "\u2212") : "\u2013";
}
function linkTable(title, links, i, nobody, theyHear = false) {
  const box = make("div", "", {}, make("h4", title));
  if (!links.length) { box.append(make("p", nobody, { class: "hint" })); return box; }
  const groups = DATA.clients.groups, headings = ["Client", "Weight"], most = 8, seen = method().compared;
  if (seen) headings.push("Compared"); // what it is stands below, as it may be long
  if (DATA.clients.counts) headings.push("Label overlap");
  if (DATA.clients.places) headings.push("Distance");
  if (groups) headings.push("Group");
  box.append(table(headings, links.slice(0, most).map(([j, w]) => {
    const row = [nameButton(j), weight(w)];
    if (seen) row.push(likeness(seen, theyHear ? j : i, theyHear ? i : j));
    if (DATA.clients.counts) row.push(`${Math.round(100 * overlap(i, j))} %`);
    if (DATA.clients.places) row.push(`${distance(i, j).toFixed(1)} km`);
    if (groups) row.push(groups[j] === groups[i] ? `${groups[j]} (same)` : String(groups[j]));
    return row;
  }), title));
  if (links.length > most) box.append(make("p", `and ${links.length - most} weaker`, { class: "hint more" }));
  return box;
}
/** Helped or hurt, by how much, and how sure, in a sentence. */
function judged(m, i) {
  const gain = m.gain.alone?.[i];
  if (DATA.clients.attackers.includes(NAMES[i])) return ["This client attacks; its score does not count.", ""];
  if (gain === undefined || gain === null) {
    return [m.method === "local" ? "Its own model, trained alone." : "No baseline is among the runs, so nobody can say whether it was helped.", ""];
  }
  const side = m.side?.[i], seen = m.examples.alone?.[i];
  const words = { gain: "Helped", lose: "Hurt" }[side] ?? (gain > 0 ? "Better, but undecided" : gain < 0 ? "Worse, but undecided" : "As good as alone");
  const sure = seen ? ` Of its test examples ${seen[0]} are better, ${seen[1]} worse, ${seen[2]} the same (p = ${
    seen[3] < 0.001 ? seen[3].toExponential(0) : seen[3].toPrecision(2)} before correction for all clients).` : "";
  const much = DATA.higher ? `${difference(gain)} ${unit} over ${DATA.baseline}` : `its ${metric} is ${score(Math.abs(gain))} ${gain < 0 ? "higher" : "lower"} than with ${DATA.baseline}`;
  return [`${words}: ${much}.${sure}`, side];
}
function showPanel() {
  const i = state.client, m = method();
  if (i === null) {
    $("panel").replaceChildren(make("header", "", {}, make("p", "No client chosen. Click one in the graph, the heat map or the list, or type its name.")));
    return;
  }
  const [text, side] = judged(m, i);
  const facts = [];
  if (DATA.clients.groups) facts.push(`group ${DATA.clients.groups[i]}`);
  if (DATA.clients.train) facts.push(`${several(DATA.clients.train[i], "training example")}, ${DATA.clients.validation[i]} validation, ${DATA.clients.test[i]} test`);
  const head = make("header", "", {}, make("h3", `Client ${NAMES[i]}`), make("p", text, { class: side === "gain" || side === "lose" ? side : "" }));
  if (facts.length) head.append(make("p", facts.join("; "), { class: "hint" }));
  const parts = [head], f = frame();
  if (f) {
    const sparse = f.weights.length < N * (N - 1) && N > 200;
    parts.push(linkTable("Learns from", hears(f, i), i, "It learns from nobody else."));
    parts.push(linkTable(sparse ? "Learn from it, by their strongest links" : "Learn from it", heard(f, i), i, "Nobody learns from it.", true));
    parts[1].append(make("p", `its own model: ${weight(f.own[i])}; round ${m.at.rounds[state.round]}, ${m.layers[state.layer]}, seed ${m.seed}`, { class: "hint more" }),
      ...(m.why ? [make("p", m.why, { class: "hint more" })] : []));
  }
  if (m.columns) parts.push(columnTable(m.columns, i));
  const stack = make("div", "", { class: "stack" }, scoreTable(i), clientCurves(i));
  if (DATA.clients.counts) stack.append(classBars(i));
  parts.push(stack);
  $("panel").replaceChildren(...parts);
}
function scoreTable(i) {
  const rows = DATA.methods.map((m) => {
    const exact = m.scores[i], shown = make("span", score(exact), exact === null ? {} : { title: `${exact} in history.csv` });
    return [m.label, shown, m.gain.alone ? difference(m.gain.alone[i]) : ""];
  });
  const box = make("div", "", {}, make("h4", `Test ${metric}`), table(["Method", "Score", `Over ${DATA.baseline || "the baseline"}`], rows, "Its scores"));
  if (DATA.methods.some((m) => m.seeds.length > 1)) box.append(make("p", "means over seeds", { class: "hint more" }));
  return box;
}
function clientCurves(i) {
  const series = DATA.methods.map((m, k) => ({ label: m.label, index: k, x: m.thinned, y: m.curves[DATA.metric]?.clients.map((row) => row[i]), best: m.best[0] }))
    .filter((s) => s.y);
  return make("div", "", {}, make("h4", "Round by round"), chart(series, DATA.metric, 230));
}
function classBars(i) {
  const counts = DATA.clients.counts[i], most = Math.max(...counts, 1), width = 360, step = width / counts.length;
  const bars = counts.map((n, c) => make("rect", "", { x: c * step + step * 0.1, y: 70 - (66 * n) / most, width: step * 0.8, height: Math.max(n ? 1 : 0, (66 * n) / most), fill: css("--accent") },
    make("title", `${DATA.clients.classes[c]}: ${n}`)));
  const every = Math.ceil(counts.length / 12);
  const names = counts.map((_, c) => (c % every ? null : make("text", short(String(DATA.clients.classes[c]), 5), { x: (c + 0.5) * step, y: 86, "text-anchor": "middle" }))).filter(Boolean);
  return make("div", "", { class: "chart" }, make("h4", "Its data: examples by class"),
    make("svg", "", { viewBox: `0 0 ${width} 92`, role: "img", "aria-label": counts.map((n, c) => `${DATA.clients.classes[c]}: ${n}`).join(", ") }, ...bars, ...names));
}
const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// ---- charts ----

/** Round marks between two numbers. */
function marks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((s) => s * power >= raw);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) found.push(Number(v.toPrecision(10)));
  return found;
}
/** Lines over rounds, with bands; each named at its end, where the names do not overlap. */
function chart(series, what, height) {
  const percent = what === DATA.metric && DATA.percent, times = percent ? 100 : 1, width = 480, left = 44, right = 98, bottom = height - 26;
  const every = series.flatMap((s) => [...s.y, ...(s.low ?? []), ...(s.high ?? [])]).filter((v) => v !== null && isFinite(v)).map((v) => v * times);
  if (!every.length) return make("p", "no scores", { class: "hint" });
  const rounds = series.flatMap((s) => s.x), first = Math.min(...rounds), last = Math.max(...rounds);
  let low = Math.min(...every), high = Math.max(...every);
  if (high === low) { low -= 0.5; high += 0.5; }
  const x = (r) => left + ((r - first) / (last - first || 1)) * (width - left - right), y = (v) => 10 + ((high - v * times) / (high - low)) * (bottom - 14);
  const svg = make("svg", "", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${what.replace(/_/g, " ")} by round: ${series.map((s) => s.label).join(", ")}` });
  for (const v of marks(low, high, 4)) {
    svg.append(make("line", "", { x1: left, x2: width - right, y1: y(v / times), y2: y(v / times), class: "axis" }),
      make("text", String(v), { x: left - 8, y: y(v / times) + 4, "text-anchor": "end" }));
  }
  for (const r of marks(first, last, 6)) if (Number.isInteger(r)) svg.append(make("text", String(r), { x: x(r), y: height - 4, "text-anchor": "middle" }));
  const ends = [];
  for (const s of series) {
    const fill = hue(s.index), points = s.y.map((v, k) => (v === null ? null : [x(s.x[k]), y(v)])).filter(Boolean);
    if (s.low) {
      const band = [...s.high.map((v, k) => [x(s.x[k]), y(v)]), ...s.low.map((v, k) => [x(s.x[k]), y(v)]).reverse()];
      svg.append(make("polygon", "", { points: band.map((p) => p.join()).join(" "), fill, opacity: 0.16 }));
    }
    svg.append(make("path", "", { d: points.map((p, k) => `${k ? "L" : "M"}${p[0].toFixed(1)} ${p[1].toFixed(1)}`).join(""), fill: "none", stroke: fill, "stroke-width": 2.2, "stroke-dasharray": DASHES[s.index % DASHES.length] }));
    const at = s.x.indexOf(s.best);
    if (at >= 0 && s.y[at] !== null) {
      const ring = make("circle", "", { cx: x(s.best), cy: y(s.y[at]), r: 5, stroke: fill, "stroke-width": 2 }, make("title", `${s.label}, round ${s.best}: ${s.y[at]}`));
      ring.style.fill = css("--paper");
      svg.append(ring);
    }
    if (points.length) ends.push({ y: points[points.length - 1][1], label: s.label, fill });
  }
  ends.sort((a, b) => a.y - b.y);
  ends.forEach((one, k) => { if (k) one.y = Math.max(one.y, ends[k - 1].y + 15); });
  const over = Math.max(0, (ends[ends.length - 1]?.y ?? 0) - bottom - 4);
  for (const one of ends) {
    const name = make("text", short(one.label, 14), { x: width - right + 10, y: one.y + 4 - over, class: "name" }, make("title", one.label));
    name.style.fill = one.fill;
    svg.append(name);
  }
  return svg;
}
function showCharts() {
  const kinds = [[DATA.metric, `Test ${metric}${DATA.percent ? " (%)" : ""}`], ["loss", "Test loss"]];
  $("charts").replaceChildren(...kinds.filter(([key], k) => (k === 0 || DATA.metric !== "loss") && DATA.methods.some((m) => m.curves[key])).map(([key, title]) => {
    const series = DATA.methods.map((m, k) => {
      const c = m.curves[key];
      return c && { label: m.label, index: k, x: m.rounds, y: c.mean, best: m.best[0], ...(m.seeds.length > 1 ? { low: c.low, high: c.high } : {}) };
    }).filter(Boolean);
    return make("div", "", { class: "chart" }, make("h3", title), chart(series, key, 290));
  }));
}

// ---- the ranking ----

function ranked() {
  const m = DATA.methods[DATA.main], by = m.gain.alone ?? m.scores, better = m.gain.alone || DATA.higher ? 1 : -1;
  return [...Array(N).keys()].filter((i) => by[i] !== null).sort((a, b) => better * (by[b] - by[a]) || a - b);
}
function showRanked() {
  const m = DATA.methods[DATA.main], order = ranked(), gain = m.gain.alone, most = 300, tenth = Math.max(1, Math.ceil(order.length / 10));
  const mean = (some, values) => some.reduce((s, i) => s + values[i], 0) / some.length;
  const [top, tail] = [order.slice(0, tenth), order.slice(-tenth)];
  $("ranked-hint").textContent = gain
    ? `${m.label} over ${DATA.baseline}, in ${unit}${DATA.higher ? "" : "; above zero is a smaller error"}. The tenth that gains most: ${difference(mean(top, gain))}; the tenth that gains least: ${difference(mean(tail, gain))}. Filled bars gain or lose beyond noise.`
    : `By test ${metric} of ${m.label}${m.method === "local" ? ": each client's own model, trained alone" : ", as no baseline is among the runs"}.`;
  $("clients-title").textContent = gain ? "Clients, by gain" : "Clients, by score";
  const columns = ["Client", ...(DATA.clients.groups ? ["Group"] : []), ...DATA.methods.map((one) => one.label), ...(gain ? [`Gain over ${DATA.baseline}`, "Test examples better, worse, same", "Verdict"] : [])];
  $("ranked-head").replaceChildren(make("tr", "", {}, ...columns.map((c) => make("th", c, { scope: "col" }))));
  const shown = order.length > most ? [...order.slice(0, most / 2), ...order.slice(-most / 2)] : order;
  $("ranked").replaceChildren(...shown.map((i) => {
    const cells = [nameButton(i), ...(DATA.clients.groups ? [String(DATA.clients.groups[i])] : []), ...DATA.methods.map((one) => score(one.scores[i]))];
    if (gain) {
      const seen = m.examples.alone?.[i], side = m.side?.[i];
      cells.push(make("span", difference(gain[i]), { class: side === "gain" || side === "lose" ? side : "" }));
      cells.push(seen ? seen.slice(0, 3).join(", ") : "–", { gain: "gains", lose: "loses", undecided: "undecided" }[side] ?? "–");
    }
    return make("tr", "", {}, ...cells.map((cell) => (cell instanceof Node ? make("td", "", {}, cell) : make("td", cell))));
  }));
  $("ranked-more").textContent = order.length > most ? `The ${most / 2} that gain most and the ${most / 2} that gain least, of ${order.length.toLocaleString("en")}; type a name above for any other.` : "";
  showBars(order, gain, m);
}
function showBars(order, gain, m) {
  $("bars").toggleAttribute("hidden", !gain);
  if (!gain) return;
  const width = Math.max(300, $("bars").clientWidth), height = 200, left = 46, step = (width - left) / order.length;
  const values = order.map((i) => gain[i]), high = Math.max(0, ...values), low = Math.min(0, ...values), times = DATA.percent ? 100 : 1;
  const y = (v) => 8 + ((high - v) / (high - low || 1)) * (height - 16);
  $("bars").setAttribute("viewBox", `0 0 ${width} ${height}`);
  const nodes = marks(low * times, high * times, 4).flatMap((v) => [make("line", "", { x1: left, x2: width, y1: y(v / times), y2: y(v / times), class: "axis" }),
    make("text", String(v).replace("-", "−"), { x: left - 8, y: y(v / times) + 4, "text-anchor": "end" })]);
  order.forEach((i, k) => {
    const decided = ["gain", "lose"].includes(m.side?.[i]), fill = css(gain[i] < 0 ? "--lose" : "--gain");
    const bar = make("rect", "", { x: left + k * step + step * 0.12, width: Math.max(0.6, step * 0.76), y: y(Math.max(0, gain[i])), height: Math.max(1, Math.abs(y(gain[i]) - y(0))), fill,
      "fill-opacity": decided ? 1 : 0.28, stroke: step > 4 ? fill : "none" }, make("title", `client ${NAMES[i]}: ${difference(gain[i])} ${unit}`));
    bar.addEventListener("click", () => choose(i));
    nodes.push(bar);
  });
  $("bars").replaceChildren(...nodes);
}

// ---- what people do ----

/** The client at a place of a canvas, and whom it is shown to learn from there. */
function under(event, which) {
  const box = event.target.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  if (which === "heat") {
    const [column, row] = [x, y].map((v) => Math.floor((v - grid.margin) / grid.cell));
    return row >= 0 && row < N && column < N ? [DATA.order[row], column >= 0 ? DATA.order[column] : null] : [null, null];
  }
  let best = null, near = 18 ** 2;
  spots.forEach(([sx, sy], i) => { const d = (sx - x) ** 2 + (sy - y) ** 2; if (d < near) { near = d; best = i; } });
  return [best, null];
}
function hover(event, which) {
  const [i, j] = under(event, which), f = frame();
  let text = "\u00a0";
  if (i !== null) text = `Client ${NAMES[i]}: ${colour.text(i)}, test ${metric} ${score(method().scores[i])}`;
  if (i !== null && j !== null && i !== j) {
    const link = hears(f, i).find(([other]) => other === j);
    text = `Client ${NAMES[i]} learns from client ${NAMES[j]} with weight ${link ? weight(link[1]) : N > 200 ? "below its 20 strongest" : "0"}`;
  }
  $("hover").textContent = text;
  if (state.hover !== i) { state.hover = i; draw(); }
}
function step(by) {
  const at = state.client === null ? (by > 0 ? -1 : 0) : rank[state.client];
  choose(DATA.order[(at + by + N) % N]);
}
function zoom(by) {
  state.zoom = by ? Math.max(1, Math.min(12, state.zoom * by)) : 1;
  if (state.zoom === 1) state.dx = state.dy = 0;
  draw();
}
/** Drag the graph while it is larger than its frame. */
function drag(begin) {
  if (state.zoom === 1) return;
  const from = [begin.clientX - state.dx, begin.clientY - state.dy];
  const move = (e) => { state.dx = e.clientX - from[0]; state.dy = e.clientY - from[1]; draw(); };
  addEventListener("pointermove", move);
  addEventListener("pointerup", () => removeEventListener("pointermove", move), { once: true });
}
function listen() {
  $("larger").addEventListener("click", () => zoom(1.5));
  $("smaller").addEventListener("click", () => zoom(1 / 1.5));
  $("whole").addEventListener("click", () => zoom(0));
  $("net").addEventListener("pointerdown", drag);
  $("method").addEventListener("change", (e) => setMethod(Number(e.target.value)));
  $("layer").addEventListener("change", (e) => { state.layer = Number(e.target.value); setThreshold(startingShare()); showPanel(); });
  $("colour").addEventListener("change", (e) => setColour(e.target.value));
  $("threshold").addEventListener("input", (e) => setThreshold(e.target.value / 100));
  $("round").addEventListener("input", (e) => setRound(Number(e.target.value)));
  $("play").addEventListener("click", play);
  $("controls").addEventListener("submit", (e) => e.preventDefault());
  $("place").addEventListener("change", (e) => {
    state.place = e.target.value;
    if (state.place === "map") { onMap(); draw(); } else { onCircle(); settle(); }
  });
  $("client").addEventListener("change", (e) => {
    const i = NAMES.indexOf(e.target.value.trim());
    if (i >= 0) choose(i);
  });
  for (const which of ["net", "heat"]) {
    $(which).addEventListener("mousemove", (e) => hover(e, which));
    $(which).addEventListener("mouseleave", () => { state.hover = null; $("hover").textContent = "\u00a0"; draw(); });
    $(which).addEventListener("click", (e) => choose(under(e, which)[0]));
    $(which).addEventListener("keydown", (e) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
      if (by) { e.preventDefault(); step(by); }
      if (e.key === "Escape") choose(null);
    });
  }
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", () => { setColour(state.colour); showColumns(); showRanked(); showCharts(); showPanel(); });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
  new ResizeObserver(() => { draw(); showRanked(); }).observe(document.body);
}

// ---- begin ----

function begin() {
  options($("method"), DATA.methods.map((m, k) => [k, m.label]));
  $("method").value = DATA.main;
  $("clients").replaceChildren(...NAMES.slice(0, 3000).map((name) => make("option", "", { value: name })));
  $("place-box").hidden = !DATA.clients.places;
  if (DATA.clients.places) { state.place = "map"; $("place").value = "map"; onMap(); } else { onCircle(); }
  colour = colourings()[0];
  setMethod(DATA.main);
  choose(ranked()[0] ?? 0);
  showRanked();
  showCharts();
  listen();
}
if (N) begin();
else document.body.dataset.drawn = "yes";  // a page of several parts, of which none is asked for
