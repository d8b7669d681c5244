"""The status page: one file without external resources, which draws what /status.json returns."""

PAGE = """<!doctype html>
<meta charset="utf-8">
<title>dadplug: serving</title>
<style>
  body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; max-width: 70em; color: #222 }
  h2 { font-size: 1em; margin: 1.4em 0 .2em }
  table { border-collapse: collapse } td, th { text-align: left; padding: .1em 1.2em .1em 0 }
  .chart { display: grid; grid-template-columns: 4em 1fr 13em; font-size: 12px }
  .chart svg { width: 100%; height: 8em; background: #f6f6f6; grid-column: 2 }
  .scale, .times { display: flex; justify-content: space-between; color: #666 }
  .scale { flex-direction: column; text-align: right; padding-right: .5em; grid-column: 1 }
  .times { grid-column: 2 }
  .legend { padding-left: 1em; grid-column: 3 } .legend span { display: block }
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

const text = value => value >= 100 ? value.toFixed(0) : String(+value.toPrecision(3));
const clock = seconds => new Date(1000 * seconds).toLocaleTimeString();

// The next of 1, 2, 5, 10, 20, 50, ... or their fractions.
function rounded(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find(each => each * power >= value * 0.999);
}

function chart(lines) {
  const points = Object.values(lines).flat(), times = points.map(p => p[0]);
  const first = Math.min(...times), last = Math.max(...times, first + 1);
  const top = rounded(Math.max(...points.map(p => p[1])) || 1);
  const at = p => (1000 * (p[0] - first) / (last - first)).toFixed(1) + "," + (97 - 94 * p[1] / top).toFixed(1);
  const names = Object.keys(lines), colour = i => COLOURS[i % COLOURS.length];
  // A line of one point is repeated: its round ends are then a dot.
  const path = (name, i) => {
    const drawn = lines[name].length > 1 ? lines[name] : [lines[name][0], lines[name][0]];
    return `<polyline fill="none" stroke="${colour(i)}" stroke-width="${lines[name].length > 1 ? 1.5 : 5}" ` +
      `stroke-linecap="round" vector-effect="non-scaling-stroke" points="${drawn.map(at).join(" ")}"/>`;
  };
  const label = (name, i) => {
    const value = lines[name][lines[name].length - 1][1];
    return `<span style="color: ${colour(i)}">${escaped(name)} ${text(value)}</span>`;
  };
  return `<div class="chart"><div class="scale"><span>${text(top)}</span><span>0</span></div>` +
    `<svg viewBox="0 0 1000 100" preserveAspectRatio="none">${names.map(path).join("")}</svg>` +
    `<div class="legend">${names.map(label).join("")}</div>` +
    `<div class="times"><span>${clock(first)}</span><span>${clock(last)}</span></div></div>`;
}

function page(state) {
  const found = charts(state);
  return Object.keys(found).map(name => `<h2>${escaped(name)}</h2>${chart(found[name])}`).join("");
}

function table(state) {
  const columns = ["ready", "version", "restarts", "last_good", "waiting", "batch_limit", "pid"];
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
