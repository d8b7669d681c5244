"""The status page: one file without external resources, which draws what /status.json returns."""

PAGE = """<!doctype html>
<meta charset="utf-8">
<title>dadplug: serving</title>
<style>
  body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; max-width: 70em; color: #222 }
  h2 { font-size: 1em; margin: 1.2em 0 .2em } svg { width: 100%; height: 9em; background: #f6f6f6 }
  table { border-collapse: collapse } td, th { text-align: left; padding: .1em 1em .1em 0 }
  .error { color: #b00020 }
</style>
<h1>Serving</h1>
<p id="message"></p>
<table id="models"></table>
<div id="charts"></div>
<script>
const COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f"];

// Lines of one chart: {name: [[seconds, value], ...]}.
function charts(state) {
  const seconds = state.history, found = {};
  const line = (chart, name, value) => {
    const points = seconds.map(s => [s.time, value(s)]).filter(p => p[1] !== undefined && p[1] !== null);
    if (points.length) (found[chart] = found[chart] || {})[name] = points;
  };
  const served = s => s.requests > s.failures;
  line("Latency in ms", "p50", s => served(s) ? 1000 * s.p50 : null);
  line("Latency in ms", "p99", s => served(s) ? 1000 * s.p99 : null);
  line("Latency in ms", "goal", s => 1000 * state.slo);
  line("Requests a second", "all", s => s.requests);
  line("Requests a second", "failed", s => s.failures);
  line("Requests a second", "above the goal", s => s.above_goal);
  for (const model of Object.keys(state.models)) line("Batch size", model, s => s.batches[model]);
  line("Share of cache hits", "hits", s => s.lookups ? s.hits / s.lookups : null);
  for (const context of new Set(seconds.flatMap(s => Object.keys(s.weights))))
    for (const model of Object.keys(state.models))
      line("Weights" + (context ? " in " + context : ""), model, s => (s.weights[context] || {})[model]);
  return found;
}

const escaped = text => String(text).replace(/[&<>"']/g, c => "&#" + c.charCodeAt(0) + ";");

function svg(lines) {
  const points = Object.values(lines).flat(), times = points.map(p => p[0]);
  const first = Math.min(...times), last = Math.max(...times, first + 1);
  const top = Math.max(...points.map(p => p[1]), 1e-9) * 1.1;
  const at = p => (50 + 700 * (p[0] - first) / (last - first)).toFixed(1) + "," + (95 - 90 * p[1] / top).toFixed(1);
  const names = Object.keys(lines), colour = i => COLOURS[i % COLOURS.length];
  const path = (name, i) => lines[name].length > 1
    ? `<polyline fill="none" stroke="${colour(i)}" stroke-width="1.5" points="${lines[name].map(at).join(" ")}"/>`
    : `<circle r="2" fill="${colour(i)}" cx="${at(lines[name][0]).split(",")[0]}" ` +
      `cy="${at(lines[name][0]).split(",")[1]}"/>`;
  const label = (name, i) => {
    const value = lines[name][lines[name].length - 1][1];
    return `<text x="760" y="${14 + 13 * i}" font-size="11" fill="${colour(i)}">${escaped(name)} ` +
      `${value.toPrecision(3)}</text>`;
  };
  return `<svg viewBox="0 0 900 100" preserveAspectRatio="none"><text x="2" y="12" font-size="10">` +
    `${top.toPrecision(2)}</text><text x="2" y="97" font-size="10">0</text>` +
    names.map(path).join("") + names.map(label).join("") + "</svg>";
}

function page(state) {
  const found = charts(state);
  return Object.keys(found).map(name => `<h2>${escaped(name)}</h2>${svg(found[name])}`).join("");
}

function table(state) {
  const columns = ["ready", "version", "restarts", "waiting", "batch_limit", "pid"];
  const row = name => "<tr><td>" + escaped(name) + "</td>" +
    columns.map(c => `<td>${escaped(state.models[name][c])}</td>`).join("") + "</tr>";
  return "<tr><th>model</th>" + columns.map(c => `<th>${c}</th>`).join("") + "</tr>" +
    Object.keys(state.models).map(row).join("");
}

async function update() {
  const message = document.getElementById("message");
  try {
    const answer = await fetch("status.json");
    if (!answer.ok) throw new Error("status " + answer.status);
    const state = await answer.json();
    document.getElementById("models").innerHTML = table(state);
    document.getElementById("charts").innerHTML = page(state);
    message.textContent = state.history.length ? "" : "No requests yet.";
    message.className = "";
  } catch (error) {
    message.textContent = "The server does not answer: " + error.message;
    message.className = "error";
  }
  setTimeout(update, 1000);
}
if (typeof document !== "undefined") update();
</script>
"""
