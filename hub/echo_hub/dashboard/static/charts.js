// Draws the operator's charts from /api/v1/curves and /api/v1/run; live.js says when there is more.
"use strict";
(() => {
  let width = 0; // Steps a point stands for.
  let points = [];
  let run = null;
  let busy = false;
  let again = false;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const LOG_TICKS = [-3, -2, -1, 0, 1, 2, 3, 4, 5].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
  const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: "reset" };

  const lastStep = () => (points.length ? points[points.length - 1].step : 0);
  const end = () => Math.max(lastStep(), 10) * 1.02;
  const of = (name) => points.map((p) => p[name]);

  // The range that holds `values`, with air; in powers of ten on a logarithmic axis.
  function range(values, over) {
    const known = values.filter((value) => Number.isFinite(value) && (!over.log || value > 0));
    if (over.log) {
      const lowest = Math.log10(Math.min(...known, 1));
      const highest = Math.log10(Math.max(...known, 1));
      const air = Math.max(highest - lowest, 0.2) * 0.08;
      return [lowest - air, Math.max(highest, lowest + 0.2) + air];
    }
    const highest = Math.max(...known, over.atLeast ?? 0);
    return [Math.min(...known, 0) * 1.08, highest > 0 ? highest * 1.08 : 1];
  }

  function layout(values, over) {
    const axis = {
      gridcolor: color("grid"),
      linecolor: color("line"),
      zeroline: false,
      fixedrange: true,
      automargin: true,
      tickfont: { size: 11 },
      ticks: "",
      layer: "below traces",
    };
    return {
      margin: { l: 38, r: 8, t: 6, b: 26 },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { family: getComputedStyle(document.body).fontFamily, color: color("muted"), size: 11 },
      showlegend: false,
      hovermode: "x unified",
      hoverlabel: { bgcolor: color("panel"), bordercolor: color("line"), font: { color: color("ink") } },
      xaxis: { ...axis, range: [0, end()], showgrid: false, tickformat: ",d", nticks: over.small ? 4 : undefined },
      yaxis: {
        ...axis,
        range: range(values, over),
        dtick: over.dtick,
        ...(over.log ? { type: "log", tickvals: LOG_TICKS } : {}),
        nticks: over.small ? 5 : undefined,
        tickformat: over.format,
        exponentformat: "power",
      },
    };
  }

  function line(values, name, stroke, thickness, extra) {
    const alone = points.length === 1;
    return {
      x: of("step"),
      y: values,
      name,
      mode: alone ? "markers" : "lines",
      line: { color: stroke, width: thickness, ...extra },
      marker: { color: stroke, size: 6 },
      hovertemplate: "%{y:.3~g}",
    };
  }

  // A curve over evaluated versions and its band of one standard error.
  function measured(rows, value, error, name, stroke, symbol) {
    const x = rows.map((e) => e.policy_version);
    const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    return [
      { ...edge, y: rows.map((e) => e[value] + e[error]) },
      { ...edge, y: rows.map((e) => e[value] - e[error]), fill: "tonexty", fillcolor: `${stroke}2e` },
      {
        x,
        y: rows.map((e) => e[value]),
        name,
        mode: "lines+markers",
        line: { color: stroke, width: 1, dash: "dot" },
        cliponaxis: false,
        marker: { color: stroke, size: rows.length > 40 ? 5 : 10, symbol, line: { color: color("ground"), width: 1.5 } },
        hovertemplate: "%{y:.1%}",
      },
    ];
  }

  function drawLearning() {
    const evaluations = run === null ? [] : run.evaluations;
    const sampled = evaluations.filter((e) => e.mean_at_k !== null);
    const rewards = of("mean_reward");
    const traces = [
      ...measured(sampled, "mean_at_k", "mean_at_k_error", "held-out mean@k", color("sampled"), "circle"),
      ...measured(evaluations, "accuracy", "accuracy_error", "held-out greedy", color("accuracy"), "diamond"),
      line(rewards, "mean reward", color("reward"), 2),
    ];
    const heights = [...rewards, ...evaluations.map((e) => e.accuracy + e.accuracy_error)];
    Plotly.react("chart-reward", traces, layout(heights, { atLeast: 0.95 }), config);

    const bound = run === null ? 0 : run.max_staleness;
    const largest = of("staleness_max");
    Plotly.react(
      "chart-staleness",
      [
        { ...line([bound, bound], "bound", color("muted"), 1.5, { dash: "dot" }), x: [0, end()], mode: "lines", hoverinfo: "skip" },
        line(largest, "max", color("staleness-faint"), 1.5, { shape: "hv" }),
        line(of("staleness_mean"), "mean", color("staleness"), 2),
      ],
      layout([...largest, bound], { atLeast: 1, dtick: bound <= 6 ? 1 : undefined }),
      config,
    );
    const speed = of("rollouts_per_s");
    Plotly.react("chart-speed", [line(speed, "rollouts/s", color("speed"), 2)], layout(speed, { atLeast: 1 }), config);
  }

  // The learner's charts: the page says which lines, [field, name, colour], each has.
  function drawHealth() {
    for (const chart of document.querySelectorAll("[data-lines]")) {
      const lines = JSON.parse(chart.dataset.lines);
      const over = "shares" in chart.dataset ? { atLeast: 0.1, format: ".0%" } : { log: "log" in chart.dataset };
      const traces = lines.map(([field, name, stroke]) => line(of(field), name, color(stroke), 1.5));
      const values = lines.flatMap(([field]) => of(field));
      Plotly.react(chart, traces, layout(values, { small: true, ...over }), config);
    }
  }

  function draw() {
    drawLearning();
    drawHealth();
    drawSpread();
  }

  // How long each version took to reach half, nearly all and all nodes.
  function drawSpread() {
    const versions = run === null ? [] : run.versions.filter((v) => v.dissemination_max_s !== null).reverse();
    const x = versions.map((v) => v.policy_version);
    const lines = [["dissemination_max_s", "all", "accuracy"], ["dissemination_p95_s", "95 %", "staleness"], ["dissemination_p50_s", "half", "speed"]];
    const traces = lines.map(([field, name, stroke]) => ({
      ...line(versions.map((v) => v[field]), name, color(stroke), 1.5),
      x,
      mode: versions.length === 1 ? "markers" : "lines",
    }));
    const shown = layout(versions.map((v) => v.dissemination_max_s), { small: true });
    shown.xaxis.range = x.length > 1 ? [x[0], x[x.length - 1]] : undefined;
    Plotly.react("chart-spread", traces, shown, config);
  }

  function take(news) {
    if (news.width !== width) points = [];
    width = news.width;
    // The last point may have grown.
    if (news.points.length && width > 1 && points.length) {
      const bucket = (step) => Math.floor((step - 1) / width);
      if (bucket(points[points.length - 1].step) === bucket(news.points[0].step)) points.pop();
    }
    points.push(...news.points);
  }

  async function load() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      do {
        again = false;
        const asked = [fetch(`/api/v1/curves?width=${width}&since=${lastStep()}`), fetch("/api/v1/run")];
        const answers = await Promise.all(asked);
        if (!answers.every((answer) => answer.ok)) return;
        const [news, now] = await Promise.all(answers.map((answer) => answer.json()));
        if (run !== null && now.run_id !== run.run_id) {
          location.reload(); // Another run is behind this address now.
          return;
        }
        run = now;
        take(news);
        draw();
      } while (again);
    } catch {
      // The hub went away in between; the next `changed` loads what is missing.
    } finally {
      busy = false;
    }
  }

  document.addEventListener("echo:changed", load);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  load();
})();
