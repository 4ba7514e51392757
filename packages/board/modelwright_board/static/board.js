"use strict";
// The board's only script: command lines of forms, events of the page, charts, dropped files, and the talk with models.
const one = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const CSRF = one("meta[name=csrf]").content;
const say = text => { one("#notice").textContent = text; };

// ---- forms: the command line follows the fields
async function showCommand(form) {
  const body = new URLSearchParams(new FormData(form));
  const turn = form.turn = (form.turn || 0) + 1;
  try {
    const reply = await fetch(form.dataset.command, {method: "POST", body, headers: {"X-CSRF": CSRF}});
    const {line, is_complete: isComplete} = await reply.json();
    if (turn !== form.turn) return;
    one(".command code", form).textContent = line || "";
    const button = one("button.primary", form);
    if (button) button.disabled = !isComplete;
  } catch { say("The board does not answer."); }
}
function prepareForms(root) {
  for (const form of all("form[data-command]", root)) {
    let timer = 0;
    form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => showCommand(form), 150); });
    showCommand(form);
  }
}
document.addEventListener("click", async event => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const text = one("code", button.parentElement).textContent;
  try { await navigator.clipboard.writeText(text); }
  catch { // without permission: selected, to be copied by hand
    getSelection().selectAllChildren(one("code", button.parentElement));
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

// ---- blocks: drawn by the server, exchanged as they change; what the reader has opened, checked or scrolled stays
function exchange(id, html) {
  const place = document.getElementById(id);
  if (!place || place.contains(getSelection().anchorNode) && !getSelection().isCollapsed) return;
  const active = document.activeElement && place.contains(document.activeElement) ? document.activeElement : null;
  if (active && active.matches("input:not([type=checkbox]), select, textarea")) return;
  const opened = new Map(all("details[id]", place).map(box => [box.id, box.open]));
  const checked = new Map(all("input[type=checkbox]", place).map(box => [box.name + box.value, box.checked]));
  const chosen = all("select", place).map(box => [box.id, box.value]);
  const scrolled = all("pre, .scroll", place).map(box => [box.scrollTop, box.scrollLeft, box.scrollTop + box.clientHeight >= box.scrollHeight - 4]);
  const focus = active && all("a, button, input, summary, pre, .scroll, code", place).indexOf(active);
  place.innerHTML = html; // escaped by the server, and the page's policy lets no script in it run
  for (const box of all("details[id]", place)) if (opened.has(box.id)) box.open = opened.get(box.id);
  for (const box of all("input[type=checkbox]", place)) if (checked.has(box.name + box.value)) box.checked = checked.get(box.name + box.value);
  for (const [name, value] of chosen) if (one(`#${name} option[value="${CSS.escape(value)}"]`)) one(`#${name}`).value = value;
  all("pre, .scroll", place).forEach((box, index) => {
    if (!scrolled[index]) return;
    const [top, left, atEnd] = scrolled[index];
    box.scrollTop = atEnd && box.tagName === "PRE" ? box.scrollHeight : top;
    box.scrollLeft = left;
  });
  if (active) (all("a, button, input, summary, pre, .scroll, code", place)[focus] || place).focus({preventScroll: true});
}

// ---- charts
const readable = name => name.replace("heldout_", "held-out ").replace(/_s$/, "").replaceAll("_", " ");
const SERIES = ["#2466c9", "#c2571a", "#2f8f5b", "#8352b8", "#b3447a", "#5a7d00", "#00808a", "#7a6a52"];
const DARK_SERIES = ["#6ea6ff", "#f0995a", "#63c391", "#bd94ee", "#ef8fb8", "#b4cf5b", "#5cc8d0", "#c9b79a"];
const isDark = matchMedia("(prefers-color-scheme: dark)");
const charts = new Map();
const runs = [];
const UNITS = {step: "step", tokens: "tokens", seconds: "seconds of training", flops: "FLOPs", time: "time"};
function layout(chart) {
  const style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue(name).trim();
  const axis = {gridcolor: color("--line"), linecolor: color("--line"), zerolinecolor: color("--line"), automargin: true, exponentformat: chart.unit === "rate" ? "e" : "SI", title: {standoff: 6}};
  return {
    margin: {l: 52, r: 8, t: 6, b: 40}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
    font: {color: color("--text"), size: 12, family: "system-ui, sans-serif"}, showlegend: chart.traces.size > 1,
    legend: {orientation: "h", y: -.28, font: {size: 11}}, uirevision: "kept",
    xaxis: {...axis, title: {text: UNITS[chart.axis] || chart.axis, standoff: 6}, ...(chart.axis === "time" ? {type: "date"} : {})},
    yaxis: {...axis, title: {text: chart.unit, standoff: 6}, type: chart.log ? "log" : "linear", ...(chart.zero ? {rangemode: "tozero"} : {})},
  };
}
function draw(chart) {
  chart.isDue = false;
  if (!window.Plotly) return; // it is loaded after this script, while the points come
  const palette = isDark.matches ? DARK_SERIES : SERIES;
  const data = [...chart.traces.values()].map(trace => {
    const runIndex = runs.indexOf(trace.run), metrics = [...new Set([...chart.traces.values()].map(other => other.metric))];
    const several = new Set([...chart.traces.values()].map(other => other.run)).size > 1;
    const name = several ? (metrics.length > 1 ? `${trace.run}: ${readable(trace.metric)}` : trace.run) : readable(trace.metric);
    return {x: trace.x, y: trace.y, name, type: "scatter", mode: trace.x.length < 30 ? "lines+markers" : "lines", marker: {size: 5},
      line: {width: 1.8, color: palette[(several ? runIndex : metrics.indexOf(trace.metric)) % palette.length], dash: several && metrics.indexOf(trace.metric) % 2 ? "dash" : "solid"}};
  });
  const last = data.map(trace => `${trace.name} ${Number(trace.y[trace.y.length - 1]).toPrecision(4)}`).join(", ");
  chart.plot.setAttribute("aria-label", `${chart.title} over ${UNITS[chart.axis]}; at the end ${last}`);
  const options = {displaylogo: false, responsive: true, displayModeBar: false};
  return Plotly.react(chart.plot, data, layout(chart), options);
}
const seen = new IntersectionObserver(entries => { // what is out of sight is drawn when it comes into view
  for (const entry of entries) {
    const chart = charts.get(entry.target.dataset.title);
    chart.isSeen = entry.isIntersecting;
    if (chart.isSeen && chart.isStale) drawSoon(chart);
  }
}, {rootMargin: "200px"});
function drawSoon(chart) {
  chart.isStale = !chart.isSeen;
  if (chart.isDue || chart.isStale) return;
  chart.isDue = true;
  requestAnimationFrame(() => draw(chart));
}
function takeCurves(message) {
  const place = one("[data-charts]");
  if (!place) return;
  for (const fresh of message.charts) {
    let chart = charts.get(fresh.title);
    if (!chart) {
      const card = document.createElement("figure");
      card.className = "card chart";
      const head = document.createElement("h3"), plot = document.createElement("div");
      head.textContent = fresh.title;
      plot.className = "plot";
      plot.setAttribute("role", "img");
      plot.setAttribute("aria-label", fresh.title); // until it is drawn, with its last values
      card.append(head, plot);
      place.append(card);
      charts.set(fresh.title, chart = {title: fresh.title, plot, traces: new Map(), isSeen: place.childElementCount < 4});
      card.dataset.title = fresh.title;
      seen.observe(card);
    }
    Object.assign(chart, {unit: fresh.unit, log: fresh.log, zero: fresh.zero, axis: message.axis});
    for (const trace of fresh.traces) {
      if (!runs.includes(trace.run)) runs.push(trace.run);
      const key = `${trace.run}\n${trace.metric}`, old = chart.traces.get(key);
      if (trace.since < 0 || !old) { chart.traces.set(key, trace); continue; }
      let keep = old.x.length;
      while (keep && old.x[keep - 1] >= trace.since) keep--;
      chart.traces.set(key, {...trace, x: [...old.x.slice(0, keep), ...trace.x], y: [...old.y.slice(0, keep), ...trace.y]});
    }
    drawSoon(chart);
  }
  if (message.share < 1) say(`The metrics are being read: ${Math.floor(100 * message.share)} %`);
  else if (one("#notice").textContent.startsWith("The metrics")) say("");
  place.dataset.points = String([...charts.values()].reduce((sum, chart) => sum + [...chart.traces.values()].reduce((inner, trace) => inner + trace.x.length, 0), 0));
}
isDark.addEventListener("change", () => charts.forEach(drawSoon));
addEventListener("DOMContentLoaded", () => charts.forEach(drawSoon)); // after all scripts

// ---- events: one connection for each visible page, because browsers allow six
let events = null;
function listen() {
  if (events || document.hidden) return;
  events = new EventSource(document.body.dataset.events);
  events.addEventListener("block", event => { const {id, html} = JSON.parse(event.data); exchange(id, html); });
  events.addEventListener("curves", event => takeCurves(JSON.parse(event.data)));
  events.onopen = () => { if (one("#notice").dataset.isLost) { delete one("#notice").dataset.isLost; say(""); } };
  events.onerror = () => {
    say("The board does not answer. What it has started goes on; start it again with the same command.");
    one("#notice").dataset.isLost = "1";
    if (events.readyState === EventSource.CLOSED) { events = null; setTimeout(listen, 2000); }
  };
}
document.addEventListener("visibilitychange", () => {
  if (document.hidden && events) { events.close(); events = null; } else listen();
});

// ---- dropped files
async function upload(file) {
  say(`${file.name} is copied ...`);
  const reply = await fetch(`/upload?name=${encodeURIComponent(file.name)}`, {method: "PUT", body: file, headers: {"X-CSRF": CSRF}});
  const result = await reply.json();
  if (!reply.ok) return say(result.error || "The file was refused.");
  location.assign(`/data?sources=${encodeURIComponent(result.path)}`);
}
function prepareDrop(box) {
  one("input[type=file]", box).addEventListener("change", event => { if (event.target.files[0]) upload(event.target.files[0]); });
  for (const name of ["dragover", "dragleave", "drop"]) box.addEventListener(name, event => {
    event.preventDefault();
    box.classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files[0]) upload(event.dataTransfer.files[0]);
  });
}

// ---- talk: one question to two models, with the same seed
async function* pieces(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (text + value).split("\n\n");
    text = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}
async function answer(form, side) {
  const box = one(`#answer-${side}`), server = form.elements[`server_${side}`].value;
  box.textContent = "";
  if (!server) return "";
  const body = {server, question: form.elements.question.value, seed: form.elements.seed.value, temperature: form.elements.temperature.value, max_tokens: form.elements.max_tokens.value};
  try {
    const reply = await fetch("/talk/ask", {method: "POST", body: new URLSearchParams(body), headers: {"X-CSRF": CSRF}});
    if (!reply.ok) throw new Error((await reply.json()).error);
    for await (const event of pieces(reply)) {
      if (event.error) throw new Error(event.error.message || event.error);
      box.textContent += event.choices?.[0]?.delta?.content || "";
    }
    return box.textContent;
  } catch (error) { box.textContent = ""; say(`Model ${side.toUpperCase()}: ${error.message}`); return null; }
}
function prepareTalk(form) {
  let asked = null;
  const votes = all("[data-vote]");
  form.addEventListener("submit", async event => {
    event.preventDefault();
    say(form.elements.server_a.value ? "" : "Serve a model first, by the form below.");
    votes.forEach(button => { button.disabled = true; });
    const question = form.elements.question.value;
    const [a, b] = await Promise.all([answer(form, "a"), answer(form, "b")]);
    asked = {question, a, b};
    if (a && b && a !== b) votes.forEach(button => { button.disabled = false; });
    else if (a && b) say("Both answers are the same; there is nothing to choose.");
  });
  for (const button of votes) button.addEventListener("click", async () => {
    const [chosen, rejected] = button.dataset.vote === "a" ? [asked.a, asked.b] : [asked.b, asked.a];
    const body = new URLSearchParams({question: asked.question, chosen, rejected});
    const reply = await fetch("/talk/vote", {method: "POST", body, headers: {"X-CSRF": CSRF}});
    const result = await reply.json();
    say(reply.ok ? `Vote ${result.votes} is kept.` : result.error);
    votes.forEach(other => { other.disabled = true; });
  });
}

prepareForms(document);
all(".drop").forEach(prepareDrop);
all("[data-talk]").forEach(prepareTalk);
all("[data-goes]").forEach(form => form.addEventListener("change", () => form.requestSubmit()));
for (const box of all("pre[data-end]")) box.scrollTop = box.scrollHeight;
listen();
addEventListener("pagehide", () => { if (events) { events.close(); events = null; } });
addEventListener("pageshow", listen);
